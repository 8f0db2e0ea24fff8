"""Where and how long a run computes: the settings behind Lightning's Trainer."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta
from typing import NamedTuple

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from blockdiff.model.compilation import compiler_fault
from blockdiff.training import config as settings
from blockdiff.training.config import TrainerConfig
from blockdiff.training.saving import DurableCheckpointIO
from blockdiff.training.sharding import ShardedStrategy


def resolve_precision(config: TrainerConfig) -> str:
    """What ``auto`` stands for: half precision is far slower than single on most CPUs, and faster on recent GPUs."""
    if config.precision != "auto":
        return config.precision
    on_cuda = trains_on_cuda(config)
    return "bf16-mixed" if on_cuda and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"


class Compilation(NamedTuple):
    """Whether the layers are compiled, and what a user should know about it ("" if nothing)."""

    on: bool
    note: str = ""


def resolve_compile(config: TrainerConfig) -> Compilation:
    """Whether the layers are compiled: without a setting, on CUDA devices and CPUs that code can be generated for.

    Raises:
        ValueError: they are to be compiled and cannot be.
    """
    if config.compile is False:
        return Compilation(False)
    fault = compiler_fault(device_type(config))
    if fault is None:
        return Compilation(True, "the layers are compiled during the first step")
    if config.compile:
        raise ValueError(f"trainer.compile=true needs a compiler: {fault}; mend that, or leave trainer.compile=null")
    return Compilation(
        False, f"the layers are not compiled, so steps take longer: {fault} (trainer.compile=false: as meant)"
    )


def trains_on_cuda(config: TrainerConfig) -> bool:
    """Whether the devices are CUDA's."""
    return config.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def device_type(config: TrainerConfig) -> str:
    """The kind of the devices, as PyTorch calls it."""
    if trains_on_cuda(config):
        return "cuda"
    if config.accelerator != "auto":
        return config.accelerator
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else "cpu"


def build_trainer(
    config: TrainerConfig,
    *,
    steps: int,
    grad_clip: float,
    callbacks: list[L.Callback],
    loggers: list[Logger],
    checkpoint_io: DurableCheckpointIO,
    directory: str,
) -> L.Trainer:
    """A Trainer that takes `steps` optimizer steps and leaves rhythm, validation and saving to the callbacks."""
    _quieten()
    trainer = L.Trainer(
        accelerator=config.accelerator,
        devices=config.devices,
        num_nodes=config.nodes,
        strategy=build_strategy(config),
        precision=resolve_precision(config),  # type: ignore[arg-type]
        max_steps=steps,
        gradient_clip_val=grad_clip or None,
        callbacks=callbacks,
        plugins=[checkpoint_io, *_environment()],
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
    # Before each micro-batch of several processes it would ask them, through the device and waiting for it, whether one
    # has been told to stop; `blockdiff.training.border` settles that between the hosts.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer


def build_strategy(config: TrainerConfig) -> str | Strategy:
    """How processes share the work; ``auto`` for a single one."""
    timeout = timedelta(seconds=config.timeout_seconds)
    match config.strategy:
        case settings.Strategy.fsdp:
            return ShardedStrategy(processes(config), timeout)
        case settings.Strategy.ddp:
            return DDPStrategy(timeout=timeout)
        case settings.Strategy.auto:
            return DDPStrategy(timeout=timeout) if processes(config) > 1 else "auto"


def processes(config: TrainerConfig) -> int:
    """How many processes the run has: one a device, on all nodes."""
    if config.devices != "auto":
        return int(config.devices) * config.nodes
    return (torch.cuda.device_count() if trains_on_cuda(config) else 1) * config.nodes


def is_first_process() -> bool:
    """Whether this process is the one of all nodes that writes, known before the processes have met."""
    on_first_node = os.environ.get("NODE_RANK", "0") == "0"  # set by hand where no launcher numbers the processes
    return on_first_node and rank_zero_only.rank == 0  # type: ignore[attr-defined]


def was_launched_by_another() -> bool:
    """Whether another process of the run started this one, and not torchrun or SLURM."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and not TorchElasticEnvironment.detect()


def _environment() -> list[SLURMEnvironment]:
    """Keeps Lightning from answering SLURM's signals with checkpoints and requeues of its own."""
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        return [SLURMEnvironment(auto_requeue=False)]
    return []


def _quieten() -> None:
    """Keeps Lightning's news of itself, and advice that does not fit here, out of the run's output."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It says which process died before it ends the others.
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", message=".*does not have many workers", module="lightning")
    warnings.filterwarnings("ignore", message=".*is deprecated", module="lightning")
