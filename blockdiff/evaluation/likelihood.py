"""The likelihood bound of texts and of a prepared split, with the standard error that its noise leaves.

Legend: B batch, L window length, N blocks.

A text's noise is drawn from its own tokens, so a score does not depend on what else is scored, in which order or with
which batch size. At block size 1 the bound is the exact negative log-likelihood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdiff.core.blocks import check_block_size
from blockdiff.core.bound import EVALUATION_SEED, Bound, bound_sums
from blockdiff.data.loader import Batch
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
    device = denoiser.embedding.weight.device
    totals = [Bound() for _ in documents]
    for rows in _batched(_windows(documents, eos_id, seq_len), micro_batch_size):
        tokens_BL, counted_BL = _pad(rows, block_size, eos_id, device)
        sample_B = torch.tensor([row.sample for row in rows], device=device)
        nats_BKN = score_blocks(
            denoiser,
            tokens_BL,
            torch.zeros_like(tokens_BL),
            counted_BL,
            sample_B,
            block_size=block_size,
            views=views,
            seed=seed,
        )
        for index, row in enumerate(rows):
            part = slice(index, index + 1)
            totals[row.document] = totals[row.document].merge(
                Bound.from_sums(bound_sums(nats_BKN[part], counted_BL[part]))
            )
    return totals


class _Row(NamedTuple):
    document: int
    sample: int
    tokens: list[int]


def _windows(documents: Sequence[Sequence[int]], eos_id: int, seq_len: int) -> Iterator[_Row]:
    for index, document in enumerate(documents):
        tokens = [*document, eos_id]
        for start in range(0, len(tokens), seq_len):
            part = tokens[start : start + seq_len]
            yield _Row(index, _fingerprint(start, part), part)


def _fingerprint(start: int, tokens: list[int]) -> int:
    """A 63-bit number of a window's place and tokens: equal windows get equal noise wherever they are scored."""
    digest = hashlib.sha256(np.array([start, *tokens], dtype="<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _batched(rows: Iterator[_Row], size: int) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _pad(rows: list[_Row], block_size: int, eos_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens filled up to whole blocks of the longest row, and which of them count."""
    length = -(-max(len(row.tokens) for row in rows) // block_size) * block_size
    tokens_BL = torch.full((len(rows), length), eos_id)
    counted_BL = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens_BL[index, : len(row.tokens)] = torch.tensor(row.tokens)
        counted_BL[index, : len(row.tokens)] = True
    return tokens_BL.to(device), counted_BL.to(device)
