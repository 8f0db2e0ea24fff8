"""One row of the batch, as the host knows it: its tokens, where it stands, and what it has cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockdiff.sampling.report import Finish, Generation
from blockdiff.sampling.request import Request
from blockdiff.sampling.text import TextStream


@dataclass
class Row:
    """A request at work.

    Positions are absolute, in the request's text; its window begins at `offset`, a multiple of the block
    size.

    Attributes:
        index: of the request.
        request: what is asked for.
        key: of the row's noise.
        tokens: given and made tokens, the mask's id where undecided, filled up to a whole block.
        free: where tokens are to be made.
        end: position behind the last token to be made.
        endless: whether `end` is seq_len for want of a number.
        last_given: position of the last given token: text ends behind it only.
        text: the growing text, None without tokenizer.
        start: of the current block.
        committed: positions whose keys and values are written, counted from 0; those before `offset` are
            forgotten.
        offset: where the window begins.
        shown: position up to which text has been given out.
        calls: NFE so far.
        commit_calls: those that only committed.
        logprobs: of the made tokens, in their order.
        steps: likewise.
    """

    index: int
    request: Request
    key: int
    tokens: list[int]
    free: list[bool]
    end: int
    endless: bool
    last_given: int
    text: TextStream | None
    handed_in: float
    joined: float
    start: int = 0
    committed: int = 0
    offset: int = 0
    shown: int = 0
    calls: int = 0
    commit_calls: int = 0
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    block_seconds: list[float] = field(default_factory=list)
    finish: Finish | None = None

    def open_positions(self, block_size: int) -> list[int]:
        """Positions within the current block that are to be made."""
        stop = min(self.start + block_size, self.end)
        return [position - self.start for position in range(self.start, stop) if self.free[position]]

    def seek(self, position: int, block_size: int) -> bool:
        """Moves to the first block at or behind `position` with something to be made; False if there is
        none."""
        ahead = next((p for p in range(position, self.end) if self.free[p]), None)
        if ahead is None:
            return False
        self.start = ahead // block_size * block_size
        return True

    def slide(self, block_size: int, seq_len: int, keep: int) -> bool:
        """Forgets the oldest blocks if the current one would leave the window; True if it did."""
        if self.start + block_size - self.offset <= seq_len:
            return False
        self.offset = self.start - keep
        self.committed = self.offset
        return True

    def settle(
        self, ids_S: list[int], logp_S: list[float] | None, step_S: list[int] | None, eos_id: int | None
    ) -> list[int]:
        """Takes in a finished block and returns its new tokens; cuts at the end of text."""
        new = []
        stop = min(self.start + len(ids_S), self.end)
        for position in range(self.start, stop):
            if not self.free[position]:
                continue
            place = position - self.start
            if ids_S[place] == eos_id and position > self.last_given:
                self.finish, self.end = Finish.eos, position
                break
            self.tokens[position] = ids_S[place]
            new.append(ids_S[place])
            if logp_S is not None and step_S is not None:
                self.logprobs.append(logp_S[place])
                self.steps.append(step_S[place])
        return new

    def give_text(self, stop: int) -> str:
        """The text that has become certain, up to position `stop`; meeting a stop string ends the row
        there."""
        if self.text is None or self.finish is Finish.stop:
            return ""
        ids = self.tokens[self.shown : stop]
        first, self.shown = self._first_shown, stop
        piece = self.text.push(ids)
        if self.text.stopped:
            self.finish, self.end = Finish.stop, first + self.text.kept
        return piece

    @property
    def shown_end(self) -> int:
        """Where the finished text ends: behind what was made, and behind what was given after the last
        hole."""
        whole = self.request.holes and self.finish is Finish.length
        return max(self.end, len(self.request.tokens)) if whole else self.end

    @property
    def _first_shown(self) -> int:
        """Where the text that is given out begins: behind a prompt, at the start of a text with holes."""
        return 0 if self.request.holes else len(self.request.tokens)

    def generation(self, *, logprobs: bool) -> Generation:
        """The finished text; `give_text` has been called up to the end."""
        assert self.finish is not None, "a row that goes on has no result"
        given, behind = len(self.request.tokens), self.shown_end
        made = sum(self.free[: self.end])
        return Generation(
            text="" if self.text is None else self.text.text,
            token_ids=self.tokens[self._first_shown : behind],
            nfe=self.calls,
            finish_reason=self.finish.value,
            prompt_tokens=given - sum(length for _, length in self.request.holes),
            new_tokens=made,
            commit_nfe=self.commit_calls,
            holes=[self.tokens[s : min(s + length, behind)] for s, length in self.request.holes],
            logprobs=self.logprobs[:made] if logprobs else None,
            steps=self.steps[:made] if logprobs else None,
            queue_s=self.joined - self.handed_in,
            ttft_s=self.block_seconds[0] if self.block_seconds else 0.0,
            block_seconds=self.block_seconds,
        )
