"""The exact likelihood of small blocks, where the bound is only a bound.

Legend: B batch, L window length, N blocks, S block size, R = 2^S subsets of a block.

A sampler that reveals one uniformly chosen position at a time writes a block with probability

    p(x^b | x^{<b}) = mean over all S! orders σ of Π_k p(x_σk | x_σ1 … x_σ(k−1), x^{<b}).

An order's factor depends on what is masked, not on how it came to be, so the mean follows from the 2^S subsets alone:

    f(M) = 1/|M| Σ_{i in M} p(x_i | x_{not M}, x^{<b}) f(M without i),   f(∅) = 1,   p(x^b | x^{<b}) = f({1..S}).

This is the likelihood of `rule=first_hitting`, the exact sampler of the continuous-time process (Zheng et al., 2024).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockdiff.core.blocks import split_blocks
from blockdiff.evaluation.config import LARGEST_EXACT
from blockdiff.evaluation.masked import VIEWS_PER_PASS, masked_log_probs
from blockdiff.model.denoiser import Denoiser


def exact_block_nats(
    denoiser: Denoiser,
    tokens_BL: Tensor,
    document_BL: Tensor,
    counted_BL: Tensor,
    *,
    block_size: int,
    views_per_pass: int = VIEWS_PER_PASS,
) -> Tensor:
    """−log p(x^b | x^{<b}) of every block in nats, float64 (B, N); 0 for blocks without counted positions.

    Args:
        denoiser: evaluated as it is, on the tokens' device.
        tokens_BL: int64 clean tokens.
        document_BL: document of each position.
        counted_BL: bool; other positions are padding, hidden from all.
        block_size: S, at most `LARGEST_EXACT`.
        views_per_pass: subsets that one forward pass holds; changes nothing but time and memory.

    Raises:
        ValueError: the block size is too large to enumerate.
    """
    if block_size > LARGEST_EXACT:
        raise ValueError(
            f"block_size={block_size} has 2^{block_size} subsets: the exact likelihood is computed up to "
            f"block_size={LARGEST_EXACT}; use the bracket of blockdiff.evaluation.bracket"
        )
    rows, length = tokens_BL.shape
    blocks = length // block_size
    subset_RS = subsets(block_size).to(tokens_BL.device)
    masked_RL = subset_RS[1:].repeat(1, blocks)
    masked_BRL = masked_RL[None] & counted_BL[:, None]
    log_p_BRL = masked_log_probs(
        denoiser,
        tokens_BL,
        document_BL,
        counted_BL,
        masked_BRL,
        masked_BRL,
        block_size=block_size,
        views_per_pass=views_per_pass,
    )
    nothing_B1L = torch.zeros(rows, 1, length, dtype=torch.float64, device=tokens_BL.device)
    log_p_BNRS = split_blocks(torch.cat([nothing_B1L, log_p_BRL], 1), block_size).transpose(1, 2)
    return -subset_recursion(log_p_BNRS, split_blocks(counted_BL, block_size))


def subsets(block_size: int) -> Tensor:
    """Bool (2^S, S): row r holds the subset whose members are the set bits of r."""
    return (torch.arange(2**block_size)[:, None] >> torch.arange(block_size)) % 2 == 1


def subset_recursion(log_p_NRS: Tensor, counted_NS: Tensor) -> Tensor:
    """log f of the whole block, float64, of shape (...) for arguments (..., 2^S, S) and (..., S).

    Args:
        log_p_NRS: log p of position i where the counted part of subset r is masked; read at members only.
        counted_NS: bool, the positions that are scored. Others are left out of every subset.
    """
    size = counted_NS.shape[-1]
    member_RS = subsets(size).to(counted_NS.device)
    log_f_NR = torch.zeros(*log_p_NRS.shape[:-1], dtype=torch.float64, device=log_p_NRS.device)
    row_R = torch.arange(2**size, device=counted_NS.device)
    without_RS = row_R[:, None] & ~(1 << torch.arange(size, device=counted_NS.device))
    for count in range(1, size + 1):
        rows_r = (member_RS.sum(-1) == count).nonzero().squeeze(-1)
        member_NrS = member_RS[rows_r] & counted_NS[..., None, :]
        term_NrS = log_p_NRS[..., rows_r, :] + log_f_NR[..., without_RS[rows_r]]
        total_Nr = term_NrS.masked_fill(~member_NrS, -math.inf).logsumexp(-1)
        members_Nr = member_NrS.sum(-1)
        log_f_NR[..., rows_r] = torch.where(members_Nr > 0, total_Nr - members_Nr.double().clamp(min=1).log(), 0.0)
    return log_f_NR[..., -1]
