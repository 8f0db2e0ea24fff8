"""Where and how long a run computes: the settings behind Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import CheckpointIO

from blockdiff.training.config import TrainerConfig


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
        log_every_n_steps=1,
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
