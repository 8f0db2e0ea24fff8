"""The forward process: which tokens of which block are masked, and what each masked token's −log p counts for.

Legend: B batch, K noisy views of one sequence, L seq_len, N blocks, S block size (L = N·S). Where views come in
complementary pairs, K stands for the pairs until both halves are laid out.

Exact-count corruption draws the number n of masked tokens of a block, not a time. With C tokens that may be masked and
n ~ q(n) on {1..C}, the block's bound is

    E_{n ~ q} 1 / (n · q(n)) · E_{|M| = n} Σ_{i in M} −log p(x_i | x_{not M}, x^{<b}),

which is the continuous-time NELBO of the linear schedule for every q (docs/maths.md): the same bound as Bernoulli
corruption, with less variance and no singular weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from blockdiff.core.counts import count_weight, draw_counts, mask_exactly, prior_law
from blockdiff.core.randomness import Stream, hash_counters, hash_int, permute_index, uniform
from blockdiff.core.schedule import Schedule, alpha, nelbo_weight, pair_weight


class CorruptionKind(Enum):
    exact_count = "exact_count"
    bernoulli = "bernoulli"


class ViewKind(Enum):
    """How the noisy views of a sequence relate: each drawn on its own, or in pairs of a mask and its complement."""

    independent = "independent"
    complementary = "complementary"


class Fit(Enum):
    """What training fits to what it has seen: nothing, the distribution of counts, or the interval of times."""

    none = "none"
    counts = "counts"
    clip = "clip"


CLIP_CELLS = 10
"""A clip that is searched for begins and ends at tenths of the time."""


@dataclass
class NoiseConfig:
    """How training sequences are noised.

    Attributes:
        corruption: ``exact_count`` (draw how many tokens of a block are masked) or ``bernoulli`` (draw a time).
        count_power: p of q(n) ∝ n^(−p) for exact counts. 0 is uniform with weight C/n, 1 weighs all masked tokens
            alike. What a fit of the counts starts from and keeps a share of.
        schedule: noise schedule of Bernoulli corruption.
        schedule_power: exponent of the polynomial schedule.
        clip: [low, high], the interval of times that Bernoulli corruption draws from. A clipped loss is not a bound.
        stratified: spread counts or times evenly over all blocks of the global batch.
        views: noisy views K of each sequence that share its clean stream.
        view_kind: ``independent``, or ``complementary``: pairs of a mask and its complement among the counted tokens
            of each block, so that a pair supervises every token once.
        fit: ``none``; ``counts``: q(n) follows the measured size of gradients; ``clip``: the clip follows the measured
            variance of the loss, as in BD3-LM.
        fit_every: optimizer steps between two fits.
        fit_warmup: optimizer steps before the first fit is used.
        fit_memory: share of the former measurements' weight that each fit keeps, in [0, 1).
        fit_prior: share of the unfitted q(n) in the fitted one, in (0, 1]: bounds the weights.
    """

    corruption: CorruptionKind = CorruptionKind.exact_count
    count_power: float = 0.5
    schedule: Schedule = Schedule.linear
    schedule_power: float = 2.0
    clip: list[float] = field(default_factory=lambda: [0.0, 1.0])
    stratified: bool = True
    views: int = 1
    view_kind: ViewKind = ViewKind.independent
    fit: Fit = Fit.none
    fit_every: int = 20
    fit_warmup: int = 100
    fit_memory: float = 0.9
    fit_prior: float = 0.1

    def check(self) -> None:
        """Raises a ValueError that names key, value and rule."""
        if len(self.clip) != 2 or not 0.0 <= self.clip[0] < self.clip[1] <= 1.0:
            raise ValueError(f"noise.clip={self.clip} must be two times 0 <= low < high <= 1, such as [0.3, 0.8]")
        if self.corruption is CorruptionKind.exact_count and list(self.clip) != [0.0, 1.0]:
            raise ValueError(
                f"noise.clip={self.clip} needs noise.corruption=bernoulli: exact counts have no time to clip"
            )
        if not 0.0 <= self.count_power <= 2.0:
            raise ValueError(f"noise.count_power={self.count_power} must lie in [0, 2]; 0.5 is the default")
        if self.schedule_power <= 0:
            raise ValueError(f"noise.schedule_power={self.schedule_power} must be positive")
        if self.views < 1:
            raise ValueError(f"noise.views={self.views} must be at least 1")
        if self.view_kind is ViewKind.complementary:
            self._check_pairs()
        self._check_fit()

    def _check_pairs(self) -> None:
        if self.views % 2:
            nearest = ", ".join(str(views) for views in (self.views - 1, self.views + 1) if views)
            raise ValueError(
                f"noise.views={self.views} must be even with noise.view_kind=complementary, whose views come in pairs; "
                f"nearest: {nearest}"
            )
        if list(self.clip) != [0.0, 1.0]:
            raise ValueError(
                f"noise.clip={self.clip} does not go with noise.view_kind=complementary: the complement of a mask "
                "lies outside of the interval; use noise.view_kind=independent"
            )

    def _check_fit(self) -> None:
        for key, least in (("fit_every", 1), ("fit_warmup", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"noise.{key}={getattr(self, key)} must be at least {least}")
        if not 0.0 <= self.fit_memory < 1.0:
            raise ValueError(f"noise.fit_memory={self.fit_memory} must lie in [0, 1); 0.9 is the default")
        if not 0.0 < self.fit_prior <= 1.0:
            raise ValueError(f"noise.fit_prior={self.fit_prior} must lie in (0, 1]; 0.1 is the default")
        match self.fit:
            case Fit.counts if self.corruption is not CorruptionKind.exact_count:
                raise ValueError(f"noise.fit=counts needs noise.corruption=exact_count, not {self.corruption.value}")
            case Fit.clip if self.corruption is not CorruptionKind.bernoulli:
                raise ValueError(f"noise.fit=clip needs noise.corruption=bernoulli, not {self.corruption.value}")
            case Fit.clip if self.view_kind is ViewKind.complementary:
                raise ValueError("noise.fit=clip does not go with noise.view_kind=complementary; use independent")
            case Fit.clip if [round(t * CLIP_CELLS) / CLIP_CELLS for t in self.clip] != list(self.clip):
                raise ValueError(
                    f"noise.clip={self.clip} must be tenths where noise.fit=clip starts from it, such as [0.3, 0.8]"
                )

    @property
    def is_bound(self) -> bool:
        """Whether the weighted loss is, at every step, an unbiased estimate of the NELBO."""
        return list(self.clip) == [0.0, 1.0] and self.fit is not Fit.clip

    @property
    def draws(self) -> int:
        """Independent draws a sequence: its views, or its complementary pairs."""
        return self.views // 2 if self.view_kind is ViewKind.complementary else self.views


def evaluation_noise(views: int) -> NoiseConfig:
    """The noise that bounds are reported with: uniform counts, independent draws, `views` of them a sequence."""
    return NoiseConfig(count_power=0.0, stratified=False, views=views)


class NoiseKey(NamedTuple):
    """What the noise of a batch is a function of, beside block and position.

    Attributes:
        seed: the run's seed, or the fixed seed of an evaluation.
        step: the optimizer step (0 in evaluation).
        slot_B: int64, the sequence's place in the global batch (its index in the data set in evaluation).
        slots: sequences in the global batch.
    """

    seed: int
    step: int
    slot_B: Tensor
    slots: int


class Corruption(NamedTuple):
    """A noised batch.

    Attributes:
        xt_BKL: int64 tokens, `mask_id` where masked or padded.
        masked_BKL: bool, the positions that are predicted and scored.
        weight_BKL: float64, what −log p of a masked position counts for; 0 elsewhere.
    """

    xt_BKL: Tensor
    masked_BKL: Tensor
    weight_BKL: Tensor


def corrupt(
    x0_BL: Tensor,
    counted_BL: Tensor,
    *,
    block_size: int,
    mask_id: int,
    noise: NoiseConfig,
    key: NoiseKey,
    given_BL: Tensor | None = None,
    law_S1: Tensor | None = None,
) -> Corruption:
    """Draws K noisy views of each sequence, a pure function of its arguments.

    Args:
        x0_BL: int64 clean tokens.
        counted_BL: bool, positions that may be masked and are scored.
        block_size: S, a divisor of L.
        mask_id: the token id of `[MASK]`.
        noise: kind of corruption.
        key: what the noise is drawn from.
        given_BL: bool, positions that stay visible though they are not scored (prompts). Positions neither counted nor
            given are padding: always hidden, so that their number tells nothing of where a document ends.
        law_S1: the distribution of exact counts (`core.counts`) instead of q(n) ∝ n^(−count_power).

    Returns:
        The views. The mean over them of Σ weight · −log p is an unbiased estimate of the bound; complementary views
        stand in the order mask, complement, mask, complement …, and only a pair's mean is unbiased.
    """
    batch, length = x0_BL.shape
    blocks = length // block_size
    counted_BKNS = counted_BL.view(batch, 1, blocks, block_size).expand(-1, noise.draws, -1, -1)
    level_BKN = draw_levels(key, noise, blocks)
    words_BKNS = _position_words(key, noise.draws, length).view(batch, noise.draws, blocks, block_size)
    match noise.corruption:
        case CorruptionKind.exact_count:
            law_S1 = prior_law(noise.count_power, block_size, level_BKN.device) if law_S1 is None else law_S1
            masked_BKNS, weights = _mask_by_count(level_BKN, words_BKNS, counted_BKNS, noise, law_S1)
        case CorruptionKind.bernoulli:
            masked_BKNS, weights = _mask_by_time(level_BKN, words_BKNS, counted_BKNS, noise)
    weight_BKN = weights[0]
    if noise.view_kind is ViewKind.complementary:
        masked_BKNS = torch.stack([masked_BKNS, counted_BKNS & ~masked_BKNS], 2).flatten(1, 2)
        weight_BKN = torch.stack(weights, 2).flatten(1, 2)
    masked_BKL = masked_BKNS.flatten(2)
    visible_BL = counted_BL if given_BL is None else counted_BL | given_BL
    xt_BKL = torch.where(masked_BKL | ~visible_BL[:, None], mask_id, x0_BL[:, None])
    weight_BKL = torch.where(masked_BKNS, weight_BKN[..., None], 0.0).flatten(2)
    return Corruption(xt_BKL, masked_BKL, weight_BKL)


def _mask_by_count(
    level_BKN: Tensor, words_BKNS: Tensor, counted_BKNS: Tensor, noise: NoiseConfig, law_S1: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Masks, and the weight of their tokens and of those of their complements."""
    paired = noise.view_kind is ViewKind.complementary
    countable_BKN = counted_BKNS.sum(-1)
    count_BKN = draw_counts(level_BKN, countable_BKN, law_S1)
    counts = [count_BKN, countable_BKN - count_BKN]
    weights = [count_weight(n_BKN, countable_BKN, law_S1, paired=paired) for n_BKN in counts[: 1 + paired]]
    return mask_exactly(words_BKNS, counted_BKNS, count_BKN), weights


def _mask_by_time(
    level_BKN: Tensor, words_BKNS: Tensor, counted_BKNS: Tensor, noise: NoiseConfig
) -> tuple[Tensor, list[Tensor]]:
    """As `_mask_by_count`."""
    low, high = noise.clip
    t_BKN = low + (high - low) * level_BKN
    survive_BKN, _ = alpha(t_BKN, noise.schedule, noise.schedule_power)
    masked_BKNS = (uniform(words_BKNS, torch.float64) >= survive_BKN[..., None]) & counted_BKNS
    if noise.view_kind is ViewKind.independent:
        return masked_BKNS, [nelbo_weight(t_BKN, noise.schedule, noise.schedule_power)]
    chances = [1 - survive_BKN, survive_BKN]
    return masked_BKNS, [pair_weight(m_BKN, noise.schedule, noise.schedule_power) for m_BKN in chances]


def draw_levels(key: NoiseKey, noise: NoiseConfig, blocks: int) -> Tensor:
    """One noise level u in (0, 1) a block and independent draw, float64 of shape (B, K, N).

    Stratified, the levels of all K·N·slots blocks of the global batch are the midpoint-free grid (π(g) + shift) /
    total:
    π is a full pseudo-random permutation and the shift is shared, both new at each step. Each block's level is then
    uniform on its own, whatever its position and however the batch is split over micro-batches and devices.
    """
    slot_B11 = key.slot_B[:, None, None]
    view_K1 = torch.arange(noise.draws, device=key.slot_B.device)[:, None]
    block_N = torch.arange(blocks, device=key.slot_B.device)
    if not noise.stratified:
        words = hash_counters(key.seed, Stream.COUNT, key.step, slot_B11, view_K1, block_N)
        return uniform(words, torch.float64)
    total = key.slots * noise.draws * blocks
    index_BKN = (slot_B11 * noise.draws + view_K1) * blocks + block_N
    order_BKN = permute_index(index_BKN, total, hash_int(key.seed, Stream.COUNT, key.step))
    shift = (hash_int(key.seed, Stream.COUNT_SHIFT, key.step) + 0.5) / 2**64
    return (order_BKN.to(torch.float64) + shift) / total


def _position_words(key: NoiseKey, draws: int, length: int) -> Tensor:
    view_K1 = torch.arange(draws, device=key.slot_B.device)[:, None]
    position_L = torch.arange(length, device=key.slot_B.device)
    return hash_counters(key.seed, Stream.POSITION, key.step, key.slot_B[:, None, None], view_K1, position_L)
