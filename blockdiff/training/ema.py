"""The exponential moving average of the weights, kept as a second network that is never trained."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

AVERAGE = "average."
"""Prefix of the average's names where they stand beside those of the network itself."""

Network = TypeVar("Network", bound=nn.Module)


def averaged_copy(network: Network) -> Network:
    """A frozen copy that starts at the network's weights, in at least single precision."""
    copied = copy.deepcopy(network).requires_grad_(False)
    for weight in copied.parameters():
        weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    return copied


def decay_at(step: int, decay: float) -> float:
    """The decay of the update after `step` steps: early on, the average forgets the random start."""
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(average: nn.Module, network: nn.Module, step: int, decay: float) -> None:
    """average <- d · average + (1 − d) · weights, d = `decay_at(step, decay)`."""
    averages = [local_part(weight) for weight in average.parameters()]
    weights = [local_part(weight) for weight in network.parameters()]
    current = [w.detach().to(a.dtype) for a, w in zip(averages, weights, strict=True)]
    get_ema_multi_avg_fn(decay_at(step, decay))(averages, current, None)


def local_part(weight: Tensor) -> Tensor:
    """This process's part of a split tensor, in the same memory; other tensors as they are."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
