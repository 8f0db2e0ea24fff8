"""Rules on logits, in two kinds.

Rules of the first kind change what the model is taken to say: banned tokens, the repetition penalty, the
caller's own rule. Confidence, entropy and log-probabilities are read after them. Rules of the second kind
change how a token is drawn from that: temperature, top-k, top-p, min-p.

Legend: B batch, M chosen positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = float("-inf")


@dataclass
class LogitContext:
    """What a caller's own rule may look at.

    Attributes:
        position_BM: int64 absolute positions of the logits.
        x_BS: int64 tokens of the current block; the mask's id where undecided.
        step: calls that the block has seen before this one.
    """

    position_BM: Tensor
    x_BS: Tensor
    step: int


LogitRule = Callable[[Tensor, LogitContext], Tensor]
"""(logits (B, M, V), context) -> logits of the same shape."""


def penalise_repetition(logits_BMV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Divides positive and multiplies negative logits of seen tokens (Keskar et al., "CTRL", 2019, section
    4.1)."""
    penalised = torch.where(logits_BMV > 0, logits_BMV / penalty, logits_BMV * penalty)
    return torch.where(seen_BV[:, None], penalised, logits_BMV)


def top_k(logits_BMV: Tensor, k: int) -> Tensor:
    """Keeps the k largest logits, and those equal to the k-th."""
    if k >= logits_BMV.shape[-1]:
        return logits_BMV
    least = logits_BMV.topk(k, -1).values[..., -1:]
    return logits_BMV.masked_fill(logits_BMV < least, NEVER)


def top_p(logits_BMV: Tensor, p: float) -> Tensor:
    """Keeps the smallest set of likeliest tokens whose mass reaches p; the token that crosses p stays.

    (Holtzman et al., "The curious case of neural text degeneration", 2020.)
    """
    if p >= 1:
        return logits_BMV
    order = logits_BMV.argsort(dim=-1, descending=True, stable=True)
    mass = logits_BMV.softmax(-1).gather(-1, order)
    before = mass.cumsum(-1) - mass
    # The first token has nothing before it, so at least one stays.
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter_(-1, order, before >= p)
    return logits_BMV.masked_fill(dropped, NEVER)


def min_p(logits_BMV: Tensor, share: float) -> Tensor:
    """Keeps tokens at least `share` times as likely as the likeliest (Nguyen et al., 2024)."""
    if share <= 0:
        return logits_BMV
    return logits_BMV.masked_fill(logits_BMV < logits_BMV.amax(-1, keepdim=True) + math.log(share), NEVER)
