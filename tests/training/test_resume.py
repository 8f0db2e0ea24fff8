"""A run that was killed and goes on gives what the uninterrupted run gives, bit for bit."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from leftovers import as_if_killed_after, assert_same, curves
from miniature import RunConfig, final_checkpoint, run

from blockdiff.core.corruption import CorruptionKind
from blockdiff.model.compilation import compiler_fault
from blockdiff.training import durable
from blockdiff.training.checkpoints import checkpoint_path, list_checkpoints, newest_valid
from blockdiff.training.config import LearningRate, OptimizerName, Resume
from blockdiff.training.lock import RunLockedError

Make = Callable[..., RunConfig]
KEPT: dict[str, Any] = {"trainer__keep_last": 99}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer__name": OptimizerName.muon, "optimizer__schedule": LearningRate.wsd},
        {"trainer__log_every": 5, "trainer__checkpoint_every": 3, "optimizer__ema_decay": 0.0},
        {"data__workers": 1, "data__max_train_samples": 5},
        {"noise__corruption": CorruptionKind.bernoulli, "noise__clip": [0.3, 0.8], "trainer__precision": "64-true"},
    ],
    ids=["adamw", "muon", "between rows, no average", "worker, epoch border", "clipped, 64-bit"],
)
def test_going_on_is_never_having_stopped(make_config: Make, changes: dict[str, Any]) -> None:
    config = make_config(trainer__max_steps=8, **{**KEPT, **changes})
    straight = run(config)
    for path in list_checkpoints(straight.directory)[:-1:2]:
        step = int(path.stem.removeprefix("step-"))
        name = f"killed-after-{step}"
        as_if_killed_after(straight.directory, step, straight.directory.parent / name)
        config.name = name
        resumed = run(config)
        assert resumed.step == 8
        assert_same(final_checkpoint(resumed), final_checkpoint(straight))
        assert curves(resumed.directory) == curves(straight.directory)
        assert not list(resumed.directory.glob(".writing-*"))


def test_compiled_layers_go_on_bit_for_bit(make_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code is generated at a launch's first step, for the number of masked tokens that this step happens to have."""
    if fault := compiler_fault("cpu"):
        pytest.skip(f"needs what generates code for CPUs: {fault}")
    changes = {"trainer__compile": True, "trainer__max_steps": 4, **KEPT}
    straight = run(make_config(**changes))
    as_if_killed_after(straight.directory, 2, straight.directory.parent / "killed")
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "another cache"))
    resumed = run(make_config(name="killed", **changes))
    assert_same(final_checkpoint(straight), final_checkpoint(resumed))
    assert curves(straight.directory) == curves(resumed.directory)


def test_another_micro_batch_goes_on_with_the_same_data(make_config: Make) -> None:
    """Lightning's own counters of batches would step in the middle of an accumulated batch here."""
    changes = {"trainer__max_steps": 6, "trainer__precision": "64-true", "trainer__log_every": 1, **KEPT}
    straight = run(make_config(data__micro_batch_size=1, **changes))
    for path in list_checkpoints(straight.directory)[1:]:
        path.unlink()
    printed = io.StringIO()
    resumed = run(make_config(data__micro_batch_size=4, **changes), printed=printed)
    assert "data.micro_batch_size: 1 -> 4" in printed.getvalue()
    reference = run(make_config(name="other", data__micro_batch_size=2, **changes))
    for one, other in zip(curves(resumed.directory), curves(reference.directory), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_a_finished_run_is_left_alone(make_config: Make) -> None:
    first = run(make_config())
    before = {path.name: path.read_bytes() for path in first.directory.iterdir() if path.suffix == ".ckpt"}
    printed = io.StringIO()
    again = run(make_config(), printed=printed)
    assert "all 6 steps are done" in printed.getvalue()
    assert (again.step, again.exit_code, again.val_nelbo) == (6, 0, first.val_nelbo)
    assert before == {path.name: path.read_bytes() for path in first.directory.iterdir() if path.suffix == ".ckpt"}


def test_a_broken_newest_checkpoint_is_passed_over_and_named(make_config: Make) -> None:
    straight = run(make_config(**KEPT))
    reference = final_checkpoint(straight)
    bad = checkpoint_path(straight.directory, 6)
    bad.write_bytes(bad.read_bytes()[:-1])
    torn = bad.read_bytes()
    printed = io.StringIO()
    resumed = run(make_config(**KEPT), printed=printed)
    assert "passed over" in printed.getvalue()
    assert "step-00000006.ckpt" in printed.getvalue()
    assert "going on from step-00000004.ckpt" in printed.getvalue()
    assert_same(final_checkpoint(resumed), reference)
    assert torn in [path.read_bytes() for path in straight.directory.glob("*.broken*")]


def test_no_whole_checkpoint_is_an_error_and_no_new_start(make_config: Make) -> None:
    first = run(make_config())
    for path in list_checkpoints(first.directory):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole"):
        run(make_config())


def test_never_and_must(make_config: Make) -> None:
    with pytest.raises(ValueError, match=r"resume=must, but .* holds no checkpoint"):
        run(make_config(resume=Resume.must))
    run(make_config(resume=Resume.never, trainer__max_steps=2))
    with pytest.raises(ValueError, match=r"resume=never, but .* holds checkpoints up to step-00000002\.ckpt"):
        run(make_config(resume=Resume.never, trainer__max_steps=2))
    assert run(make_config(resume=Resume.must, trainer__max_steps=2)).step == 2


def test_another_config_is_refused_with_the_difference(make_config: Make) -> None:
    first = run(make_config(trainer__max_steps=2))
    kept = {path: path.read_bytes() for path in first.directory.iterdir()}
    with pytest.raises(ValueError, match=r"another config:\n  block_size: 4 -> 8\n  model.width: 16 -> 32\n.*name="):
        run(make_config(trainer__max_steps=2, block_size=8, model__width=32, trainer__log_every=1))
    assert kept == {path: path.read_bytes() for path in first.directory.iterdir()}


def test_a_run_is_prolonged_only_where_its_past_stays_the_same(make_config: Make) -> None:
    run(make_config(trainer__max_steps=4))
    with pytest.raises(ValueError, match=r"(?s)trainer.max_steps: 4 -> 6.*schedule=constant"):
        run(make_config(trainer__max_steps=6))
    constant = {"optimizer__schedule": LearningRate.constant, "trainer__val_every": 2}
    straight = run(make_config(name="straight", trainer__max_steps=6, **constant))
    run(make_config(name="prolonged", trainer__max_steps=4, **constant))
    prolonged = run(make_config(name="prolonged", trainer__max_steps=6, **constant))
    assert_same(final_checkpoint(prolonged), final_checkpoint(straight))
    assert curves(prolonged.directory) == curves(straight.directory)


def test_other_source_text_is_refused(make_config: Make, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    lines = [f"{i} plus {i} is {2 * i}" for i in range(300)]
    source.write_text("\n".join(lines), encoding="utf-8")
    run(make_config(data__files=[str(source)], trainer__max_steps=2))
    source.write_text("\n".join(lines[1:]), encoding="utf-8")
    with pytest.raises(ValueError, match="source files have changed"):
        run(make_config(data__files=[str(source)], trainer__max_steps=2))


LAUNCH = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from miniature import miniature, run

def preview(denoiser, count):
    print("at the border", flush=True)
    time.sleep(float(sys.argv[4]))
    return [""] * count

summary = run(miniature(Path(sys.argv[2]), Path(sys.argv[3]), trainer__max_steps=8), preview)
sys.exit(summary.exit_code)
"""


def launch(directory: Path, corpus: Path, sleep: float) -> subprocess.Popen[str]:
    """A process of its own that says when it validates, and then sleeps at the border."""
    arguments = [str(Path(__file__).parent), str(directory), str(corpus), str(sleep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_kill_9_and_a_second_launch(make_config: Make, tmp_path: Path, corpus: Path) -> None:
    straight = run(make_config(name="straight", trainer__max_steps=8))
    process = launch(tmp_path, corpus, 60)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "at the border\n"
        with pytest.raises(RunLockedError, match=f"process {process.pid} "):
            run(make_config(trainer__max_steps=8))
    finally:
        process.kill()
        process.communicate()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints" / "run")] == ["step-00000002.ckpt"]
    resumed = run(make_config(trainer__max_steps=8))
    assert_same(final_checkpoint(resumed), final_checkpoint(straight))
    assert curves(resumed.directory) == curves(straight.directory)


def test_ctrl_c_saves_and_says_how_to_go_on(make_config: Make, tmp_path: Path, corpus: Path) -> None:
    straight = run(make_config(name="straight", trainer__max_steps=8))
    process = launch(tmp_path, corpus, 1)
    assert process.stdout is not None
    assert process.stdout.readline() == "at the border\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "SIGINT: saving a checkpoint at the next step border" in errors
    assert list_checkpoints(tmp_path / "checkpoints" / "run")[-1].name == "step-00000003.ckpt"
    resumed = run(make_config(trainer__max_steps=8))
    assert_same(final_checkpoint(resumed), final_checkpoint(straight))
    assert curves(resumed.directory) == curves(straight.directory)


@pytest.mark.parametrize("moment", ["half of it written", "written, not renamed", "renamed, no manifest", "pruning"])
def test_kill_9_within_a_checkpoint(make_config: Make, moment: str) -> None:
    """In a forked process, which kills itself while it saves step 4."""
    changes = {"trainer__max_steps": 6, "trainer__keep_last": 1, "trainer__log_every": 1}
    straight = run(make_config(name="straight", **changes))
    child = os.fork()
    if not child:
        die_while_saving(4, moment)
        run(make_config(**changes))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    directory = straight.directory.parent / "run"
    survivor = 4 if moment == "pruning" else 2
    assert newest_valid(directory).step == survivor
    printed = io.StringIO()
    resumed = run(make_config(**changes), printed=printed)
    assert f"going on from step-{survivor:08d}.ckpt" in printed.getvalue()
    assert ("passed over" in printed.getvalue()) == (moment == "renamed, no manifest")
    assert_same(final_checkpoint(resumed), final_checkpoint(straight))
    assert curves(resumed.directory) == curves(straight.directory)
    assert not list(directory.glob(".writing-*"))


def die_while_saving(step: int, moment: str) -> None:
    """Replaces what the moment goes through by a kill."""
    name = f"step-{step:08d}.ckpt"
    write, replace, unlink = durable.HashingFile.write, os.replace, Path.unlink
    written = 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counting_write(self: durable.HashingFile, data: bytes) -> int:
        nonlocal written
        written += len(data) if name in str(self._file.name) else 0
        if written > 20_000 and moment == "half of it written":
            die()
        return write(self, data)

    def watching_replace(source: Path, target: Path) -> None:
        if target.name == name and moment == "written, not renamed":
            die()
        replace(source, target)
        if target.name == name and moment == "renamed, no manifest":
            die()

    def watching_unlink(self: Path, missing_ok: bool = False) -> None:
        unlink(self, missing_ok)
        if self.suffix == ".json" and moment == "pruning":
            die()

    durable.HashingFile.write = counting_write  # type: ignore[method-assign]
    os.replace = watching_replace  # type: ignore[assignment]
    Path.unlink = watching_unlink  # type: ignore[method-assign]
