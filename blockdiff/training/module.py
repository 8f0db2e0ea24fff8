"""The Lightning module: one step of training, as a page to read.

A launch always looks like a fresh fit to Lightning, whose loop counters are not kept: the data order, the
noise and the learning rate are functions of the step alone, and the step is `start_step` + the steps since
launch. That is what lets a run go on with another number of devices or another micro-batch, where Lightning's
counters of batches would lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from blockdiff.core.corruption import Fit, NoiseConfig, NoiseKey
from blockdiff.model.denoiser import Denoiser
from blockdiff.training.adaptive import AdaptiveNoise
from blockdiff.training.config import OptimizerConfig
from blockdiff.training.ema import AVERAGE, averaged_copy, update_average
from blockdiff.training.meter import Meter
from blockdiff.training.optimizer import build_optimizer, lr_ratio
from blockdiff.training.sharding import shard
from blockdiff.training.staging import NoisedBatch, noise_batch, send

if TYPE_CHECKING:
    from blockdiff.data.batch import Batch


class DiffusionModule(L.LightningModule):
    """A denoiser in training, and the average of its weights."""

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        noise: NoiseConfig,
        optimizer: OptimizerConfig,
        block_size: int,
        seed: int,
        global_batch_size: int,
        max_steps: int,
        start_step: int = 0,
    ) -> None:
        """Args: the network and what its steps depend on; `start_step` is the step of the checkpoint resumed from."""
        super().__init__()
        noise.check()
        optimizer.check()
        self.denoiser = denoiser
        self.average = averaged_copy(denoiser) if optimizer.ema_decay else None
        self.noise, self.optimizer_config = noise, optimizer
        self.adaptive = AdaptiveNoise(noise, block_size)
        self.block_size, self.seed, self.global_batch_size = block_size, seed, global_batch_size
        self.max_steps, self.start_step = max_steps, start_step
        self.meter = Meter(torch.device("cpu"))

    def configure_model(self) -> None:
        """Splits the networks where the strategy says so."""
        if self.device_mesh is None:
            return
        for network in (self.denoiser, self.average):
            if network is not None:
                shard(network, self.device_mesh["data_parallel"])

    @property
    def step(self) -> int:
        """Optimizer steps finished since the run began, over all launches."""
        return self.start_step + self.trainer.global_step

    @property
    def evaluated(self) -> Denoiser:
        """The network that is validated and sampled from: the averaged weights, where there are any."""
        return self.denoiser if self.average is None else self.average

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> NoisedBatch:
        """Noises the batch while it lies on the host, where nothing has to be waited for."""
        noise, law_S1 = self.adaptive.noise, self.adaptive.law_S1
        return noise_batch(
            batch,
            self._noise_key(batch),
            noise,
            block_size=self.block_size,
            mask_id=self.denoiser.mask_id,
            law_S1=law_S1,
        )

    def transfer_batch_to_device(self, batch: NoisedBatch, device: torch.device, dataloader_idx: int) -> NoisedBatch:
        return send(batch, device)

    def training_step(self, batch: NoisedBatch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch: Σ weight · −log p / counted tokens of the global batch, in nats per token."""
        step, views, clean = self.step, self.noise.views, batch.clean
        self.adaptive.probe(self.denoiser, batch, self._noise_key(clean))
        tokens = clean.global_count * views
        # Gradients are seen when Lightning has divided by the accumulated micro-batches and before the processes meet.
        watch = self.adaptive.watch(batch, batch.weight_M / tokens * self.trainer.world_size)
        plan = self.denoiser.plan(clean.document_BL, self.block_size, views, batch.layout)
        nats, _ = self.denoiser.weighted_nll(batch.xt_BKL, clean.tokens_BL, plan, batch.chosen_M, batch.weight_M, watch)
        self.meter.add(nats / views, batch.counted, step, clean.sample_B)
        # Lightning divides by the accumulated micro-batches, and data parallelism takes the mean over processes. The
        # global count has done both, so both are undone: the gradient is that of the global batch, however it is split.
        parts = self.trainer.accumulate_grad_batches * self.trainer.world_size
        return nats / tokens * parts

    def _noise_key(self, batch: Batch) -> NoiseKey:
        return NoiseKey(self.seed, self.step, batch.slot_B, self.global_batch_size)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = build_optimizer(self.denoiser, self.optimizer_config)
        schedule = LambdaLR(optimizer, lambda step: lr_ratio(step, self.optimizer_config, self.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @property
    def learning_rate(self) -> float:
        """Of the last finished step."""
        ratio = lr_ratio(max(self.step - 1, 0), self.optimizer_config, self.max_steps)
        return self.optimizer_config.lr * ratio

    def finish_step(self) -> None:
        """Follows each optimizer step: updates the average, and fits the noise where it is due."""
        self.adaptive.finish_step(self.step, self._sum_over_processes)
        if self.average is not None:
            update_average(self.average, self.denoiser, self.step - 1, self.optimizer_config.ema_decay)

    def _sum_over_processes(self, x: Tensor) -> Tensor:
        total = self.trainer.strategy.reduce(x, reduce_op="sum")
        assert isinstance(total, Tensor)
        return total

    def on_fit_start(self) -> None:
        self.adaptive.begin(self.device, self.trainer.is_global_zero)
        kept = self.meter.sums_2
        self.meter = Meter(self.device)
        if self.trainer.is_global_zero:
            self.meter.sums_2 += kept.to(self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Replaces Lightning's loop counters by the step, and puts the averaged weights under ``ema``."""
        checkpoint.pop("loops")
        checkpoint["global_step"] = self.step
        # Steps since the last row belong to the next one, so their sums are part of the state.
        checkpoint["meter"] = self._sum_over_processes(self.meter.sums_2.clone()).cpu()
        if self.noise.fit is not Fit.none:
            checkpoint["fit"] = self.adaptive.state(self._sum_over_processes)
        weights = checkpoint["state_dict"]
        names = [name for name in weights if name.startswith(AVERAGE)]
        if names:
            checkpoint["ema"] = {name.removeprefix(AVERAGE): weights.pop(name) for name in names}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Undoes `on_save_checkpoint`. Lightning then loads weights strictly: a mismatch names the tensors."""
        assert checkpoint["global_step"] == self.start_step, "the run was assembled for another checkpoint"
        self.meter.sums_2 = checkpoint["meter"]
        if self.noise.fit is not Fit.none:
            self.adaptive.load(checkpoint["fit"])
        for name, weight in checkpoint.get("ema", {}).items():
            checkpoint["state_dict"][AVERAGE + name] = weight
