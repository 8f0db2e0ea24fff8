"""The paragraph that answers the question: which block size and sampler, what it costs, how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from blockdiff.evaluation.intervals import Interval, ratio_difference
from blockdiff.evaluation.study import SampleRow, Study


@dataclass
class Choice:
    """A sampler against the autoregressive model.

    Attributes:
        row: the samples.
        cost: judge perplexity relative to the autoregressive samples', less 1, paired prompt by prompt.
        holds: share of the bootstrap replicates in which the cost keeps to the tolerance.
        speedup: tokens a second relative to the autoregressive model's, medians.
        slowest, fastest: the same from the least and most favourable repeats of both.
    """

    row: SampleRow
    cost: Interval
    holds: float
    speedup: float
    slowest: float
    fastest: float


def compare(row: SampleRow, baseline: SampleRow, tolerance: float, batch_size: int) -> Choice:
    """One sampler against the autoregressive samples of the same prompts."""
    ours, theirs = row.numbers["prompted_texts"], baseline.numbers["prompted_texts"]
    columns = [np.array([text[key] for text in texts], float) for texts in (ours, theirs) for key in ("nats", "tokens")]
    nats, replicate_R = ratio_difference(*columns)
    cost = Interval(*(math.expm1(value) for value in (nats.value, nats.low, nats.high)))
    fast, slow = row.speed(batch_size), baseline.speed(batch_size)
    (low, high), (base_low, base_high) = fast["tokens_per_second_spread"], slow["tokens_per_second_spread"]
    return Choice(
        row,
        cost,
        float((np.expm1(replicate_R) <= tolerance).mean()),
        fast["tokens_per_second"] / slow["tokens_per_second"],
        low / base_high,
        high / base_low,
    )


def choose(study: Study, tolerance: float, batch_size: int) -> tuple[list[Choice], Choice | None]:
    """All samplers against the autoregressive one, and the fastest that keeps to the tolerance, if any."""
    baseline = study.baseline_samples
    if baseline is None or not baseline.numbers["prompted_texts"]:
        return [], None
    choices = [
        compare(row, baseline, tolerance, batch_size)
        for row in study.samples
        if row is not baseline and len(row.numbers["prompted_texts"]) == len(baseline.numbers["prompted_texts"])
    ]
    fitting = [choice for choice in choices if choice.cost.value <= tolerance]
    return choices, max(fitting, key=lambda choice: choice.speedup, default=None)


def verdict(study: Study, tolerance: float) -> str:
    """The recommendation in plain words."""
    baseline = study.baseline_samples
    if baseline is None:
        return (
            "There are no samples of an autoregressive model (block size 1) to compare with, so nothing is recommended."
        )
    if not baseline.numbers["prompted_texts"]:
        return "No judge read the samples, so nothing is recommended."
    batch_size = study.batch_sizes[0]
    choices, best = choose(study, tolerance, batch_size)
    aim = f"within {tolerance:.0%} of autoregressive judge perplexity ({baseline.judge_perplexity:.2f})"
    if not choices:
        return "No other sampler was measured beside the autoregressive model, so there is nothing to recommend."
    if best is None:
        nearest = min(choices, key=lambda choice: choice.cost.value)
        return f"No setting stays {aim}. The nearest is {_name(nearest)}: {_cost(nearest)}, at {_speed(nearest, batch_size)}."
    return (
        f"{aim[0].upper()}{aim[1:]}: {_name(best)}, {_speed(best, batch_size)}. "
        f"It costs {_cost(best)}; {_certainty(best)} {_repetition(best, baseline)}"
    )


def _name(choice: Choice) -> str:
    return f"block size {choice.row.model.block_size}, {choice.row.sampler.replace('-', ' ')}"


def _cost(choice: Choice) -> str:
    cost, prompts = choice.cost, len(choice.row.numbers["prompted_texts"])
    return (
        f"{cost.value:+.1%} judge perplexity (95 % interval {cost.low:+.1%} to {cost.high:+.1%} over {prompts} prompts)"
    )


def _speed(choice: Choice, batch_size: int) -> str:
    word = "faster" if choice.speedup >= 1 else "as fast"
    return (
        f"{choice.speedup:.2f}× {word} at batch size {batch_size} "
        f"({choice.slowest:.2f}× to {choice.fastest:.2f}× over repeats)"
    )


def _certainty(choice: Choice) -> str:
    if choice.holds >= 0.95:
        return f"in {choice.holds:.0%} of resamplings of the prompts it keeps to the constraint."
    return (
        f"in only {choice.holds:.0%} of resamplings of the prompts it keeps to the constraint, so more prompts are "
        "needed to be sure."
    )


def _repetition(choice: Choice, baseline: SampleRow) -> str:
    """Whether a low perplexity was bought with repetition."""
    ours, theirs = (row.numbers["prompted"]["repeated_4"] for row in (choice.row, baseline))
    if ours is None or theirs is None:
        return ""
    more = " more than the autoregressive samples, which flatters its perplexity" if ours > 1.25 * theirs + 0.01 else ""
    return f"It repeats {ours:.1%} of its 4-grams{more} (autoregressive: {theirs:.1%})."
