"""Logit rules against slow loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import OracleDenoiser

from blockdiff.sampling.config import Precision, Rule, SamplerConfig
from blockdiff.sampling.logit_rules import LogitContext, min_p, penalise_repetition, top_k, top_p
from blockdiff.sampling.rules import StepState, draw_tokens
from blockdiff.sampling.sampler import generate

VECTORS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=7)


def kept(logits: torch.Tensor) -> set[int]:
    return {token for token, value in enumerate(logits.flatten().tolist()) if value != -math.inf}


@given(VECTORS, st.floats(0.01, 1.0))
@settings(max_examples=80, deadline=None)
def test_top_p_keeps_the_crossing_token(values: list[float], p: float) -> None:
    logits = torch.tensor(values, dtype=torch.float64)
    mass, expected = 0.0, set()
    for token in sorted(range(len(values)), key=lambda t: -values[t]):
        if mass >= p:
            break
        expected.add(token)
        mass += float(logits.softmax(-1)[token])
    got = kept(top_p(logits[None, None], p))
    # Sums that reach p but for rounding may fall either way.
    assert got == expected or abs(mass - p) < 1e-12 or p == 1.0
    assert got


def test_top_p_by_hand() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()[None, None]
    assert kept(top_p(logits, 0.5)) == {1}
    assert kept(top_p(logits, 0.51)) == {1, 2}
    assert kept(top_p(logits, 0.76)) == {1, 2, 3}
    assert kept(top_p(logits, 1e-9)) == {1}


@given(VECTORS, st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_top_k(values: list[float], k: int) -> None:
    least = sorted(values, reverse=True)[:k][-1]
    logits = torch.tensor(values, dtype=torch.float64)
    assert kept(top_k(logits[None, None], k)) == {token for token, value in enumerate(values) if value >= least}


@given(VECTORS, st.floats(0.01, 1.0))
@settings(max_examples=50, deadline=None)
def test_min_p(values: list[float], share: float) -> None:
    p = torch.tensor(values, dtype=torch.float64).softmax(-1)
    got = kept(min_p(torch.tensor(values, dtype=torch.float64)[None, None], share))
    clear = {token for token in range(len(values)) if abs(p[token] / p.max() - share) > 1e-9}
    assert got & clear == {token for token in clear if p[token] >= share * p.max()}
    assert got


def test_repetition_penalty_pushes_both_signs_down() -> None:
    logits = torch.tensor([[[2.0, -2.0, 2.0, -2.0]]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalise_repetition(logits, seen, 2.0).tolist() == [[[1.0, -4.0, 2.0, -2.0]]]


def test_repetition_penalty_sees_prompt_and_block() -> None:
    """Token 2 leads, then 1, then 0. Given 2, the penalty makes 1 the likeliest; once 1 is fixed, 0."""
    oracle = OracleDenoiser(lambda prefix, block, place: [3.0, 3.5, 4.0], 3)
    config = SamplerConfig(rule=Rule.first_hitting, temperature=0.0, repetition_penalty=2.0, max_new_tokens=2)
    assert generate(oracle, [[2]], config, block_size=3, seq_len=3)[0].token_ids in ([1, 0], [0, 1])
    assert generate(oracle, [[2, 2, 2]], config, block_size=1, seq_len=5)[0].token_ids == [1, 0]


def test_banned_tokens_and_the_callers_rule() -> None:
    oracle = OracleDenoiser(lambda prefix, block, place: [3.0, 3.5, 4.0, 2.0], 4)
    config = SamplerConfig(temperature=0.0, banned_tokens=[2, 1], max_new_tokens=4, logprobs=True)
    row = generate(oracle, [[]], config, block_size=2, seq_len=4)[0]
    assert row.token_ids == [0] * 4
    assert row.logprobs == pytest.approx([-math.log1p(math.exp(-1.0))] * 4)

    def odd_positions_say_three(logits: torch.Tensor, context: LogitContext) -> torch.Tensor:
        favoured = torch.nn.functional.one_hot(context.position_BM % 2 * 3, 4)
        return logits + 9 * favoured

    config = SamplerConfig(temperature=0.0, max_new_tokens=4)
    rows = generate(oracle, [[]], config, block_size=2, seq_len=4, logit_rule=odd_positions_say_three)
    assert rows[0].token_ids == [0, 3, 0, 3]


def test_temperature_schedule_moves_with_the_block() -> None:
    config = SamplerConfig(temperature=2.0, temperature_end=1.0)
    logits = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    noise = torch.tensor([[[0.0, 0.6]], [[0.0, 0.6]]])
    # At the start 1/2 < 0.6 gives token 1, at the end 1/1 > 0.6 token 0.
    state = StepState(config, progress_B=torch.tensor([0.0, 1.0]))
    assert draw_tokens(logits, state, noise).tolist() == [[1], [0]]


def test_temperature_sharpens_what_is_drawn() -> None:
    oracle = OracleDenoiser(lambda prefix, block, place: [0.0, 1.0], 2)
    shares = {}
    for temperature in (0.5, 1.0, 2.0):
        config = SamplerConfig(temperature=temperature, max_new_tokens=4, batch_size=1000, rule=Rule.first_hitting)
        rows = generate(oracle, [[]] * 1000, config, block_size=4, seq_len=4)
        ones = sum(sum(row.token_ids) for row in rows) / 4000
        expected = 1 / (1 + math.exp(-1 / temperature))
        assert ones == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 4000) ** 0.5)
        shares[temperature] = ones
    assert shares[0.5] > shares[1.0] > shares[2.0]


def test_exact_precision_takes_double_over_the_vocabulary() -> None:
    seen = []

    def look(logits: torch.Tensor, context: LogitContext) -> torch.Tensor:
        seen.append(logits.dtype)
        return logits

    class Half(OracleDenoiser):
        def _answers(self, *args):  # type: ignore[no-untyped-def]
            return super()._answers(*args).bfloat16()

    oracle = Half(lambda prefix, block, place: [0.0, 1.0], 2)
    for precision in Precision:
        config = SamplerConfig(precision=precision, max_new_tokens=1)
        generate(oracle, [[]], config, block_size=1, seq_len=1, logit_rule=look)
    assert seen == [torch.float32, torch.float64]
