"""One row of the coherence table: everything that is measured on a set of samples, or on real text in their place.

Nothing is filtered or drawn again: empty texts are counted, and what cannot be computed on them is left out by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockdiff.evaluation.copies import TrainingText
from blockdiff.evaluation.distance import energy_distance
from blockdiff.evaluation.diversity import distinct, loop_share, repeated, self_overlap, unigram_entropy
from blockdiff.evaluation.intervals import Interval, ratio_interval
from blockdiff.evaluation.judge import Judge, Judgement, Passage
from blockdiff.evaluation.syntax import parses, parses_to_last_statement


@dataclass
class Coherence:
    """Measures of a set of texts. Every field of shares lies in [0, 1]; NaN: not to be had.

    Attributes:
        texts: their number.
        empty: those without a single new token.
        new_tokens: of all texts.
        judge_nats: the judge's nats per new token, with its interval over texts.
        border_nats: those of tokens at the first position of a block, less the others, over texts.
        unigram_entropy: nats.
        distinct_1, distinct_2, distinct_3: distinct n-grams over n-grams.
        repeated_4: 4-grams that occurred before in their text.
        loops: tokens within loops.
        self_overlap: 4-grams that candidates of one prompt share.
        match_mean, match_longest: tokens of the longest stretch that stands in the training text.
        parses, parses_to_last: share of texts that are Python, whole or up to the last statement; NaN for other text.
        energy_distance: from real text in the judge's hidden states.
    """

    texts: int
    empty: int
    new_tokens: int
    judge_nats: Interval
    border_nats: Interval
    unigram_entropy: float
    distinct_1: float
    distinct_2: float
    distinct_3: float
    repeated_4: float
    loops: float
    self_overlap: float
    match_mean: float
    match_longest: int
    parses: float
    parses_to_last: float
    energy_distance: float

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def measure_coherence(
    groups: Sequence[Sequence[Passage]],
    texts: Sequence[str] | None,
    *,
    judge: Judge | None,
    real: Sequence[Passage],
    training: TrainingText,
    block_size: int,
) -> Coherence:
    """Measures samples.

    Args:
        groups: for each prompt its candidates.
        texts: where the corpus is Python, each sample's whole text (prompt included), in order; else None.
        judge: None leaves the judge's columns empty.
        real: real text of the same shape, for the distance.
        training: to look for copies in.
        block_size: S, which tells borders.
    """
    passages = [passage for group in groups for passage in group]
    new = [passage.new for passage in passages]
    judged = judge.read(passages) if judge is not None else []
    matches = [training.longest_match(ids) for ids in new]
    lengths = np.array([len(ids) for ids in new])
    return Coherence(
        texts=len(passages),
        empty=sum(not ids for ids in new),
        new_tokens=int(lengths.sum()),
        judge_nats=judge_interval(judged),
        border_nats=border_interval(passages, judged, block_size),
        unigram_entropy=unigram_entropy(new),
        distinct_1=distinct(new, 1),
        distinct_2=distinct(new, 2),
        distinct_3=distinct(new, 3),
        repeated_4=repeated(new, 4),
        loops=_mean([loop_share(ids) for ids in new if ids]),
        self_overlap=_mean([overlap for g in groups if not math.isnan(overlap := self_overlap([p.new for p in g]))]),
        match_mean=_mean(matches),
        match_longest=max(matches, default=0),
        parses=math.nan if texts is None else _mean([parses(text) for text in texts]),
        parses_to_last=math.nan if texts is None else _mean([parses_to_last_statement(text) for text in texts]),
        energy_distance=_distance(judged, judge.read(real) if judge is not None else []),
    )


def judge_interval(judged: Sequence[Judgement]) -> Interval:
    """Nats per judged token, with the text as the unit that is resampled."""
    nats = np.array([judgement.nats_M.sum() for judgement in judged])
    return ratio_interval(nats, np.array([len(judgement.nats_M) for judgement in judged], dtype=np.float64))


def border_interval(passages: Sequence[Passage], judged: Sequence[Judgement], block_size: int) -> Interval:
    """Mean over texts of the judge's nats at the first positions of blocks, less those at the others.

    Texts that have only one kind are left out. The first block of a text has no border.
    """
    differences = []
    for passage, judgement in zip(passages if judged else [], judged, strict=True):
        place = len(passage.given) + np.arange(len(passage.new))
        kept = place >= block_size
        border, inside = kept & (place % block_size == 0), kept & (place % block_size > 0)
        if border.any() and inside.any():
            differences.append(judgement.nats_M[border].mean() - judgement.nats_M[inside].mean())
    value = np.array(differences, dtype=np.float64)
    return ratio_interval(value, np.ones_like(value))


def _distance(judged: Sequence[Judgement], real: Sequence[Judgement]) -> float:
    samples, references = _features(judged), _features(real)
    return energy_distance(samples, references) if min(len(samples), len(references)) > 1 else math.nan


def _features(judged: Sequence[Judgement]) -> NDArray[np.float64]:
    found = [judgement.feature_D for judgement in judged if judgement.feature_D is not None]
    return np.stack(found) if found else np.zeros((0, 0))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
