"""Exact counts and Bernoulli corruption against enumeration, and their invariance to how a batch is split."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from blockdiff.core.corruption import (
    CorruptionKind,
    Fit,
    NoiseConfig,
    NoiseKey,
    ViewKind,
    corrupt,
    draw_levels,
    evaluation_noise,
)
from blockdiff.core.counts import count_weight, draw_counts, make_law, prior_law
from blockdiff.core.schedule import Schedule, alpha, pair_weight

MASK = 99
BERNOULLI = CorruptionKind.bernoulli


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
    law=None,
):
    slot_B = torch.arange(batch) if slot_B is None else slot_B
    x0 = torch.arange(length).expand(len(slot_B), -1)
    counted = torch.ones_like(x0, dtype=torch.bool) if counted is None else counted
    key = NoiseKey(seed, step, slot_B, slots or len(slot_B))
    return corrupt(x0, counted, block_size=block_size, mask_id=MASK, noise=noise, key=key, given_BL=given, law_S1=law)


def nll_table(size: int) -> dict[tuple[int, ...], Fraction]:
    """An arbitrary −log p(x_i | x_{not M}) for each mask M and i in M, as exact numbers."""
    masks = [m for m in itertools.product((0, 1), repeat=size) if any(m)]
    return {(*m, i): Fraction((7 * k + 13 * i) % 29 + 1, 3) for k, m in enumerate(masks) for i in range(size) if m[i]}


def bernoulli_bound(size: int) -> float:
    """∫ dt 1/t Σ_M t^|M| (1−t)^(S−|M|) Σ nll of `nll_table` in closed form (Beta function)."""
    return sum(
        math.factorial(sum(mask) - 1) * math.factorial(size - sum(mask)) / math.factorial(size) * block_nll(mask)
        for mask in itertools.product((0, 1), repeat=size)
        if any(mask)
    )


def block_nll(mask: tuple[int, ...]) -> float:
    """Σ nll of a mask; of no token it is 0."""
    return float(sum(nll_table(len(mask))[(*mask, i)] for i in range(len(mask)) if mask[i]))


LAWS = [0.0, 0.5, 1.0, "fitted"]


def law_of(kind: float | str, size: int) -> torch.Tensor:
    """The law of n^(−p), or one as a fit may give it."""
    if isinstance(kind, str):
        return make_law(torch.tensor([0.3, 0.05, 0.9, 0.2, 0.4, 1.1], dtype=torch.float64)[:size])
    return prior_law(kind, size, torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("paired", [False, True])
def test_exact_count_bound_equals_bernoulli_bound_by_enumeration(size, law, paired):
    """E over counts of weight · Σ nll, or of the mean over a mask and its complement, against the closed form."""
    levels = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    countable = torch.full((100_000,), size)
    counts = draw_counts(levels, countable, law_of(law, size))
    weights = [count_weight(n, countable, law_of(law, size), paired=paired) for n in (counts, countable - counts)]
    exact = 0.0
    for mask in itertools.product((0, 1), repeat=size):
        if n := sum(mask):
            chosen = (counts == n) / math.comb(size, n)
            estimate = weights[0] * block_nll(mask)
            if paired:
                estimate = (estimate + weights[1] * block_nll(tuple(1 - m for m in mask))) / 2
            exact += float((chosen * estimate).mean())
    assert exact == pytest.approx(bernoulli_bound(size), rel=1e-4)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("power", [0.5, 2.0])
def test_bernoulli_pairs_have_the_same_bound(schedule, power):
    """∫ dt E_M of the mean over a mask and its complement, by substituting t so that no weight is infinite."""
    size, points = 4, 200_000
    u = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    # t(u) flattens at both ends, where the weight of one of the two masks is infinite.
    t, step = u**4 * (35 - 84 * u + 70 * u**2 - 20 * u**3), 140 * u**3 * (1 - u) ** 3
    survive, _ = alpha(t.clamp(1e-15, 1 - 1e-15), schedule, power)
    total = torch.zeros_like(u)
    for mask in itertools.product((0, 1), repeat=size):
        n = sum(mask)
        chance = (1 - survive) ** n * survive ** (size - n)
        first = pair_weight(1 - survive, schedule, power) * block_nll(mask) if n else 0.0
        second = pair_weight(survive, schedule, power) * block_nll(tuple(1 - m for m in mask)) if n < size else 0.0
        total += torch.where(chance > 0, chance * step * (first + second) / 2, 0.0)
    assert float(total.mean()) == pytest.approx(bernoulli_bound(size), rel=1e-4)


@pytest.mark.parametrize("law", LAWS)
def test_weight_is_one_over_n_times_its_probability(law):
    size, draws = 6, 600_000
    levels = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    table = law_of(law, size)
    counts = draw_counts(levels, torch.full((draws,), size), table)
    weights = count_weight(counts, torch.full((draws,), size), table)
    for n in range(1, size + 1):
        probability = float((table[n] - table[n - 1]) / table[-1])
        assert float((counts == n).double().mean()) == pytest.approx(probability, abs=1e-5)
        assert weights[counts == n].unique().tolist() == pytest.approx([1 / (n * probability)])


def test_a_law_is_restricted_to_the_tokens_that_may_be_masked():
    """Blocks with fewer countable tokens than S: q on {1..C}, renormalised."""
    counted = torch.zeros(8000, 6, dtype=torch.bool)
    counted[:, 1:4] = True
    out = run(NoiseConfig(), batch=8000, length=6, block_size=6, counted=counted, law=law_of("fitted", 6))
    n = out.masked_BKL[:, 0].sum(-1)
    for count, term in ((1, 0.3), (2, 0.05), (3, 0.9)):
        assert (n == count).double().mean() == pytest.approx(term / 1.25, abs=1e-3)
        assert torch.allclose(out.weight_BKL[n == count].amax(-1), torch.tensor(1.25 / term / count).double())


PAIRS = [
    NoiseConfig(views=2, view_kind=ViewKind.complementary),
    NoiseConfig(views=4, view_kind=ViewKind.complementary, count_power=0.0),
    NoiseConfig(views=2, view_kind=ViewKind.complementary, corruption=CorruptionKind.bernoulli),
]


@pytest.mark.parametrize("noise", PAIRS, ids=["exact", "exact, two pairs", "bernoulli"])
def test_each_counted_token_is_masked_in_exactly_one_of_a_pair(noise):
    counted = torch.ones(64, 16, dtype=torch.bool)
    counted[:, :2] = False
    counted[:, 13:] = False
    given = torch.zeros_like(counted)
    given[:, :2] = True
    out = run(noise, batch=64, counted=counted, given=given)
    assert out.masked_BKL.shape == (64, noise.views, 16)
    for view in range(0, noise.views, 2):
        assert torch.equal(out.masked_BKL[:, view] ^ out.masked_BKL[:, view + 1], counted)
    assert not (out.masked_BKL & ~counted[:, None]).any()
    assert (out.xt_BKL[:, :, 13:] == MASK).all()
    assert (out.xt_BKL[:, :, :2] == torch.arange(2)).all()
    assert torch.equal(out.weight_BKL > 0, out.masked_BKL)
    assert out.masked_BKL[:, 0].any(-1).all()


def test_pairs_are_unbiased_in_partly_counted_blocks():
    """Over a whole shifted grid of levels: the mean weight of a token, were each −log p the same, is 1."""
    counted = torch.zeros(20_000, 8, dtype=torch.bool)
    counted[:, :3] = True
    for law in (None, law_of("fitted", 4)):
        out = run(PAIRS[0], batch=20_000, length=8, counted=counted, law=law)
        assert out.weight_BKL.mean(1).sum(-1).mean() == pytest.approx(3.0, rel=2e-3)
        assert out.weight_BKL.mean((0, 1))[:3].tolist() == pytest.approx([1.0] * 3, rel=3e-2)


@pytest.mark.parametrize("noise", PAIRS[:2])
def test_pairs_at_block_size_one_are_exact(noise):
    """The complement of the only mask is empty, and the first view counts for both."""
    out = run(noise, block_size=1)
    assert out.masked_BKL[:, ::2].all()
    assert (out.weight_BKL.mean(1) == 1).all()


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


@pytest.mark.parametrize("law", [None, law_of("fitted", 4)], ids=["prior", "fitted"])
def test_counts_of_pairs_are_right_at_each_block_position_with_micro_batch_one(law):
    """Invariant 5 for complementary views: the distribution of the first count, and all of the weights."""
    blocks, steps = 4, 1500
    hits, weights = torch.zeros(blocks, 5), torch.zeros(blocks, dtype=torch.float64)
    for step in range(steps):
        out = run(PAIRS[0], step=step, slot_B=torch.tensor([1]), slots=2, law=law)
        counts = out.masked_BKL[0, 0].view(blocks, 4).sum(-1)
        hits[torch.arange(blocks), counts] += 1
        weights += out.weight_BKL[0].mean(0).view(blocks, 4).sum(-1)
    table = law_of(0.5, 4) if law is None else law
    expected = torch.cat([torch.zeros(1), (table.diff() / table[-1]).float()])
    assert (hits / steps - expected).abs().max() < 4 * 0.5 / math.sqrt(steps)
    assert (weights / steps).tolist() == pytest.approx([4.0] * blocks, rel=0.05)


def test_levels_of_the_global_batch_are_a_shifted_grid():
    key = NoiseKey(3, 5, torch.arange(6), 6)
    levels = draw_levels(key, NoiseConfig(), 4).flatten().sort().values
    assert torch.allclose(levels.diff(), torch.full((23,), 1 / 24, dtype=torch.float64))
    assert 0 < levels[0] < 1 / 24


@pytest.mark.parametrize("kind", CorruptionKind)
@pytest.mark.parametrize(("views", "view_kind"), [(1, "independent"), (2, "independent"), (2, "complementary")])
def test_noise_does_not_depend_on_how_the_batch_is_split(kind, views, view_kind):
    noise = NoiseConfig(corruption=kind, views=views, view_kind=ViewKind[view_kind])
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
    expected = 1 - alpha(t, schedule)[0].mean()
    assert out.masked_BKL.double().mean() == pytest.approx(float(expected), abs=0.01)


def test_clipped_interval_bounds_the_mask_rate():
    noise = NoiseConfig(corruption=CorruptionKind.bernoulli, clip=[0.45, 0.55])
    out = run(noise, batch=2000)
    assert out.masked_BKL.double().mean() == pytest.approx(0.5, abs=0.01)
    assert not noise.is_bound
    assert NoiseConfig().is_bound
    assert not NoiseConfig(corruption=BERNOULLI, fit=Fit.clip).is_bound
    assert NoiseConfig(fit=Fit.counts).is_bound


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
        ({"views": 3, "view_kind": ViewKind.complementary}, "noise.views=3 must be even .*nearest: 2, 4"),
        ({"views": 1, "view_kind": ViewKind.complementary}, "noise.views=1 must be even .*nearest: 2"),
        (
            {"views": 2, "view_kind": ViewKind.complementary, "clip": [0.3, 0.8], "corruption": BERNOULLI},
            "does not go with noise.view_kind=complementary",
        ),
        ({"fit": Fit.counts, "corruption": BERNOULLI}, "noise.fit=counts needs noise.corruption=exact_count"),
        ({"fit": Fit.clip}, "noise.fit=clip needs noise.corruption=bernoulli"),
        ({"fit": Fit.clip, "corruption": BERNOULLI, "clip": [0.45, 0.95]}, "must be tenths"),
        (
            {"fit": Fit.clip, "corruption": BERNOULLI, "views": 2, "view_kind": ViewKind.complementary},
            "noise.fit=clip does not go with",
        ),
        ({"fit_every": 0}, "noise.fit_every=0"),
        ({"fit_warmup": -1}, "noise.fit_warmup=-1"),
        ({"fit_memory": 1.0}, "noise.fit_memory=1.0"),
        ({"fit_prior": 0.0}, "noise.fit_prior=0.0"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        NoiseConfig(**change).check()
