"""Fits noise to what training has measured: pure functions from measurements to q(n), or to an interval of times.

Legend: M masked positions, D width, S block size, Q blocks (of all views), G cells that measurements fall into.

Measurements are summed as whole numbers of a small quantum: such sums are the same in any order, so they do not depend
on how a batch is split over micro-batches and processes, nor on when a run was interrupted.
"""

from __future__ import annotations

import bisect
import functools

import torch
from torch import Tensor

from blockdiff.core.corruption import CLIP_CELLS, NoiseConfig, ViewKind
from blockdiff.core.counts import make_law, prior_law

COUNT_CELLS = 16
"""Counts of large blocks share cells: so many, finer towards small counts."""

QUANTUM = 2.0**-24
LARGEST = 2.0**16
"""Measurements are cut off here, so that sums of millions of them stay within 64 bits."""

PSEUDO = 8.0
"""Observations of the common mean that each cell is taken to have had already."""

MIN_CLIP_CELLS = 5
"""No searched interval is shorter than half of the time, as in BD3-LM."""

MARGIN = 0.05
"""By what share of its variance an interval must beat the present one."""

Interval = tuple[int, int]
"""[low, high) in cells of time."""


def tally(cell_Q: Tensor, cells: int, *measured: Tensor) -> Tensor:
    """Sums by cell: observations in the first row, one row of whole numbers of `QUANTUM` for each measured quantity.

    Args:
        cell_Q: int64, the cell of each observation; negative ones are left out.
        cells: G.
        measured: non-negative, each of shape (Q).

    Returns:
        int64 (1 + measured, G).
    """
    kept_Q = cell_Q >= 0
    rows = [kept_Q.to(torch.int64)]
    for values_Q in measured:
        finite_Q = values_Q.to(torch.float64).nan_to_num(nan=LARGEST).clamp(max=LARGEST)
        rows.append(torch.where(kept_Q, (finite_Q / QUANTUM).round().to(torch.int64), 0))
    sums = torch.zeros(len(rows), cells, dtype=torch.int64, device=cell_Q.device)
    return sums.index_add_(1, cell_Q.clamp(min=0), torch.stack(rows))


# q(n).


@functools.lru_cache(maxsize=16)
def count_cells(block_size: int) -> Tensor:
    """The cell of each count 1..S, int64 of shape (S): one each up to `COUNT_CELLS`, beyond that of growing size."""
    if block_size <= COUNT_CELLS:
        return torch.arange(block_size)
    ends = sorted({round(block_size ** (cell / COUNT_CELLS)) for cell in range(1, COUNT_CELLS + 1)})
    return torch.tensor([bisect.bisect_left(ends, n) for n in range(1, block_size + 1)])


def gradient_moments(
    slope_MD: Tensor, weight_M: Tensor, chosen_M: Tensor, blocks: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """For each block a squared gradient that its masked tokens make together, over their number n; and n.

    The gradient is that of Σ −log p with respect to a shift of the block's last hidden states, ‖Σ_i slope_i‖²: it costs
    no further pass, and unlike Σ −log p it knows whether the tokens' gradients add up or are independent.

    Args:
        slope_MD: gradient of the positions' weighted −log p with respect to their last hidden states.
        weight_M: their weights, positive.
        chosen_M: int64, the masked positions as flat indices, blocks lying end to end.
        blocks: Q.
        block_size: S.

    Returns:
        float64 (Q), 0 for blocks without a masked token; int64 (Q).
    """
    block_M = chosen_M // block_size
    dtype = torch.promote_types(slope_MD.dtype, torch.float32)
    slope_MD = slope_MD.to(dtype) / weight_M[:, None].to(dtype)
    sum_QD = torch.zeros(blocks, slope_MD.shape[1], dtype=dtype, device=slope_MD.device)
    square_Q = sum_QD.index_add_(0, block_M, slope_MD).square().sum(1, dtype=torch.float64)
    count_Q = torch.zeros(blocks, dtype=torch.int64, device=slope_MD.device)
    count_Q.index_add_(0, block_M, torch.ones_like(block_M))
    return square_Q / count_Q.clamp(min=1), count_Q


def fit_law(sums_2G: Tensor, noise: NoiseConfig, block_size: int) -> Tensor:
    """The law of counts that minimises the second moment of a block's weighted gradient (docs/maths.md).

    With s(n) = a(n) · n the second moment of Σ_M of the masked tokens' gradients, that is q(n) ∝ √(a(n) / n); in
    complementary pairs q(n) ∝ ½ √(a(n) / n + a(C − n) / (C − n)), and q(C) ∝ √(a(C) / C). A share of q(n) ∝ n^(−p)
    stays, and bounds the weights.

    Args:
        sums_2G: float64 observations and sums of a(n), by cell (`count_cells`).
        noise: whose `view_kind`, `count_power` and `fit_prior` count.
        block_size: S.

    Returns:
        The law (S + 1), on the CPU (`core.counts`).
    """
    observed_G, sum_G = sums_2G.cpu()
    prior_S1 = prior_law(noise.count_power, block_size, torch.device("cpu"))
    if not sum_G.sum() > 0:
        return prior_S1
    common = sum_G.sum() / observed_G.sum()
    a_S = ((sum_G + PSEUDO * common) / (observed_G + PSEUDO))[count_cells(block_size)]
    square_S = a_S / torch.arange(1, block_size + 1, dtype=torch.float64)
    if noise.view_kind is ViewKind.complementary:
        square_S[:-1] = (square_S[:-1] + square_S[:-1].flip(0)) / 4
    fitted_S, prior_S = square_S.sqrt(), prior_S1.diff()
    share = noise.fit_prior
    return make_law((1 - share) * fitted_S / fitted_S.sum() + share * prior_S / prior_S.sum())


# The interval of times.


def clip_variances(sums_3G: Tensor) -> dict[Interval, float]:
    """The variance of a block's estimate, in nats per token, under each interval of at least `MIN_CLIP_CELLS` cells.

    An interval is a mixture of its cells with equal shares, so the moments measured within the cells serve all
    intervals, and all are compared on the same tokens with the same random numbers.

    Args:
        sums_3G: float64 observations, sums of the estimate and sums of its square, by cell of time.
    """
    first_G, second_G = (sums_3G[1:] / sums_3G[0]).cpu()
    spans = [(low, high) for low in range(CLIP_CELLS) for high in range(low + MIN_CLIP_CELLS, CLIP_CELLS + 1)]
    return {span: variance_within(first_G, second_G, span) for span in spans}


def variance_within(first_G: Tensor, second_G: Tensor, span: Interval) -> float:
    """The variance under one interval, from the first and second moments within cells."""
    return float(second_G[slice(*span)].mean() - first_G[slice(*span)].mean() ** 2)


def search_clip(sums_3G: Tensor, current: Interval, challenger: Interval | None) -> tuple[Interval, Interval | None]:
    """The next interval, and the one that may replace it at the next search.

    An interval replaces the present one when its variance was lower by `MARGIN` twice in a row.

    Args:
        sums_3G: as of `clip_variances`.
        current: the present interval.
        challenger: the interval that won the last search.
    """
    first_G, second_G = (sums_3G[1:] / sums_3G[0]).cpu()
    variances = clip_variances(sums_3G)
    bar = (1 - MARGIN) * variance_within(first_G, second_G, current)
    if challenger is not None and variances[challenger] < bar:
        return challenger, None
    best = min(variances, key=lambda span: variances[span])
    return current, best if variances[best] < bar else None
