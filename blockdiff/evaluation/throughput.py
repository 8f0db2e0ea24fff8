"""The speed protocol: prompts of mixed length, several batch sizes and repeats, and all that the figures depend on.

Prompt tokens are never counted as output. All rows make the same number of tokens: the end of text does not stop them,
so that samplers which end early do not look slow or fast.
"""

from __future__ import annotations

import dataclasses
import platform
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from blockdiff.data.store import TokenStore
from blockdiff.evaluation.config import SpeedConfig
from blockdiff.model.denoiser import Denoiser
from blockdiff.sampling.config import SamplerConfig
from blockdiff.sampling.report import Generation
from blockdiff.sampling.sampler import Run, run


@dataclass
class Speed:
    """Figures at one batch size; medians over repeats, and the spread as (smallest, largest).

    Attributes:
        batch_size: rows at once.
        tokens_per_second: new tokens of all rows a second of wall time.
        tokens_per_second_spread: over repeats.
        stream_tokens_per_second: new tokens of one row a second of its time in the batch, median over requests.
        ttft_ms: to the first finished block, prefill included and queue left out; median over requests.
        latency_p50_ms, latency_p95_ms: time of a request in the batch, over requests.
        tokens_per_forward: new tokens a call of the denoiser that the row took part in, commits included.
        nfe: calls a request, commits included, mean.
        commit_nfe: those of them that only committed.
        cache_mib: of the keys and values.
        peak_mib: of device memory on CUDA; of the process since its start elsewhere.
    """

    batch_size: int
    tokens_per_second: float
    tokens_per_second_spread: tuple[float, float]
    stream_tokens_per_second: float
    ttft_ms: float
    latency_p50_ms: float
    latency_p95_ms: float
    tokens_per_forward: float
    nfe: float
    commit_nfe: float
    cache_mib: float
    peak_mib: float


def measure_speed(
    denoiser: Denoiser,
    prompts: Sequence[list[int]],
    sampler: SamplerConfig,
    config: SpeedConfig,
    *,
    block_size: int,
    seq_len: int,
) -> list[Speed]:
    """Runs all prompts at each batch size, once on few of them to warm up and `repeats` times against the clock.

    Raises:
        ValueError: a prompt and its new tokens do not fit into `seq_len`.
    """
    speeds = []
    for batch_size in config.batch_sizes:
        settings = dataclasses.replace(
            sampler, batch_size=batch_size, max_new_tokens=config.new_tokens, stop=[], logprobs=False
        )

        def timed(some: Sequence[list[int]], settings: SamplerConfig = settings) -> Run:
            return run(denoiser, list(some), settings, block_size=block_size, seq_len=seq_len)

        timed(prompts[:batch_size])
        _reset_peak(denoiser)
        runs = [timed(prompts) for _ in range(config.repeats)]
        speeds.append(_figures(batch_size, runs, _peak_mib(denoiser)))
    return speeds


def speed_prompts(store: TokenStore, config: SpeedConfig) -> list[list[int]]:
    """Prompts of mixed length from one stretch after the other of a split; equal for all models of a sweep."""
    length = np.linspace(config.shortest_prompt, config.longest_prompt, config.prompts).round().astype(int)
    # Short and long ones take turns, so that a batch mixes them.
    order = np.random.default_rng(0).permutation(config.prompts)
    last = max(len(store.tokens) - config.longest_prompt, 1)
    starts = np.arange(config.prompts) * last // config.prompts
    return [store.tokens[s : s + n].tolist() for s, n in zip(starts.tolist(), length[order].tolist(), strict=True)]


def protocol(denoiser: Denoiser, config: SpeedConfig, *, block_size: int, seq_len: int) -> dict[str, Any]:
    """What the figures depend on beside the model: stands in the table's header."""
    weight = denoiser.embedding.weight
    cuda = weight.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(weight.device) if cuda else platform.processor() or platform.machine(),
        "device_type": weight.device.type,
        "precision": str(weight.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seq_len": seq_len,
        "block_size": block_size,
        **dataclasses.asdict(config),
    }


def _figures(batch_size: int, runs: list[Run], peak_mib: float) -> Speed:
    rates = [r.report.tokens_per_second for r in runs]
    requests: list[Generation] = [g for r in runs for g in r.generations]
    latency = np.array([g.seconds for g in requests]) * 1e3
    return Speed(
        batch_size=batch_size,
        tokens_per_second=float(np.median(rates)),
        tokens_per_second_spread=(min(rates), max(rates)),
        stream_tokens_per_second=float(np.median([g.tokens_per_second for g in requests])),
        ttft_ms=float(np.median([g.ttft_s for g in requests])) * 1e3,
        latency_p50_ms=float(np.quantile(latency, 0.5)),
        latency_p95_ms=float(np.quantile(latency, 0.95)),
        tokens_per_forward=sum(g.new_tokens for g in requests) / max(sum(g.nfe for g in requests), 1),
        nfe=float(np.mean([g.nfe for g in requests])),
        commit_nfe=float(np.mean([g.commit_nfe for g in requests])),
        cache_mib=runs[0].report.cache_bytes / 2**20,
        peak_mib=peak_mib,
    )


def _reset_peak(denoiser: Denoiser) -> None:
    if denoiser.embedding.weight.is_cuda:
        torch.cuda.reset_peak_memory_stats(denoiser.embedding.weight.device)


def _peak_mib(denoiser: Denoiser) -> float:
    if denoiser.embedding.weight.is_cuda:
        return torch.cuda.max_memory_allocated(denoiser.embedding.weight.device) / 2**20
    # Kilobytes on Linux, bytes on macOS.
    unit = 2**20 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
