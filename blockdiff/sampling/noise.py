"""The sampler's noise: a pure function of (seed, request, absolute position, step), never of the batch.

Legend: B batch, M chosen positions, S block size, V vocabulary.
"""

from __future__ import annotations

import hashlib
from array import array
from enum import IntEnum

import torch
from torch import Tensor

from blockdiff.core.randomness import Stream, hash_counters, hash_int


class Draw(IntEnum):
    """What a draw decides, so that no two decisions share one."""

    TOKEN = 1
    REVEAL = 2
    REMASK = 3


def request_key(seed: int, tokens: list[int], occurrence: int) -> int:
    """The key of all noise of one request, a signed 64-bit integer.

    It depends on what the request says, not on where it stands among others. Requests that say the same are
    told apart by `occurrence`, so that eight copies of a prompt give eight samples.
    """
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=8).digest()
    word = hash_int(seed, Stream.SAMPLING, int.from_bytes(digest, "little"), occurrence)
    return word - (1 << 64) if word >= 1 << 63 else word


def gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel variables from 64-bit words, −log(E) of an exponential E.

    The largest of many Gumbels decides a draw, so the smallest E must be fine-grained. A uniform on a grid of
    2^-24 would round E there and favour likely tokens; instead 63 bits are rounded to a *floating* uniform v
    near 0, whose relative spacing is that of the type all the way down to 2^-63, and E = −log(1 − v) keeps
    it.
    """
    spacing = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    v = ((words & torch.iinfo(torch.int64).max).to(dtype) * 2.0**-63).clamp_(2.0**-64, 1 - spacing)
    return v.neg_().log1p_().neg_().log_().neg_()


def token_gumbel(key_B: Tensor, position_BM: Tensor, step: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Gumbel noise (B, M, V) that draws the tokens of chosen positions at one step.

    Args:
        key_B: int64, `request_key` of each row.
        position_BM: int64 absolute positions.
        step: calls of the denoiser that the block has seen before this one.
        vocab_size: V.
        dtype: ``float32`` or ``float64``.
    """
    vocab_V = torch.arange(vocab_size, device=key_B.device)
    words = hash_counters(Draw.TOKEN, step, key_B[:, None, None], position_BM[..., None], vocab_V)
    return gumbel(words, dtype)


def plan_words(draw: Draw, key_B: Tensor, position_BS: Tensor, step: int) -> Tensor:
    """int64 words (B, S) that decide which positions a step takes, where that does not depend on logits."""
    return hash_counters(draw, step, key_B[:, None], position_BS)
