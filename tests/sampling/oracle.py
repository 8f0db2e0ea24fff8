"""Denoisers whose answers are known beforehand, and a tokenizer of bytes.

Legend: B batch, S block size, T clean tokens, M chosen positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from blockdiff.model.cache import KVCache, send

Answer = Callable[[list[int], list[int], int], list[float]]
"""(committed tokens, noisy block, place within the block) -> logits of that position."""


@dataclass
class OracleDenoiser:
    """Answers by a Python function. Its cache holds the tokens themselves, so that a wrong slot gives a wrong
    answer."""

    answer: Answer
    vocab_size: int
    calls: list[str] = field(default_factory=list)

    @property
    def mask_id(self) -> int:
        return self.vocab_size

    def compiled(self) -> Self:
        return self

    def packed(self) -> Self:
        return self

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache.empty(layers=1, batch=batch, kv_heads=1, head_dim=1, capacity=capacity, dtype=torch.float64)

    def commit(
        self,
        x0_BT: Tensor,
        cache: KVCache,
        *,
        lengths: list[int] | None = None,
        block_size: int | None = None,
    ) -> None:
        self.calls.append("commit")
        cache.check_room(*x0_BT.shape)
        self._commit(x0_BT, cache, lengths or [x0_BT.shape[1]] * len(x0_BT))

    def _commit(self, x0_BT: Tensor, cache: KVCache, lengths: list[int]) -> None:
        for row, length in enumerate(lengths):
            tokens = x0_BT[row, :length]
            assert int(tokens.max(-1).values if length else 0) < self.vocab_size, "a mask was committed"
            start = cache.lengths[row]
            cache.keys[0][row, 0, start : start + length, 0] = tokens.double()
        cache.advance(lengths)

    def denoise(self, xt_BS: Tensor, cache: KVCache, chosen_BM: Tensor | None = None) -> Tensor:
        self.calls.append("denoise")
        return self._answers(xt_BS, cache, chosen_BM)

    def commit_and_denoise(
        self,
        x0_BS: Tensor,
        xt_BS: Tensor,
        cache: KVCache,
        chosen_BM: Tensor | None = None,
        *,
        lengths: list[int] | None = None,
    ) -> Tensor:
        self.calls.append("both")
        cache.check_room(len(x0_BS), x0_BS.shape[1] + xt_BS.shape[1])
        self._commit(x0_BS, cache, lengths or [x0_BS.shape[1]] * len(x0_BS))
        return self._answers(xt_BS, cache, chosen_BM)

    def _answers(self, xt_BS: Tensor, cache: KVCache, chosen_BM: Tensor | None) -> Tensor:
        cache.check_room(*xt_BS.shape)
        rows = xt_BS.tolist()
        chosen = chosen_BM.tolist() if chosen_BM is not None else [list(range(xt_BS.shape[1]))] * len(rows)
        logits = []
        for row, (block, places) in enumerate(zip(rows, chosen, strict=True)):
            prefix = [int(x) for x in cache.keys[0][row, 0, : cache.lengths[row], 0].tolist()]
            logits.append([self.answer(prefix, block, place) for place in places])
        return send(logits, torch.float64, xt_BS.device)


def says(text: list[int], probability: list[float], vocab_size: int) -> Answer:
    """An oracle that knows a text: at position i it gives `text[i]` the probability `probability[i]`, the
    rest evenly."""

    def answer(prefix: list[int], block: list[int], place: int) -> list[float]:
        assert prefix == text[: len(prefix)], "the committed prefix is not the text"
        position = len(prefix) + place
        p = torch.full((vocab_size,), (1 - probability[position]) / (vocab_size - 1), dtype=torch.float64)
        p[text[position]] = probability[position]
        return p.log().tolist()

    return answer


class ByteTokenizer:
    """Bytes as ids; 0 ends a text."""

    vocab_size = 256
    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode_bytes(self, ids: list[int]) -> bytes:
        return bytes(ids)
