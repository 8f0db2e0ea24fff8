"""Whole runs: what they leave, what they show, how they end."""

from __future__ import annotations

import functools
import io
import math
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from miniature import RunConfig, final_checkpoint, run
from rich.console import Console

from blockdiff.build import build_denoiser, pack, run_training
from blockdiff.core.bound import Bound, bound_sums
from blockdiff.core.corruption import CorruptionKind
from blockdiff.data.loader import ValBatches
from blockdiff.data.prepare import prepare
from blockdiff.model.compilation import compiler_fault
from blockdiff.model.denoiser import Denoiser
from blockdiff.model.scoring import score_blocks
from blockdiff.training.checkpoints import list_checkpoints, read_weights, step_of
from blockdiff.training.config import LoggerName, OnCheckpointError, OptimizerName, Strategy, TrainerConfig
from blockdiff.training.display import Display
from blockdiff.training.errors import CheckpointWriteError, NonFiniteError
from blockdiff.training.metrics import read_rows
from blockdiff.training.trainer import resolve_compile, resolve_precision

Make = Callable[..., RunConfig]


def two_samples(denoiser: Denoiser, count: int) -> list[str]:
    return [f"sample [bold]{number}[/bold] of {type(denoiser).__name__}" for number in range(count)]


def test_a_run_leaves_its_files_and_its_figures(make_config: Make) -> None:
    printed = io.StringIO()
    summary = run(make_config(), two_samples, printed)
    names = {path.name for path in summary.directory.iterdir()}
    assert names == {
        "config.yaml", "loss.png", "metrics.csv", "run.lock", "samples.txt", "tokenizer.json",
        "step-00000004.ckpt", "step-00000004.ckpt.json", "step-00000006.ckpt", "step-00000006.ckpt.json",
    }  # fmt: skip
    rows = read_rows(summary.directory)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6]
    assert [row["step"] for row in rows if "val/nelbo" in row] == [3, 6]
    assert rows[-1]["val/bits_per_byte"] == pytest.approx(rows[-1]["val/nelbo"] / math.log(2), rel=0.02)
    assert summary.finished
    assert summary.exit_code == 0
    assert summary.tokens_per_second is not None
    assert summary.tokens_per_second > 0
    assert (summary.directory / "samples.txt").read_text(encoding="utf-8").count("=== sample") == 4
    assert matplotlib.image.imread(summary.directory / "loss.png").shape[2] == 4
    text = printed.getvalue()
    for shown in (
        "sample [bold]0[/bold] of Denoiser",
        f"{summary.val_nelbo:.4f} ± {summary.val_nelbo_se:.4f}",
        f"{summary.unigram_nats:.4f}",
        "peak memory",
        str(summary.checkpoint),
    ):
        assert shown in text


@pytest.mark.parametrize("block_size", [1, 4])
def test_validation_is_the_averaged_weights_bound_over_the_subset(make_config: Make, block_size: int) -> None:
    """Row by row and view by view with the weights read back from the checkpoint."""
    config = make_config(block_size=block_size, trainer__val_samples=5, optimizer__ema_decay=0.5)
    summary = run(config)
    prepared = prepare(config.data)
    denoiser = build_denoiser(config, prepared.tokenizer.vocab_size)
    assert summary.checkpoint is not None
    weights, step = read_weights(summary.checkpoint)
    assert step == 6
    denoiser.load_state_dict(weights)
    batches = ValBatches(pack(config, prepared, "val"), micro_batch_size=1, max_samples=5)
    total, samples = Bound(), []
    for number in range(len(batches)):
        batch = batches[number]
        samples += batch.sample_B.tolist()
        nats = score_blocks(
            denoiser, batch.tokens_BL, batch.document_BL, batch.counted_BL, batch.sample_B,
            block_size=block_size, views=2,
        )  # fmt: skip
        total = total.merge(Bound.from_sums(bound_sums(nats, batch.counted_BL)))
    assert len(set(samples)) == 5
    assert summary.val_nelbo == pytest.approx(total.nelbo, rel=1e-6)
    assert summary.val_nelbo_se == pytest.approx(total.standard_error, rel=1e-5)
    assert (summary.val_nelbo_se == 0) == (block_size == 1)
    raw, _ = read_weights(summary.checkpoint, "raw")
    assert not torch.equal(raw["embedding.weight"], weights["embedding.weight"])


def test_one_batch_is_learned_by_heart(make_config: Make) -> None:
    """At block size 1 the loss is exact, so it must come close to nothing."""
    config = make_config(
        block_size=1,
        model__width=32,
        model__layers=1,
        data__max_train_samples=4,
        optimizer__lr=0.03,
        optimizer__weight_decay=0.0,
        trainer__max_steps=120,
        trainer__val_every=120,
        trainer__checkpoint_every=120,
    )
    rows = read_rows(run(config).directory)
    assert rows[0]["train/nelbo"] > 5
    assert rows[-1]["train/nelbo"] < 0.15


def test_layers_are_compiled_where_they_can_be_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: dict[str, str | None] = {"cpu": None, "cuda": None, "mps": "not tried"}
    monkeypatch.setattr("blockdiff.training.trainer.compiler_fault", faults.get)
    for on_cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=on_cuda: found)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda found=on_cuda: found)
        assert resolve_compile(TrainerConfig()).on
        assert resolve_compile(TrainerConfig(accelerator="cpu")).on
        assert not resolve_compile(TrainerConfig(accelerator="mps")).on
        assert resolve_compile(TrainerConfig(compile=False)) == (False, "")
    faults["cuda"] = "Triton is not installed"
    assert not resolve_compile(TrainerConfig()).on
    assert "Triton is not installed" in resolve_compile(TrainerConfig()).note
    with pytest.raises(ValueError, match=r"trainer.compile=true needs a compiler: Triton is not installed"):
        resolve_compile(TrainerConfig(compile=True))


def test_without_a_compiler_a_run_says_so_and_goes_on(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, str(tmp_path / "no-compiler")))
    compiler_fault.cache_clear()
    printed = io.StringIO()
    try:
        assert run(make_config(trainer__max_steps=2, trainer__compile=None), printed=printed).finished
        assert "the layers are not compiled, so steps take longer: InvalidCxxCompiler" in printed.getvalue()
        with pytest.raises(ValueError, match=r"trainer.compile=true needs a compiler"):
            run(make_config(name="insisting", trainer__compile=True))
        assert not (tmp_path / "checkpoints" / "insisting").exists()
    finally:
        compiler_fault.cache_clear()


def test_layers_can_be_compiled(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured as graphs; generating code for them would take a CPU minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    config = make_config(trainer__max_steps=2, trainer__compile=True)
    plain = run(make_config(name="plain", trainer__max_steps=2))
    compiled = run(config)
    assert list(final_checkpoint(compiled)["state_dict"]) == list(final_checkpoint(plain)["state_dict"])
    assert compiled.train == pytest.approx(plain.train, rel=1e-4)


def test_many_runs_of_a_process_are_compiled(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `-m seq_len=…`: more shapes than the compiler takes of one function."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for number in range(torch._dynamo.config.recompile_limit + 1):
        config = make_config(name=f"run-{number}", seq_len=16 + 4 * number, trainer__max_steps=1)
        config.trainer.compile = True
        assert run(config).finished


def test_clipped_noise_has_no_bound_in_training(make_config: Make) -> None:
    printed = io.StringIO()
    config = make_config(noise__corruption=CorruptionKind.bernoulli, noise__clip=[0.3, 0.8])
    summary = run(config, printed=printed)
    assert not summary.train_is_bound
    assert "no bound" in printed.getvalue()
    assert not any("train/nelbo" in row for row in read_rows(summary.directory))
    assert summary.val_nelbo is not None


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses larger files, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_the_run_and_harms_nothing(make_config: Make) -> None:
    def fill(denoiser: Denoiser, count: int) -> list[str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return [""] * count

    config = make_config(trainer__max_steps=8)
    with files_of_at_most(10**9), pytest.raises(CheckpointWriteError, match=r"step 4 could .*step-00000002\.ckpt"):
        run(config, fill)
    directory = Path(config.run_root) / config.name
    assert [step_of(path) for path in list_checkpoints(directory)] == [2]
    assert run(config).step == 8


def test_a_full_disk_may_be_waited_out(make_config: Make) -> None:
    limits = [100_000, 10**9, 10**9, 10**9]

    def fill(denoiser: Denoiser, count: int) -> list[str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.pop(0), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return [""] * count

    printed = io.StringIO()
    config = make_config(trainer__max_steps=8, trainer__on_checkpoint_error=OnCheckpointError["continue"])
    with files_of_at_most(10**9):
        summary = run(config, fill, printed)
    assert "step 4 could not be written" in printed.getvalue()
    assert summary.finished
    assert [step_of(path) for path in list_checkpoints(summary.directory)] == [6, 8]


def test_a_last_checkpoint_that_fails_is_an_error_in_any_case(make_config: Make) -> None:
    def fill(denoiser: Denoiser, count: int) -> list[str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return [""] * count

    config = make_config(trainer__max_steps=3, trainer__on_checkpoint_error=OnCheckpointError["continue"])
    with files_of_at_most(10**9), pytest.raises(CheckpointWriteError, match="step 3 could not be written"):
        run(config, fill)


def test_a_loss_that_is_not_finite_stops_with_its_samples(make_config: Make) -> None:
    def poison(denoiser: Denoiser, count: int) -> list[str]:
        """After step 3: the average is what is previewed, so the network itself is found by its module."""
        for weight in MODULES[-1].denoiser.parameters():
            weight.data.fill_(math.nan)
        return [""] * count

    config = make_config(trainer__max_steps=8, trainer__log_every=1)
    with captured_modules(), pytest.raises(NonFiniteError, match=r"loss of step 4 .*samples \[\d+, \d+\].*00000002"):
        run(config, poison)
    directory = Path(config.run_root) / config.name
    assert [step_of(path) for path in list_checkpoints(directory)] == [2]
    assert run(config).step == 8


def test_weights_that_are_not_finite_are_not_saved(make_config: Make) -> None:
    def poison(denoiser: Denoiser, count: int) -> list[str]:
        next(MODULES[-1].denoiser.parameters()).data[0, 0] = math.inf
        return [""] * count

    config = make_config(trainer__max_steps=8, trainer__checkpoint_every=3)
    with captured_modules(), pytest.raises(NonFiniteError, match="weights after step 3"):
        run(config, poison)
    assert not list_checkpoints(Path(config.run_root) / config.name)


MODULES: list[Any] = []


@contextmanager
def captured_modules() -> Iterator[None]:
    from blockdiff import build

    original = build.DiffusionModule

    def capture(*arguments: Any, **named: Any) -> Any:
        MODULES.append(original(*arguments, **named))
        return MODULES[-1]

    build.DiffusionModule = capture  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        build.DiffusionModule = original  # type: ignore[misc]
        MODULES.clear()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_saves_at_the_border_and_has_its_code(make_config: Make, number: signal.Signals, code: int) -> None:
    def interrupt(denoiser: Denoiser, count: int) -> list[str]:
        os.kill(os.getpid(), number)
        return [""] * count

    before = signal.getsignal(number)
    printed = io.StringIO()
    config = make_config(trainer__max_steps=8, trainer__checkpoint_every=5, data__micro_batch_size=1)
    summary = run(config, interrupt, printed)
    assert (summary.step, summary.signal, summary.exit_code) == (3, number, code)
    assert summary.checkpoint is not None
    assert step_of(summary.checkpoint) == 3
    assert "Give the same command again" in printed.getvalue()
    assert signal.getsignal(number) == before
    assert run(config).exit_code == 0


def test_old_checkpoints_go_and_milestones_stay(make_config: Make) -> None:
    changes = {"trainer__keep_last": 1, "trainer__keep_every": 3, "trainer__checkpoint_every": 1}
    summary = run(make_config(trainer__max_steps=8, **changes))
    assert [step_of(path) for path in list_checkpoints(summary.directory)] == [3, 6, 8]


def test_checkpoints_by_the_clock(make_config: Make) -> None:
    changes = {"trainer__checkpoint_every": 100, "trainer__checkpoint_every_minutes": 1e-9, "trainer__keep_last": 9}
    summary = run(make_config(trainer__max_steps=3, **changes))
    assert [step_of(path) for path in list_checkpoints(summary.directory)] == [1, 2, 3]


@pytest.mark.parametrize("name", [LoggerName.tensorboard, LoggerName.wandb])
def test_other_loggers_get_the_same_figures(
    make_config: Make, name: LoggerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    summary = run(make_config(trainer__max_steps=2, logger__name=name, logger__offline=True))
    if name is LoggerName.wandb:
        assert list((summary.directory / "wandb").glob("offline-run-*"))
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(summary.directory / "tensorboard")).Reload()
    logged = [(event.step, event.value) for event in events.Scalars("train/nelbo")]
    rows = read_rows(summary.directory)
    assert logged == [(row["step"], pytest.approx(row["train/nelbo"])) for row in rows]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 5}, "block_size=5 must divide seq_len=32; nearest: 4, 8"),
        ({"name": "a/b"}, "name=a/b must be a plain directory name"),
        ({"trainer__precision": "bf16"}, "trainer.precision=bf16 must be one of"),
        ({"trainer__val_views": 1}, "trainer.val_views=1 must be at least 2"),
        ({"trainer__devices": "two"}, "trainer.devices=two must be a number"),
        ({"trainer__peak_tflops": 0.0}, "trainer.peak_tflops=0.0 must be positive, or null"),
        ({"trainer__timeout_seconds": 0}, "trainer.timeout_seconds=0 must be positive"),
        ({"trainer__strategy": Strategy.fsdp, "trainer__precision": "64-true"}, "does not go with"),
        ({"trainer__strategy": Strategy.fsdp, "optimizer__name": OptimizerName.muon}, "muon needs whole matrices"),
        ({"data__micro_batch_size": 3}, "must be a multiple of data.micro_batch_size"),
        ({"data__global_batch_size": 4000, "data__micro_batch_size": 4}, "fewer than data.global_batch_size=4000"),
    ],
)
def test_bad_values_are_refused_before_any_work(make_config: Make, changes: dict[str, Any], message: str) -> None:
    config = make_config(**changes)
    with pytest.raises(ValueError, match=message):
        run(config)
    assert not list(Path(config.run_root).rglob("*.ckpt"))


def test_a_run_without_a_name_is_named_by_data_and_block_size(make_config: Make) -> None:
    assert run(make_config(name=None, trainer__max_steps=1)).directory.name == "text-b4"


def test_precision_is_single_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_precision(TrainerConfig()) == "32-true"
    assert resolve_precision(replace(TrainerConfig(), precision="64-true")) == "64-true"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert resolve_precision(TrainerConfig()) == "bf16-mixed"
    assert resolve_precision(TrainerConfig(accelerator="cpu")) == "32-true"


def test_terminal_display_shows_loss_bound_speed_and_time() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, width=140), "train/nelbo")
    display.start(2, 10)
    display.advance(5)
    row = {"step": 5, "train/nelbo": 3.25, "val/nelbo": 3.5, "val/nelbo_se": 0.01, "tokens_per_second": 1234.5}
    display.show(row | {"mfu": 0.412})
    display.note("careful [now]")
    display.preview(5, "bell\x07 and escape\x1b[31m\n\ttab [x]")
    display.stop()
    display.stop()
    text = out.getvalue()
    for shown in ("train 3.250", "val 3.500±0.010", "1,234 tokens/s", "MFU 41.2%", "left", "5/10", "careful [now]"):
        assert shown in text
    assert "bell\N{REPLACEMENT CHARACTER} and escape\N{REPLACEMENT CHARACTER}[31m" in text
    assert "\x07" not in text


def test_plain_display_estimates_the_time_left_from_the_second_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds pass as 100 (the first step, with what is compiled in it), then 2 a step."""
    now = 0.0
    monkeypatch.setattr("blockdiff.training.display.time.monotonic", lambda: now)
    out = io.StringIO()
    display = Display(Console(file=out, width=140), "train/nelbo")
    display.start(0, 61)
    for step, now in ((1, 100.0), (11, 120.0)):  # noqa: B007
        display.advance(step)
        display.show({"step": step, "train/nelbo": 3.25})
    first, second = out.getvalue().splitlines()
    assert first == "step 1/61  train 3.250"
    assert second == "step 11/61  train 3.250  1:40 left"


def test_training_needs_no_preview(make_config: Make) -> None:
    summary = run_training(make_config(trainer__max_steps=1), console=Console(file=io.StringIO()))  # type: ignore[arg-type]
    assert summary.finished
    assert not (summary.directory / "samples.txt").exists()
