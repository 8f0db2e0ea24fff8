"""`train.py` as several processes: who stops, dies or hangs, and the same command again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from leftovers import curves
from test_processes import close

from blockdiff import cli
from blockdiff.composition import load_config
from blockdiff.training.checkpoints import list_checkpoints, manifest_path
from blockdiff.training.config import Strategy
from blockdiff.training.trainer import is_first_process

ROOT = Path(__file__).parents[2]
COMMAND = [str(ROOT / "train.py"), "trainer.devices=2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RUN = [
    "data=text",
    "data.files=corpus.txt",
    "data.tokenizer=bytes",
    "data.val_fraction=0.2",
    "data.global_batch_size=4",
    "data.micro_batch_size=1",
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "model.kv_heads=1",
    "block_size=4",
    "seq_len=32",
    "optimizer.warmup_steps=2",
    "trainer.max_steps=60",
    "trainer.compile=false",
    "trainer.val_every=30",
    "trainer.val_samples=3",
    "trainer.checkpoint_every=10",
    "trainer.preview=false",
    "trainer.precision=64-true",
    "trainer.accelerator=cpu",
    "sampler.max_new_tokens=4",
]


@pytest.fixture
def place(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "corpus.txt").write_bytes(corpus.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(command: list[str], *changes: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command, *RUN, "name=two", *changes],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_a_checkpoint(directory: Path, process: subprocess.Popen[str]) -> None:
    """Until there is a whole one that was not there before."""
    before = len(list_checkpoints(directory)) and max(list_checkpoints(directory))
    while process.poll() is None:
        whole = [path for path in list_checkpoints(directory) if manifest_path(path).exists()]
        if whole and max(whole) != before:
            return
        time.sleep(0.02)


def companions(process: subprocess.Popen[str]) -> Sequence[psutil.Process]:
    return psutil.Process(process.pid).children()


def test_a_stopped_then_a_killed_companion_and_the_same_run_by_torchrun(place: Path) -> None:
    assert cli.main(["train", *RUN, "name=one", "trainer.devices=1"]) == 0
    directory = place / "checkpoints" / "two"

    process = start(COMMAND)
    wait_for_a_checkpoint(directory, process)
    companions(process)[0].send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 138, output
    assert "two: stopped by SIGUSR1 at step" in output
    assert len(list_checkpoints(directory)) == 2

    process = start(COMMAND)
    wait_for_a_checkpoint(directory, process)
    companions(process)[0].kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "going on from step-" in output
    assert "blockdiff: another process of this run has ended" in output
    assert "the last good checkpoint is checkpoints/two/step-" in output

    process = start([*TORCHRUN, COMMAND[0], "trainer=ddp"])
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "going on from step-" in output
    close(curves(directory), curves(place / "checkpoints" / "one"), 1e-10)


def test_a_companion_that_hangs_is_waited_for_until_the_timeout(place: Path) -> None:
    directory = place / "checkpoints" / "two"
    process = start(COMMAND, "trainer.timeout_seconds=12", "trainer.max_steps=10000")
    wait_for_a_checkpoint(directory, process)
    hanging = companions(process)[0]
    hanging.suspend()
    try:
        process.wait(timeout=60)
    finally:
        hanging.kill()
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 1, output
    assert "did not answer within trainer.timeout_seconds=12" in output


COMPANION = """
import time
from blockdiff.training.orphan import end_with_launcher
end_with_launcher(0.1)
print("watching", flush=True)
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys
from blockdiff.training.orphan import announce_launcher
announce_launcher()
companion = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
assert companion.stdout.readline() == b"watching\\n"
print(companion.pid, flush=True)
"""


def test_a_companion_does_not_outlive_a_launcher_that_it_has_not_met() -> None:
    command = [sys.executable, "-c", LAUNCHER, COMPANION]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pid = int(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)
    with suppress(psutil.NoSuchProcess):
        orphan, deadline = psutil.Process(pid), time.monotonic() + 20
        while orphan.status() != psutil.STATUS_ZOMBIE:  # for good, where nobody reaps orphans
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("group", "environment", "nodes", "devices"),
    [
        ("ddp", {}, 1, "auto"),
        ("ddp", {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8"}, 2, 8),
        ("fsdp", {"GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}, 3, 1),
        ("slurm", {"SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS_PER_NODE": "8"}, 4, 8),
    ],
)
def test_presets_take_their_sizes_from_the_launcher(
    group: str, environment: dict[str, str], nodes: int, devices: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trainer = load_config("train", [f"trainer={group}"]).trainer
    assert (trainer.nodes, trainer.devices) == (nodes, devices)
    assert trainer.strategy is (Strategy.fsdp if group == "fsdp" else Strategy.ddp)


@pytest.mark.parametrize(
    ("environment", "first"),
    [({}, True), ({"NODE_RANK": "1"}, False), ({"NODE_RANK": "0"}, True)],
)
def test_one_process_of_all_nodes_is_the_first(
    environment: dict[str, str], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first_process() is first
