"""What sampling costs: one table over batch × prefix × rule, beside block size 1 and an uncached run.

    python benchmarks/sampling.py --quick
    python benchmarks/sampling.py --pair
    python benchmarks/sampling.py --checkpoint checkpoints/demo --rules confidence entropy_bound

All figures come from one process, so that rows compare; the first block, which holds the prefill, is not timed. A model
with random weights is never sure, so rules that wait for certainty fix one token a call: judge those with a checkpoint.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from rich.console import Console
from torch import Tensor

from blockdiff.model.cache import KVCache
from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.sampling.batch import Batch, row_capacity
from blockdiff.sampling.config import Order, Rule, SamplerConfig
from blockdiff.sampling.protocols import DenoiserLike
from blockdiff.sampling.report import median
from blockdiff.sampling.request import Request

RULES = {
    "first_hitting": SamplerConfig(rule=Rule.first_hitting),
    "ancestral": SamplerConfig(rule=Rule.ancestral),
    "confidence": SamplerConfig(rule=Rule.confidence),
    "factor": SamplerConfig(rule=Rule.factor),
    "entropy_bound": SamplerConfig(rule=Rule.entropy_bound),
    "confidence_2": SamplerConfig(rule=Rule.fixed, tokens_per_step=2),
    "margin_2": SamplerConfig(rule=Rule.fixed, order=Order.margin, tokens_per_step=2),
    "entropy_2": SamplerConfig(rule=Rule.fixed, order=Order.entropy, tokens_per_step=2),
    "random_2": SamplerConfig(rule=Rule.fixed, order=Order.random, tokens_per_step=2),
    "left_to_right_2": SamplerConfig(rule=Rule.fixed, order=Order.left_to_right, tokens_per_step=2),
    "confidence_8": SamplerConfig(rule=Rule.fixed, tokens_per_step=8),
}
UNCACHED_RULE = "confidence_8"
"""Few calls a block: an uncached call reads the whole prefix again, and its milliseconds are what is to be seen."""


class Uncached:
    """The same network without reuse: every call reads the whole prefix again. Its cache holds token ids."""

    def __init__(self, denoiser: Denoiser) -> None:
        self._denoiser = denoiser
        self.mask_id, self.vocab_size = denoiser.mask_id, denoiser.vocab_size

    def compiled(self) -> Self:
        return self

    def packed(self) -> Self:
        return self

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        device = self._denoiser.embedding.weight.device
        return KVCache.empty(
            layers=1, batch=batch, kv_heads=1, head_dim=1, capacity=capacity, device=device, dtype=torch.int64
        )

    def commit(
        self, x0_BT: Tensor, cache: KVCache, *, lengths: list[int] | None = None, block_size: int | None = None
    ) -> None:
        counts = lengths or [x0_BT.shape[1]] * len(x0_BT)
        for row, count in enumerate(counts):
            start = cache.lengths[row]
            cache.keys[0][row, 0, start : start + count, 0] = x0_BT[row, :count]
        cache.advance(counts)

    def denoise(self, xt_BS: Tensor, cache: KVCache, chosen_BM: Tensor | None = None) -> Tensor:
        rows, longest = len(xt_BS), max(cache.lengths[: len(xt_BS)])
        fresh = self._denoiser.new_cache(rows, longest + xt_BS.shape[1])
        if longest:
            prefix_BP = cache.keys[0][:rows, 0, :longest, 0]
            self._denoiser.commit(prefix_BP, fresh, lengths=cache.lengths[:rows], block_size=xt_BS.shape[1])
        return self._denoiser.denoise(xt_BS, fresh, chosen_BM)

    def commit_and_denoise(
        self,
        x0_BS: Tensor,
        xt_BS: Tensor,
        cache: KVCache,
        chosen_BM: Tensor | None = None,
        *,
        lengths: list[int] | None = None,
    ) -> Tensor:
        self.commit(x0_BS, cache, lengths=lengths)
        return self.denoise(xt_BS, cache, chosen_BM)


@dataclass
class Cost:
    """Of the timed blocks: new tokens, calls that rows took part in, calls made, seconds. Bytes of the cache."""

    tokens: int
    nfe: int
    calls: int
    seconds: float
    cache_bytes: int


def measure(
    denoiser: DenoiserLike,
    config: SamplerConfig,
    *,
    rows: int,
    prefix: int,
    block_size: int,
    new_tokens: int,
    untimed: int,
) -> Cost:
    """Samples `new_tokens` behind `prefix` in each row, and times what follows the first `untimed` of them."""
    generator = torch.Generator().manual_seed(prefix)
    prompts = torch.randint(denoiser.vocab_size, (rows, prefix), generator=generator).tolist()
    length = -(-(prefix + new_tokens) // block_size) * block_size
    batch = Batch(
        denoiser,
        replace(config, max_new_tokens=new_tokens, batch_size=rows),
        block_size=block_size,
        seq_len=length,
        capacity=row_capacity(length, block_size),
    )
    for prompt in prompts:
        batch.submit(Request(prompt))
    nfe_before = [0] * rows
    tokens = nfe = calls_before = done = 0
    began = time.perf_counter()
    while not batch.idle:
        if done == untimed:
            began, calls_before = time.perf_counter(), batch.calls
        for event in batch.advance():
            if done >= untimed:
                tokens += len(event.token_ids)
                nfe += event.nfe - nfe_before[event.request]
            nfe_before[event.request] = event.nfe
        done += block_size
    return Cost(tokens, nfe, batch.calls - calls_before, time.perf_counter() - began, batch.cache.nbytes)


def work(denoiser: Denoiser, tokens: int, prefix: int) -> float:
    """Multiply-adds of one call of `tokens` behind `prefix` in one row, the head left out."""
    config = denoiser.config
    weights = sum(weight.numel() for weight in denoiser.layers.parameters() if weight.dim() == 2)
    attention = 2 * config.layers * config.heads * config.dim_per_head * (prefix + tokens)
    return float(tokens * (weights + attention))


def step_times(denoiser: Denoiser, block_size: int, prefix: int, repeats: int) -> list[float]:
    """Median ms of the bare forward on one block; of a step behind `prefix`; of one with the logits of one token."""
    device = denoiser.embedding.weight.device
    x_1S = torch.randint(denoiser.vocab_size, (1, block_size), device=device)
    one_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
    bare, cached = denoiser.new_cache(1, block_size), denoiser.new_cache(1, prefix + block_size)
    denoiser.commit(torch.randint(denoiser.vocab_size, (1, prefix), device=device), cached)
    cases = [(bare, None), (cached, None), (cached, one_11)]
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(repeats):
        # In turn, so that whatever else the machine does falls on all alike.
        for case, (cache, chosen) in enumerate(cases):
            began = time.perf_counter()
            denoiser.denoise(x_1S, cache, chosen)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[case].append((time.perf_counter() - began) * 1e3)
    return [median(values) for values in times]


PAIR_TOKENS = 1008
LEG_BLOCKS = 3


def pair(denoiser: Denoiser, block_size: int, rounds: int, console: Console) -> None:
    """1,008 tokens at one token a step without prompt, and how their time compares with block size 1.

    The runs take turns, three blocks at a time, so that each leg is compared with one behind the same prefix that ran
    right beside it; the order turns too.
    """
    one_by_one = RULES["first_hitting"]
    cases = {
        f"block size {block_size}": (one_by_one, block_size),
        f"block size {block_size}, weights as they are": (replace(one_by_one, pack=False), block_size),
        "block size 1": (one_by_one, 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        tokens = PAIR_TOKENS if turn else LEG_BLOCKS * block_size  # a first leg that does not count warms up
        runs: dict[str, Batch] = {}
        for leg in range(0, tokens, LEG_BLOCKS * block_size):
            for name in sorted(cases, reverse=leg // (LEG_BLOCKS * block_size) % 2 == 1):
                began = time.perf_counter()
                if not leg:
                    runs[name] = alone(denoiser, cases[name][0], cases[name][1], tokens)
                for _ in range(LEG_BLOCKS * block_size // cases[name][1]):
                    runs[name].advance()
                if turn:
                    seconds[name].append(time.perf_counter() - began)
    other = seconds["block size 1"]
    for name, legs in seconds.items():
        ratio = median([theirs / own for own, theirs in zip(legs, other, strict=True)])
        speed = rounds * PAIR_TOKENS / sum(legs)
        console.print(
            f"{name}: {speed:.1f} tokens/s, {ratio:.3f} of block size 1 (median of {len(legs)} legs)", highlight=False
        )


def alone(denoiser: DenoiserLike, config: SamplerConfig, block_size: int, tokens: int) -> Batch:
    """A batch of one row that makes so many tokens from nothing."""
    length = -(-tokens // block_size) * block_size
    batch = Batch(
        denoiser,
        replace(config, max_new_tokens=tokens, batch_size=1),
        block_size=block_size,
        seq_len=length,
        capacity=row_capacity(length, block_size),
    )
    batch.submit(Request([]))
    return batch


HEADINGS = ("batch", "prefix", "rule", "tokens/s", "NFE/token", "ms/NFE", "cache MiB", "× time", "× work")
WIDTHS = (5, 7, 22, 10, 9, 9, 9, 6, 6)


def rows_of(denoiser: Denoiser, arguments: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """All cells, each as soon as it is measured: the whole takes many minutes, and a killed run keeps what it has.

    The last columns compare ms/NFE, and the work behind it, with the shortest prefix of the same rule.
    """
    size = arguments.block_size
    runs: list[tuple[str, DenoiserLike, SamplerConfig, int]] = [
        (name, denoiser, RULES[name], size) for name in arguments.rules
    ]
    runs.append(("block size 1", denoiser, RULES["first_hitting"], 1))
    if not arguments.no_uncached:
        runs.append((f"uncached {UNCACHED_RULE}", Uncached(denoiser), RULES[UNCACHED_RULE], size))
    for rows in arguments.batches:
        for name, network, config, block_size in runs:
            first: tuple[float, float] | None = None
            for prefix in sorted(arguments.prefixes):
                where = {"rows": rows, "prefix": prefix, "block_size": block_size, "untimed": size}
                # One timed block is enough of what costs the same at each call and is slow.
                new_tokens = 2 * size if isinstance(network, Uncached) else arguments.new_tokens
                cost = measure(network, config, new_tokens=new_tokens, **where)
                ms, units = cost.seconds / cost.calls * 1e3, work(denoiser, block_size, prefix)
                first = first or (ms, units)
                yield (
                    str(rows),
                    f"{prefix:,}",
                    name,
                    f"{cost.tokens / cost.seconds:,.1f}",
                    f"{cost.nfe / cost.tokens:.2f}",
                    f"{ms:.2f}",
                    f"{cost.cache_bytes / 2**20:,.1f}",
                    f"{ms / first[0]:.2f}",
                    "" if isinstance(network, Uncached) else f"{units / first[1]:.2f}",
                )


def line(cells: tuple[str, ...]) -> str:
    """Cells of one row, in columns; names to the left, figures to the right."""
    return "  ".join(
        cell.ljust(width) if place == 2 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[128, 512, 1024, 2048])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48, help="a row, the untimed first block included")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--checkpoint", help="a run directory instead of random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-uncached", action="store_true", help="leave out the uncached runs, which are slow")
    parser.add_argument("--long", action="store_true", help="also 1,008 tokens at one token a step, without prompt")
    parser.add_argument("--pair", action="store_true", help="only 1,008 tokens beside block size 1, in turns")
    parser.add_argument("--rounds", type=int, default=3, help="of --pair")
    parser.add_argument("--repeats", type=int, default=60, help="of the single step's timing")
    parser.add_argument("--quick", action="store_true", help="batches 1 4, prefixes 128 512, three rules")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.batches, arguments.prefixes = [1, 4], [128, 512]
        arguments.rules = ["first_hitting", "confidence", "confidence_2", UNCACHED_RULE]
    return arguments


def network(arguments: argparse.Namespace) -> Denoiser:
    """The checkpoint's denoiser, or one with random weights."""
    if arguments.checkpoint:
        from blockdiff import load

        return load(arguments.checkpoint, device=arguments.device).denoiser
    torch.manual_seed(0)
    shape = ModelConfig(
        layers=arguments.layers, width=arguments.width, heads=arguments.heads, kv_heads=arguments.kv_heads
    )
    return Denoiser(shape, arguments.vocab_size).to(arguments.device).eval()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    denoiser, size, console = network(arguments), arguments.block_size, Console(width=120)
    shape, dtype = denoiser.config, str(denoiser.embedding.weight.dtype).removeprefix("torch.")
    console.print(
        f"{platform.machine()}, device {arguments.device}, {arguments.threads} threads, {dtype}, "
        f"torch {torch.__version__}; {shape.layers} layers × {shape.width}, {shape.heads} heads, "
        f"{shape.key_value_heads} kv heads, vocabulary {denoiser.vocab_size:,}"
    )
    if arguments.pair:
        pair(denoiser, size, arguments.rounds, console)
        return
    bare, full, one = step_times(denoiser, size, 1000, arguments.repeats)
    console.print(
        f"one step of {size} tokens: bare {bare:.2f} ms; behind 1,000 cached {full:.2f} ms (× {full / bare:.2f}), "
        f"with the logits of one token {one:.2f} ms (× {one / bare:.2f})"
    )
    for block_size in (size, 1) if arguments.long else ():
        where = {"rows": 1, "prefix": 0, "block_size": block_size, "new_tokens": 1008, "untimed": 0}
        cost = measure(denoiser, RULES["first_hitting"], **where)
        console.print(
            f"1,008 tokens, one a step, block size {block_size}: {cost.tokens / cost.seconds:.1f} tokens/s, "
            f"{cost.seconds / cost.calls * 1e3:.2f} ms a call"
        )
    console.print(line(HEADINGS), style="bold")
    for cells in rows_of(denoiser, arguments):
        console.print(line(cells), highlight=False)


if __name__ == "__main__":
    main()
