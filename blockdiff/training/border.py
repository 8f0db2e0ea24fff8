"""What happens between two optimizer steps, in one fixed order:

average the weights, measure, validate, write the row, preview, save, obey a request to stop.

The order is what makes a resume exact: when a checkpoint is written, all that belongs to its step is done,
and nothing of the next one has begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from blockdiff.core.bound import Bound
from blockdiff.model.denoiser import Denoiser
from blockdiff.training.config import TrainerConfig
from blockdiff.training.display import Display
from blockdiff.training.errors import NonFiniteError
from blockdiff.training.metrics import MetricsTable, Row
from blockdiff.training.module import DiffusionModule
from blockdiff.training.report import write_samples
from blockdiff.training.saving import Saver, describe_last_good
from blockdiff.training.signals import StopRequest
from blockdiff.training.validation import validation_sums

if TYPE_CHECKING:
    from blockdiff.data.loader import Batch

FINAL_SAMPLES = 4

Preview = Callable[[Denoiser, int], list[str]]
"""(denoiser, how many) -> samples as text."""


@dataclass
class Outputs:
    """Where the first process shows and writes what happens; the other processes have none.

    Attributes:
        metrics: the run's table.
        display: progress.
        preview: draws samples, or None.
    """

    metrics: MetricsTable
    display: Display
    preview: Preview | None


@dataclass
class Pace:
    """Tokens and seconds of training proper: validation, previews and saving stop the clock."""

    tokens: int = 0
    seconds: float = 0.0
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, tokens: int) -> float:
        """Counts tokens since the last lap; returns tokens a second of this lap."""
        seconds = time.perf_counter() - self._since
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self._since += seconds
        return tokens / max(seconds, 1e-9)

    def skip(self, seconds: float) -> None:
        """Leaves out a pause within the lap."""
        self._since += seconds


class StepBorder(L.Callback):
    """Does everything that follows an optimizer step."""

    def __init__(
        self,
        config: TrainerConfig,
        saver: Saver,
        *,
        block_size: int,
        bytes_per_token: float,
        val_batches: Callable[[int, int], Iterable[Batch]],
        outputs: Outputs | None,
    ) -> None:
        """Args: rhythm, saver, S, bytes a validation token stands for, (rank, processes) -> batches, outputs."""
        self.config, self.saver, self.outputs = config, saver, outputs
        self.block_size, self.bytes_per_token = block_size, bytes_per_token
        self._make_val_batches = val_batches
        self.stop = StopRequest()
        self.pace = Pace()
        self._val_batches: Iterable[Batch] = ()
        self._seen, self._saved_at = 0, time.monotonic()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, DiffusionModule)
        self._val_batches = self._make_val_batches(trainer.global_rank, trainer.world_size)
        # Taken from Lightning, which would end the run in the middle of an accumulated step.
        self.stop.listen()
        self.pace, self._saved_at = Pace(), time.monotonic()
        if self.outputs:
            self.outputs.display.start(module.step, module.max_steps)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen:  # a micro-batch whose step is not complete
            return
        self._seen = trainer.global_step
        assert isinstance(module, DiffusionModule)
        module.finish_step()
        step, last = module.step, module.step == module.max_steps
        if self.outputs:
            self.outputs.display.advance(step)
        validate = last or step % self.config.val_every == 0
        if validate or step == 1 or step % self.config.log_every == 0:
            self._report(trainer, module, validate)
        stopping = self._agree(trainer, self.stop.signal is not None)
        if stopping or last or step % self.config.checkpoint_every == 0 or self._minutes_passed(trainer):
            self._save(trainer, module, ending=stopping or last)
        trainer.should_stop |= stopping

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, DiffusionModule)
        self.stop.restore()
        if module.step == module.max_steps and self.outputs and self.outputs.preview:
            write_samples(self.saver.directory, self.outputs.preview(module.evaluated, FINAL_SAMPLES))

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        # Before Lightning gives back the handlers that it found: ours were put over its own.
        self.stop.restore()

    def end(self) -> None:
        """Gives terminal and table back, however the run ended."""
        if self.outputs:
            self.outputs.display.stop()
            self.outputs.metrics.close()

    def _report(self, trainer: L.Trainer, module: DiffusionModule, validate: bool) -> None:
        """Ends the meter's interval: one row of metrics, with the validation bound where it is due."""
        self._check_loss(trainer, module)
        nats, tokens = trainer.strategy.reduce(module.meter.sums_2.clone(), reduce_op="sum").tolist()
        module.meter.reset()
        train_column = "train/nelbo" if module.noise.is_bound else "train/loss"
        row = {"step": module.step, train_column: nats / max(tokens, 1), "lr": module.learning_rate}
        row["tokens_per_second"] = self.pace.lap(round(tokens))
        began = time.perf_counter()
        if validate:
            bound = self._validate(trainer, module)
            row |= {"val/nelbo": bound.nelbo, "val/nelbo_se": bound.standard_error}
            row["val/bits_per_byte"] = bound.bits_per_byte(self.bytes_per_token)
        self._write(trainer, module, row)
        self.pace.skip(time.perf_counter() - began)

    def _write(self, trainer: L.Trainer, module: DiffusionModule, row: Row) -> None:
        if self.outputs:
            self.outputs.metrics.append(row)
            self.outputs.display.show(row)
            if self.outputs.preview and self.config.preview and "val/nelbo" in row:
                self.outputs.display.preview(module.step, self.outputs.preview(module.evaluated, 1)[0])
        for logger in trainer.loggers:
            logger.log_metrics({name: value for name, value in row.items() if name != "step"}, step=module.step)

    def _validate(self, trainer: L.Trainer, module: DiffusionModule) -> Bound:
        """The bound of the averaged weights over the fixed subset, summed over all processes."""
        with trainer.precision_plugin.val_step_context():
            sums_3 = validation_sums(
                module.evaluated,
                self._val_batches,
                block_size=self.block_size,
                views=self.config.val_views,
                device=module.device,
            )
        return Bound.from_sums(trainer.strategy.reduce(sums_3, reduce_op="sum"))

    def _save(self, trainer: L.Trainer, module: DiffusionModule, ending: bool) -> None:
        began = time.perf_counter()
        self._check_loss(trainer, module)
        self._check_weights(trainer, module)
        if self.outputs:
            self.outputs.metrics.force()
        warning = self.saver.save(trainer, module.step, ending)
        if warning and self.outputs:
            self.outputs.display.note(warning)
        self._saved_at = time.monotonic()
        self.pace.skip(time.perf_counter() - began)

    def _minutes_passed(self, trainer: L.Trainer) -> bool:
        minutes = self.config.checkpoint_every_minutes
        return bool(minutes) and self._agree(trainer, time.monotonic() - self._saved_at >= 60 * minutes)

    def _agree(self, trainer: L.Trainer, flag: bool) -> bool:
        """Whether any process says so: all must take the same way."""
        return trainer.strategy.reduce_boolean_decision(flag, all=False)

    def _check_loss(self, trainer: L.Trainer, module: DiffusionModule) -> None:
        found = module.meter.non_finite()
        if self._agree(trainer, found is not None):
            where = (
                f"the loss of step {found.step + 1} is not finite; samples {found.samples} of the training set"
                if found
                else f"the loss of another process is not finite at or before step {module.step}"
            )
            self._fail(where)

    def _check_weights(self, trainer: L.Trainer, module: DiffusionModule) -> None:
        finite = torch.stack([torch.isfinite(weight).all() for weight in module.denoiser.parameters()]).all()
        if self._agree(trainer, not bool(finite)):
            self._fail(f"the weights after step {module.step} are not finite, though the loss before was")

    def _fail(self, what: str) -> None:
        raise NonFiniteError(
            f"{what}. Nothing was overwritten: {describe_last_good(self.saver.last_good)}. Lower optimizer.lr, "
            "lengthen optimizer.warmup_steps or lower optimizer.grad_clip, under another name=..."
        )
