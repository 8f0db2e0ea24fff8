"""The distribution of the number n of masked tokens of a block, drawn from and weighed by.

Legend: S block size; C ≤ S tokens of a block that may be masked.

A *law* is a float64 tensor W(0..S), W(0) = 0, of sums of positive terms w(1) + … + w(n). A block with C tokens draws
n with q(n) = w(n) / W(C) on {1..C}.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_NEVER = torch.iinfo(torch.int64).max


@functools.lru_cache(maxsize=64)
def prior_law(count_power: float, block_size: int, device: torch.device) -> Tensor:
    """The law w(n) = n^(−p), of shape (S + 1)."""
    return make_law(torch.arange(1, block_size + 1, dtype=torch.float64) ** -count_power).to(device)


def make_law(terms_S: Tensor) -> Tensor:
    """The law of float64 terms w(1..S), summed on the CPU so that every device holds the same bits."""
    return torch.cat([torch.zeros(1, dtype=torch.float64), terms_S.cpu().cumsum(0)])


def draw_counts(level_N: Tensor, countable_N: Tensor, law_S1: Tensor) -> Tensor:
    """Turns levels into counts n ~ q by the inverse distribution function.

    Args:
        level_N: float64 in (0, 1), any shape.
        countable_N: int64 of the same shape, C, how many tokens of the block may be masked; 0 gives n = 0.
        law_S1: the law.

    Returns:
        n, int64 of the levels' shape.
    """
    count_N = torch.searchsorted(law_S1[1:], level_N * law_S1[countable_N], right=True) + 1
    return torch.minimum(count_N, countable_N)


def count_weight(count_N: Tensor, countable_N: Tensor, law_S1: Tensor, *, paired: bool = False) -> Tensor:
    """What −log p of each of the n masked tokens of a block counts for: 1 / (n · q(n)).

    In a pair of complementary masks n tokens are masked with q̄(n) = (q(n) + q(C − n)) / 2 on average over both, where
    q(0) = 0, and each counts for 1 / (n · q̄(n)): the balance heuristic of Veach and Guibas, "Optimally combining
    sampling techniques for Monte Carlo rendering" (1995). Only the first mask may be the whole block.

    Args:
        count_N: int64 n, any shape.
        countable_N: int64 of the same shape, C.
        law_S1: the law that n, or the count of its pair's first mask, is drawn from.
        paired: whether the mask is one of a complementary pair.

    Returns:
        float64 of the counts' shape; 0 where n = 0.
    """
    terms_S1 = torch.cat([law_S1[:1], law_S1.diff()])
    share_N = terms_S1[count_N]
    if paired:
        share_N = (share_N + terms_S1[countable_N - count_N]) / 2
    return torch.where(count_N > 0, law_S1[countable_N] / (count_N * share_N), 0.0)


def mask_exactly(words_NS: Tensor, counted_NS: Tensor, count_N: Tensor) -> Tensor:
    """Masks, in each block, the `count_N` counted positions with the smallest random words: a uniform subset.

    Args:
        words_NS: int64 random words (..., S).
        counted_NS: bool (..., S).
        count_N: int64 (...), at most the number of counted positions.
    """
    words_NS = torch.where(counted_NS, words_NS, _NEVER)
    threshold_N1 = words_NS.sort(-1).values.gather(-1, (count_N[..., None] - 1).clamp(min=0))
    return (words_NS <= threshold_N1) & counted_NS & (count_N[..., None] > 0)
