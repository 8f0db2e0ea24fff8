"""Muon for the layers' matrices and AdamW for the rest, as the one optimizer that automatic optimization takes.

Legend: M matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
"""Coefficients a, b, c of the quintic iteration X ← aX + (bA + cA²)X, A = XXᵀ (Jordan et al., 2024)."""

ITERATIONS = 5


class StackedMuon(Muon):
    """PyTorch's Muon with all matrices of one shape orthogonalised in one batched product.

    PyTorch takes one matrix after the other, each in bfloat16: many small products, and on a CPU slow and coarse ones.
    Here CPUs compute in the weights' own precision.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluates the closure once, then updates the matrices that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape.setdefault(weight.shape, []).append((weight, weight.grad))
            for pairs in by_shape.values():
                weights, gradients = (list(tensors) for tensors in zip(*pairs, strict=True))
                self._update(weights, gradients, group)
        return loss

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        for weight in weights:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        update_MRC = orthogonalised(torch.stack(list(ahead)), group["eps"]).to(weights[0].dtype)
        # Scaled to the root mean square of AdamW's updates (Liu et al., 2025), so that one learning rate serves both.
        lr = group["lr"] * 0.2 * max(weights[0].shape) ** 0.5
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, list(update_MRC), alpha=-lr)


def orthogonalised(x_MRC: Tensor, eps: float) -> Tensor:
    """Each matrix with its singular values brought near 1 (0.7 to 1.2) and its singular vectors kept.

    Args:
        x_MRC: matrices; on CUDA the work is done in bfloat16.
        eps: smallest Frobenius norm that is divided by.
    """
    a, b, c = NEWTON_SCHULZ
    x_MRC = x_MRC.bfloat16() if x_MRC.is_cuda else x_MRC
    tall = x_MRC.shape[1] > x_MRC.shape[2]
    x_MRC = x_MRC.mT if tall else x_MRC
    x_MRC = x_MRC / torch.linalg.vector_norm(x_MRC, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(ITERATIONS):
        gram_MRR = x_MRC @ x_MRC.mT
        slope_MRR = torch.baddbmm(gram_MRR, gram_MRR, gram_MRR, beta=b, alpha=c)
        x_MRC = torch.baddbmm(x_MRC, slope_MRR, x_MRC, beta=a)
    return x_MRC.mT if tall else x_MRC


class MuonWithAdamW(Optimizer):
    """Steps both optimizers together; learning-rate schedules see all their groups.

    Muon orthogonalises each matrix's momentum (Jordan et al., "Muon", 2024; Liu et al., "Muon is scalable for LLM
    training", 2025).
    """

    def __init__(
        self,
        matrices: list[torch.nn.Parameter],
        adamw: AdamW,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
    ) -> None:
        self.muon = StackedMuon(matrices, lr=lr, weight_decay=weight_decay, momentum=momentum)
        self.adamw = adamw
        super().__init__(chain(matrices, *(group["params"] for group in adamw.param_groups)), {"lr": lr})
        self._share_groups()

    def _share_groups(self) -> None:
        """The groups are the parts' own dictionaries, so that who sets a learning rate here sets it there."""
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluates the closure once, then updates all weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.muon.step()
        self.adamw.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The parts' states, by name."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores both parts."""
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self._share_groups()
