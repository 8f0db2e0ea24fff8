"""What a denoiser's likelihood bound of given tokens is: corrupt with evaluation noise, predict, weigh.

Legend: B batch, K noisy views, L seq_len, N blocks, M masked positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.core.blocks import split_blocks
from blockdiff.core.bound import EVALUATION_SEED, position_nats
from blockdiff.core.corruption import NoiseKey, corrupt, evaluation_noise
from blockdiff.model.denoiser import Denoiser


def score_blocks(
    denoiser: Denoiser,
    tokens_BL: Tensor,
    document_BL: Tensor,
    counted_BL: Tensor,
    sample_B: Tensor,
    *,
    block_size: int,
    views: int,
    seed: int = EVALUATION_SEED,
    given_BL: Tensor | None = None,
) -> Tensor:
    """Independent estimates of each block's negative ELBO, in nats: float64 of shape (B, K, N).

    Arguments as in `score_positions`.
    """
    nats_BKL = score_positions(
        denoiser,
        tokens_BL,
        document_BL,
        counted_BL,
        sample_B,
        block_size=block_size,
        views=views,
        seed=seed,
        given_BL=given_BL,
    )
    return split_blocks(nats_BKL, block_size).sum(-1)


@torch.no_grad()
def score_positions(
    denoiser: Denoiser,
    tokens_BL: Tensor,
    document_BL: Tensor,
    counted_BL: Tensor,
    sample_B: Tensor,
    *,
    block_size: int,
    views: int,
    seed: int = EVALUATION_SEED,
    given_BL: Tensor | None = None,
) -> Tensor:
    """Each view's estimate of each position's share of the negative ELBO, in nats: float64 of shape (B, K, L).

    Args:
        denoiser: evaluated as it is, on the tokens' device.
        tokens_BL: int64 clean tokens.
        document_BL: document of each position.
        counted_BL: bool, positions that are scored.
        sample_B: int64, what each row's noise is drawn from: equal numbers get equal noise, whatever the batch.
        block_size: S. At 1 the bound is exact and K is 1, whatever `views` says: all views would be alike.
        views: K.
        seed: of the noise.
        given_BL: bool, positions that are visible and not scored (prompts).
    """
    noise = evaluation_noise(1 if block_size == 1 else views)
    noised = corrupt(
        tokens_BL,
        counted_BL,
        block_size=block_size,
        mask_id=denoiser.mask_id,
        noise=noise,
        key=NoiseKey(seed, 0, sample_B, 1),
        given_BL=given_BL,
    )
    chosen_M = noised.masked_BKL.flatten().nonzero().squeeze(-1)
    _, nll_M = denoiser.weighted_nll(
        noised.xt_BKL,
        tokens_BL,
        denoiser.plan(document_BL, block_size, noise.views),
        chosen_M,
        noised.weight_BKL.flatten()[chosen_M],
    )
    return position_nats(nll_M, noised.weight_BKL, chosen_M)
