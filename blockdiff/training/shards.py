"""Checkpoints of a network that is split over processes: a directory `step-N.ckpt/` instead of a file.

Tensors lie in the shards of torch's distributed checkpoint, named ``state_dict.*``, ``ema.*`` and ``optimizer.*``;
`rest.pt` holds what is no tensor. Any number of processes can read what any other number wrote. Imports no Lightning.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from blockdiff.training.durable import TEMPORARY, describe_file, force_directory, write_durably

REST, INDEX = "rest.pt", ".metadata"
_DATA = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""What an index of shards is made of, beside dtypes and paths."""

Tree = Mapping[str, Any]


def save_shards(checkpoint: dict[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Writes a checkpoint as the directory `path`, in all processes together.

    Args:
        checkpoint: as Lightning collects it, with `state_dict` and one of `optimizer_states` split over processes.
        path: of the directory, which must not exist.

    Returns:
        Size and SHA-256 of each file, by its name relative to the run directory.

    Raises:
        OSError: it could not be written, in all processes; nothing is left of it.
    """
    rest = dict(checkpoint)
    (optimizer,) = rest.pop("optimizer_states")
    tensors = {"state_dict": rest.pop("state_dict"), "ema": rest.pop("ema", {}), "optimizer": optimizer["state"]}
    rest["param_groups"] = optimizer["param_groups"]
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        first_does(lambda: _make_anew(temporary))
        dcp.save(dict(_flat(tensors)), storage_writer=dcp.FileSystemWriter(temporary))
        first_does(lambda: _write_rest(rest, temporary))
        facts = _describe(temporary, path.name)
        first_does(lambda: _rename(temporary, path))
    except (OSError, CheckpointException) as error:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise
        raise OSError(f"{path}: {_reasons(error)}") from error
    return facts


def load_shards(path: Path, tensors: Tree) -> dict[str, Any]:
    """Fills (nested) tensors of the same names in place, each process its part, and returns the rest.

    Raises:
        ValueError: the index is damaged or foreign, or a tensor is missing or has another shape.
    """
    check_index(path)
    try:
        dcp.load(dict(_flat(tensors)), storage_reader=dcp.FileSystemReader(path))
    except CheckpointException as error:
        raise ValueError(f"{path} does not hold the tensors of this network: {_reasons(error)}") from error
    return read_rest(path)


def read_rest(path: Path) -> dict[str, Any]:
    """What the checkpoint holds beside tensors of weights, averages and optimizer."""
    return torch.load(path / REST, map_location="cpu", weights_only=True)


def read_part(path: Path, part: str) -> dict[str, Tensor]:
    """All tensors of ``state_dict`` or ``ema``, whole, by one process alone; none where the part is absent.

    Raises:
        ValueError: the index is damaged or foreign.
    """
    check_index(path)
    index = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in index.items()
        if name.startswith(f"{part}.") and isinstance(facts, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*load in a single process")
        if found:
            dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return {name.removeprefix(f"{part}."): tensor for name, tensor in found.items()}


def check_index(path: Path) -> None:
    """Raises a ValueError unless the index of the shards is plain data: it is a pickle, and torch would run it."""
    try:
        with open(path / INDEX, "rb") as file:
            index = _DataOnly(file).load()
        kinds = {type(facts) for facts in index.state_dict_metadata.values()}
    except (OSError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path / INDEX} is no index of shards ({error})") from None
    if kinds - {TensorStorageMetadata}:
        raise ValueError(f"{path} holds something that is no tensor: it is not a checkpoint of blockdiff")


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_path = module.split(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath", "WindowsPath")
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_path or is_dtype or (module, name) in _DATA):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)


def _flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def first_does(action: Callable[[], None]) -> None:
    """Process 0 acts, the others wait; its OSError is raised in all of them."""
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = [str(error)]
    dist.broadcast_object_list(failure, 0)
    if failure[0] is not None:
        raise OSError(failure[0])


def _make_anew(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()


def _write_rest(rest: dict[str, Any], directory: Path) -> None:
    write_durably(directory / REST, lambda file: torch.save(rest, file))  # type: ignore[arg-type]


def _describe(directory: Path, name: str) -> dict[str, dict[str, Any]]:
    """The files' facts; each process reads its share of them."""
    files = sorted(directory.iterdir())
    mine = {f"{name}/{file.name}": describe_file(file) for file in files[dist.get_rank() :: dist.get_world_size()]}
    shares: list[dict[str, dict[str, Any]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, mine)
    return dict(sorted(item for share in shares for item in share.items()))


def _rename(temporary: Path, path: Path) -> None:
    force_directory(temporary)
    os.replace(temporary, path)
    force_directory(path.parent)


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"process {rank}: {cause[0]}" for rank, cause in error.failures.items())
