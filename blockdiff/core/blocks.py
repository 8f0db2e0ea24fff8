"""Geometry of blocks: which positions are denoised together.

Legend: B batch, L seq_len, N blocks, S block size (L = N·S).
"""

from __future__ import annotations

from torch import Tensor


def check_block_size(block_size: int, seq_len: int) -> None:
    """Raises a ValueError, with the nearest valid sizes, unless `block_size` divides `seq_len`."""
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be at least 1 token")
    if block_size < 1 or seq_len % block_size:
        raise ValueError(
            f"block_size={block_size} must divide seq_len={seq_len}; nearest: "
            + ", ".join(str(size) for size in nearest_divisors(block_size, seq_len))
        )


def nearest_divisors(value: int, total: int) -> list[int]:
    """The divisors of `total` next below and next above `value` (one of them where only one exists)."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return below + above


def split_blocks(x_BL: Tensor, block_size: int) -> Tensor:
    """Views (..., L) as (..., N, S)."""
    return x_BL.unflatten(-1, (-1, block_size))
