"""What a denoiser says of masked tokens under masks of one's own choice, many masks over one clean text.

Legend: B batch, K noisy views (masks), k views of one pass, L window length, S block size, M wanted positions.

Masks are noisy views of the dual-stream pass: all views of a pass read one clean stream, so no prefix's keys and
values are copied. Views are handed on a few at a time, which costs the clean stream once a pass and bounds the memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.core.objective import token_nll
from blockdiff.model.denoiser import Denoiser

VIEWS_PER_PASS = 8
"""More, and attention meets too many keys of other views; fewer, and the clean stream is computed too often."""


@torch.no_grad()
def masked_log_probs(
    denoiser: Denoiser,
    tokens_BL: Tensor,
    document_BL: Tensor,
    counted_BL: Tensor,
    masked_BKL: Tensor,
    wanted_BKL: Tensor,
    *,
    block_size: int,
    views_per_pass: int = VIEWS_PER_PASS,
) -> Tensor:
    """log p(x_i | visible tokens of its block, x^{<b}) of wanted positions, float64 (B, K, L), 0 elsewhere.

    Args:
        denoiser: evaluated as it is, on the tokens' device.
        tokens_BL: int64 clean tokens.
        document_BL: document of each position.
        counted_BL: bool; other positions are padding and always hidden.
        masked_BKL: bool, the masks.
        wanted_BKL: bool, subset of the masks.
        block_size: S.
        views_per_pass: k; changes nothing but time and memory.
    """
    log_p_BKL = torch.zeros(masked_BKL.shape, dtype=torch.float64, device=tokens_BL.device)
    for start in range(0, masked_BKL.shape[1], views_per_pass):
        part = slice(start, start + views_per_pass)
        hidden_BkL = masked_BKL[:, part] | ~counted_BL[:, None]
        chosen_M = wanted_BKL[:, part].flatten().nonzero().squeeze(-1)
        if not len(chosen_M):
            continue
        xt_BkL = torch.where(hidden_BkL, denoiser.mask_id, tokens_BL[:, None])
        plan = denoiser.plan(document_BL, block_size, xt_BkL.shape[1])
        target_M = tokens_BL[:, None].expand_as(xt_BkL).flatten()[chosen_M]
        logits_MV = denoiser(xt_BkL, tokens_BL, plan, chosen_M)
        flat = torch.zeros(xt_BkL.numel(), dtype=torch.float64, device=tokens_BL.device)
        flat[chosen_M] = -token_nll(logits_MV, target_M).double()
        log_p_BKL[:, part] = flat.view(xt_BkL.shape)
    return log_p_BKL
