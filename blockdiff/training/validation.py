"""The validation bound of a denoiser, over fixed noise. Imports no Lightning.

Legend: B batch, K noisy views, L seq_len, M masked positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.core.bound import EVALUATION_SEED, block_nats, bound_sums
from blockdiff.core.corruption import NoiseKey, corrupt, evaluation_noise
from blockdiff.model.denoiser import Denoiser

if TYPE_CHECKING:
    from blockdiff.data.loader import Batch


@torch.no_grad()
def validation_sums(
    denoiser: Denoiser, batches: Iterable[Batch], *, block_size: int, views: int, device: torch.device
) -> Tensor:
    """Σ over batches of `core.bound.bound_sums`: float64 (nats, variance, tokens), which add up over
    processes.

    Args:
        denoiser: evaluated as it is.
        batches: each sample once; rows without counted positions only fill batches up.
        block_size: S. At 1 the bound is exact, so a single view is enough.
        views: K ≥ 2 noisy views a sequence, so that the standard error can be told.
        device: of the denoiser.
    """
    sums_3 = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        tokens_BL, document_BL, counted_BL, sample_B = (
            x.to(device, non_blocking=True)
            for x in (batch.tokens_BL, batch.document_BL, batch.counted_BL, batch.sample_B)
        )
        sums_3 += batch_sums(denoiser, tokens_BL, document_BL, counted_BL, sample_B, block_size, views)
    return sums_3


@torch.no_grad()
def batch_sums(
    denoiser: Denoiser,
    tokens_BL: Tensor,
    document_BL: Tensor,
    counted_BL: Tensor,
    sample_B: Tensor,
    block_size: int,
    views: int,
) -> Tensor:
    """`core.bound.bound_sums` of one batch; `sample_B` says which fixed noise each row gets."""
    noise = evaluation_noise(1 if block_size == 1 else views)
    noised = corrupt(
        tokens_BL,
        counted_BL,
        block_size=block_size,
        mask_id=denoiser.mask_id,
        noise=noise,
        key=NoiseKey(EVALUATION_SEED, 0, sample_B, 1),
    )
    chosen_M = noised.masked_BKL.flatten().nonzero().squeeze(-1)
    _, nll_M = denoiser.weighted_nll(
        noised.xt_BKL,
        tokens_BL,
        denoiser.plan(document_BL, block_size, noise.views),
        chosen_M,
        noised.weight_BKL.flatten()[chosen_M],
    )
    return bound_sums(block_nats(nll_M, noised.weight_BKL, chosen_M, block_size), counted_BL)
