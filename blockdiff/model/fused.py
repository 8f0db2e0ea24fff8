"""Element-wise parts of a layer with hand-written derivatives, for the CPU.

There memory traffic, not arithmetic, is the price of element-wise work: composed of single operations, each of these
reads and writes its operands several times over and keeps every intermediate result for the backward pass. On CUDA
`torch.compile` fuses the plain formulas, which stand beside these in `blockdiff.model.layers` and are their oracle.

Legend: D width (last dimension), E head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class FusedRMSNorm(torch.autograd.Function):
    """x · r · weight with r = (mean x² + ε)^(−1/2); keeps x and r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        return (x * scale).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """dx = r · (g·w − x̂ · mean(g·w·x̂)) with x̂ = x·r; dw = Σ g·x̂."""
        x, weight_D, scale = ctx.saved_tensors
        unit = x * scale
        product = grad * unit
        grad_weight_D = product.flatten(0, -2).sum(0)
        mean = (product @ weight_D).div_(-x.shape[-1]).unsqueeze_(-1)
        grad_x = (grad * weight_D).addcmul_(unit, mean).mul_(scale)
        return grad_x, grad_weight_D, None


class FusedSwiGLU(torch.autograd.Function):
    """silu(gate) · up, where gate and up lie side by side in one tensor; the gradient is written side by side too."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """d up = g · silu(gate); d gate = g · up · σ · (1 + gate · (1 − σ))."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        sigma = gate.sigmoid()
        silu = gate * sigma
        torch.mul(grad, silu, out=grad_up)
        # σ · (1 + gate · (1 − σ)) = σ + silu − silu · σ, in place of silu.
        slope = silu.addcmul_(silu, sigma, value=-1).add_(sigma)
        torch.mul(slope.mul_(up), grad, out=grad_gate)
        return grad_gate_up


class FusedRotation(torch.autograd.Function):
    """Rotates pairs (x_i, x_{i + E/2}); the derivative is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    first, second = x.chunk(2, -1)
    out = torch.empty_like(x)
    out_first, out_second = out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return out
