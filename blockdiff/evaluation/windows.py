"""Likelihoods of validation windows, kept window by window and position by position, so that models can be paired.

Legend: W windows, B batch, K noisy views, L window length, N blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdiff.core.blocks import split_blocks
from blockdiff.core.bound import EVALUATION_SEED
from blockdiff.data.loader import Batch
from blockdiff.evaluation.bracket import bracket_block_nats
from blockdiff.evaluation.exact import exact_block_nats
from blockdiff.evaluation.masked import masked_log_probs
from blockdiff.model.denoiser import Denoiser
from blockdiff.model.scoring import score_positions

Floats = NDArray[np.float64]
Fields = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class WindowNats:
    """What each position of each window adds to the negative ELBO. All arrays have a row a window.

    Attributes:
        sample_W: int64, the window's index in the data set.
        nats_WL: estimate of each position's share of the bound, in nats; 0 where nothing is counted.
        counted_WL: bool.
        document_WL: int32, document within the window.
        variance_W: variance of the window's nats under the evaluation noise.
    """

    sample_W: NDArray[np.int64]
    nats_WL: Floats
    counted_WL: NDArray[np.bool_]
    document_WL: NDArray[np.int32]
    variance_W: Floats

    @property
    def window_nats(self) -> Floats:
        """Nats of each window, (W)."""
        return self.nats_WL.sum(1)

    @property
    def window_tokens(self) -> NDArray[np.int64]:
        """Counted positions of each window, (W)."""
        return self.counted_WL.sum(1)

    @property
    def nelbo(self) -> float:
        """Nats per token."""
        return float(self.nats_WL.sum() / self.counted_WL.sum())

    @property
    def noise_error(self) -> float:
        """Standard error of `nelbo` that the evaluation noise leaves, the windows given."""
        return float(np.sqrt(self.variance_W.sum()) / self.counted_WL.sum())


def window_nats(
    denoiser: Denoiser, batches: Iterable[Batch], *, block_size: int, views: int, seed: int = EVALUATION_SEED
) -> WindowNats:
    """Scores all rows of a validation loader; at block size 1 the result is exact and `views` has no effect.

    Args:
        denoiser: evaluated as it is.
        batches: of a `val_loader`.
        block_size: S.
        views: K ≥ 2 noise draws of each window.
        seed: of the noise; models that are compared take the same one.

    Raises:
        ValueError: fewer than two views.
    """
    if views < 2:
        raise ValueError(f"views={views} must be at least 2: one draw has no standard error")
    rows = []
    for fields in _on_device(denoiser, batches):
        nats_BKL = score_positions(denoiser, *fields, block_size=block_size, views=views, seed=seed)
        block_BKN = split_blocks(nats_BKL, block_size).sum(-1)
        count = block_BKN.shape[1]
        variance_B = block_BKN.var(1).sum(-1) / count if count > 1 else torch.zeros_like(block_BKN[:, 0, 0])
        rows.append(_row(fields, nats_BKL.mean(1), variance_B))
    return _stack(rows)


def left_to_right_nats(denoiser: Denoiser, batches: Iterable[Batch], *, block_size: int) -> WindowNats:
    """−log p(x_i | x_{<i}): what revealing each block from left to right costs at each position. Exact, without noise.

    Every position is predicted from all tokens before it and none behind, so a position's value may be compared with
    its neighbours' and with an autoregressive model's. (The bound cannot serve for that: in a random order a break at a
    border is paid for anywhere in the block.)

    Args:
        denoiser: evaluated as it is.
        batches: of a `val_loader`.
        block_size: S; each window is read under S masks.
    """
    rows = []
    for fields in _on_device(denoiser, batches):
        tokens_BL, document_BL, counted_BL, _ = fields
        place_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device) % block_size
        view_K1 = torch.arange(block_size, device=tokens_BL.device)[:, None]
        log_p_BKL = masked_log_probs(
            denoiser,
            tokens_BL,
            document_BL,
            counted_BL,
            (place_L >= view_K1) & counted_BL[:, None],
            (place_L == view_K1) & counted_BL[:, None],
            block_size=block_size,
        )
        rows.append(_row(fields, -log_p_BKL.sum(1), torch.zeros(len(tokens_BL), dtype=torch.float64)))
    return _stack(rows)


@dataclass
class TrueNats:
    """Exact likelihoods of windows, or the two ends around them.

    Attributes:
        sample_W: int64, the window's index in the data set.
        low_W: lower end of each window's negative log-likelihood, in nats.
        high_W: upper end; equal to the lower one where the likelihood is exact.
        exact: whether it is.
    """

    sample_W: NDArray[np.int64]
    low_W: Floats
    high_W: Floats
    exact: bool


def true_nats(
    denoiser: Denoiser,
    batches: Iterable[Batch],
    *,
    block_size: int,
    largest_exact: int,
    orders: int,
    seed: int = EVALUATION_SEED,
) -> TrueNats:
    """The likelihood of windows: exact up to `largest_exact` tokens a block, above it between two ends.

    Args:
        denoiser: evaluated as it is.
        batches: of a `val_loader`.
        block_size: S.
        largest_exact: block size up to which all 2^S subsets are computed.
        orders: random orders of the bracket.
        seed: of the orders.
    """
    exact = block_size <= largest_exact
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for tokens_BL, document_BL, counted_BL, sample_B in _on_device(denoiser, batches):
        text = (denoiser, tokens_BL, document_BL, counted_BL)
        if exact:
            low_BN = high_BN = exact_block_nats(*text, block_size=block_size)
        else:
            low_BN, high_BN = bracket_block_nats(*text, sample_B, block_size=block_size, orders=orders, seed=seed)
        kept_B = sample_B >= 0
        rows.append((sample_B[kept_B].cpu(), low_BN.sum(-1)[kept_B].cpu(), high_BN.sum(-1)[kept_B].cpu()))
    sample_W, low_W, high_W = (torch.cat(column).numpy() for column in zip(*rows, strict=True))
    return TrueNats(sample_W, low_W, high_W, exact)


def common_block_size(block_sizes: Sequence[int]) -> int:
    """The packing that suits all: documents padded to it start on a block border at each of these block sizes."""
    return int(np.lcm.reduce(np.array(block_sizes, dtype=np.int64)))


def _on_device(denoiser: Denoiser, batches: Iterable[Batch]) -> Iterator[Fields]:
    device = denoiser.embedding.weight.device
    for batch in batches:
        yield (
            batch.tokens_BL.to(device),
            batch.document_BL.to(device),
            batch.counted_BL.to(device),
            batch.sample_B.to(device),
        )


def _row(fields: Fields, nats_BL: Tensor, variance_B: Tensor) -> tuple[Tensor, ...]:
    """The fields of `WindowNats` for one batch, without the rows that only fill it up."""
    _, document_BL, counted_BL, sample_B = (x.cpu() for x in fields)
    kept_B = sample_B >= 0
    return tuple(x.cpu()[kept_B] for x in (sample_B, nats_BL, counted_BL, document_BL, variance_B))


def _stack(rows: list[tuple[Tensor, ...]]) -> WindowNats:
    return WindowNats(*(torch.cat(column).numpy() for column in zip(*rows, strict=True)))
