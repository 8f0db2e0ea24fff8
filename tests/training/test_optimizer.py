"""Learning rates against hand-written values; groups; Muon beside AdamW, exact over a save and a load."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.training.config import LearningRate, OptimizerConfig, OptimizerName
from blockdiff.training.muon import MuonWithAdamW
from blockdiff.training.optimizer import build_optimizer, lr_ratio, same_history


def tiny() -> Denoiser:
    torch.manual_seed(0)
    return Denoiser(ModelConfig(layers=1, width=16, heads=2, qkv_bias=True, tied_head=False), 11)


def test_warm_up_reaches_the_peak_with_its_last_step() -> None:
    config = OptimizerConfig(warmup_steps=4, schedule=LearningRate.constant)
    assert [lr_ratio(step, config, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_falls_to_the_floor_and_stays() -> None:
    config = OptimizerConfig(warmup_steps=2, min_lr_ratio=0.2)
    assert lr_ratio(2, config, 12) == 1.0
    assert lr_ratio(7, config, 12) == pytest.approx(0.6)
    assert lr_ratio(12, config, 12) == pytest.approx(0.2)
    assert lr_ratio(99, config, 12) == pytest.approx(0.2)
    assert lr_ratio(6, replace(config, decay_steps=4), 12) == pytest.approx(0.2)


def test_wsd_stays_and_falls_at_the_end() -> None:
    config = OptimizerConfig(warmup_steps=0, schedule=LearningRate.wsd, min_lr_ratio=0.0, decay_steps=4)
    assert [lr_ratio(step, config, 10) for step in (0, 5, 6, 7, 8, 9, 10)] == [1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert lr_ratio(8, replace(config, decay_steps=None), 10) == 1.0
    assert lr_ratio(9, replace(config, decay_steps=None), 10) == 0.5


def test_wsd_falls_from_the_peak_where_the_run_is_shorter_than_the_decay() -> None:
    config = OptimizerConfig(warmup_steps=2, schedule=LearningRate.wsd, min_lr_ratio=0.0, decay_steps=100)
    assert [lr_ratio(step, config, 6) for step in range(7)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]


def test_a_run_may_be_prolonged_where_no_learning_rate_changes() -> None:
    cosine = OptimizerConfig(warmup_steps=2)
    wsd = replace(cosine, schedule=LearningRate.wsd, decay_steps=5)
    assert not same_history(5, cosine, 20, 40)
    assert same_history(1, cosine, 20, 40)
    assert same_history(14, wsd, 20, 40)
    assert not same_history(16, wsd, 20, 40)
    assert same_history(20, replace(cosine, schedule=LearningRate.constant), 20, 40)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 0.0),
        ("lr", math.nan),
        ("warmup_steps", -1),
        ("weight_decay", -0.1),
        ("grad_clip", -1.0),
        ("decay_steps", 0),
        ("min_lr_ratio", 1.5),
        ("ema_decay", 1.0),
        ("betas", [0.9]),
        ("eps", 0.0),
    ],
)
def test_bad_values_name_their_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"optimizer.{key}="):
        replace(OptimizerConfig(), **{key: value}).check()


@pytest.mark.parametrize("name", list(OptimizerName))
def test_every_weight_is_in_one_group_and_vectors_do_not_decay(name: OptimizerName) -> None:
    denoiser = tiny()
    optimizer = build_optimizer(denoiser, OptimizerConfig(name=name))
    grouped = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, denoiser.parameters()))
    for group in optimizer.param_groups:
        assert all((weight.dim() >= 2) == (group["weight_decay"] > 0) for weight in group["params"])


def test_muon_takes_the_layers_matrices_and_nothing_else() -> None:
    denoiser = tiny()
    optimizer = build_optimizer(denoiser, OptimizerConfig(name=OptimizerName.muon))
    assert isinstance(optimizer, MuonWithAdamW)
    names = {id(weight): name for name, weight in denoiser.named_parameters()}
    mine = {names[id(weight)] for group in optimizer.muon.param_groups for weight in group["params"]}
    assert mine == {f"layers.0.{part}.weight" for part in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")}


def step(network: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> int:
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        parts = [(w * torch.randn(w.shape, generator=generator)).sum() for w in network.parameters()]
        loss = torch.stack(parts).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return calls


@pytest.mark.parametrize("name", list(OptimizerName))
def test_four_steps_are_two_steps_a_save_a_load_and_two_steps(name: OptimizerName) -> None:
    config = OptimizerConfig(name=name, lr=0.01, warmup_steps=3)

    def build(network: nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
        optimizer = build_optimizer(network, config)
        return optimizer, LambdaLR(optimizer, lambda s: lr_ratio(s, config, 10))

    straight = tiny()
    optimizer, schedule = build(straight)
    for seed in range(4):
        assert step(straight, optimizer, seed) == 1
        schedule.step()
        if seed == 1:
            kept = copy.deepcopy((straight.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    resumed = tiny()
    optimizer, schedule = build(resumed)
    resumed.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    schedule.load_state_dict(kept[2])
    for seed in (2, 3):
        step(resumed, optimizer, seed)
        schedule.step()
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_one_learning_rate_reaches_both_parts_of_muon() -> None:
    optimizer = build_optimizer(tiny(), OptimizerConfig(name=OptimizerName.muon, lr=0.5))
    assert isinstance(optimizer, MuonWithAdamW)
    LambdaLR(optimizer, lambda _: 0.5)
    groups = [*optimizer.muon.param_groups, *optimizer.adamw.param_groups]
    assert [group["lr"] for group in groups] == [0.25] * 3
