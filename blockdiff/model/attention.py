"""Attention behind two functions: `dual_stream_attention` for training, `cached_attention` for sampling.

Legend: B batch, K noisy views, L seq_len, S block size, H query heads, h key-value heads, E head dim, T queries, P
keys.

No backend makes a dense mask over both streams. The SDPA backend cuts the queries into groups of a few blocks; each
group meets only the keys that the rule of `blockdiff.core.masks` lets it see, so that the cost stays near the triangle.
FlexAttention does the same on CUDA from a block mask. flash-attn serves cached sampling where it is installed.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.core.masks import CLEAN, CleanAttention, Place, may_attend


class Backend(Enum):
    auto = "auto"
    sdpa = "sdpa"
    flex = "flex"
    flash = "flash"


GROUP_TOKENS = 128
"""Queries that share one call: below it kernels starve, above it masked pairs are computed in vain."""


@dataclass
class Group:
    """Consecutive queries of one stream and the keys they may see.

    Attributes:
        queries: positions of the queries.
        clean: positions of the clean keys (may be empty).
        noisy: positions of the noisy keys of the same view (empty for clean queries).
        bias: additive mask (1 or B, 1, queries, keys) with 0 or −inf, or None where all pairs are allowed.
    """

    queries: slice
    clean: slice
    noisy: slice
    bias: Tensor | None


@dataclass
class DualStreamPlan:
    """Who sees whom in one batch, worked out once and used by every layer.

    Made by `plan_dual_stream`. `groups` serve the SDPA backend, `block_mask` FlexAttention; one of them is None.
    """

    views: int
    length: int
    noisy_groups: list[Group] | None
    clean_groups: list[Group] | None
    block_mask: FlexMasks | None


@dataclass
class FlexMasks:
    """FlexAttention's block masks: of all queries, and of the noisy ones (the last layer has no others)."""

    both: Any
    noisy_only: Any


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
) -> DualStreamPlan:
    """Works out the attention pattern of a batch.

    Args:
        document_BL: int index of each position's document; documents lie end to end, borders on block borders.
        block_size: S, a divisor of L.
        views: K.
        clean_attention: what clean tokens see.
        backend: ``sdpa`` or ``flex``.
        dtype: of the additive masks; that of the queries.
    """
    length = document_BL.shape[1]
    single = bool((document_BL == document_BL[:, :1]).all())
    if backend is Backend.flex:
        mask = _flex_mask(
            None if single else document_BL, length, block_size, views, clean_attention, document_BL.device
        )
        return DualStreamPlan(views, length, None, None, mask)
    group = max(GROUP_TOKENS // block_size, 1) * block_size if block_size <= GROUP_TOKENS else GROUP_TOKENS
    starts_L = _document_starts(document_BL)
    noisy: list[Group] = []
    clean: list[Group] = []
    for begin in range(0, length, group):
        end = min(begin + group, length)
        own = slice(begin // block_size * block_size, -(-end // block_size) * block_size)
        first = 0 if single else int(starts_L[begin])
        last_block = (end - 1) // block_size * block_size
        clean_end = end if clean_attention is CleanAttention.causal else own.stop
        queries = slice(begin, end)
        for groups, clean_keys, noisy_keys in (
            (noisy, slice(min(first, last_block), last_block), own),
            (clean, slice(first, clean_end), slice(0, 0)),
        ):
            rows = document_BL[:1] if single else document_BL
            bias = _group_bias(queries, clean_keys, noisy_keys, rows, block_size, views, clean_attention, dtype)
            groups.append(Group(queries, clean_keys, noisy_keys, bias))
    return DualStreamPlan(views, length, noisy, clean, None)


def _document_starts(document_BL: Tensor) -> list[int]:
    """For each position the earliest start of its document over the batch: no key before it is ever needed."""
    position_L = torch.arange(document_BL.shape[1], device=document_BL.device)
    border_BL = torch.ones_like(document_BL, dtype=torch.bool)
    border_BL[:, 1:] = document_BL[:, 1:] != document_BL[:, :-1]
    start_BL = torch.where(border_BL, position_L, 0).cummax(1).values
    return start_BL.amin(0).tolist()


def _group_bias(
    queries: slice,
    clean_keys: slice,
    noisy_keys: slice,
    document_BL: Tensor,
    block_size: int,
    views: int,
    clean_attention: CleanAttention,
    dtype: torch.dtype,
) -> Tensor | None:
    """The additive mask of one group; None where nothing is masked. Queries and noisy keys of all views lie end to
    end."""
    noisy_group = noisy_keys.stop > noisy_keys.start
    query = _places([(v, queries) for v in (range(views) if noisy_group else [CLEAN])], document_BL, block_size)
    noisy = [(v, noisy_keys) for v in range(views)] if noisy_group else []
    key = _places([(CLEAN, clean_keys), *noisy], document_BL, block_size)
    allowed = may_attend(
        Place(*(x[..., :, None] for x in query)), Place(*(x[..., None, :] for x in key)), clean_attention
    )
    if bool(allowed.all()):
        return None
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    return bias[:, None]


def _places(parts: list[tuple[int, slice]], document_BL: Tensor, block_size: int) -> Place:
    device = document_BL.device
    position_T = torch.cat([torch.arange(s.start, s.stop, device=device) for _, s in parts])
    view_T = torch.cat([torch.full((s.stop - s.start,), view, device=device) for view, s in parts])
    document_BT = document_BL[:, position_T]
    return Place(view_T[None], position_T[None], (position_T // block_size)[None], document_BT)


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
    if plan.block_mask is not None:
        return _flex(query_BHTE, key_BhTE, value_BhTE, plan.block_mask, noisy_only)
    assert plan.noisy_groups is not None
    assert plan.clean_groups is not None
    noisy_tokens = plan.views * plan.length
    clean_key, clean_value = key_BhTE[:, :, noisy_tokens:], value_BhTE[:, :, noisy_tokens:]
    split = lambda x: x[:, :, :noisy_tokens].unflatten(2, (plan.views, plan.length))  # noqa: E731
    noisy_query, noisy_key, noisy_value = split(query_BHTE), split(key_BhTE), split(value_BhTE)
    outputs = []
    for group in plan.noisy_groups:
        keys = torch.cat([clean_key[:, :, group.clean], noisy_key[:, :, :, group.noisy].flatten(2, 3)], 2)
        values = torch.cat([clean_value[:, :, group.clean], noisy_value[:, :, :, group.noisy].flatten(2, 3)], 2)
        out = _sdpa(noisy_query[:, :, :, group.queries].flatten(2, 3), keys, values, group.bias)
        outputs.append(out.unflatten(2, (plan.views, -1)))
    noisy_out = torch.cat(outputs, 3).flatten(2, 3)
    if noisy_only:
        return noisy_out
    clean_query = query_BHTE[:, :, noisy_tokens:]
    clean_out = [
        _sdpa(clean_query[:, :, g.queries], clean_key[:, :, g.clean], clean_value[:, :, g.clean], g.bias)
        for g in plan.clean_groups
    ]
    return torch.cat([noisy_out, *clean_out], 2)


def _sdpa(query_BHTE: Tensor, key_BhPE: Tensor, value_BhPE: Tensor, bias: Tensor | None) -> Tensor:
    grouped = query_BHTE.shape[1] != key_BhPE.shape[1]
    return F.scaled_dot_product_attention(query_BHTE, key_BhPE, value_BhPE, attn_mask=bias, enable_gqa=grouped)


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


def _flex(query_BHTE: Tensor, key_BhTE: Tensor, value_BhTE: Tensor, masks: FlexMasks, noisy_only: bool) -> Tensor:
    mask = masks.noisy_only if noisy_only else masks.both
    grouped = query_BHTE.shape[1] != key_BhTE.shape[1]
    return _flex_kernel(query_BHTE.device.type)(query_BHTE, key_BhTE, value_BhTE, block_mask=mask, enable_gqa=grouped)


@functools.cache
def _flex_kernel(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled FlexAttention is a dense reference: right, and all that a CPU test needs.
    return torch.compile(flex_attention, dynamic=False) if device_type == "cuda" else flex_attention


def _flex_mask(
    document_BL: Tensor | None,
    length: int,
    block_size: int,
    views: int,
    clean_attention: CleanAttention,
    device: torch.device,
) -> FlexMasks:
    if document_BL is None:
        return _flex_mask_single(length, block_size, views, clean_attention, str(device))
    return _build_flex_mask(document_BL, length, block_size, views, clean_attention, device)


@functools.lru_cache(maxsize=16)
def _flex_mask_single(
    length: int, block_size: int, views: int, clean_attention: CleanAttention, device: str
) -> FlexMasks:
    """Sequences of one document share their block mask over all steps."""
    return _build_flex_mask(None, length, block_size, views, clean_attention, torch.device(device))


def _build_flex_mask(
    document_BL: Tensor | None,
    length: int,
    block_size: int,
    views: int,
    clean_attention: CleanAttention,
    device: torch.device,
) -> FlexMasks:
    from torch.nn.attention.flex_attention import create_block_mask

    documents = torch.zeros(1, length, dtype=torch.int32, device=device) if document_BL is None else document_BL

    def place(batch: Tensor, index: Tensor) -> Place:
        position = index % length
        view = torch.where(index >= views * length, CLEAN, index // length)
        return Place(view, position, position // block_size, documents[batch, position])

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = batch if document_BL is not None else torch.zeros_like(batch)
        return may_attend(place(row, query), place(row, key), clean_attention)

    keys = (views + 1) * length
    rows = None if document_BL is None else document_BL.shape[0]
    both = create_block_mask(mask_mod, rows, None, keys, keys, device=str(device))
    return FlexMasks(both, create_block_mask(mask_mod, rows, None, views * length, keys, device=str(device)))
