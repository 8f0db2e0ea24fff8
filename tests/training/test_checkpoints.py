"""Checkpoint files: what is whole, what is not and says so, what is kept."""

import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdiff.training.checkpoints import (
    CheckpointError,
    checkpoint_path,
    list_checkpoints,
    manifest_path,
    newest_valid,
    open_checkpoint,
    prune,
    read_weights,
    save_checkpoint,
    step_of,
    sweep,
    verify,
)
from blockdiff.training.durable import TEMPORARY


def save(directory: Path, step: int, **more: Any) -> Path:
    weights = {"denoiser.a": torch.full((1000,), float(step)), "denoiser.b": torch.ones(2)}
    path = checkpoint_path(directory, step)
    save_checkpoint({"state_dict": weights, "global_step": step, **more}, path, {"data": "corpus"})
    return path


def test_names_sort_and_parse() -> None:
    assert checkpoint_path(Path("d"), 7) == Path("d/step-00000007.ckpt")
    assert step_of(Path("d/step-123456789.ckpt")) == 123456789
    assert step_of(Path("d/last.ckpt")) is None


def test_manifest_describes_the_file(tmp_path: Path) -> None:
    manifest = verify(save(tmp_path, 3))
    assert manifest["step"] == 3
    assert manifest["data"] == "corpus"
    assert list(manifest["files"]) == ["step-00000003.ckpt"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(b"not a checkpoint" * 100)


def lose_manifest(path: Path) -> None:
    manifest_path(path).unlink()


def cut_manifest(path: Path) -> None:
    manifest_path(path).write_text('{"format": 1, "st', encoding="utf-8")


def other_manifest(path: Path) -> None:
    manifest_path(path).write_text('{"format": 1, "files": {"x.ckpt": {}}}', encoding="utf-8")


def later_format(path: Path) -> None:
    text = manifest_path(path).read_text(encoding="utf-8").replace('"format": 1', '"format": 99')
    manifest_path(path).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "truncated"),
        (flip, "SHA-256"),
        (empty, "has 0 bytes"),
        (foreign, "truncated or overwritten"),
        (lose_manifest, "no manifest"),
        (cut_manifest, "is damaged"),
        (other_manifest, "describes other files"),
        (later_format, "later blockdiff"),
    ],
)
def test_broken_ones_are_named_passed_over_and_left(tmp_path: Path, damage: Any, reason: str) -> None:
    save(tmp_path, 1)
    good, bad = save(tmp_path, 2), save(tmp_path, 3)
    damage(bad)
    newest = newest_valid(tmp_path)
    assert (newest.path, newest.step) == (good, 2)
    assert len(newest.broken) == 1
    assert reason in newest.broken[0]
    assert "step-00000003.ckpt" in newest.broken[0]
    assert bad.exists()


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert newest_valid(tmp_path) == (None, 0, [])


@pytest.mark.parametrize("damage", [truncate, empty, foreign])
def test_opening_a_damaged_file_says_so(tmp_path: Path, damage: Any) -> None:
    path = save(tmp_path, 1)
    damage(path)
    with pytest.raises(CheckpointError, match=r"step-00000001\.ckpt is truncated or no checkpoint"):
        open_checkpoint(path)


def test_opening_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.parametrize("content", [{"a": 1}, [1, 2], {"state_dict": {"model.w": torch.ones(1)}, "global_step": 1}])
def test_somebody_elses_checkpoint_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="is not a checkpoint of blockdiff"):
        open_checkpoint(tmp_path / "other.ckpt")


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"state_dict": Trap(), "global_step": 0}, tmp_path / "trap.ckpt")
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(Trap()))
    for name in ("trap.ckpt", "plain.ckpt"):
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_weights_are_the_averaged_or_the_raw_ones(tmp_path: Path) -> None:
    path = save(tmp_path, 4, ema={"a": torch.zeros(1000), "b": torch.zeros(2)})
    averaged, step = read_weights(path)
    raw, _ = read_weights(path, "raw")
    assert step == 4
    assert averaged.keys() == raw.keys() == {"a", "b"}
    assert averaged["a"].sum() == 0
    assert raw["a"].sum() == 4000
    assert read_weights(save(tmp_path, 5), "ema")[0]["a"].sum() == 5000
    with pytest.raises(ValueError, match="weights='best'"):
        read_weights(path, "best")  # type: ignore[arg-type]


def test_pruning_keeps_the_last_the_milestones_and_the_unfinished(tmp_path: Path) -> None:
    for step in range(1, 10):
        save(tmp_path, step)
    lose_manifest(checkpoint_path(tmp_path, 2))
    removed = prune(tmp_path, keep_last=2, keep_every=4)
    assert [step_of(path) for path in removed] == [1, 3, 5, 6, 7]
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2, 4, 8, 9]
    assert {step_of(path) for path in list_checkpoints(tmp_path) if manifest_path(path).exists()} == {4, 8, 9}
    assert not list(tmp_path.glob(TEMPORARY + "*"))


def test_a_failed_write_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    """The kernel itself refuses the write, as on a full disk."""
    first = save(tmp_path, 1)
    before = first.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert first.read_bytes() == before
    assert not checkpoint_path(tmp_path, 2).exists()
    assert not list(tmp_path.glob(TEMPORARY + "*"))


def test_a_broken_one_whose_step_comes_again_is_set_aside(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for damage in (truncate, lose_manifest):
        damage(path)
        broken = path.read_bytes()
        save(tmp_path, 1)
        verify(path)
        assert broken in [file.read_bytes() for file in tmp_path.glob("*.broken*")]
    assert list_checkpoints(tmp_path) == [path]


def test_sweep_removes_half_written_files_only(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (tmp_path / (TEMPORARY + "step-00000002.ckpt")).write_bytes(b"half")
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == [path, manifest_path(path)]
