"""Weights in the layout that oneDNN's kernels read, for sampling in single precision on an x86 CPU.

A call of the sampler multiplies few rows (a block, or a token and its commit) by every weight. PyTorch's ordinary
product for so few rows spends much of its time bringing the weights into a kernel's order, anew in each call. Here
that is done once.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn

ROWS = 16
"""Rows of a call that the layout is chosen for. It serves other numbers of rows as well."""


class PackedLinear(nn.Linear):
    """`nn.Linear` for inference: multiplies by a packed copy of its weight, and keeps the weight itself too."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Args: weight (out, in), for which `can_pack` holds; bias (out). Neither is copied."""
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        # No buffer: it is a second form of the weight, which no state dict should hold.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether a weight can be packed to any use: a plain single-precision one (not split over processes) on x86."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dtype == torch.float32 and weight.device.type == "cpu"
    if not plain or platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    # Their names begin with an underscore: a release without them samples with the weights as they are.
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
