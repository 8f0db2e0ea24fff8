"""Compiled layers against plain ones; on a GPU the same functions run in tests/gpu."""

import copy
import functools

import pytest
import torch
from torch._dynamo.utils import counters

from blockdiff.core.masks import CleanAttention
from blockdiff.model import compilation
from blockdiff.model.compilation import compile_layers, compiler_fault
from blockdiff.model.denoiser import Denoiser, ModelConfig

V, L = 11, 32


def networks(device="cpu", **more):
    """The same network plain and compiled."""
    torch.manual_seed(0)
    plain = Denoiser(ModelConfig(layers=3, width=32, heads=4, kv_heads=2, **more), V)
    compiled = copy.deepcopy(plain)
    compile_layers(compiled)
    return plain.to(device), compiled.to(device)


def gradients(model, share, device="cpu"):
    """Loss and gradients where a share of the tokens is masked, in percent."""
    generator = torch.Generator().manual_seed(share)
    x0 = torch.randint(0, V, (2, L), generator=generator)
    xt = torch.where(torch.rand(2, 1, L, generator=generator) * 100 < share, V, x0[:, None])
    chosen = (xt == V).flatten().nonzero().squeeze(1)
    weight = torch.rand(len(chosen), dtype=torch.float64, generator=generator)
    x0, xt, chosen, weight = (x.to(device) for x in (x0, xt, chosen, weight))
    total, _ = model.weighted_nll(xt, x0, model.plan(torch.zeros_like(x0), 4), chosen, weight)
    return total.detach(), torch.autograd.grad(total, list(model.parameters()))


def assert_close(plain, compiled, tolerance):
    assert (plain[0] - compiled[0]).abs() < tolerance * plain[0].abs()
    for want, got in zip(plain[1], compiled[1], strict=True):
        assert (want - got).abs().max() < tolerance * want.abs().max()


@pytest.fixture
def no_generated_code(monkeypatch):
    """Captures and differentiates graphs as ever, and runs them without a compiler."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compilation.torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("no_generated_code")
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_equals_plain_and_nothing_is_compiled_twice(recompute):
    """Four graphs serve all layers and every number of masked tokens."""
    plain, compiled = networks(activation_checkpointing=recompute)
    for share in (50, 30, 80, 100):
        assert_close(gradients(plain, share), gradients(compiled, share), 1e-4)
        assert counters["stats"]["unique_graphs"] == 4
    assert plain.state_dict().keys() == compiled.state_dict().keys()


@pytest.mark.parametrize("more", [{}, {"clean_attention": CleanAttention.block, "activation_checkpointing": True}])
def test_generated_code_gives_the_loss_and_gradients_of_plain_layers(more):
    """To rounding in double precision, so that what holds of plain layers holds of these."""
    if fault := compiler_fault("cpu"):
        pytest.skip(f"needs what generates code for CPUs: {fault}")
    torch._dynamo.reset()
    plain, compiled = (model.double() for model in networks(**more))
    for share in (50, 90):
        assert_close(gradients(plain, share), gradients(compiled, share), 1e-11)


@pytest.mark.usefixtures("no_generated_code")
def test_passes_without_gradients_and_of_one_token_stay_plain():
    _, compiled = networks()
    with torch.no_grad():
        cache = compiled.new_cache(1, 16)
        compiled.commit(torch.zeros(1, 5, dtype=torch.int64), cache)
        compiled.denoise(torch.zeros(1, 3, dtype=torch.int64), cache)
    assert counters["stats"]["unique_graphs"] == 0
    x0 = torch.zeros(1, L, dtype=torch.int64)
    one = torch.tensor([3])
    compiled.weighted_nll(x0[:, None], x0, compiled.plan(x0, 4), one, one.double())[0].backward()
    assert counters["stats"]["unique_graphs"] == 3
