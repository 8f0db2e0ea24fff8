"""Noise schedules: the probability alpha(t) that a token survives at time t, and its derivative.

alpha falls from 1 at t = 0 (clean) to 0 at t = 1 (all noise). The continuous-time NELBO of absorbing diffusion weighs
the negative log-likelihood of each masked token by −alpha'(t) / (1 − alpha(t)) (Shi et al., "Simplified and
generalized masked diffusion for discrete data", 2024, eq. 5; Sahoo et al., 2024, eq. 10). The bound does not depend on
the schedule; the variance of its estimate does.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor


class Schedule(Enum):
    linear = "linear"
    cosine = "cosine"
    polynomial = "polynomial"


def alpha(t: Tensor, schedule: Schedule, power: float = 2.0) -> tuple[Tensor, Tensor]:
    """alpha(t) and d alpha / d t, both of t's shape.

    Args:
        t: times in [0, 1], any shape, floating point.
        schedule: ``linear`` 1 − t; ``cosine`` 1 − cos(π/2 · (1 − t)); ``polynomial`` 1 − t^power.
        power: exponent of the polynomial schedule, > 0.
    """
    match schedule:
        case Schedule.linear:
            return 1 - t, torch.full_like(t, -1.0)
        case Schedule.cosine:
            angle = math.pi / 2 * (1 - t)
            return 1 - torch.cos(angle), -math.pi / 2 * torch.sin(angle)
        case Schedule.polynomial:
            return 1 - t**power, -power * t ** (power - 1)


def nelbo_weight(t: Tensor, schedule: Schedule, power: float = 2.0) -> Tensor:
    """−alpha'(t) / (1 − alpha(t)): what one masked token's −log p counts for at time t. Infinite at t = 0."""
    survive, slope = alpha(t, schedule, power)
    return -slope / (1 - survive)
