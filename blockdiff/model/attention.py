"""Attention behind two functions: `dual_stream_attention` for training, `cached_attention` for sampling.

Legend: B batch, K noisy views, L seq_len, H query heads, h key-value heads, E head dim, T queries, P keys.

No backend makes a dense mask over both streams: see `blockdiff.model.plan`. SDPA runs everywhere, FlexAttention on
CUDA; flash-attn serves cached sampling where it is installed.
"""

from __future__ import annotations

import functools
import importlib.util
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.core.masks import CleanAttention
from blockdiff.model.flex import flex_attention, plan_flex
from blockdiff.model.merged import merged_attention
from blockdiff.model.plan import DualStreamPlan, Group, Layout, plan_groups


class Backend(Enum):
    auto = "auto"
    sdpa = "sdpa"
    flex = "flex"
    flash = "flash"


def resolve_backend(backend: Backend, device: torch.device) -> Backend:
    """The backend that `auto` stands for in training; FlexAttention has no backward pass on the CPU."""
    if backend is Backend.auto:
        return Backend.flex if device.type == "cuda" else Backend.sdpa
    if backend is Backend.flash:
        raise ValueError(
            "model.attention=flash serves cached sampling only: its kernel takes no dual-stream mask; use auto, sdpa "
            "or flex"
        )
    return backend


def plan_dual_stream(
    document_BL: Tensor,
    block_size: int,
    *,
    views: int = 1,
    clean_attention: CleanAttention = CleanAttention.causal,
    backend: Backend = Backend.sdpa,
    dtype: torch.dtype = torch.float32,
    layout: Layout | None = None,
) -> DualStreamPlan:
    """The attention pattern of a batch for a backend; arguments as of `plan_groups`."""
    if backend is Backend.flex:
        return plan_flex(document_BL, block_size, views=views, clean_attention=clean_attention, layout=layout)
    return plan_groups(
        document_BL, block_size, views=views, clean_attention=clean_attention, dtype=dtype, layout=layout
    )


def dual_stream_attention(
    query_BHTE: Tensor,
    key_BhTE: Tensor,
    value_BhTE: Tensor,
    plan: DualStreamPlan,
    *,
    noisy_only: bool = False,
) -> Tensor:
    """Attention over [view 0 ; … ; view K−1 ; clean] along T = (K + 1)·L.

    Args:
        query_BHTE: queries; only the noisy K·L of them where `noisy_only`.
        key_BhTE: keys of both streams, rotated.
        value_BhTE: values of both streams.
        plan: of this batch.
        noisy_only: leave out the clean queries (the last layer: nobody reads the clean stream after it).

    Returns:
        Of the queries' shape.
    """
    if plan.flex is not None:
        mask = plan.flex.noisy_only if noisy_only else plan.flex.both
        return flex_attention(query_BHTE, key_BhTE, value_BhTE, mask)
    groups = plan.noisy if noisy_only else plan.noisy + plan.clean
    if query_BHTE.device.type == "cpu":
        return merged_attention(query_BHTE, key_BhTE, value_BhTE, groups)
    return torch.cat([_one_call(query_BHTE, key_BhTE, value_BhTE, group) for group in groups], 2)


def _one_call(query_BHTE: Tensor, key_BhTE: Tensor, value_BhTE: Tensor, group: Group) -> Tensor:
    """A group's attention as one call over all of its keys: what `merged_attention` does part by part."""
    ranges = [keys for part in group.parts for keys in part.keys]
    query = query_BHTE[:, :, group.queries]
    keys, values = (torch.cat([x[:, :, r] for r in ranges], 2) for x in (key_BhTE, value_BhTE))
    share, bias = query.shape[1] // keys.shape[1], _whole_bias(group)
    if bias is None:
        causal = group.parts[0].causal
        return F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=share > 1)
    # Of CUDA's kernels, that which takes a mask cannot share key-value heads, and the other would write out all pairs.
    keys, values = (x.repeat_interleave(share, 1) if share > 1 else x for x in (keys, values))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias)


def _whole_bias(group: Group) -> Tensor | None:
    """The masks of all parts side by side; None where there is none."""
    biases = [part.bias for part in group.parts]
    present = next((bias for bias in biases if bias is not None), None)
    if present is None:
        return None
    shapes = [(*present.shape[:-1], sum(r.stop - r.start for r in part.keys)) for part in group.parts]
    return torch.cat(
        [present.new_zeros(s) if bias is None else bias for s, bias in zip(shapes, biases, strict=True)], -1
    )


def cached_attention(
    query_BHTE: Tensor, key_BhPE: Tensor, value_BhPE: Tensor, allowed: Tensor | None, *, flash: bool = False
) -> Tensor:
    """Attention of few queries over a cache.

    Args:
        query_BHTE: queries, rotated.
        key_BhPE: keys, the scratch slots of this call included.
        value_BhPE: values.
        allowed: bool (1 or B, T or 1, P), or None where every query sees every key.
        flash: use flash-attn where it applies (no mask, half precision on CUDA).

    Returns:
        Of the queries' shape.
    """
    if flash and allowed is None and query_BHTE.is_cuda and query_BHTE.dtype in (torch.float16, torch.bfloat16):
        return _flash(query_BHTE, key_BhPE, value_BhPE)
    batch, heads, tokens, _ = query_BHTE.shape
    kv_heads = key_BhPE.shape[1]
    # Query heads that share a key-value head become further queries of it: keys are read once and never repeated.
    share = heads // kv_heads
    query = query_BHTE.reshape(batch, kv_heads, share * tokens, -1)
    mask = None if allowed is None else allowed[:, None]
    if mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, share, 1)
    out = F.scaled_dot_product_attention(query, key_BhPE, value_BhPE, attn_mask=mask)
    return out.reshape(query_BHTE.shape)


@functools.cache
def flash_available() -> bool:
    """Whether flash-attn is installed (extra ``flash``)."""
    return importlib.util.find_spec("flash_attn") is not None


def _flash(query_BHTE: Tensor, key_BhPE: Tensor, value_BhPE: Tensor) -> Tensor:
    from flash_attn import flash_attn_func

    out = flash_attn_func(*(x.transpose(1, 2) for x in (query_BHTE, key_BhPE, value_BhPE)))
    return out.transpose(1, 2)
