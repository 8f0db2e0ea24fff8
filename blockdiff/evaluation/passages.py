"""Which passages of validation text serve as prompts and as the ceiling, and their shuffled floor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blockdiff.data.store import TokenStore
from blockdiff.evaluation.config import SamplesConfig
from blockdiff.evaluation.judge import Passage


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
