"""Between logging steps nothing in the training loop waits for the device: tests/gpu holds the same on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from miniature import RunConfig, run
from waiting import WaitingError, nothing_waits

from blockdiff.core.corruption import CorruptionKind, Fit, NoiseConfig, NoiseKey
from blockdiff.core.masks import CleanAttention
from blockdiff.data.batch import Batch
from blockdiff.model.flex import plan_flex
from blockdiff.model.plan import Layout, layout_of, plan_groups
from blockdiff.training.border import StepBorder
from blockdiff.training.config import OptimizerName, Strategy, TrainerConfig
from blockdiff.training.module import DiffusionModule
from blockdiff.training.saving import DurableCheckpointIO
from blockdiff.training.staging import noise_batch, send
from blockdiff.training.trainer import build_trainer

Make = Callable[..., RunConfig]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.nonzero(x),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.index_put((x > 0,), torch.zeros(())),
        lambda x: range(x.sum()),
    ],
)
def test_the_watch_sees_what_waits(spoil: Callable[[torch.Tensor], Any]) -> None:
    x = torch.arange(3)
    with nothing_waits(), pytest.raises(WaitingError):
        spoil(x)
    assert x.sum().item() == 3


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Watches all steps but the first, which reports, from the batch's arrival to the end of the step's border."""
    steps: list[int] = []
    border = StepBorder.on_train_batch_end
    with ExitStack() as stack:

        def begin(module: DiffusionModule, batch: Any, batch_idx: int) -> None:
            if module.step:
                steps.append(module.step)
                stack.enter_context(nothing_waits())

        def end(callback: StepBorder, *arguments: Any) -> None:
            module = arguments[1]
            if module.step == module.max_steps:
                stack.close()  # the last step logs, validates and saves
            border(callback, *arguments)
            stack.close()

        monkeypatch.setattr(DiffusionModule, "on_train_batch_start", begin)
        monkeypatch.setattr(StepBorder, "on_train_batch_end", end)
        yield steps


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__name": OptimizerName.muon},
        {"optimizer__name": OptimizerName.adamw, "noise__views": 2, "model__activation_checkpointing": True},
        {"noise__corruption": CorruptionKind.bernoulli, "model__clean_attention": CleanAttention.block},
        {"noise__fit": Fit.counts},
    ],
)
def test_no_step_waits_between_logging_steps(make_config: Make, watched: list[int], changes: dict[str, Any]) -> None:
    far = dict.fromkeys(("trainer__val_every", "trainer__log_every", "trainer__checkpoint_every"), 99)
    summary = run(
        make_config(trainer__max_steps=5, optimizer__grad_clip=0.5, optimizer__ema_decay=0.9, **far, **changes)
    )
    assert summary.finished
    assert watched == [1, 1, 2, 2, 3, 3, 4, 4]  # two micro-batches a step


def test_a_step_that_reads_the_loss_is_caught(
    make_config: Make, watched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = DiffusionModule.training_step

    def curious(module: DiffusionModule, *arguments: Any) -> torch.Tensor:
        loss = plain(module, *arguments)
        assert float(loss) > 0
        return loss

    monkeypatch.setattr(DiffusionModule, "training_step", curious)
    with pytest.raises(WaitingError):
        run(make_config(trainer__max_steps=3, trainer__log_every=99))


@pytest.mark.parametrize("document", [[0] * 48, [0] * 16 + [1] * 32])
@pytest.mark.parametrize("clean", CleanAttention)
def test_a_plan_is_laid_out_without_looking_at_the_device(document: list[int], clean: CleanAttention) -> None:
    """A meta tensor has no contents to look at."""
    document_BL = torch.tensor([document, [0] * 48])
    known = {"views": 2, "clean_attention": clean, "layout": layout_of(document_BL)}
    away = document_BL.to("meta")
    plan = plan_groups(away, 4, dtype=torch.float32, **known)
    here = plan_groups(document_BL, 4, dtype=torch.float32, **known)
    assert [group.queries for group in plan.noisy + plan.clean] == [group.queries for group in here.noisy + here.clean]
    if not known["layout"].single:  # one document's plan is worked out on the CPU, once for all steps
        assert plan.noisy[0].parts[0].bias.device.type == "meta"
    assert plan_flex(away, 4, **known).flex.both.kv_indices.device.type == "meta"
    with pytest.raises((NotImplementedError, RuntimeError)):
        layout_of(away)


def test_a_batch_travels_whole_and_its_layout_stays() -> None:
    document_BL = torch.tensor([[0] * 4 + [1] * 4, [0] * 8], dtype=torch.int32)
    one = torch.tensor(16)
    batch = Batch(document_BL.long(), document_BL, document_BL >= 0, torch.arange(2), torch.arange(2), one, one)
    key = NoiseKey(0, 3, batch.slot_B, 2)
    noised = noise_batch(batch, key, NoiseConfig(), block_size=4, mask_id=9)
    assert noised.layout == Layout(False, [0, 0, 0, 0, 0, 0, 0, 0])
    assert torch.equal((noised.xt_BKL == 9).flatten().nonzero().squeeze(1), noised.chosen_M)
    assert len(noised.weight_M) == len(noised.chosen_M)
    there = send(noised, torch.device("meta"))
    tensors = [*there.clean, there.xt_BKL, there.chosen_M, there.weight_M, there.counted]
    assert {x.device.type for x in tensors} == {"meta"}
    assert there.layout is noised.layout


def test_processes_are_not_asked_through_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Lightning's own question to all processes before each micro-batch reads a tensor."""
    config = TrainerConfig(accelerator="cpu", devices=1)
    io = DurableCheckpointIO({}, sharded=False)
    trainer = build_trainer(
        config, steps=1, grad_clip=0, callbacks=[], loggers=[], checkpoint_io=io, directory=str(tmp_path)
    )
    with nothing_waits():
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()


def test_gradients_of_an_incomplete_step_are_not_exchanged(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Two micro-batches a step: DistributedDataParallel sums over processes in the second one only."""
    exchanged: list[bool] = []
    plain = DiffusionModule.training_step

    def spy(module: DiffusionModule, *arguments: Any) -> torch.Tensor:
        exchanged.append(module.trainer.strategy.model.require_backward_grad_sync)
        return plain(module, *arguments)

    monkeypatch.setattr(DiffusionModule, "training_step", spy)
    run(make_config(trainer__max_steps=2, trainer__strategy=Strategy.ddp))
    assert exchanged == [False, True, False, True]
