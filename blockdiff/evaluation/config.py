"""The settings of measurements and sweeps as plain dataclasses. Imports no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from blockdiff.training.config import LoggerConfig

HF_PREFIX = "hf:"
"""Before the directory of a judge that is a Hugging Face model."""

LARGEST_EXACT = 8
"""Block size up to which all subsets are enumerated: 255 masks a block, and twice as many with each further token."""


@dataclass
class LikelihoodConfig:
    """How likelihoods are estimated.

    Attributes:
        windows: of the validation split, evenly over it; None: all.
        views: noise draws of each, for the bound.
        curve_windows: for the curve by position in the block; each is read under S masks.
        exact_windows: for the true likelihood; each is read under 2^S masks up to S = `largest_exact`.
        largest_exact: block size up to which the likelihood is exact.
        orders: random orders of the bracket at larger block sizes; each is read under S masks.
        micro_batch_size: windows a forward pass.
    """

    windows: int | None = 128
    views: int = 4
    curve_windows: int = 64
    exact_windows: int = 16
    largest_exact: int = LARGEST_EXACT
    orders: int = 8
    micro_batch_size: int = 8

    def check(self) -> None:
        """Raises a ValueError that names key, value and rule."""
        for key, least in (("views", 2), ("orders", 2), ("curve_windows", 1), ("exact_windows", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"likelihood.{key}={getattr(self, key)} must be at least {least}")
        if not 0 <= self.largest_exact <= LARGEST_EXACT:
            raise ValueError(f"likelihood.largest_exact={self.largest_exact} must lie between 0 and {LARGEST_EXACT}")


@dataclass
class SamplesConfig:
    """What is sampled for the measures of coherence.

    Attributes:
        prompts: passages of validation text whose beginnings are continued.
        candidates: samples of each prompt, and samples without prompt for each passage.
        prompt_tokens: tokens of a passage that are given.
        new_tokens: tokens that are made, at most.
        seed: of the samples and of the shuffling.
    """

    prompts: int = 16
    candidates: int = 2
    prompt_tokens: int = 32
    new_tokens: int = 128
    seed: int = 0

    def check(self) -> None:
        """Raises a ValueError that names key, value and rule."""
        for key in ("prompts", "candidates", "prompt_tokens", "new_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"samples.{key}={getattr(self, key)} must be at least 1")


@dataclass
class SpeedConfig:
    """How speed is measured.

    Attributes:
        prompts: requests of one run.
        shortest_prompt, longest_prompt: tokens; the prompts' lengths lie evenly between them.
        new_tokens: tokens made for each.
        batch_sizes: rows that are denoised together; 1 is one stream.
        repeats: timed runs at each batch size.
    """

    prompts: int = 50
    shortest_prompt: int = 8
    longest_prompt: int = 64
    new_tokens: int = 64
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 16])
    repeats: int = 3

    def check(self) -> None:
        """Raises a ValueError that names key, value and rule."""
        for key in ("prompts", "shortest_prompt", "new_tokens", "repeats"):
            if getattr(self, key) < 1:
                raise ValueError(f"speed.{key}={getattr(self, key)} must be at least 1")
        if self.longest_prompt < self.shortest_prompt:
            shortest = f"speed.shortest_prompt={self.shortest_prompt}"
            raise ValueError(f"speed.longest_prompt={self.longest_prompt} must be at least {shortest}")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"speed.batch_sizes={self.batch_sizes} must be a list of numbers of at least 1")


BLOCK_SIZES = [1, 2, 4, 8, 16, 32]


class Budget(Enum):
    """What runs of different block sizes have in common."""

    tokens = "tokens"
    """Equally many windows."""
    compute = "compute"
    """Equally many floating-point operations, those of the smallest block size (`blockdiff.model.compute`)."""


@dataclass
class SweepConfig:
    """`blockdiff sweep`.

    Attributes:
        name: of the sweep; its runs are <name>-b<block size>.
        block_size: to train and measure; empty: `BLOCK_SIZES`. With `checkpoints`: to measure each at; empty: its own.
        checkpoints: run directories or .ckpt files to measure instead of training.
        budget: what the runs have in common: ``tokens`` or ``compute``.
        train: arguments of every `blockdiff train`, such as ``trainer.max_steps=600``.
        measure: arguments of every `blockdiff measure`, such as ``sampler.temperature=0.8``.
        steps: step budgets: ancestral sampling in so many steps a block, where that is fewer than its tokens.
        threshold: thresholds of confidence sampling.
        samplers: further settings, each a string of arguments: ``"rule=entropy_bound entropy_bound=0.5"``.
        judge: run directory or checkpoint of block size 1 that judges samples, or ``hf:`` and the directory of a
            Hugging Face causal model; None: the sweep's own.
        tolerance: judge perplexity that may be lost against autoregressive samples, for the report's recommendation.
        output: directory of cells and report; None: sweeps/<name>.
        dry_run: print the commands and run nothing.
        logger: that gets the report's plots beside the files.
    """

    name: str = "sweep"
    block_size: list[int] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    budget: Budget = Budget.tokens
    train: list[str] = field(default_factory=list)
    measure: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    threshold: list[float] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    judge: str | None = None
    tolerance: float = 0.02
    output: str | None = None
    dry_run: bool = False
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    def check(self) -> None:
        """Raises a ValueError that names key, value and rule."""
        if Path(self.name).name != self.name or self.name.startswith("."):
            raise ValueError(f"name={self.name} must be a plain directory name, such as name=tradeoff")
        for key, values in (("block_size", self.block_size), ("steps", self.steps)):
            if any(value < 1 for value in values) or len(set(values)) < len(values):
                raise ValueError(f"{key}={values} must be different numbers of at least 1")
        if any(not 0 <= value <= 1 for value in self.threshold):
            raise ValueError(f"threshold={self.threshold} must be probabilities between 0 and 1")
        self.logger.check()
        if self.tolerance < 0:
            raise ValueError(f"tolerance={self.tolerance} must be at least 0; 0.02 allows 2 %")

    @property
    def directory(self) -> Path:
        return Path(self.output or f"sweeps/{self.name}")
