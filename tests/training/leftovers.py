"""What runs leave: compared bit for bit, or as a kill would have left it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from blockdiff.training.checkpoints import list_checkpoints, manifest_path
from blockdiff.training.metrics import CLOCKED, read_rows


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal bit for bit, all the way down."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def curves(directory: Path) -> list[dict[str, float]]:
    """A run's rows without what a clock measured."""
    return [{k: v for k, v in row.items() if k not in CLOCKED} for row in read_rows(directory)]


def as_if_killed_after(directory: Path, step: int, copy: Path) -> None:
    """What a kill in the midst of later steps leaves: rows that no checkpoint covers, a torn line, a torn file.

    The copy is a run of its own name.
    """
    shutil.copytree(directory, copy)
    for path in list_checkpoints(copy):
        if int(path.stem.removeprefix("step-")) > step:
            remove(path)
            manifest_path(path).unlink()
    with open(copy / "metrics.csv", "a", encoding="utf-8") as file:
        file.write("9999,1.5,")
    (copy / ".writing-step-00000099.ckpt").write_bytes(b"half")
    config = copy / "config.yaml"
    text = config.read_text(encoding="utf-8").replace(f"name: {directory.name}\n", f"name: {copy.name}\n")
    config.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """A checkpoint of either kind."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[bool]:
    """A file system of `size` bytes at `place` until the end; whether mounting it is permitted here."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
