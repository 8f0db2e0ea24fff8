"""Repetition and diversity of token sequences. All values are shares in [0, 1] except the entropy.

Generative perplexity alone is met best by a model that repeats itself, so these stand next to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

Tokens = Sequence[int]

LONGEST_PERIOD = 64
SHORTEST_RUN = 3


def unigram_entropy(texts: Sequence[Tokens]) -> float:
    """Entropy in nats of the token frequencies over all texts; 0 without tokens."""
    counts = Counter(token for text in texts for token in text)
    total = counts.total()
    return -sum(n / total * math.log(n / total) for n in counts.values())


def distinct(texts: Sequence[Tokens], order: int) -> float:
    """Distinct n-grams of all texts over their number (Li et al., 2016); NaN where no text is that long.

    It falls with the number of tokens, so only sets of equal size may be compared.
    """
    grams = [gram for text in texts for gram in ngrams(text, order)]
    return len(set(grams)) / len(grams) if grams else math.nan


def repeated(texts: Sequence[Tokens], order: int) -> float:
    """Share of n-grams that occurred before in the same text (Welleck et al., 2020: seq-rep-n), over all texts."""
    counts = [Counter(ngrams(text, order)) for text in texts]
    total = sum(count.total() for count in counts)
    return 1 - sum(len(count) for count in counts) / total if total else math.nan


def loop_share(text: Tokens) -> float:
    """Share of tokens within loops: stretches that one period of at most 64 tokens fills at least three times over."""
    looping = bytearray(len(text))
    for period in range(1, min(LONGEST_PERIOD, len(text) // SHORTEST_RUN) + 1):
        run = 0  # tokens in a row that equal the one a period before
        for place in range(period, len(text)):
            run = run + 1 if text[place] == text[place - period] else 0
            if run >= period * (SHORTEST_RUN - 1):
                begin = place - run - period + 1
                looping[begin : place + 1] = b"\x01" * (place + 1 - begin)
    return sum(looping) / len(text) if len(text) else math.nan


def self_overlap(candidates: Sequence[Tokens], order: int = 4) -> float:
    """Mean over pairs of candidates of the share of distinct n-grams that they have in common (Jaccard).

    0: the candidates have nothing in common; 1: they are alike. NaN with fewer than two candidates of `order` tokens.
    """
    sets = [set(ngrams(text, order)) for text in candidates]
    pairs = [(a, b) for a, b in combinations(sets, 2) if a or b]
    return sum(len(a & b) / len(a | b) for a, b in pairs) / len(pairs) if pairs else math.nan


def ngrams(text: Tokens, order: int) -> list[tuple[int, ...]]:
    """All n-grams of a text, in order."""
    return list(zip(*(text[start:] for start in range(order)), strict=False))
