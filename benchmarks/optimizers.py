"""How soon AdamW and Muon reach a bound: the same network, data, seeds and schedule, each with its own learning rates.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --bounds 5.0 4.5 --seeds 0 1 2 --threads 1 data=text data.files=kjv.txt model=tiny

Each run is one of the trainer's own, of the default config and of what `key=value` says. Its learning rate is constant
after the warm-up and falls to nothing over the last third. Steps and seconds are read from its metrics.csv: seconds of
training alone, without start, validation and saving, and of plain layers, since compiling them would be among them. A
bound is reached at the first validation that shows it. Learning rates are those of all weights: under Muon the parts
that AdamW keeps follow the same one.

With --run-root the runs' directories stay, and the same command goes on after a kill.
"""

from __future__ import annotations

import argparse
import io
import platform
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from blockdiff.build import run_training
from blockdiff.composition import load_config
from blockdiff.data.prepare import prepare
from blockdiff.model.compute import training_flops
from blockdiff.training.errors import NonFiniteError
from blockdiff.training.metrics import read_rows

HEADINGS = ("optimizer", "lr", "seed", "final bound", "seconds", "ms/step")
REACHED = ("optimizer", "bound", "best lr", "steps", "seconds", "ms/step")
WIDTHS = (9, 8, 8, 15, 9, 8)


@dataclass
class Point:
    """A validation: finished steps, seconds of training up to it, the bound and its standard error."""

    step: int
    seconds: float
    bound: float
    error: float


@dataclass
class Curve:
    """A run's validations, in order; none where its loss was not finite."""

    optimizer: str
    lr: float
    seed: int
    points: list[Point]

    def first_below(self, bound: float) -> Point | None:
        """The first validation at or below the bound."""
        return next((point for point in self.points if point.bound <= bound), None)

    @property
    def ms_per_step(self) -> float:
        """The median between validations."""
        ends = [Point(0, 0.0, 0.0, 0.0), *self.points]
        return 1e3 * statistics.median(
            (b.seconds - a.seconds) / (b.step - a.step) for a, b in zip(ends, self.points, strict=False)
        )


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    console = Console(width=120)
    console.print(
        f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}; {options.steps} steps, "
        f"validation every {options.every}; {' '.join(options.overrides)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(line(HEADINGS), style="bold")
    curves = []
    with ExitStack() as stack:
        root = options.run_root or stack.enter_context(tempfile.TemporaryDirectory())
        for name, lrs in (("adamw", options.adamw), ("muon", options.muon)):
            for lr in lrs:
                for seed in options.seeds:
                    curves.append(train(name, lr, seed, Path(root), options))
                    console.print(line(cells(curves[-1])), highlight=False)
    bounds = options.bounds or [best_final(curves, "adamw")]
    console.print("\n" + line(REACHED), style="bold")
    for row in reached(curves, bounds):
        console.print(line(row), highlight=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of blockdiff train, for all runs")
    parser.add_argument("--adamw", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="learning rates")
    parser.add_argument("--muon", type=float, nargs="+", default=[5e-3, 1e-2, 2e-2], help="learning rates")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--bounds", type=float, nargs="+", help="in nats; default: the best that AdamW ends with")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=30, help="steps")
    parser.add_argument("--every", type=int, default=20, help="steps between validations")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--run-root", help="keeps the runs; default: a directory that is removed")
    return parser.parse_args()


def train(name: str, lr: float, seed: int, root: Path, options: argparse.Namespace) -> Curve:
    """Trains one run to its end, or finds it finished."""
    config = load_config(
        "train",
        [
            f"optimizer={name}", f"optimizer.lr={lr}", f"optimizer.warmup_steps={options.warmup}",
            "optimizer.schedule=wsd", f"optimizer.decay_steps={max(options.steps // 3, 1)}", "optimizer.min_lr_ratio=0",
            f"trainer.max_steps={options.steps}", f"trainer.checkpoint_every={options.steps}", "trainer.preview=false",
            f"trainer.val_every={options.every}", f"trainer.log_every={options.every}", "trainer.val_samples=64",
            "trainer.devices=1", "trainer.compile=false", *options.overrides,
            f"seed={seed}", f"run_root={root}", f"name={name}-lr{lr:g}-seed{seed}", "trainer.peak_tflops=1",
        ],
    )  # fmt: skip
    try:
        summary = run_training(config, console=Console(file=io.StringIO()))
    except NonFiniteError:
        return Curve(name, lr, seed, [])
    if not summary.finished:
        raise SystemExit(summary.exit_code)
    vocab_size = prepare(config.data).tokenizer.vocab_size
    window = training_flops(config.model, vocab_size, config.seq_len, config.block_size, config.noise)
    return Curve(name, lr, seed, validations(read_rows(summary.directory), config.data.global_batch_size * window))


def validations(rows: list[dict[str, float]], step_flops: float) -> list[Point]:
    """The rows of validations. At a stated peak of 1 TFLOP/s the column mfu says how long each row's steps took.

    The first step has no speed: it counts as nothing.
    """
    points, step, seconds = [], 0.0, 0.0
    for row in rows:
        if "mfu" in row:
            seconds += (row["step"] - step) * step_flops / (row["mfu"] * 1e12)
        step = row["step"]
        if "val/nelbo" in row:
            points.append(Point(int(step), seconds, row["val/nelbo"], row["val/nelbo_se"]))
    return points


def best_final(curves: list[Curve], optimizer: str) -> float:
    """The lowest of the final bounds, each the mean over the seeds of one learning rate."""
    finals = [
        statistics.mean(curve.points[-1].bound for curve in group)
        for group in grouped(curves, optimizer)
        if all(curve.points for curve in group)
    ]
    if not finals:
        raise SystemExit(f"no learning rate of {optimizer} has ended with a finite loss: give --bounds or lower rates")
    return min(finals)


def grouped(curves: list[Curve], optimizer: str) -> list[list[Curve]]:
    """The optimizer's runs, those of one learning rate together."""
    own = [curve for curve in curves if curve.optimizer == optimizer]
    return [[curve for curve in own if curve.lr == lr] for lr in sorted({curve.lr for curve in own})]


def reached(curves: list[Curve], bounds: list[float]) -> Iterator[tuple[str, ...]]:
    """For each bound and optimizer the learning rate that reaches it in the fewest steps, with means over the seeds."""
    for bound in bounds:
        for optimizer in dict.fromkeys(curve.optimizer for curve in curves):
            found = []
            for group in grouped(curves, optimizer):
                firsts = [point for curve in group if (point := curve.first_below(bound))]
                if len(firsts) == len(group):
                    steps, seconds = (statistics.mean(getattr(p, key) for p in firsts) for key in ("step", "seconds"))
                    pace = statistics.median(curve.ms_per_step for curve in group)
                    found.append((steps, seconds, group[0].lr, pace))
            if found:
                steps, seconds, lr, pace = min(found)
                yield optimizer, f"{bound:.4f}", f"{lr:g}", f"{steps:,.0f}", f"{seconds:,.1f}", f"{pace:,.1f}"
            else:
                yield optimizer, f"{bound:.4f}", "none", "", "", ""


def cells(curve: Curve) -> tuple[str, ...]:
    """A run's row."""
    begin = (curve.optimizer, f"{curve.lr:g}", str(curve.seed))
    if not curve.points:
        return *begin, "not finite", "", ""
    last = curve.points[-1]
    return *begin, f"{last.bound:.4f} ± {last.error:.4f}", f"{last.seconds:,.1f}", f"{curve.ms_per_step:,.1f}"


def line(parts: tuple[str, ...]) -> str:
    """Cells in columns."""
    return "  ".join(part.rjust(width) for part, width in zip(parts, WIDTHS, strict=True))


if __name__ == "__main__":
    main()
