"""Floating-point operations of a training step, so that runs can be compared at equal compute and with their machine.

Legend: L window length, S block size, K noisy views, D width, H heads, h key-value heads, E head dim, V vocabulary.

Counted are the matrix products that are of use, two operations a multiply-add, three times the forward pass (forward
and both gradients), as the model is trained here: both streams at every block size, 1 included. A trainer of
autoregressive models alone would need about half of what block size 1 takes. Left out are norms, rotations, what
activation checkpointing computes again, pairs that a kernel computes although the mask forbids them, and what the last
layer makes of noisy positions that nobody reads, being unmasked. A window counts as one whole document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blockdiff.core.corruption import CorruptionKind, NoiseConfig, ViewKind
from blockdiff.core.masks import CleanAttention
from blockdiff.core.schedule import alpha
from blockdiff.model.denoiser import ModelConfig


@dataclass
class Product:
    """A matrix product with weights, as a window's forward pass needs it.

    Attributes:
        inputs: width of what comes in.
        outputs: width of what goes out.
        tokens: rows of a window that meet it, over all layers; an expectation where masked positions count.
    """

    inputs: int
    outputs: int
    tokens: float

    @property
    def flops(self) -> float:
        """Operations of a window, forward and backward."""
        return 6 * self.tokens * self.inputs * self.outputs


def training_flops(model: ModelConfig, vocab_size: int, seq_len: int, block_size: int, noise: NoiseConfig) -> float:
    """Operations that one window of L tokens costs in training, forward and backward.

    Args:
        model: shape of the denoiser.
        vocab_size: V.
        seq_len: L.
        block_size: S.
        noise: whose views K and share of masked tokens count.
    """
    products = training_products(model, vocab_size, seq_len, block_size, noise)
    return sum(product.flops for product in products) + attention_flops(model, seq_len, block_size, noise)


def training_products(
    model: ModelConfig, vocab_size: int, seq_len: int, block_size: int, noise: NoiseConfig
) -> list[Product]:
    """The products with weights that one window takes in training; arguments as of `training_flops`."""
    width, inner, kv = model.width, model.heads * model.dim_per_head, model.key_value_heads * model.dim_per_head
    both = (noise.views + 1) * seq_len
    masked = noise.views * seq_len * masked_share(noise, block_size)
    # The last layer makes keys and values of the clean stream only, and goes on with masked positions alone.
    through = (model.layers - 1) * both + masked
    return [
        Product(width, inner + 2 * kv, (model.layers - 1) * both),
        Product(width, 2 * kv, both),
        Product(width, inner, masked),
        Product(inner, width, through),
        Product(width, 2 * model.hidden_width, through),
        Product(model.hidden_width, width, through),
        Product(width, vocab_size, masked),
    ]


def attention_flops(model: ModelConfig, seq_len: int, block_size: int, noise: NoiseConfig) -> float:
    """Operations of a window's attention on permitted pairs, forward and backward; arguments as of `training_flops`."""
    by_block = seq_len * (seq_len - block_size) / 2 + seq_len * block_size
    match model.clean_attention:
        case CleanAttention.causal:
            clean_pairs = seq_len * (seq_len + 1) / 2
        case CleanAttention.block:
            clean_pairs = by_block
    noisy_layers = model.layers - 1 + masked_share(noise, block_size)
    pairs = noisy_layers * noise.views * by_block + (model.layers - 1) * clean_pairs
    return 3 * 4 * model.heads * model.dim_per_head * pairs


def masked_share(noise: NoiseConfig, block_size: int) -> float:
    """Expected share of masked tokens of a full block; where the noise is fitted, of what it starts from."""
    if noise.view_kind is ViewKind.complementary:
        return 0.5  # each token in one of two views, whatever their counts
    match noise.corruption:
        case CorruptionKind.exact_count:
            weights = [n**-noise.count_power for n in range(1, block_size + 1)]
            return sum(n * w for n, w in enumerate(weights, 1)) / sum(weights) / block_size
        case CorruptionKind.bernoulli:
            low, high = noise.clip
            # The midpoint rule, with an error below 1e-6.
            time = low + (high - low) * (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
            return float(1 - alpha(time, noise.schedule, noise.schedule_power)[0].mean())
