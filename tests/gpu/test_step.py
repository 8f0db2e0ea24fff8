"""A training step on CUDA that never waits, and a run that is killed and goes on."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from blockdiff.core.corruption import NoiseConfig, NoiseKey
from blockdiff.data.batch import Batch
from blockdiff.model.attention import Backend
from blockdiff.model.compilation import compile_layers
from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.training.config import OptimizerConfig, OptimizerName
from blockdiff.training.ema import averaged_copy, update_average
from blockdiff.training.meter import Meter
from blockdiff.training.optimizer import build_optimizer
from blockdiff.training.staging import noise_batch, send

L, S, V = 256, 8, 50


@contextmanager
def cuda_never_waits():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loaded(step, many):
    """A batch on the host, pinned as the loader pins it; with many documents they lie differently in each."""
    generator = torch.Generator().manual_seed(step)
    border = torch.rand(4, L // S, generator=generator) < (0.2 if many else 0)
    border[:, 0] = False
    document_BL = border.cumsum(1).repeat_interleave(S, 1).to(torch.int32)
    tokens_BL = torch.randint(0, V, (4, L), generator=generator)
    row_B, count = torch.arange(4), torch.tensor(4 * L)
    batch = (tokens_BL, document_BL, torch.ones(4, L, dtype=torch.bool), row_B, row_B, torch.tensor(step), count)
    return Batch(*(x.pin_memory() if torch.cuda.is_available() else x for x in batch))


@pytest.mark.parametrize(
    ("name", "backend", "compiled", "many"),
    [
        (OptimizerName.adamw, Backend.sdpa, False, True),
        (OptimizerName.muon, Backend.sdpa, False, False),
        pytest.param(OptimizerName.muon, Backend.flex, False, True, marks=pytest.mark.cuda_only),
        pytest.param(OptimizerName.adamw, Backend.flex, True, False, marks=pytest.mark.cuda_only),
    ],
)
def test_no_step_waits(device, name, backend, compiled, many):
    torch.manual_seed(0)
    denoiser = Denoiser(ModelConfig(layers=3, width=64, heads=4, kv_heads=2, attention=backend), V)
    average = averaged_copy(denoiser).to(device)
    if compiled:
        torch._dynamo.reset()
        compile_layers(denoiser)
    denoiser.to(device)
    optimizer = build_optimizer(denoiser, OptimizerConfig(name=name, warmup_steps=0))
    meter = Meter(torch.device(device))
    noise, losses = NoiseConfig(), []

    def step(number):
        batch = loaded(number, many)
        noised = noise_batch(batch, NoiseKey(0, number, batch.slot_B, 4), noise, block_size=S, mask_id=V)
        noised = send(noised, torch.device(device))
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            plan = denoiser.plan(noised.clean.document_BL, S, 1, noised.layout)
            nats, _ = denoiser.weighted_nll(
                noised.xt_BKL, noised.clean.tokens_BL, plan, noised.chosen_M, noised.weight_M
            )
        meter.add(nats, noised.counted, number, noised.clean.sample_B)
        loss = nats / noised.clean.global_count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_average(average, denoiser, number, 0.9)
        losses.append(loss.detach())

    for number in range(2):  # kernels are compiled, plans laid out
        step(number)
    with cuda_never_waits() if device == "cuda" else nullcontext():
        for number in range(2, 6):
            step(number)
    assert meter.non_finite() is None
    assert torch.stack(losses).isfinite().all()


@pytest.mark.cuda_only
def test_the_debug_mode_sees_what_waits():
    x = torch.arange(3, device="cuda")
    with cuda_never_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        x.nonzero()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.cuda_only)])
def test_a_killed_run_goes_on(device, tmp_path, compiled):
    """Four steps, and two of them after a resume from the second: the same losses to rounding."""
    for package in ("lightning", "datasets", "tokenizers", "omegaconf"):
        pytest.importorskip(package)
    from leftovers import as_if_killed_after, curves
    from miniature import miniature, run, write_corpus

    corpus = write_corpus(tmp_path / "text.txt")
    changes = {
        "trainer__accelerator": "gpu" if device == "cuda" else "cpu",
        "trainer__max_steps": 4,
        "trainer__log_every": 1,
    }
    changes["trainer__compile"] = compiled
    whole = run(miniature(tmp_path, corpus, name="whole", **changes))
    as_if_killed_after(whole.directory, 2, whole.directory.parent / "killed")
    run(miniature(tmp_path, corpus, name="killed", **changes))
    for one, other in zip(curves(whole.directory), curves(whole.directory.parent / "killed"), strict=True):
        assert one == pytest.approx(other, rel=1e-2)
