"""Checkpoint files: names, manifests, which one is valid, and the weights within. Imports no Lightning.

A checkpoint of N finished steps is `step-N.ckpt`, a `torch.save` dictionary that loads with
`weights_only=True`, and its manifest `step-N.ckpt.json`, written after it: size and SHA-256 of each file.
What has no manifest was never finished.

Keys of the dictionary that readers may rely on: ``state_dict`` (names with the prefix ``denoiser.``), ``ema``
(the averaged weights, names without prefix; absent where no average is kept) and ``global_step``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from blockdiff.training.durable import TEMPORARY, HashingFile, sha256_of, write_durably, write_text_durably

PREFIX = "denoiser."
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})\.ckpt")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the message names the file, what is wrong and the remedy."""


class Newest(NamedTuple):
    """The result of looking for a checkpoint.

    Attributes:
        path: the newest valid checkpoint, or None.
        step: its number of finished steps, 0 without one.
        broken: newer ones that were passed over, each as a message.
    """

    path: Path | None
    step: int
    broken: list[str]


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` finished steps lies."""
    return directory / f"step-{step:08d}.ckpt"


def manifest_path(path: Path) -> Path:
    """The manifest of a checkpoint."""
    return path.with_name(path.name + ".json")


def step_of(path: Path) -> int | None:
    """Finished steps by the file's name; None if it is no name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoints(directory: Path) -> list[Path]:
    """All checkpoints, oldest first, valid or not."""
    found = [(step, path) for path in directory.glob("step-*.ckpt") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def save_checkpoint(checkpoint: dict[str, Any], path: Path, facts: dict[str, Any]) -> None:
    """Writes a checkpoint and then its manifest, which holds `facts` beside step, sizes and hashes.

    Raises:
        OSError: it could not be written; no checkpoint of another name is touched.
    """

    def write(file: HashingFile) -> None:
        try:
            torch.save(checkpoint, cast("IO[bytes]", file))
        except RuntimeError as error:  # torch's writer hides the reason when the disk is full
            raise OSError(f"{path}: {error}") from error

    _set_aside(path)
    file = write_durably(path, write)
    files = {path.name: {"bytes": file.size, "sha256": file.sha256}}
    manifest = {"format": FORMAT, "step": checkpoint["global_step"], "files": files, **facts}
    write_text_durably(manifest_path(path), json.dumps(manifest, indent=1) + "\n")


def _set_aside(path: Path) -> None:
    """A run comes by the step of a broken checkpoint again: the broken files are kept under another name."""
    present = [file for file in (path, manifest_path(path)) if file.exists()]
    if not present:
        return
    taken = sum(1 for _ in path.parent.glob(f"{path.name}.broken*"))
    for file in present:
        file.rename(path.with_name(f"{path.name}.broken{taken}{file.name.removeprefix(path.name)}"))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, unreadable or of a later format.
    """
    try:
        manifest = json.loads(manifest_path(path).read_bytes())
        files = manifest["files"]
        newer = manifest["format"] > FORMAT
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no manifest: its writing was cut off") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest_path(path)} is damaged ({error})") from None
    if newer:
        raise CheckpointError(
            f"{path} was written by a later blockdiff (format {manifest['format']}); update blockdiff"
        )
    if path.name not in files:
        raise CheckpointError(f"{manifest_path(path)} describes other files: {', '.join(files)}")
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """Compares each file of a checkpoint with the manifest, byte for byte by hash, and returns the manifest.

    Raises:
        CheckpointError: a file is missing, shorter, longer or altered.
    """
    manifest = read_manifest(path)
    for name, facts in manifest["files"].items():
        file = path.parent / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        size = file.stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(f"{file} has {size} bytes, not {facts['bytes']}: truncated or overwritten")
        if sha256_of(file) != facts["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not that of the manifest")
    return manifest


def newest_valid(directory: Path) -> Newest:
    """The newest checkpoint that is whole. Broken ones are named and passed over, never deleted."""
    broken = []
    for path in reversed(list_checkpoints(directory)):
        try:
            verify(path)
        except CheckpointError as error:
            broken.append(str(error))
        else:
            return Newest(path, step_of(path) or 0, broken)
    return Newest(None, 0, broken)


def prune(directory: Path, keep_last: int, keep_every: int, keep: Iterable[Path] = ()) -> list[Path]:
    """Removes finished checkpoints but the last `keep_last`, those of each `keep_every` steps (0: none) and
    `keep`.

    What has no manifest is left where it is and does not count.

    Returns:
        The removed ones.
    """
    finished = [path for path in list_checkpoints(directory) if manifest_path(path).exists()]
    kept = set(finished[-keep_last:]) | set(keep)
    removed = [p for p in finished if p not in kept and not (keep_every and (step_of(p) or 0) % keep_every == 0)]
    for path in removed:
        # Renamed first: a kill between the two removals leaves nothing that looks like a broken checkpoint.
        doomed = path.rename(path.with_name(TEMPORARY + path.name))
        manifest_path(path).unlink()
        doomed.unlink()
    return removed


def sweep(directory: Path) -> None:
    """Removes what killed processes left half-written. Only the owner of the run's lock may call this."""
    for path in directory.glob(TEMPORARY + "*"):
        path.unlink()


def open_checkpoint(path: Path, mapped: bool = True) -> dict[str, Any]:
    """Loads a checkpoint without running any code in it.

    Args:
        path: a checkpoint file.
        mapped: map the file, so that tensors are read when they are used; otherwise read all of it.

    Raises:
        CheckpointError: it is truncated, damaged, or not a checkpoint of blockdiff.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except Exception as error:  # pickle, zip and torch errors alike: the file is not what it claims to be
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is truncated or no checkpoint ({reason}); use another one") from error
    keys = ("state_dict", "global_step")
    if not isinstance(checkpoint, dict) or any(key not in checkpoint for key in keys):
        raise CheckpointError(f"{path} is not a checkpoint of blockdiff: it lacks {' or '.join(keys)}")
    if not any(str(name).startswith(PREFIX) for name in checkpoint["state_dict"]):
        raise CheckpointError(f"{path} is not a checkpoint of blockdiff: no weight is named {PREFIX}*")
    return checkpoint


def read_weights(path: Path, weights: Literal["ema", "raw"] = "ema") -> tuple[dict[str, Tensor], int]:
    """The denoiser's weights and the finished steps, without reading the optimizer's state.

    Args:
        path: a checkpoint file.
        weights: ``ema`` (averaged; the raw ones where the run keeps no average) or ``raw``.

    Raises:
        CheckpointError: the file is truncated, damaged or foreign.
        ValueError: another value of `weights`.
    """
    if weights not in ("ema", "raw"):
        raise ValueError(f'weights={weights!r} must be "ema" or "raw"')
    checkpoint = open_checkpoint(path)
    step = int(checkpoint["global_step"])
    if weights == "ema" and "ema" in checkpoint:
        return dict(checkpoint["ema"]), step
    raw = {name.removeprefix(PREFIX): value for name, value in checkpoint["state_dict"].items()}
    return raw, step
