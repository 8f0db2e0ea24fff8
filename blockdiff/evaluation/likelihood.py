"""The likelihood bound of texts, of continuations and of a prepared split, with the error that its noise leaves.

Legend: B batch, K noisy views, L row length, N blocks, S block size.

A text's noise is drawn from its own tokens, so a score does not depend on what else is scored, in which order or with
which batch size. At block size 1 the bound is the exact negative log-likelihood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from blockdiff.core.blocks import check_block_size
from blockdiff.core.bound import EVALUATION_SEED, Bound, bound_sums
from blockdiff.data.loader import Batch
from blockdiff.evaluation.passages import Passage, pad_passages
from blockdiff.model.denoiser import Denoiser
from blockdiff.model.scoring import score_blocks
from blockdiff.training.validation import validation_sums


@dataclass
class TextScore:
    """The bound of one or more texts.

    Attributes:
        bound: nats, their variance, tokens (each text's end token counted).
        byte_count: UTF-8 bytes of the texts.
    """

    bound: Bound
    byte_count: int

    @property
    def nelbo(self) -> float:
        """Nats per token."""
        return self.bound.nelbo

    @property
    def standard_error(self) -> float:
        """Of `nelbo`, from the evaluation noise; 0 at block size 1."""
        return self.bound.standard_error

    @property
    def token_count(self) -> int:
        return self.bound.tokens

    @property
    def bits_per_byte(self) -> float:
        """Nats of all tokens, in bits, over the bytes of the texts."""
        return self.bound.bits_per_byte(self.byte_count / max(self.bound.tokens, 1))


def score_batches(
    denoiser: Denoiser, batches: Iterable[Batch], *, block_size: int, views: int, seed: int = EVALUATION_SEED
) -> Bound:
    """The bound over the batches of a validation loader; rows without counted positions add nothing."""
    device = denoiser.embedding.weight.device
    sums_3 = validation_sums(denoiser, batches, block_size=block_size, views=views, device=device, seed=seed)
    return Bound.from_sums(sums_3)


def score_texts(
    denoiser: Denoiser,
    documents: Sequence[Sequence[int]],
    *,
    eos_id: int,
    seq_len: int,
    block_size: int,
    views: int,
    seed: int = EVALUATION_SEED,
    micro_batch_size: int = 16,
) -> list[Bound]:
    """The bound of each document, its end token included.

    A document longer than `seq_len` is cut into windows that do not see each other, as in training.

    Args:
        denoiser: evaluated as it is.
        documents: token ids, without end tokens.
        eos_id: appended to each.
        seq_len: longest window.
        block_size: S, a divisor of seq_len.
        views: K ≥ 2 noise draws, for a standard error.
        seed: of the noise.
        micro_batch_size: windows a forward pass; changes no score.

    Raises:
        ValueError: `block_size` does not divide `seq_len`.
    """
    check_block_size(block_size, seq_len)
    bounds = [Bound() for _ in documents]
    cut = list(_windows(documents, eos_id, seq_len))
    found = _score(
        denoiser,
        [passage for _, passage, _ in cut],
        [sample for _, _, sample in cut],
        block_size=block_size,
        views=views,
        seed=seed,
        micro_batch_size=micro_batch_size,
    )
    for (document, _, _), bound in zip(cut, found, strict=True):
        bounds[document] = bounds[document].merge(bound)
    return bounds


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
    rows = [_fitted(passage, seq_len) for passage in passages]
    return _score(
        denoiser,
        rows,
        [_fingerprint(len(row.given), row.tokens) for row in rows],
        block_size=block_size,
        views=views,
        seed=seed,
        micro_batch_size=micro_batch_size,
    )


def _score(
    denoiser: Denoiser,
    rows: Sequence[Passage],
    samples: Sequence[int],
    *,
    block_size: int,
    views: int,
    seed: int,
    micro_batch_size: int,
) -> list[Bound]:
    """One bound a row; its noise is drawn from its number in `samples`."""
    device = denoiser.embedding.weight.device
    bounds: list[Bound] = []
    for start in range(0, len(rows), micro_batch_size):
        part = slice(start, start + micro_batch_size)
        tokens_BL, given_BL, counted_BL = pad_passages(rows[part], device, block_size)
        nats_BKN = score_blocks(
            denoiser,
            tokens_BL,
            torch.zeros_like(tokens_BL),
            counted_BL,
            torch.tensor(samples[part], device=device),
            block_size=block_size,
            views=views,
            seed=seed,
            given_BL=given_BL,
        )
        sums = (bound_sums(nats_BKN[i : i + 1], counted_BL[i : i + 1]) for i in range(len(nats_BKN)))
        bounds += [Bound.from_sums(sums_3) for sums_3 in sums]
    return bounds


def _windows(documents: Sequence[Sequence[int]], eos_id: int, seq_len: int) -> Iterator[tuple[int, Passage, int]]:
    """Number of the document, window, and what the window's noise is drawn from."""
    for index, document in enumerate(documents):
        tokens = [*document, eos_id]
        for start in range(0, len(tokens), seq_len):
            part = tokens[start : start + seq_len]
            yield index, Passage([], part), _fingerprint(start, part)


def _fingerprint(start: int, tokens: Sequence[int]) -> int:
    """A 63-bit number of the place where new tokens begin and of all tokens: equal text gets equal noise anywhere."""
    digest = hashlib.sha256(np.array([start, *tokens], dtype="<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _fitted(passage: Passage, seq_len: int) -> Passage:
    room = seq_len - len(passage.new)
    if room < 0:
        raise ValueError(f"a continuation of {len(passage.new)} tokens exceeds seq_len={seq_len}: cut it into windows")
    return Passage(passage.given[max(len(passage.given) - room, 0) :], passage.new)
