"""Optimizers and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from torch import nn
from torch.optim import AdamW, Optimizer

from blockdiff.training.muon import MuonWithAdamW


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
    betas: list[float] | tuple[float, float] = (0.9, 0.95)
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
            raise ValueError(
                f"optimizer.betas={list(self.betas)} must be two numbers in [0, 1), such as [0.9, 0.95]"
            )
        if not self.eps > 0:
            raise ValueError(f"optimizer.eps={self.eps} must be positive")


def lr_ratio(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """The learning rate of the update that follows `step` finished steps, as a share of `config.lr`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    floor = config.min_lr_ratio
    match config.schedule:
        case LearningRate.constant:
            return 1.0
        case LearningRate.cosine:
            length = config.decay_steps or max(max_steps - config.warmup_steps, 1)
            progress = min((step - config.warmup_steps) / length, 1.0)
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case LearningRate.wsd:
            length = config.decay_steps or max(max_steps // 5, 1)
            progress = min(max(step - (max_steps - length), 0) / length, 1.0)
            return 1 - (1 - floor) * progress


def same_history(steps: int, config: OptimizerConfig, max_steps: int, other_max_steps: int) -> bool:
    """Whether two lengths of a run give its first `steps` updates and the next one the same learning rates."""
    return all(
        lr_ratio(step, config, max_steps) == lr_ratio(step, config, other_max_steps)
        for step in range(steps + 1)
    )


def build_optimizer(denoiser: nn.Module, config: OptimizerConfig) -> Optimizer:
    """One optimizer over all weights: matrices decay, vectors (norms, biases) do not."""
    matrices, vectors, hidden = [], [], []
    for name, weight in denoiser.named_parameters():
        if weight.dim() < 2:
            vectors.append(weight)
        elif config.name is OptimizerName.muon and name.startswith("layers."):
            hidden.append(weight)
        else:
            matrices.append(weight)
    adamw = AdamW(
        _groups((matrices, config.weight_decay), (vectors, 0.0)),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )
    match config.name:
        case OptimizerName.adamw:
            return adamw
        case OptimizerName.muon:
            return MuonWithAdamW(
                hidden, adamw, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum
            )


def _groups(*parts: tuple[list[nn.Parameter], float]) -> Iterable[dict[str, object]]:
    return [{"params": weights, "weight_decay": decay} for weights, decay in parts if weights]
