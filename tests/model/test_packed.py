"""Packed weights: the logits of plain ones, shared and not copied, and nothing where there is nothing to pack."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.model.packed import PackedLinear, can_pack
from blockdiff.sampling.batch import PACKED_TOKENS, Batch
from blockdiff.sampling.config import SamplerConfig

V = 11
pytestmark = pytest.mark.skipif(not can_pack(torch.zeros(1)), reason="no packed weights on this processor")


def make(**options: object) -> Denoiser:
    torch.manual_seed(0)
    config = ModelConfig(layers=2, width=32, heads=4, kv_heads=2)
    return Denoiser(replace(config, **options), V).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 40])
def test_a_packed_product_is_the_product(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias = (torch.randn(shape, generator=generator) for shape in ((24, 16), (24,)))
    x = torch.randn(2, 16, rows, generator=generator).transpose(1, 2)
    for b in (None, bias):
        torch.testing.assert_close(PackedLinear(weight, b)(x), F.linear(x, weight, b))


@pytest.mark.parametrize("options", [{}, {"tied_head": False, "qkv_bias": True, "qk_norm": False}], ids=str)
def test_packed_logits_are_the_plain_ones(options: dict[str, object]) -> None:
    model = make(**options)
    if model.config.qkv_bias:
        for layer in model.layers:
            torch.nn.init.normal_(layer.attention.qkv.bias)
    twin = model.packed()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(V, (2, 20), generator=generator)
    noisy = torch.full((2, 4), model.mask_id)
    chosen = torch.tensor([[3], [0]])
    logits = []
    for network in (model, twin):
        cache = network.new_cache(2, 24)
        network.commit(tokens[:, :12], cache, lengths=[12, 5])
        both = network.commit_and_denoise(tokens[:, 12:16], noisy, cache, lengths=[4, 3])
        logits.append([both, network.denoise(noisy, cache), network.denoise(noisy, cache, chosen)])
    for a, b in zip(*logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_weights_are_shared_and_the_original_stays_as_it_was() -> None:
    model = make()
    names, pointers = list(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    twin = model.packed()
    assert twin is not model
    assert twin.layers[0].attention.qkv.weight.data_ptr() == model.layers[0].attention.qkv.weight.data_ptr()
    assert list(model.state_dict()) == names
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert not any(isinstance(part, PackedLinear) for part in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_weights_that_changed_are_packed_anew() -> None:
    model, noisy = make(), torch.full((1, 4), V)
    before = model.packed().denoise(noisy, model.new_cache(1, 4))
    with torch.no_grad():
        model.layers[0].mlp.down.weight.normal_()
    after = model.packed().denoise(noisy, model.new_cache(1, 4))
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, model.denoise(noisy, model.new_cache(1, 4)), atol=1e-5, rtol=0)


def test_nothing_is_packed_where_it_would_not_serve() -> None:
    double = make().double()
    assert double.packed() is double
    model = make()

    def network(block_size: int, places: int, **options: bool) -> object:
        config = SamplerConfig(**options)
        return Batch(model, config, block_size=block_size, seq_len=16, places=places).denoiser

    assert network(PACKED_TOKENS, 1) is not model
    assert network(1, PACKED_TOKENS) is not model
    assert network(1, 1) is model, "a token and its commit wait for memory, however it is laid out"
    assert network(PACKED_TOKENS, 1, pack=False) is model
