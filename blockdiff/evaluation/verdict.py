"""The paragraph that answers the question: which block size and sampler, what it costs, how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    nats, replicate_R = ratio_difference(
        _column(ours, "nats"), _column(ours, "tokens"), _column(theirs, "nats"), _column(theirs, "tokens")
    )
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
    """All samplers against the autoregressive one, and the fastest that is within the tolerance and not monotonous."""
    baseline = study.baseline_samples
    if baseline is None or not baseline.numbers["prompted_texts"]:
        return [], None
    choices = [
        compare(row, baseline, tolerance, batch_size)
        for row in study.samples
        if row is not baseline and len(row.numbers["prompted_texts"]) == len(baseline.numbers["prompted_texts"])
    ]
    fitting = [c for c in choices if c.cost.value <= tolerance and not monotonous(c.row, baseline)]
    return choices, max(fitting, key=lambda choice: choice.speedup, default=None)


def monotonous(row: SampleRow, baseline: SampleRow) -> bool:
    """Whether samples repeat themselves, or keep to few words, clearly more than the autoregressive ones.

    A low judge perplexity is then no merit: the judge finds repetition easy.
    """
    ours, theirs = row.numbers["prompted"], baseline.numbers["prompted"]
    repeats = (ours["repeated_4"] or 0.0) > 1.25 * (theirs["repeated_4"] or 0.0) + 0.01
    return repeats or ours["unigram_entropy"] < 0.95 * theirs["unigram_entropy"]


def verdict(study: Study, tolerance: float) -> str:
    """The recommendation in plain words."""
    baseline = study.baseline_samples
    if baseline is None:
        return "No autoregressive model (block size 1) was sampled to compare with, so nothing is recommended."
    if not baseline.numbers["prompted_texts"]:
        return "No judge read the samples, so nothing is recommended."
    batch_size = study.batch_sizes[0]
    choices, best = choose(study, tolerance, batch_size)
    aim = f"within {tolerance:.0%} of autoregressive judge perplexity ({baseline.judge_perplexity:.2f})"
    if not choices:
        return "No other sampler was measured beside the autoregressive model, so there is nothing to recommend."
    left_out = _left_out([c for c in choices if c.cost.value <= tolerance and monotonous(c.row, baseline)])
    if best is None:
        varied = [c for c in choices if not monotonous(c.row, baseline)] or choices
        nearest = min(varied, key=lambda choice: choice.cost.value)
        said = f"No setting stays {aim} without repeating itself more. "
        said += f"The nearest is {_name(nearest)}: {_cost(nearest)}, {_speed(nearest, batch_size)}."
    else:
        said = f"{aim[0].upper()}{aim[1:]}: {_name(best)}, {_speed(best, batch_size)}. "
        said += f"It costs {_cost(best)}; {_certainty(best)}"
    return f"{said} {left_out}".strip()


def _left_out(choices: list[Choice]) -> str:
    if not choices:
        return ""
    names = "; ".join(_name(choice) for choice in choices)
    return f"Left out, because a low perplexity comes from repetition or few words there: {names}."


def _column(texts: list[dict[str, float]], key: str) -> NDArray[np.float64]:
    return np.array([text[key] for text in texts], dtype=np.float64)


def _name(choice: Choice) -> str:
    return f"block size {choice.row.model.block_size}, {choice.row.sampler}"


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
