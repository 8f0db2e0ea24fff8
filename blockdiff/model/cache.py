"""Keys and values of the committed blocks.

Legend: B batch rows, H key-value heads, E head dim, P positions the cache can hold.

A cache is made by the caller, passed in and written in place. It holds keys (already rotated) and values, no queries.
The slots behind a row's committed prefix are scratch: a denoising step writes the keys and values of its noisy block
there, so that attention reads one contiguous view and nothing is concatenated or copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KVCache:
    """Preallocated keys and values of every layer.

    Attributes:
        keys: one tensor (B, H, P, E) a layer.
        values: likewise.
        lengths: committed positions of each row, kept on the host so that no step waits for the device.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lengths: list[int]

    @classmethod
    def empty(
        cls,
        *,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> KVCache:
        """A cache for `batch` rows of up to `capacity` positions each; nothing is committed yet."""
        shape = (batch, kv_heads, capacity, head_dim)
        return cls(
            keys=[torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)],
            values=[torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)],
            lengths=[0] * batch,
        )

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    @property
    def capacity(self) -> int:
        """Positions that a row can hold, scratch included."""
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    def check_room(self, rows: int, tokens: int) -> None:
        """Raises a ValueError if some of the first `rows` rows cannot take `tokens` more positions."""
        longest = max(self.lengths[:rows])
        if longest + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions a row, {longest} are committed and {tokens} more are "
                "needed; make it larger or generate fewer tokens"
            )

    def write(self, layer: int, keys_BHTE: Tensor, values_BHTE: Tensor, slots: slice | Tensor) -> None:
        """Writes T positions of each of the first rows.

        Args:
            layer: index of the layer.
            keys_BHTE: rotated keys of the first B rows.
            values_BHTE: values, likewise.
            slots: the same slice for all rows, or int64 (B, T) slots row by row.
        """
        rows = keys_BHTE.shape[0]
        if isinstance(slots, slice):
            self.keys[layer][:rows, :, slots] = keys_BHTE
            self.values[layer][:rows, :, slots] = values_BHTE
            return
        row_B1 = torch.arange(rows, device=slots.device)[:, None]
        self.keys[layer][row_B1, :, slots] = keys_BHTE.transpose(1, 2)
        self.values[layer][row_B1, :, slots] = values_BHTE.transpose(1, 2)

    def advance(self, committed: list[int]) -> None:
        """Counts `committed[i]` more positions of row i as committed."""
        for row, count in enumerate(committed):
            self.lengths[row] += count

    def rows(self, start: int, stop: int) -> KVCache:
        """A cache of the rows [start, stop) alone: it shares their memory, but counts its own lengths."""
        return KVCache(
            keys=[x[start:stop] for x in self.keys],
            values=[x[start:stop] for x in self.values],
            lengths=self.lengths[start:stop],
        )

    def reset(self, row: int) -> None:
        """Frees a row: its slots are written over by whoever comes next."""
        self.lengths[row] = 0

    def move(self, source: int, target: int) -> None:
        """Moves a row to another place (a finished row leaves and the last one closes the gap)."""
        length = self.lengths[source]
        for x in (*self.keys, *self.values):
            x[target, :, :length] = x[source, :, :length]
        self.lengths[target] = length
        self.reset(source)


def send(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor made of host values, without waiting for the device: pageable memory would stop the stream."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
