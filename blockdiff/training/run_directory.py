"""The run directory: its config, and whether and from where a launch goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from blockdiff.training.checkpoints import Newest, list_checkpoints, newest_valid, read_manifest
from blockdiff.training.durable import write_text_durably

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
same."""


class Resume(Enum):
    auto = "auto"
    never = "never"
    must = "must"


def config_tree(config: Any) -> Any:
    """A config of dataclasses and enums as plain dictionaries, lists, strings and numbers."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: config_tree(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Enum):
        return config.value
    if isinstance(config, Mapping):
        return {key: config_tree(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [config_tree(value) for value in config]
    return config


def write_config(directory: Path, tree: dict[str, Any]) -> None:
    """Writes `config.yaml`."""
    write_text_durably(directory / CONFIG_NAME, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def read_config(directory: Path) -> dict[str, Any]:
    """Reads `config.yaml`.

    Raises:
        ValueError: it is missing or damaged.
    """
    path = directory / CONFIG_NAME
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{directory} is no run directory: it has no {CONFIG_NAME}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} is damaged: it holds no keys")
    return tree


def differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Keys, as dotted paths, whose values differ; a missing one counts as the text ``(none)``."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in dict.fromkeys([*old, *new]):
            path = f"{key}.{name}" if key else str(name)
            found |= differences(old.get(name, "(none)"), new.get(name, "(none)"), path)
        return found
    return {} if old == new else {key: (old, new)}


def check_same_run(
    directory: Path, tree: dict[str, Any], same_learning_rates: Callable[[dict], bool]
) -> list[str]:
    """Compares a config with that of the run in the directory.

    Args:
        directory: of a run with checkpoints.
        tree: the config of this launch.
        same_learning_rates: whether the steps already taken had the same learning rates under the old config.

    Returns:
        The harmless changes, one line each.

    Raises:
        ValueError: the run in the directory is another one; prints the difference.
    """
    old = read_config(directory)
    changed = differences(old, tree)
    harmless = {key for key in changed if any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)}
    if "trainer.max_steps" in changed and not same_learning_rates(old):
        harmless.discard("trainer.max_steps")
    lines = {key: f"  {key}: {before} -> {now}" for key, (before, now) in changed.items()}
    if fatal := [line for key, line in lines.items() if key not in harmless]:
        raise ValueError(
            f"{directory} holds a run with another config:\n" + "\n".join(fatal) + "\n"
            "choose another name=..., restore these values, or move the directory away"
            + _max_steps_hint("trainer.max_steps" in changed and "trainer.max_steps" not in harmless)
        )
    return [lines[key] for key in changed]


def _max_steps_hint(wanted: bool) -> str:
    if not wanted:
        return ""
    return (
        "\n(another max_steps changes the learning rates of the steps already taken; with optimizer.schedule=constant, "
        "or wsd before its decay, a run can be prolonged)"
    )


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
