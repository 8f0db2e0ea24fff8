"""The forward process: which tokens of which block are masked, and what each masked token's −log p counts for.

Legend: B batch, K noisy views of one sequence, L seq_len, N blocks, S block size (L = N·S).

Exact-count corruption draws the number n of masked tokens of a block, not a time. With C tokens that may be masked and
n ~ q(n) on {1..C}, the block's bound is

    E_{n ~ q} 1 / (n · q(n)) · E_{|M| = n} Σ_{i in M} −log p(x_i | x_{not M}, x^{<b}),

which is the continuous-time NELBO of the linear schedule for every q (docs/maths.md): the same bound as Bernoulli
corruption, with less variance and no singular weight.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from blockdiff.core.randomness import Stream, hash_counters, hash_int, permute_index, uniform
from blockdiff.core.schedule import Schedule, alpha, nelbo_weight

_NEVER = torch.iinfo(torch.int64).max


class CorruptionKind(Enum):
    exact_count = "exact_count"
    bernoulli = "bernoulli"


@dataclass
class NoiseConfig:
    """How training sequences are noised.

    Attributes:
        corruption: ``exact_count`` (draw how many tokens of a block are masked) or ``bernoulli`` (draw a time).
        count_power: p of q(n) ∝ n^(−p) for exact counts. 0 is uniform with weight C/n, 1 weighs all masked tokens
            alike.
        schedule: noise schedule of Bernoulli corruption.
        schedule_power: exponent of the polynomial schedule.
        clip: [low, high], the interval of times that Bernoulli corruption draws from. A clipped loss is not a bound.
        stratified: spread counts or times evenly over all blocks of the global batch.
        views: noisy views K of each sequence that share its clean stream.
    """

    corruption: CorruptionKind = CorruptionKind.exact_count
    count_power: float = 0.5
    schedule: Schedule = Schedule.linear
    schedule_power: float = 2.0
    clip: list[float] = field(default_factory=lambda: [0.0, 1.0])
    stratified: bool = True
    views: int = 1

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

    @property
    def is_bound(self) -> bool:
        """Whether the weighted loss is an unbiased estimate of the NELBO."""
        return list(self.clip) == [0.0, 1.0]


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
    """
    batch, length = x0_BL.shape
    blocks = length // block_size
    counted_BKNS = counted_BL.view(batch, 1, blocks, block_size).expand(-1, noise.views, -1, -1)
    level_BKN = draw_levels(key, noise, blocks)
    keys_BKNS = _position_words(key, noise.views, length).view(batch, noise.views, blocks, block_size)
    match noise.corruption:
        case CorruptionKind.exact_count:
            countable_BKN = counted_BKNS.sum(-1)
            count_BKN, weight_BKN = draw_counts(level_BKN, countable_BKN, block_size, noise.count_power)
            masked_BKNS = mask_exactly(keys_BKNS, counted_BKNS, count_BKN)
        case CorruptionKind.bernoulli:
            low, high = noise.clip
            t_BKN = low + (high - low) * level_BKN
            survive_BKN, _ = alpha(t_BKN, noise.schedule, noise.schedule_power)
            weight_BKN = nelbo_weight(t_BKN, noise.schedule, noise.schedule_power)
            masked_BKNS = (uniform(keys_BKNS, torch.float64) >= survive_BKN[..., None]) & counted_BKNS
    masked_BKL = masked_BKNS.flatten(2)
    visible_BL = counted_BL if given_BL is None else counted_BL | given_BL
    xt_BKL = torch.where(masked_BKL | ~visible_BL[:, None], mask_id, x0_BL[:, None])
    weight_BKL = (masked_BKNS * weight_BKN[..., None]).flatten(2)
    return Corruption(xt_BKL, masked_BKL, weight_BKL)


def draw_levels(key: NoiseKey, noise: NoiseConfig, blocks: int) -> Tensor:
    """One noise level u in (0, 1) a block, float64 of shape (B, K, N).

    Stratified, the levels of all K·N·slots blocks of the global batch are the midpoint-free grid (π(g) + shift) /
    total:
    π is a full pseudo-random permutation and the shift is shared, both new at each step. Each block's level is then
    uniform on its own, whatever its position and however the batch is split over micro-batches and devices.
    """
    slot_B11 = key.slot_B[:, None, None]
    view_K1 = torch.arange(noise.views, device=key.slot_B.device)[:, None]
    block_N = torch.arange(blocks, device=key.slot_B.device)
    if not noise.stratified:
        words = hash_counters(key.seed, Stream.COUNT, key.step, slot_B11, view_K1, block_N)
        return uniform(words, torch.float64)
    total = key.slots * noise.views * blocks
    index_BKN = (slot_B11 * noise.views + view_K1) * blocks + block_N
    order_BKN = permute_index(index_BKN, total, hash_int(key.seed, Stream.COUNT, key.step))
    shift = (hash_int(key.seed, Stream.COUNT_SHIFT, key.step) + 0.5) / 2**64
    return (order_BKN.to(torch.float64) + shift) / total


def draw_counts(level_N: Tensor, countable_N: Tensor, block_size: int, count_power: float) -> tuple[Tensor, Tensor]:
    """Turns levels into counts n ~ q, q(n) ∝ n^(−p) on {1..C}, by the inverse distribution function.

    Args:
        level_N: float64 in (0, 1), any shape.
        countable_N: int64 of the same shape, C, how many tokens of the block may be masked; 0 gives n = 0, weight 0.
        block_size: S ≥ C.
        count_power: p.

    Returns:
        n (int64) and the weight 1 / (n · q(n)) (float64), both of the levels' shape.
    """
    cumulative_S1 = _cumulative(count_power, block_size, level_N.device)
    total_N = cumulative_S1[countable_N]
    count_N = torch.searchsorted(cumulative_S1[1:], level_N * total_N, right=True) + 1
    count_N = torch.minimum(count_N, countable_N)
    weight_N = total_N * count_N.to(torch.float64).clamp(min=1) ** (count_power - 1)
    return count_N, weight_N


@functools.lru_cache(maxsize=64)
def _cumulative(count_power: float, block_size: int, device: torch.device) -> Tensor:
    """W(0..S), W(n) = Σ_{k ≤ n} k^(−p), summed on the CPU so that every device holds the same bits."""
    terms = torch.arange(1, block_size + 1, dtype=torch.float64) ** -count_power
    return torch.cat([torch.zeros(1, dtype=torch.float64), terms.cumsum(0)]).to(device)


def mask_exactly(words_NS: Tensor, counted_NS: Tensor, count_N: Tensor) -> Tensor:
    """Masks, in each block, the `count_N` counted positions with the smallest random words: a uniform subset.

    Args:
        words_NS: int64 random words (..., S).
        counted_NS: bool (..., S).
        count_N: int64 (...), at most the number of counted positions.
    """
    words_NS = torch.where(counted_NS, words_NS, _NEVER)
    threshold_N1 = words_NS.sort(-1).values.gather(-1, (count_N[..., None] - 1).clamp(min=0))
    return (words_NS <= threshold_N1) & counted_NS & (count_N[..., None] > 0)


def _position_words(key: NoiseKey, views: int, length: int) -> Tensor:
    view_K1 = torch.arange(views, device=key.slot_B.device)[:, None]
    position_L = torch.arange(length, device=key.slot_B.device)
    return hash_counters(key.seed, Stream.POSITION, key.step, key.slot_B[:, None, None], view_K1, position_L)
