"""The settings of training as plain dataclasses. Imports no Lightning: a config is read where nothing is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from typing import Any


class Resume(Enum):
    auto = "auto"
    never = "never"
    must = "must"


class OptimizerName(Enum):
    adamw = "adamw"
    muon = "muon"


class LearningRate(Enum):
    cosine = "cosine"
    wsd = "wsd"
    constant = "constant"


@dataclass
class OptimizerConfig:
    """How weights are updated.

    Attributes:
        name: ``adamw``, or ``muon`` for the matrices of the layers with AdamW for embedding, head and norms.
        lr: peak learning rate. Muon's updates are scaled to AdamW's size, so one value serves both.
        warmup_steps: steps of linear warm-up from 0.
        schedule: after the warm-up: ``cosine`` down to the floor, ``wsd`` (stay, then fall linearly to the
            floor at the end) or ``constant``.
        decay_steps: how many steps the fall takes. None: cosine falls from the warm-up to max_steps, wsd over
            the last fifth of max_steps.
        min_lr_ratio: the floor, as a share of lr.
        weight_decay: decoupled, on matrices only.
        betas: AdamW's decay rates of the two moments.
        eps: AdamW's.
        momentum: Muon's.
        grad_clip: largest norm of the whole gradient; 0 does not clip.
        ema_decay: of the averaged weights that validation, sampling and export use; it warms up as (1 + step)
            / (10 + step). 0 keeps no average.
    """

    name: OptimizerName = OptimizerName.adamw
    lr: float = 1e-3
    warmup_steps: int = 100
    schedule: LearningRate = LearningRate.cosine
    decay_steps: int | None = None
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    momentum: float = 0.95
    grad_clip: float = 1.0
    ema_decay: float = 0.9999

    def check(self) -> None:
        """Raises a ValueError that names key, value and rule."""
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"optimizer.lr={self.lr} must be a positive number")
        for key in ("warmup_steps", "weight_decay", "grad_clip"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"optimizer.{key}={getattr(self, key)} must be at least 0")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ValueError(f"optimizer.decay_steps={self.decay_steps} must be at least 1, or null")
        for key in ("min_lr_ratio", "ema_decay", "momentum"):
            value = getattr(self, key)
            if not 0 <= value <= 1 or (value == 1 and key != "min_lr_ratio"):
                raise ValueError(f"optimizer.{key}={value} must lie in [0, 1)")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={self.betas} must be two numbers in [0, 1), such as [0.9, 0.95]")
        if not self.eps > 0:
            raise ValueError(f"optimizer.eps={self.eps} must be positive")


PRECISIONS = ("auto", "32-true", "64-true", "bf16-mixed")


class Strategy(Enum):
    auto = "auto"
    ddp = "ddp"
    fsdp = "fsdp"


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
        strategy: auto (ddp where there are several processes) | ddp (each holds the whole network) | fsdp (weights,
            averages and optimizer state are split over all processes).
        timeout_seconds: how long a process waits for one that does not answer before the run ends.
        precision: auto (bf16-mixed on CUDA devices that have it, else 32-true) | 32-true | 64-true |
            bf16-mixed.
        accelerator: auto | cpu | gpu, or another that Lightning knows.
        compile: compile the layers with torch.compile. None: on CUDA with Triton, and on a CPU with a C++ compiler.
        peak_tflops: TFLOP/s that one device can do at best in this precision, for MFU; None: as its maker states, on a
            CPU as measured at launch.
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
    timeout_seconds: float = 1800.0
    precision: str = "auto"
    accelerator: str = "auto"
    compile: bool | None = None
    peak_tflops: float | None = None

    def check(self) -> None:
        """Raises a ValueError that names key, value and rule."""
        for key in ("max_steps", "val_every", "log_every", "checkpoint_every", "keep_last", "nodes"):
            if getattr(self, key) < 1:
                raise ValueError(f"trainer.{key}={getattr(self, key)} must be at least 1")
        for key in ("checkpoint_every_minutes", "keep_every"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"trainer.{key}={getattr(self, key)} must be at least 0")
        if not self.timeout_seconds > 0:
            raise ValueError(f"trainer.timeout_seconds={self.timeout_seconds} must be positive")
        if self.peak_tflops is not None and not (self.peak_tflops > 0 and math.isfinite(self.peak_tflops)):
            raise ValueError(f"trainer.peak_tflops={self.peak_tflops} must be positive, or null to find it out")
        if self.strategy is Strategy.fsdp and self.precision == "64-true":
            raise ValueError("trainer.precision=64-true does not go with trainer.strategy=fsdp: use ddp, or 32-true")
        if self.val_samples is not None and self.val_samples < 1:
            raise ValueError(f"trainer.val_samples={self.val_samples} must be at least 1, or null for the whole split")
        if self.val_views < 2:
            raise ValueError(f"trainer.val_views={self.val_views} must be at least 2: one view has no standard error")
        if self.precision not in PRECISIONS:
            raise ValueError(f"trainer.precision={self.precision} must be one of {', '.join(PRECISIONS)}")
        if self.devices != "auto" and not (isinstance(self.devices, int) and self.devices >= 1):
            raise ValueError(f"trainer.devices={self.devices} must be a number of processes, at least 1, or auto")


class LoggerName(Enum):
    csv = "csv"
    wandb = "wandb"
    tensorboard = "tensorboard"


@dataclass
class LoggerConfig:
    """An additional logger.

    Attributes:
        name: ``csv`` (metrics.csv alone), ``wandb`` or ``tensorboard``.
        project: of wandb.
        entity: wandb's team or user; None: the default of the account.
        offline: wandb writes to the run directory and sends nothing.
    """

    name: LoggerName = LoggerName.csv
    project: str = "blockdiff"
    entity: str | None = None
    offline: bool = False

    def check(self) -> None:
        """Raises a ValueError if the logger's package is not installed."""
        if self.name is not LoggerName.csv and find_spec(self.name.value) is None:
            raise ValueError(f"logger={self.name.value} needs its package: pip install {self.name.value}")
