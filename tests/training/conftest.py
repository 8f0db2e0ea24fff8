"""A whole run in miniature: a corpus of a few kilobytes and a network of a few thousand weights."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blockdiff.core.corruption import NoiseConfig
from blockdiff.data.prepare import DataConfig
from blockdiff.data.sources import Source
from blockdiff.data.tokenizer import TokenizerKind
from blockdiff.model.denoiser import ModelConfig
from blockdiff.training.config import LoggerConfig, OptimizerConfig, Resume, TrainerConfig


@dataclass
class RunConfig:
    """The keys of the root config that training reads."""

    name: str = "run"
    run_root: str = "checkpoints"
    seed: int = 3
    block_size: int = 4
    seq_len: int = 32
    resume: Resume = Resume.auto
    model: ModelConfig = field(default_factory=lambda: ModelConfig(layers=2, width=16, heads=2, kv_heads=1))
    data: DataConfig = field(default_factory=DataConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-3, warmup_steps=2))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            max_steps=6,
            val_every=3,
            log_every=2,
            checkpoint_every=2,
            val_samples=3,
            accelerator="cpu",
            devices=1,
        )
    )
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def override(config: Any, changes: dict[str, Any]) -> Any:
    """Sets dotted keys; a key that does not exist is an error."""
    for key, value in changes.items():
        part = config
        *parents, leaf = key.split(".")
        for name in parents:
            part = getattr(part, name)
        assert leaf in {f.name for f in fields(part)}, key
        setattr(part, leaf, value)
    return config


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    lines = [f"line {i}: the square of {i} is {i * i} and its cube is {i**3}." for i in range(120)]
    path = directory / "text.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def make_config(tmp_path: Path, corpus: Path) -> Callable[..., RunConfig]:
    """Builds a config whose artefacts lie in the test's directory (the corpus is shared)."""

    def make(**changes: Any) -> RunConfig:
        config = RunConfig(run_root=str(tmp_path / "checkpoints"))
        config.data = DataConfig(
            source=Source.text,
            files=[str(corpus)],
            root=str(corpus.parent / "prepared"),
            tokenizer=TokenizerKind.bytes,
            val_fraction=0.2,
            global_batch_size=4,
            micro_batch_size=2,
        )
        return override(config, {key.replace("__", "."): value for key, value in changes.items()})

    return make


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
