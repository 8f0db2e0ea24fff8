"""The denoiser: a decoder-style transformer that predicts masked tokens of a block from the blocks before it.

Legend: B batch, K noisy views, L seq_len, S block size, D width, H heads, h key-value heads, E head dim, V vocabulary,
T clean tokens of one call, M chosen positions, P positions of the cache.

`[MASK]` has an embedding row but no column of the head, so its probability is zero by shape. There is no time
conditioning: the number of masked tokens says it all (Ou et al., "Your absorbing discrete diffusion secretly models the
conditional distributions of clean data", 2024; Zheng et al., 2024).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blockdiff.core.masks import CleanAttention
from blockdiff.core.objective import weighted_nll
from blockdiff.model.attention import (
    Backend,
    DualStreamPlan,
    Layout,
    dual_stream_attention,
    flash_available,
    plan_dual_stream,
    resolve_backend,
)
from blockdiff.model.cache import KVCache
from blockdiff.model.extension import Extension
from blockdiff.model.layers import Layer, RMSNorm, rotary_angles
from blockdiff.model.packed import PackedLinear, can_pack

Watch = Callable[[Tensor], None]
"""Sees the gradient (M, D) of a pass's loss with respect to the last hidden states."""


@dataclass
class ModelConfig:
    """Shape of the denoiser.

    Attributes:
        layers: transformer units.
        width: D, of the residual stream.
        heads: H, query heads.
        kv_heads: h, key-value heads, a divisor of heads; None means heads.
        head_dim: E, even; None means width / heads.
        mlp_width: hidden width of SwiGLU; None means 8/3 · width, rounded up to a multiple of 64.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in norms.
        qk_norm: normalise queries and keys head by head.
        qkv_bias: bias in the query, key and value projection.
        tied_head: the head shares the embedding's word rows.
        clean_attention: what clean tokens see: ``causal`` or ``block`` (as in BD3-LM and SDAR).
        attention: backend: auto | sdpa | flex (training); flash-attn serves cached sampling where installed.
        activation_checkpointing: recompute each layer in the backward pass instead of keeping its activations.
    """

    layers: int = 4
    width: int = 128
    heads: int = 2
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_width: int | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
    qkv_bias: bool = False
    tied_head: bool = True
    clean_attention: CleanAttention = CleanAttention.causal
    attention: Backend = Backend.auto
    activation_checkpointing: bool = False

    def check(self) -> None:
        """Raises a ValueError that names key, value, rule and remedy."""
        for key in ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"model.{key}={value} must be at least 1")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"model.heads={self.heads} must divide model.width={self.width}, or set model.head_dim")
        if self.dim_per_head % 2:
            raise ValueError(f"model.head_dim={self.dim_per_head} must be even: rotary positions turn pairs")
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads}: query heads share key-value "
                "heads"
            )
        if self.attention is Backend.flash:
            resolve_backend(self.attention, torch.device("cpu"))

    @property
    def dim_per_head(self) -> int:
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden_width(self) -> int:
        return -(-8 * self.width // (3 * 64)) * 64 if self.mlp_width is None else self.mlp_width


class Denoiser(nn.Module):
    """Weights and nothing else; plans and caches are passed in."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        """Args: config, checked here; vocab_size V, without `[MASK]`."""
        super().__init__()
        config.check()
        self.config = config
        self.vocab_size = vocab_size
        self.mask_id = vocab_size
        self.embedding = nn.Embedding(vocab_size + 1, config.width)
        self.layers = nn.ModuleList(
            Layer(
                config.width,
                config.heads,
                config.key_value_heads,
                config.dim_per_head,
                config.hidden_width,
                bias=config.qkv_bias,
                qk_norm=config.qk_norm,
                eps=config.norm_eps,
            )
            for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tied_head else nn.Linear(config.width, vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal with std 0.02; projections into the residual stream shrink with depth (Radford et al., 2019)."""
        residual = 0.02 / (2 * self.config.layers) ** 0.5
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(weight, std=residual)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    @property
    def head_VD(self) -> Tensor:
        """Weight of the output head."""
        return self.embedding.weight[: self.vocab_size] if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, D) final hidden states -> (…, V) logits."""
        return F.linear(hidden, self.head_VD) if self.head is None else self.head(hidden)

    # Training: both streams in one pass.

    def plan(
        self, document_BL: Tensor, block_size: int, views: int = 1, layout: Layout | None = None
    ) -> DualStreamPlan:
        """Who sees whom in this batch, for `forward` and `weighted_nll`.

        Args:
            document_BL: document of each position, on the weights' device.
            block_size: S.
            views: K.
            layout: of these documents, if it is known on the host; else the device is waited for.
        """
        device = self.embedding.weight.device
        autocast = torch.is_autocast_enabled(device.type)
        return plan_dual_stream(
            document_BL,
            block_size,
            views=views,
            clean_attention=self.config.clean_attention,
            backend=resolve_backend(self.config.attention, device),
            dtype=torch.get_autocast_dtype(device.type) if autocast else self.embedding.weight.dtype,
            layout=layout,
        )

    def forward(self, xt_BKL: Tensor, x0_BL: Tensor, plan: DualStreamPlan, chosen_M: Tensor) -> Tensor:
        """Logits (M, V) of chosen noisy positions.

        Args:
            xt_BKL: int64, K noisy views of each sequence.
            x0_BL: int64, the clean sequence.
            plan: from `plan`, of the same batch.
            chosen_M: int64, flat indices into B·K·L: the head is applied to these alone.
        """
        return self.logits(self.hidden(xt_BKL, x0_BL, plan, chosen_M))

    def weighted_nll(
        self,
        xt_BKL: Tensor,
        x0_BL: Tensor,
        plan: DualStreamPlan,
        chosen_M: Tensor,
        weight_M: Tensor,
        watch: Watch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Σ weight · −log p(x0) over chosen noisy positions, and the −log p (M) of each (detached), in nats.

        As `forward` followed by a weighted cross-entropy, without holding all logits at once. `watch` is called in the
        backward pass.
        """
        hidden_MD = self.hidden(xt_BKL, x0_BL, plan, chosen_M)
        if watch is not None:
            hidden_MD.register_hook(watch)
        target_M = x0_BL[:, None].expand_as(xt_BKL).flatten()[chosen_M]
        return weighted_nll(hidden_MD, self.head_VD, target_M, weight_M)

    def hidden(self, xt_BKL: Tensor, x0_BL: Tensor, plan: DualStreamPlan, chosen_M: Tensor) -> Tensor:
        """Final hidden states (M, D) of chosen noisy positions; arguments as in `forward`."""
        noisy = xt_BKL.shape[1] * xt_BKL.shape[2]
        x = self.embedding(torch.cat([xt_BKL.flatten(1), x0_BL], 1))
        position_T = torch.arange(x0_BL.shape[1], device=x0_BL.device).repeat(xt_BKL.shape[1] + 1)
        cos, sin = self._angles(position_T)

        def both(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return dual_stream_attention(query, key, value, plan)

        def noisy_only(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return dual_stream_attention(query, key, value, plan, noisy_only=True)

        for layer in self.layers[:-1]:
            x = self._run(layer, x, cos, sin, both)
        # Nobody reads the clean stream after the last layer: there it gives keys and values only.
        x = self._run(self.layers[-1], x, cos, sin, noisy_only, slice(0, noisy), chosen_M)
        return self.norm(x)

    def _run(self, layer: nn.Module, *arguments: object) -> Tensor:
        if self.config.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, *arguments, use_reentrant=False)
        return layer(*arguments)

    def _angles(self, position: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        return rotary_angles(position, config.dim_per_head, config.rope_theta, self.embedding.weight.dtype)

    # Sampling: block by block over a cache.

    def compiled(self) -> Denoiser:
        """The same weights behind compiled norms, projections and MLPs; this denoiser stays as it is.

        Attention over a growing cache is left alone: it is one kernel already, and its shapes change with each block.
        """
        twin = self._twin()
        for layer in twin.layers:
            assert isinstance(layer, Layer)
            for part in (layer.attention_norm, layer.mlp_norm, layer.mlp):
                part.compile()
            # Projections have a method of their own name, which `Module.compile` does not reach.
            setattr(layer.attention, "project", torch.compile(layer.attention.project))  # noqa: B010
        return twin

    def packed(self) -> Denoiser:
        """The same weights beside a second copy in the layout of the CPU's kernels; this denoiser stays as it is.

        Packing takes as long as a few calls and makes each of them shorter (`blockdiff.model.packed`). Where it has
        nothing to give (GPUs, other types, other processors, weights split over processes), this denoiser itself.
        """
        if not can_pack(self.embedding.weight):
            return self
        twin = self._twin()
        for layer in twin.layers:
            assert isinstance(layer, Layer)
            for part in (layer.attention, layer.mlp):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, nn.Linear):
                        setattr(part, name, PackedLinear(linear.weight, linear.bias))
        twin.head = PackedLinear(twin.head_VD)
        return twin

    def _twin(self) -> Denoiser:
        """Another denoiser of the same weights: they are shared, not copied."""
        return copy.deepcopy(self, {id(weight): weight for weight in self.parameters()})

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of the weights' device and type for `batch` rows of `capacity` positions."""
        return KVCache.empty(
            layers=self.config.layers,
            batch=batch,
            kv_heads=self.config.key_value_heads,
            head_dim=self.config.dim_per_head,
            capacity=capacity,
            device=self.embedding.weight.device,
            dtype=self.embedding.weight.dtype,
        )

    def denoise(self, xt_BS: Tensor, cache: KVCache, chosen_BM: Tensor | None = None) -> Tensor:
        """Logits of a noisy block behind each row's committed prefix. Commits nothing.

        Args:
            xt_BS: int64, one noisy block a row, for the first B rows of the cache.
            cache: its scratch slots are written.
            chosen_BM: int64 positions within the block that logits are wanted of; None means all S.

        Returns:
            (B, M, V), or (B, S, V).

        Raises:
            ValueError: the cache has no room for S positions.
        """
        return self._extend(None, xt_BS, cache, None, None, chosen_BM)

    def commit(
        self,
        x0_BT: Tensor,
        cache: KVCache,
        *,
        lengths: list[int] | None = None,
        block_size: int | None = None,
    ) -> None:
        """Writes the keys and values of clean tokens and counts them as committed: prefill, or a finished block.

        Args:
            x0_BT: int64 clean tokens for the first B rows of the cache.
            cache: advanced.
            lengths: how many of the T tokens each row commits (ragged prompts, filled up with anything); None: all.
            block_size: S; needed where `clean_attention` is ``block``.

        Raises:
            ValueError: the cache has no room for T positions.
        """
        self._extend(x0_BT, None, cache, lengths, block_size, None)

    def commit_and_denoise(
        self,
        x0_BS: Tensor,
        xt_BS: Tensor,
        cache: KVCache,
        chosen_BM: Tensor | None = None,
        *,
        lengths: list[int] | None = None,
    ) -> Tensor:
        """`commit` of a finished block and `denoise` of the next one in a single forward pass over 2·S tokens.

        `lengths` says how many of its S clean tokens each row commits; rows that have nothing to commit take 0.
        """
        return self._extend(x0_BS, xt_BS, cache, lengths, x0_BS.shape[1], chosen_BM)

    @torch.no_grad()
    def _extend(
        self,
        x0_BT: Tensor | None,
        xt_BS: Tensor | None,
        cache: KVCache,
        lengths: list[int] | None,
        block_size: int | None,
        chosen_BM: Tensor | None,
    ) -> Tensor:
        tokens = torch.cat([x for x in (x0_BT, xt_BS) if x is not None], 1)
        rows, total = tokens.shape
        clean = 0 if x0_BT is None else x0_BT.shape[1]
        cache.check_room(rows, total)
        step = Extension.plan(
            cache,
            lengths or [clean] * rows,
            clean,
            total - clean,
            clean_attention=self.config.clean_attention,
            block_size=block_size,
            flash=flash_available() and self.config.attention in (Backend.auto, Backend.flash),
        )
        cos, sin = self._angles(step.position)
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers[:-1]):
            x = layer(x, cos, sin, step.attend(index, last=False))
        # Nobody reads what the last layer makes of other positions: only the wanted ones ask there.
        wanted = slice(clean, None) if chosen_BM is None else clean + chosen_BM
        x = self.layers[-1](x, cos, sin, step.attend(len(self.layers) - 1, last=True), wanted)
        cache.advance(step.taken)
        return self.logits(self.norm(x))
