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
from blockdiff.training.agreement import Agreement
from blockdiff.training.config import Strategy, TrainerConfig
from blockdiff.training.display import Display
from blockdiff.training.ema import local_part
from blockdiff.training.errors import NonFiniteError
from blockdiff.training.metrics import MetricsTable, Row
from blockdiff.training.module import DiffusionModule
from blockdiff.training.report import write_samples
from blockdiff.training.saving import Saver, describe_last_good
from blockdiff.training.signals import StopRequest
from blockdiff.training.utilisation import Utilisation
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
    """

    metrics: MetricsTable
    display: Display


@dataclass
class Pace:
    """Tokens and seconds of training proper: validation, previews and saving stop the clock.

    A launch's first step is left out: what is compiled, measured and allocated in it happens once.
    """

    tokens: int = 0
    seconds: float = 0.0
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, tokens: int) -> float:
        """Counts tokens since the last lap; returns the seconds of this lap."""
        seconds = max(time.perf_counter() - self._since, 1e-9)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self._since += seconds
        return seconds

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
        utilisation: Utilisation,
        outputs: Outputs | None,
        preview: Preview | None,
    ) -> None:
        """Args: rhythm, saver, S, bytes a validation token stands for, (rank, processes) -> batches, MFU, outputs,
        preview.

        Where the weights are split, all processes must draw a preview together; elsewhere the first does it alone.
        """
        self.config, self.saver, self.outputs = config, saver, outputs
        self.block_size, self.bytes_per_token = block_size, bytes_per_token
        self._make_val_batches, self._utilisation = val_batches, utilisation
        self._preview = preview if outputs or config.strategy is Strategy.fsdp else None
        self.stop = StopRequest()
        self.pace = Pace()
        self._val_batches: Iterable[Batch] = ()
        self._seen, self._reported, self._saved_at = 0, 0, time.monotonic()
        self._unclocked_tokens = 0.0

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        assert isinstance(module, DiffusionModule)
        self._agreement = Agreement(self.config.timeout_seconds)
        if not self._agreement.same(module.start_step):
            raise ValueError(
                f"processes see different checkpoints in {self.saver.directory}, this one that of step "
                f"{module.start_step}: run_root must lie on a file system that all machines share"
            )

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, DiffusionModule)
        self._val_batches = self._make_val_batches(trainer.global_rank, trainer.world_size)
        # Taken from Lightning, which would end the run in the middle of an accumulated step.
        self.stop.listen()
        unknown = self._utilisation.begin(trainer)
        if self.outputs:
            self.outputs.display.start(module.step, module.max_steps)
            if unknown:
                self.outputs.display.note(unknown)
        self._saved_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen:  # a micro-batch whose step is not complete
            return
        self._seen = trainer.global_step
        assert isinstance(module, DiffusionModule)
        module.finish_step()
        step, last = module.step, module.step == module.max_steps
        if self._seen == 1:
            self._start_clock(trainer, module)
        if self.outputs:
            self.outputs.display.advance(step)
        validate = last or step % self.config.val_every == 0
        if validate or step == 1 or step % self.config.log_every == 0:
            self._report(trainer, module, validate)
        self.stop.agree(self._agreement)
        stopping = self.stop.signal is not None
        if stopping or last or step % self.config.checkpoint_every == 0 or self._minutes_passed():
            self._save(trainer, module, ending=stopping or last)
        trainer.should_stop |= stopping

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, DiffusionModule)
        self.stop.restore()
        if module.step == module.max_steps and self._preview:
            samples = self._preview(module.evaluated, FINAL_SAMPLES)
            if self.outputs:
                write_samples(self.saver.directory, samples)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        # Before Lightning gives back the handlers that it found: ours were put over its own.
        self.stop.restore()

    def end(self) -> None:
        """Gives terminal and table back, however the run ended."""
        if self.outputs:
            self.outputs.display.stop()
            self.outputs.metrics.close()

    def _start_clock(self, trainer: L.Trainer, module: DiffusionModule) -> None:
        """Follows the first step of a launch. The next row holds its loss, and after a resume that of steps before."""
        _, self._unclocked_tokens = self._sums(trainer, module)
        self._reported = self._seen
        self.pace = Pace()

    def _sums(self, trainer: L.Trainer, module: DiffusionModule) -> tuple[float, float]:
        """Nats and tokens since the last row, over all processes."""
        nats, tokens = trainer.strategy.reduce(module.meter.sums_2.clone(), reduce_op="sum").tolist()
        return nats, tokens

    def _report(self, trainer: L.Trainer, module: DiffusionModule, validate: bool) -> None:
        """Ends the meter's interval: one row of metrics, with the validation bound where it is due."""
        self._check_loss(module)
        nats, tokens = self._sums(trainer, module)
        module.meter.reset()
        train_column = "train/nelbo" if module.noise.is_bound else "train/loss"
        row = {"step": module.step, train_column: nats / max(tokens, 1), "lr": module.learning_rate}
        row |= self._speed(tokens)
        began = time.perf_counter()
        if validate:
            bound = self._validate(trainer, module)
            row |= {"val/nelbo": bound.nelbo, "val/nelbo_se": bound.standard_error}
            row["val/bits_per_byte"] = bound.bits_per_byte(self.bytes_per_token)
        self._write(trainer, module, row)
        self.pace.skip(time.perf_counter() - began)

    def _speed(self, tokens: float) -> Row:
        """Tokens a second and MFU of the steps since the last row; nothing where the first step was the only one."""
        steps, self._reported = self._seen - self._reported, self._seen
        clocked, self._unclocked_tokens = tokens - self._unclocked_tokens, 0.0
        if not steps:
            return {}
        seconds = self.pace.lap(round(clocked))
        mfu = self._utilisation.of(steps, seconds)
        return {"tokens_per_second": clocked / seconds} | ({} if mfu is None else {"mfu": mfu})

    def _write(self, trainer: L.Trainer, module: DiffusionModule, row: Row) -> None:
        if self.outputs:
            self.outputs.metrics.append(row)
            self.outputs.display.show(row)
        if self._preview and self.config.preview and "val/nelbo" in row:
            (sample,) = self._preview(module.evaluated, 1)
            if self.outputs:
                self.outputs.display.preview(module.step, sample)
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
        self._check_loss(module)
        self._check_weights(module)
        warning = self.saver.save(trainer, module.step, ending, self._force_metrics)
        if warning and self.outputs:
            self.outputs.display.note(warning)
        self._saved_at = time.monotonic()
        self.pace.skip(time.perf_counter() - began)

    def _force_metrics(self) -> None:
        if self.outputs:
            self.outputs.metrics.force()

    def _minutes_passed(self) -> bool:
        minutes = self.config.checkpoint_every_minutes
        return bool(minutes) and self._agreement.any(time.monotonic() - self._saved_at >= 60 * minutes)

    def _check_loss(self, module: DiffusionModule) -> None:
        found = module.meter.non_finite()
        if self._agreement.any(found is not None):
            where = (
                f"the loss of step {found.step + 1} is not finite; samples {found.samples} of the training set"
                if found
                else f"the loss of another process is not finite at or before step {module.step}"
            )
            self._fail(where)

    def _check_weights(self, module: DiffusionModule) -> None:
        finite = torch.stack(
            [torch.isfinite(local_part(weight)).all() for weight in module.denoiser.parameters()]
        ).all()
        if self._agreement.any(not bool(finite)):
            self._fail(f"the weights after step {module.step} are not finite, though the loss before was")

    def _fail(self, what: str) -> None:
        raise NonFiniteError(
            f"{what}. Nothing was overwritten: {describe_last_good(self.saver.last_good)}. Lower optimizer.lr, "
            "lengthen optimizer.warmup_steps or lower optimizer.grad_clip, under another name=..."
        )
