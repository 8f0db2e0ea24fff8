"""A micro-batch on its way to the device: noised while it still lies on the host.

Legend: B batch, K noisy views, L seq_len, M masked positions.

How many positions are masked, and where documents begin, decides about shapes. On the device the answer would have to
be waited for, and with it all work queued before. The noise is a pure function of step and position, so the host can
work it out as well as any device, while the device is still busy with the steps before. Imports no Lightning.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockdiff.core.corruption import NoiseConfig, NoiseKey, corrupt
from blockdiff.data.batch import Batch
from blockdiff.model.plan import Layout, layout_of


class NoisedBatch(NamedTuple):
    """One noised micro-batch of one rank.

    Attributes:
        clean: the batch as it was loaded.
        xt_BKL: int64 noisy views.
        chosen_M: int64, the masked positions as flat indices into B·K·L.
        weight_M: float64, what −log p of each of them counts for.
        counted: int64 scalar, counted positions of this micro-batch.
        layout: of the documents; numbers, which stay on the host.
    """

    clean: Batch
    xt_BKL: Tensor
    chosen_M: Tensor
    weight_M: Tensor
    counted: Tensor
    layout: Layout


def noise_batch(
    batch: Batch,
    key: NoiseKey,
    noise: NoiseConfig,
    *,
    block_size: int,
    mask_id: int,
    law_S1: Tensor | None = None,
) -> NoisedBatch:
    """Draws the noise of a micro-batch, on the device that it lies on (the host, where nothing is to wait).

    Args:
        batch: from the loader.
        key: what the noise is drawn from.
        noise: kind of corruption.
        block_size: S.
        mask_id: of `[MASK]`.
        law_S1: a fitted distribution of exact counts, as of `corrupt`.
    """
    noised = corrupt(
        batch.tokens_BL,
        batch.counted_BL,
        block_size=block_size,
        mask_id=mask_id,
        noise=noise,
        key=key,
        law_S1=law_S1,
    )
    chosen_M = noised.masked_BKL.flatten().nonzero().squeeze(-1)
    return NoisedBatch(
        batch,
        noised.xt_BKL,
        chosen_M,
        noised.weight_BKL.flatten()[chosen_M],
        batch.counted_BL.sum(),
        layout_of(batch.document_BL),
    )


def send(batch: NoisedBatch, device: torch.device) -> NoisedBatch:
    """The batch on a device. CUDA copies from pinned memory in its own time, and the host goes on."""
    xt_BKL, chosen_M, weight_M, counted = (
        _send(x, device) for x in (batch.xt_BKL, batch.chosen_M, batch.weight_M, batch.counted)
    )
    clean = Batch(*(_send(x, device) for x in batch.clean))
    return NoisedBatch(clean, xt_BKL, chosen_M, weight_M, counted, batch.layout)


def _send(x: Tensor, device: torch.device) -> Tensor:
    on_cuda = device.type == "cuda"
    if on_cuda and x.device.type == "cpu":
        x = x.pin_memory()  # does nothing where the loader has pinned it already
    return x.to(device, non_blocking=on_cuda)
