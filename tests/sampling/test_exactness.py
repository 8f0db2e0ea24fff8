"""Sampled distributions against enumeration on a toy vocabulary, and noise against its law."""

import functools
import itertools

import pytest
import torch
from oracle import OracleDenoiser
from scipy import stats

from blockdiff.core.randomness import hash_counters
from blockdiff.sampling.config import Order, Precision, Rule, SamplerConfig
from blockdiff.sampling.noise import gumbel, request_key, token_gumbel
from blockdiff.sampling.sampler import generate

V, S, SAMPLES = 3, 3, 6000


def joint(seed: int) -> torch.Tensor:
    """A lumpy distribution over V^S texts."""
    weights = torch.rand((V,) * S, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 3
    return weights / weights.sum()


def conditional_oracle(table: torch.Tensor) -> OracleDenoiser:
    """Answers p(x_i | visible tokens) of a joint distribution over one block."""

    @functools.cache
    def logits(block: tuple[int, ...], place: int) -> list[float]:
        if block[place] != V:
            return [0.0] * V  # asked for to fill up a row, and not used
        visible = table[tuple(slice(None) if token == V else token for token in block)]
        # The dimensions that are left are the masked positions, in order.
        axis = sum(token == V for token in block[:place])
        others = [d for d in range(visible.dim()) if d != axis]
        p = visible.sum(others) if others else visible
        return (p / p.sum()).log().tolist()

    return OracleDenoiser(lambda prefix, block, place: logits(tuple(block), place), V)


def p_value(config: SamplerConfig, table: torch.Tensor) -> float:
    """Of Pearson's chi-square test that samples follow the table."""
    rows = generate(conditional_oracle(table), [[]] * SAMPLES, config, block_size=S, seq_len=S)
    counts = torch.zeros_like(table)
    for row in rows:
        counts[tuple(row.token_ids)] += 1
    expected = table * SAMPLES
    assert expected.min() > 0
    rare = expected.flatten() < 5
    seen = torch.cat([counts.flatten()[~rare], counts.flatten()[rare].sum()[None]])
    wanted = torch.cat([expected.flatten()[~rare], expected.flatten()[rare].sum()[None]])
    return float(stats.chisquare(seen.numpy(), wanted.numpy()).pvalue)


EXACT = [
    SamplerConfig(rule=Rule.first_hitting),
    SamplerConfig(rule=Rule.first_hitting, precision=Precision.exact),
    SamplerConfig(rule=Rule.ancestral, steps=400),
    SamplerConfig(rule=Rule.fixed, order=Order.left_to_right),
    SamplerConfig(rule=Rule.fixed, order=Order.random),
]


@pytest.mark.parametrize("config", EXACT, ids=lambda c: f"{c.rule.value}-{c.order.value}-{c.precision.value}")
def test_exact_samplers_follow_the_joint_distribution(config: SamplerConfig) -> None:
    config.max_new_tokens, config.batch_size, config.seed = S, 1000, 11
    assert p_value(config, joint(1)) > 0.01


def test_the_chi_square_test_sees_a_wrong_sampler() -> None:
    """One step for the whole block draws from the product of marginals, which is another distribution."""
    config = SamplerConfig(rule=Rule.ancestral, steps=1, max_new_tokens=S, batch_size=1000)
    assert p_value(config, joint(1)) < 1e-6


def test_ancestral_reveals_binomially_on_a_coarse_grid() -> None:
    """With two steps a position is revealed in the first with probability 1/2, independently of the
    others."""
    config = SamplerConfig(rule=Rule.ancestral, steps=2, max_new_tokens=S, batch_size=1000, logprobs=True)
    rows = generate(conditional_oracle(joint(2)), [[]] * SAMPLES, config, block_size=S, seq_len=S)
    # A block that has one call only was revealed in one step, which of the two is not to be seen.
    both = [row for row in rows if row.nfe == 2]
    patterns = [tuple(step == 1 for step in row.steps or []) for row in both]
    counts = [patterns.count(p) for p in itertools.product([True, False], repeat=S) if 0 < sum(p) < S]
    assert stats.chisquare(counts).pvalue > 0.01
    assert stats.binomtest(len(both), SAMPLES, 1 - 2 * 0.5**S).pvalue > 0.01


def test_first_hitting_orders_are_uniform() -> None:
    config = SamplerConfig(rule=Rule.first_hitting, max_new_tokens=S, batch_size=1000, logprobs=True)
    rows = generate(conditional_oracle(joint(2)), [[]] * SAMPLES, config, block_size=S, seq_len=S)
    orders = [tuple(row.steps or []) for row in rows]
    counts = [orders.count(order) for order in itertools.permutations([1, 2, 3])]
    assert sum(counts) == SAMPLES
    assert stats.chisquare(counts).pvalue > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_noise_follows_its_law(dtype: torch.dtype) -> None:
    noise = gumbel(hash_counters(5, torch.arange(200_000)), dtype)
    assert stats.kstest(noise.double().numpy(), "gumbel_r").pvalue > 0.01


def test_single_precision_gumbel_resolves_the_deciding_tail() -> None:
    """The smallest word gives E = 2^-63: a grid of 2^-24 would stop at a Gumbel of 16.6."""
    words = torch.tensor([0, 1, 2**20, 2**39 + 2**38, 2**63 - 1], dtype=torch.int64)
    single, double = gumbel(words, torch.float32), gumbel(words, torch.float64)
    assert single[:4].double().tolist() == pytest.approx(double[:4].tolist(), rel=1e-6)
    assert double[1] > 43
    assert torch.isfinite(single).all()


def test_noise_is_a_function_of_row_position_and_step() -> None:
    key_B = torch.tensor([request_key(0, [1, 2], 0), request_key(0, [1, 2], 1)])
    position_BM = torch.tensor([[4, 5, 6], [6, 5, 4]])
    noise = token_gumbel(key_B, position_BM, 2, 7, torch.float64)
    alone = token_gumbel(key_B[1:], position_BM[1:, 1:2], 2, 7, torch.float64)
    assert torch.equal(noise[1, 1], alone[0, 0])
    assert not torch.equal(noise[0], noise[1].flip(0)), "two copies of a prompt have their own noise"
    assert not torch.equal(noise, token_gumbel(key_B, position_BM, 3, 7, torch.float64))
    assert request_key(0, [1, 2], 0) != request_key(1, [1, 2], 0) != request_key(1, [2, 1], 0)
