"""Hand-written derivatives against autograd's of the plain formulas, and against finite differences."""

import pytest
import torch
import torch.nn.functional as F

from blockdiff.model.fused import FusedRMSNorm, FusedRotation, FusedSwiGLU
from blockdiff.model.layers import rotary_angles


def plain_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def plain_swiglu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def plain_rotation(x):
    """As multiplication of complex numbers x_i + i·x_{i + E/2} by e^{i·angle}."""
    cos, sin = rotary_angles(torch.arange(x.shape[-2]), x.shape[-1], 100.0, x.dtype)
    pairs = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)
    return torch.cat([pairs.real, pairs.imag], -1)


def fused_rotation(x):
    return FusedRotation.apply(x, *rotary_angles(torch.arange(x.shape[-2]), x.shape[-1], 100.0, x.dtype))


@pytest.mark.parametrize(
    ("fused", "plain", "shapes"),
    [
        (lambda x, w: FusedRMSNorm.apply(x, w, 1e-6), plain_norm, [(2, 3, 5, 8), (8,)]),
        (FusedSwiGLU.apply, plain_swiglu, [(2, 5, 12)]),
        (fused_rotation, plain_rotation, [(2, 3, 5, 8)]),
    ],
    ids=["norm", "swiglu", "rotation"],
)
def test_value_and_gradients_are_those_of_the_plain_formula(fused, plain, shapes):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.allclose(fused(*inputs), plain(*inputs), atol=1e-13)
    slope = torch.randn_like(plain(*inputs))
    got = torch.autograd.grad(fused(*inputs), inputs, slope)
    want = torch.autograd.grad(plain(*inputs), inputs, slope)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, want, strict=True))
    assert torch.autograd.gradcheck(fused, inputs)


def test_transposed_heads_are_served_too():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
    assert torch.allclose(fused_rotation(x), plain_rotation(x), atol=1e-13)
    assert torch.autograd.gradcheck(fused_rotation, [x])
