"""Noise that follows what training measures: the state between the steps of `core.fitting`'s functions.

Legend: B batch, K noisy views, L seq_len, M masked positions, S block size, G cells of `core.fitting`.

Measurements add up on the device. Every `noise.fit_every` steps they are added over all processes and the noise of the
steps that follow is fitted anew, so what a step is noised with is a function of the steps before it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockdiff.core.blocks import split_blocks
from blockdiff.core.bound import position_nats
from blockdiff.core.corruption import CLIP_CELLS, Fit, NoiseConfig, NoiseKey, corrupt
from blockdiff.core.fitting import Interval, count_cells, fit_law, gradient_moments, search_clip, tally
from blockdiff.core.randomness import Stream, hash_int
from blockdiff.model.denoiser import Denoiser, Watch
from blockdiff.training.staging import NoisedBatch

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes."""


class AdaptiveNoise:
    """The noise of the next step.

    Attributes:
        noise: its settings: those of the run, with the clip that a search has found.
        law_S1: the fitted law of counts, on the host, where batches are noised; None: that of `noise.count_power`.
    """

    def __init__(self, noise: NoiseConfig, block_size: int) -> None:
        """Args: the run's noise, checked by the caller, and S."""
        self.noise, self.block_size = noise, block_size
        self.law_S1: Tensor | None = None
        rows, cells = 0, 0
        match noise.fit:
            case Fit.counts:
                rows, cells = 2, int(count_cells(block_size).max()) + 1
            case Fit.clip:
                rows, cells = 3, CLIP_CELLS
        self._new = torch.zeros(rows, cells, dtype=torch.int64)
        self._known = torch.zeros(rows, cells, dtype=torch.float64)
        self._challenger: Interval | None = None
        self._cells_S1 = torch.cat([torch.tensor([-1]), count_cells(block_size)])

    def begin(self, device: torch.device, first: bool) -> None:
        """Moves to the device. Measurements that a checkpoint held are those of all processes: the first keeps them."""
        self._new = self._new.to(device) if first else torch.zeros_like(self._new, device=device)
        self._cells_S1 = self._cells_S1.to(device)

    def watch(self, batch: NoisedBatch, weight_M: Tensor) -> Watch | None:
        """What measures the gradients of a pass for a fit of the counts; None where none is wanted.

        Args:
            batch: that the pass is over, on the device.
            weight_M: what a position's −log p counts for in the loss that is differentiated.
        """
        if self.noise.fit is not Fit.counts:
            return None
        blocks = batch.xt_BKL.numel() // self.block_size

        def measure(slope_MD: Tensor) -> None:
            moment_Q, count_Q = gradient_moments(slope_MD, weight_M, batch.chosen_M, blocks, self.block_size)
            self._new += tally(self._cells_S1[count_Q], self._new.shape[1], moment_Q)

        return measure

    def probe(self, denoiser: Denoiser, batch: NoisedBatch, key: NoiseKey) -> None:
        """Measures the loss within each cell of time, with the batch of the last step before a search.

        One view a cell shares the clean stream of one pass without gradients. All cells have the same key, and so the
        same random numbers.
        """
        if self.noise.fit is not Fit.clip or (key.step + 1) % self.noise.fit_every:
            return
        clean, key = batch.clean, key._replace(seed=hash_int(key.seed, Stream.PROBE))
        cells = [
            corrupt(
                clean.tokens_BL,
                clean.counted_BL,
                block_size=self.block_size,
                mask_id=denoiser.mask_id,
                noise=replace(self.noise, views=1, clip=[cell / CLIP_CELLS, (cell + 1) / CLIP_CELLS]),
                key=key,
            )
            for cell in range(CLIP_CELLS)
        ]
        xt_BKL, masked_BKL, weight_BKL = (torch.cat(parts, 1) for parts in zip(*cells, strict=True))
        chosen_M = masked_BKL.flatten().nonzero().squeeze(-1)
        with torch.no_grad():
            plan = denoiser.plan(clean.document_BL, self.block_size, CLIP_CELLS, batch.layout)
            weight_M = weight_BKL.flatten()[chosen_M]
            _, nll_M = denoiser.weighted_nll(xt_BKL, clean.tokens_BL, plan, chosen_M, weight_M)
        countable_B1N = split_blocks(clean.counted_BL, self.block_size).sum(-1)[:, None]
        nats_BKN = split_blocks(position_nats(nll_M, weight_BKL, chosen_M), self.block_size).sum(-1)
        nats_BKN = nats_BKN / countable_B1N.clamp(min=1)
        cell_BKN = torch.arange(CLIP_CELLS, device=nats_BKN.device)[:, None].expand(nats_BKN.shape)
        cell_BKN = torch.where(countable_B1N > 0, cell_BKN, -1)
        self._new += tally(cell_BKN.flatten(), CLIP_CELLS, nats_BKN.flatten(), nats_BKN.flatten() ** 2)

    def finish_step(self, step: int, reduce: Reduce) -> None:
        """Follows each optimizer step, in all processes; `step` is the number of finished ones."""
        if self.noise.fit is Fit.none or step % self.noise.fit_every:
            return
        memory = self.noise.fit_memory
        self._known = memory * self._known + (1 - memory) * reduce(self._new.clone()).cpu().to(torch.float64)
        self._new.zero_()
        if step < self.noise.fit_warmup:
            return
        match self.noise.fit:
            case Fit.counts:
                self.law_S1 = fit_law(self._known, self.noise, self.block_size)
            case Fit.clip if bool((self._known[0] > 0).all()):
                low, high = (round(time * CLIP_CELLS) for time in self.noise.clip)
                (low, high), self._challenger = search_clip(self._known, (low, high), self._challenger)
                self.noise = replace(self.noise, clip=[low / CLIP_CELLS, high / CLIP_CELLS])

    def state(self, reduce: Reduce) -> dict[str, Any]:
        """What a checkpoint holds of it, the same in all processes."""
        return {
            "new": reduce(self._new.clone()).cpu(),
            "known": self._known.clone(),
            "law": None if self.law_S1 is None else self.law_S1.clone(),
            "clip": list(self.noise.clip),
            "challenger": None if self._challenger is None else list(self._challenger),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint; `begin` follows."""
        self._new, self._known, self.law_S1 = state["new"], state["known"], state["law"]
        self.noise = replace(self.noise, clip=list(state["clip"]))
        low_high = state["challenger"]
        self._challenger = None if low_high is None else (low_high[0], low_high[1])
