"""FlexAttention: its block masks, worked out tile by tile, and its kernel.

Legend: B batch, K noisy views, L seq_len, S block size, T = (K + 1)·L tokens of all streams, Q query tiles,
P key tiles.

FlexAttention skips tiles of 128 × 128 pairs without an allowed one, and asks the mask only in tiles that are not wholly
allowed. PyTorch finds out which is which by writing down every pair, 2L × 2L of them; here it follows from where a tile
begins and ends, because positions, blocks and documents only ever grow along a stream. So building a mask costs next to
nothing, and nothing in it waits for the device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockdiff.core.masks import CLEAN, CleanAttention, Place, may_attend
from blockdiff.model.plan import DualStreamPlan, FlexMasks, Layout, layout_of

TILE = 128
"""Side of a tile: FlexAttention's own default."""

RECOMPILE_LIMIT = 64
"""Kernels of one process: each seq_len, block size, number of views, batch size and type has its own."""


def plan_flex(
    document_BL: Tensor,
    block_size: int,
    *,
    views: int,
    clean_attention: CleanAttention,
    layout: Layout | None = None,
) -> DualStreamPlan:
    """The plan for FlexAttention; arguments as of `blockdiff.model.plan.plan_groups`."""
    length = document_BL.shape[1]
    if (layout or layout_of(document_BL)).single:
        masks = _single_masks(length, block_size, views, clean_attention, str(document_BL.device))
    else:
        masks = _masks(document_BL, length, block_size, views, clean_attention, document_BL.device)
    return DualStreamPlan(views, length, [], [], masks)


@functools.lru_cache(maxsize=16)
def _single_masks(length: int, block_size: int, views: int, clean_attention: CleanAttention, device: str) -> FlexMasks:
    """Sequences of one document share their block masks over all steps."""
    return _masks(None, length, block_size, views, clean_attention, torch.device(device))


def _masks(
    document_BL: Tensor | None,
    length: int,
    block_size: int,
    views: int,
    clean_attention: CleanAttention,
    device: torch.device,
) -> FlexMasks:
    from torch.nn.attention.flex_attention import BlockMask

    def place(batch: Tensor, index: Tensor) -> Place:
        position = index % length
        view = torch.where(index >= views * length, CLEAN, index // length)
        document = torch.zeros_like(position) if document_BL is None else document_BL[batch, position]
        return Place(view, position, position // block_size, document)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return may_attend(place(batch, query), place(batch, key), clean_attention)

    def build(queries: int) -> BlockMask:
        some_BQP, every_BQP = tile_pattern(
            document_BL, length, block_size, views, clean_attention, queries=queries, device=device
        )
        return BlockMask.from_kv_blocks(
            *_ordered(some_BQP & ~every_BQP),
            *_ordered(every_BQP),
            BLOCK_SIZE=TILE,
            mask_mod=mask_mod,
            seq_lengths=(queries, (views + 1) * length),
        )

    return FlexMasks(build((views + 1) * length), build(views * length))


def _ordered(chosen_BQP: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row are chosen (B, 1, Q), and the row's tiles, chosen ones first (B, 1, Q, P): int32."""
    chosen = chosen_BQP[:, None].to(torch.int32)
    order = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


class _Stretch(NamedTuple):
    """What each tile holds of one stream: positions `low` to `high`, from document `first` to document `last`.

    Positions have shape (tiles), documents (B, tiles); tiles that hold none of the stream are not `present`.
    """

    low: Tensor
    high: Tensor
    first: Tensor
    last: Tensor
    present: Tensor


def tile_pattern(
    document_BL: Tensor | None,
    length: int,
    block_size: int,
    views: int,
    clean_attention: CleanAttention,
    *,
    queries: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Which tiles may hold an allowed pair, and which hold no other: bool (1 or B, Q, P) each.

    The first may say yes in vain near the border of two documents, which costs time and changes nothing: there the
    mask itself is asked. The second is exact.

    Args:
        document_BL: documents lie end to end; None where each row is one.
        length: L.
        block_size: S.
        views: K.
        clean_attention: what clean tokens see.
        queries: how many of the T tokens, from the first on, are queries.
        device: of the result.
    """
    total = (views + 1) * length
    documents = torch.zeros(1, length, dtype=torch.int32, device=device) if document_BL is None else document_BL

    def stretch(stream: int, tokens: int) -> _Stretch:
        begin = torch.arange(0, tokens, TILE, device=device) - stream * length
        end = (begin + TILE).clamp(max=min(tokens - stream * length, length)) - 1
        low, high = begin.clamp(0, length - 1), end.clamp(0, length - 1)
        return _Stretch(low, high, documents[:, low], documents[:, high], end >= begin.clamp(min=0))

    sizes = (len(documents), -(-queries // TILE), -(-total // TILE))
    some = torch.zeros(sizes, dtype=torch.bool, device=device)
    every = torch.ones_like(some)
    for query_stream in range(views + 1):
        query = stretch(query_stream, queries)
        for key_stream in range(views + 1):
            key = stretch(key_stream, total)
            present = query.present[:, None] & key.present
            clean = query_stream == views, key_stream == views
            if clean == (True, False) or (clean == (False, False) and query_stream != key_stream):
                every &= ~present  # a clean token sees no noisy one, and a view sees no other view
                continue
            some_QP, every_QP = _compare(query, key, block_size, clean, clean_attention)
            meet = (query.first[..., None] <= key.last[:, None]) & (key.first[:, None] <= query.last[..., None])
            alike = (query.first == query.last)[..., None] & (key.first == key.last)[:, None] & meet
            some |= present & some_QP & meet
            every &= ~present | (every_QP & alike)
    # Tiles that the end cuts off hold pairs that do not exist.
    every[:, queries // TILE :], every[:, :, total // TILE :] = False, False
    return some, every


def _compare(
    query: _Stretch, key: _Stretch, size: int, clean: tuple[bool, bool], clean_attention: CleanAttention
) -> tuple[Tensor, Tensor]:
    """Whether some, and whether every pair of two stretches is allowed, as if all were one document: bool (Q, P)."""
    low, high = query.low[:, None], query.high[:, None]
    match clean, clean_attention:
        case (True, True), CleanAttention.causal:
            return key.low <= high, key.high <= low
        case (True, True), CleanAttention.block:
            return key.low // size <= high // size, key.high // size <= low // size
        case (False, True), _:
            return key.low // size < high // size, key.high // size < low // size
    meet = (low // size <= key.high // size) & (key.low // size <= high // size)
    return meet, torch.minimum(low, key.low) // size == torch.maximum(high, key.high) // size


def flex_attention(query_BHTE: Tensor, key_BhTE: Tensor, value_BhTE: Tensor, mask: Any) -> Tensor:
    """Attention under a block mask; compiled on CUDA."""
    grouped = query_BHTE.shape[1] != key_BhTE.shape[1]
    kernel = _kernel(query_BHTE.device.type)
    out: Tensor = kernel(query_BHTE, key_BhTE, value_BhTE, block_mask=mask, enable_gqa=grouped)
    return out


@functools.cache
def _kernel(device_type: str) -> Any:
    from torch.nn.attention import flex_attention as flex

    # Uncompiled FlexAttention is a dense reference: right, and all that a CPU test needs.
    if device_type != "cuda":
        return flex.flex_attention
    # Beyond its limit PyTorch goes back to the dense reference without a word; `fullgraph` makes that an error.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    return torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
