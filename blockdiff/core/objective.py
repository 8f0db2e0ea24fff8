"""The training objective: weighted negative log-likelihoods of masked tokens, in nats.

Legend: M masked positions, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_nll(logits_MV: Tensor, target_M: Tensor) -> Tensor:
    """−log p of each target, in nats, of shape (M): the log-sum-exp is taken in at least single precision."""
    logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    return logits_MV.logsumexp(-1) - logits_MV.gather(-1, target_M[:, None]).squeeze(-1)


def weighted_nll(
    hidden_MD: Tensor, head_VD: Tensor, target_M: Tensor, weight_M: Tensor, chunk: int = 2048
) -> tuple[Tensor, Tensor]:
    """Σ weight · −log p of the head's softmax, without ever holding all logits.

    The head is applied to `chunk` positions at a time and their gradient is taken at once, while the logits are there:
    peak memory does not grow with M·V and nothing is computed twice (the idea of Hsu et al., "Liger kernel", 2024).

    Args:
        hidden_MD: final hidden states.
        head_VD: weight of the output head.
        target_M: int64 token ids.
        weight_M: what each position counts for; not differentiated.
        chunk: positions whose logits exist together.

    Returns:
        The weighted sum (differentiable in hidden states and head) and the −log p of each position (detached).
    """
    total, nll_M = _WeightedNLL.apply(hidden_MD, head_VD, target_M, weight_M, chunk)
    return total, nll_M


class _WeightedNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, head_VD: Tensor, target_M: Tensor, weight_M: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_head = ctx.needs_input_grad[:2]
        grad_hidden_MD = torch.empty_like(hidden_MD) if need_hidden else None
        grad_head_VD = torch.zeros_like(head_VD) if need_head else None
        product = _product_dtype(hidden_MD)
        head = head_VD.to(product)
        nll_M = torch.empty(len(target_M), device=hidden_MD.device, dtype=_at_least_single(hidden_MD.dtype))
        for start in range(0, len(target_M), chunk):
            part = slice(start, start + chunk)
            hidden_mD = hidden_MD[part].to(product)
            logits_mV = (hidden_mD @ head.T).to(nll_M.dtype)
            lse_m = logits_mV.logsumexp(-1)
            nll_M[part] = lse_m - logits_mV.gather(-1, target_M[part, None]).squeeze(-1)
            if grad_hidden_MD is None and grad_head_VD is None:
                continue
            # d(w · nll)/d logits = w · (softmax − one-hot), in place of the logits.
            slope_mV = logits_mV.sub_(lse_m[:, None]).exp_()
            slope_mV.scatter_add_(-1, target_M[part, None], torch.full_like(lse_m, -1.0)[:, None])
            slope_mV.mul_(weight_M[part, None].to(slope_mV.dtype))
            slope_mV = slope_mV.to(product)
            if grad_hidden_MD is not None:
                grad_hidden_MD[part] = (slope_mV @ head).to(grad_hidden_MD.dtype)
            if grad_head_VD is None:
                continue
            if product == head_VD.dtype:
                grad_head_VD.addmm_(slope_mV.T, hidden_mD)
            else:
                grad_head_VD += slope_mV.T @ hidden_mD
        ctx.save_for_backward(grad_hidden_MD, grad_head_VD)
        ctx.mark_non_differentiable(nll_M)
        return (nll_M.double() * weight_M).sum().to(nll_M.dtype), nll_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_MD, grad_head_VD = ctx.saved_tensors
        return (
            None if grad_hidden_MD is None else grad_hidden_MD * grad_total.to(grad_hidden_MD.dtype),
            None if grad_head_VD is None else grad_head_VD * grad_total.to(grad_head_VD.dtype),
            None,
            None,
            None,
        )


def _product_dtype(hidden_MD: Tensor) -> torch.dtype:
    """What products are taken in. Autocast has no say over products that add up in place, and would leave them slow."""
    kind = hidden_MD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_MD.dtype


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
