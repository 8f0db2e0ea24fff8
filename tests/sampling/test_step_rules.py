"""Step rules as pure functions: by hand, and their invariants by hypothesis; remasking; no reads from the device."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import OracleDenoiser
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.sampling import batch as batch_module
from blockdiff.sampling.batch import Batch
from blockdiff.sampling.config import Order, Rule, SamplerConfig
from blockdiff.sampling.pace import Pace, pace_of
from blockdiff.sampling.plan import RowPlan, plan_block, quotas
from blockdiff.sampling.remask import owed_on_host, owed_remasks
from blockdiff.sampling.rules import StepState, decide, entropy, margin
from blockdiff.sampling.sampler import generate

ALL = [
    *(SamplerConfig(rule=rule) for rule in Rule if rule is not Rule.fixed),
    *(SamplerConfig(rule=Rule.fixed, order=order, tokens_per_step=2) for order in Order),
]


def name(config: SamplerConfig) -> str:
    return config.rule.value + (f"-{config.order.value}" if config.rule is Rule.fixed else "")


def two_word_logits(probability: list[float]) -> Tensor:
    """Logits (1, M, 2) of two words, the first with these probabilities."""
    p = torch.tensor(probability, dtype=torch.float64)
    return torch.stack([p, 1 - p], -1).log()[None]


def accepted(config: SamplerConfig, probability: list[float], masked: list[bool], quota: int = 1) -> list[bool]:
    state = StepState(config, torch.tensor([quota]))
    return decide(two_word_logits(probability), torch.tensor([masked]), state, None).accepted_BM[0].tolist()


@pytest.mark.parametrize(
    ("config", "quota", "expected"),
    [
        (SamplerConfig(threshold=0.89), 1, [0, 2]),
        (SamplerConfig(threshold=0.99), 1, [2]),
        (SamplerConfig(threshold=0.0), 1, [0, 2, 3]),
        # Sorted 0.95, 0.9, 0.6: 2·0.05 = 0.1, 3·0.1 = 0.3, 4·0.4 = 1.6.
        (SamplerConfig(rule=Rule.factor, factor=0.05), 1, [2]),
        (SamplerConfig(rule=Rule.factor, factor=0.25), 1, [2]),
        (SamplerConfig(rule=Rule.factor, factor=0.35), 1, [0, 2]),
        (SamplerConfig(rule=Rule.factor, factor=1.7), 1, [0, 2, 3]),
        # Entropies 0.199, 0.325, 0.673 nats: the sum before the last term is 0, 0.199, 0.524.
        (SamplerConfig(rule=Rule.entropy_bound, entropy_bound=0.0), 1, [2]),
        (SamplerConfig(rule=Rule.entropy_bound, entropy_bound=0.2), 1, [0, 2]),
        (SamplerConfig(rule=Rule.entropy_bound, entropy_bound=0.53), 1, [0, 2, 3]),
        (SamplerConfig(rule=Rule.fixed), 2, [0, 2]),
        (SamplerConfig(rule=Rule.fixed, order=Order.margin), 1, [2]),
        (SamplerConfig(rule=Rule.fixed, order=Order.entropy), 3, [0, 2, 3]),
        (SamplerConfig(rule=Rule.fixed), 9, [0, 2, 3]),
    ],
)
def test_rules_by_hand(config: SamplerConfig, quota: int, expected: list[int]) -> None:
    """The second position is the surest, but not masked: no rule touches it."""
    got = accepted(config, [0.9, 0.999, 0.95, 0.6], [True, False, True, True], quota)
    assert [place for place, yes in enumerate(got) if yes] == expected


def test_ties_go_to_the_left() -> None:
    for config in (
        SamplerConfig(threshold=1.0),
        SamplerConfig(rule=Rule.fixed),
        SamplerConfig(rule=Rule.factor, factor=0.01),
    ):
        # A difference of rounding size is a tie.
        assert accepted(config, [0.7, 0.7 + 1e-15, 0.7], [True] * 3) == [True, False, False]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("config", ALL, ids=name)
def test_invariants_of_every_rule(config: SamplerConfig, data: st.DataObject) -> None:
    rows, places, vocab = (data.draw(st.integers(1, top)) for top in (3, 6, 5))
    seed = data.draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, places, vocab, generator=generator) * data.draw(st.sampled_from([0.0, 1.0, 30.0]))
    noise = None if data.draw(st.booleans()) else torch.randn(rows, places, vocab, generator=generator)
    masked = torch.rand(rows, places, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    state = StepState(replace(config, threshold=0.5, top_p=0.7, top_k=3), torch.full((rows,), 2))
    before = logits.clone(), masked.clone()
    decision = decide(logits, masked, state, noise)
    assert torch.equal(logits, before[0]), "a rule is a pure function"
    assert torch.equal(masked, before[1]), "a rule is a pure function"
    assert not (decision.accepted_BM & ~masked).any(), "only masked positions are fixed"
    assert torch.equal(decision.accepted_BM.any(1), masked.any(1)), "at least one where one is masked"
    assert ((decision.token_BM >= 0) & (decision.token_BM < vocab)).all()
    expected = logits.log_softmax(-1).gather(-1, decision.token_BM[..., None])[..., 0]
    assert torch.allclose(decision.logp_BM, expected, atol=1e-5)
    again = decide(logits, masked, state, noise)
    assert all(torch.equal(a, b) for a, b in zip(decision, again, strict=True))
    # A row's decision is that of the row alone.
    alone = decide(
        logits[:1], masked[:1], StepState(state.config, torch.tensor([2])), None if noise is None else noise[:1]
    )
    assert torch.equal(alone.accepted_BM, decision.accepted_BM[:1])


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6), st.floats(0.01, 0.99), st.floats(0.01, 0.98))
@settings(max_examples=60, deadline=None)
def test_thresholds_are_monotone(probability: list[float], low: float, gap: float) -> None:
    masked = [True] * len(probability)
    for rule, key in ((Rule.factor, "factor"), (Rule.entropy_bound, "entropy_bound")):
        less = sum(accepted(SamplerConfig(**{"rule": rule, key: low}), probability, masked))
        assert less <= sum(accepted(SamplerConfig(**{"rule": rule, key: low + gap}), probability, masked))


def test_entropy_and_margin_against_their_definitions() -> None:
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    logits[..., 2] = float("-inf")
    p = logits.softmax(-1)
    lse = logits.logsumexp(-1)
    assert torch.allclose(entropy(logits, lse), -torch.special.xlogy(p, p).sum(-1))
    best = p.sort(-1, descending=True).values
    assert torch.allclose(margin(logits, lse), best[..., 0] - best[..., 1])
    assert margin(logits[..., :1], logits[..., 0]).eq(1).all(), "a vocabulary of one leaves no doubt"


def test_quotas() -> None:
    fixed = SamplerConfig(rule=Rule.fixed)
    assert quotas(5, fixed) == [1] * 5
    assert quotas(5, replace(fixed, tokens_per_step=2)) == [2, 2, 1]
    assert quotas(5, replace(fixed, steps=3)) == [2, 2, 1]
    assert quotas(2, replace(fixed, steps=9)) == [1, 1]


def masked_after(plan: RowPlan, open_: list[int], *, on_grid: bool) -> set[int]:
    """What is masked after all calls; on the way each call must fix masked positions and remask fixed ones."""
    masked = set(open_)
    for taken, again in zip(plan.reveals, plan.remasks, strict=True):
        assert taken
        assert set(taken) <= masked
        masked -= set(taken)
        assert set(again) <= set(open_) - masked
        # Steps of a time grid that reveal nothing make no call: what they mask again is said with the call before.
        assert on_grid or not set(again) & set(taken), "a token is not masked again in the step that fixed it"
        masked |= set(again)
    return masked


@given(
    config=st.sampled_from([c for c in ALL if pace_of(c) is Pace.planned]),
    remask=st.sampled_from([0.0, 0.3, 0.9]),
    open_=st.sets(st.integers(0, 7), min_size=1),
    key=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=80, deadline=None)
def test_plans_fix_all_that_is_open(config: SamplerConfig, remask: float, open_: set[int], key: int) -> None:
    config = replace(config, remask=remask)
    plan = plan_block(config, [sorted(open_)], torch.tensor([key]), torch.arange(8)[None])[0]
    assert masked_after(plan, sorted(open_), on_grid=config.rule is Rule.ancestral) == set()
    if config.rule is not Rule.ancestral:
        assert sum(len(x) for x in plan.reveals) <= len(open_) / (1 - remask) + 1e-9


def test_remdm_keeps_the_marginals_of_the_reverse_process() -> None:
    """ReMDM is built to keep the share of masked tokens at each time: 1 − step/steps, remasking or not."""
    config = SamplerConfig(rule=Rule.ancestral, steps=4, remask=0.5)
    rows = 1000
    plans = plan_block(config, [[0]] * rows, torch.arange(rows), torch.zeros(rows, 1, dtype=torch.int64))
    # One position: its calls are its reveals. Remasked after a reveal at least once with a sizeable probability.
    calls = torch.tensor([len(plan.reveals) for plan in plans], dtype=torch.float64)
    # Expected reveals, from the chain: masked share 1, 3/4, 1/2, 1/4; revealed (α_s − (1−σ)α_t)/(1−α_t) of it at each
    # step, σ = 0, 0.5, min(.5, .25/.5) = 0.5, 0. So 1/4 + 3/8 + 1/2 + 1/4 = 1.375.
    assert calls.mean().item() == pytest.approx(1.375, abs=4 * calls.std().item() / rows**0.5)


def test_remasking_draws_least_probable_tokens_again() -> None:
    """Positions are sure in the order 3, 2, 1, 0. With η = 1/2 every second acceptance masks the least probable
    token."""
    sure = [0.5, 0.6, 0.7, 0.8]

    def answer(prefix: list[int], block: list[int], place: int) -> list[float]:
        p = torch.tensor([sure[place], 1 - sure[place]], dtype=torch.float64)
        return p.log().tolist()

    config = SamplerConfig(rule=Rule.fixed, remask=0.5, temperature=0.0, max_new_tokens=4, logprobs=True)
    seen = []
    row = generate(
        OracleDenoiser(answer, 2),
        [[]],
        config,
        block_size=4,
        seq_len=4,
        on_step=lambda e: seen.append(e.block.x_BS.tolist()),
    )[0]
    # Calls: +3 | +2, −3 (the only earlier one) | +3 | +1, −2 | +2 | +0 ends the block.
    masks = ["".join("_" if token == 2 else "x" for token in x[0]) for x in seen]
    assert masks == ["___x", "__x_", "__xx", "_x_x", "_xxx", "xxxx"]
    assert row.nfe == 6
    assert row.steps == [6, 4, 5, 3]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 30), st.integers(0, 20), st.floats(0, 0.99))
@settings(max_examples=100, deadline=None)
def test_host_and_device_owe_the_same(open_: int, earlier: int, accepted_: int, remasked: int, eta: float) -> None:
    remasked = min(remasked, int(accepted_ * eta))
    device = owed_remasks(
        torch.arange(9)[None] < open_,
        torch.arange(9)[None] < earlier,
        torch.tensor([accepted_]),
        torch.tensor([remasked]),
        eta,
    )
    assert device.tolist() == [owed_on_host(open_, earlier, accepted_, remasked, eta)]


class NoReads(TorchDispatchMode):
    """Raises where the host would wait for the device."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket.__name__.split(".")[-1] in self.READS:
            raise AssertionError(f"{func} reads from the device inside a step")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("remask", [0.0, 0.5])
@pytest.mark.parametrize("config", ALL, ids=name)
def test_a_step_never_waits_for_the_device(
    config: SamplerConfig, remask: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Denoiser(ModelConfig(layers=1, width=16, heads=2), 11).eval()
    reads: list[str] = []
    guarded = [False]
    for reader in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero"):
        original = getattr(Tensor, reader)

        def read(self, *args, _original=original, _reader=reader, **kwargs):  # type: ignore[no-untyped-def]
            if guarded[0]:
                reads.append(_reader)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, reader, read)

    def guard(call):  # type: ignore[no-untyped-def]
        def inner(*args, **kwargs):  # type: ignore[no-untyped-def]
            before = len(reads)
            guarded[0] = True
            with NoReads():
                result = call(*args, **kwargs)
            assert len(reads) == before, f"a step calls Tensor.{reads[-1]}"
            return result

        return inner

    monkeypatch.setattr(batch_module, "take_step", guard(batch_module.take_step))
    # On the class: the batch may call a twin of the model with its weights packed.
    monkeypatch.setattr(Denoiser, "denoise", guard(Denoiser.denoise))
    monkeypatch.setattr(Denoiser, "commit_and_denoise", guard(Denoiser.commit_and_denoise))
    calls: list[int] = []
    original_denoise = Batch._denoise

    def whole_block(self, *args):  # type: ignore[no-untyped-def]
        before = self.calls
        original_denoise(self, *args)
        guarded[0] = False
        calls.append(self.calls - before)

    monkeypatch.setattr(Batch, "_denoise", whole_block)
    options = {
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "banned_tokens": [3],
        "batch_size": 2,
    }
    config = replace(config, remask=remask, max_new_tokens=4, temperature_end=0.5, **options)
    rows = generate(model, [[1, 2], [4]], config, block_size=4, seq_len=8, eos_id=0)
    assert all(row.nfe for row in rows)
    # Between the first call of a block and its last step the host reads the open positions of adaptive rules, once a
    # step.
    assert reads == (["tolist"] * sum(calls) if pace_of(config) is Pace.adaptive else [])
