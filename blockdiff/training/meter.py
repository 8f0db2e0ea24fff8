"""What training measures between two rows of the metrics, on the device: nothing is read back before a row is due."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NonFinite(NamedTuple):
    """The first loss of a run that was not a finite number.

    Attributes:
        step: the step it happened in, counted from 0.
        samples: indices in the training set of the micro-batch.
    """

    step: int
    samples: list[int]


class Meter:
    """Sums of this process since the last row.

    Attributes:
        sums_2: float64 (Σ weight · −log p in nats, tokens).
    """

    def __init__(self, device: torch.device) -> None:
        self.sums_2 = torch.zeros(2, dtype=torch.float64, device=device)
        self._bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self._bad_samples: Tensor | None = None

    def add(self, nats: Tensor, tokens: Tensor, step: int, sample_B: Tensor) -> None:
        """Counts one micro-batch: its weighted nats, its scored tokens, the step and the samples it belongs to."""
        nats = nats.detach()
        self.sums_2 += torch.stack([nats.double(), tokens.double()])
        # Remembered on the device: asking here whether the loss is finite would make every step wait for it.
        first = ~torch.isfinite(nats) & (self._bad_step < 0)
        self._bad_step = torch.where(first, step, self._bad_step)
        known = self._bad_samples
        if known is None or known.shape != sample_B.shape:
            known = torch.full_like(sample_B, -1)
        self._bad_samples = torch.where(first, sample_B, known)

    def reset(self) -> None:
        """Begins the next row."""
        self.sums_2.zero_()

    def non_finite(self) -> NonFinite | None:
        """The first non-finite loss of this process so far; waits for the device."""
        step = int(self._bad_step)
        if step < 0:
            return None
        assert self._bad_samples is not None
        return NonFinite(step, self._bad_samples.tolist())
