"""How far samples lie from real text in a judge's hidden states.

The energy distance (Székely and Rizzo, "Energy statistics", 2013) rather than MAUVE or a Fréchet distance: with some
dozens of texts MAUVE depends on the number of clusters, and a covariance in as many dimensions as the judge is wide
has no full rank, while the energy distance has no setting and is zero only between equal distributions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def energy_distance(x_ND: Floats, y_MD: Floats) -> float:
    """2 E|X − Y| − E|X − X'| − E|Y − Y'| over pairs of different points; unbiased, so it may fall below 0.

    Features are divided by the standard deviation of y (the real text) first, so that no coordinate dominates.

    Args:
        x_ND: N ≥ 2 feature vectors of samples.
        y_MD: M ≥ 2 of real text.

    Raises:
        ValueError: fewer than two points on a side.
    """
    if min(len(x_ND), len(y_MD)) < 2:
        raise ValueError(f"the energy distance needs two texts on each side, got {len(x_ND)} and {len(y_MD)}")
    scale_D = y_MD.std(0)
    scale_D[scale_D == 0] = 1.0
    x_ND, y_MD = x_ND / scale_D, y_MD / scale_D
    return 2 * float(_distances(x_ND, y_MD).mean()) - _within(x_ND) - _within(y_MD)


def _within(x_ND: Floats) -> float:
    count = len(x_ND)
    return float(_distances(x_ND, x_ND).sum()) / (count * (count - 1))


def _distances(x_ND: Floats, y_MD: Floats) -> Floats:
    return np.stack([np.linalg.norm(y_MD - x_D, axis=1) for x_D in x_ND])
