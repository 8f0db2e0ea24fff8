"""A disk that is really full: a tiny file system in memory."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leftovers import assert_same, curves, small_disk
from miniature import RunConfig, final_checkpoint, run

from blockdiff.model.denoiser import Denoiser
from blockdiff.training.checkpoints import checkpoint_path, list_checkpoints, manifest_path, step_of, verify
from blockdiff.training.config import OnCheckpointError
from blockdiff.training.errors import CheckpointWriteError

Make = Callable[..., RunConfig]
RUN = {"trainer__max_steps": 8, "trainer__val_every": 7, "trainer__keep_last": 99, "trainer__log_every": 1}


@pytest.fixture
def disk(make_config: Make, tmp_path: Path) -> Iterator[Path]:
    """Room for two checkpoints and a half."""
    size = checkpoint_path(run(make_config(name="straight", **RUN)).directory, 8).stat().st_size
    with small_disk(tmp_path / "disk", size * 5 // 2) as permitted:
        if not permitted:
            pytest.skip("mounting a file system is not permitted here")
        yield tmp_path / "disk"


def steps_on(directory: Path) -> list[int | None]:
    for path in list_checkpoints(directory):
        verify(path)
    assert not list(directory.glob(".writing-*"))
    return [step_of(path) for path in list_checkpoints(directory)]


def test_the_run_ends_with_what_to_do_and_goes_on_when_it_is_done(make_config: Make, disk: Path) -> None:
    config = make_config(run_root=str(disk), **RUN)
    with pytest.raises(CheckpointWriteError) as caught:
        run(config)
    for part in (
        f"step 6 could not be written to {disk / 'run'}",
        "No space left on device",
        "bytes are free",
        "the last good checkpoint is",
        "step-00000004.ckpt",
        "Free some space and give the same command again",
    ):
        assert part in str(caught.value)
    assert steps_on(disk / "run") == [2, 4]
    (disk / "ballast").write_bytes(b"x" * shutil.disk_usage(disk).free)
    with pytest.raises(ValueError, match=r"run cannot be written \(No space left on device; 0 bytes"):
        run(config)
    assert steps_on(disk / "run") == [2, 4]
    (disk / "ballast").unlink()
    manifest_path(checkpoint_path(disk / "run", 2)).unlink()
    checkpoint_path(disk / "run", 2).unlink()
    straight = run(make_config(name="straight", **RUN))
    resumed = run(make_config(run_root=str(disk), **{**RUN, "trainer__keep_last": 1}))
    assert_same(final_checkpoint(resumed), final_checkpoint(straight))


def test_the_run_may_go_on_and_loses_no_row(make_config: Make, disk: Path) -> None:
    def make_room(denoiser: Denoiser, count: int) -> list[str]:
        if (disk / "ballast").exists():
            (disk / "ballast").unlink()
            manifest_path(checkpoint_path(disk / "run", 2)).unlink()
            checkpoint_path(disk / "run", 2).unlink()
        return [""] * count

    class Filling(io.StringIO):
        """Fills the disk to the last byte once the failed checkpoint has been reported."""

        def write(self, text: str) -> int:
            if "step 6 could not be written" in text:
                (disk / "ballast").write_bytes(b"x" * shutil.disk_usage(disk).free)
            return super().write(text)

    printed = Filling()
    config = make_config(run_root=str(disk), trainer__on_checkpoint_error=OnCheckpointError["continue"], **RUN)
    summary = run(config, make_room, printed)
    assert "The run goes on" in printed.getvalue()
    assert steps_on(disk / "run") == [4, 8]
    straight = run(make_config(name="straight", **RUN))
    assert_same(final_checkpoint(summary), final_checkpoint(straight))
    assert curves(summary.directory) == curves(straight.directory)
