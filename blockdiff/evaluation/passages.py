"""Passages of text: as rows of a batch, cut to a context, and which of the validation text are continued.

Legend: B batch, L length of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockdiff.data.store import TokenStore
from blockdiff.evaluation.config import SamplesConfig


@dataclass
class Passage:
    """Some text.

    Attributes:
        given: ids that are read but not scored.
        new: ids that are scored.
    """

    given: list[int]
    new: list[int]

    @property
    def tokens(self) -> list[int]:
        """All ids."""
        return [*self.given, *self.new]


def pad_passages(passages: Sequence[Passage], device: torch.device, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that are filled up behind each passage, to whole multiples of the longest.

    Returns:
        int64 tokens_BL, and bool given_BL and new_BL; what is neither is padding.
    """
    longest = max((len(passage.tokens) for passage in passages), default=0)
    length = -(-max(longest, 1) // multiple) * multiple
    tokens_BL = torch.zeros(len(passages), length, dtype=torch.int64)
    given_BL = torch.zeros(len(passages), length, dtype=torch.bool)
    new_BL = torch.zeros(len(passages), length, dtype=torch.bool)
    for row, passage in enumerate(passages):
        cut, end = len(passage.given), len(passage.tokens)
        tokens_BL[row, :end] = torch.tensor(passage.tokens, dtype=torch.int64)
        given_BL[row, :cut] = True
        new_BL[row, cut:end] = True
    return tokens_BL.to(device), given_BL.to(device), new_BL.to(device)


def rolling_windows(passage: Passage, length: int) -> list[Passage]:
    """Passages of at most `length` tokens that hold each new token once, behind at least half a window of text.

    Or behind all of the text, where that is shorter. A passage that fits is one window.
    """
    tokens, start = passage.tokens, len(passage.given)
    windows = []
    while start < len(tokens):
        end = min(len(tokens), max(length, start + max(length // 2, 1)))
        windows.append(Passage(tokens[max(end - length, 0) : start], tokens[start:end]))
        start = end
    return windows


@dataclass
class Passages:
    """Passages of real text.

    Attributes:
        passages: given and following tokens, whose beginnings are continued.
        others: as many others that lie between them, which samples and real text alike are held against.
        origin: where they were cut, for the report.
    """

    passages: list[Passage]
    others: list[Passage]
    origin: str


def choose_passages(store: TokenStore, config: SamplesConfig) -> Passages:
    """Passages spread evenly over a split: the beginnings of documents where enough of them are long enough.

    Else (few long documents) passages are cut from within documents at even distances.

    Raises:
        ValueError: fewer than four passages can be cut.
    """
    wanted = config.prompt_tokens + config.new_tokens
    length_D = np.diff(store.offsets)
    long_D = np.nonzero(length_D >= wanted)[0]
    count = 2 * config.prompts
    if len(long_D) >= count:
        chosen = long_D[np.arange(count) * len(long_D) // count]
        starts = store.offsets[chosen].tolist()
        origin = "the beginnings of validation documents"
    else:
        starts = _inner_starts(store, long_D.tolist(), wanted, count)
        origin = "passages cut from within validation documents"
    if len(starts) < 4:
        raise ValueError(
            f"the validation documents have room for {len(starts)} passages of {wanted} tokens, and 4 are needed: "
            f"lower samples.prompt_tokens={config.prompt_tokens} or samples.new_tokens={config.new_tokens} (the "
            f"longest document has {length_D.max(initial=0)} tokens)"
        )
    passages = [
        Passage(ids[: config.prompt_tokens], ids[config.prompt_tokens :])
        for ids in (store.tokens[start : start + wanted].tolist() for start in starts)
    ]
    return Passages(passages[::2], passages[1::2], origin)


def _inner_starts(store: TokenStore, documents: list[int], wanted: int, count: int) -> list[int]:
    """`count` of the places at which passages can be cut without overlap, spread evenly; all where there are fewer."""
    places = [
        int(start)
        for document in documents
        for start in range(int(store.offsets[document]), int(store.offsets[document + 1]) - wanted + 1, wanted)
    ]
    taken = min(count, len(places))
    return [places[index * len(places) // taken] for index in range(taken)]


def shuffled(passages: list[Passage], seed: int) -> list[Passage]:
    """The same passages, the new tokens of each in random order: the floor of coherence, with the same words."""
    generator = np.random.default_rng(seed)
    return [Passage(p.given, [p.new[i] for i in generator.permutation(len(p.new))]) for p in passages]


def without_prompt(passages: list[Passage]) -> list[Passage]:
    """The passages' beginnings as texts of their own: what samples without a prompt are held against."""
    return [Passage([], [*p.given, *p.new][: len(p.new)]) for p in passages]
