"""Confidence intervals of ratios of sums, with the window of validation text as the unit that is resampled.

Legend: W windows, R bootstrap replicates.

A window holds hundreds of tokens that depend on each other, so tokens are not resampled, windows are: an interval
says how much the value would move if other windows had been drawn from the same source. Neighbouring windows of one
long document are taken as independent. What the evaluation noise adds is part of each window's value and so of the
interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

REPLICATES = 2000


@dataclass
class Interval:
    """A value and the central 95 % of its bootstrap distribution."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of 0."""
        return self.low > 0 or self.high < 0


def ratio_interval(numerator_W: Floats, denominator_W: Floats, seed: int = 0) -> Interval:
    """Σ numerator / Σ denominator with its interval by resampling windows, both sums over the same draws.

    Args:
        numerator_W: such as nats of each window.
        denominator_W: such as tokens of each window.
        seed: of the draws: equal seeds give equal draws.
    """
    if not denominator_W.sum():
        return Interval(math.nan, math.nan, math.nan)
    replicate_R = _ratios(numerator_W, denominator_W, _draws(len(numerator_W), seed))
    return _interval(numerator_W.sum() / denominator_W.sum(), replicate_R)


def paired_difference(nats_W: Floats, other_W: Floats, tokens_W: Floats, seed: int = 0) -> Interval:
    """Σ (nats − other) / Σ tokens with its interval: two models on the same windows, drawn together."""
    return ratio_interval(nats_W - other_W, tokens_W, seed)


def ratio_difference(
    numerator_W: Floats, denominator_W: Floats, other_numerator_W: Floats, other_denominator_W: Floats, seed: int = 0
) -> tuple[Interval, Floats]:
    """Σ n / Σ d − Σ n' / Σ d', the units of both drawn together, such as prompts that two models continued.

    Returns:
        The interval, and the R replicates behind it.
    """
    draw_RW = _draws(len(numerator_W), seed)
    replicate_R = _ratios(numerator_W, denominator_W, draw_RW)
    replicate_R -= _ratios(other_numerator_W, other_denominator_W, draw_RW)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = numerator_W.sum() / denominator_W.sum() - other_numerator_W.sum() / other_denominator_W.sum()
    return _interval(value, replicate_R), replicate_R


def mean_interval(value_W: Floats, seed: int = 0) -> Interval:
    """The mean of one value a unit, with its interval."""
    return ratio_interval(value_W, np.ones_like(value_W), seed)


def _draws(units: int, seed: int) -> Floats:
    """How often each unit is drawn, one row a replicate."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(units, np.full(units, 1 / units), size=REPLICATES).astype(np.float64)


def _ratios(numerator_W: Floats, denominator_W: Floats, draw_RW: Floats) -> Floats:
    """Each replicate's ratio of sums; NaN where only units without tokens were drawn."""
    # Sums by NumPy's own loop: a BLAS product may differ in the last bits from machine to machine.
    top_R = np.einsum("rw,w->r", draw_RW, numerator_W)
    bottom_R = np.einsum("rw,w->r", draw_RW, denominator_W)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio_R: Floats = top_R / bottom_R
    return ratio_R


def _interval(value: float, replicate_R: Floats) -> Interval:
    low, high = np.nanquantile(replicate_R, [0.025, 0.975])
    return Interval(float(value), float(low), float(high))
