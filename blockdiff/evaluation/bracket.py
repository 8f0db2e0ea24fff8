"""A two-sided bracket of the likelihood of blocks too large to enumerate.

Legend: B batch, K random orders, L window length, N blocks, S block size.

With w(σ) = Π_k p(x_σk | x_σ1 … x_σ(k−1), x^{<b}), the likelihood of a block is z = E w(σ) over uniform orders σ.
K independent orders bracket log z in expectation:

* below by log of the mean of K weights (importance weighting: Burda et al., "Importance weighted autoencoders",
  2016), which rises to log z with K and at K = 1 is the bound that `blockdiff.evaluation.likelihood` reports;
* above by the tangent of the logarithm at any c > 0 that the weights at hand do not depend on, log z ≤ z/c − 1 + log c
  (TUBE, arXiv 2605.24292). For each order c is the mean weight of the K − 1 others.

Both ends are unbiased estimates of bounds, not bounds of each draw; averaged over many blocks they hold. Where the
logarithms of the weights spread over several nats, few large weights carry the upper end and it needs many orders.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockdiff.core.blocks import split_blocks
from blockdiff.core.bound import EVALUATION_SEED
from blockdiff.core.randomness import Stream, hash_counters
from blockdiff.evaluation.masked import VIEWS_PER_PASS, masked_log_probs
from blockdiff.model.denoiser import Denoiser

_LAST = torch.iinfo(torch.int64).max


def bracket_block_nats(
    denoiser: Denoiser,
    tokens_BL: Tensor,
    document_BL: Tensor,
    counted_BL: Tensor,
    sample_B: Tensor,
    *,
    block_size: int,
    orders: int,
    seed: int = EVALUATION_SEED,
    views_per_pass: int = VIEWS_PER_PASS,
) -> tuple[Tensor, Tensor]:
    """Lower and upper estimate of −log p(x^b | x^{<b}) of every block in nats, float64 (B, N) each.

    Args:
        denoiser: evaluated as it is, on the tokens' device.
        tokens_BL: int64 clean tokens.
        document_BL: document of each position.
        counted_BL: bool; other positions are padding, hidden from all.
        sample_B: int64, what each row's orders are drawn from.
        block_size: S.
        orders: K ≥ 2; each costs S views of the text.
        seed: of the orders.
        views_per_pass: views that one forward pass holds; changes nothing but time and memory.

    Raises:
        ValueError: fewer than two orders.
    """
    if orders < 2:
        raise ValueError(f"orders={orders} must be at least 2: the upper end needs others to compare each order with")
    place_BKL = draw_orders(counted_BL, sample_B, block_size, orders, seed)
    log_w_BKN = torch.zeros(*place_BKL.shape[:2], tokens_BL.shape[1] // block_size, dtype=torch.float64)
    log_w_BKN = log_w_BKN.to(tokens_BL.device)
    for step in range(block_size):
        wanted_BKL = (place_BKL == step) & counted_BL[:, None]
        masked_BKL = (place_BKL >= step) & counted_BL[:, None]
        log_p_BKL = masked_log_probs(
            denoiser,
            tokens_BL,
            document_BL,
            counted_BL,
            masked_BKL,
            wanted_BKL,
            block_size=block_size,
            views_per_pass=views_per_pass,
        )
        log_w_BKN += split_blocks(log_p_BKL, block_size).sum(-1)
    return -tangent_upper(log_w_BKN, 1), -importance_lower(log_w_BKN, 1)


def draw_orders(counted_BL: Tensor, sample_B: Tensor, block_size: int, orders: int, seed: int) -> Tensor:
    """int64 (B, K, L): the step at which each counted position is revealed, uniform over the orders of its block.

    Positions that are not counted come last. A pure function of seed, sample, order and position.
    """
    order_K1 = torch.arange(orders, device=sample_B.device)[:, None]
    position_L = torch.arange(counted_BL.shape[1], device=sample_B.device)
    words_BKL = hash_counters(seed, Stream.VALIDATION, sample_B[:, None, None], order_K1, position_L)
    words_BKL = torch.where(counted_BL[:, None], words_BKL, _LAST)
    return split_blocks(words_BKL, block_size).argsort(dim=-1, stable=True).argsort(dim=-1).flatten(-2)


def importance_lower(log_w: Tensor, dim: int) -> Tensor:
    """log of the mean weight: at most log z in expectation."""
    return log_w.logsumexp(dim) - math.log(log_w.shape[dim])


def tangent_upper(log_w: Tensor, dim: int) -> Tensor:
    """Mean over k of w_k / c_k − 1 + log c_k, c_k the mean of the other weights: at least log z in expectation."""
    others = log_w.shape[dim] - 1
    index = torch.arange(log_w.shape[dim], device=log_w.device)
    log_c = torch.stack(
        [log_w.index_select(dim, index[index != k]).logsumexp(dim) - math.log(others) for k in index.tolist()], dim
    )
    return ((log_w - log_c).exp() - 1 + log_c).mean(dim)
