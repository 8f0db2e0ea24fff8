"""What is left when a run ends: the loss curve and the summary."""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from blockdiff.training.durable import write_text_durably
from blockdiff.training.metrics import COLUMNS, LOSS_COLUMN, read_rows

PLOT_NAME, SAMPLES_NAME = "loss.png", "samples.txt"


@dataclass
class Summary:
    """A run as it stands when its process ends.

    Attributes:
        name: of the run.
        directory: of the run.
        step: finished steps.
        max_steps: of the config.
        signal: what stopped the run before its end, or None.
        train: nats per token of the last row's training interval.
        train_is_bound: whether `train` is a bound (unclipped noise).
        val_nelbo: last validation bound, nats per token; None before the first.
        val_nelbo_se: its standard error.
        val_bits_per_byte: the bound in bits per byte.
        unigram_nats: nats per token of a unigram model on the validation split.
        tokens_per_second: of this launch's training; None if it took no step.
        peak_memory_bytes: of the device, or of the process on a CPU.
        checkpoint: the newest one.
    """

    name: str
    directory: Path
    step: int
    max_steps: int
    signal: Signals | None
    train: float | None
    train_is_bound: bool
    val_nelbo: float | None
    val_nelbo_se: float | None
    val_bits_per_byte: float | None
    unigram_nats: float
    tokens_per_second: float | None
    peak_memory_bytes: int
    checkpoint: Path | None

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.max_steps

    @property
    def exit_code(self) -> int:
        """Of the process: 0, or 128 + the signal that stopped the run early."""
        return 0 if self.finished or self.signal is None else 128 + self.signal


def summarise(
    directory: Path,
    *,
    step: int,
    max_steps: int,
    signal: Signals | None,
    unigram_nats: float,
    tokens_per_second: float | None,
    checkpoint: Path | None,
) -> Summary:
    """Reads the run's last figures from its table of metrics."""
    last: dict[str, float] = {}
    for row in read_rows(directory):
        last |= row
    return Summary(
        name=directory.name,
        directory=directory,
        step=step,
        max_steps=max_steps,
        signal=signal,
        train=last.get(COLUMNS[1], last.get(LOSS_COLUMN)),
        train_is_bound=LOSS_COLUMN not in last,
        val_nelbo=last.get("val/nelbo"),
        val_nelbo_se=last.get("val/nelbo_se"),
        val_bits_per_byte=last.get("val/bits_per_byte"),
        unigram_nats=unigram_nats,
        tokens_per_second=tokens_per_second,
        peak_memory_bytes=peak_memory(),
        checkpoint=checkpoint,
    )


def peak_memory() -> int:
    """Bytes: of the CUDA device where there is one in use, otherwise of this process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def summary_table(summary: Summary) -> Table:
    """The summary as a table for the terminal."""
    state = "finished" if summary.finished else f"stopped by {summary.signal.name if summary.signal else 'request'}"
    title = f"{summary.name}: {state} at step {summary.step}/{summary.max_steps}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    if summary.train is not None:
        label = "train, nats per token" if summary.train_is_bound else "train loss (clipped noise, no bound)"
        table.add_row(label, f"{summary.train:.4f}")
    if summary.val_nelbo is not None and summary.val_nelbo_se is not None and summary.val_bits_per_byte is not None:
        table.add_row("val bound, nats per token", f"{summary.val_nelbo:.4f} ± {summary.val_nelbo_se:.4f}")
        perplexity = math.exp(min(summary.val_nelbo, 700))
        table.add_row("val perplexity bound", f"{perplexity:.2f} ± {perplexity * summary.val_nelbo_se:.2f}")
        table.add_row("val bits per byte", f"{summary.val_bits_per_byte:.4f}")
    table.add_row("unigram entropy, nats per token", f"{summary.unigram_nats:.4f}")
    if summary.tokens_per_second is not None:
        table.add_row("training tokens/s", f"{summary.tokens_per_second:,.0f}")
    table.add_row("peak memory", f"{summary.peak_memory_bytes / 2**20:,.0f} MiB")
    if summary.checkpoint is not None:
        table.add_row("checkpoint", str(summary.checkpoint))
    for name in ("metrics.csv", SAMPLES_NAME, PLOT_NAME):
        if (summary.directory / name).exists():
            table.add_row(name, str(summary.directory / name))
    return table


def write_plot(directory: Path, unigram_nats: float, block_size: int) -> Path:
    """Draws `loss.png`: training and validation in nats per token over steps, beside the unigram model."""
    rows = read_rows(directory)
    figure = Figure(figsize=(7.5, 4.5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for column, label, style in (
        (COLUMNS[1], "train bound", {"color": "#9ab7d3", "linewidth": 1.0}),
        (LOSS_COLUMN, "train loss (no bound)", {"color": "#9ab7d3", "linewidth": 1.0}),
        (
            "val/nelbo",
            "val bound (averaged weights)",
            {"color": "#c03a2b", "linewidth": 1.6, "marker": "o", "ms": 3},
        ),
    ):
        points = [(row["step"], row[column]) for row in rows if column in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)  # type: ignore[arg-type]
    axes.axhline(unigram_nats, color="#555555", linestyle="--", linewidth=1.0, label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats per token", title=f"{directory.name}, block size {block_size}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path = directory / PLOT_NAME
    figure.savefig(path)
    return path


def write_samples(directory: Path, samples: list[str]) -> Path:
    """Writes `samples.txt`, each sample under a numbered line."""
    path = directory / SAMPLES_NAME
    parts = [f"=== sample {number} of {len(samples)} ===\n{text}\n" for number, text in enumerate(samples, 1)]
    write_text_durably(path, "\n".join(parts))
    return path
