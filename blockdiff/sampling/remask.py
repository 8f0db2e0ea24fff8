"""In-block remasking around any step rule: tokens that the block has fixed are masked again and drawn anew.

After the idea of ReMDM (Wang, G. et al., "Remasking discrete diffusion models with inference-time scaling",
2025): a token fixed early was drawn with little context, so it is worth a second look. Rules with a time grid
(ancestral) follow ReMDM's own process (`blockdiff.sampling.plan`). For the others, η says how many: after A
acceptances in a block at most ⌊η·A⌋ tokens have been masked again, so with η < 1 a block of n positions ends
after at most n / (1 − η) acceptances. Taken are those that were least probable when they were fixed, none of
them fixed in this very step, and none once the block is complete.

Legend: B batch, S block size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockdiff.sampling.rules import accept_best


def owed_remasks(open_BS: Tensor, earlier_BS: Tensor, accepted_B: Tensor, remasked_B: Tensor, remask: float) -> Tensor:
    """How many tokens of each row are masked again after this step, int64 (B).

    Args:
        open_BS: bool, what is masked after this step's acceptances.
        earlier_BS: bool, what earlier steps of this block fixed.
        accepted_B: int64, acceptances in this block, this step included.
        remasked_B: int64, tokens masked again in this block before this step.
        remask: η.
    """
    owed_B = (accepted_B.to(torch.float64) * remask).floor().to(torch.int64) - remasked_B
    owed_B = torch.minimum(owed_B, earlier_BS.sum(-1))
    return torch.where(open_BS.any(-1), owed_B, 0)


def owed_on_host(open_: int, earlier: int, accepted: int, remasked: int, remask: float) -> int:
    """`owed_remasks` of one row whose counts the host knows."""
    return min(math.floor(accepted * remask) - remasked, earlier) if open_ else 0


def least_probable(logp_BS: Tensor, earlier_BS: Tensor, owed_B: Tensor) -> Tensor:
    """Bool (B, S): the `owed_B` tokens of earlier steps that were least probable when they were fixed."""
    return accept_best(-logp_BS, earlier_BS, owed_B)
