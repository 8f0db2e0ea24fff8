"""A denoiser's layers through torch.compile, for training.

Legend: M chosen tokens.

What comes before and after attention is compiled, attention itself is not: FlexAttention is a compiled kernel of its
own, and a plan's ranges, which may differ from batch to batch, never become conditions of a graph. All layers share two
graphs; the last one has its own two, because it asks for queries of the noisy streams alone and goes on with chosen
tokens. Their number M changes at every step, so it is a free dimension of the graph.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from blockdiff.model.denoiser import Denoiser
from blockdiff.model.layers import Layer


def compile_layers(denoiser: Denoiser) -> None:
    """Compiles the layers in place, before they are split over processes; weights and their names stay as they are.

    Only passes that record gradients are compiled: sampling and scoring come in all shapes. Copy a denoiser before, not
    after: a copy's layers would call the compiled methods of the original.
    """
    for layer in denoiser.layers:
        assert isinstance(layer, Layer)
        for name in ("before", "after", "after_chosen"):
            plain = getattr(layer, name)
            compiled = torch.compile(plain, fullgraph=True, dynamic=False)
            # An attribute of the instance stands in front of the method of its class.
            setattr(
                layer, name, _in_training(_any_number(compiled, plain) if name == "after_chosen" else compiled, plain)
            )


@functools.cache
def compiler_fault(device_type: str) -> str | None:
    """Why PyTorch's compiler can generate no code for such devices here; None where it can.

    On CUDA it needs Triton. On a CPU it needs a C++ compiler, Python's headers and a directory for its cache: whether
    they are there and fit together, only a trial tells.
    """
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE=1"
    match device_type:
        case "cuda":
            return None if find_spec("triton") else "Triton is not installed"
        case "cpu":
            return _trial()
    return f"not tried on {device_type} devices"


def _trial() -> str | None:
    try:
        torch.compile(torch.sin, fullgraph=True)(torch.zeros(64))
    except Exception as error:  # whatever a tool chain may lack
        return str(error).partition("\n")[0]
    return None


def _in_training(compiled: Callable, plain: Callable) -> Callable:
    def call(*arguments: object) -> object:
        return (compiled if torch.is_grad_enabled() else plain)(*arguments)

    return call


def _any_number(compiled: Callable, plain: Callable) -> Callable:
    def call(heads_MC: Tensor, x_MD: Tensor) -> Tensor:
        if len(x_MD) < 2:  # sizes 0 and 1 can be no free dimension
            return plain(heads_MC, x_MD)
        for tensor in (heads_MC, x_MD):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(heads_MC, x_MD)

    return call
