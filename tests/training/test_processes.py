"""Runs of several real processes: the same numbers as one process, whole or split weights, also across a change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from leftovers import as_if_killed_after, assert_same, curves, small_disk
from miniature import RunConfig, run
from team import launch

import blockdiff
from blockdiff.training.checkpoints import CheckpointError, checkpoint_path, newest_valid, read_weights, verify
from blockdiff.training.shards import read_part, read_rest

Make = Callable[..., RunConfig]
RUN = {
    "data__micro_batch_size": 1,
    "optimizer__ema_decay": 0.9,
    "optimizer__grad_clip": 0.1,
    "trainer__max_steps": 20,
    "trainer__val_every": 5,
    "trainer__log_every": 1,
    "trainer__checkpoint_every": 5,
    "trainer__keep_last": 99,
}
DOUBLE = {**RUN, "trainer__precision": "64-true"}
SPLIT = {**RUN, "trainer__strategy": "fsdp"}


def close(one: list[dict[str, float]], other: list[dict[str, float]], rel: float) -> None:
    assert len(one) == len(other)
    for row, same in zip(one, other, strict=True):
        # A standard error is the root of a difference of nearly equal sums: half of the digits.
        assert row.pop("val/nelbo_se", 0) == pytest.approx(same.pop("val/nelbo_se", 0), rel=rel**0.5)
        assert row == pytest.approx(same, rel=rel)


def went_on(directory: Path) -> bool:
    """Whether no step was taken twice: a checkpoint that comes again sets the former aside."""
    return not list(directory.glob("*.broken*"))


def whole(path: Path) -> dict[str, Any]:
    """Everything in a sharded checkpoint."""
    return {part: read_part(path, part) for part in ("state_dict", "ema", "optimizer")} | read_rest(path)


def moments(directory: Path, name: str) -> float:
    """The norm of all of AdamW's moments of this name after 20 steps."""
    path = checkpoint_path(directory, 20)
    if path.is_dir():
        tensors = [value for key, value in read_part(path, "optimizer").items() if key.endswith(f".{name}")]
    else:
        (optimizer,) = torch.load(path, weights_only=True)["optimizer_states"]
        tensors = [state[name] for state in optimizer["state"].values()]
    assert len(tensors) > 10
    return float(torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def runs(place: Path, corpus: Path) -> Path:
    """The run directories of one process, then of two."""
    from miniature import miniature

    run(miniature(place, corpus, name="one64", **DOUBLE))
    run(miniature(place, corpus, name="one32", **RUN))
    directory = place / "checkpoints"
    as_if_killed_after(directory / "one64", 5, directory / "moved64")
    jobs: list[dict[str, Any]] = [
        {"name": "two64", **DOUBLE},
        {"name": "two32", **RUN},
        {"name": "moved64", **DOUBLE},
        {"name": "split", **SPLIT},
        {"copy": ["split", 10, "split-killed"]},
        {"name": "split-killed", **SPLIT},
        {"name": "split-compiled", **SPLIT, "trainer__compile": True, "model__activation_checkpointing": True},
        {"name": "two-compiled", **RUN, "trainer__compile": True},
    ]
    with small_disk(place / "disk", 1_300_000) as permitted:
        if permitted:
            full = {"name": "full", "run_root": str(place / "disk"), "fails": "step 15 could not be written"}
            jobs.append({**full, **SPLIT})
        launch(2, place, corpus, jobs)
        if permitted:
            shutil.copytree(place / "disk" / "full", directory / "full")
    return directory


def test_two_processes_take_the_same_steps_as_one(runs: Path) -> None:
    """The validation subset of 3 sequences does not divide by 2; each counts once."""
    close(curves(runs / "two64"), curves(runs / "one64"), 1e-10)
    close(curves(runs / "two32"), curves(runs / "one32"), 1e-5)


@pytest.mark.parametrize("name", ["two-compiled", "split-compiled"])
def test_compiled_layers_take_the_same_steps(runs: Path, name: str) -> None:
    close(curves(runs / name), curves(runs / "one32"), 1e-4)


def test_a_run_moves_from_one_process_to_two_and_back(runs: Path, place: Path, corpus: Path) -> None:
    from miniature import miniature

    assert went_on(runs / "moved64")
    close(curves(runs / "moved64"), curves(runs / "one64"), 1e-10)
    as_if_killed_after(runs / "moved64", 10, runs / "back64")
    run(miniature(place, corpus, name="back64", **DOUBLE))
    assert went_on(runs / "back64")
    close(curves(runs / "back64"), curves(runs / "one64"), 1e-10)
    one, _ = read_weights(checkpoint_path(runs / "one64", 20))
    back, _ = read_weights(checkpoint_path(runs / "back64", 20))
    for name, weight in one.items():
        torch.testing.assert_close(back[name], weight, rtol=1e-9, atol=1e-12)


def test_split_weights_take_the_same_steps(runs: Path) -> None:
    """Averages, clipping and validation included; the checkpoint reads as one of a single process does."""
    close(curves(runs / "split"), curves(runs / "one32"), 1e-5)
    for kind in ("ema", "raw"):
        split, step = read_weights(checkpoint_path(runs / "split", 20), kind)  # type: ignore[arg-type]
        single, _ = read_weights(checkpoint_path(runs / "one32", 20), kind)  # type: ignore[arg-type]
        assert step == 20
        assert split.keys() == single.keys()
        for name, weight in single.items():
            torch.testing.assert_close(split[name], weight, rtol=1e-3, atol=1e-5)
    # AdamW hides from the weights by what its gradients were scaled; its moments show it.
    for moment in ("exp_avg", "exp_avg_sq"):
        assert moments(runs / "split", moment) == pytest.approx(moments(runs / "one32", moment), rel=1e-4)
    assert len((runs / "split" / "samples.txt").read_text(encoding="utf-8").split("===")) == 9


def test_a_split_run_is_loaded_like_any_other(runs: Path) -> None:
    for run_or_checkpoint in (runs / "split", checkpoint_path(runs / "split", 20)):
        model = blockdiff.load(run_or_checkpoint)
        assert model.step == 20
        assert model.path == checkpoint_path(runs / "split", 20)
        assert model.nelbo("line 3: the square of 3 is 9").nelbo < 6


def test_split_weights_resume_bit_for_bit(runs: Path) -> None:
    straight, resumed = checkpoint_path(runs / "split", 20), checkpoint_path(runs / "split-killed", 20)
    assert_same(whole(resumed), whole(straight))
    assert curves(runs / "split-killed") == curves(runs / "split")
    assert went_on(runs / "split-killed")
    assert not list((runs / "split-killed").glob(".writing-*"))


def test_damaged_shards_are_passed_over_and_code_in_them_does_not_run(runs: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(runs / "split", tmp_path / "copy"))
    path = checkpoint_path(copy, 20)
    verify(path)
    shard = path / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    newest = newest_valid(copy)
    assert newest.step == 15
    assert "__1_0.distcp has" in newest.broken[0]
    (path / ".metadata").write_bytes(b"cposix\nsystem\n(S'touch " + str(tmp_path / "sprung").encode() + b"'\ntR.")
    with pytest.raises(CheckpointError, match="does not belong there"):
        read_weights(path)
    assert not (tmp_path / "sprung").exists()


def test_a_full_disk_leaves_the_former_shards(runs: Path) -> None:
    if not (runs / "full").exists():
        pytest.skip("mounting a file system is not permitted here")
    assert newest_valid(runs / "full") == (checkpoint_path(runs / "full", 10), 10, [])
    assert not list((runs / "full").glob(".writing-*"))


def test_split_runs_go_on_split(runs: Path, place: Path, corpus: Path) -> None:
    from miniature import miniature

    with pytest.raises(ValueError, match=r"trainer.strategy: fsdp -> auto"):
        run(miniature(place, corpus, name="split", **RUN))


def test_four_processes_take_the_same_steps_as_one(runs: Path, place: Path, corpus: Path) -> None:
    launch(4, place, corpus, [{"name": "four64", **DOUBLE}])
    close(curves(runs / "four64"), curves(runs / "one64"), 1e-10)
