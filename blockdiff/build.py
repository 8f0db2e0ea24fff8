"""Assembly: from a config to a trained run directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch.utils.data import DataLoader

from blockdiff.core.blocks import check_block_size
from blockdiff.core.randomness import Stream, hash_int
from blockdiff.data.loader import Batch, accumulation_of, train_loader, val_loader
from blockdiff.data.packing import PackedDataset
from blockdiff.data.prepare import PreparedData, prepare
from blockdiff.data.tokenizer import Tokenizer
from blockdiff.model.compilation import compile_layers
from blockdiff.model.compute import training_flops, training_products
from blockdiff.model.denoiser import Denoiser
from blockdiff.records import dump_yaml, from_plain, read_yaml, to_plain
from blockdiff.training.agreement import is_lost_process
from blockdiff.training.border import Outputs, Preview, StepBorder
from blockdiff.training.checkpoints import Newest, sweep
from blockdiff.training.config import OptimizerName, Strategy
from blockdiff.training.display import Display
from blockdiff.training.durable import refused, write_text_durably
from blockdiff.training.errors import ProcessLostError
from blockdiff.training.lock import RunLock, one_at_a_time
from blockdiff.training.loggers import build_loggers
from blockdiff.training.metrics import MetricsTable
from blockdiff.training.module import DiffusionModule
from blockdiff.training.optimizer import same_history
from blockdiff.training.orphan import announce_launcher, end_with_launcher
from blockdiff.training.report import Summary, summarise, summary_table, write_plot
from blockdiff.training.run_directory import (
    CONFIG_NAME,
    check_same_data,
    check_same_run,
    choose_checkpoint,
)
from blockdiff.training.saving import DurableCheckpointIO, Saver, describe_last_good
from blockdiff.training.trainer import (
    build_trainer,
    is_first_process,
    resolve_compile,
    resolve_precision,
    was_launched_by_another,
)
from blockdiff.training.utilisation import Utilisation

if TYPE_CHECKING:
    from blockdiff.config import TrainConfig


@dataclass
class Run:
    """A launch before its first step.

    Attributes:
        config: of the launch.
        directory: of the run.
        start: the checkpoint that it goes on from.
        prepared: the tokenised corpus.
        first: whether this process is the one that writes.
        console: where it prints.
        preview: draws samples, or None.
    """

    config: TrainConfig
    directory: Path
    start: Newest
    prepared: PreparedData
    first: bool
    console: Console
    preview: Preview | None

    @property
    def steps_left(self) -> int:
        return self.config.trainer.max_steps - self.start.step

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def run_training(
    config: TrainConfig,
    *,
    make_preview: Callable[[Tokenizer], Preview] | None = None,
    console: Console | None = None,
) -> Summary:
    """Trains a run to its last step, or until a signal stops it, going on from its newest valid checkpoint.

    Args:
        config: the whole config.
        make_preview: gives the function that draws samples with the run's tokenizer; None shows none.
        console: where progress is printed.

    Raises:
        ValueError: bad config, data or run directory; nothing was changed.
        NonFiniteError: the loss is not finite.
        CheckpointWriteError: a checkpoint could not be written.
    """
    check(config)
    directory = Path(config.run_root) / (config.name or default_name(config))
    first = is_first_process()
    if was_launched_by_another():
        end_with_launcher()
    else:
        announce_launcher()
    with RunLock(directory) if first else nullcontext():
        start = choose_checkpoint(directory, config.resume)
        changes = _check_same_run(config, start)
        prepared = _prepare_once(config)
        if start.path:
            check_same_data(start.path, prepared.directory.name)
        preview = make_preview(prepared.tokenizer) if make_preview else None
        run = Run(config, directory, start, prepared, first, console or Console(), preview)
        if first:
            _furnish(run)
            _announce(run, changes)
        return _train(run)


def check(config: TrainConfig) -> None:
    """Raises a ValueError for values that cannot work, before anything is read or written."""
    check_block_size(config.block_size, config.seq_len)
    if config.name is not None and (Path(config.name).name != config.name or config.name.startswith(".")):
        raise ValueError(f"name={config.name} must be a plain directory name, such as name=demo")
    for part in (config.model, config.noise, config.optimizer, config.trainer, config.logger):
        part.check()
    if config.trainer.strategy is Strategy.fsdp and config.optimizer.name is OptimizerName.muon:
        raise ValueError("optimizer.name=muon needs whole matrices: not with trainer.strategy=fsdp; use ddp, or adamw")
    accumulation_of(config.data.global_batch_size, config.data.micro_batch_size, 1)
    if config.trainer.compile:
        resolve_compile(config.trainer)


def default_name(config: TrainConfig) -> str:
    """`<data>-b<block_size>`; prepares the corpus to know what it is called."""
    data, _, _ = _prepare_once(config).directory.name.rpartition("-")
    return f"{data}-b{config.block_size}"


def _prepare_once(config: TrainConfig) -> PreparedData:
    """The first process to come tokenises the corpus, which may take hours, and the others find it done."""
    with one_at_a_time(Path(config.data.root).expanduser()):
        return prepare(config.data)


def build_denoiser(config: TrainConfig, vocab_size: int) -> Denoiser:
    """The untrained denoiser: a function of the config's seed, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash_int(config.seed, Stream.WEIGHTS))
        return Denoiser(config.model, vocab_size)


def pack(run_config: TrainConfig, prepared: PreparedData, split: str) -> PackedDataset:
    """The windows of ``train`` or ``val``."""
    training = split == "train"
    return PackedDataset(
        prepared.train if training else prepared.val,
        seq_len=run_config.seq_len,
        block_size=run_config.block_size,
        eos_id=prepared.tokenizer.eos_id,
        document_mask=run_config.data.document_mask,
        max_samples=run_config.data.max_train_samples if training else None,
    )


def _check_same_run(config: TrainConfig, start: Newest) -> list[str]:
    """The harmless changes since the last launch; raises a ValueError for others."""
    if start.path is None:
        return []
    old = from_plain(type(config), read_yaml(start.path.parent / CONFIG_NAME))
    same = same_history(start.step, config.optimizer, old.trainer.max_steps, config.trainer.max_steps)
    return check_same_run(start.path.parent, to_plain(old), to_plain(config), same)


def _train(run: Run) -> Summary:
    """Fits, and writes what is left to write."""
    sharded = run.config.trainer.strategy is Strategy.fsdp
    io = DurableCheckpointIO({"data": run.prepared.directory.name}, sharded=sharded)
    saver = Saver(run.directory, run.config.trainer, io, run.start.path)
    # Datasets that are too small are refused before the Trainer starts processes.
    train_windows, val_windows = (
        pack(run.config, run.prepared, "train"),
        pack(run.config, run.prepared, "val"),
    )
    step, signal, speed = run.start.step, None, None
    if run.steps_left > 0:
        border = _border(run, saver, val_windows)
        try:
            step = _fit(run, border, io, train_windows)
        finally:
            border.end()
        signal = border.stop.signal
        speed = border.pace.tokens / border.pace.seconds if border.pace.seconds else None
    return _finish(run, saver, step, signal, speed)


def _border(run: Run, saver: Saver, val_windows: PackedDataset) -> StepBorder:
    config = run.config
    outputs = None
    if run.first:
        metrics = MetricsTable(run.directory, is_bound=config.noise.is_bound, start_step=run.start.step)
        outputs = Outputs(metrics, Display(run.console, metrics.train_column))

    def val_batches(rank: int, processes: int) -> DataLoader[Batch]:
        return val_loader(
            val_windows,
            micro_batch_size=config.data.micro_batch_size,
            rank=rank,
            world_size=processes,
            max_samples=config.trainer.val_samples,
        )

    return StepBorder(
        config.trainer,
        saver,
        block_size=config.block_size,
        bytes_per_token=run.prepared.manifest["bytes_per_token"],
        val_batches=val_batches,
        utilisation=_utilisation(config, run.prepared.tokenizer.vocab_size),
        outputs=outputs,
        preview=run.preview,
    )


def _utilisation(config: TrainConfig, vocab_size: int) -> Utilisation:
    window = (config.model, vocab_size, config.seq_len, config.block_size, config.noise)
    return Utilisation(
        config.trainer,
        training_products(*window),
        config.data.global_batch_size * training_flops(*window),
        config.data.micro_batch_size,
    )


def _fit(run: Run, border: StepBorder, io: DurableCheckpointIO, windows: PackedDataset) -> int:
    """Takes the steps that are left; returns the finished ones."""
    config = run.config
    trainer = build_trainer(
        config.trainer,
        steps=run.steps_left,
        grad_clip=config.optimizer.grad_clip,
        callbacks=[border],
        loggers=build_loggers(config.logger, run.directory, run.start.step),
        checkpoint_io=io,
        directory=str(run.directory),
    )
    sizes = config.data.global_batch_size, config.data.micro_batch_size
    trainer.accumulate_grad_batches = accumulation_of(*sizes, trainer.world_size)
    loader = train_loader(
        windows,
        seed=config.seed,
        global_batch_size=sizes[0],
        micro_batch_size=sizes[1],
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        start_step=run.start.step,
        max_steps=config.trainer.max_steps,
        workers=config.data.workers,
        pin_memory=trainer.strategy.root_device.type == "cuda",
    )
    module = _module(run)
    try:
        trainer.fit(module, train_dataloaders=loader, ckpt_path=run.start.path)
    except RuntimeError as error:
        if trainer.world_size > 1 and is_lost_process(error):
            raise _lost_process(error, border.saver.last_good, config.trainer.timeout_seconds) from error
        raise
    return module.step


def _lost_process(error: RuntimeError, last_good: Path | None, timeout_seconds: float) -> ProcessLostError:
    return ProcessLostError(
        f"another process of this run has ended, or did not answer within trainer.timeout_seconds={timeout_seconds:g} "
        f"({str(error).splitlines()[0]}). If it could, it has said why; {describe_last_good(last_good)}. Give the same "
        "command again to go on"
    )


def _module(run: Run) -> DiffusionModule:
    config = run.config
    denoiser = build_denoiser(config, run.prepared.tokenizer.vocab_size)
    module = DiffusionModule(
        denoiser,
        noise=config.noise,
        optimizer=config.optimizer,
        block_size=config.block_size,
        seed=config.seed,
        global_batch_size=config.data.global_batch_size,
        max_steps=config.trainer.max_steps,
        start_step=run.start.step,
    )
    if resolve_precision(config.trainer) == "64-true":
        # Lightning loads a checkpoint before it converts the network: single precision would round the weights.
        module.double()
    compilation = resolve_compile(config.trainer)
    if compilation.on:
        torch.compiler.reset()  # what former runs of this process compiled counts against the compiler's limit
        compile_layers(denoiser)
    if compilation.note and run.first:
        run.say(compilation.note)
    return module


def _finish(run: Run, saver: Saver, step: int, signal: Signals | None, speed: float | None) -> Summary:
    unigram_nats = run.prepared.manifest["unigram_nats"]
    if run.first:
        write_plot(run.directory, unigram_nats, run.config.block_size)
    summary = summarise(
        run.directory,
        step=step,
        max_steps=run.config.trainer.max_steps,
        # The exit code of one process speaks for all; launchers would take those of others for failures.
        signal=signal if run.first else None,
        unigram_nats=unigram_nats,
        tokens_per_second=speed,
        checkpoint=saver.last_good,
    )
    if run.first:
        run.console.print(summary_table(summary))
        if not summary.finished:
            run.console.print(f"Give the same command again to go on from {saver.last_good}.", soft_wrap=True)
    return summary


def _furnish(run: Run) -> None:
    """Puts config and tokenizer into the run directory, and removes what a killed process left half-written."""
    try:
        sweep(run.directory)
        write_text_durably(run.directory / CONFIG_NAME, dump_yaml(run.config))
        write_text_durably(run.directory / "tokenizer.json", run.prepared.tokenizer.to_json())
    except OSError as error:
        raise refused(run.directory, error) from error


def _announce(run: Run, changes: list[str]) -> None:
    for reason in run.start.broken:
        run.say(f"passed over: {reason}")
    if run.start.path is None:
        run.say(f"{run.directory}: a new run of {run.config.trainer.max_steps} steps")
    elif run.steps_left > 0:
        run.say(f"{run.directory}: going on from {run.start.path.name}, {run.steps_left} steps are left")
    else:
        run.say(f"{run.directory}: all {run.config.trainer.max_steps} steps are done")
    if changes:
        run.say("changed since the last launch:\n" + "\n".join(changes))
