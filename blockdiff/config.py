"""The whole of a command's config as plain dataclasses, checked across its parts. Imports neither Hydra nor
OmegaConf."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from blockdiff.core.blocks import check_block_size
from blockdiff.core.bound import EVALUATION_SEED
from blockdiff.core.corruption import NoiseConfig
from blockdiff.data.config import DataConfig
from blockdiff.evaluation.config import LikelihoodConfig, SamplesConfig, SpeedConfig, SweepConfig
from blockdiff.model.denoiser import ModelConfig
from blockdiff.sampling.config import SamplerConfig
from blockdiff.training.config import LoggerConfig, OptimizerConfig, Resume, TrainerConfig


@dataclass
class TrainConfig:
    """`blockdiff train`.

    Attributes:
        name: of the run: checkpoints/<name>/; None means <data>-b<block_size>.
        seed: of weights, data order and noise.
        block_size: S, tokens that are denoised in parallel; divides seq_len.
        seq_len: L, context length in tokens.
        resume: ``auto`` goes on where a run of this name and config stands, ``must`` insists on one, ``never``
            starts anew.
        run_root: directory of the run directories.
    """

    name: str | None = None
    seed: int = 0
    block_size: int = 8
    seq_len: int = 256
    resume: Resume = Resume.auto
    run_root: str = "checkpoints"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)

    def check(self) -> None:
        """Raises a ValueError, before any work, that names key, value, rule and remedy."""
        check_block_size(self.block_size, self.seq_len)
        self.model.check()
        self.noise.check()
        self.optimizer.check()
        self.trainer.check()


@dataclass
class PrepareConfig:
    """`blockdiff prepare`: tokenise a corpus without training on it.

    Attributes:
        block_size: for the statistics of padding.
        seq_len: for the number of windows.
    """

    block_size: int = 8
    seq_len: int = 256
    data: DataConfig = field(default_factory=DataConfig)

    def check(self) -> None:
        check_block_size(self.block_size, self.seq_len)


@dataclass
class EvaluateConfig:
    """`blockdiff evaluate`: the likelihood bound of a checkpoint on its validation split, or on given files.

    Attributes:
        checkpoint: run directory or .ckpt file.
        weights: ``ema`` or ``raw``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` …
        block_size: None means the one trained with.
        views: noise draws of each sequence; at least 2 for a standard error.
        max_samples: windows of the validation split; None means all.
        micro_batch_size: windows a forward pass.
        seed: of the noise. Reports that are compared use the same one.
        files: text files, each one document, instead of the validation split.
        allow_untrained_block_size: score at a block size that was not trained.
        output: JSON file for the numbers; None prints only.
    """

    checkpoint: str = "???"
    weights: str = "ema"
    device: str = "auto"
    block_size: int | None = None
    views: int = 4
    max_samples: int | None = None
    micro_batch_size: int = 16
    seed: int = EVALUATION_SEED
    files: Any = field(default_factory=list)
    allow_untrained_block_size: bool = False
    output: str | None = None

    def check(self) -> None:
        if self.views < 2:
            raise ValueError(f"views={self.views} must be at least 2: one draw has no standard error")


@dataclass
class SampleConfig:
    """`blockdiff sample`: text from a checkpoint.

    Attributes:
        checkpoint: run directory or .ckpt file.
        prompt: one prompt or a list of them; may hold ``<hole:24>`` for 24 tokens to be filled in.
        prompts: file of prompts, one a line, or .jsonl with the key ``prompt``; ``-`` reads standard input.
        count: samples of each prompt.
        weights: ``ema`` or ``raw``.
        device: ``auto``, ``cpu``, ``cuda`` …
        dtype: ``auto`` (float32 on a CPU, bfloat16 on a GPU that has it), ``float32``, ``float64``, ``bfloat16``.
        block_size: None means the one trained with.
        allow_untrained_block_size: sample at a block size that was not trained.
        output: file to write; None prints.
        format: ``text`` or ``jsonl``.
        watch: show the denoising live in the terminal.
        trace: HTML file that replays the denoising.
        sampler: how tokens are chosen.
    """

    checkpoint: str = "???"
    prompt: Any = ""
    prompts: str | None = None
    count: int = 1
    weights: str = "ema"
    device: str = "auto"
    dtype: str = "auto"
    block_size: int | None = None
    allow_untrained_block_size: bool = False
    output: str | None = None
    format: str = "text"
    watch: bool = False
    trace: str | None = None
    sampler: SamplerConfig = field(default_factory=SamplerConfig)

    def check(self) -> None:
        if self.format not in ("text", "jsonl"):
            raise ValueError(f"format={self.format} must be text or jsonl")
        if self.count < 1:
            raise ValueError(f"count={self.count} must be at least 1")


class Part(Enum):
    """What `blockdiff measure` measures."""

    likelihood = "likelihood"
    samples = "samples"
    reference = "reference"


@dataclass
class MeasureConfig:
    """`blockdiff measure`: one cell of a sweep, written as JSON.

    Attributes:
        checkpoint: run directory or .ckpt file.
        part: ``likelihood`` (bound, true likelihood, curve by position), ``samples`` (coherence and speed under one
            sampler) or ``reference`` (real and shuffled text in the samples' place, on the checkpoint's corpus).
        judge: run directory or .ckpt file of block size 1 that judges samples, or ``hf:`` and the directory of a
            Hugging Face causal model on this disk (extra `hf`); None leaves its columns empty.
        block_size: None means the one trained with.
        pack_block_size: that validation windows are packed for, equal for models that are compared; None: block_size.
        allow_untrained_block_size: measure at a block size that was not trained.
        weights: ``ema`` or ``raw``.
        device: ``auto``, ``cpu``, ``cuda`` …
        dtype: ``auto`` (float32 on a CPU, bfloat16 on a GPU that has it), ``float32`` …
        output: JSON file; arrays go to an NPZ file beside it.
        likelihood, samples, speed: the protocols.
        sampler: how tokens are chosen.
    """

    checkpoint: str = "???"
    part: Part = Part.likelihood
    judge: str | None = None
    block_size: int | None = None
    pack_block_size: int | None = None
    allow_untrained_block_size: bool = False
    weights: str = "ema"
    device: str = "auto"
    dtype: str = "auto"
    output: str = "???"
    likelihood: LikelihoodConfig = field(default_factory=LikelihoodConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)

    def check(self) -> None:
        self.likelihood.check()
        self.samples.check()
        self.speed.check()
        if self.part is Part.reference and self.judge is None:
            raise ValueError(
                "part=reference needs judge=…: a run directory or checkpoint of block size 1, or hf: and the directory "
                "of a Hugging Face model"
            )


VERBS: dict[str, type] = {
    "train": TrainConfig,
    "sample": SampleConfig,
    "evaluate": EvaluateConfig,
    "prepare": PrepareConfig,
    "measure": MeasureConfig,
    "sweep": SweepConfig,
}
