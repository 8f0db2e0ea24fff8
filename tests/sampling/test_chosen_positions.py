"""Logits are computed only where they are looked at: the same texts as from the logits of whole blocks."""

from dataclasses import dataclass, field, replace
from typing import Self

import pytest
import torch
from torch import Tensor

from blockdiff.model.cache import KVCache
from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.sampling.config import Order, Rule, SamplerConfig
from blockdiff.sampling.noise import request_key, token_gumbel
from blockdiff.sampling.plan import is_planned, plan_block
from blockdiff.sampling.request import Request
from blockdiff.sampling.sampler import generate

V, S = 13, 4
ALL = [
    SamplerConfig(rule=Rule.ancestral, steps=3),
    SamplerConfig(rule=Rule.first_hitting),
    SamplerConfig(rule=Rule.confidence, threshold=0.3),
    SamplerConfig(rule=Rule.factor, factor=1.5),
    SamplerConfig(rule=Rule.entropy_bound, entropy_bound=1.0),
    *(SamplerConfig(rule=Rule.fixed, order=order, tokens_per_step=2) for order in Order),
]
PLANNED = [config for config in ALL if is_planned(config)]
REQUESTS = [
    Request([1, 2, 3]),
    Request([5, 0, 0, 4, 0, 6], [(1, 2), (4, 1)]),
    Request([]),
    Request([4] * 8),
    Request([7] * 9, [(3, 4)], new_tokens=0),
]


def name(config: SamplerConfig) -> str:
    return config.rule.value + (f"-{config.order.value}" if config.rule is Rule.fixed else "")


@pytest.fixture(scope="module")
def model() -> Denoiser:
    torch.manual_seed(0)
    model = Denoiser(ModelConfig(layers=2, width=32, heads=4, kv_heads=2), V).double().eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model


@dataclass
class WholeBlocks:
    """Computes the logits of all positions in every call, then hands out those asked for; counts what is asked."""

    model: Denoiser
    widths: list[int] = field(default_factory=list)

    @property
    def mask_id(self) -> int:
        return self.model.mask_id

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def compiled(self) -> Self:
        return self

    def packed(self) -> Self:
        return self

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return self.model.new_cache(batch, capacity)

    def commit(self, x0_BT: Tensor, cache: KVCache, *, lengths=None, block_size=None) -> None:  # type: ignore[no-untyped-def]
        self.model.commit(x0_BT, cache, lengths=lengths, block_size=block_size)

    def denoise(self, xt_BS: Tensor, cache: KVCache, chosen_BM: Tensor | None = None) -> Tensor:
        return self._pick(self.model.denoise(xt_BS, cache), chosen_BM)

    def commit_and_denoise(self, x0_BS, xt_BS, cache, chosen_BM=None, *, lengths=None):  # type: ignore[no-untyped-def]
        return self._pick(self.model.commit_and_denoise(x0_BS, xt_BS, cache, lengths=lengths), chosen_BM)

    def _pick(self, logits_BSV: Tensor, chosen_BM: Tensor | None) -> Tensor:
        assert chosen_BM is not None, "the sampler says where it looks"
        self.widths.append(chosen_BM.shape[1])
        return logits_BSV.gather(1, chosen_BM[..., None].expand(-1, -1, logits_BSV.shape[-1]))


@pytest.mark.parametrize("remask", [0.0, 0.5])
@pytest.mark.parametrize("config", ALL, ids=name)
def test_texts_are_those_of_whole_blocks(model: Denoiser, config: SamplerConfig, remask: float) -> None:
    config = replace(config, remask=remask, max_new_tokens=7, batch_size=3, logprobs=True, repetition_penalty=1.2)
    whole = WholeBlocks(model)
    expected = generate(whole, REQUESTS, config, block_size=S, seq_len=16, eos_id=0)
    got = generate(model, REQUESTS, config, block_size=S, seq_len=16, eos_id=0)
    for a, b in zip(got, expected, strict=True):
        assert (a.token_ids, a.steps, a.nfe, a.commit_nfe) == (b.token_ids, b.steps, b.nfe, b.commit_nfe)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-10)
    if config.rule is Rule.first_hitting:
        assert set(whole.widths) == {1}, "a rule of one token a call asks for one position of each row"


@pytest.mark.parametrize("remask", [0.0, 0.5])
@pytest.mark.parametrize("config", PLANNED, ids=name)
def test_a_planned_rule_is_the_plain_loop_over_its_plan(model: Denoiser, config: SamplerConfig, remask: float) -> None:
    """By hand: whole logits, noise for every masked position, and only then a look at which ones the plan takes."""
    config = replace(config, remask=remask, max_new_tokens=2 * S, logprobs=True)
    row = generate(model, [[]], config, block_size=S, seq_len=2 * S)[0]
    key = torch.tensor([request_key(config.seed, [0], 0)])
    x = torch.full((1, 2 * S), model.mask_id)
    steps, logprobs, calls = [0] * 2 * S, [0.0] * 2 * S, 0
    for start in (0, S):
        position = torch.arange(start, start + S)[None]
        plan = plan_block(config, [list(range(S))], key, position)[0]
        for step, (taken, again) in enumerate(zip(plan.reveals, plan.remasks, strict=True)):
            cache = model.new_cache(1, 2 * S)
            if start:
                model.commit(x[:, :start], cache)
            logits = model.denoise(x[:, start : start + S], cache)
            token = (logits + token_gumbel(key, position, step, V, torch.float64)).argmax(-1)[0]
            for place in taken:
                x[0, start + place] = token[place]
                steps[start + place] = step + 1
                logprobs[start + place] = float(logits[0, place].log_softmax(-1)[token[place]])
            x[0, [start + place for place in again]] = model.mask_id
            calls += 1
    assert row.token_ids == x[0].tolist()
    assert (row.steps, row.nfe) == (steps, calls)
    assert row.logprobs == pytest.approx(logprobs, abs=1e-10)
