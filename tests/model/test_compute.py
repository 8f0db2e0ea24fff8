"""Operations of a training step against torch's own count, the dense mask, and draws of the noise.

Legend: B batch, K noisy views, L seq_len, M masked positions.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from blockdiff.core.corruption import CorruptionKind, NoiseConfig, NoiseKey, ViewKind, corrupt
from blockdiff.core.masks import CleanAttention, dual_stream_mask
from blockdiff.core.schedule import Schedule
from blockdiff.model.compute import attention_flops, masked_share, training_flops, training_products
from blockdiff.model.denoiser import Denoiser, ModelConfig

L, V, B = 32, 40, 2


def added_in_place(total, left, right, out_shape=None, **_):
    """Shapes to operations: torch has no count of its own for this product, by which the head's gradient grows."""
    return 2 * left[0] * left[1] * right[1]


def counted_by_torch(config: ModelConfig, block_size: int, noise: NoiseConfig) -> int:
    """Operations of the matrix products of a real step over B windows, in which the expected share is masked."""
    denoiser = Denoiser(config, V)
    masked = B * noise.views * L * masked_share(noise, block_size)
    assert masked == round(masked)
    chosen_M = torch.arange(round(masked))
    x0_BL = torch.randint(V, (B, L))
    xt_BKL = torch.full((B, noise.views, L), denoiser.mask_id)
    plan = denoiser.plan(torch.zeros_like(x0_BL), block_size, noise.views)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_in_place}) as counter:
        denoiser.weighted_nll(xt_BKL, x0_BL, plan, chosen_M, torch.ones(len(chosen_M)))[0].backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"layers": 1},
        {"kv_heads": 1, "head_dim": 6, "mlp_width": 20},
        {"tied_head": False, "qkv_bias": True, "clean_attention": CleanAttention.block},
    ],
    ids=["plain", "one layer", "grouped", "untied"],
)
@pytest.mark.parametrize(("block_size", "views"), [(1, 1), (4, 1), (4, 3), (16, 2), (32, 1)])
def test_products_are_those_that_torch_counts(more, block_size, views):
    config = ModelConfig(**({"layers": 3, "width": 16, "heads": 2} | more))
    noise = NoiseConfig(count_power=0.0, views=views)
    products = training_products(config, V, L, block_size, noise)
    # The one product that is taken in vain: the last layer's queries of noisy positions that nobody reads.
    unread = views * L * (1 - masked_share(noise, block_size))
    in_vain = 6 * unread * config.width * config.heads * config.dim_per_head
    assert B * (sum(product.flops for product in products) + in_vain) == counted_by_torch(config, block_size, noise)


@pytest.mark.parametrize("clean", CleanAttention)
@pytest.mark.parametrize(("block_size", "views"), [(1, 1), (4, 2), (32, 1)])
def test_attention_counts_the_pairs_of_the_dense_mask(clean, block_size, views):
    config = ModelConfig(layers=3, width=16, heads=2, kv_heads=1, head_dim=6, clean_attention=clean)
    noise = NoiseConfig(views=views)
    mask = dual_stream_mask(L, block_size, views=views, clean_attention=clean)
    pairs = 2 * mask.sum() + masked_share(noise, block_size) * mask[: views * L].sum()
    # Scores and mixing take a multiply-add a dimension each.
    assert attention_flops(config, L, block_size, noise) == pytest.approx(3 * 2 * 2 * 12 * float(pairs))
    products = training_products(config, V, L, block_size, noise)
    whole = sum(product.flops for product in products) + attention_flops(config, L, block_size, noise)
    assert training_flops(config, V, L, block_size, noise) == whole


@pytest.mark.parametrize(
    "noise",
    [
        NoiseConfig(),
        NoiseConfig(count_power=0.0, views=2),
        NoiseConfig(views=2, view_kind=ViewKind.complementary),
        NoiseConfig(corruption=CorruptionKind.bernoulli),
        NoiseConfig(corruption=CorruptionKind.bernoulli, clip=[0.3, 0.8]),
        NoiseConfig(corruption=CorruptionKind.bernoulli, schedule=Schedule.cosine),
        NoiseConfig(corruption=CorruptionKind.bernoulli, schedule=Schedule.polynomial, schedule_power=3.0),
    ],
    ids=["exact", "uniform, two views", "a pair", "linear", "clipped", "cosine", "polynomial"],
)
@pytest.mark.parametrize("block_size", [1, 8])
def test_the_masked_share_is_what_the_noise_draws(noise, block_size):
    rows = 4000
    x0_BL = torch.zeros(rows, 8, dtype=torch.int64)
    key = NoiseKey(0, 0, torch.arange(rows), rows)
    drawn = corrupt(x0_BL, x0_BL == 0, block_size=block_size, mask_id=1, noise=noise, key=key)
    assert float(drawn.masked_BKL.double().mean()) == pytest.approx(masked_share(noise, block_size), abs=0.01)


def test_shares_in_closed_form():
    bernoulli = CorruptionKind.bernoulli
    assert masked_share(NoiseConfig(), 1) == 1
    assert masked_share(NoiseConfig(corruption=bernoulli), 4) == pytest.approx(0.5, abs=1e-9)
    assert masked_share(NoiseConfig(corruption=bernoulli, clip=[0.2, 0.4]), 4) == pytest.approx(0.3, abs=1e-9)
    cosine = NoiseConfig(corruption=bernoulli, schedule=Schedule.cosine)
    assert masked_share(cosine, 4) == pytest.approx(2 / torch.pi, abs=1e-6)
