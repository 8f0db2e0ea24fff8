"""One forward pass over a cache: clean tokens that are committed, then one noisy block, behind each row's prefix.

Legend: B batch rows, T clean tokens, S noisy tokens, H query heads, E head dim, P key slots.

Rows may stand at different lengths. Where all are alike, slots are slices and most masks vanish; else slots and
masks are worked out row by row, once for all layers. Nothing here waits for the device: lengths are kept on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockdiff.core.masks import CleanAttention
from blockdiff.model.attention import cached_attention
from blockdiff.model.cache import KVCache, send
from blockdiff.model.layers import Attend


@dataclass
class Extension:
    """What one pass adds to a cache.

    Attributes:
        cache: whose scratch slots are written.
        starts: committed positions of each row before the pass.
        taken: clean tokens that each row commits, at most T.
        clean: T, clean tokens of the pass (rows that take fewer are filled up with anything).
        noisy: S, noisy tokens of the pass.
        position: int64 positions, (T + S) where rows are alike, else (B, T + S).
    """

    cache: KVCache
    starts: list[int]
    taken: list[int]
    clean: int
    noisy: int
    position: Tensor
    clean_allowed: Tensor | None
    noisy_allowed: Tensor | None
    flash: bool

    @classmethod
    def plan(
        cls,
        cache: KVCache,
        taken: list[int],
        clean: int,
        noisy: int,
        *,
        clean_attention: CleanAttention,
        block_size: int | None,
        flash: bool,
    ) -> Extension:
        """Works out positions and masks; arguments as the attributes, `block_size` for ``block`` clean attention."""
        device = cache.keys[0].device
        starts = cache.lengths[: len(taken)]
        alike = len(set(starts)) == 1 and all(count == clean for count in taken)
        if alike:
            position = torch.arange(starts[0], starts[0] + clean + noisy, device=device)
            noisy_allowed = None
        else:
            start_B1 = send(starts, torch.int64, device)[:, None]
            end_B1 = start_B1 + send(taken, torch.int64, device)[:, None]
            position = torch.cat(
                [start_B1 + torch.arange(clean, device=device), end_B1 + torch.arange(noisy, device=device)],
                1,
            )
            keys = max(s + t for s, t in zip(starts, taken, strict=True)) + noisy
            slot_P = torch.arange(keys, device=device)
            noisy_allowed = (slot_P < end_B1 + noisy)[:, None]
        allowed = None
        if clean and not (alike and clean == 1):
            allowed = _clean_allowed(position[..., :clean], max(starts) + clean, clean_attention, block_size)
        return cls(cache, starts, taken, clean, noisy, position, allowed, noisy_allowed, flash)

    def attend(self, layer: int, last: bool) -> Attend:
        """Attention of one layer: writes this pass's keys and values, then reads the cache in place."""
        rows, cache, clean = len(self.starts), self.cache, self.clean
        if self.position.dim() == 1:
            first = self.starts[0]
            writes: list[tuple[slice, slice | Tensor]] = [(slice(0, None), slice(first, first + clean + self.noisy))]
        else:
            # The noisy block comes second: it takes the slots that a short row's filling wrote.
            writes = [
                (slice(0, clean), self.position[:, :clean]),
                (slice(clean, None), self.position[:, clean:]),
            ]
        clean_keys = max(self.starts) + clean
        noisy_keys = max(s + t for s, t in zip(self.starts, self.taken, strict=True)) + self.noisy

        def attend(query_BHTE: Tensor, key_BhTE: Tensor, value_BhTE: Tensor) -> Tensor:
            for part, slots in writes:
                cache.write(layer, key_BhTE[:, :, part], value_BhTE[:, :, part], slots)
            keys, values = cache.keys[layer][:rows], cache.values[layer][:rows]
            outputs = []
            if clean and not last:
                seen = slice(0, clean_keys)
                outputs.append(
                    cached_attention(query_BHTE[:, :, :clean], keys[:, :, seen], values[:, :, seen], self.clean_allowed)
                )
            if self.noisy:
                seen = slice(0, noisy_keys)
                query = query_BHTE if last else query_BHTE[:, :, clean:]
                outputs.append(
                    cached_attention(query, keys[:, :, seen], values[:, :, seen], self.noisy_allowed, flash=self.flash)
                )
            if not outputs:
                return query_BHTE
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

        return attend


def _clean_allowed(position: Tensor, keys: int, clean_attention: CleanAttention, block_size: int | None) -> Tensor:
    """Bool (1 or B, T, P): a clean query sees the prefix and clean tokens up to itself, or up to its block's end."""
    slot_P = torch.arange(keys, device=position.device)
    position = position if position.dim() == 2 else position[None]
    match clean_attention:
        case CleanAttention.causal:
            return slot_P <= position[..., None]
        case CleanAttention.block:
            assert block_size is not None, "block-causal clean tokens need to know their block size"
            return slot_P // block_size <= position[..., None] // block_size
