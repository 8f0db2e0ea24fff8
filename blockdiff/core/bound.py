"""The likelihood bound that is reported: sums over blocks, and the standard error that its noise leaves.

Legend: B batch, K noisy views, L seq_len, N blocks, M masked positions.

Everything is a sum in double precision, so bounds of batches, ranks and files combine exactly by addition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EVALUATION_SEED = 1
"""The seed of evaluation noise: one for all runs, so that bounds differ by model and not by noise."""


def position_nats(nll_M: Tensor, weight_BKL: Tensor, chosen_M: Tensor) -> Tensor:
    """Each view's estimate of each position's share of the negative ELBO, in nats, float64 of shape (B, K, L).

    Args:
        nll_M: −log p of the masked positions.
        weight_BKL: what each position's −log p counts for.
        chosen_M: int64, the masked positions as flat indices into B·K·L.
    """
    flat = torch.zeros(weight_BKL.numel(), dtype=torch.float64, device=nll_M.device)
    flat[chosen_M] = nll_M.double() * weight_BKL.flatten()[chosen_M]
    return flat.view(weight_BKL.shape)


def bound_sums(nats_BKN: Tensor, counted_BL: Tensor) -> Tensor:
    """(nats, variance of the nats, tokens) of a batch, float64 of shape (3).

    Views are independent draws of the noise, so their spread within a block gives an unbiased estimate of the variance
    that the noise leaves in the block's mean; blocks are independent, so variances add. A single view says nothing of
    its own spread: its variance counts as 0, which is the truth at block size 1, where every view is the same.

    Args:
        nats_BKN: each view's estimate of each block.
        counted_BL: bool, the positions that are scored.
    """
    views = nats_BKN.shape[1]
    nats = nats_BKN.mean(1).sum()
    variance = nats_BKN.var(1).sum() / views if views > 1 else torch.zeros_like(nats)
    return torch.stack([nats, variance, counted_BL.sum().to(nats.dtype)])


@dataclass
class Bound:
    """A negative ELBO over some tokens.

    Attributes:
        nats: Σ over the tokens, in nats.
        variance: variance of `nats` under the evaluation noise, given the data and the model.
        tokens: how many tokens were scored.
    """

    nats: float = 0.0
    variance: float = 0.0
    tokens: int = 0

    @classmethod
    def from_sums(cls, sums_3: Tensor) -> Bound:
        """Reads (sums of) what `bound_sums` returns."""
        nats, variance, tokens = sums_3.tolist()
        return cls(nats, variance, round(tokens))

    def merge(self, other: Bound) -> Bound:
        """The bound over both sets of tokens."""
        return Bound(self.nats + other.nats, self.variance + other.variance, self.tokens + other.tokens)

    @property
    def nelbo(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def standard_error(self) -> float:
        """Of `nelbo`: what the noise leaves, not what the choice of text leaves."""
        return math.sqrt(self.variance) / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """The upper bound exp(nelbo) of the perplexity."""
        return math.exp(self.nelbo) if self.nelbo < 700 else math.inf

    @property
    def perplexity_error(self) -> float:
        """Standard error of `perplexity`, to first order."""
        return self.perplexity * self.standard_error

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """The bound in bits per UTF-8 byte of text whose tokens stand for `bytes_per_token` bytes on average."""
        return self.nelbo / math.log(2) / bytes_per_token
