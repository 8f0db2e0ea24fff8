"""One cell of a sweep: a model's likelihood, its samples and speed under one sampler, or real text in their place.

Legend: W windows, L window length, S block size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockdiff.data.loader import Batch, val_loader
from blockdiff.data.packing import PackedDataset
from blockdiff.data.prepare import PreparedData
from blockdiff.evaluation.coherence import Coherence, border_interval, measure_coherence
from blockdiff.evaluation.config import LikelihoodConfig, SamplesConfig, SpeedConfig
from blockdiff.evaluation.copies import TrainingText
from blockdiff.evaluation.intervals import ratio_interval
from blockdiff.evaluation.judge import Judge, Judgement
from blockdiff.evaluation.passages import Passage, Passages, choose_passages, shuffled, without_prompt
from blockdiff.evaluation.positions import border_jump, by_position
from blockdiff.evaluation.throughput import measure_speed, protocol, speed_prompts
from blockdiff.evaluation.windows import left_to_right_nats, true_nats, window_nats
from blockdiff.model.denoiser import Denoiser
from blockdiff.sampling.config import SamplerConfig
from blockdiff.sampling.report import Finish, Generation
from blockdiff.sampling.sampler import generate

COPY_TOKENS = 2_000_000
"""Training tokens that samples are compared with, from the start: a search reads all of them for every token."""


@dataclass
class Subject:
    """What is measured, and on which text.

    Attributes:
        denoiser: in evaluation mode.
        prepared: its corpus.
        block_size: S, that is sampled and scored with.
        pack_block_size: that windows are packed for; a multiple of S. Equal windows need equal packing.
        seq_len: L.
        document_mask: as in training.
        python: whether the corpus is Python.
    """

    denoiser: Denoiser
    prepared: PreparedData
    block_size: int
    pack_block_size: int
    seq_len: int
    document_mask: bool
    python: bool = False

    def batches(self, windows: int | None, micro_batch_size: int) -> Iterable[Batch]:
        """Windows of the validation split, spread evenly over it."""
        dataset = PackedDataset(
            self.prepared.val,
            seq_len=self.seq_len,
            block_size=self.pack_block_size,
            eos_id=self.prepared.tokenizer.eos_id,
            document_mask=self.document_mask,
        )
        return val_loader(dataset, micro_batch_size=micro_batch_size, max_samples=windows)


@dataclass
class Measurement:
    """What a cell leaves: numbers for its JSON file, arrays for the NPZ file beside it."""

    numbers: dict[str, Any]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


def measure_likelihood(subject: Subject, config: LikelihoodConfig) -> Measurement:
    """Bound, true likelihood and curve by position in the block, with what is needed to pair models."""
    denoiser, size = subject.denoiser, subject.block_size
    bound = window_nats(
        denoiser, subject.batches(config.windows, config.micro_batch_size), block_size=size, views=config.views
    )
    curve = left_to_right_nats(
        denoiser, subject.batches(config.curve_windows, config.micro_batch_size), block_size=size
    )
    exact_batches = subject.batches(config.exact_windows, 1)
    true = true_nats(denoiser, exact_batches, block_size=size, largest_exact=config.largest_exact, orders=config.orders)
    same = window_nats(denoiser, exact_batches, block_size=size, views=4 * config.views)
    tokens = same.window_tokens.astype(np.float64)
    nelbo = ratio_interval(bound.window_nats, bound.window_tokens.astype(np.float64))
    bytes_per_token = subject.prepared.manifest["bytes_per_token"]
    jump = border_jump(curve, size)
    numbers = {
        "nelbo": nelbo,
        "noise_error": bound.noise_error,
        "tokens": int(bound.window_tokens.sum()),
        "windows": len(bound.sample_W),
        "bits_per_byte": nelbo.value / math.log(2) / bytes_per_token,
        "bytes_per_token": bytes_per_token,
        "true": {
            "exact": true.exact,
            "windows": len(true.sample_W),
            "tokens": int(tokens.sum()),
            "low": ratio_interval(true.low_W, tokens),
            "high": ratio_interval(true.high_W, tokens),
            "bound": ratio_interval(same.window_nats, tokens),
            "looseness": ratio_interval(same.window_nats - (true.low_W + true.high_W) / 2, tokens),
        },
        "curve": by_position(curve, size),
        "left_to_right": ratio_interval(curve.window_nats, curve.window_tokens.astype(np.float64)),
        "jump": jump,
    }
    arrays = {f"bound_{f.name}": getattr(bound, f.name) for f in dataclasses.fields(bound)}
    arrays |= {f"curve_{f.name}": getattr(curve, f.name) for f in dataclasses.fields(curve)}
    return Measurement(numbers, arrays)


def measure_samples(
    subject: Subject, sampler: SamplerConfig, samples: SamplesConfig, speed: SpeedConfig, judge: Judge | None
) -> Measurement:
    """Coherence of samples with and without prompt, and speed, under one sampler."""
    chosen = choose_passages(subject.prepared.val, samples)
    training = TrainingText(subject.prepared.train.tokens[:COPY_TOKENS])
    settings = dataclasses.replace(
        sampler, max_new_tokens=samples.new_tokens, seed=samples.seed, stop=[], logprobs=False
    )
    numbers: dict[str, Any] = {"passages": chosen.origin, "block_size": subject.block_size, **_judge_facts(judge)}
    for kind, (real, others) in _kinds(chosen).items():
        generations = _draw(subject, [p.given for p in real for _ in range(samples.candidates)], settings)
        passages = [
            Passage(real[index // samples.candidates].given, g.token_ids) for index, g in enumerate(generations)
        ]
        groups = _groups(passages, samples.candidates if kind == "prompted" else len(passages))
        judged = _judged(judge, passages)
        row = _coherence(subject, groups, judged, _judged(judge, others), training)
        numbers[kind] = row.to_plain()
        numbers[f"{kind}_texts"] = _by_prompt(groups, judged)
        numbers[f"{kind}_ended"] = sum(g.finish_reason == Finish.eos.value for g in generations) / len(generations)
        numbers[f"{kind}_nfe_per_token"] = sum(g.nfe for g in generations) / max(row.new_tokens, 1)
        numbers[f"{kind}_examples"] = [
            {"prompt": _text(subject, p.given), "text": _text(subject, p.new)}
            for p in passages[:: samples.candidates][:3]
        ]
        if judge is not None:
            numbers[f"{kind}_real_border_nats"] = border_interval(judge.read(real), subject.block_size)
    numbers["speed"] = measure_speed(
        subject.denoiser,
        speed_prompts(subject.prepared.val, speed),
        sampler,
        speed,
        block_size=subject.block_size,
        seq_len=subject.seq_len,
    )
    numbers["protocol"] = protocol(subject.denoiser, speed, block_size=subject.block_size, seq_len=subject.seq_len)
    return Measurement(numbers)


def measure_reference(subject: Subject, samples: SamplesConfig, judge: Judge) -> Measurement:
    """The same columns for real text, the ceiling, and for its shuffled tokens, the floor."""
    chosen = choose_passages(subject.prepared.val, samples)
    training = TrainingText(subject.prepared.train.tokens[:COPY_TOKENS])
    numbers: dict[str, Any] = {"passages": chosen.origin, **_judge_facts(judge)}
    for kind, (real, others) in _kinds(chosen).items():
        reference = _judged(judge, others)
        for name, passages in (("real", real), ("shuffled", shuffled(real, samples.seed))):
            groups = _groups(passages, 1 if kind == "prompted" else len(passages))
            row = _coherence(subject, groups, _judged(judge, passages), reference, training)
            numbers[f"{name}_{kind}"] = row.to_plain()
        numbers[f"{kind}_examples"] = [
            {"prompt": _text(subject, p.given), "text": _text(subject, p.new)} for p in real[:3]
        ]
    return Measurement(numbers)


def _judge_facts(judge: Judge | None) -> dict[str, Any]:
    return {} if judge is None else {"judge": judge.description}


def _judged(judge: Judge | None, passages: list[Passage]) -> list[Judgement]:
    return [] if judge is None else judge.read(passages)


def _by_prompt(groups: list[list[Passage]], judged: list[Judgement]) -> list[dict[str, float]]:
    """The judge's nats and tokens of each group, so that samplers can be compared prompt by prompt; none unjudged."""
    if not judged:
        return []
    rest = iter(judged)
    found = [[next(rest) for _ in group] for group in groups]
    return [
        {"nats": float(sum(j.nats_M.sum() for j in group)), "tokens": sum(len(j.nats_M) for j in group)}
        for group in found
    ]


def _kinds(chosen: Passages) -> dict[str, tuple[list[Passage], list[Passage]]]:
    """Passages that are continued, and others to hold the results against, with and without prompt."""
    return {
        "prompted": (chosen.passages, chosen.others),
        "unprompted": (without_prompt(chosen.passages), without_prompt(chosen.others)),
    }


def _draw(subject: Subject, prompts: list[list[int]], settings: SamplerConfig) -> list[Generation]:
    return generate(
        subject.denoiser,
        prompts,
        settings,
        block_size=subject.block_size,
        seq_len=subject.seq_len,
        tokenizer=subject.prepared.tokenizer,
    )


def _groups(passages: list[Passage], size: int) -> list[list[Passage]]:
    return [passages[start : start + size] for start in range(0, len(passages), size)]


def _coherence(
    subject: Subject,
    groups: list[list[Passage]],
    judged: list[Judgement],
    real: list[Judgement],
    training: TrainingText,
) -> Coherence:
    texts = [_text(subject, p.tokens) for group in groups for p in group] if subject.python else None
    size = subject.block_size
    return measure_coherence(groups, texts, judged=judged, real=real, training=training, block_size=size)


def _text(subject: Subject, ids: list[int]) -> str:
    return subject.prepared.tokenizer.decode(ids)
