"""The parts of a decoder layer: root-mean-square norm, rotary positions, projections, SwiGLU.

Legend: B batch, T tokens, D width, H query heads, h key-value heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdiff.model.fused import FusedRMSNorm, FusedRotation, FusedSwiGLU

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries, keys, values) -> outputs of the queries' shape: the mask and the cache live in here, not in the layer."""


def _fuse(x: Tensor) -> bool:
    """Whether the hand-written derivatives of `blockdiff.model.fused` serve better than autograd's."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain formulas by itself
        return False
    return x.device.type == "cpu" and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def rotary_angles(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary positions (Su et al., "RoFormer", 2021), the half-split layout of today's open models.

    Args:
        position: integer positions (T) or (B, T).
        head_dim: E, even.
        theta: base of the frequencies.
        dtype: of the result; angles are computed in at least single precision.

    Returns:
        Two tensors that broadcast with (B, heads, T, E/2).
    """
    exact = torch.promote_types(dtype, torch.float32)
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=position.device, dtype=exact) / head_dim)
    angle = position[..., None].to(exact) * frequency
    if angle.dim() == 3:
        angle = angle[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (x_i, x_{i + E/2}) by their position's angles."""
    if _fuse(x_BHTE):
        return FusedRotation.apply(x_BHTE, cos, sin)
    first, second = x_BHTE.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def take_tokens(x_BTD: Tensor, queries: slice | Tensor) -> Tensor:
    """The tokens (B, Q, D) at `queries`: a slice, or int64 (B, Q) places of each row."""
    if isinstance(queries, slice):
        return x_BTD[:, queries]
    return x_BTD.gather(1, queries[..., None].expand(-1, -1, x_BTD.shape[-1]))


def take_angles(angle: Tensor, queries: slice | Tensor) -> Tensor:
    """Rotary angles (T, E/2) or (B, 1, T, E/2) of the tokens at `queries`."""
    if isinstance(queries, slice):
        return angle[..., queries, :]
    if angle.dim() == 2:
        return angle[queries][:, None]
    return take_tokens(angle.squeeze(1), queries)[:, None]


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if _fuse(x):
            return FusedRMSNorm.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class AttentionProjections(nn.Module):
    """Queries, keys and values of a layer, and the projection of attention's output."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool, qk_norm: bool, eps: float
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.query_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, eps) if qk_norm else None

    def project(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, queries: slice | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, H, Tq, E) of the tokens in `queries`; rotated keys and values (B, h, T, E) of all."""
        tokens = x_BTD.shape[1]
        if isinstance(queries, slice) and range(tokens)[queries] == range(tokens):
            heads = self._heads(self.qkv(x_BTD))
            query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        else:
            width = self.heads * self.head_dim
            bias = (None, None) if self.qkv.bias is None else self.qkv.bias.tensor_split([width])
            query = self._heads(F.linear(take_tokens(x_BTD, queries), self.qkv.weight[:width], bias[0]))
            key, value = self._heads(F.linear(x_BTD, self.qkv.weight[width:], bias[1])).chunk(2, 1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query = rotate(query, take_angles(cos, queries), take_angles(sin, queries))
        # Angles are kept in the weights' precision; under autocast the products come back to the values' type.
        return query.to(value.dtype), rotate(key, cos, sin).to(value.dtype), value

    def _heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer, 2020); gate and up are one product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        if _fuse(gate_up):
            return self.down(FusedSwiGLU.apply(gate_up))
        gate, up = gate_up.chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """One transformer unit. How its tokens see each other is an argument, so training and sampling share it."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        mlp_width: int,
        *,
        bias: bool,
        qk_norm: bool,
        eps: float,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width, eps)
        self.attention = AttentionProjections(width, heads, kv_heads, head_dim, bias=bias, qk_norm=qk_norm, eps=eps)
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, mlp_width)

    def forward(
        self,
        x_BTD: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        queries: slice | Tensor = slice(None),
        chosen: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after attention and MLP.

        Args:
            x_BTD: residual stream.
            cos: rotary cosines of all T tokens.
            sin: rotary sines.
            attend: attention over this call's queries, keys and values.
            queries: the tokens that go on, a slice or int64 (B, Tq) places; the others give keys and values only.
            chosen: int64 (M), flat indices into the B·Tq tokens that go on: only these meet the MLP.

        Returns:
            (B, Tq, D), or (M, D) where `chosen`.
        """
        heads = attend(*self.before(x_BTD, cos, sin, queries))
        heads, x = heads.transpose(1, 2).flatten(2), take_tokens(x_BTD, queries)
        if chosen is None:
            return self.after(heads, x)
        return self.after_chosen(heads.flatten(0, 1)[chosen], x.flatten(0, 1)[chosen])

    # What comes before and after attention has names of its own, for `blockdiff.model.compilation` to compile.

    def before(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, queries: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the residual stream: see `AttentionProjections.project`."""
        return self.attention.project(self.attention_norm(x_BTD), cos, sin, queries)

    def after(self, heads_BTC: Tensor, x_BTD: Tensor) -> Tensor:
        """The residual stream after attention's output (B, T, H·E) and the MLP."""
        return self._add(heads_BTC, x_BTD)

    def after_chosen(self, heads_MC: Tensor, x_MD: Tensor) -> Tensor:
        """As `after`, of chosen tokens, whose number changes from step to step."""
        return self._add(heads_MC, x_MD)

    def _add(self, heads: Tensor, x: Tensor) -> Tensor:
        x = x + self.attention.out(heads)
        return x + self.mlp(self.mlp_norm(x))
