"""A trained model as an object: load it, sample from it, score with it. Needs neither Lightning nor Hydra."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from blockdiff.config import TrainConfig
from blockdiff.core.blocks import check_block_size
from blockdiff.core.bound import EVALUATION_SEED, Bound
from blockdiff.data.tokenizer import Tokenizer
from blockdiff.evaluation.likelihood import TextScore, score_texts
from blockdiff.model.denoiser import Denoiser
from blockdiff.model.weights import WEIGHTS_NAME, write_weights
from blockdiff.model.weights import read_weights as read_exported
from blockdiff.records import dump_yaml, from_plain, read_yaml
from blockdiff.sampling.batch import BlockEvent
from blockdiff.sampling.config import SamplerConfig
from blockdiff.sampling.report import Generation
from blockdiff.sampling.sampler import run, stream
from blockdiff.training.checkpoints import newest_valid, read_weights, step_of

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class LanguageModel:
    """A denoiser with its tokenizer and the config it was trained with.

    Attributes:
        config: of the training run.
        tokenizer: that the run's text was encoded with.
        denoiser: in evaluation mode.
        step: optimizer steps behind these weights.
        path: of the checkpoint.
    """

    config: TrainConfig
    tokenizer: Tokenizer
    denoiser: Denoiser
    step: int
    path: Path

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int | None = None,
        block_size: int | None = None,
        rule: str = "confidence",
        threshold: float = 0.9,
        steps: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        **options: Any,
    ) -> list[Generation]:
        """Continues prompts, or fills the holes of texts with ``<hole:N>`` in them.

        Args:
            prompts: one text or several; a text's result does not depend on its companions.
            max_new_tokens: None means up to seq_len.
            block_size: None means the one trained with; another one is used as asked, see `SamplerConfig`.
            rule, threshold, steps, temperature, top_p, seed, options: as in `SamplerConfig`.

        Returns:
            One result a prompt, in order: `text`, `token_ids`, `nfe`, `finish_reason` and more.

        Raises:
            ValueError: an option breaks its rule, or a prompt does not fit into seq_len.
        """
        sampler = self.sampler(
            max_new_tokens=max_new_tokens,
            rule=rule,
            threshold=threshold,
            steps=steps,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            **options,
        )
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return run(self.denoiser, texts, sampler, **self.place(block_size)).generations

    def stream(self, prompt: str, block_size: int | None = None, **options: Any) -> Iterator[BlockEvent]:
        """Continues one prompt, one event a finished block; options as in `generate`."""
        return stream(self.denoiser, prompt, self.sampler(**options), **self.place(block_size))

    def nelbo(
        self, texts: str | Sequence[str], samples: int = 4, block_size: int | None = None, seed: int = EVALUATION_SEED
    ) -> TextScore:
        """The likelihood bound of texts: `nelbo` in nats per token, `standard_error`, `token_count`, `byte_count`.

        Args:
            texts: one text or several, each with its end token.
            samples: noise draws of each text, at least 2 for a standard error; the bound is exact at block size 1.
            block_size: None means the one trained with.
            seed: of the noise, which depends on a text's tokens but not on the other texts.

        Raises:
            ValueError: `samples` is below 2, or `block_size` does not divide seq_len.
        """
        if samples < 2:
            raise ValueError(f"samples={samples} must be at least 2: one draw has no standard error")
        given = [texts] if isinstance(texts, str) else list(texts)
        bounds = score_texts(
            self.denoiser,
            self.tokenizer.encode_batch(given),
            eos_id=self.tokenizer.eos_id,
            seq_len=self.config.seq_len,
            block_size=self.config.block_size if block_size is None else block_size,
            views=samples,
            seed=seed,
        )
        total = Bound()
        for bound in bounds:
            total = total.merge(bound)
        return TextScore(total, sum(len(text.encode()) for text in given))

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes weights (safetensors), config and tokenizer to a directory that `load` reads; makes it if need be.

        Raises:
            ValueError: the directory holds files already.
        """
        target = Path(directory)
        if target.exists() and any(target.iterdir()):
            raise ValueError(f"{target} is not empty: nothing was written; choose another directory")
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.yaml").write_text(dump_yaml(self.config), encoding="utf-8")
        self.tokenizer.save(target / "tokenizer.json")
        write_weights(self.denoiser, target / WEIGHTS_NAME, self.step)
        return target

    def sampler(self, **options: Any) -> SamplerConfig:
        """The run's sampler settings with some of them replaced; enums may be given by name.

        Raises:
            ValueError: no such option; the nearest one is named.
        """
        return from_plain(SamplerConfig, {k: getattr(v, "name", v) for k, v in options.items()})

    def place(self, block_size: int | None) -> dict[str, Any]:
        """What the sampler must know of this model: block_size, seq_len and tokenizer."""
        size = self.config.block_size if block_size is None else block_size
        check_block_size(size, self.config.seq_len)
        return {"block_size": size, "seq_len": self.config.seq_len, "tokenizer": self.tokenizer}


def load(
    path: str | os.PathLike[str],
    device: str = "auto",
    weights: Literal["ema", "raw"] = "ema",
    dtype: str = "auto",
) -> LanguageModel:
    """Reads a trained model from its run directory or one of its checkpoints.

    Args:
        path: ``checkpoints/NAME`` (the newest valid checkpoint is taken), a ``.ckpt`` file in it, or what
            `LanguageModel.save` wrote.
        device: ``auto`` takes CUDA where there is one.
        weights: the averaged weights, or those that the optimizer holds.
        dtype: ``auto`` is float32 on a CPU and bfloat16 on a GPU that computes in it.

    Raises:
        ValueError: no such directory or file, a truncated or foreign checkpoint, a tokenizer that does not fit; the
            message names the file.
    """
    place = Path(path)
    if not place.exists():
        raise ValueError(f"checkpoint={place} does not exist: name a run directory or a .ckpt file")
    directory = place if _is_run(place) else place.parent
    config = from_plain(TrainConfig, read_yaml(directory / "config.yaml"))
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    state, step, checkpoint = _weights(place, weights)
    rows = state["embedding.weight"].shape[0] - 1
    if rows != tokenizer.vocab_size:
        raise ValueError(
            f"{directory / 'tokenizer.json'} has {tokenizer.vocab_size} tokens, but {checkpoint} was trained with "
            f"{rows}: put back the tokenizer of this run"
        )
    with torch.device("meta"):
        denoiser = Denoiser(config.model, tokenizer.vocab_size)
    denoiser.load_state_dict(state, assign=True)
    target = resolve_device(device)
    denoiser = denoiser.to(device=target, dtype=resolve_dtype(dtype, target)).eval().requires_grad_(False)
    return LanguageModel(config, tokenizer, denoiser, step, checkpoint)


def _weights(place: Path, kind: Literal["ema", "raw"]) -> tuple[dict[str, Tensor], int, Path]:
    """Weights, steps behind them and the file they are from."""
    exported = place / WEIGHTS_NAME if _is_run(place) else place
    if exported.suffix == ".safetensors" and exported.exists():
        return *read_exported(exported), exported
    checkpoint = _newest(place) if _is_run(place) else place
    return *read_weights(checkpoint, kind), checkpoint


def _is_run(place: Path) -> bool:
    """Whether it is a run directory: checkpoints of split weights are directories too."""
    return place.is_dir() and step_of(place) is None


def _newest(directory: Path) -> Path:
    newest = newest_valid(directory)
    if newest.path is None:
        reasons = "".join(f"\n  {reason}" for reason in newest.broken)
        raise ValueError(f"{directory} holds no valid checkpoint{reasons}")
    return newest.path


def resolve_device(device: str) -> torch.device:
    """The device that ``auto`` or a name stands for; a ValueError names one that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device} is no device of PyTorch: use auto, cpu, cuda or cuda:N") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device}, but PyTorch sees no CUDA device here: use device=cpu")
    return target


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """float32 on a CPU (bfloat16 is very slow there without native support), bfloat16 on a GPU that has it."""
    if dtype == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} must be auto or one of: {', '.join(DTYPES)}")
    return DTYPES[dtype]
