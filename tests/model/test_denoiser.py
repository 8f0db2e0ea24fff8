"""The dual-stream pass against the plainest possible oracles: a dense mask, and block by block over a cache."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from blockdiff.core.masks import CleanAttention, dual_stream_mask
from blockdiff.core.objective import token_nll
from blockdiff.model import plan as plan_module
from blockdiff.model.attention import Backend
from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.model.layers import rotary_angles, rotate

V, L = 11, 24


def make(clean=CleanAttention.causal, kv_heads=None, backend=Backend.sdpa, seed=0, **more) -> Denoiser:
    torch.manual_seed(seed)
    config = ModelConfig(
        layers=3, width=32, heads=4, kv_heads=kv_heads, clean_attention=clean, attention=backend, **more
    )
    model = Denoiser(config, V).double()
    for weight in model.parameters():  # far from the initial values, so that every part matters
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() > 1 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def batch(views=1, rows=2, seed=1):
    torch.manual_seed(seed)
    x0 = torch.randint(0, V, (rows, L))
    xt = torch.where(torch.rand(rows, views, L) < 0.5, V, x0[:, None])
    return x0, xt


def all_logits(model, xt, x0, block_size, document=None):
    document = torch.zeros_like(x0) if document is None else document
    plan = model.plan(document, block_size, xt.shape[1])
    return model(xt, x0, plan, torch.arange(xt.numel())).view(*xt.shape, V)


def dense_oracle(model, xt, x0, block_size, document=None):
    """One dense mask over all streams, written out layer by layer with no help from the model's own forward."""
    config = model.config
    rows, views, length = xt.shape
    tokens = torch.cat([xt.flatten(1), x0], 1)
    position = torch.arange(length).repeat(views + 1)
    cos, sin = rotary_angles(position, config.dim_per_head, config.rope_theta, torch.float64)
    masks = [
        dual_stream_mask(
            length,
            block_size,
            views=views,
            clean_attention=config.clean_attention,
            document_L=None if document is None else document[row],
        )
        for row in range(rows)
    ]
    mask = torch.stack(masks)[:, None]
    x = model.embedding(tokens)
    for layer in model.layers:
        part = layer.attention
        heads = part.qkv(layer.attention_norm(x)).unflatten(-1, (-1, config.dim_per_head)).transpose(1, 2)
        q, k, v = heads.split([config.heads, config.key_value_heads, config.key_value_heads], 1)
        q, k = rotate(part.query_norm(q), cos, sin), rotate(part.key_norm(k), cos, sin)
        repeat = config.heads // config.key_value_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = (q @ k.transpose(-1, -2) / config.dim_per_head**0.5).masked_fill(~mask, float("-inf"))
        x = x + part.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        gate, up = layer.mlp.gate_up(layer.mlp_norm(x)).chunk(2, -1)
        x = x + layer.mlp.down(F.silu(gate) * up)
    return model.logits(model.norm(x))[:, : views * length].unflatten(1, (views, length))


def cached_oracle(model, xt, x0, block_size):
    rows, views, length = xt.shape
    result = []
    for view in range(views):
        cache, outputs = model.new_cache(rows, length), []
        for start in range(0, length, block_size):
            part = slice(start, start + block_size)
            outputs.append(model.denoise(xt[:, view, part], cache))
            model.commit(x0[:, part], cache, block_size=block_size)
        result.append(torch.cat(outputs, 1))
    return torch.stack(result, 1)


@pytest.fixture(params=[8, 128], ids=["many-groups", "one-group"])
def group_tokens(request, monkeypatch):
    monkeypatch.setattr(plan_module, "GROUP_TOKENS", request.param)


@pytest.mark.usefixtures("group_tokens")
@pytest.mark.parametrize("clean", CleanAttention)
@pytest.mark.parametrize("block_size", [1, 2, 4, 12, 24])
@pytest.mark.parametrize(("kv_heads", "views"), [(None, 1), (2, 2), (1, 1)])
def test_dual_stream_equals_dense_mask_equals_cached_blocks(clean, block_size, kv_heads, views):
    model = make(clean, kv_heads)
    x0, xt = batch(views)
    fast = all_logits(model, xt, x0, block_size)
    assert (fast - dense_oracle(model, xt, x0, block_size)).abs().max() < 1e-10
    assert (fast - cached_oracle(model, xt, x0, block_size)).abs().max() < 1e-10


@pytest.mark.usefixtures("group_tokens")
@pytest.mark.parametrize("clean", CleanAttention)
@pytest.mark.parametrize("views", [1, 2])
def test_documents_do_not_see_each_other(clean, views):
    document = torch.tensor([[0] * 4 + [1] * 12 + [2] * 8, [0] * 16 + [1] * 8])
    model = make(clean)
    x0, xt = batch(views)
    fast = all_logits(model, xt, x0, 4, document)
    assert (fast - dense_oracle(model, xt, x0, 4, document)).abs().max() < 1e-10
    alone = all_logits(model, xt[:1, :, 4:16], x0[:1, 4:16], 4)
    assert (fast[:1, :, 4:16] - alone).abs().max() < 1e-10


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("clean", CleanAttention)
@pytest.mark.parametrize("block_size", [1, 4, 24])
@pytest.mark.parametrize("documents", [False, True])
def test_flex_equals_sdpa(clean, block_size, documents):
    document = (
        torch.tensor([[0] * 24, [0] * 24])
        if not documents or block_size == 24
        else torch.tensor([[0] * 8 + [1] * 16, [0] * 4 + [1] * 20])
    )
    x0, xt = batch(views=2)
    with torch.no_grad():
        flex = all_logits(make(clean, 2, Backend.flex), xt, x0, block_size, document)
        sdpa = all_logits(make(clean, 2, Backend.sdpa), xt, x0, block_size, document)
    assert (flex - sdpa).abs().max() < 1e-10


@pytest.mark.parametrize("clean", CleanAttention)
@pytest.mark.parametrize("block_size", [2, 6])
def test_no_gradient_reaches_clean_tokens_of_own_or_later_blocks(clean, block_size):
    """DESIGN invariant 2, through the embeddings of the clean stream."""
    model = make(clean)
    x0, xt = batch(rows=1)
    embedded = {}

    def hook(module, inputs, output):
        output = output.detach().requires_grad_()
        embedded["x"] = output
        return output

    handle = model.embedding.register_forward_hook(hook)
    logits = all_logits(model, xt, x0, block_size)
    handle.remove()
    for block in range(L // block_size):
        part = logits[:, :, block * block_size : (block + 1) * block_size]
        (grad,) = torch.autograd.grad(part.logsumexp(-1).sum(), embedded["x"], retain_graph=True)
        noisy, clean_grad = grad[0, :L].abs().sum(-1), grad[0, L:].abs().sum(-1)
        start, end = block * block_size, (block + 1) * block_size
        assert clean_grad[start:].max() == 0
        assert noisy[:start].sum() == noisy[end:].sum() == 0
        assert (noisy[start:end] > 0).all()
        assert start == 0 or (clean_grad[:start] > 0).all()


def test_block_size_one_is_the_autoregressive_model():
    """DESIGN invariant 3: the clean prefix, then one [MASK], position by position, without cache or second stream."""
    model = make()
    x0, _ = batch()
    fast = all_logits(model, torch.full_like(x0, model.mask_id)[:, None], x0, 1)[:, 0]
    nll = token_nll(fast.flatten(0, 1), x0.flatten()).view(x0.shape)
    for i in range(L):
        xt = torch.cat([x0[:, :i], torch.full_like(x0[:, :1], model.mask_id)], 1)
        plain = plain_causal_logits(model, xt)
        assert (nll[:, i] - token_nll(plain, x0[:, i])).abs().max() < 1e-10


def plain_causal_logits(model, tokens):
    """An ordinary causal transformer over `tokens`; the logits at the last one."""
    length = tokens.shape[1]
    cos, sin = rotary_angles(torch.arange(length), model.config.dim_per_head, model.config.rope_theta, torch.float64)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    x = model.embedding(tokens)
    for layer in model.layers:
        x = layer(x, cos, sin, attend)
    return model.logits(model.norm(x[:, -1]))


def test_head_meets_chosen_positions_only_and_gives_the_same_logits():
    model = make()
    x0, xt = batch(views=2)
    chosen = torch.tensor([3, 50, 7, 95])
    plan = model.plan(torch.zeros_like(x0), 4, 2)
    some = model(xt, x0, plan, chosen)
    assert torch.allclose(some, all_logits(model, xt, x0, 4).flatten(0, 2)[chosen], atol=1e-12)


def test_fused_loss_equals_loss_of_logits():
    model = make()
    x0, xt = batch(views=2)
    plan = model.plan(torch.zeros_like(x0), 4, 2)
    chosen = (xt == model.mask_id).flatten().nonzero().squeeze(1)
    weight = torch.rand(len(chosen), dtype=torch.float64)
    total, nll = model.weighted_nll(xt, x0, plan, chosen, weight)
    target = x0[:, None].expand_as(xt).flatten()[chosen]
    plain = token_nll(model(xt, x0, plan, chosen), target)
    assert torch.allclose(nll, plain, atol=1e-12)
    got = torch.autograd.grad(total, list(model.parameters()))
    want = torch.autograd.grad((weight * plain).sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(got, want, strict=True))


def test_activation_checkpointing_changes_no_gradient():
    x0, xt = batch()
    grads = []
    for recompute in (False, True):
        model = make(activation_checkpointing=recompute)
        plan = model.plan(torch.zeros_like(x0), 4)
        loss = model(xt, x0, plan, torch.arange(xt.numel())).logsumexp(-1).sum()
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*grads, strict=True))


def test_mask_has_no_column_in_the_head():
    model = make()
    assert model.embedding.num_embeddings == V + 1
    assert model.head_VD.shape == (V, 32)
    assert make(tied_head=False).head_VD.shape == (V, 32)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_options_keep_cached_equal_to_dual_stream(bias, qk_norm):
    model = make(qkv_bias=bias, qk_norm=qk_norm, head_dim=6, mlp_width=40)
    if bias:
        for layer in model.layers:
            torch.nn.init.normal_(layer.attention.qkv.bias)
    x0, xt = batch()
    assert (all_logits(model, xt, x0, 4) - cached_oracle(model, xt, x0, 4)).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 30}, "model.heads=4 must divide model.width=30"),
        ({"kv_heads": 3}, "model.kv_heads=3 must divide model.heads=4"),
        ({"head_dim": 5}, "model.head_dim=5 must be even"),
        ({"layers": 0}, "model.layers=0"),
        ({"attention": Backend.flash}, "model.attention=flash"),
    ],
)
def test_bad_shapes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"layers": 2, "width": 32, "heads": 4, **change}).check()


def test_every_parameter_gets_a_gradient():
    for options in itertools.product([True, False], repeat=3):
        model = make(tied_head=options[0], qkv_bias=options[1], qk_norm=options[2])
        x0, xt = batch()
        all_logits(model, xt, x0, 4).logsumexp(-1).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
