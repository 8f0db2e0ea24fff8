"""Exact counts and Bernoulli corruption against enumeration, and their invariance to how a batch is split."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from blockdiff.core.corruption import (
    CorruptionKind,
    NoiseConfig,
    NoiseKey,
    corrupt,
    draw_counts,
    draw_levels,
    evaluation_noise,
)
from blockdiff.core.schedule import Schedule

MASK = 99


def run(
    noise,
    *,
    batch=8,
    length=16,
    block_size=4,
    seed=0,
    step=0,
    slots=None,
    slot_B=None,
    counted=None,
    given=None,
):
    slot_B = torch.arange(batch) if slot_B is None else slot_B
    x0 = torch.arange(length).expand(len(slot_B), -1)
    counted = torch.ones_like(x0, dtype=torch.bool) if counted is None else counted
    key = NoiseKey(seed, step, slot_B, slots or len(slot_B))
    return corrupt(x0, counted, block_size=block_size, mask_id=MASK, noise=noise, key=key, given_BL=given)


def nll_table(size: int) -> dict[tuple[int, ...], Fraction]:
    """An arbitrary −log p(x_i | x_{not M}) for each mask M and i in M, as exact numbers."""
    masks = [m for m in itertools.product((0, 1), repeat=size) if any(m)]
    return {(*m, i): Fraction((7 * k + 13 * i) % 29 + 1, 3) for k, m in enumerate(masks) for i in range(size) if m[i]}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_exact_count_bound_equals_bernoulli_bound_by_enumeration(size, power):
    """E over counts of weight · Σ nll against ∫ dt 1/t Σ_M t^|M| (1−t)^(S−|M|) Σ nll, in closed form (Beta
    function)."""
    table = nll_table(size)
    bernoulli, exact = 0.0, 0.0
    levels = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    counts, weights = draw_counts(levels, torch.full((200_000,), size), size, power)
    for mask in itertools.product((0, 1), repeat=size):
        n = sum(mask)
        if n == 0:
            continue
        total = float(sum(table[(*mask, i)] for i in range(size) if mask[i]))
        beta = math.factorial(n - 1) * math.factorial(size - n) / math.factorial(size)
        bernoulli += beta * total
        chosen = counts == n
        exact += float((weights * chosen).mean()) / math.comb(size, n) * total
    assert exact == pytest.approx(bernoulli, rel=1e-4)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_weight_is_one_over_n_times_its_probability(power):
    size, draws = 6, 600_000
    levels = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    counts, weights = draw_counts(levels, torch.full((draws,), size), size, power)
    norm = sum(k**-power for k in range(1, size + 1))
    for n in range(1, size + 1):
        probability = n**-power / norm
        assert float((counts == n).double().mean()) == pytest.approx(probability, abs=1e-5)
        assert weights[counts == n].unique().tolist() == pytest.approx([1 / (n * probability)])


def test_exactly_n_tokens_of_each_block_are_masked():
    out = run(NoiseConfig(count_power=0.0), batch=64)
    per_block = out.masked_BKL.view(64, 4, 4).sum(-1)
    assert per_block.min() >= 1
    weight = out.weight_BKL.view(64, 4, 4).amax(-1)
    assert torch.allclose(weight, 4 / per_block.double())
    assert torch.equal(out.xt_BKL == MASK, out.masked_BKL)
    assert (out.weight_BKL > 0).eq(out.masked_BKL).all()


def test_every_subset_of_a_size_is_equally_likely():
    out = run(NoiseConfig(count_power=0.0), batch=6000, length=4, block_size=4)
    pairs = out.masked_BKL[:, 0][out.masked_BKL[:, 0].sum(-1) == 2]
    codes = (pairs * torch.tensor([1, 2, 4, 8])).sum(-1)
    counts = torch.unique(codes, return_counts=True)[1].double()
    assert len(counts) == 6
    expected = counts.sum() / 6
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # chi-square, 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize("kind", CorruptionKind)
def test_counts_are_right_at_each_block_position_with_micro_batch_one(kind):
    """DESIGN invariant 5: the marginal holds block by block although levels are stratified over the whole batch."""
    noise = NoiseConfig(corruption=kind, count_power=0.0)
    blocks, steps = 4, 3000
    rates = torch.zeros(blocks)
    for step in range(steps):
        out = run(noise, step=step, slot_B=torch.tensor([1]), slots=2)
        rates += out.masked_BKL.view(blocks, 4).float().mean(-1)
    expected = 2.5 / 4 if kind is CorruptionKind.exact_count else 0.5
    assert (rates / steps - expected).abs().max() < 4 * 0.38 / math.sqrt(steps)


def test_levels_of_the_global_batch_are_a_shifted_grid():
    key = NoiseKey(3, 5, torch.arange(6), 6)
    levels = draw_levels(key, NoiseConfig(), 4).flatten().sort().values
    assert torch.allclose(levels.diff(), torch.full((23,), 1 / 24, dtype=torch.float64))
    assert 0 < levels[0] < 1 / 24


@pytest.mark.parametrize("kind", CorruptionKind)
@pytest.mark.parametrize("views", [1, 2])
def test_noise_does_not_depend_on_how_the_batch_is_split(kind, views):
    noise = NoiseConfig(corruption=kind, views=views)
    whole = run(noise, batch=8, step=4)
    for ranks in (2, 4, 8):
        parts = [run(noise, step=4, slot_B=torch.arange(8)[r::ranks], slots=8) for r in range(ranks)]
        for r, part in enumerate(parts):
            assert torch.equal(part.xt_BKL, whole.xt_BKL[r::ranks])
            assert torch.equal(part.weight_BKL, whole.weight_BKL[r::ranks])


def test_noise_changes_with_seed_step_slot_and_view():
    base = run(NoiseConfig(views=2), batch=32)
    assert not torch.equal(base.xt_BKL, run(NoiseConfig(views=2), batch=32, seed=1).xt_BKL)
    assert not torch.equal(base.xt_BKL, run(NoiseConfig(views=2), batch=32, step=1).xt_BKL)
    assert not torch.equal(base.xt_BKL[0], base.xt_BKL[1])
    assert not torch.equal(base.xt_BKL[:, 0], base.xt_BKL[:, 1])


@pytest.mark.parametrize("kind", CorruptionKind)
def test_padding_is_always_hidden_and_given_always_visible(kind):
    counted = torch.ones(8, 16, dtype=torch.bool)
    counted[:, :2] = False
    counted[:, 13:] = False
    given = torch.zeros_like(counted)
    given[:, :2] = True
    out = run(NoiseConfig(corruption=kind), counted=counted, given=given)
    assert (out.xt_BKL[:, 0, :2] == torch.arange(2)).all()
    assert (out.xt_BKL[:, 0, 13:] == MASK).all()
    assert not (out.masked_BKL[:, 0] & ~counted).any()


def test_partly_counted_block_draws_from_its_own_size():
    counted = torch.zeros(4000, 4, dtype=torch.bool)
    counted[:, 1:3] = True
    out = run(NoiseConfig(count_power=0.0), batch=4000, length=4, counted=counted)
    n = out.masked_BKL[:, 0].sum(-1)
    assert set(n.tolist()) == {1, 2}
    assert (n == 1).double().mean() == pytest.approx(0.5, abs=1e-3)
    assert torch.allclose(out.weight_BKL[:, 0].amax(-1), 2 / n.double())


def test_block_without_counted_tokens_weighs_nothing():
    out = run(NoiseConfig(), counted=torch.zeros(8, 16, dtype=torch.bool))
    assert not out.masked_BKL.any()
    assert out.weight_BKL.sum() == 0


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_block_size_one_masks_all_with_weight_one(power):
    out = run(NoiseConfig(count_power=power), block_size=1)
    assert out.masked_BKL.all()
    assert (out.weight_BKL == 1).all()


@pytest.mark.parametrize("schedule", Schedule)
def test_bernoulli_mask_rate_follows_the_schedule(schedule):
    out = run(NoiseConfig(corruption=CorruptionKind.bernoulli, schedule=schedule), batch=4000)
    t = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    from blockdiff.core.schedule import alpha

    expected = 1 - alpha(t, schedule)[0].mean()
    assert out.masked_BKL.double().mean() == pytest.approx(float(expected), abs=0.01)


def test_clipped_interval_bounds_the_mask_rate():
    noise = NoiseConfig(corruption=CorruptionKind.bernoulli, clip=[0.45, 0.55])
    out = run(noise, batch=2000)
    assert out.masked_BKL.double().mean() == pytest.approx(0.5, abs=0.01)
    assert not noise.is_bound
    assert NoiseConfig().is_bound


def test_evaluation_noise_is_independent_of_the_batch():
    whole = run(evaluation_noise(2), batch=8, slots=1)
    part = run(evaluation_noise(2), slot_B=torch.tensor([5]), slots=1)
    assert torch.equal(whole.xt_BKL[5], part.xt_BKL[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": [0.5, 0.2], "corruption": CorruptionKind.bernoulli}, r"noise.clip=\[0.5, 0.2\]"),
        ({"clip": [0.1, 0.9]}, "needs noise.corruption=bernoulli"),
        ({"count_power": 5.0}, "noise.count_power=5.0"),
        ({"schedule_power": 0.0}, "noise.schedule_power=0.0"),
        ({"views": 0}, "noise.views=0"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        NoiseConfig(**change).check()
