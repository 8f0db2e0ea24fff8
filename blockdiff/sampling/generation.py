"""Whole runs: `generate` makes all texts of a list, `stream` gives out each block as it is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from blockdiff.sampling.config import SamplerConfig, Window
from blockdiff.sampling.logit_rules import LogitRule
from blockdiff.sampling.protocols import DenoiserLike, TokenizerLike
from blockdiff.sampling.report import Generation, Report, report
from blockdiff.sampling.request import Request, as_request, end_of
from blockdiff.sampling.sampler import BlockEvent, Sampler, StepEvent, row_capacity


def generate(
    denoiser: DenoiserLike,
    prompts: Sequence[list[int] | Request],
    config: SamplerConfig,
    *,
    block_size: int,
    seq_len: int,
    tokenizer: TokenizerLike | None = None,
    eos_id: int | None = None,
    logit_rule: LogitRule | None = None,
    on_step: Callable[[StepEvent], None] | None = None,
    progress: Callable[[BlockEvent], None] | None = None,
) -> tuple[list[Generation], Report]:
    """Makes a text of each prompt, in the prompts' order.

    A text depends on its own prompt, the seed and the config, not on what else is in the list; prompts that
    say the same get different noise.

    Args:
        denoiser: the network.
        prompts: token ids to continue, or requests (`blockdiff.sampling.request`,
            `blockdiff.sampling.infill`).
        config: how to sample.
        block_size: S.
        seq_len: positions of the window, a multiple of S.
        tokenizer: for texts and stop strings; without it texts are empty.
        eos_id: ends a row; None: the tokenizer's.
        logit_rule: the caller's own rule on logits.
        on_step: called after each step.
        progress: called after each block of each row.

    Returns:
        The generations, and the figures of the whole run.

    Raises:
        ValueError: before any work, if the config or a prompt breaks a rule.
    """
    requests = [as_request(prompt) for prompt in prompts]
    began = time.perf_counter()
    sampler = _sampler(
        denoiser,
        requests,
        config,
        block_size,
        seq_len,
        tokenizer,
        eos_id,
        logit_rule,
        on_step,
        text_by_block=False,
    )
    done: dict[int, Generation] = {}
    while not sampler.idle:
        for event in sampler.advance():
            if progress is not None:
                progress(event)
            if event.generation is not None:
                done[event.request] = event.generation
    generations = [done[index] for index in range(len(requests))]
    seconds = time.perf_counter() - began
    figures = report(generations, calls=sampler.calls, seconds=seconds, cache_bytes=sampler.cache.nbytes)
    return generations, figures


def stream(
    denoiser: DenoiserLike,
    prompts: Sequence[list[int] | Request],
    config: SamplerConfig,
    *,
    block_size: int,
    seq_len: int,
    tokenizer: TokenizerLike | None = None,
    eos_id: int | None = None,
    logit_rule: LogitRule | None = None,
    on_step: Callable[[StepEvent], None] | None = None,
) -> Iterator[BlockEvent]:
    """One event a finished block of each row; arguments as of `generate`, errors raised before the first
    event.

    The texts of a row's events, joined, are its text. Closing the iterator frees the rows.
    """
    requests = [as_request(prompt) for prompt in prompts]
    sampler = _sampler(
        denoiser,
        requests,
        config,
        block_size,
        seq_len,
        tokenizer,
        eos_id,
        logit_rule,
        on_step,
        text_by_block=True,
    )
    return _events(sampler)


def _events(sampler: Sampler) -> Iterator[BlockEvent]:
    try:
        while not sampler.idle:
            yield from sampler.advance()
    finally:
        for row in list(sampler.rows):
            sampler.cancel(row.index)


def _sampler(
    denoiser: DenoiserLike,
    requests: list[Request],
    config: SamplerConfig,
    block_size: int,
    seq_len: int,
    tokenizer: TokenizerLike | None,
    eos_id: int | None,
    logit_rule: LogitRule | None,
    on_step: Callable[[StepEvent], None] | None,
    *,
    text_by_block: bool,
) -> Sampler:
    """A sampler with places and room for these requests and no more, all of them queued."""
    longest = max((end_of(request, config, seq_len) for request in requests), default=block_size)
    positions = seq_len if config.window is Window.sliding else min(longest, seq_len)
    sampler = Sampler(
        denoiser,
        config,
        block_size=block_size,
        seq_len=seq_len,
        tokenizer=tokenizer,
        eos_id=eos_id,
        batch=max(min(config.batch_size, len(requests)), 1),
        capacity=row_capacity(positions, block_size),
        text_by_block=text_by_block,
        logit_rule=logit_rule,
        on_step=on_step,
    )
    for request in requests:
        sampler.submit(request)
    return sampler
