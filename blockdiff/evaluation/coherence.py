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
from blockdiff.evaluation.intervals import Interval, mean_interval, ratio_interval
from blockdiff.evaluation.judge import Judgement
from blockdiff.evaluation.passages import Passage
from blockdiff.evaluation.syntax import parses, parses_to_last_statement


@dataclass
class Coherence:
    """Measures of a set of texts. Every field of shares lies in [0, 1]; NaN: not to be had.

    Attributes:
        texts: their number.
        empty: those without a single new token.
        new_tokens: of all texts.
        judge_tokens: of the judge's own, that it judged.
        judge_nats: nats per token of the judge, with its interval over texts.
        judge_bits_per_byte: the same text in bits per UTF-8 byte: one unit for judges of any vocabulary.
        border_nats: nats of the judge's tokens that begin in the first token of a block, less the others, over texts.
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
    judge_tokens: int
    judge_nats: Interval
    judge_bits_per_byte: Interval
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
    judged: Sequence[Judgement],
    real: Sequence[Judgement],
    training: TrainingText,
    block_size: int,
) -> Coherence:
    """Measures samples.

    Args:
        groups: for each prompt its candidates.
        texts: where the corpus is Python, each sample's whole text (prompt included), in order; else None.
        judged: what a judge says of each sample, in order; none leaves the judge's columns empty.
        real: what it says of real text of the same shape, for the distance.
        training: to look for copies in.
        block_size: S, which tells borders.
    """
    passages = [passage for group in groups for passage in group]
    new = [passage.new for passage in passages]
    matches = [training.longest_match(ids) for ids in new]
    lengths = np.array([len(ids) for ids in new])
    return Coherence(
        texts=len(passages),
        empty=sum(not ids for ids in new),
        new_tokens=int(lengths.sum()),
        judge_tokens=sum(len(judgement.nats_M) for judgement in judged),
        judge_nats=judge_interval(judged),
        judge_bits_per_byte=byte_interval(judged),
        border_nats=border_interval(judged, block_size),
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
        energy_distance=_distance(judged, real),
    )


def judge_interval(judged: Sequence[Judgement]) -> Interval:
    """Nats per judged token, with the text as the unit that is resampled."""
    return ratio_interval(_nats(judged), np.array([len(judgement.nats_M) for judgement in judged], dtype=np.float64))


def byte_interval(judged: Sequence[Judgement]) -> Interval:
    """Bits per byte of judged text, with the text as the unit that is resampled."""
    size = np.array([judgement.byte_count for judgement in judged], dtype=np.float64)
    return ratio_interval(_nats(judged) / math.log(2), size)


def border_interval(judged: Sequence[Judgement], block_size: int) -> Interval:
    """Mean over texts of the judge's nats at the first positions of blocks, less those at the others.

    Texts that have only one kind are left out. The first block of a text has no border.
    """
    differences = []
    for judgement in judged:
        kept = judgement.place_M >= block_size
        border = kept & (judgement.place_M % block_size == 0)
        inside = kept & ~border
        if border.any() and inside.any():
            differences.append(judgement.nats_M[border].mean() - judgement.nats_M[inside].mean())
    return mean_interval(np.array(differences, dtype=np.float64))


def _nats(judged: Sequence[Judgement]) -> NDArray[np.float64]:
    return np.array([judgement.nats_M.sum() for judgement in judged], dtype=np.float64)


def _distance(judged: Sequence[Judgement], real: Sequence[Judgement]) -> float:
    samples, references = _features(judged), _features(real)
    return energy_distance(samples, references) if min(len(samples), len(references)) > 1 else math.nan


def _features(judged: Sequence[Judgement]) -> NDArray[np.float64]:
    found = [judgement.feature_D for judgement in judged if judgement.feature_D is not None]
    return np.stack(found) if found else np.zeros((0, 0))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
