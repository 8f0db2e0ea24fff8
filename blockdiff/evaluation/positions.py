"""Where coherence breaks: nats by position in the block, and the jump at block borders.

Legend: W windows, L window length, N blocks, S block size.

Only blocks that follow a block of the same document are counted: the first block of a document is hard for every model,
and says nothing of borders. An autoregressive model on the same positions is the baseline: what is left of a jump after
its own is subtracted comes from the blocks, not from the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockdiff.evaluation.intervals import Interval, mean_interval, ratio_interval
from blockdiff.evaluation.windows import WindowNats

Floats = NDArray[np.float64]


@dataclass
class BorderJump:
    """Nats per token at the first position of a block, less those of others; positive where borders are harder.

    Attributes:
        to_interior: first token against the mean of all later positions of the block.
        to_last: first token against the last token of the block before.
    """

    to_interior: Interval
    to_last: Interval


def following_blocks(windows: WindowNats, block_size: int) -> NDArray[np.bool_]:
    """Bool (W, L): counted positions of blocks that follow a block of the same document."""
    first_WN = windows.document_WL[:, ::block_size]
    follows_WN = np.zeros(first_WN.shape, dtype=bool)
    follows_WN[:, 1:] = first_WN[:, 1:] == first_WN[:, :-1]
    return np.repeat(follows_WN, block_size, axis=1) & windows.counted_WL


def by_position(windows: WindowNats, block_size: int) -> list[Interval]:
    """Nats per token at each of the S positions of a block, with intervals over windows."""
    kept_WL = following_blocks(windows, block_size)
    return [
        ratio_interval(
            (windows.nats_WL * kept_WL)[:, place::block_size].sum(1),
            kept_WL[:, place::block_size].sum(1).astype(np.float64),
        )
        for place in range(block_size)
    ]


def border_jump(
    windows: WindowNats, block_size: int, baseline: WindowNats | None = None, *, seed: int = 0
) -> BorderJump | None:
    """The jump at block borders, less the baseline's on the same positions; None at block size 1, which has no inside.

    Args:
        windows: of the model.
        block_size: S ≥ 2.
        baseline: of an autoregressive model on the same windows.
        seed: of the resampling of windows.

    Raises:
        ValueError: the baseline was scored on other windows.
    """
    if block_size == 1:
        return None
    if baseline is not None:
        check_same_windows(windows, baseline)
    kept_WL = following_blocks(windows, block_size)
    nats_WL = windows.nats_WL - (0 if baseline is None else baseline.nats_WL)
    place_L = np.arange(kept_WL.shape[1]) % block_size
    first_W = _mean_by_window(nats_WL, kept_WL & (place_L == 0))
    inside_W = _mean_by_window(nats_WL, kept_WL & (place_L > 0))
    # The last token of the block before each kept block.
    before_WL = np.zeros_like(kept_WL)
    before_WL[:, :-1] = (kept_WL & (place_L == 0))[:, 1:]
    last_W = _mean_by_window(nats_WL, before_WL & windows.counted_WL)
    return BorderJump(_difference(first_W, inside_W, seed), _difference(first_W, last_W, seed))


def check_same_windows(windows: WindowNats, other: WindowNats) -> None:
    """Raises a ValueError unless both were scored on the same positions of the same windows."""
    same = windows.counted_WL.shape == other.counted_WL.shape
    if not (same and (windows.sample_W == other.sample_W).all() and (windows.counted_WL == other.counted_WL).all()):
        raise ValueError("models can be paired on the same windows only: score both with the same pack_block_size")


def _mean_by_window(nats_WL: Floats, kept_WL: NDArray[np.bool_]) -> Floats:
    """Mean nats of the kept positions of each window; NaN where there are none."""
    count_W = kept_WL.sum(1)
    total_W = (nats_WL * kept_WL).sum(1)
    return np.divide(total_W, count_W, out=np.full(len(count_W), np.nan), where=count_W > 0)


def _difference(first_W: Floats, other_W: Floats, seed: int) -> Interval:
    """Mean over windows of the difference within each window; windows without a border are left out."""
    difference_W = first_W - other_W
    return mean_interval(difference_W[~np.isnan(difference_W)], seed)
