"""What a training step costs: one table over size, seq_len, block size and views, beside an autoregressive step.

    python benchmarks/training.py
    python benchmarks/training.py --models nano 8x256 --seq-lens 256 1024 --block-sizes 4 16 --tokens 4096
    python benchmarks/training.py --device cuda --dtype bfloat16 --models small --tokens 32768

Useful work is that of the matrix products of both streams, forward and backward, of the head on masked positions and of
attention on permitted pairs (`blockdiff.evaluation.compute`). Its share is of the machine's own rate of matrix products
at the layers' shapes, measured in the same run. The autoregressive row is the same network on one causal stream, with
the head on every position. Each row runs in a process of its own, so that its memory is its own; times are medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from blockdiff.core.corruption import NoiseConfig, NoiseKey
from blockdiff.core.objective import weighted_nll
from blockdiff.data.batch import Batch
from blockdiff.evaluation.compute import training_flops
from blockdiff.model.attention import Backend
from blockdiff.model.compilation import compile_layers
from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.model.layers import rotary_angles
from blockdiff.training.staging import noise_batch, send

AUTOREGRESSIVE = 0
"""Stands for the yardstick where a block size is expected."""


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


def main() -> None:
    options = _options()
    rows = [
        Row(model, seq_len, size, views, options.tokens, options.vocab_size, options.device, options.dtype,
            options.threads, options.repeats, options.backend, options.compile)
        for model in options.models
        for seq_len in options.seq_lens
        for size in [AUTOREGRESSIVE, *options.block_sizes]
        for views in (options.views if size else [1])
    ]  # fmt: skip
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    title = f"{machine}, {options.threads} threads, {options.dtype}, {options.tokens} tokens a step"
    table = Table(
        "model", "seq_len", "block", "views", "tokens/s", "useful GFLOP/s", "share of products", "peak MiB",
        "× autoregressive", title=title, title_justify="left",
    )  # fmt: skip
    yardstick = 0.0
    for row in rows:
        result = _in_child(row)
        if row.block_size == AUTOREGRESSIVE:
            yardstick = result["seconds"]
        table.add_row(
            row.model,
            str(row.seq_len),
            "autoregressive" if row.block_size == AUTOREGRESSIVE else str(row.block_size),
            str(row.views),
            f"{row.tokens / result['seconds']:,.0f}",
            f"{result['flops'] / result['seconds'] / 1e9:.1f}",
            f"{result['flops'] / result['seconds'] / result['rate']:.2f}",
            f"{result['memory'] / 2**20:,.0f}",
            f"{result['seconds'] / yardstick:.2f}",
        )
    Console(width=130).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["nano"])
    parser.add_argument("--seq-lens", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--views", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a step")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--backend", default="auto", choices=["auto", "sdpa", "flex"])
    parser.add_argument("--compile", action="store_true", help="compile the layers, as training does on CUDA")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(Row(**json.loads(options.row)))))
        sys.exit(0)
    return options


def _in_child(row: Row) -> dict[str, float]:
    command = [sys.executable, __file__, "--row", json.dumps(asdict(row))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{row} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(row: Row) -> dict[str, float]:
    """Median seconds of a step, its useful operations, the machine's rate of products, and peak memory in bytes."""
    torch.set_num_threads(row.threads)
    torch.manual_seed(0)
    device, config = torch.device(row.device), row.config
    denoiser = Denoiser(config, row.vocab_size).to(device)
    if row.compiled:
        compile_layers(denoiser)
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-4, fused=True)
    batch = max(row.tokens // row.seq_len, 1)
    x0_BL = torch.randint(0, row.vocab_size, (batch, row.seq_len))  # where a loader leaves it
    step = autoregressive_step if row.block_size == AUTOREGRESSIVE else diffusion_step
    rate = product_rate(config, row)

    def run(number: int) -> None:
        with torch.autocast(row.device, torch.bfloat16, enabled=row.dtype == "bfloat16"):
            step(denoiser, x0_BL, row, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(run, row)
    on_gpu = device.type == "cuda"
    memory = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "flops": batch * useful(config, row), "rate": rate, "memory": memory}


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


def useful(config: ModelConfig, row: Row) -> float:
    """Useful operations of one window."""
    if row.block_size != AUTOREGRESSIVE:
        return training_flops(config, row.vocab_size, row.seq_len, row.block_size, NoiseConfig(views=row.views))
    inner, kv = config.heads * config.dim_per_head, config.key_value_heads * config.dim_per_head
    products = 2 * config.width * (2 * inner + 2 * kv + 3 * config.hidden_width) * row.seq_len
    attention = 4 * inner * row.seq_len * (row.seq_len + 1) / 2
    return 3 * (config.layers * (products + attention) + 2 * row.seq_len * config.width * row.vocab_size)


def product_rate(config: ModelConfig, row: Row) -> float:
    """Operations a second of plain matrix products at the shape of the layers' largest one."""
    dtype = torch.bfloat16 if row.dtype == "bfloat16" else torch.float32
    tokens, inner = 2 * row.tokens, 2 * config.hidden_width
    left = torch.randn(tokens, config.width, device=row.device, dtype=dtype)
    right = torch.randn(config.width, inner, device=row.device, dtype=dtype)
    return 2.0 * tokens * config.width * inner / timed(lambda _: left @ right, row)


def timed(run: Callable[[int], object], row: Row) -> float:
    """Median seconds of a call, after two for warming up."""
    seconds = []
    for number in range(row.repeats + 2):
        began = time.perf_counter()
        run(number)
        if row.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[2:])[row.repeats // 2]


if __name__ == "__main__":
    main()
