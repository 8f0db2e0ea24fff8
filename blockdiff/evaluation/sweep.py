"""A sweep over block sizes and samplers: cells that are ordinary commands, done once each and found again.

A cell is finished when its JSON file is there. The file's name holds a hash of the command, so a changed grid or budget
makes new cells and never takes old numbers for its own. Cells may run here one after the other, or anywhere that sees
the same directory: the sweep prints their commands.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from blockdiff.evaluation.config import HF_PREFIX, SweepConfig
from blockdiff.training.durable import write_text_durably


class Kind(Enum):
    train = "train"
    likelihood = "likelihood"
    samples = "samples"
    reference = "reference"


@dataclass
class Model:
    """A model of the sweep.

    Attributes:
        label: in tables and file names.
        path: run directory or checkpoint.
        block_size: to measure at.
        trained_block_size: that it was trained with.
        train: the command that trains it, or None where it is given.
    """

    label: str
    path: str
    block_size: int
    trained_block_size: int
    train: list[str] | None


@dataclass
class Cell:
    """One command of the sweep.

    Attributes:
        name: without hash.
        kind: what it does.
        command: arguments of `blockdiff`.
        output: the JSON file that says it is finished.
        needs: names of cells that must be finished before.
        model: label of its model; None for the reference.
        sampler: label of its sampler, or None.
    """

    name: str
    kind: Kind
    command: list[str]
    output: Path
    needs: list[str]
    model: str | None = None
    sampler: str | None = None


@dataclass
class Outcome:
    """What became of a cell: its numbers, or why there are none."""

    cell: Cell
    numbers: dict[str, Any] | None
    failure: str | None = None


def plan_cells(config: SweepConfig, models: Sequence[Model], pack_block_size: int) -> list[Cell]:
    """All cells in an order in which each follows what it needs.

    Args:
        config: of the sweep.
        models: to train or measure.
        pack_block_size: common to all, so that all are scored on the same windows.
    """
    own = next((m.path for m in models if m.block_size == m.trained_block_size == 1), None)
    judge = config.judge or own
    judge_needs = _training(models, judge)
    cells = [
        _cell(config, f"train-{m.label}", Kind.train, ["train", *m.train], model=m.label)
        for m in models
        if m.train is not None
    ]
    judged = [f"judge={judge}"] if judge else []
    if judge:
        # The reference is of a checkpoint's corpus, which a judge from elsewhere does not have.
        reader = (own or models[0].path) if judge.startswith(HF_PREFIX) else judge
        command = ["measure", "part=reference", f"checkpoint={reader}", *judged, *config.measure]
        cells.append(_cell(config, "reference", Kind.reference, command, needs=_training(models, reader)))
    for model in models:
        needs = [f"train-{model.label}"] if model.train is not None else []
        base = [f"checkpoint={model.path}", f"block_size={model.block_size}", f"pack_block_size={pack_block_size}"]
        if model.block_size != model.trained_block_size:
            base.append("allow_untrained_block_size=true")
        command = ["measure", "part=likelihood", *base, *config.measure]
        cells.append(
            _cell(config, f"likelihood-{model.label}", Kind.likelihood, command, needs=needs, model=model.label)
        )
        for label, arguments in sampler_settings(config, model.block_size):
            command = ["measure", "part=samples", *base, *judged, *config.measure, *arguments]
            name = f"samples-{model.label}-{label.replace(' ', '-')}"
            found = _cell(config, name, Kind.samples, command, needs=sorted({*needs, *judge_needs}), model=model.label)
            found.sampler = label
            cells.append(found)
    return cells


def _training(models: Sequence[Model], path: str | None) -> list[str]:
    """The cell that trains the model of a path, if this sweep does."""
    return [f"train-{model.label}" for model in models if model.path == path and model.train is not None]


def sampler_settings(config: SweepConfig, block_size: int) -> list[tuple[str, list[str]]]:
    """Label and arguments of each sampler at a block size: one token a call first, then what the grid asks for.

    At block size 1 all rules draw the same way, so there is one setting.
    """
    settings = [("one by one", ["sampler.rule=first_hitting"])]
    if block_size == 1:
        return settings
    for steps in config.steps:
        if steps < block_size:
            label = "1 step" if steps == 1 else f"{steps} steps"
            settings.append((label, ["sampler.rule=ancestral", f"sampler.steps={steps}"]))
    for threshold in config.threshold:
        arguments = ["sampler.rule=confidence", f"sampler.threshold={threshold}"]
        settings.append((f"threshold {threshold:g}", arguments))
    for text in config.samplers:
        arguments = [a if a.startswith("sampler.") else f"sampler.{a}" for a in text.split()]
        settings.append((" ".join(a.partition("=")[2] for a in arguments), arguments))
    return settings


def _cell(
    config: SweepConfig,
    name: str,
    kind: Kind,
    command: list[str],
    *,
    needs: list[str] | None = None,
    model: str | None = None,
) -> Cell:
    digest = hashlib.sha256(json.dumps(command).encode()).hexdigest()[:8]
    output = config.directory / "cells" / f"{name.replace('/', '_')}-{digest}.json"
    if kind is not Kind.train:
        command = [*command, f"output={output}"]
    return Cell(name, kind, command, output, needs or [], model)


Runner = Callable[[Cell], str | None]
"""Runs a cell's command; returns None, or why it failed."""


def run_cells(cells: Sequence[Cell], runner: Runner, say: Callable[[str], None] = print) -> list[Outcome]:
    """Runs what is not finished. A failed cell takes only those with it that need it.

    Returns:
        One outcome a cell, in order.
    """
    outcomes: list[Outcome] = []
    failed: set[str] = set()
    for number, cell in enumerate(cells, 1):
        numbers = read_cell(cell)
        missing = [need for need in cell.needs if need in failed]
        failure = None
        if numbers is None and missing:
            failure = f"not run: it needs {', '.join(missing)}"
        elif numbers is None:
            say(f"[{number}/{len(cells)}] {cell.name}")
            began = time.perf_counter()
            failure = runner(cell)
            if failure is None and cell.kind is Kind.train:
                seconds = time.perf_counter() - began
                write_text_durably(cell.output, json.dumps({"seconds": seconds, "command": cell.command}) + "\n")
            numbers = read_cell(cell) if failure is None else None
            if failure is None and numbers is None:
                failure = f"the command ended well but left no readable {cell.output}"
        if failure is not None:
            failed.add(cell.name)
            say(f"[{number}/{len(cells)}] {cell.name} failed: {failure}")
        outcomes.append(Outcome(cell, numbers, failure))
    return outcomes


def read_cell(cell: Cell) -> dict[str, Any] | None:
    """The numbers of a finished cell, or None."""
    try:
        numbers = json.loads(cell.output.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return numbers if isinstance(numbers, dict) else None


def run_in_process_of_its_own(cell: Cell) -> str | None:
    """Runs a cell as a child, so that not even one that is killed for memory takes the sweep with it.

    Its output goes to a log beside the cell; the last lines of it are the reason where it fails.
    """
    cell.output.parent.mkdir(parents=True, exist_ok=True)
    log = cell.output.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "blockdiff", *cell.command]
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ, check=False).returncode
    if status == 0:
        return None
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"status {status}, see {log}: {' | '.join(lines[-2:])}"
