"""What the choice of noise costs in variance: one table of gradient variance and of the bound after equal steps.

    python benchmarks/variance.py
    python benchmarks/variance.py --steps 500 --seeds 3 --block-sizes 4 16 64 --model 2x128 --workers 2
    python benchmarks/variance.py --only "exact p=1/2" "exact, fitted" --data corpus.txt --results other.jsonl

For each block size and seed a network is trained with every choice. The gradient variance E‖g − E g‖² / ‖E g‖² is taken
at the weights that training with the default has ended at, the same for all choices, over resamplings of the noise of
one batch; choices that are unbiased for the bound share the same E g, the others have their own. The bound is that of
the validation split under uniform counts and fixed noise, the same for all, after equal steps and, in a column of its
own, after as many steps as the default's operations pay for (`training_flops`, and the forward passes of a clip
search); below 2 % of difference the run is not repeated.

Every finished (choice, block size, seed) is a line of the file of results, so a killed run goes on where it stood.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from blockdiff.core.bound import Bound
from blockdiff.core.corruption import CLIP_CELLS, CorruptionKind, Fit, NoiseConfig, NoiseKey, ViewKind
from blockdiff.core.randomness import Stream, hash_int
from blockdiff.data.batch import Batch
from blockdiff.data.config import DataConfig, Source
from blockdiff.data.loader import TrainBatches, ValBatches
from blockdiff.data.packing import PackedDataset
from blockdiff.data.prepare import PreparedData, prepare
from blockdiff.data.tokenizer import TokenizerKind
from blockdiff.model.compute import training_flops
from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.training.adaptive import AdaptiveNoise
from blockdiff.training.config import OptimizerConfig, OptimizerName
from blockdiff.training.optimizer import build_optimizer, lr_ratio
from blockdiff.training.staging import noise_batch
from blockdiff.training.validation import validation_sums

BERNOULLI = NoiseConfig(corruption=CorruptionKind.bernoulli)
PAIRS = NoiseConfig(views=2, view_kind=ViewKind.complementary)
DEFAULT = "exact p=1/2"
CHOICES = {
    "exact p=0": NoiseConfig(count_power=0.0),
    "exact p=1/4": NoiseConfig(count_power=0.25),
    DEFAULT: NoiseConfig(count_power=0.5),
    "exact p=3/4": NoiseConfig(count_power=0.75),
    "exact p=1": NoiseConfig(count_power=1.0),
    "exact, fitted": NoiseConfig(fit=Fit.counts),
    "exact, 2 independent views": NoiseConfig(views=2),
    "exact, 2 complementary views": PAIRS,
    "exact, 2 complementary views, fitted": replace(PAIRS, fit=Fit.counts),
    "Bernoulli iid": replace(BERNOULLI, stratified=False),
    "Bernoulli stratified": BERNOULLI,
    "Bernoulli clipped [0.3, 0.8]": replace(BERNOULLI, clip=[0.3, 0.8]),
    "Bernoulli, clip search": replace(BERNOULLI, fit=Fit.clip),
}


@dataclass
class Settings:
    """What all rows share, and what a row of an earlier run must agree in to be kept."""

    steps: int
    model: str
    seq_len: int
    batch: int
    lr: float
    draws: int
    val_windows: int
    data: str | None

    @property
    def network(self) -> ModelConfig:
        """LAYERSxWIDTH, with heads of 32."""
        layers, width = map(int, self.model.split("x"))
        return ModelConfig(layers=layers, width=width, heads=max(width // 32, 1))

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(OptimizerName.muon, lr=self.lr, warmup_steps=max(self.steps // 10, 1), weight_decay=0.0)

    def noise(self, choice: str) -> NoiseConfig:
        """The choice's noise; fits begin after a tenth of a run and come often enough to matter in a short one."""
        noise, every = CHOICES[choice], max(self.steps // 20, 1)
        return noise if noise.fit is Fit.none else replace(noise, fit_every=every, fit_warmup=2 * every)


@dataclass
class Job:
    """One choice, block size and seed."""

    choice: str
    block_size: int
    seed: int


class Task:
    """Data and networks of one block size and seed."""

    def __init__(self, settings: Settings, block_size: int, seed: int) -> None:
        self.settings, self.block_size, self.seed = settings, block_size, seed
        prepared = prepared_data(settings.data)
        self.vocab_size = prepared.tokenizer.vocab_size
        train, val = (
            PackedDataset(store, seq_len=settings.seq_len, block_size=block_size, eos_id=prepared.tokenizer.eos_id)
            for store in (prepared.train, prepared.val)
        )
        sizes = {"global_batch_size": settings.batch, "micro_batch_size": settings.batch}
        self.batches = TrainBatches(train, seed=seed, **sizes)
        self.val = ValBatches(val, micro_batch_size=settings.batch, max_samples=settings.val_windows)

    def new_denoiser(self) -> Denoiser:
        """The untrained network of the seed."""
        torch.manual_seed(hash_int(self.seed, Stream.WEIGHTS))
        return Denoiser(self.settings.network, self.vocab_size)

    def loss(self, denoiser: Denoiser, batch: Batch, noise: AdaptiveNoise, step: int) -> Tensor:
        """Nats per token of a batch as `blockdiff.training.module` takes it, with its measurements."""
        key = NoiseKey(self.seed, step, batch.slot_B, self.settings.batch)
        noised = noise_batch(
            batch, key, noise.noise, block_size=self.block_size, mask_id=denoiser.mask_id, law_S1=noise.law_S1
        )
        noise.probe(denoiser, noised, key)
        weight_M = noised.weight_M / (batch.global_count * noise.noise.views)
        plan = denoiser.plan(batch.document_BL, self.block_size, noise.noise.views, noised.layout)
        watch = noise.watch(noised, weight_M)
        return denoiser.weighted_nll(noised.xt_BKL, batch.tokens_BL, plan, noised.chosen_M, weight_M, watch)[0]

    def train(self, config: NoiseConfig, steps: int) -> tuple[Denoiser, AdaptiveNoise]:
        """A network after so many steps, and its noise."""
        denoiser, noise = self.new_denoiser(), AdaptiveNoise(config, self.block_size)
        noise.begin(torch.device("cpu"), True)
        optimizer = build_optimizer(denoiser, self.settings.optimizer)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = self.settings.lr * lr_ratio(step, self.settings.optimizer, steps)
            self.loss(denoiser, self.batches[step], noise, step).backward()
            torch.nn.utils.clip_grad_norm_(denoiser.parameters(), self.settings.optimizer.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            noise.finish_step(step + 1, lambda x: x)
        return denoiser, noise

    def bound(self, denoiser: Denoiser) -> float:
        """Of the validation windows, nats per token."""
        batches = (self.val[number] for number in range(len(self.val)))
        sums_3 = validation_sums(denoiser, batches, block_size=self.block_size, views=2, device=torch.device("cpu"))
        return Bound.from_sums(sums_3).nelbo

    def gradient_moments(self, denoiser: Denoiser, noise: AdaptiveNoise, draws: int) -> tuple[float, float]:
        """E‖g − E g‖² and ‖E g‖², both unbiased, over draws of the noise of one batch that training has not seen."""
        batch, squares = self.batches[self.settings.steps], 0.0
        total = [torch.zeros_like(weight) for weight in denoiser.parameters()]
        still = AdaptiveNoise(replace(noise.noise, fit=Fit.none), self.block_size)
        still.law_S1 = noise.law_S1
        for draw in range(draws):
            denoiser.zero_grad()
            self.loss(denoiser, batch, still, self.settings.steps + draw).backward()
            gradients = [weight.grad for weight in denoiser.parameters() if weight.grad is not None]
            squares += sum(float(gradient.square().sum()) for gradient in gradients)
            torch._foreach_add_(total, gradients)
        denoiser.zero_grad()
        of_total = sum(float(part.square().sum()) for part in total)
        variance = (squares - of_total / draws) / (draws - 1)
        return variance, of_total / draws**2 - variance / draws


def main() -> None:
    options = _options()
    settings = Settings(
        options.steps, options.model, options.seq_len, options.batch, options.lr, options.draws, options.val_windows,
        options.data,
    )  # fmt: skip
    console = Console(width=150)
    if unknown := [choice for choice in options.only if choice not in CHOICES]:
        raise SystemExit(f"--only {unknown[0]!r} is none of the choices: {', '.join(CHOICES)}")
    prepared_data(settings.data)
    jobs = [
        Job(choice, size, seed)
        for size in options.block_sizes
        for seed in range(options.seeds)
        for choice in options.only or CHOICES
    ]
    began = time.perf_counter()
    rows = {_key(row): row for row in _finished(options.results, settings)}
    shared = [Job(DEFAULT, size, seed) for size in options.block_sizes for seed in range(options.seeds)]
    with _pool(options.workers) as pool:
        for phase in (shared, jobs):
            futures = [
                pool.submit(measure, settings, job, weights)
                for job in phase
                if not (weights := _weights(options.results, settings, job)).exists() or _key(asdict(job)) not in rows
            ]
            for future in as_completed(futures):
                row = future.result()
                rows[_key(row)] = row
                with open(options.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"settings": asdict(settings), **row}) + "\n")
                console.print(_line(row), highlight=False)
    console.print(_table(settings, jobs, rows, time.perf_counter() - began))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--model", default="2x64", help="LAYERSxWIDTH")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="windows a step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--draws", type=int, default=16, help="resamplings of the noise for the gradient variance")
    parser.add_argument("--val-windows", type=int, default=64)
    parser.add_argument("--data", help="a text file; default: the standard library, as conf/data/stdlib.yaml")
    parser.add_argument("--only", nargs="+", default=[], metavar="CHOICE")
    parser.add_argument("--results", type=Path, default=Path("variance.jsonl"))
    parser.add_argument("--workers", type=int, default=1, help="processes side by side, one thread each")
    return parser.parse_args()


def _pool(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,))


@functools.cache
def prepared_data(path: str | None) -> PreparedData:
    """The corpus in bytes, read once and kept under `data/`: a small network learns something of them in 300 steps."""
    source = DataConfig() if path is None else DataConfig(source=Source.text, files=[path])
    return prepare(replace(source, tokenizer=TokenizerKind.bytes))


def measure(settings: Settings, job: Job, weights: Path) -> dict[str, Any]:
    """A row. The default's leaves the weights that all gradients of its block size and seed are taken at."""
    began = time.perf_counter()
    task, config = Task(settings, job.block_size, job.seed), settings.noise(job.choice)
    denoiser, noise = task.train(config, settings.steps)
    bound = task.bound(denoiser)
    if job.choice == DEFAULT:
        variance, square = task.gradient_moments(denoiser, noise, settings.draws)
        weights.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": denoiser.state_dict(), "square": square}, weights)
    else:
        shared = torch.load(weights, weights_only=True)
        denoiser.load_state_dict(shared["weights"])
        variance, square = task.gradient_moments(denoiser, noise, settings.draws)
        square = shared["square"] if config.is_bound else square
    paid = round(settings.steps * _flops(settings, task, DEFAULT) / _flops(settings, task, job.choice))
    at_compute = bound
    if abs(paid - settings.steps) > 0.02 * settings.steps:
        at_compute = task.bound(task.train(config, paid)[0])
    law = None if noise.law_S1 is None else (noise.law_S1.diff() / noise.law_S1[-1]).tolist()
    return {
        **asdict(job),
        "variance": variance / square,
        "bound": bound,
        "steps_at_equal_compute": paid,
        "bound_at_equal_compute": at_compute,
        "clip": noise.noise.clip,
        "law": law,
        "seconds": time.perf_counter() - began,
    }


def _flops(settings: Settings, task: Task, choice: str) -> float:
    """Operations of a window's step."""
    noise = settings.noise(choice)
    shape = settings.network, task.vocab_size, settings.seq_len, task.block_size
    flops = training_flops(*shape, noise)
    if noise.fit is Fit.clip:  # a forward pass is a third
        flops += training_flops(*shape, replace(BERNOULLI, views=CLIP_CELLS)) / 3 / noise.fit_every
    return flops


def _weights(results: Path, settings: Settings, job: Job) -> Path:
    digest = hashlib.sha256(json.dumps(asdict(settings)).encode()).hexdigest()[:8]
    return results.with_suffix(".weights") / f"block{job.block_size}-seed{job.seed}-{digest}.pt"


def _key(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["choice"], row["block_size"], row["seed"]


def _finished(results: Path, settings: Settings) -> Iterator[dict[str, Any]]:
    """Rows of an earlier run with the same settings; a line that a kill cut short is not one of them."""
    if not results.exists():
        return
    text = results.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        results.write_text(text, encoding="utf-8")
    for line in text.splitlines():
        row = json.loads(line)
        if row.pop("settings") == asdict(settings):
            yield row


def _line(row: dict[str, Any]) -> str:
    found = "" if row["clip"] == [0.0, 1.0] else f"  clip {row['clip']}"
    return (
        f"block {row['block_size']:>3}  seed {row['seed']}  {row['choice']:<36} variance {row['variance']:8.3f}  "
        f"bound {row['bound']:.4f}  at equal compute {row['bound_at_equal_compute']:.4f} "
        f"({row['steps_at_equal_compute']} steps)  {row['seconds']:.0f} s{found}"
    )


def _table(
    settings: Settings, jobs: list[Job], rows: dict[tuple[str, int, int], dict[str, Any]], seconds: float
) -> Table:
    seeds = 1 + max(job.seed for job in jobs)
    table = Table(
        "block", "noise", "gradient variance", "bound, equal steps", "bound, equal compute", "steps of equal compute",
        title=f"{settings.model}, seq_len {settings.seq_len}, {settings.steps} steps of {settings.batch} windows, "
        f"mean ± standard deviation of {seeds} seed(s), {seconds:.0f} s",
        title_justify="left",
    )  # fmt: skip
    for size in dict.fromkeys(job.block_size for job in jobs):
        table.add_section()
        for choice in dict.fromkeys(job.choice for job in jobs):
            of = [rows[choice, size, seed] for seed in range(seeds)]
            table.add_row(
                str(size),
                choice,
                _spread([row["variance"] for row in of], 3),
                _spread([row["bound"] for row in of], 4),
                _spread([row["bound_at_equal_compute"] for row in of], 4),
                f"{statistics.mean(row['steps_at_equal_compute'] for row in of):.0f}",
            )
    return table


def _spread(values: list[float], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


if __name__ == "__main__":
    main()
