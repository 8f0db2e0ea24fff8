"""Batches in an order that is a pure function of (seed, global sample counter): nothing to be saved.

Letters: B rows of one micro-batch, G rows of a global batch, L seq_len.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from blockdiff.core.randomness import Stream, hash_int, permute_index
from blockdiff.data.batch import Batch
from blockdiff.data.packing import PackedDataset

Ints = NDArray[np.int64]


def global_samples(size: int, seed: int, step: int, global_batch_size: int) -> Ints:
    """Indices of the samples of one optimizer step, in the order of their slots.

    Sample counter c = step · global_batch_size + slot; epoch c // size is one permutation of the data set,
    element c % size of which is taken: each epoch shows every sample once, also where a batch reaches into
    the next epoch.

    Returns:
        int64 (G,).
    """
    counter_G = torch.arange(step * global_batch_size, (step + 1) * global_batch_size)
    epoch_G, place_G = counter_G // size, counter_G % size
    index_G = torch.empty_like(counter_G)
    for epoch in range(int(epoch_G[0]), int(epoch_G[-1]) + 1):
        in_epoch_G = epoch_G == epoch
        index_G[in_epoch_G] = permute_index(place_G[in_epoch_G], size, hash_int(seed, Stream.SHUFFLE, epoch))
    return index_G.numpy()


class TrainBatches(Dataset[Batch]):
    """Micro-batches of one rank by their running number, which counts step by step.

    Micro-batch m of rank r takes the slots (m · world_size + r) · micro_batch_size + j, so that the split
    of a global batch over ranks and accumulation does not change which samples it has.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.accumulation = accumulation_of(global_batch_size, micro_batch_size, world_size)
        if len(dataset) < global_batch_size:
            raise ValueError(
                f"the corpus has {len(dataset)} training windows of seq_len={dataset.seq_len} tokens, fewer "
                f"than data.global_batch_size={global_batch_size}: lower it, lower seq_len, or give more text"
            )
        self.dataset, self.seed, self.global_batch_size = dataset, seed, global_batch_size
        self.micro_batch_size, self.rank, self.world_size = micro_batch_size, rank, world_size

    def __getitem__(self, number: int) -> Batch:
        step, micro = divmod(number, self.accumulation)
        index_G = global_samples(len(self.dataset), self.seed, step, self.global_batch_size)
        first = (micro * self.world_size + self.rank) * self.micro_batch_size
        slot_B = np.arange(first, first + self.micro_batch_size)
        return _collate(self.dataset, index_G, slot_B, step)


class ValBatches(Dataset[Batch]):
    """Every chosen sample once over all ranks; all ranks have equally many batches of the same shape.

    Batch m of rank r holds samples m · micro_batch_size · world_size + r · micro_batch_size + j; rows past
    the end hold no sample and nothing that is counted. With ``max_samples`` the samples lie evenly over the
    data set.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        max_samples: int | None = None,
    ):
        accumulation_of(micro_batch_size * world_size, micro_batch_size, world_size)
        if max_samples is not None and max_samples < 1:
            raise ValueError(f"max_samples={max_samples} must be at least 1, or None for all")
        self.dataset, self.micro_batch_size = dataset, micro_batch_size
        self.rank, self.world_size = rank, world_size
        self.samples = len(dataset) if max_samples is None else min(max_samples, len(dataset))

    def __len__(self) -> int:
        return -(-self.samples // (self.micro_batch_size * self.world_size))

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        rows = self.micro_batch_size * self.world_size
        rank_G = np.arange(number * rows, (number + 1) * rows)
        index_G = np.where(rank_G < self.samples, rank_G * len(self.dataset) // self.samples, -1)
        slot_B = np.arange(self.rank * self.micro_batch_size, (self.rank + 1) * self.micro_batch_size)
        return _collate(self.dataset, index_G, slot_B, number)


def train_loader(
    dataset: PackedDataset,
    *,
    seed: int,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    start_step: int = 0,
    max_steps: int,
    workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Batch]:
    """The micro-batches of optimizer steps ``start_step`` to ``max_steps`` (excluded), in order.

    Their content and order do not depend on ``workers``.

    Raises:
        ValueError: batch sizes do not fit together, or the data set is smaller than one global batch.
    """
    batches = TrainBatches(
        dataset,
        seed=seed,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        rank=rank,
        world_size=world_size,
    )
    numbers = range(start_step * batches.accumulation, max(max_steps, start_step) * batches.accumulation)
    return _loader(batches, numbers, workers, pin_memory)


def val_loader(
    dataset: PackedDataset,
    *,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    max_samples: int | None = None,
    workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Batch]:
    """Each sample of the data set once over all ranks, in order (`ValBatches`)."""
    batches = ValBatches(
        dataset, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size, max_samples=max_samples
    )
    return _loader(batches, range(len(batches)), workers, pin_memory)


def accumulation_of(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches of one rank in an optimizer step.

    Raises:
        ValueError: the global batch is not a whole number of micro-batches on every rank.
    """
    for key, value in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
        if value < 1:
            raise ValueError(f"data.{key}={value} must be at least 1")
    together = micro_batch_size * world_size
    if global_batch_size % together:
        below = global_batch_size // together * together
        nearest = ", ".join(str(size) for size in (below, below + together) if size)
        raise ValueError(
            f"data.global_batch_size={global_batch_size} must be a multiple of data.micro_batch_size="
            f"{micro_batch_size} × {world_size} processes = {together}; nearest: {nearest}"
        )
    return global_batch_size // together


def _loader(batches: Dataset[Batch], numbers: range, workers: int, pin_memory: bool) -> DataLoader[Batch]:
    if workers:
        # Workers never tokenise; without a setting the tokenizers library warns at every fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    options: dict[str, Any] = {"persistent_workers": True} if workers else {}
    return DataLoader(
        batches, batch_size=None, sampler=numbers, num_workers=workers, pin_memory=pin_memory, **options
    )


def _collate(dataset: PackedDataset, index_G: Ints, slot_B: Ints, step: int) -> Batch:
    """The rows of a micro-batch, and what is known of the global batch from its indices alone."""
    index_B = index_G[slot_B]
    tokens_BL = torch.full((len(index_B), dataset.seq_len), dataset.eos_id)
    document_BL = torch.zeros(tokens_BL.shape, dtype=torch.int32)
    counted_BL = torch.zeros(tokens_BL.shape, dtype=torch.bool)
    for row, index in enumerate(index_B.tolist()):
        if index >= 0:
            tokens_BL[row], document_BL[row], counted_BL[row] = dataset[index]
    return Batch(
        tokens_BL,
        document_BL,
        counted_BL,
        torch.from_numpy(index_B),
        torch.from_numpy(slot_B),
        torch.tensor(step),
        torch.tensor(int(dataset.counted_tokens(index_G[index_G >= 0]).sum())),
    )
