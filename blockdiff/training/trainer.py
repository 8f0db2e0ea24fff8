"""Where and how long a run computes: the settings behind Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import CheckpointIO

PRECISIONS = ("auto", "32-true", "64-true", "bf16-mixed")


class Strategy(Enum):
    auto = "auto"
    ddp = "ddp"


# Written as a call because `continue` cannot be a name in a class body, and it is what users type.
OnCheckpointError = Enum("OnCheckpointError", {"stop": "stop", "continue": "continue"})


@dataclass
class TrainerConfig:
    """Length, rhythm and place of a run.

    Attributes:
        max_steps: optimizer steps of the whole run, over all launches.
        val_every: steps between validations; the last step is always validated.
        val_samples: sequences of the fixed validation subset, spread evenly over the split; None takes all.
        val_views: noisy views of each sequence, at least 2: their spread gives the bound's standard error.
        log_every: steps between rows of metrics.csv.
        preview: print one sample at each validation.
        checkpoint_every: steps between checkpoints: what a kill costs at most.
        checkpoint_every_minutes: also after so many minutes; 0: by steps only.
        keep_last: newest checkpoints that are kept.
        keep_every: checkpoints of every so many steps are kept for good; 0: none.
        on_checkpoint_error: ``stop`` the run when a checkpoint cannot be written, or ``continue`` and try at
            the next.
        devices: processes a node: a number, or auto.
        nodes: machines.
        strategy: auto | ddp.
        precision: auto (bf16-mixed on CUDA devices that have it, else 32-true) | 32-true | 64-true |
            bf16-mixed.
        accelerator: auto | cpu | gpu, or another that Lightning knows.
        compile: compile the layers with torch.compile.
    """

    max_steps: int = 2000
    val_every: int = 200
    val_samples: int | None = 256
    val_views: int = 2
    log_every: int = 10
    preview: bool = True
    checkpoint_every: int = 200
    checkpoint_every_minutes: float = 0.0
    keep_last: int = 2
    keep_every: int = 0
    on_checkpoint_error: OnCheckpointError = OnCheckpointError.stop
    devices: Any = "auto"
    nodes: int = 1
    strategy: Strategy = Strategy.auto
    precision: str = "auto"
    accelerator: str = "auto"
    compile: bool = False

    def check(self) -> None:
        """Raises a ValueError that names key, value and rule."""
        for key in ("max_steps", "val_every", "log_every", "checkpoint_every", "keep_last", "nodes"):
            if getattr(self, key) < 1:
                raise ValueError(f"trainer.{key}={getattr(self, key)} must be at least 1")
        for key in ("checkpoint_every_minutes", "keep_every"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"trainer.{key}={getattr(self, key)} must be at least 0")
        if self.val_samples is not None and self.val_samples < 1:
            raise ValueError(
                f"trainer.val_samples={self.val_samples} must be at least 1, or null for the whole split"
            )
        if self.val_views < 2:
            raise ValueError(
                f"trainer.val_views={self.val_views} must be at least 2: one view has no standard error"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"trainer.precision={self.precision} must be one of {', '.join(PRECISIONS)}")
        if self.devices != "auto" and not (isinstance(self.devices, int) and self.devices >= 1):
            raise ValueError(
                f"trainer.devices={self.devices} must be a number of processes, at least 1, or auto"
            )


def resolve_precision(config: TrainerConfig) -> str:
    """What ``auto`` stands for: half precision is far slower than single on most CPUs, and faster on recent GPUs."""
    if config.precision != "auto":
        return config.precision
    on_cuda = config.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if on_cuda and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"


def build_trainer(
    config: TrainerConfig,
    *,
    steps: int,
    grad_clip: float,
    callbacks: list[L.Callback],
    loggers: list[Logger],
    checkpoint_io: CheckpointIO,
    directory: str,
) -> L.Trainer:
    """A Trainer that takes `steps` optimizer steps and leaves rhythm, validation and saving to the callbacks."""
    _quieten()
    return L.Trainer(
        accelerator=config.accelerator,
        devices=config.devices,
        num_nodes=config.nodes,
        strategy=config.strategy.value,
        precision=resolve_precision(config),  # type: ignore[arg-type]
        max_steps=steps,
        gradient_clip_val=grad_clip or None,
        callbacks=callbacks,
        plugins=[checkpoint_io],
        logger=loggers,
        default_root_dir=directory,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _quieten() -> None:
    """Keeps Lightning's news of itself, and advice that does not fit here, out of the run's output."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers", module="lightning")
    warnings.filterwarnings("ignore", message=".*is deprecated", module="lightning")
