"""A whole run in miniature: a corpus of a few kilobytes and a network of a few thousand weights."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from blockdiff.build import run_training
from blockdiff.core.corruption import NoiseConfig
from blockdiff.data.config import DataConfig, Source
from blockdiff.data.tokenizer import TokenizerKind
from blockdiff.model.denoiser import ModelConfig
from blockdiff.training.border import Preview
from blockdiff.training.config import LoggerConfig, OptimizerConfig, Resume, TrainerConfig
from blockdiff.training.report import Summary


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
            compile=False,
            peak_tflops=1.0,  # nothing is measured at launch
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


def miniature(directory: Path, corpus: Path, **changes: Any) -> RunConfig:
    """A config whose artefacts lie in `directory`; prepared data lie beside the corpus and are shared."""
    config = RunConfig(run_root=str(directory / "checkpoints"))
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


def run(config: RunConfig, preview: Preview | None = None, printed: io.StringIO | None = None) -> Summary:
    """Trains quietly; `printed` receives what a user would have seen."""
    console = Console(file=printed or io.StringIO(), width=200)
    make_preview = (lambda _: preview) if preview else None
    return run_training(config, make_preview=make_preview, console=console)  # type: ignore[arg-type]


def final_checkpoint(summary: Summary) -> dict[str, Any]:
    """The newest checkpoint of a run, loaded."""
    assert summary.checkpoint is not None
    return torch.load(summary.checkpoint, weights_only=True)


def write_corpus(path: Path) -> Path:
    """A few kilobytes of text with something to learn in it."""
    lines = [f"line {i}: the square of {i} is {i * i} and its cube is {i**3}." for i in range(120)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
