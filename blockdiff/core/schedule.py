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


def pair_weight(masked: Tensor, schedule: Schedule, power: float = 2.0) -> Tensor:
    """What one masked token's −log p counts for in a pair of a mask and its complement, t ~ U(0, 1).

    With p the density of the chance of being masked, m = 1 − alpha(t), the two masks of a pair have it from
    p̄(m) = (p(m) + p(1 − m)) / 2 on average, and 1 / (m · p̄(m)) makes their mean the NELBO, ∫ dm / m · E Σ −log p. Under
    the linear schedule that is 1 / m. Infinite at m = 0.

    Args:
        masked: m of this mask, in [0, 1], any shape, floating point.
        schedule: of the pair's first mask.
        power: exponent of the polynomial schedule.
    """
    match schedule:
        case Schedule.linear:
            return 1 / masked
        case Schedule.cosine:  # p(m) = 2 / (π √(1 − m²))
            own, other = (2 / math.pi * ((1 - m) * (1 + m)).rsqrt() for m in (masked, 1 - masked))
        case Schedule.polynomial:  # p(m) = m^(1/power − 1) / power
            own, other = (m ** (1 / power - 1) / power for m in (masked, 1 - masked))
    return 2 / (masked * (own + other))
