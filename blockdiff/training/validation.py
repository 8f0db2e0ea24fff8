"""The validation bound of a denoiser, over fixed noise. Imports no Lightning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.core.bound import EVALUATION_SEED, bound_sums
from blockdiff.model.denoiser import Denoiser
from blockdiff.model.scoring import score_blocks

if TYPE_CHECKING:
    from blockdiff.data.loader import Batch


def validation_sums(
    denoiser: Denoiser,
    batches: Iterable[Batch],
    *,
    block_size: int,
    views: int,
    device: torch.device,
    seed: int = EVALUATION_SEED,
) -> Tensor:
    """Σ over batches of `core.bound.bound_sums`: float64 (nats, variance, tokens), which add up over processes.

    Args:
        denoiser: evaluated as it is.
        batches: each sample once; rows without counted positions only fill batches up.
        block_size: S. At 1 the bound is exact.
        views: K ≥ 2 noisy views a sequence, so that the standard error can be told.
        device: of the denoiser.
        seed: of the noise.
    """
    sums_3 = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        tokens_BL, document_BL, counted_BL, sample_B = (
            x.to(device, non_blocking=True)
            for x in (batch.tokens_BL, batch.document_BL, batch.counted_BL, batch.sample_B)
        )
        nats_BKN = score_blocks(
            denoiser, tokens_BL, document_BL, counted_BL, sample_B, block_size=block_size, views=views, seed=seed
        )
        sums_3 += bound_sums(nats_BKN, counted_BL)
    return sums_3
