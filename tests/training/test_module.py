"""The training step against the bound written out, and against its own splits; the meter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from miniature import RunConfig, final_checkpoint, run

from blockdiff.build import build_denoiser, pack
from blockdiff.core.corruption import NoiseKey, corrupt
from blockdiff.data.loader import TrainBatches
from blockdiff.data.prepare import prepare
from blockdiff.training.meter import Meter
from blockdiff.training.metrics import read_rows

Make = Callable[..., RunConfig]


@pytest.mark.parametrize("changes", [{}, {"noise__views": 2}, {"block_size": 1}, {"block_size": 32}])
def test_first_loss_is_the_weighted_nll_per_counted_token(make_config: Make, changes: dict[str, Any]) -> None:
    """Row 1 is Σ w · −log p / counted tokens of step 0, from whole logits of the whole global batch."""
    config = make_config(trainer__max_steps=1, trainer__precision="64-true", data__micro_batch_size=2, **changes)
    summary = run(config)
    prepared = prepare(config.data)
    batches = TrainBatches(pack(config, prepared, "train"), seed=config.seed, global_batch_size=4, micro_batch_size=4)
    batch = batches[0]
    denoiser = build_denoiser(config, prepared.tokenizer.vocab_size).double()
    noised = corrupt(
        batch.tokens_BL,
        batch.counted_BL,
        block_size=config.block_size,
        mask_id=denoiser.mask_id,
        noise=config.noise,
        key=NoiseKey(config.seed, 0, batch.slot_B, 4),
    )
    total = 0.0
    with torch.no_grad():
        for k in range(config.noise.views):
            plan = denoiser.plan(batch.document_BL, config.block_size)
            every = torch.arange(batch.tokens_BL.numel())
            logits = denoiser(noised.xt_BKL[:, k : k + 1], batch.tokens_BL, plan, every).view(4, 32, -1)
            log_p = logits.log_softmax(-1).gather(-1, batch.tokens_BL[..., None]).squeeze(-1)
            total += float(-(log_p * noised.weight_BKL[:, k]).sum())
    expected = total / config.noise.views / int(batch.counted_BL.sum())
    assert summary.train == pytest.approx(expected, rel=1e-10)


def test_a_step_does_not_depend_on_how_its_batch_is_split(make_config: Make) -> None:
    """1 × 4 = 2 × 2 = 4 × 1: the same losses and weights up to the order of summation."""
    results = []
    for micro in (1, 2, 4):
        changes = {"data__micro_batch_size": micro, "trainer__precision": "64-true", "trainer__log_every": 1}
        config = make_config(name=f"micro{micro}", trainer__max_steps=8, **changes)
        summary = run(config)
        losses = torch.tensor([row["train/nelbo"] for row in read_rows(summary.directory)], dtype=torch.float64)
        results.append((losses, final_checkpoint(summary)["state_dict"]))
    for losses, weights in results[1:]:
        torch.testing.assert_close(losses, results[0][0], rtol=1e-10, atol=0)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, results[0][1][name], rtol=1e-7, atol=1e-9)


def test_gradients_are_clipped(make_config: Make) -> None:
    """A clip far below AdamW's eps all but stops the weights."""
    free, clipped = (
        final_checkpoint(run(make_config(name=f"clip{clip}", optimizer__grad_clip=clip)))["state_dict"]
        for clip in (0.0, 1e-9)
    )
    moved = [float((free[name] - clipped[name]).abs().max()) for name in free]
    assert max(moved) > 1e-4


def test_meter_sums_and_remembers_the_first_non_finite_loss() -> None:
    meter = Meter(torch.device("cpu"))
    one = torch.tensor(1.0)
    meter.add(one, torch.tensor(3), 0, torch.tensor([1, 2]))
    assert meter.non_finite() is None
    meter.add(one * torch.inf, torch.tensor(3), 1, torch.tensor([5, 6]))
    meter.add(one * torch.nan, torch.tensor(3), 2, torch.tensor([7, 8]))
    assert meter.non_finite() == (1, [5, 6])
    assert meter.sums_2[1] == 9
    meter.reset()
    assert meter.sums_2.tolist() == [0, 0]


def test_meter_finds_a_loss_that_is_bad_from_the_start() -> None:
    meter = Meter(torch.device("cpu"))
    meter.add(torch.tensor(torch.nan), torch.tensor(3), 0, torch.tensor([4]))
    assert meter.non_finite() == (0, [4])
