"""Fitted distributions of counts and searched intervals against loops, closed forms and enumeration."""

import math

import pytest
import torch

from blockdiff.core.corruption import CorruptionKind, NoiseConfig, ViewKind
from blockdiff.core.counts import prior_law
from blockdiff.core.fitting import (
    COUNT_CELLS,
    QUANTUM,
    clip_variances,
    count_cells,
    fit_law,
    gradient_moments,
    search_clip,
    tally,
)
from blockdiff.core.objective import weighted_nll

PAIRS = NoiseConfig(views=2, view_kind=ViewKind.complementary)


def test_tally_is_a_loop_and_the_same_in_any_order():
    generator = torch.Generator().manual_seed(0)
    cell = torch.randint(-1, 5, (300,), generator=generator)
    values = torch.rand(2, 300, generator=generator, dtype=torch.float64) * 1e3
    whole = tally(cell, 5, *values)
    order = torch.randperm(300, generator=generator)
    parts = [tally(cell[part], 5, *values[:, part]) for part in order.split(37)]
    assert torch.equal(sum(parts), whole)
    for g in range(5):
        mine = cell == g
        assert whole[0, g] == mine.sum()
        assert (whole[1:, g] * QUANTUM).tolist() == pytest.approx(values[:, mine].sum(1).tolist(), rel=1e-6)


def test_tally_cuts_off_what_is_not_finite():
    sums = tally(torch.zeros(3, dtype=torch.int64), 1, torch.tensor([1.0, torch.inf, torch.nan]))
    assert sums[1, 0] * QUANTUM == 1 + 2 * 2.0**16


@pytest.mark.parametrize("size", [1, 4, 16, 17, 64, 1000])
def test_cells_are_few_in_order_and_fine_where_counts_are_small(size):
    cells = count_cells(size)
    assert len(cells) == size
    assert set(cells.diff().tolist()) <= {0, 1}
    assert cells[0] == 0
    assert cells[-1] < COUNT_CELLS
    if size <= COUNT_CELLS:
        assert torch.equal(cells, torch.arange(size))
    for cell in cells.unique():
        n = (cells == cell).nonzero() + 1
        assert n.max() <= 2 * n.min()


def test_gradient_moments_are_those_of_a_shift_of_the_block_by_autograd():
    """A bias per block on the hidden states, differentiated by autograd."""
    generator = torch.Generator().manual_seed(1)
    blocks, size, width = 5, 4, 6
    head = torch.randn(9, width, generator=generator, dtype=torch.float64)
    chosen = torch.tensor([0, 2, 3, 5, 12, 13, 14, 15, 17])  # block 2 has none
    hidden = torch.randn(9, width, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 9, (9,), generator=generator)
    weight = torch.rand(9, generator=generator, dtype=torch.float64) + 0.1
    total, _ = weighted_nll(hidden, head, target, weight)
    (slope,) = torch.autograd.grad(total, hidden)
    moments, counts = gradient_moments(slope, weight, chosen, blocks, size)
    assert counts.tolist() == [3, 1, 0, 4, 1]
    for block in range(blocks):
        mine = chosen // size == block
        bias = torch.zeros(width, dtype=torch.float64, requires_grad=True)
        logits = (hidden.detach()[mine] + bias) @ head.T
        nll = torch.nn.functional.cross_entropy(logits, target[mine], reduction="sum")
        (gradient,) = torch.autograd.grad(nll, bias)
        expected = float(gradient.square().sum()) / max(int(mine.sum()), 1)
        assert float(moments[block]) == pytest.approx(expected, rel=1e-10)


def second_moment(q_S: torch.Tensor, s_S: torch.Tensor, paired: bool) -> float:
    """Of a block's weighted gradient where that of n masked tokens has s(n) and those of a pair are orthogonal."""
    size = len(q_S)
    q = [0.0, *q_S.tolist()]
    total = 0.0
    for n in range(1, size + 1):
        if paired:
            shares = [(q[m] + q[size - m]) / 2 for m in (n, size - n)]
            parts = [
                s_S[m - 1] / (m * share) ** 2 if m else 0.0 for m, share in zip((n, size - n), shares, strict=True)
            ]
            total += q[n] * float(sum(parts)) / 4
        else:
            total += q[n] * float(s_S[n - 1]) / (n * q[n]) ** 2
    return total


@pytest.mark.parametrize("noise", [NoiseConfig(), PAIRS], ids=["independent", "complementary"])
def test_no_other_distribution_of_counts_has_a_smaller_second_moment(noise):
    """From exact moments and without a share of the prior: the optimum, against its neighbours and the prior."""
    size = 6
    n = torch.arange(1, size + 1, dtype=torch.float64)
    a = torch.tensor([1.0, 0.7, 1.3, 1.5, 2.0, 3.5], dtype=torch.float64)
    observed = torch.full((size,), 1e12, dtype=torch.float64)
    noise.fit_prior = 1e-9
    q = fit_law(torch.stack([observed, a * observed]), noise, size).diff()
    paired = noise.view_kind is ViewKind.complementary
    least = second_moment(q, a * n, paired)
    assert least < second_moment(n**-0.5 / (n**-0.5).sum(), a * n, paired)
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        other = q * (0.1 * torch.randn(size, generator=generator, dtype=torch.float64)).exp()
        assert second_moment(other / other.sum(), a * n, paired) >= least - 1e-12


@pytest.mark.parametrize("noise", [NoiseConfig(count_power=0.25), PAIRS], ids=["independent", "complementary"])
def test_a_share_of_the_prior_bounds_the_weights(noise):
    observed = torch.tensor([1e9, 1e9, 1e9, 1e9], dtype=torch.float64)
    q = fit_law(torch.stack([observed, observed * torch.tensor([1.0, 0.0, 0.0, 1e6])]), noise, 4).diff()
    prior = prior_law(noise.count_power, 4, torch.device("cpu")).diff()
    assert float(q.sum()) == pytest.approx(1)
    assert (q >= noise.fit_prior * prior / prior.sum() * (1 - 1e-12)).all()


def test_independent_terms_give_back_the_default():
    """Where a(n) is constant the minimum is q(n) ∝ n^(−1/2); with no measurement at all the prior stays."""
    sums = torch.stack([torch.full((4,), 50.0), torch.full((4,), 12.5)]).double()
    prior = prior_law(0.5, 4, torch.device("cpu"))
    assert torch.allclose(fit_law(sums, NoiseConfig(), 4), prior / prior[-1])
    assert torch.equal(fit_law(torch.zeros(2, 4, dtype=torch.float64), NoiseConfig(), 4), prior)


def test_large_blocks_share_cells():
    cells = int(count_cells(200).max()) + 1
    sums = torch.stack([torch.full((cells,), 1e6), torch.full((cells,), 3e6)]).double()
    prior = prior_law(0.5, 200, torch.device("cpu"))
    assert torch.allclose(fit_law(sums, NoiseConfig(), 200), prior / prior[-1])


def cell_sums(sample) -> torch.Tensor:
    """Sums of draws (10, R) made in the ten cells of time."""
    ones = torch.ones_like(sample)
    return torch.stack([ones.sum(1), sample.sum(1), (sample**2).sum(1)])


def test_variance_of_an_interval_is_that_of_the_pooled_draws():
    sample = torch.rand(10, 50, dtype=torch.float64) * torch.arange(10, 0, -1, dtype=torch.float64)[:, None]
    variances = clip_variances(cell_sums(sample))
    assert len(variances) == 21
    for (low, high), variance in variances.items():
        assert high - low >= 5
        assert variance == pytest.approx(float(sample[low:high].flatten().var(correction=0)), rel=1e-9)


def test_an_interval_must_win_twice_in_a_row_by_a_margin():
    """Standard deviations by cell; the mean is the same everywhere, so that the variance is a mean of squares."""

    def search(deviation, current, challenger):
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
        return search_clip(cell_sums(5 + torch.tensor(deviation).double()[:, None] * signs), current, challenger)

    whole, middle = (0, 10), (3, 8)
    best_in_the_middle = [3.0, 3, 2, 1, 1, 1, 1, 1, 2, 3]
    current, challenger = search(best_in_the_middle, whole, None)
    assert (current, challenger) == (whole, middle)
    assert search(best_in_the_middle, current, challenger) == (middle, None)
    flat = [2.0] * 10
    assert search(flat, current, challenger) == (whole, None)
    barely = [2.05] * 3 + [2.0] * 5 + [2.05] * 2
    assert search(barely, whole, None) == (whole, None)
    assert search(best_in_the_middle, middle, None) == (middle, None)


def test_variances_in_cells_are_those_of_the_clipped_loss():
    """Stratified over the cells, the pooled draws are draws from the interval: mean and variance by quadrature."""
    from blockdiff.core.corruption import NoiseKey, corrupt

    size, rows = 3, 4000
    counted = torch.ones(rows, size, dtype=torch.bool)
    sums = []
    for cell in range(10):
        noise = NoiseConfig(corruption=CorruptionKind.bernoulli, clip=[cell / 10, (cell + 1) / 10])
        key = NoiseKey(0, 0, torch.arange(rows), rows)
        out = corrupt(counted.long(), counted, block_size=size, mask_id=9, noise=noise, key=key)
        sums.append(out.weight_BKL[:, 0].sum(1) / size)
    variances = clip_variances(cell_sums(torch.stack(sums)))
    for low, high in ((3, 8), (5, 10)):
        # Every −log p is 1: the loss is Binomial(3, t) / 3t, with mean 1 and variance (1 − t) / 3t.
        a, b = low / 10, high / 10
        expected = (math.log(b / a) / (b - a) - 1) / 3
        assert variances[low, high] == pytest.approx(expected, rel=0.05)
