"""Config dataclasses as plain data and back: what `config.yaml` of a run holds, readable without Hydra or OmegaConf."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts and enums as their names, all the way down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: dict[str, Any], prefix: str = "") -> T:
    """Builds a dataclass from what `to_plain` gave.

    Args:
        cls: a dataclass whose fields are plain values, enums, dataclasses, or None.
        data: its fields; missing ones take their defaults.
        prefix: of the keys in messages, such as ``model.``.

    Raises:
        ValueError: a key that the dataclass does not have (the nearest one is named), or no such enum member.
    """
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key in data:
        if key not in names:
            raise ValueError(f"unknown key {prefix}{key}{did_you_mean(key, names, prefix)}")
    built = {key: _convert(hints[key], value, f"{prefix}{key}") for key, value in data.items()}
    return typing.cast(T, cls(**built))


def did_you_mean(key: str, valid: list[str], prefix: str = "") -> str:
    """`; did you mean …?` with the nearest valid key, or nothing where none is near."""
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _convert(hint: Any, value: Any, key: str) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [h for h in typing.get_args(hint) if h is not type(None)]
        return None if value is None else _convert(options[0], value, key)
    if isinstance(hint, type) and issubclass(hint, Enum):
        if value not in hint.__members__:
            raise ValueError(f"{key}={value} must be one of: {', '.join(hint.__members__)}")
        return hint[value]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value or {}, f"{key}.")
    return value


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def difference(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of all keys that differ; a missing key counts as None."""
    old, new = flatten(old), flatten(new)
    keys = sorted(old.keys() | new.keys())
    return [(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def read_yaml(path: Path) -> dict[str, Any]:
    """Raises a ValueError that names the file where it is missing or holds no mapping."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: is {path.parent} a run directory of blockdiff?") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable as YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is empty or holds no mapping of keys to values")
    return data


def dump_yaml(value: Any) -> str:
    """A dataclass or dict as YAML, in the order of its fields."""
    return yaml.safe_dump(to_plain(value), sort_keys=False, allow_unicode=True)
