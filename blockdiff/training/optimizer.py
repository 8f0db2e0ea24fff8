"""Optimizers and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW, Optimizer

from blockdiff.training.config import LearningRate, OptimizerConfig, OptimizerName
from blockdiff.training.muon import MuonWithAdamW


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
            # A run shorter than its decay falls from the peak all the same: as soon as it is warm.
            length = min(config.decay_steps or max(max_steps // 5, 1), max(max_steps - config.warmup_steps, 1))
            progress = min(max(step - (max_steps - length), 0) / length, 1.0)
            return 1 - (1 - floor) * progress


def same_history(steps: int, config: OptimizerConfig, max_steps: int, other_max_steps: int) -> bool:
    """Whether two lengths of a run give its first `steps` updates and the next one the same learning rates."""
    return all(
        lr_ratio(step, config, max_steps) == lr_ratio(step, config, other_max_steps) for step in range(steps + 1)
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
