"""Cached passes over rows that stand at different lengths, against each row on its own."""

import pytest
import torch

from blockdiff.core.masks import CleanAttention
from blockdiff.model.denoiser import Denoiser, ModelConfig

V = 11


def make(clean=CleanAttention.causal, kv_heads=2) -> Denoiser:
    torch.manual_seed(0)
    model = Denoiser(ModelConfig(layers=2, width=32, heads=4, kv_heads=kv_heads, clean_attention=clean), V).double()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def tokens(*shape, seed=1):
    torch.manual_seed(seed)
    return torch.randint(0, V, shape)


def test_cache_does_not_depend_on_the_block_size_under_causal_clean_attention():
    model, x0 = make(), tokens(2, 24)
    caches = []
    for size in (1, 3, 8, 24):
        cache = model.new_cache(2, 24)
        for start in range(0, 24, size):
            model.commit(x0[:, start : start + size], cache)
        caches.append(cache)
    for other in caches[1:]:
        for a, b in zip(caches[0].keys + caches[0].values, other.keys + other.values, strict=True):
            assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("clean", CleanAttention)
def test_fused_commit_and_denoise_equals_one_after_the_other(clean):
    model, x0, xt = make(clean), tokens(2, 12), tokens(2, 4, seed=2)
    apart, fused = model.new_cache(2, 16), model.new_cache(2, 16)
    for cache in (apart, fused):
        model.commit(x0[:, :8], cache, block_size=4)
    model.commit(x0[:, 8:], apart, block_size=4)
    expected = model.denoise(xt, apart)
    got = model.commit_and_denoise(x0[:, 8:], xt, fused)
    assert (got - expected).abs().max() < 1e-12
    assert fused.lengths == apart.lengths == [12, 12]
    for a, b in zip(apart.keys + apart.values, fused.keys + fused.values, strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("clean", CleanAttention)
def test_rows_of_different_lengths_equal_rows_alone(clean):
    model, lengths = make(clean), [0, 4, 12]
    prompt, second, xt = tokens(3, 12), tokens(3, 4, seed=2), tokens(3, 4, seed=3)
    together = model.new_cache(3, 24)
    model.commit(prompt, together, lengths=lengths, block_size=4)
    first_logits = model.denoise(xt, together)
    second_logits = model.commit_and_denoise(second, xt, together)
    assert together.lengths == [n + 4 for n in lengths]
    for row, n in enumerate(lengths):
        part = slice(row, row + 1)
        alone = model.new_cache(1, 24)
        if n:
            model.commit(prompt[part, :n], alone, block_size=4)
        assert (model.denoise(xt[part], alone) - first_logits[part]).abs().max() < 1e-12
        assert (model.commit_and_denoise(second[part], xt[part], alone) - second_logits[part]).abs().max() < 1e-12


def test_denoising_commits_nothing_and_repeats_itself():
    model, cache = make(), make().new_cache(1, 16)
    model.commit(tokens(1, 4), cache)
    first = model.denoise(tokens(1, 4, seed=2), cache)
    model.denoise(tokens(1, 4, seed=3), cache)
    assert torch.equal(model.denoise(tokens(1, 4, seed=2), cache), first)
    assert cache.lengths == [4]


def test_chosen_positions_give_the_logits_of_all():
    model, cache, xt = make(), make().new_cache(2, 16), tokens(2, 4, seed=2)
    model.commit(tokens(2, 4), cache)
    chosen = torch.tensor([[3, 0], [1, 2]])
    some, everything = model.denoise(xt, cache, chosen), model.denoise(xt, cache)
    assert torch.allclose(some, everything.gather(1, chosen[..., None].expand(-1, -1, V)), atol=1e-13)


def test_first_rows_work_without_the_others():
    model, cache = make(), make().new_cache(3, 16)
    model.commit(tokens(3, 4), cache)
    some = model.denoise(tokens(2, 4, seed=2), cache)
    alone = model.new_cache(2, 16)
    model.commit(tokens(3, 4)[:2], alone)
    assert torch.allclose(some, model.denoise(tokens(2, 4, seed=2), alone), atol=1e-13)
    assert cache.lengths == [4, 4, 4]


def test_moved_row_goes_on_where_it_was():
    model, cache = make(), make().new_cache(2, 16)
    model.commit(tokens(2, 8), cache, lengths=[4, 8])
    expected = model.denoise(tokens(2, 4, seed=2), cache)[1]
    cache.move(1, 0)
    assert cache.lengths == [8, 0]
    got = model.denoise(tokens(2, 4, seed=2)[1:], cache)[0]
    assert torch.allclose(got, expected, atol=1e-13)


def test_full_cache_refuses_with_numbers():
    model, cache = make(), make().new_cache(1, 8)
    model.commit(tokens(1, 6), cache)
    with pytest.raises(ValueError, match="holds 8 positions a row, 6 are committed and 4 more"):
        model.denoise(tokens(1, 4), cache)


def test_bytes_count_keys_and_values_of_all_layers():
    assert make().new_cache(3, 16).nbytes == 2 * 2 * 3 * 2 * 16 * 8 * 8
