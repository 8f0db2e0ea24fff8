"""Attention of query groups on the CPU, part by part, with one hand-written derivative.

Legend: B batch, H query heads, h key-value heads, E head dim, T tokens, G queries of a group.

PyTorch's CPU kernel gives each part's output and its log-sum-exp, from which parts are merged exactly. Backwards, each
part only needs the *merged* output and log-sum-exp (Liu et al., "Ring attention", 2023), so nothing but those is kept,
no mask is stored but the small shared ones, and gradients are added up in place: memory grows with T, not with T².
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blockdiff.model.plan import Group, Part

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def merged_attention(query_BHTE: Tensor, key_BhTE: Tensor, value_BhTE: Tensor, groups: list[Group]) -> Tensor:
    """Attention of all groups, of the queries' shape.

    Args:
        query_BHTE: queries, those of the groups end to end from the first on.
        key_BhTE: keys of all streams.
        value_BhTE: values of all streams.
        groups: who sees whom.
    """
    share = query_BHTE.shape[1] // key_BhTE.shape[1]
    if share > 1:  # the kernel wants as many key-value heads as query heads
        key_BhTE, value_BhTE = (x.repeat_interleave(share, 1) for x in (key_BhTE, value_BhTE))
    return _MergedAttention.apply(query_BHTE, key_BhTE, value_BhTE, groups)


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor, groups: list[Group]) -> Tensor:
        out_BHTE = _heads_last(query_BHTE)
        lse_BHT = query_BHTE.new_empty(query_BHTE.shape[:3], dtype=torch.promote_types(query_BHTE.dtype, torch.float32))
        for group in groups:
            query = query_BHTE[:, :, group.queries]
            results = [
                _forward(query, _pick(key_BHTE, part), _pick(value_BHTE, part), 0.0, part.causal, attn_mask=part.bias)
                for part in group.parts
            ]
            out, lse = results[0]
            for other, other_lse in results[1:]:
                total = torch.logaddexp(lse, other_lse)
                out = torch.lerp(out, other, (other_lse - total).exp().unsqueeze(-1).to(out.dtype))
                lse = total
            out_BHTE[:, :, group.queries] = out
            lse_BHT[:, :, group.queries] = lse
        ctx.save_for_backward(query_BHTE, key_BHTE, value_BHTE, out_BHTE, lse_BHT)
        ctx.groups = groups
        return out_BHTE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTE: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_BHTE, key_BHTE, value_BHTE, out_BHTE, lse_BHT = ctx.saved_tensors
        grad_query = _heads_last(query_BHTE)
        grad_key, grad_value = _heads_last(key_BHTE).zero_(), _heads_last(value_BHTE).zero_()
        for group in ctx.groups:
            own = group.queries
            grad, query, out, lse = (x[:, :, own] for x in (grad_BHTE, query_BHTE, out_BHTE, lse_BHT))
            for index, part in enumerate(group.parts):
                keys, values = _pick(key_BHTE, part), _pick(value_BHTE, part)
                for_query, for_keys, for_values = _backward(
                    grad, query, keys, values, out, lse, 0.0, part.causal, attn_mask=part.bias
                )
                if index:
                    grad_query[:, :, own] += for_query
                else:
                    grad_query[:, :, own] = for_query
                _put_back(grad_key, for_keys, part)
                _put_back(grad_value, for_values, part)
        return grad_query, grad_key, grad_value, None


def _heads_last(like_BHTE: Tensor) -> Tensor:
    """An empty tensor of this shape that lies in memory as (B, T, H, E), as the projections around it want it."""
    batch, heads, tokens, dim = like_BHTE.shape
    return like_BHTE.new_empty(batch, tokens, heads, dim).transpose(1, 2)


def _pick(x_BHTE: Tensor, part: Part) -> Tensor:
    ranges = [x_BHTE[:, :, keys] for keys in part.keys if keys.stop > keys.start]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges, 2)


def _put_back(total_BHTE: Tensor, grads: Tensor, part: Part) -> None:
    start = 0
    for keys in part.keys:
        width = keys.stop - keys.start
        total_BHTE[:, :, keys] += grads[:, :, start : start + width]
        start += width
