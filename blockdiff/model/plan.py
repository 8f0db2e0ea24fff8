"""Who sees whom in one batch of the dual-stream pass, worked out once and used by every layer.

Legend: B batch, K noisy views, L seq_len, S block size, T = (K + 1)·L tokens, laid out as
[view 0 ; … ; view K−1 ; clean].

For SDPA the queries are cut into groups of a few blocks, and the keys of a group into parts. All that lies before the
first block of a group is visible to the whole group and needs no mask; what lies in the group's own range needs a small
one, which is the same for all groups. So neither a mask nor the work grows beyond the triangle that the rule allows.
Where documents share a window, a group has one part with a mask of its own, which begins at the earliest document still
open.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockdiff.core.masks import CLEAN, CleanAttention, Place, may_attend

GROUP_TOKENS = 64
"""Queries that share one call: below it kernels starve, above it masked pairs are computed in vain."""


@dataclass
class Part:
    """Some of the keys of a group; every query sees at least one of them.

    Attributes:
        keys: ranges of T, laid end to end.
        bias: additive mask (1 or B, 1, queries, keys) of 0 and −inf; None where all pairs are allowed.
        causal: the keys are the queries, and each sees those up to itself.
    """

    keys: list[slice]
    bias: Tensor | None = None
    causal: bool = False


@dataclass
class Group:
    """Consecutive queries of one stream, a range of T, and the keys they may see."""

    queries: slice
    parts: list[Part]


@dataclass
class FlexMasks:
    """FlexAttention's block masks: of all queries, and of the noisy ones (the last layer has no others)."""

    both: Any
    noisy_only: Any


@dataclass
class DualStreamPlan:
    """The attention pattern of a batch: groups for SDPA, or block masks for FlexAttention.

    Attributes:
        views: K.
        length: L.
        noisy: groups of the noisy streams, in the order of T.
        clean: groups of the clean stream.
        flex: block masks; then there are no groups.
    """

    views: int
    length: int
    noisy: list[Group]
    clean: list[Group]
    flex: FlexMasks | None = None


class Layout(NamedTuple):
    """What a plan must know of the documents before it can be laid out: plain numbers, none of them on a device.

    Attributes:
        single: whether every row is one document.
        starts: for each position the earliest start of its document over the batch; empty where `single`.
    """

    single: bool
    starts: Sequence[int] = ()


def layout_of(document_BL: Tensor) -> Layout:
    """The layout of a batch; waits for the device where the documents lie on one."""
    if bool((document_BL == document_BL[:, :1]).all()):
        return Layout(True)
    return Layout(False, _document_starts(document_BL))


def plan_groups(
    document_BL: Tensor,
    block_size: int,
    *,
    views: int,
    clean_attention: CleanAttention,
    dtype: torch.dtype,
    layout: Layout | None = None,
) -> DualStreamPlan:
    """The plan for SDPA.

    Args:
        document_BL: int index of each position's document; documents lie end to end, borders on block borders.
        block_size: S, a divisor of L.
        views: K.
        clean_attention: what clean tokens see.
        dtype: of the additive masks: that of the queries.
        layout: of these documents; None reads it from them, for which a device must be waited for.
    """
    layout = layout or layout_of(document_BL)
    length = document_BL.shape[1]
    if layout.single:
        where = str(document_BL.device)
        return _plan_single(length, block_size, views, clean_attention, dtype, where, GROUP_TOKENS)
    builder = _Builder(document_BL, block_size, views, clean_attention, dtype, document_BL.device)
    ranges = _query_ranges(length, block_size, GROUP_TOKENS)
    firsts = [layout.starts[queries.start] for queries in ranges]
    # The views of a group share its mask, so they are built side by side and then put into the order of T.
    table = [builder.packed_groups(q, first) for q, first in zip(ranges, firsts, strict=True)]
    noisy = [groups[view] for view in range(views) for groups in table]
    return DualStreamPlan(views, length, noisy, [groups[views] for groups in table])


@functools.lru_cache(maxsize=16)
def _plan_single(
    length: int,
    block_size: int,
    views: int,
    clean_attention: CleanAttention,
    dtype: torch.dtype,
    device: str,
    group_tokens: int,
) -> DualStreamPlan:
    """Sequences of one document share their plan over all steps. Worked out on the CPU, whose answers cost nothing."""
    document_1L = torch.zeros(1, length, dtype=torch.int32)
    builder = _Builder(document_1L, block_size, views, clean_attention, dtype, torch.device(device))
    ranges = _query_ranges(length, block_size, group_tokens)
    noisy = [builder.noisy_group(view, queries) for view in range(views) for queries in ranges]
    if clean_attention is CleanAttention.causal:
        everything = slice(views * length, (views + 1) * length)
        clean = [Group(everything, [Part([everything], causal=True)])]
    else:
        clean = [builder.clean_group(queries) for queries in ranges]
    return DualStreamPlan(views, length, noisy, clean)


def _query_ranges(length: int, block_size: int, group_tokens: int) -> list[slice]:
    """Groups of whole blocks, or parts of blocks larger than a group."""
    size = max(group_tokens // block_size, 1) * block_size if block_size <= group_tokens else group_tokens
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


@dataclass
class _Builder:
    document_BL: Tensor
    block_size: int
    views: int
    clean_attention: CleanAttention
    dtype: torch.dtype
    device: torch.device
    shared: dict[tuple[int, ...], Tensor | None] = field(default_factory=dict)

    def noisy_group(self, view: int, queries: slice) -> Group:
        own = self._blocks_of(queries)
        last = (queries.stop - 1) // self.block_size * self.block_size
        keys = [self._place(CLEAN, slice(own.start, last)), self._place(view, own)]
        bias = self._shared_bias(queries, own, slice(own.start, last), noisy=True)
        return Group(self._place(view, queries), [*self._prefix(own.start), Part(keys, bias)])

    def clean_group(self, queries: slice) -> Group:
        own = self._blocks_of(queries)
        bias = self._shared_bias(queries, slice(own.start, own.start), own, noisy=False)
        return Group(self._place(CLEAN, queries), [*self._prefix(own.start), Part([self._place(CLEAN, own)], bias)])

    def packed_groups(self, queries: slice, first: int) -> list[Group]:
        """The group of each view and that of the clean stream, where documents share a window."""
        own = self._blocks_of(queries)
        last = (queries.stop - 1) // self.block_size * self.block_size
        before = slice(min(first, last), last)
        until = slice(first, queries.stop if self.clean_attention is CleanAttention.causal else own.stop)
        noisy_bias = self._bias(queries, own, before, noisy=True)
        groups = [
            Group(self._place(v, queries), [Part([self._place(CLEAN, before), self._place(v, own)], noisy_bias)])
            for v in range(self.views)
        ]
        clean_bias = self._bias(queries, slice(0, 0), until, noisy=False)
        return [*groups, Group(self._place(CLEAN, queries), [Part([self._place(CLEAN, until)], clean_bias)])]

    def _blocks_of(self, queries: slice) -> slice:
        """The whole blocks that the queries lie in."""
        size = self.block_size
        return slice(queries.start // size * size, -(-queries.stop // size) * size)

    def _prefix(self, end: int) -> list[Part]:
        """Clean tokens before the group's first block: all of its queries see them."""
        return [Part([self._place(CLEAN, slice(0, end))])] if end else []

    def _place(self, view: int, positions: slice) -> slice:
        """Positions of a stream as a range of T."""
        shift = (self.views if view == CLEAN else view) * self.document_BL.shape[1]
        return slice(shift + positions.start, shift + positions.stop)

    def _shared_bias(self, queries: slice, own: slice, clean: slice, *, noisy: bool) -> Tensor | None:
        """The mask within a group's own range: moved to the origin, it is the same for all groups of a shape."""
        shift = self._blocks_of(queries).start
        moved = [slice(r.start - shift, r.stop - shift) for r in (queries, own, clean)]
        key = (noisy, *(end for r in moved for end in (r.start, r.stop)))
        if key not in self.shared:
            self.shared[key] = self._bias(*moved, noisy=noisy)
        return self.shared[key]

    def _bias(self, queries: slice, own: slice, clean: slice, *, noisy: bool) -> Tensor | None:
        """0 where a query may see a key of [clean ; own noisy], −inf elsewhere; None where all may be seen."""
        query = self._places([(0 if noisy else CLEAN, queries)])
        key = self._places([(CLEAN, clean), *([(0, own)] if noisy else [])])
        allowed = may_attend(
            Place(*(x[..., :, None] for x in query)), Place(*(x[..., None, :] for x in key)), self.clean_attention
        )
        # A mask that forbids nothing is left out where that can be seen at once: asking a device would wait for it.
        if allowed.device.type == "cpu" and bool(allowed.all()):
            return None
        bias = torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
        return bias[:, None].to(self.device)

    def _places(self, parts: list[tuple[int, slice]]) -> Place:
        device = self.document_BL.device
        position_T = torch.cat([torch.arange(s.start, s.stop, device=device) for _, s in parts])
        view_T = torch.cat([torch.full((s.stop - s.start,), view, device=device) for view, s in parts])
        document_BT = self.document_BL[:, position_T]
        return Place(view_T[None], position_T[None], (position_T // self.block_size)[None], document_BT)


def _document_starts(document_BL: Tensor) -> list[int]:
    """For each position the earliest start of its document over the batch: no key before it is ever needed."""
    position_L = torch.arange(document_BL.shape[1], device=document_BL.device)
    border_BL = torch.ones_like(document_BL, dtype=torch.bool)
    border_BL[:, 1:] = document_BL[:, 1:] != document_BL[:, :-1]
    start_BL = torch.where(border_BL, position_L, 0).cummax(1).values
    return start_BL.amin(0).tolist()
