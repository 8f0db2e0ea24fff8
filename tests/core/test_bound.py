"""Sums and standard errors of bounds, against loops and against many draws."""

import math

import pytest
import torch

from blockdiff.core.blocks import split_blocks
from blockdiff.core.bound import Bound, bound_sums, position_nats
from blockdiff.core.corruption import NoiseKey, corrupt, evaluation_noise


def test_position_nats_are_a_loop_over_masked_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_BKL = torch.rand(2, 3, 8, generator=generator, dtype=torch.float64)
    chosen_M = torch.randperm(48, generator=generator)[:20].sort().values
    nll_M = torch.rand(20, generator=generator)
    expected = torch.zeros(2, 3, 8, dtype=torch.float64)
    for position, nll in zip(chosen_M.tolist(), nll_M.tolist(), strict=True):
        b, k, i = position // 24, position // 8 % 3, position % 8
        expected[b, k, i] += nll * weight_BKL[b, k, i]
    torch.testing.assert_close(position_nats(nll_M, weight_BKL, chosen_M), expected, rtol=1e-12, atol=0)


def test_standard_error_is_the_spread_over_repeated_noise() -> None:
    """With the same data, bounds over new noise scatter as the mean reported variance says."""
    nll_L = torch.linspace(0.5, 3.0, 16)
    counted_BL = torch.ones(1, 16, dtype=torch.bool)
    bounds = []
    for seed in range(400):
        noised = corrupt(
            torch.zeros(1, 16, dtype=torch.int64),
            counted_BL,
            block_size=4,
            mask_id=9,
            noise=evaluation_noise(2),
            key=NoiseKey(seed, 0, torch.tensor([5]), 1),
        )
        chosen_M = noised.masked_BKL.flatten().nonzero().squeeze(-1)
        nats = split_blocks(position_nats(nll_L[chosen_M % 16], noised.weight_BKL, chosen_M), 4).sum(-1)
        bounds.append(Bound.from_sums(bound_sums(nats, counted_BL)))
    spread = torch.tensor([bound.nats for bound in bounds]).var().item()
    reported = sum(bound.variance for bound in bounds) / len(bounds)
    assert reported == pytest.approx(spread, rel=0.2)
    # Here −log p does not depend on what is masked, so the bound's expectation is the plain sum.
    mean = sum(bound.nats for bound in bounds) / len(bounds)
    assert mean == pytest.approx(nll_L.sum().item(), abs=4 * math.sqrt(spread / len(bounds)))


def test_a_single_view_has_no_spread() -> None:
    sums = bound_sums(torch.rand(2, 1, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.bool))
    assert Bound.from_sums(sums).standard_error == 0.0


def test_uncounted_positions_are_not_tokens() -> None:
    counted_BL = torch.tensor([[True, True, False, False]])
    assert Bound.from_sums(bound_sums(torch.ones(1, 2, 2, dtype=torch.float64), counted_BL)).tokens == 2


def test_merge_adds_and_units_follow() -> None:
    both = Bound(6.0, 4.0, 2).merge(Bound(2.0, 5.0, 2))
    assert (both.nats, both.variance, both.tokens) == (8.0, 9.0, 4)
    assert both.nelbo == 2.0
    assert both.standard_error == 0.75
    assert both.perplexity == pytest.approx(math.e**2)
    assert both.perplexity_error == pytest.approx(0.75 * math.e**2)
    assert both.bits_per_byte(4.0) == pytest.approx(2 / math.log(2) / 4)


def test_nothing_scored_is_nan_and_not_an_error() -> None:
    assert math.isnan(Bound().nelbo)
    assert math.isnan(Bound().standard_error)
