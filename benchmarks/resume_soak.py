"""Kills a training run again and again, at random moments, and compares what it leaves with an undisturbed run.

    python benchmarks/resume_soak.py --kills 21 --processes 1

A third of the kills fall anywhere after the launch (start-up included), a third after a random number of steps, and a
third into the writing of a checkpoint. The run has a loader worker, accumulates two micro-batches, logs every step and
crosses epochs. Prints one table; the exit status is 1 if any difference is found.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from blockdiff.training.checkpoints import newest_valid
from blockdiff.training.durable import TEMPORARY
from blockdiff.training.metrics import CLOCKED, read_rows

ROOT = Path(__file__).parent.parent
MAX_STEPS, CHECKPOINT_EVERY, MOST_STEPS = 400, 5, 15
RUN = f"""
data=text data.files=corpus.txt data.tokenizer=bytes data.val_fraction=0.2 data.global_batch_size=4
data.micro_batch_size=1 data.workers=1 model.layers=2 model.width=16 model.heads=2 model.kv_heads=1
block_size=4 seq_len=32 optimizer.warmup_steps=20
trainer.max_steps={MAX_STEPS} trainer.val_every=50 trainer.val_samples=4 trainer.log_every=1
trainer.checkpoint_every={CHECKPOINT_EVERY} trainer.keep_last=3 trainer.preview=false trainer.accelerator=cpu
sampler.max_new_tokens=4
""".split()
KINDS = ("any moment", "after some steps", "within a write")


@dataclass
class Tally:
    """What happened so far.

    Attributes:
        kills: all of them.
        within_writes: those that left a half-written checkpoint.
        before_training: those that came before the first step of their launch was logged.
        replayed: steps that were taken again.
        broken: checkpoints that were written but not declared finished.
    """

    kills: int = 0
    within_writes: int = 0
    before_training: int = 0
    replayed: int = 0
    broken: int = 0


def launch(place: Path, name: str, processes: int) -> subprocess.Popen[bytes]:
    """The command that is given again and again."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *RUN, f"name={name}", f"trainer.devices={processes}"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def newest_row(directory: Path) -> int:
    """The last logged step."""
    try:
        with open(directory / "metrics.csv", "rb") as file:
            file.seek(-min(400, file.seek(0, os.SEEK_END)), os.SEEK_END)
            last = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return int(last.partition(b",")[0])
    except (OSError, ValueError):  # not there yet, or its header alone
        return 0


def table_of(directory: Path) -> bytes:
    """The table of metrics as it is."""
    path = directory / "metrics.csv"
    return path.read_bytes() if path.exists() else b""


def wait_for_the_moment(kind: str, directory: Path, process: subprocess.Popen[bytes], draw: random.Random) -> None:
    """Returns when it is time to kill, or when the process has ended."""
    before, began = newest_row(directory), time.monotonic()
    steps, seconds = draw.randint(1, MOST_STEPS), draw.uniform(0.5, 8)
    while process.poll() is None:
        match kind:
            case "any moment":
                due = time.monotonic() - began >= seconds
            case "after some steps":
                due = newest_row(directory) >= before + steps
            case _:
                due = newest_row(directory) > before and any(directory.glob(f"{TEMPORARY}step-*"))
        if due or newest_row(directory) >= before + 2 * MOST_STEPS:
            return
        time.sleep(0.0005 if kind == "within a write" else 0.01)


def kill(process: subprocess.Popen[bytes], draw: random.Random) -> None:
    """Kills one of the run's processes with SIGKILL, and waits until all of them have ended."""
    main = psutil.Process(process.pid)
    others = [child for child in main.children() if child.environ().get("LOCAL_RANK", "0") != "0"]
    draw.choice([main, *others]).kill()
    process.wait(timeout=120)
    psutil.wait_procs(others, timeout=120)


def soak(place: Path, kills: int, processes: int, draw: random.Random, console: Console) -> Tally:
    """Launches and kills, then lets the run come to its end."""
    directory, tally = place / "checkpoints" / "killed", Tally()
    while tally.kills < kills:
        before, table = newest_valid(directory).step, table_of(directory)
        process = launch(place, "killed", processes)
        wait_for_the_moment(KINDS[tally.kills % 3], directory, process, draw)
        if process.poll() is not None:
            raise SystemExit(f"the run ended by itself with status {process.returncode} after {tally.kills} kills")
        kill(process, draw)
        newest = newest_valid(directory)
        untouched = table_of(directory) == table
        tally.kills += 1
        tally.within_writes += any(directory.glob(f"{TEMPORARY}step-*"))
        tally.before_training += untouched or newest_row(directory) <= before
        tally.replayed += 0 if untouched else newest_row(directory) - newest.step
        tally.broken += len(newest.broken)
        console.print(f"kill {tally.kills}: at step {newest_row(directory)}, goes on from {newest.step}")
    finish(place, "killed", processes)
    return tally


def finish(place: Path, name: str, processes: int) -> None:
    """Runs to the last step."""
    status = launch(place, name, processes).wait(timeout=1800)
    if status:
        raise SystemExit(f"{name} ended with status {status}")


def pieces(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Everything that a run must leave alike: each tensor and number of its last checkpoint, and each row."""
    newest = newest_valid(directory)
    assert newest.path is not None
    assert newest.step == MAX_STEPS
    yield from leaves("checkpoint", torch.load(newest.path, weights_only=True))
    for row in read_rows(directory):
        yield f"row {row['step']:.0f}", repr({k: v for k, v in row.items() if k not in CLOCKED}).encode()


def leaves(name: str, value: Any) -> Iterator[tuple[str, bytes]]:
    """The tensors and numbers of a nested dictionary, as bytes."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from leaves(f"{name}[{index}]", part)
    elif isinstance(value, torch.Tensor):
        yield name, value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    else:
        yield name, repr(value).encode()


def compare(one: Path, other: Path) -> tuple[int, list[str]]:
    """How many bytes were compared, by SHA-256 of each piece, and the names of those that differ."""
    first, second = (
        {name: (len(data), hashlib.sha256(data).digest()) for name, data in pieces(directory)}
        for directory in (one, other)
    )
    different = [name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)]
    return sum(size for size, _ in first.values()), different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=21)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console, began = Console(width=100), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        lines = [f"line {i}: the square of {i} is {i * i} and its cube is {i**3}." for i in range(120)]
        (place / "corpus.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        finish(place, "undisturbed", arguments.processes)
        tally = soak(place, arguments.kills, arguments.processes, random.Random(arguments.seed), console)
        size, different = compare(place / "checkpoints" / "undisturbed", place / "checkpoints" / "killed")
    table = Table("", "", show_header=False)
    for label, number in (
        ("kills survived", tally.kills),
        ("… of them within the writing of a checkpoint", tally.within_writes),
        ("… of them before the first step of their launch", tally.before_training),
        (f"steps replayed (checkpoint_every={CHECKPOINT_EVERY}, {MAX_STEPS} steps)", tally.replayed),
        ("unfinished checkpoints passed over", tally.broken),
        ("bytes compared", size),
        ("differences", len(different)),
    ):
        table.add_row(label, f"{number:,}")
    console.print(table)
    for name in different[:20]:
        console.print(f"differs: {name}", markup=False)
    console.print(
        f"{arguments.processes} process(es), {os.cpu_count()} CPU cores, torch {torch.__version__}, "
        f"{time.monotonic() - began:.0f} s"
    )
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
