"""Weights as safetensors, the form in which they leave a run: a file of numbers and nothing that can be run."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blockdiff.model.denoiser import Denoiser

WEIGHTS_NAME = "model.safetensors"


def write_weights(denoiser: Denoiser, path: Path, step: int) -> None:
    """Writes all weights, on the CPU and in their own precision, with the number of steps behind them."""
    state = {name: weight.detach().cpu().contiguous() for name, weight in denoiser.state_dict().items()}
    save_file(state, path, metadata={"format": "pt", "step": str(step)})


def read_weights(path: Path) -> tuple[dict[str, Tensor], int]:
    """Weights by name, and steps. Raises a ValueError that names a file which is truncated or something else."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, int((file.metadata() or {}).get("step", 0))  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from None
