"""The likelihood bound of continuations, given what stands before them.

Legend: B batch, L row length, S block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockdiff.core.bound import EVALUATION_SEED, Bound, bound_sums
from blockdiff.core.randomness import hash_int
from blockdiff.evaluation.judge import Passage
from blockdiff.model.denoiser import Denoiser
from blockdiff.model.scoring import score_blocks


def score_continuations(
    denoiser: Denoiser,
    passages: Sequence[Passage],
    *,
    seq_len: int,
    block_size: int,
    views: int,
    seed: int = EVALUATION_SEED,
    micro_batch_size: int = 16,
) -> list[Bound]:
    """The bound of −log p(new | given) of each passage; given tokens of a block that both share stay visible.

    Noise is drawn from a passage's own tokens, so a score depends neither on the other passages nor on the batch.

    Args:
        denoiser: evaluated as it is.
        passages: given and new ids; of what exceeds `seq_len` the earliest given tokens are left out.
        seq_len: L at most.
        block_size: S.
        views: K ≥ 2 noise draws; the bound is exact at block size 1.
        seed: of the noise.
        micro_batch_size: passages a forward pass; changes no score.

    Raises:
        ValueError: the new tokens alone exceed `seq_len`.
    """
    bounds: list[Bound] = []
    for start in range(0, len(passages), micro_batch_size):
        rows = [_fitted(passage, seq_len) for passage in passages[start : start + micro_batch_size]]
        bounds += _score(denoiser, rows, block_size, views, seed)
    return bounds


def _score(denoiser: Denoiser, rows: list[Passage], block_size: int, views: int, seed: int) -> list[Bound]:
    device = denoiser.embedding.weight.device
    longest = max(max(len(row.given) + len(row.new) for row in rows), 1)
    length = -(-longest // block_size) * block_size
    tokens_BL = torch.zeros(len(rows), length, dtype=torch.int64)
    given_BL = torch.zeros(len(rows), length, dtype=torch.bool)
    counted_BL = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        cut, end = len(row.given), len(row.given) + len(row.new)
        tokens_BL[index, :end] = torch.tensor([*row.given, *row.new], dtype=torch.int64)
        given_BL[index, :cut] = True
        counted_BL[index, cut:end] = True
    sample_B = torch.tensor([hash_int(len(row.given), *row.given, *row.new) >> 1 for row in rows])
    tokens_BL, given_BL, counted_BL, sample_B = (x.to(device) for x in (tokens_BL, given_BL, counted_BL, sample_B))
    nats_BKN = score_blocks(
        denoiser,
        tokens_BL,
        torch.zeros_like(tokens_BL),
        counted_BL,
        sample_B,
        block_size=block_size,
        views=views,
        seed=seed,
        given_BL=given_BL,
    )
    return [Bound.from_sums(bound_sums(nats_BKN[i : i + 1], counted_BL[i : i + 1])) for i in range(len(rows))]


def _fitted(passage: Passage, seq_len: int) -> Passage:
    room = seq_len - len(passage.new)
    if room < 0:
        raise ValueError(f"a continuation of {len(passage.new)} tokens exceeds seq_len={seq_len}: cut it into windows")
    return Passage(passage.given[max(len(passage.given) - room, 0) :], passage.new)
