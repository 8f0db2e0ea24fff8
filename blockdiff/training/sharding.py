"""Weights, averages and optimizer state split over processes: FSDP2 through Lightning's door for it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from blockdiff.model.denoiser import Denoiser
from blockdiff.training.ema import AVERAGE
from blockdiff.training.shards import load_shards

ENTRANCES = ("weighted_nll", "denoise", "commit", "commit_and_denoise")
"""The denoiser's methods beside `forward` before which its weights must be gathered."""


def shard(denoiser: Denoiser, mesh: DeviceMesh) -> None:
    """Splits the weights over the mesh: layer by layer, and embedding, norm and head as one part."""
    for layer in denoiser.layers:
        fully_shard(layer, mesh=mesh)
    # Without a backward pass nothing else would split an average's outer weights again after a validation.
    frozen = not any(weight.requires_grad for weight in denoiser.parameters())
    fully_shard(denoiser, mesh=mesh, reshard_after_forward=frozen)
    for name in ENTRANCES:
        register_fsdp_forward_method(denoiser, name)


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy with durable checkpoints: directories of shards, as `training.shards` defines them."""

    def __init__(self, processes: int, timeout: timedelta) -> None:
        super().__init__(data_parallel_size=processes, tensor_parallel_size=1, timeout=timeout)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """In all processes together."""
        self.checkpoint_io.save_checkpoint(checkpoint, self.broadcast(filepath))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Fills this process's part of weights, averages and optimizer state; returns the rest."""
        assert self.model is not None
        (optimizer,) = self.optimizers
        weights = get_model_state_dict(self.model)
        state = get_optimizer_state_dict(self.model, optimizer)
        averaged = [name for name in weights if name.startswith(AVERAGE)]
        rest = load_shards(
            Path(checkpoint_path),
            {
                "state_dict": {name: weights[name] for name in weights if name not in averaged},
                "ema": {name.removeprefix(AVERAGE): weights[name] for name in averaged},
                "optimizer": state["state"],
            },
        )
        state["param_groups"] = rest.pop("param_groups")
        set_model_state_dict(self.model, weights)
        set_optimizer_state_dict(self.model, optimizer, state)
        return rest
