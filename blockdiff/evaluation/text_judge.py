"""A causal language model with a tokenizer of its own as judge: it reads the text that passages stand for.

Legend: B batch, L length of the longest row, V the judge's vocabulary, D width, M judged tokens.

The whole text of a passage, prompt and all, is cut into the judge's tokens, as the judge was trained to read it. A
token belongs to where it begins: one that straddles the end of the prompt is given, not judged, and one that straddles
a block's border counts for the block it begins in. Texts begin with the judge's beginning token where it has one; else
the first token of a text is read and not judged, as nothing stands before it. Text beyond the judge's context is read
in windows, each half new and half given.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from blockdiff.core.objective import token_nll
from blockdiff.data.tokenizer import Tokenizer
from blockdiff.evaluation.judge import Judgement
from blockdiff.evaluation.passages import Passage, pad_passages, rolling_windows
from blockdiff.model.pretrained import PretrainedLM

LOGITS_PER_PASS = 2**26
"""Numbers of a batch's logits: 256 MiB in single precision. A single row may have more."""


@dataclass
class TextJudge:
    """A pretrained model.

    Attributes:
        model: that reads.
        tokenizer: of the passages.
        batch_size: windows a forward pass, at most; changes no judgement.
    """

    model: PretrainedLM
    tokenizer: Tokenizer
    batch_size: int = 16

    @property
    def description(self) -> str:
        """Who judges, and in which tokens."""
        model = self.model
        count = sum(weight.numel() for weight in model.model.parameters())
        begins = f"texts begin with {model.bos}" if model.bos else "the first token of a text is not judged"
        context = f"windows of {model.context:,} tokens" if model.context else "texts of any length"
        return (
            f"{model.path} (Hugging Face, {type(model.model).__name__}, {count:,} parameters) with a tokenizer of its "
            f"own (vocabulary of {model.vocab_size:,}; {begins}; {context})"
        )

    def read(self, passages: Sequence[Passage]) -> list[Judgement]:
        """Judges passages."""
        readings = [self._reading(passage) for passage in passages]
        rows = [(index, window) for index, reading in enumerate(readings) for window in self._windows(reading)]
        nats: list[list[NDArray[np.float64]]] = [[] for _ in passages]
        hidden: list[list[NDArray[np.float64]]] = [[] for _ in passages]
        for (index, _), (nats_M, hidden_MD) in zip(rows, self._scores([window for _, window in rows]), strict=True):
            nats[index].append(nats_M)
            hidden[index].append(hidden_MD)
        return [
            Judgement(
                np.concatenate(nats[index]),
                reading.place_M,
                reading.byte_count,
                np.concatenate(hidden[index]).mean(0),
            )
            if nats[index]
            else Judgement.empty()
            for index, reading in enumerate(readings)
        ]

    def _reading(self, passage: Passage) -> _Reading:
        text, starts = text_and_starts(self.tokenizer, passage.tokens)
        ids, begins = self.model.encode(text)
        border = starts[len(passage.given)] if passage.new else len(text)
        first = int(np.searchsorted(begins, border))
        if self.model.bos_id is None:
            first = max(first, 1)
        judged = begins[first:]
        return _Reading(
            Passage(ids[:first], ids[first:]),
            np.searchsorted(starts, judged, side="right") - 1,
            len(text[judged[0] :].encode()) if judged else 0,
        )

    def _windows(self, reading: _Reading) -> list[Passage]:
        bos = [] if self.model.bos_id is None else [self.model.bos_id]
        room = (self.model.context or len(bos) + len(reading.passage.tokens)) - len(bos)
        return [Passage(bos + part.given, part.new) for part in rolling_windows(reading.passage, room)]

    def _scores(self, windows: Sequence[Passage]) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Nats (M) and predicting hidden states (M, D) of each window's new tokens."""
        found: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        for part in self._batches(windows):
            counts = [len(windows[index].new) for index in part]
            nats_M, hidden_MD = self._read_batch([windows[index] for index in part])
            for index, nats_m, hidden_mD in zip(part, nats_M.split(counts), hidden_MD.split(counts), strict=True):
                found[index] = nats_m.cpu().numpy(), hidden_mD.cpu().numpy()
        return [found[index] for index in range(len(windows))]

    def _batches(self, windows: Sequence[Passage]) -> Iterator[list[int]]:
        """Indices of windows of like length, as many as memory allows."""
        order = sorted(range(len(windows)), key=lambda index: len(windows[index].tokens), reverse=True)
        start = 0
        while start < len(order):
            longest = len(windows[order[start]].tokens)
            rows = min(max(LOGITS_PER_PASS // (longest * self.model.vocab_size), 1), self.batch_size)
            yield order[start : start + rows]
            start += rows

    def _read_batch(self, windows: Sequence[Passage]) -> tuple[Tensor, Tensor]:
        device = next(self.model.model.parameters()).device
        tokens_BL, given_BL, new_BL = pad_passages(windows, device)
        logits_BLV, hidden_BLD = self.model.read(tokens_BL, given_BL | new_BL)
        row_M, place_M = new_BL.nonzero(as_tuple=True)
        # The state at one position predicts the token at the next.
        nats_M = token_nll(logits_BLV[row_M, place_M - 1], tokens_BL[row_M, place_M])
        return nats_M.double(), hidden_BLD[row_M, place_M - 1].double()


class _Reading(NamedTuple):
    """A passage in the judge's tokens: given and judged ones, the passage's token each judged one begins in, bytes."""

    passage: Passage
    place_M: NDArray[np.int64]
    byte_count: int


def text_and_starts(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text of ids, and for each id how many characters of it begin before the id's first byte.

    The character that begins in an id thus has a number from its start up to below the next id's; an id that only ends
    a character begins with the next one.
    """
    if not tokenizer.byte_level:
        text = tokenizer.decode(ids)
        return text, [min(len(tokenizer.decode(ids[:place])), len(text)) for place in range(len(ids))]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, starts = "", []
    for index in ids:
        unfinished, _ = decoder.getstate()
        # Mostly one character, but a decoder also waits behind what can begin none: the first two bytes of a surrogate.
        starts.append(len(text) + len(unfinished.decode("utf-8", "replace")))
        text += decoder.decode(tokenizer.decode_bytes([index]))
    return text + decoder.decode(b"", final=True), starts
