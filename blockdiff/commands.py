"""What `prepare` and `evaluate` do and print. Numbers go to standard output, everything else to standard error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Column, Table

from blockdiff.api import LanguageModel, load
from blockdiff.build import run_training
from blockdiff.config import EvaluateConfig, PrepareConfig, TrainConfig
from blockdiff.core.blocks import check_block_size
from blockdiff.core.bound import Bound
from blockdiff.data.files import expand_files, text_chunks
from blockdiff.data.loader import val_loader
from blockdiff.data.packing import PackedDataset
from blockdiff.data.prepare import prepare
from blockdiff.data.statistics import describe
from blockdiff.data.tokenizer import Tokenizer
from blockdiff.evaluation.likelihood import score_batches
from blockdiff.model.denoiser import Denoiser
from blockdiff.sampling.sampler import generate


def run_train(config: TrainConfig) -> int:
    """Trains; returns 0, or 128 + the signal's number where one stopped the run before its last step."""
    summary = run_training(config, make_preview=lambda tokenizer: _preview(config, tokenizer))
    return summary.exit_code


def _preview(config: TrainConfig, tokenizer: Tokenizer) -> Callable[[Denoiser, int], list[str]]:
    """Draws texts from nothing with the run's sampler settings."""

    def draw(denoiser: Denoiser, count: int) -> list[str]:
        generations = generate(
            denoiser,
            [[] for _ in range(count)],
            config.sampler,
            block_size=config.block_size,
            seq_len=config.seq_len,
            tokenizer=tokenizer,
        )
        return [generation.text for generation in generations]

    return draw


def run_prepare(config: PrepareConfig) -> int:
    """Tokenises a corpus, or finds it, and prints its figures."""
    figures = describe(prepare(config.data), config.seq_len, config.block_size, config.data.document_mask)
    table = Table("", "train", "val", title=f"{figures['directory']}", title_justify="left")
    for key, form in (("documents", ","), ("tokens", ","), ("bytes", ","), ("windows", ","), ("padding_share", ".2%")):
        table.add_row(key.replace("_", " "), format(figures["train"][key], form), format(figures["val"][key], form))
    for key, form in (("vocab_size", ","), ("bytes_per_token", ".3f"), ("unigram_nats", ".3f")):
        table.add_row(key.replace("_", " "), "", format(figures[key], form))
    Console().print(table)
    print(f"split {figures['split_rule']}")
    return 0


def run_evaluate(config: EvaluateConfig) -> int:
    """Scores a checkpoint on its validation split or on given files, and prints the bound."""
    model = load(config.checkpoint, config.device, weights_name(config.weights))
    size = trained_block_size(model, config.block_size, config.allow_untrained_block_size)
    if config.files:
        texts = ["".join(text_chunks(path)) for path in expand_files(config.files)]
        score = model.nelbo(texts, config.views, size, config.seed)
        bound, bits, text = score.bound, score.bits_per_byte, str(config.files)
    else:
        bound, bits, text = _validation_bound(model, config, size)
    results = {
        "checkpoint": str(model.path),
        "step": model.step,
        "weights": config.weights,
        "text": text,
        "block_size": size,
        "exact": size == 1,
        "views": 1 if size == 1 else config.views,
        "tokens": bound.tokens,
        "nats_per_token": bound.nelbo,
        "standard_error": bound.standard_error,
        "perplexity": bound.perplexity,
        "perplexity_standard_error": bound.perplexity_error,
        "bits_per_byte": bits,
    }
    _print_results(results)
    if config.output:
        Path(config.output).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _validation_bound(model: LanguageModel, config: EvaluateConfig, block_size: int) -> tuple[Bound, float, str]:
    """Bound, bits per byte and name of the run's own validation split."""
    run = model.config
    prepared = prepare(run.data)
    if prepared.tokenizer.sha256 != model.tokenizer.sha256:
        raise ValueError(
            f"{prepared.directory} was tokenised with another tokenizer than the checkpoint's: the corpus has changed "
            "since training. Restore it, or score files with files=…"
        )
    dataset = PackedDataset(
        prepared.val,
        seq_len=run.seq_len,
        block_size=block_size,
        eos_id=prepared.tokenizer.eos_id,
        document_mask=run.data.document_mask,
    )
    loader = val_loader(dataset, micro_batch_size=config.micro_batch_size, max_samples=config.max_samples)
    bound = score_batches(model.denoiser, loader, block_size=block_size, views=config.views, seed=config.seed)
    return bound, bound.bits_per_byte(prepared.manifest["bytes_per_token"]), f"validation split of {prepared.directory}"


def trained_block_size(model: LanguageModel, wanted: int | None, allowed: bool) -> int:
    """The block size to use; a ValueError where it was not trained and that was not asked for."""
    trained = model.config.block_size
    size = trained if wanted is None else wanted
    check_block_size(size, model.config.seq_len)
    if size != trained and not allowed:
        raise ValueError(
            f"block_size={size}, but {model.path} was trained with block_size={trained}: leave it out, or insist with "
            "allow_untrained_block_size=true"
        )
    return size


def weights_name(name: str) -> Literal["ema", "raw"]:
    """The name of a set of weights, checked."""
    if name not in ("ema", "raw"):
        raise ValueError(f"weights={name} must be ema (averaged) or raw")
    return name  # type: ignore[return-value]


def _print_results(results: dict[str, Any]) -> None:
    kind = "negative log-likelihood (exact)" if results["exact"] else "negative ELBO (a bound)"
    table = Table("", Column(overflow="fold"), show_header=False)
    table.add_row("checkpoint", f"{results['checkpoint']} (step {results['step']:,}, {results['weights']} weights)")
    table.add_row("text", f"{results['text']}, {results['tokens']:,} tokens")
    table.add_row("block size, noise draws", f"{results['block_size']}, {results['views']}")
    table.add_row(kind, f"{results['nats_per_token']:.4f} ± {results['standard_error']:.4f} nats per token")
    table.add_row("perplexity", f"{results['perplexity']:.2f} ± {results['perplexity_standard_error']:.2f}")
    table.add_row("bits per byte", f"{results['bits_per_byte']:.4f}")
    Console().print(table)
