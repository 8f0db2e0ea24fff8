"""Counter-based randomness: every draw is a pure function of integers, never of a generator's state.

A 64-bit key is mixed from (seed, purpose, counters...) by the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014). The arithmetic is integer only, so the CPU and every
GPU give the same bits, and a resumed run needs nothing saved.

Integers live in int64 tensors: products wrap modulo 2^64 in two's complement, and a logical shift is an arithmetic
shift followed by a mask.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = 1 << 64


class Stream(IntEnum):
    """Purposes that must not share draws: the first counter after the seed."""

    SHUFFLE = 1
    COUNT = 2
    COUNT_SHIFT = 3
    POSITION = 4
    VALIDATION = 5
    SAMPLING = 6
    WEIGHTS = 7
    PROBE = 8


def _signed(value: int) -> int:
    value %= _WORD
    return value - _WORD if value >= _WORD // 2 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The SplitMix64 finaliser on an int64 tensor of any shape: a bijection of 64-bit words."""
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(_signed(_MIX_1))
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(_signed(_MIX_2))
    return _shift_right(x, 31).bitwise_xor_(x)


def hash_counters(*counters: int | Tensor) -> Tensor:
    """Hashes integer counters, broadcast against each other, to int64 words; at least one of them is a tensor.

    ``hash_counters(seed, Stream.POSITION, step, sample_B1, position_L)`` has shape (B, L) and lies on the tensors'
    device. The order of the counters matters, their integer dtype does not.
    """
    word: int | Tensor = 0
    for counter in counters:
        if isinstance(word, Tensor) or isinstance(counter, Tensor):
            part = mix(counter.to(torch.int64) + _signed(_GAMMA)) if isinstance(counter, Tensor) else _mix_int(counter)
            left = word + _signed(_GAMMA) if isinstance(word, Tensor) else _signed(word + _GAMMA)
            word = mix(left ^ part)  # type: ignore[arg-type]
        else:
            word = _join_int(word, counter)
    assert isinstance(word, Tensor), "hash_int serves counters that are all plain integers"
    return word


def hash_int(*counters: int) -> int:
    """`hash_counters` of plain integers as an unsigned 64-bit integer; no tensor is made."""
    word = 0
    for counter in counters:
        word = _join_int(word, counter)
    return word % _WORD


def _join_int(word: int, counter: int) -> int:
    return _mix_int((_signed(word + _GAMMA) ^ _mix_int(counter)) - _GAMMA)


def _mix_int(value: int) -> int:
    """`mix(value + gamma)` on a plain integer, as a signed 64-bit result."""
    x = (int(value) + _GAMMA) % _WORD
    x = ((x ^ (x >> 30)) * _MIX_1) % _WORD
    x = ((x ^ (x >> 27)) * _MIX_2) % _WORD
    return _signed(x ^ (x >> 31))


def uniform(words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Maps int64 words to the open interval (0, 1): midpoints of 2^-24 cells (2^-53 for float64).

    The midpoints are exact in the given dtype, never 0 and never 1, so that ``log(u)`` and ``log(1 - u)`` are finite.
    """
    if dtype == torch.float64:
        return (_shift_right(words, 12).to(dtype) + 0.5) * 2.0**-52
    return ((_shift_right(words, 41).to(torch.float32) + 0.5) * 2.0**-23).to(dtype)


def permute_index(index: Tensor, size: int, key: int) -> Tensor:
    """Where a pseudo-random permutation of ``range(size)`` sends each index: O(1) memory, any subset of indices.

    A four-round Feistel network on the smallest even number of bits that holds ``size``, with cycle walking (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002): an image outside the range is enciphered again. The domain
    is less than four times the range, so few rounds of walking are needed, and each ends. A Feistel network on few bits
    favours some images; a rotation by a uniform offset follows, so that over keys each index goes everywhere equally
    often.

    Args:
        index: int64, any shape, values in [0, size).
        size: number of elements that are permuted.
        key: selects the permutation.
    """
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    image = _feistel(index, half_bits, key)
    while bool((outside := image >= size).any()):
        image = torch.where(outside, _feistel(image, half_bits, key), image)
    return (image + hash_int(key, size) % size) % size


def _feistel(x: Tensor, half_bits: int, key: int) -> Tensor:
    mask = (1 << half_bits) - 1
    left, right = _shift_right(x, half_bits) & mask, x & mask
    for round_index in range(4):
        left, right = right, left ^ (hash_counters(key, round_index, right) & mask)
    return (left << half_bits) | right
