"""The run directory: its config, and whether and from where a launch goes on."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from blockdiff.records import difference
from blockdiff.training.checkpoints import Newest, list_checkpoints, newest_valid, read_manifest
from blockdiff.training.config import Resume

CONFIG_NAME = "config.yaml"

MAY_CHANGE = (
    "run_root",
    "resume",
    "data.root",
    "data.micro_batch_size",
    "data.workers",
    "model.attention",
    "model.activation_checkpointing",
    "trainer.*",
    "logger.*",
    "sampler.*",
    "evaluation.*",
)
"""Keys whose change alters where or how fast a run computes, or what it shows, but not the steps already
taken. `trainer.max_steps` is bound by a rule of its own: the learning rates of these steps must stay the
same. `trainer.strategy` may not change to or from fsdp, whose checkpoints are of another kind."""

MAX_STEPS_HINT = (
    "\n(another max_steps changes the learning rates of the steps already taken; with optimizer.schedule=constant, or "
    "wsd before its decay, a run can be prolonged)"
)


def check_same_run(directory: Path, old: dict[str, Any], new: dict[str, Any], same_learning_rates: bool) -> list[str]:
    """Compares a config with that of the run in the directory.

    Args:
        directory: of a run with checkpoints.
        old: the config that it was launched with last, as plain data.
        new: the config of this launch.
        same_learning_rates: whether both lengths of the run give the steps already taken the same learning rates.

    Returns:
        The harmless changes, one line each.

    Raises:
        ValueError: the run in the directory is another one; prints the difference.
    """
    lines = {key: f"  {key}: {before} -> {now}" for key, before, now in difference(old, new)}
    harmless = {key for key in lines if any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)}
    if "fsdp" in (old["trainer"]["strategy"], new["trainer"]["strategy"]):
        harmless.discard("trainer.strategy")  # their checkpoints are of another kind
    prolonged_in_vain = "trainer.max_steps" in lines and not same_learning_rates
    if prolonged_in_vain:
        harmless.discard("trainer.max_steps")
    if fatal := [line for key, line in lines.items() if key not in harmless]:
        raise ValueError(
            f"{directory} holds a run with another config:\n" + "\n".join(fatal) + "\n"
            "choose another name=..., restore these values, or move the directory away"
            + (MAX_STEPS_HINT if prolonged_in_vain else "")
        )
    return list(lines.values())


def choose_checkpoint(directory: Path, resume: Resume) -> Newest:
    """Where this launch begins.

    Raises:
        ValueError: `never` on a directory that holds a run, `must` on one without, or no checkpoint is whole.
    """
    present = list_checkpoints(directory)
    if resume is Resume.never and present:
        raise ValueError(
            f"resume=never, but {directory} holds checkpoints up to {present[-1].name}: choose another name=..., or "
            "move the directory away"
        )
    if resume is Resume.must and not present:
        raise ValueError(f"resume=must, but {directory} holds no checkpoint; resume=auto starts a new run")
    newest = newest_valid(directory)
    if present and newest.path is None:
        raise ValueError(
            f"no checkpoint in {directory} is whole:\n"
            + "\n".join(f"  {reason}" for reason in newest.broken)
            + "\nrestore one from a copy, or move the directory away to start anew"
        )
    return newest


def check_same_data(path: Path, data: str) -> None:
    """Raises a ValueError unless the checkpoint was trained on the prepared corpus of this name."""
    before = read_manifest(path).get("data")
    if before != data:
        raise ValueError(
            f"{path} was trained on the prepared data {before}, but this config now prepares {data}: the source files "
            "have changed; restore them, or choose another name=..."
        )
