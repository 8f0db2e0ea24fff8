"""The finished cells of a sweep as tables: what the report, its plots and its recommendation are made from.

Legend: W windows, L window length, S block size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from blockdiff.evaluation.intervals import Interval, paired_difference
from blockdiff.evaluation.positions import BorderJump, border_jump, by_position, check_same_windows
from blockdiff.evaluation.sweep import Kind, Model, Outcome
from blockdiff.evaluation.windows import WindowNats


@dataclass
class LikelihoodRow:
    """A model's likelihood.

    Attributes:
        model: whose.
        numbers: of its cell.
        nelbo: the bound, nats per token.
        difference: bound less the autoregressive model's on the same windows, or None without one.
        true_low, true_high: ends of the true negative log-likelihood on fewer windows; equal where it is exact.
        true_bound: the bound on those windows.
        looseness: bound less true negative log-likelihood (the middle of its ends), paired.
        curve: nats at each position of a block, less the autoregressive model's at the same tokens where there is one.
        jump: at block borders, likewise.
    """

    model: Model
    numbers: dict[str, Any]
    nelbo: Interval
    difference: Interval | None
    true_low: Interval
    true_high: Interval
    true_bound: Interval
    looseness: Interval
    curve: list[Interval]
    jump: BorderJump | None


@dataclass
class SampleRow:
    """Samples of one model under one sampler; `numbers` as `measure_samples` gives them."""

    model: Model
    sampler: str
    numbers: dict[str, Any]

    @property
    def judge_perplexity(self) -> float:
        """Of the prompted samples; NaN without judge."""
        return perplexity(interval(self.numbers["prompted"]["judge_nats"]).value)

    def speed(self, batch_size: int) -> dict[str, Any]:
        """Figures at a batch size."""
        return next(speed for speed in self.numbers["speed"] if speed["batch_size"] == batch_size)


@dataclass
class Study:
    """All that is known of a sweep.

    Attributes:
        likelihoods: a row a model.
        samples: a row a model and sampler.
        reference: numbers of real and shuffled text, or None.
        training: seconds of training by model, where this sweep trained it.
        failures: cells without numbers.
        baseline: the autoregressive model, or None.
    """

    likelihoods: list[LikelihoodRow]
    samples: list[SampleRow]
    reference: dict[str, Any] | None
    training: dict[str, float]
    failures: list[Outcome]
    baseline: Model | None

    @property
    def batch_sizes(self) -> list[int]:
        """That speed was measured at."""
        return [speed["batch_size"] for speed in self.samples[0].numbers["speed"]] if self.samples else []

    @property
    def judge(self) -> str:
        """Who judged, and in which tokens; several, where cells disagree."""
        return " | ".join(sorted({row.numbers["judge"] for row in self.samples if "judge" in row.numbers}))

    @property
    def baseline_samples(self) -> SampleRow | None:
        """The autoregressive model's samples."""
        return next((row for row in self.samples if self.baseline and row.model.label == self.baseline.label), None)


def collect(models: Sequence[Model], outcomes: Sequence[Outcome]) -> Study:
    """Sorts the outcomes of all cells into tables, and pairs models with the autoregressive one."""
    by_label = {model.label: model for model in models}
    baseline = next((m for m in models if m.block_size == m.trained_block_size == 1), None)
    done = [o for o in outcomes if o.numbers is not None]
    curves = {o.cell.model: o for o in done if o.cell.kind is Kind.likelihood}
    base = curves.get(baseline.label) if baseline else None
    return Study(
        likelihoods=[_likelihood(by_label[str(o.cell.model)], o, base) for o in curves.values()],
        samples=[
            SampleRow(by_label[str(o.cell.model)], str(o.cell.sampler), _numbers(o))
            for o in done
            if o.cell.kind is Kind.samples
        ],
        reference=next((o.numbers for o in done if o.cell.kind is Kind.reference), None),
        training={str(o.cell.model): _numbers(o)["seconds"] for o in done if o.cell.kind is Kind.train},
        failures=[o for o in outcomes if o.numbers is None],
        baseline=baseline,
    )


def _likelihood(model: Model, outcome: Outcome, base: Outcome | None) -> LikelihoodRow:
    numbers = _numbers(outcome)
    bound, curve = read_windows(outcome.cell.output, "bound"), read_windows(outcome.cell.output, "curve")
    difference = None
    if base is not None:
        base_bound, base_curve = read_windows(base.cell.output, "bound"), read_windows(base.cell.output, "curve")
        check_same_windows(bound, base_bound)
        check_same_windows(curve, base_curve)
        tokens_W = bound.window_tokens.astype(np.float64)
        difference = paired_difference(bound.window_nats, base_bound.window_nats, tokens_W)
        curve = replace(curve, nats_WL=curve.nats_WL - base_curve.nats_WL)
    true = numbers["true"]
    return LikelihoodRow(
        model=model,
        numbers=numbers,
        nelbo=interval(numbers["nelbo"]),
        difference=difference,
        true_low=interval(true["low"]),
        true_high=interval(true["high"]),
        true_bound=interval(true["bound"]),
        looseness=interval(true["looseness"]),
        curve=by_position(curve, model.block_size),
        jump=border_jump(curve, model.block_size),
    )


def read_windows(output: Path, prefix: str) -> WindowNats:
    """The window scores in the NPZ file beside a cell's JSON."""
    with np.load(output.with_suffix(".npz"), allow_pickle=False) as arrays:
        return WindowNats(**{f.name: arrays[f"{prefix}_{f.name}"] for f in fields(WindowNats)})


def interval(numbers: dict[str, Any]) -> Interval:
    """An interval as JSON holds it; null is NaN."""
    return Interval(*(math.nan if numbers[key] is None else float(numbers[key]) for key in ("value", "low", "high")))


def perplexity(nats: float) -> float:
    """exp, or infinity where that has no float."""
    return math.exp(nats) if not nats > 700 else math.inf


def _numbers(outcome: Outcome) -> dict[str, Any]:
    assert outcome.numbers is not None
    return outcome.numbers
