"""Whole runs: `generate` makes all texts of a list, `stream` gives out each block as it is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Required, TypedDict, Unpack

from blockdiff.sampling.batch import Batch, BlockEvent, StepEvent, row_capacity
from blockdiff.sampling.config import SamplerConfig, Window
from blockdiff.sampling.infill import parse
from blockdiff.sampling.logit_rules import LogitRule
from blockdiff.sampling.protocols import DenoiserLike, TokenizerLike
from blockdiff.sampling.report import Generation, Report, report
from blockdiff.sampling.request import Request, end_of

Prompt = str | list[int] | Request
"""A text (with ``<hole:N>`` where it is to be filled), token ids to continue, or a request."""


@dataclass
class Run:
    """All texts, in the prompts' order, and what they cost."""

    generations: list[Generation]
    report: Report


class RunOptions(TypedDict, total=False):
    """What `run`, `generate` and `stream` are told beside prompts and config.

    Keys:
        block_size: S.
        seq_len: positions of the window, a multiple of S.
        tokenizer: for texts and stop strings; without it the results hold token ids only.
        eos_id: ends a row; None: the tokenizer's.
        logit_rule: the caller's own rule on logits.
        on_step: called after each step.
    """

    block_size: Required[int]
    seq_len: Required[int]
    tokenizer: TokenizerLike | None
    eos_id: int | None
    logit_rule: LogitRule | None
    on_step: Callable[[StepEvent], object] | None


def run(
    denoiser: DenoiserLike,
    prompts: Sequence[Prompt],
    config: SamplerConfig,
    *,
    progress: Callable[[BlockEvent], None] | None = None,
    text_by_block: bool = False,
    **options: Unpack[RunOptions],
) -> Run:
    """Makes a text of each prompt.

    A text depends on its own prompt, the seed and the config, not on what else is in the list; prompts that say the
    same get different noise.

    Args:
        denoiser: the network.
        prompts: texts, token ids or requests; texts need a tokenizer.
        config: how to sample.
        progress: called after each block of each row.
        text_by_block: decode after each block, so that `progress` sees the text grow; else at the end.
        options: see `RunOptions`.

    Raises:
        ValueError: before any work, if the config or a prompt breaks a rule.
    """
    began = time.perf_counter()
    batch = _batch(denoiser, prompts, config, text_by_block=text_by_block, **options)
    done: dict[int, Generation] = {}
    while not batch.idle:
        for event in batch.advance():
            if progress is not None:
                progress(event)
            if event.generation is not None:
                done[event.request] = event.generation
    generations = [done[index] for index in range(len(prompts))]
    seconds = time.perf_counter() - began
    return Run(generations, report(generations, calls=batch.calls, seconds=seconds, cache_bytes=batch.cache.nbytes))


def generate(
    denoiser: DenoiserLike, prompts: Sequence[Prompt], config: SamplerConfig, **options: Unpack[RunOptions]
) -> list[Generation]:
    """The texts of `run`, without the figures."""
    return run(denoiser, prompts, config, **options).generations


def stream(
    denoiser: DenoiserLike, prompts: Prompt | Sequence[Prompt], config: SamplerConfig, **options: Unpack[RunOptions]
) -> Iterator[BlockEvent]:
    """One event a finished block of each row; arguments as of `run`, errors raised before the first event.

    A single prompt may come without its list. The texts of a row's events, joined, are its text. Closing the iterator
    frees the rows.
    """
    return _events(_batch(denoiser, _several(prompts), config, text_by_block=True, **options))


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts as a list; a list of integers, an empty one too, is a single prompt."""
    if isinstance(prompts, str | Request):
        return [prompts]
    ids = [prompt for prompt in prompts if isinstance(prompt, int)]
    return [ids] if len(ids) == len(prompts) else [prompt for prompt in prompts if not isinstance(prompt, int)]


def _events(batch: Batch) -> Iterator[BlockEvent]:
    try:
        while not batch.idle:
            yield from batch.advance()
    finally:
        for row in list(batch.rows):
            batch.cancel(row.index)


def as_request(prompt: Prompt, tokenizer: TokenizerLike | None) -> Request:
    """A prompt of any kind as a request. Raises a ValueError for text without tokenizer, or with a broken hole."""
    match prompt:
        case Request():
            return prompt
        case str():
            if tokenizer is None:
                raise ValueError(f"prompt {prompt[:40]!r} is text and needs a tokenizer; pass one, or token ids")
            return parse(prompt, tokenizer)
        case _:
            return Request(list(prompt))


def _batch(
    denoiser: DenoiserLike,
    prompts: Sequence[Prompt],
    config: SamplerConfig,
    *,
    text_by_block: bool,
    **options: Unpack[RunOptions],
) -> Batch:
    """A batch with places and room for these prompts and no more, all of them queued."""
    block_size, seq_len = options["block_size"], options["seq_len"]
    requests = [as_request(prompt, options.get("tokenizer")) for prompt in prompts]
    longest = max((end_of(request, config, seq_len) for request in requests), default=block_size)
    positions = seq_len if config.window is Window.sliding else min(longest, seq_len)
    batch = Batch(
        denoiser,
        config,
        places=max(min(config.batch_size, len(requests)), 1),
        capacity=row_capacity(positions, block_size),
        text_by_block=text_by_block,
        **options,
    )
    for request in requests:
        batch.submit(request)
    return batch
