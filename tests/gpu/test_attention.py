"""FlexAttention as compiled for CUDA against SDPA, and SDPA on CUDA against the CPU in double precision."""

import pytest
import torch
from torch._dynamo.utils import counters

from blockdiff.core.masks import CleanAttention
from blockdiff.model.attention import (
    Backend,
    cached_attention,
    dual_stream_attention,
    flash_available,
    plan_dual_stream,
)

SHAPES = [(256, 1), (256, 4), (256, 16), (256, 256), (384, 8)]


def documents(length, unit, many):
    if not many or unit == length:
        return torch.zeros(2, length, dtype=torch.int32)
    border = torch.rand(2, length // unit, generator=torch.Generator().manual_seed(unit)) < 0.1
    border[:, 0] = False
    return border.cumsum(1).repeat_interleave(unit, 1).to(torch.int32)


def streams(length, views, kv_heads, device, dtype):
    """Queries, keys and values of all streams, and a slope to pull back; the same numbers on every device."""
    generator = torch.Generator().manual_seed(length)
    heads = (4, kv_heads, kv_heads, 4)
    return [torch.randn(2, h, (views + 1) * length, 32, generator=generator).to(device, dtype) for h in heads]


def attend(backend, device, dtype, *, length, block_size, views, clean, many, noisy_only, kv_heads=2):
    """The output and the gradients of queries, keys and values."""
    query, key, value, slope = streams(length, views, kv_heads, device, dtype)
    if noisy_only:
        query, slope = (x[:, :, : views * length] for x in (query, slope))
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    plan = plan_dual_stream(
        documents(length, block_size, many).to(device),
        block_size,
        views=views,
        clean_attention=clean,
        backend=backend,
        dtype=dtype,
    )
    out = dual_stream_attention(*inputs, plan, noisy_only=noisy_only)
    return [out.detach(), *torch.autograd.grad(out, inputs, slope)]


def assert_close(got, want, tolerance):
    for one, other in zip(got, want, strict=True):
        assert torch.isfinite(one).all()
        assert (one.double().cpu() - other.double().cpu()).abs().max() < tolerance * other.abs().max()


@pytest.mark.parametrize(("length", "block_size"), SHAPES)
@pytest.mark.parametrize("clean", CleanAttention)
@pytest.mark.parametrize(("views", "many"), [(1, False), (2, True)])
def test_sdpa_equals_the_cpu_in_double_precision(device, length, block_size, clean, views, many):
    case = {"length": length, "block_size": block_size, "views": views, "clean": clean, "many": many}
    for noisy_only in (False, True):
        want = attend(Backend.sdpa, "cpu", torch.float64, **case, noisy_only=noisy_only)
        got = attend(Backend.sdpa, device, torch.float64, **case, noisy_only=noisy_only)
        assert_close(got, want, 1e-10)


# Few: each is a kernel forwards and one backwards, at seconds apiece.
FLEX = [
    (256, 1, CleanAttention.causal, 1, False, False, torch.float32),
    (384, 8, CleanAttention.block, 1, True, False, torch.float32),
    (256, 16, CleanAttention.causal, 1, True, False, torch.bfloat16),
    (256, 4, CleanAttention.block, 2, True, True, torch.bfloat16),
    (256, 256, CleanAttention.causal, 2, False, True, torch.bfloat16),
]


@pytest.mark.cuda_only
@pytest.mark.parametrize(("length", "block_size", "clean", "views", "many", "noisy_only", "dtype"), FLEX)
def test_flex_equals_sdpa_forwards_and_backwards(length, block_size, clean, views, many, noisy_only, dtype):
    case = {"length": length, "block_size": block_size, "views": views, "clean": clean, "many": many}
    want = attend(Backend.sdpa, "cpu", torch.float64, **case, noisy_only=noisy_only)
    got = attend(Backend.flex, "cuda", dtype, **case, noisy_only=noisy_only)
    assert_close(got, want, 4e-2)  # also in single precision its kernel may round factors, to TensorFloat-32


@pytest.mark.cuda_only
def test_new_documents_need_no_new_kernel():
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    for seed in range(3):
        border = torch.rand(2, 32, generator=torch.Generator().manual_seed(seed)) < 0.2
        border[:, 0] = False
        document = border.cumsum(1).repeat_interleave(8, 1).to("cuda", torch.int32)
        query, key, value, _ = streams(256, 1, 2, "cuda", torch.bfloat16)
        dual_stream_attention(query, key, value, plan_dual_stream(document, 8, backend=Backend.flex))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 1]


@pytest.mark.cuda_only
@pytest.mark.skipif(not flash_available(), reason="needs flash-attn (extra flash)")
def test_flash_equals_sdpa_over_a_cache():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, h, t, 64, generator=generator).to("cuda", torch.bfloat16)
        for h, t in ((8, 16), (2, 500), (2, 500))
    )
    flash = cached_attention(query, key, value, None, flash=True)
    plain = cached_attention(query.double(), key.double(), value.double(), None)
    assert (flash.double() - plain).abs().max() < 2e-2 * plain.abs().max()
