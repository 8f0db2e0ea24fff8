"""Muon for the layers' matrices and AdamW for the rest, as the one optimizer that automatic optimization takes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """Steps both optimizers together; learning-rate schedules see all their groups.

    Muon orthogonalises each matrix's momentum (Jordan et al., 2024); its update is scaled to the root mean square of
    AdamW's (Liu et al., "Muon is scalable for LLM training", 2025), so both follow one learning rate.
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
        self.muon = Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
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
