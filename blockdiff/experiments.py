"""What `measure` and `sweep` do: the cells of a study of block sizes, and the study."""

from __future__ import annotations

import io
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from blockdiff.api import LanguageModel, load, resolve_device, resolve_dtype
from blockdiff.commands import trained_block_size
from blockdiff.composition import load_config
from blockdiff.config import MeasureConfig, Part, TrainConfig
from blockdiff.core.blocks import check_block_size
from blockdiff.data.packing import PackedDataset
from blockdiff.data.prepare import PreparedData, prepare
from blockdiff.data.sources import Source
from blockdiff.evaluation.config import BLOCK_SIZES, HF_PREFIX, Budget, SweepConfig
from blockdiff.evaluation.judge import DenoiserJudge, Judge
from blockdiff.evaluation.measure import (
    Measurement,
    Subject,
    measure_likelihood,
    measure_reference,
    measure_samples,
)
from blockdiff.evaluation.report import write_report
from blockdiff.evaluation.sweep import (
    Cell,
    Model,
    plan_cells,
    run_cells,
    run_in_process_of_its_own,
)
from blockdiff.evaluation.text_judge import TextJudge
from blockdiff.evaluation.windows import common_block_size
from blockdiff.model.compute import training_flops
from blockdiff.model.pretrained import check_directory, load_pretrained
from blockdiff.records import from_plain, read_yaml, to_plain
from blockdiff.training.durable import HashingFile, write_durably, write_text_durably
from blockdiff.training.loggers import build_loggers, log_plots


def run_measure(config: MeasureConfig) -> int:
    """Measures one cell and writes its JSON file, which appears whole and last."""
    model = load(config.checkpoint, config.device, config.weights, config.dtype)  # type: ignore[arg-type]
    size = trained_block_size(model, config.block_size, config.allow_untrained_block_size)
    prepared = prepare(model.config.data)
    if prepared.tokenizer.sha256 != model.tokenizer.sha256:
        raise ValueError(
            f"{prepared.directory} was tokenised with another tokenizer than {model.path}: restore the corpus"
        )
    subject = _subject(model, prepared, size, config.pack_block_size or size)
    measurement = _measure(config, subject)
    facts = {"part": config.part, "config": config, **_model_facts(model, prepared, size)}
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if measurement.arrays:
        packed = io.BytesIO()
        np.savez_compressed(packed, allow_pickle=False, **measurement.arrays)

        def write(file: HashingFile) -> None:
            file.write(packed.getbuffer())

        write_durably(output.with_suffix(".npz"), write)
    write_text_durably(output, json.dumps(_finite(to_plain(facts | measurement.numbers)), indent=1) + "\n")
    print(output)
    return 0


def _measure(config: MeasureConfig, subject: Subject) -> Measurement:
    judge = None if config.judge is None or config.part is Part.likelihood else _judge(config, subject)
    match config.part:
        case Part.likelihood:
            return measure_likelihood(subject, config.likelihood)
        case Part.samples:
            return measure_samples(subject, config.sampler, config.samples, config.speed, judge)
        case Part.reference:
            assert judge is not None
            return measure_reference(subject, config.samples, judge)


def _subject(model: LanguageModel, prepared: PreparedData, block_size: int, pack_block_size: int) -> Subject:
    if pack_block_size % block_size:
        raise ValueError(f"pack_block_size={pack_block_size} must be a multiple of block_size={block_size}")
    return Subject(
        denoiser=model.denoiser,
        prepared=prepared,
        block_size=block_size,
        pack_block_size=pack_block_size,
        seq_len=model.config.seq_len,
        document_mask=model.config.data.document_mask,
        python=model.config.data.source is Source.stdlib,
    )


def _judge(config: MeasureConfig, subject: Subject) -> Judge:
    assert config.judge is not None
    if config.judge.startswith(HF_PREFIX):
        device = resolve_device(config.device)
        path, name = Path(config.judge.removeprefix(HF_PREFIX)), f"judge={config.judge}"
        return TextJudge(
            load_pretrained(path, name, device, resolve_dtype(config.dtype, device)), subject.prepared.tokenizer
        )
    if (Path(config.judge) / "config.json").is_file():
        raise ValueError(f"judge={config.judge} is a Hugging Face directory: write judge={HF_PREFIX}{config.judge}")
    judge = load(config.judge, config.device, config.weights, config.dtype)  # type: ignore[arg-type]
    if judge.config.block_size != 1:
        raise ValueError(
            f"judge={config.judge} was trained with block_size={judge.config.block_size}: a judge reads left to right, "
            "so it must have block_size=1"
        )
    if judge.tokenizer.sha256 != subject.prepared.tokenizer.sha256:
        raise ValueError(f"judge={config.judge} has another tokenizer than the samples: train it on the same corpus")
    name = f"{config.judge} (step {judge.step:,})"
    return DenoiserJudge(judge.denoiser, judge.tokenizer, judge.config.seq_len, name)


def _model_facts(model: LanguageModel, prepared: PreparedData, block_size: int) -> dict[str, Any]:
    """What a report says of a model beside its numbers."""
    run = model.config
    packed = PackedDataset(
        prepared.train,
        seq_len=run.seq_len,
        block_size=run.block_size,
        eos_id=prepared.tokenizer.eos_id,
        document_mask=run.data.document_mask,
    )
    windows = model.step * run.data.global_batch_size
    flops = training_flops(run.model, prepared.tokenizer.vocab_size, run.seq_len, run.block_size, run.noise)
    return {
        "checkpoint": str(model.path),
        "step": model.step,
        "block_size": block_size,
        "trained_block_size": run.block_size,
        "seq_len": run.seq_len,
        "corpus": prepared.directory.name,
        "vocab_size": prepared.tokenizer.vocab_size,
        "unigram_nats": prepared.manifest["unigram_nats"],
        "parameters": sum(weight.numel() for weight in model.denoiser.parameters()),
        "train_tokens": round(windows * run.seq_len * (1 - packed.padding_share)),
        "train_flops": windows * flops,
    }


def _finite(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list():
            return [_finite(item) for item in value]
        case _:
            return value


def run_sweep(config: SweepConfig) -> int:
    """Runs all cells that are not finished, then writes the report; returns 1 where a cell failed."""
    models = _given_models(config) if config.checkpoints else _trained_models(config)
    pack = common_block_size([model.block_size for model in models])
    cells = plan_cells(config, models, pack)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if config.dry_run:
        _print_commands(cells)
        return 0
    if config.judge and config.judge.startswith(HF_PREFIX):
        # Before hours of training, and not after.
        check_directory(Path(config.judge.removeprefix(HF_PREFIX)), f"judge={config.judge}")
    (config.directory / "cells").mkdir(parents=True, exist_ok=True)
    outcomes = run_cells(cells, run_in_process_of_its_own, console.print)
    written = write_report(config, models, outcomes)
    log_plots(build_loggers(config.logger, config.directory, 0), written.plots)
    console.print(str(written.html))
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def _print_commands(cells: list[Cell]) -> None:
    """Each cell as a command; those of one group may run at once, a group needs the groups above."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault("train" if cell.kind.value == "train" else "measure", []).append(cell)
    for name, group in groups.items():
        print(f"# {name}: {len(group)} commands that may run at once")
        for cell in group:
            print(shlex.join(["blockdiff", *cell.command]))
    print("# then the same `blockdiff sweep` without dry_run writes the report")


def _trained_models(config: SweepConfig) -> list[Model]:
    """The runs of the sweep: one a block size, at the same number of tokens or operations."""
    runs = {size: _train_config(config, size) for size in config.block_size or BLOCK_SIZES}
    first = runs[min(runs)]
    steps = first.trainer.max_steps
    # Operations depend on the vocabulary, which only the prepared corpus knows.
    vocab_size = prepare(first.data).tokenizer.vocab_size if config.budget is Budget.compute else 0
    models = []
    for size, run in runs.items():
        label = f"b{size}"
        arguments = [*config.train, f"block_size={size}", f"name={config.name}-{label}"]
        if config.budget is Budget.compute:
            share = _window_flops(first, vocab_size) / _window_flops(run, vocab_size)
            arguments.append(f"trainer.max_steps={max(round(steps * share), 1)}")
        path = str(Path(run.run_root) / f"{config.name}-{label}")
        models.append(Model(label, path, size, size, arguments))
    return models


def _train_config(config: SweepConfig, block_size: int) -> TrainConfig:
    """A run's config, which is refused before any cell runs."""
    run: TrainConfig = load_config("train", [*config.train, f"block_size={block_size}"])
    return run


def _window_flops(run: TrainConfig, vocab_size: int) -> float:
    return training_flops(run.model, vocab_size, run.seq_len, run.block_size, run.noise)


def _given_models(config: SweepConfig) -> list[Model]:
    """Given checkpoints, each at its own block size or at those of the grid."""
    models = []
    for text in config.checkpoints:
        place = Path(text)
        directory = place if place.is_dir() else place.parent
        run = from_plain(TrainConfig, read_yaml(directory / "config.yaml"))
        for size in config.block_size or [run.block_size]:
            check_block_size(size, run.seq_len)
            name = directory.name if place.is_dir() else f"{directory.name}-{place.stem}"
            label = name if size == run.block_size else f"{name}-at-b{size}"
            models.append(Model(label, text, size, run.block_size, None))
    return models
