"""What sampling asks of a denoiser and of a tokenizer.

Legend: B batch, S block size, T clean tokens, M chosen positions, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol, Self

from torch import Tensor

from blockdiff.model.cache import KVCache


class DenoiserLike(Protocol):
    """The calls of `blockdiff.model.denoiser.Denoiser` that the sampler makes; tests put an oracle here."""

    @property
    def mask_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def new_cache(self, batch: int, capacity: int) -> KVCache: ...

    def compiled(self) -> Self: ...

    def packed(self) -> Self: ...

    def denoise(self, xt_BS: Tensor, cache: KVCache, chosen_BM: Tensor | None = None) -> Tensor: ...

    def commit(
        self,
        x0_BT: Tensor,
        cache: KVCache,
        *,
        lengths: list[int] | None = None,
        block_size: int | None = None,
    ) -> None: ...

    def commit_and_denoise(
        self,
        x0_BS: Tensor,
        xt_BS: Tensor,
        cache: KVCache,
        chosen_BM: Tensor | None = None,
        *,
        lengths: list[int] | None = None,
    ) -> Tensor: ...


class TokenizerLike(Protocol):
    """Text to token ids and back. The bytes of a longer list must begin with the bytes of each of its
    prefixes."""

    @property
    def eos_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode_bytes(self, ids: list[int]) -> bytes: ...
