"""Floating-point operations of a training step, so that runs can be compared at equal compute.

Legend: L window length, S block size, K noisy views, D width, H heads, h key-value heads, E head dim, V vocabulary.

Counted are the matrix products, two operations a multiply-add, three times the forward pass (forward and both
gradients), as the model is trained here: both streams at every block size, 1 included. A trainer of autoregressive
models alone would need about half of what block size 1 takes. Norms, rotations and masked pairs that a kernel computes
in vain are left out.
"""

from __future__ import annotations

from blockdiff.core.corruption import CorruptionKind, NoiseConfig
from blockdiff.model.denoiser import ModelConfig


def training_flops(model: ModelConfig, vocab_size: int, seq_len: int, block_size: int, noise: NoiseConfig) -> float:
    """Operations that one window of L tokens costs in training, forward and backward.

    Args:
        model: shape of the denoiser.
        vocab_size: V.
        seq_len: L.
        block_size: S.
        noise: whose views K and share of masked tokens count.
    """
    views, inner, kv = noise.views, model.heads * model.dim_per_head, model.key_value_heads * model.dim_per_head
    mixer = model.width * (2 * inner + 2 * kv)
    per_token = 2 * (mixer + 3 * model.width * model.hidden_width)
    keys_and_values = 2 * model.width * 2 * kv
    noisy, clean = views * seq_len, seq_len
    # The last layer makes keys and values of the clean stream only, and goes on with masked positions alone.
    masked = noisy * masked_share(noise, block_size)
    products = float((model.layers - 1) * (noisy + clean) * per_token)
    products += (noisy + clean) * keys_and_values + masked * (per_token - keys_and_values)
    pair = 4 * inner
    noisy_pairs = views * (seq_len * (seq_len - block_size) / 2 + seq_len * block_size)
    clean_pairs = seq_len * (seq_len + 1) / 2
    attention = pair * (model.layers * noisy_pairs + (model.layers - 1) * clean_pairs)
    head = masked * 2 * model.width * vocab_size
    return 3 * (products + attention + head)


def masked_share(noise: NoiseConfig, block_size: int) -> float:
    """Expected share of masked tokens of a full block; a half for Bernoulli corruption with a symmetric schedule."""
    if noise.corruption is CorruptionKind.bernoulli:
        return 0.5
    weights = [n**-noise.count_power for n in range(1, block_size + 1)]
    return sum(n * w for n, w in enumerate(weights, 1)) / sum(weights) / block_size
