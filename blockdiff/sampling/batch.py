"""The block loop: rows advance together from block border to block border, join there and leave there.

At each border queued requests take free places, given blocks are committed, and the block before is handed to
the first call of the next one, which commits it in passing. Between borders the step rule says which
positions each call fixes.

Legend: B batch, S block size, T clean tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from blockdiff.model.cache import send
from blockdiff.sampling.block import Block, Turn, take_step
from blockdiff.sampling.config import Precision, SamplerConfig, Window
from blockdiff.sampling.logit_rules import LogitRule
from blockdiff.sampling.noise import request_key
from blockdiff.sampling.pace import Pace, pace_of, turns
from blockdiff.sampling.protocols import DenoiserLike, TokenizerLike
from blockdiff.sampling.report import Finish, Generation
from blockdiff.sampling.request import Request, check_request, end_of
from blockdiff.sampling.row import Row
from blockdiff.sampling.text import TextStream

PREFILL_TOKENS = 512
"""Clean tokens a row that one prefill call takes; longer prompts take several, so that masks stay small."""

PACKED_TOKENS = 8
"""Noisy tokens a call from which packed weights pay: a call on fewer waits for memory, whatever the layout."""


@dataclass
class BlockEvent:
    """A block of one row is finished.

    Attributes:
        request: index of the request.
        start: absolute position of the block.
        token_ids: its new tokens, cut where the row ends.
        text: what has become certain of the text since the last event; never a part of a character.
        nfe: the row's calls of the denoiser so far.
        seconds: that the block took.
        generation: the whole result, with the row's last event.
    """

    request: int
    start: int
    token_ids: list[int]
    text: str
    nfe: int
    seconds: float
    generation: Generation | None = None


@dataclass
class StepEvent:
    """A step was taken. What hangs on the device is to be read by those who watch, at their own cost.

    Attributes:
        requests: index of each row's request.
        active: whether each row took part.
        block: state after the step.
        turn: where it acted.
        nfe: each row's calls so far.
    """

    requests: list[int]
    active: list[bool]
    block: Block
    turn: Turn
    nfe: list[int]


class Batch:
    """Rows over one cache. `submit` requests, then `advance` until `idle`."""

    def __init__(
        self,
        denoiser: DenoiserLike,
        config: SamplerConfig,
        *,
        block_size: int,
        seq_len: int,
        tokenizer: TokenizerLike | None = None,
        eos_id: int | None = None,
        places: int | None = None,
        capacity: int | None = None,
        text_by_block: bool = False,
        logit_rule: LogitRule | None = None,
        on_step: Callable[[StepEvent], object] | None = None,
    ) -> None:
        """Args:
            denoiser: called under `torch.inference_mode`.
            config: checked here.
            block_size: S.
            seq_len: positions of a row's window, a multiple of S.
            tokenizer: for texts and stop strings; None gives token ids only.
            eos_id: ends a row; None: the tokenizer's.
            places: rows that are denoised together; None: config.batch_size.
            capacity: positions a place holds; None: seq_len and what rows of unlike length need.
            text_by_block: decode after each block rather than at the end.
            logit_rule: the caller's own rule on logits.
            on_step: called after each step.

        Raises:
            ValueError: a value of the config breaks a rule, or stop strings come without tokenizer.
        """
        config.check(block_size, seq_len, denoiser.vocab_size)
        if config.stop and tokenizer is None:
            raise ValueError(f"stop={config.stop} needs a tokenizer: stop strings are looked for in the text")
        self.config, self.tokenizer = config, tokenizer
        self.block_size, self.seq_len = block_size, seq_len
        self.eos_id = tokenizer.eos_id if eos_id is None and tokenizer is not None else eos_id
        self.places = places or config.batch_size
        self.denoiser = _laid_out(denoiser, config, self.places * block_size)
        self.cache = denoiser.new_cache(self.places, capacity or row_capacity(seq_len, block_size))
        self.rows: list[Row] = []
        self.calls = 0
        self._queue: deque[Row] = deque()
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._submitted = 0
        self._text_by_block = text_by_block or bool(config.stop)
        self._logit_rule, self._on_step = logit_rule, on_step
        self._banned_V = self._banned()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self.rows and not self._queue

    def submit(self, request: Request) -> int:
        """Queues a request and returns its index. Raises a ValueError if it cannot be served."""
        config, index = self.config, self._submitted
        check_request(request, config, vocab_size=self.denoiser.vocab_size, seq_len=self.seq_len, index=index)
        given, end = len(request.tokens), end_of(request, config, self.seq_len)
        length = -(-max(end, given) // self.block_size) * self.block_size
        free = request.free() + [True] * (length - given)
        tokens = [self.denoiser.mask_id if hole else t for hole, t in zip(request.free(), request.tokens, strict=True)]
        content = (given, *tokens)
        seed = config.seed if request.seed is None else request.seed
        row = Row(
            index=index,
            request=request,
            key=request_key(seed, list(content), self._seen[content]),
            tokens=tokens + [self.denoiser.mask_id] * (length - given),
            free=free,
            end=end,
            endless=request.new_tokens is None and config.max_new_tokens is None,
            last_given=request.last_given,
            text=None if self.tokenizer is None else TextStream(self.tokenizer, config.stop),
            handed_in=time.perf_counter(),
            joined=0.0,
        )
        row.shown = 0 if request.holes else given
        self._seen[content] += 1
        self._submitted += 1
        self._queue.append(row)
        return index

    def cancel(self, index: int) -> Generation | None:
        """Takes a request out of batch or queue and frees its place; None if it is no longer there."""
        for row in self._queue:
            if row.index == index:
                self._queue.remove(row)
                return self._close(row, Finish.cancelled)
        for place, row in enumerate(self.rows):
            if row.index == index:
                self._leave(place)
                return self._close(row, Finish.cancelled)
        return None

    @torch.inference_mode()
    def advance(self) -> list[BlockEvent]:
        """Brings every row to its next block border; one event a row."""
        began = time.perf_counter()
        self._admit()
        if not self.rows:
            return []
        self._prepare()
        pending = [row.tokens[row.committed : row.start] for row in self.rows]
        block = self._new_block()
        self._denoise(block, pending)
        ids_BS = block.x_BS.tolist()
        details = self.config.logprobs
        logp_BS, step_BS = (block.logp_BS.tolist(), block.step_BS.tolist()) if details else (None, None)
        seconds = time.perf_counter() - began
        events = []
        for place, row in enumerate(self.rows):
            logp_S = None if logp_BS is None else logp_BS[place]
            step_S = None if step_BS is None else step_BS[place]
            row.block_seconds.append(seconds)
            new = row.settle(ids_BS[place], logp_S, step_S, self.eos_id)
            events.append(self._border(row, new, seconds))
        for place in reversed(range(len(self.rows))):
            if self.rows[place].finish is not None:
                self._leave(place)
        return events

    def _admit(self) -> None:
        while self._queue and len(self.rows) < self.places:
            row = self._queue.popleft()
            row.joined = time.perf_counter()
            found = row.seek(0, self.block_size)
            assert found, "a request has something to be made"
            self.cache.reset(len(self.rows))
            self.rows.append(row)

    def _leave(self, place: int) -> None:
        """Frees a place; the last row closes the gap."""
        last = len(self.rows) - 1
        if place != last:
            self.cache.move(last, place)
            self.rows[place] = self.rows[last]
        else:
            self.cache.reset(place)
        self.rows.pop()

    def _border(self, row: Row, new: list[int], seconds: float) -> BlockEvent:
        """What a finished block means to its row."""
        start, behind = row.start, min(row.start + self.block_size, row.end)
        before = row.end
        text = row.give_text(behind) if self._text_by_block else ""
        if row.finish is Finish.stop:
            new = new[: max(len(new) - (min(before, behind) - row.end), 0)]
        if row.finish is None and not row.seek(start + self.block_size, self.block_size):
            row.finish = Finish.window if row.endless else Finish.length
        generation = None
        if row.finish is not None:
            more, generation = self._finish(row)
            text += more
        return BlockEvent(row.index, start, new, text, row.calls, seconds, generation)

    def _finish(self, row: Row) -> tuple[str, Generation]:
        text = row.give_text(row.shown_end)
        if row.text is not None:
            text += row.text.finish()
        return text, row.generation(logprobs=self.config.logprobs)

    def _close(self, row: Row, reason: Finish) -> Generation:
        row.finish = reason
        row.end = row.start if row.request.holes or row.block_seconds else len(row.request.tokens)
        return self._finish(row)[1]

    def _prepare(self) -> None:
        """Slides full windows and commits what lies before each row's block, its last block excepted."""
        keep = 0
        if self.config.window is Window.sliding:
            keep = self.config.kept_tokens(self.block_size, self.seq_len)
        backlog = []
        for place, row in enumerate(self.rows):
            if keep and row.slide(self.block_size, self.seq_len, keep):
                self.cache.reset(place)
            backlog.append(max(row.start - row.committed - self.block_size, 0))
        place = 0
        while place < len(self.rows):
            stop = place
            while stop < len(self.rows) and backlog[stop]:
                stop += 1
            if stop > place:
                self._prefill(place, stop, backlog[place:stop])
            place = stop + 1

    def _prefill(self, first: int, stop: int, counts: list[int]) -> None:
        """Commits the next `counts` tokens of neighbouring rows, a chunk at a time."""
        chunk = max(PREFILL_TOKENS // self.block_size, 1) * self.block_size
        rows, cache = self.rows[first:stop], self.cache.rows(first, stop)
        for done in range(0, max(counts), chunk):
            lengths = [min(max(count - done, 0), chunk) for count in counts]
            width = max(lengths)
            tokens = []
            for row, length in zip(rows, lengths, strict=True):
                tokens += row.tokens[row.committed : row.committed + length] + [0] * (width - length)
                row.committed += length
                row.calls += length > 0
                row.commit_calls += length > 0
            x0_BT = send(tokens, torch.int64, cache.device).view(len(rows), width)
            self.denoiser.commit(x0_BT, cache, lengths=lengths, block_size=self.block_size)
            self.calls += 1
        self.cache.lengths[first:stop] = cache.lengths

    def _new_block(self) -> Block:
        """The rows' current blocks on the device."""
        rows, size, device = self.rows, self.block_size, self.cache.device
        tokens = [row.tokens[row.start : row.start + size] for row in rows]
        free = [[row.free[p] and p < row.end for p in range(row.start, row.start + size)] for row in rows]
        free_BS = send(free, torch.bool, device)
        start_B = send([row.start for row in rows], torch.int64, device)
        position_BS = start_B[:, None] + torch.arange(size, device=device)
        eos_allowed_BS = None
        if self.eos_id is not None and any(row.last_given >= row.start for row in rows):
            last_B = send([row.last_given if row.request.holes else -1 for row in rows], torch.int64, device)
            eos_allowed_BS = position_BS > last_B[:, None]
        zero_B = torch.zeros(len(rows), dtype=torch.int64, device=device)
        exact = torch.float64 if self.config.precision is Precision.exact else torch.float32
        exact = torch.promote_types(self.cache.keys[0].dtype, exact)
        return Block(
            x_BS=send(tokens, torch.int64, device),
            open_BS=free_BS.clone(),
            free_BS=free_BS,
            position_BS=position_BS,
            key_B=send([row.key for row in rows], torch.int64, device),
            mask_id=self.denoiser.mask_id,
            eos_id=self.eos_id,
            eos_allowed_BS=eos_allowed_BS,
            seen_BV=self._seen_tokens() if self.config.repetition_penalty != 1.0 else None,
            banned_V=self._banned_V,
            step_BS=torch.zeros(len(rows), size, dtype=torch.int64, device=device),
            logp_BS=torch.zeros(len(rows), size, dtype=exact, device=device),
            accepted_B=zero_B,
            remasked_B=zero_B.clone(),
        )

    def _seen_tokens(self) -> torch.Tensor:
        """Bool (B, V + 1): the tokens before each row's block; holes that are yet to be filled mark the
        mask's column."""
        width = max(row.start for row in self.rows)
        mask_id = self.denoiser.mask_id
        ids = [row.tokens[: row.start] + [mask_id] * (width - row.start) for row in self.rows]
        ids_BP = send(ids, torch.int64, self.cache.device).view(len(self.rows), width)
        seen_BV = torch.zeros(len(ids), mask_id + 1, dtype=torch.bool, device=self.cache.device)
        return seen_BV.scatter_(1, ids_BP, True)

    def _banned(self) -> torch.Tensor | None:
        if not self.config.banned_tokens:
            return None
        banned_V = torch.zeros(self.denoiser.vocab_size, dtype=torch.bool)
        banned_V[self.config.banned_tokens] = True
        return banned_V.to(self.cache.device)

    def _denoise(self, block: Block, pending: list[list[int]]) -> None:
        """Takes the steps of one block; the first call commits what is pending."""
        rows, size, config = self.rows, self.block_size, self.config
        key_B = torch.tensor([row.key for row in rows])
        position_BS = torch.tensor([row.start for row in rows])[:, None] + torch.arange(size)
        lengths = [len(tokens) for tokens in pending]
        filled = [tokens + [0] * (size - len(tokens)) for tokens in pending]
        calls = [0] * len(rows)
        open_by_row = [row.open_positions(size) for row in rows]
        pace = pace_of(config)
        for turn in turns(block, open_by_row, config, key_B, position_BS, calls):
            if turn.step == 0 and any(lengths):
                x0_BS = send(filled, torch.int64, self.cache.device)
                logits = self.denoiser.commit_and_denoise(
                    x0_BS, block.x_BS, self.cache, turn.chosen_BM, lengths=lengths
                )
            else:
                logits = self.denoiser.denoise(block.x_BS, self.cache, turn.chosen_BM)
            self.calls += 1
            take_step(
                block,
                turn,
                logits,
                config,
                logit_rule=self._logit_rule,
                stop_at_eos=pace is Pace.adaptive,
                planned=pace is Pace.planned,
            )
            if self._on_step is not None:
                active = [len(open_) > 0 and calls[row] == turn.step + 1 for row, open_ in enumerate(open_by_row)]
                nfe = [row.calls + count for row, count in zip(rows, calls, strict=True)]
                self._on_step(StepEvent([row.index for row in rows], active, block, turn, nfe))
        for row, count, length in zip(rows, calls, lengths, strict=True):
            row.calls += count
            row.committed += length


def _laid_out(denoiser: DenoiserLike, config: SamplerConfig, tokens: int) -> DenoiserLike:
    """The denoiser in the form that serves a run of calls on so many noisy tokens best."""
    if config.compile:
        return denoiser.compiled()
    return denoiser.packed() if config.pack and tokens >= PACKED_TOKENS else denoiser


def row_capacity(positions: int, block_size: int) -> int:
    """Positions a place in the cache needs for rows of up to `positions`.

    Rows that commit nothing in a call that commits for others write one block of filling, which needs room.
    """
    blocks = -(-positions // block_size)
    return blocks * block_size + (block_size if blocks > 1 else 0)
