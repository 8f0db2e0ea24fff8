"""What a training step costs: one table over size, seq_len, block size and views, beside an autoregressive step.

    python benchmarks/training.py
    python benchmarks/training.py --models nano 8x256 --seq-lens 256 1024 --block-sizes 4 16 --tokens 4096
    python benchmarks/training.py --compile both --results rows.jsonl
    python benchmarks/training.py --device cuda --dtype bfloat16 --models 12x768 --tokens 32768 --compile

Useful work is that of the matrix products of both streams, forward and backward, of the head on masked positions and of
attention on permitted pairs (`blockdiff.model.compute`). Its share is of the machine's own rate of matrix products at
the layers' shapes (`blockdiff.model.rate`). The autoregressive step is one of the same network on one causal stream,
with the head on every position.

A machine that others use is never twice as fast as it was, so what is compared is measured in turn, in one process:
products, step, products, autoregressive step, and so on. Each step counts against the products and the autoregressive
steps just before and after it; shown are medians, with quartiles in brackets. Each row has a process of its own, and
its peak memory is read before anything but its own step has run. Compiled layers count against autoregressive steps of
eager ones too, whose graphs would mix with theirs; their own ratio is that of two rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from blockdiff.core.corruption import NoiseConfig, NoiseKey
from blockdiff.core.objective import weighted_nll
from blockdiff.data.batch import Batch
from blockdiff.model.attention import Backend
from blockdiff.model.compilation import compile_layers
from blockdiff.model.compute import Product, attention_flops, training_products
from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.model.layers import rotary_angles
from blockdiff.model.rate import ProductRound, wait
from blockdiff.training.staging import noise_batch, send

AUTOREGRESSIVE = 0
"""Stands for the yardstick where a block size is expected."""
WARM_UP = 3
HEADINGS = (
    "model", "seq_len", "block", "views", "layers", "tokens/s", "GFLOP/s", "share of products", "peak MiB",
    "× autoregressive",
)  # fmt: skip
WIDTHS = (7, 7, 14, 5, 8, 9, 9, 18, 8, 18)


@dataclass
class Row:
    """One configuration to be timed."""

    model: str
    seq_len: int
    block_size: int
    views: int
    tokens: int
    vocab_size: int
    device: str
    dtype: str
    threads: int
    repeats: int
    backend: str
    compiled: bool

    @property
    def config(self) -> ModelConfig:
        """A named size of `conf/model`, or LAYERSxWIDTH with heads of 64."""
        if "x" in self.model:
            layers, width = map(int, self.model.split("x"))
            return ModelConfig(layers=layers, width=width, heads=width // 64, attention=Backend[self.backend])
        from blockdiff.composition import load_config

        config: ModelConfig = load_config("train", [f"model={self.model}", "block_size=1"]).model
        return replace(config, attention=Backend[self.backend])

    @property
    def windows(self) -> int:
        """Of a step."""
        return max(self.tokens // self.seq_len, 1)


def main() -> None:
    options = _options()
    rows = [
        Row(model, seq_len, size, views, options.tokens, options.vocab_size, options.device, options.dtype,
            options.threads, options.repeats, options.backend, compiled)
        for model in options.models
        for seq_len in options.seq_lens
        for compiled in {"no": [False], "yes": [True], "both": [False, True]}[options.compile]
        for size in [AUTOREGRESSIVE, *options.block_sizes]
        for views in (options.views if size else [1])
    ]  # fmt: skip
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    console = Console(width=120)
    console.print(
        f"{machine}, {options.threads} threads, {options.dtype}, {options.tokens} tokens a step, vocabulary "
        f"{options.vocab_size:,}, torch {torch.__version__}"
    )
    console.print(line(HEADINGS), style="bold")
    for row in rows:
        result = _in_child(row)
        console.print(line(cells(row, result)), highlight=False)
        if options.results:
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(json.dumps({"machine": machine, "torch": torch.__version__, **asdict(row), **result}) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["nano"], help="names of conf/model, or LAYERSxWIDTH")
    parser.add_argument("--seq-lens", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--views", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a step")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--backend", default="auto", choices=["auto", "sdpa", "flex"])
    parser.add_argument("--compile", nargs="?", const="yes", default="no", choices=["no", "yes", "both"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of a row")
    parser.add_argument("--results", type=Path, help="JSON lines: rows are added to it, with each single time")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(Row(**json.loads(options.row)))))
        sys.exit(0)
    return options


def _in_child(row: Row) -> dict[str, Any]:
    command = [sys.executable, __file__, "--row", json.dumps(asdict(row))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{row} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def cells(row: Row, result: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    seconds = statistics.median(result["seconds"])
    return (
        row.model,
        f"{row.seq_len:,}",
        "autoregressive" if row.block_size == AUTOREGRESSIVE else str(row.block_size),
        str(row.views),
        "compiled" if row.compiled else "eager",
        f"{row.windows * row.seq_len / seconds:,.0f}",
        f"{result['flops'] / seconds / 1e9:,.1f}",
        spread(result["shares"]),
        f"{result['memory'] / 2**20:,.0f}",
        spread(result["ratios"]) if result["ratios"] else "1",
    )


def line(parts: tuple[str, ...]) -> str:
    """Cells in columns."""
    return " ".join(part.rjust(width) for part, width in zip(parts, WIDTHS, strict=True))


def spread(values: list[float]) -> str:
    """The median, and the quartiles around it."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{statistics.median(values):.2f} ({low:.2f}–{high:.2f})"


def measure(row: Row) -> dict[str, Any]:
    """Seconds of each step and its operations, its shares of products and ratios, and peak memory in bytes."""
    torch.set_num_threads(row.threads)
    torch.manual_seed(0)
    device, config = torch.device(row.device), row.config
    denoiser = Denoiser(config, row.vocab_size).to(device)
    if row.compiled:
        compile_layers(denoiser)
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-4, fused=True)
    x0_BL = torch.randint(0, row.vocab_size, (row.windows, row.seq_len))  # where a loader leaves it

    def seconds(loss: Callable[[Denoiser, Tensor, Row, int], Tensor], number: int) -> float:
        wait(device)
        began = time.perf_counter()
        with torch.autocast(row.device, torch.bfloat16, enabled=row.dtype == "bfloat16"):
            value = loss(denoiser, x0_BL, row, number)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        return time.perf_counter() - began

    def own(number: int) -> float:
        return seconds(diffusion_step if row.block_size else autoregressive_step, number)

    def yardstick(number: int) -> float:
        with torch.compiler.set_stance("force_eager"):
            return seconds(autoregressive_step, number)

    for number in range(WARM_UP):
        own(number)
    memory = peak_memory(device)
    products, attention = work(config, row)
    dtype = torch.bfloat16 if row.dtype == "bfloat16" else torch.float32
    streams = row.views + 1 if row.block_size else 1
    rows = streams * x0_BL.numel()
    round_ = ProductRound(products, windows=row.windows, rows=rows, device=device, dtype=dtype)
    flops = row.windows * (round_.flops + attention)
    compared = yardstick if row.block_size or row.compiled else None
    return in_turn(own, compared, round_, flops, row.repeats) | {"flops": flops, "memory": memory}


def in_turn(
    own: Callable[[int], float],
    yardstick: Callable[[int], float] | None,
    round_: ProductRound,
    flops: float,
    repeats: int,
) -> dict[str, list[float]]:
    """Times steps between rounds of products and steps of the yardstick, and sets each against its neighbours."""
    seconds, shares, ratios = [], [], []
    round_.rate()
    if yardstick:
        for number in range(WARM_UP):
            beside = yardstick(number)
    for number in range(WARM_UP, WARM_UP + repeats):
        before = round_.rate()
        seconds.append(own(number))
        shares.append(flops / seconds[-1] / statistics.mean([before, round_.rate()]))
        if yardstick:
            after = yardstick(number)
            ratios.append(seconds[-1] / statistics.mean([beside, after]))
            beside = after
    return {"seconds": seconds, "shares": shares, "ratios": ratios}


def diffusion_step(denoiser: Denoiser, x0_BL: Tensor, row: Row, number: int) -> Tensor:
    """The loss of one step as `blockdiff.training.module` takes it."""
    noise, rows_B = NoiseConfig(views=row.views), torch.arange(len(x0_BL))
    document_BL, count = torch.zeros_like(x0_BL), torch.tensor(x0_BL.numel())
    batch = Batch(x0_BL, document_BL, document_BL == 0, rows_B, rows_B, torch.tensor(number), count)
    key = NoiseKey(0, number, rows_B, len(x0_BL))
    noised = noise_batch(batch, key, noise, block_size=row.block_size, mask_id=denoiser.mask_id)
    noised = send(noised, denoiser.embedding.weight.device)
    clean = noised.clean
    plan = denoiser.plan(clean.document_BL, row.block_size, row.views, noised.layout)
    nats, _ = denoiser.weighted_nll(noised.xt_BKL, clean.tokens_BL, plan, noised.chosen_M, noised.weight_M)
    return nats / (clean.global_count * row.views)


def autoregressive_step(denoiser: Denoiser, x0_BL: Tensor, row: Row, number: int) -> Tensor:
    """The loss of a next-token step of the same network: one causal stream, the head on every position."""
    config, x0_BL = denoiser.config, x0_BL.to(denoiser.embedding.weight.device)
    position_L = torch.arange(x0_BL.shape[1], device=x0_BL.device)
    cos, sin = rotary_angles(position_L, config.dim_per_head, config.rope_theta, denoiser.embedding.weight.dtype)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    x = denoiser.embedding(x0_BL)
    for layer in denoiser.layers:
        x = layer(x, cos, sin, attend)
    target_M = x0_BL.roll(-1, 1).flatten()
    weight_M = torch.full(target_M.shape, 1 / target_M.numel(), dtype=torch.float64, device=x.device)
    return weighted_nll(denoiser.norm(x).flatten(0, 1), denoiser.head_VD, target_M, weight_M)[0]


def work(config: ModelConfig, row: Row) -> tuple[list[Product], float]:
    """The products with weights of one window's step, and the operations of its attention."""
    length, noise = row.seq_len, NoiseConfig(views=row.views)
    if row.block_size:
        products = training_products(config, row.vocab_size, length, row.block_size, noise)
        return products, attention_flops(config, length, row.block_size, noise)
    inner, kv = config.heads * config.dim_per_head, config.key_value_heads * config.dim_per_head
    shapes = [(config.width, inner + 2 * kv), (inner, config.width)]
    shapes += [(config.width, 2 * config.hidden_width), (config.hidden_width, config.width)]
    products = [Product(*shape, config.layers * length) for shape in shapes]
    products.append(Product(config.width, row.vocab_size, length))
    return products, 3 * config.layers * 4 * inner * length * (length + 1) / 2


def peak_memory(device: torch.device) -> int:
    """Bytes: of the CUDA device, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
