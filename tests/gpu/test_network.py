"""The whole denoiser on CUDA: against the CPU, its own cache, lower precision and compiled layers."""

import pytest
import torch
from test_compilation import assert_close, gradients, networks
from test_denoiser import all_logits, batch, cached_oracle, make

from blockdiff.core.corruption import CorruptionKind, NoiseConfig, NoiseKey, corrupt
from blockdiff.core.masks import CleanAttention
from blockdiff.model.attention import Backend
from blockdiff.model.denoiser import Denoiser, ModelConfig


@pytest.mark.parametrize("noise", [NoiseConfig(views=2), NoiseConfig(CorruptionKind.bernoulli, stratified=False)])
def test_noise_is_the_same_on_both_devices(device, noise):
    tokens = torch.randint(0, 99, (4, 256))
    drawn = []
    for place in ("cpu", device):
        x0, slot = tokens.to(place), torch.arange(4, device=place)
        key = NoiseKey(5, 7, slot, 16)
        drawn.append(
            corrupt(x0, torch.ones_like(x0, dtype=torch.bool), block_size=16, mask_id=99, noise=noise, key=key)
        )
    assert torch.equal(drawn[0].xt_BKL, drawn[1].xt_BKL.cpu())
    assert torch.equal(drawn[0].masked_BKL, drawn[1].masked_BKL.cpu())
    assert torch.allclose(drawn[0].weight_BKL, drawn[1].weight_BKL.cpu(), rtol=1e-12)


@pytest.mark.parametrize("clean", CleanAttention)
@pytest.mark.parametrize("block_size", [1, 4, 24])
@torch.no_grad()
def test_cached_blocks_equal_the_dual_stream_and_the_cpu(device, clean, block_size):
    x0, xt = batch(views=2)
    want = all_logits(make(clean, 2), xt, x0, block_size)
    model, x0, xt = make(clean, 2).to(device), x0.to(device), xt.to(device)
    dual = all_logits(model, xt, x0, block_size)
    assert (dual - cached_oracle(model, xt, x0, block_size)).abs().max() < 1e-10
    assert (dual.cpu() - want).abs().max() < 1e-10


@pytest.mark.cuda_only
@pytest.mark.parametrize(("backend", "recompute"), [(Backend.sdpa, True), (Backend.flex, False)])
def test_compiled_equals_eager(backend, recompute):
    torch._dynamo.reset()
    plain, compiled = networks("cuda", attention=backend, activation_checkpointing=recompute)
    for share in (50, 30, 80, 100):
        assert_close(gradients(plain, share, "cuda"), gradients(compiled, share, "cuda"), 2e-2)


def test_half_precision_is_close(device):
    """Autocast to bf16 against single precision: the loss to a per cent, gradients in direction."""
    plain, _ = networks(device, attention=Backend.sdpa)
    loss, grads = gradients(plain, 60, device)
    with torch.autocast(device, torch.bfloat16):
        half_loss, half_grads = gradients(plain, 60, device)
    assert (loss - half_loss).abs() < 0.01 * loss.abs()
    for want, got in zip(grads, half_grads, strict=True):
        assert got.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(want.flatten(), got.flatten(), 0) > 0.98


@torch.no_grad()
def test_half_precision_logits_of_both_passes_agree(device):
    """bf16 weights: the cached pass against the dual-stream pass, as sampling and training would have them."""
    torch.manual_seed(0)
    model = Denoiser(ModelConfig(layers=3, width=64, heads=4, kv_heads=2, attention=Backend.sdpa), 11)
    model = model.to(device, torch.bfloat16)
    x0, xt = (x.to(device) for x in batch())
    dual, cached = all_logits(model, xt, x0, 4), cached_oracle(model, xt, x0, 4)
    assert (dual - cached).abs().max() < 0.05 * dual.abs().max()
