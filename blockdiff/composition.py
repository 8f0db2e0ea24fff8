"""From YAML files and `key=value` overrides to checked dataclasses: the only door to Hydra's composition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from blockdiff.config import VERBS
from blockdiff.records import did_you_mean, flatten, to_plain

_PACKAGED = Path(__file__).parent / "conf"
CONF = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "conf"
"""Where the YAML files lie: inside the package when installed from a wheel, beside it in a checkout."""


def register() -> None:
    """Makes the dataclasses known to Hydra, as the schema that each command's YAML starts from."""
    store = ConfigStore.instance()
    for verb, schema in VERBS.items():
        store.store(name=f"{verb}_schema", node=schema)


def to_config(verb: str, composed: DictConfig) -> Any:
    """The composed config as checked dataclasses; no OmegaConf object travels further.

    Raises:
        ValueError: a value breaks a rule, or a mandatory one is missing.
    """
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ValueError(f"{missing[0]} is needed: blockdiff {verb} {missing[0]}=…")
    valid = list(flatten(to_plain(VERBS[verb]())))
    for key in flatten(OmegaConf.to_container(composed)):  # type: ignore[arg-type]
        if key not in valid:  # `+key=value` gets past the schema
            raise ValueError(f"unknown key {key}{did_you_mean(key, valid)}")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, VERBS[verb])
    config.check()  # type: ignore[attr-defined]
    return config


def load_config(verb: str, overrides: list[str]) -> Any:
    """Composes and checks a command's config outside of a Hydra application.

    Raises:
        ValueError: as `to_config`, or an override that does not fit; the nearest valid key is named.
    """
    register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        try:
            return to_config(verb, compose(verb, overrides=overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_explain(verb, overrides, error)) from error


def _explain(verb: str, overrides: list[str], error: Exception) -> str:
    """Hydra's complaint in the user's terms: which override, and the nearest valid key."""
    valid = list(flatten(OmegaConf.to_container(compose(verb))))  # type: ignore[arg-type]
    groups = {key.split(".")[0] for key in valid} | {f.name for f in CONF.iterdir() if f.is_dir()}
    known = [*valid, *groups]
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key not in known and not any(name.startswith(f"{key}.") for name in valid):
            return f"unknown key {key} in {override}{did_you_mean(key, known)}"
    cause = error.__cause__ or error
    return "; ".join(line.strip() for line in str(cause if str(cause) else error).splitlines() if line.strip())
