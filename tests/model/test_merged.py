"""Attention part by part against one call over all keys, whose derivative is autograd's."""

import pytest
import torch

from blockdiff.core.masks import CleanAttention
from blockdiff.model import plan as plan_module
from blockdiff.model.attention import _one_call, plan_dual_stream
from blockdiff.model.merged import merged_attention

L = 24
ONE = [[0] * L] * 2
MANY = [[0] * 12 + [1] * 12, [0] * 4 + [1] * 20]


@pytest.mark.parametrize("clean", CleanAttention)
@pytest.mark.parametrize(("documents", "block_size"), [(ONE, 1), (ONE, 4), (ONE, 12), (ONE, 24), (MANY, 2), (MANY, 4)])
@pytest.mark.parametrize(("views", "kv_heads"), [(1, 4), (2, 2)])
def test_value_and_gradients(clean, documents, block_size, views, kv_heads, monkeypatch):
    monkeypatch.setattr(plan_module, "GROUP_TOKENS", 8)
    torch.manual_seed(0)
    plan = plan_dual_stream(
        torch.tensor(documents), block_size, views=views, clean_attention=clean, dtype=torch.float64
    )
    tokens = (views + 1) * L
    inputs = [
        torch.randn(2, tokens, heads, 6, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    groups = plan.noisy + plan.clean
    merged = merged_attention(*inputs, groups)
    whole = torch.cat([_one_call(*inputs, group) for group in groups], 2)
    assert torch.allclose(merged, whole, atol=1e-12)
    slope = torch.randn_like(whole)
    got, want = (torch.autograd.grad(out, inputs, slope) for out in (merged, whole))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, want, strict=True))


def test_masks_do_not_grow_with_the_sequence():
    """One document: groups of a shape share one mask, so their number is that of shapes, not of groups."""
    for length in (1024, 4096):
        plan = plan_dual_stream(torch.zeros(1, length, dtype=torch.int64), 16)
        biases = {id(part.bias): part.bias for group in plan.noisy + plan.clean for part in group.parts}
        size = plan_module.GROUP_TOKENS
        assert sum(b.numel() for b in biases.values() if b is not None) == size * (size - 16 + size)
