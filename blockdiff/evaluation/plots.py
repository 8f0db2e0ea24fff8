"""The plots of a report. Each has a function for its data, which tests read, and one that draws it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from blockdiff.evaluation.study import SampleRow, Study, interval, perplexity


@dataclass
class Series:
    """One line of a plot.

    Attributes:
        label: in the legend.
        x, y: the points.
        low, high: ends of their error bars; empty: none.
        names: texts beside the points; empty: none.
        joined: whether a line goes through the points.
        colour: number of its colour; equal for one model.
    """

    label: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    joined: bool = True
    colour: int = 0


def tradeoff(study: Study, batch_size: int) -> list[Series]:
    """Judge perplexity against tokens a second: a line a model over its step budgets, points for other samplers."""
    series = []
    for colour, label in enumerate(dict.fromkeys(row.model.label for row in study.samples)):
        rows = [r for r in study.samples if r.model.label == label and math.isfinite(r.judge_perplexity)]
        rows.sort(key=lambda row: row.speed(batch_size)["tokens_per_second"])
        budgets = [row for row in rows if row.numbers["config"]["sampler"]["rule"] in ("first_hitting", "ancestral")]
        others = [row for row in rows if row not in budgets]
        if budgets:
            series.append(_tradeoff_series(label, budgets, batch_size, True, colour))
        if others:
            series.append(_tradeoff_series(f"{label}, other samplers", others, batch_size, False, colour))
    return series


def _tradeoff_series(label: str, rows: list[SampleRow], batch_size: int, joined: bool, colour: int) -> Series:
    nats = [interval(row.numbers["prompted"]["judge_nats"]) for row in rows]
    return Series(
        label,
        [row.speed(batch_size)["tokens_per_second"] for row in rows],
        [row.judge_perplexity for row in rows],
        [perplexity(n.low) for n in nats],
        [perplexity(n.high) for n in nats],
        [row.sampler for row in rows],
        joined,
        colour,
    )


def likelihood(study: Study) -> list[Series]:
    """Bound and true likelihood against block size, in nats per token, over the same windows."""
    rows = sorted(
        (r for r in study.likelihoods if r.model.block_size == r.model.trained_block_size),
        key=lambda r: r.model.block_size,
    )
    sizes = [float(row.model.block_size) for row in rows]
    middle = [(row.true_low.value + row.true_high.value) / 2 for row in rows]
    bound = Series(
        "bound",
        sizes,
        [r.true_bound.value for r in rows],
        [r.true_bound.low for r in rows],
        [r.true_bound.high for r in rows],
    )
    true = Series(
        "likelihood (bars: 95 % interval, and the bracket where it is not exact)",
        sizes,
        middle,
        [row.true_low.low for row in rows],
        [row.true_high.high for row in rows],
    )
    true.colour = 1
    return [bound, true]


def positions(study: Study) -> list[Series]:
    """Nats by position in the block, less the autoregressive model's where there is one; one line a block size > 1."""
    return [
        Series(
            row.model.label,
            [float(place) for place in range(row.model.block_size)],
            [point.value for point in row.curve],
            [point.low for point in row.curve],
            [point.high for point in row.curve],
            colour=colour,
        )
        for colour, row in enumerate(study.likelihoods)
        if row.model.block_size > 1
    ]


def draw_all(study: Study, directory: Path) -> list[Path]:
    """Draws what there is data for, as PNG files."""
    paths = []
    if study.batch_sizes:
        for batch_size in sorted({study.batch_sizes[0], study.batch_sizes[-1]}):
            data = tradeoff(study, batch_size)
            if data:
                x_label = f"output tokens a second, batch size {batch_size}"
                axes = _axes(x_label, "judge perplexity of prompted samples")
                axes.set_xscale("log")
                axes.set_yscale("log")
                _plain_numbers(axes)
                _real_text(axes, study)
                paths.append(_save(axes, data, directory / f"tradeoff_batch_{batch_size}.png"))
    if study.likelihoods:
        axes = _axes("block size", "nats per token")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        paths.append(_save(axes, likelihood(study), directory / "likelihood.png"))
    curves = positions(study)
    if curves:
        versus = " above autoregressive" if study.baseline else ""
        axes = _axes("position in the block", f"nats per token{versus}, left to right")
        axes.axhline(0, color="0.6", linewidth=0.8)
        paths.append(_save(axes, curves, directory / "positions.png"))
    return paths


def _axes(x_label: str, y_label: str) -> Axes:
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    return axes


def _plain_numbers(axes: Axes) -> None:
    """Numbers in full instead of powers of ten, on both logarithmic axes."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.4g}"))
        axis.set_minor_formatter(NullFormatter())


def _real_text(axes: Axes, study: Study) -> None:
    """Levels of real text and of its shuffled tokens."""
    for name, style in (("real", "-"), ("shuffled", ":")):
        nats = interval(study.reference[f"{name}_prompted"]["judge_nats"]).value if study.reference else math.nan
        if math.isfinite(nats):
            axes.axhline(perplexity(nats), color="0.45", linestyle=style, linewidth=1, label=f"{name} text")


def _save(axes: Axes, data: list[Series], path: Path) -> Path:
    for series in data:
        below = [max(y - low, 0.0) for y, low in zip(series.y, series.low, strict=True)] if series.low else None
        above = [max(high - y, 0.0) for y, high in zip(series.y, series.high, strict=True)] if series.high else None
        error = None if below is None or above is None else [below, above]
        line, marker = ("-", "o") if series.joined else ("", "x")
        drawn = axes.errorbar(
            series.x, series.y, yerr=error, linestyle=line, marker=marker, color=f"C{series.colour}", capsize=2
        )
        drawn.set_label(series.label)
        for x, y, name in zip(series.x, series.y, series.names, strict=False):
            axes.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.legend(fontsize=8)
    figure = axes.get_figure(root=True)
    assert figure is not None
    FigureCanvasAgg(figure).print_figure(path, dpi=130)
    return path
