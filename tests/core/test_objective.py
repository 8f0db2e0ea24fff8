import pytest
import torch

from blockdiff.core.objective import token_nll, weighted_nll


def problem(m=13, d=6, v=9):
    torch.manual_seed(0)
    hidden = torch.randn(m, d, dtype=torch.float64, requires_grad=True)
    head = torch.randn(v, d, dtype=torch.float64, requires_grad=True)
    return hidden, head, torch.randint(0, v, (m,)), torch.rand(m, dtype=torch.float64)


def test_token_nll_is_minus_log_softmax():
    logits = torch.randn(5, 7, dtype=torch.float64)
    target = torch.tensor([0, 6, 3, 3, 1])
    assert torch.allclose(token_nll(logits, target), -logits.log_softmax(-1)[torch.arange(5), target])


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_fused_loss_equals_the_plain_one_in_value_and_gradient(chunk):
    hidden, head, target, weight = problem()
    total, nll = weighted_nll(hidden, head, target, weight, chunk)
    grads = torch.autograd.grad(3 * total, (hidden, head))
    plain = token_nll(hidden @ head.T, target)
    expected = torch.autograd.grad(3 * (weight * plain).sum(), (hidden, head))
    assert torch.allclose(total, (weight * plain).sum(), rtol=1e-13)
    assert torch.allclose(nll, plain, rtol=1e-13)
    for got, want in zip(grads, expected, strict=True):
        assert torch.allclose(got, want, rtol=1e-11, atol=1e-13)


def test_only_what_needs_a_gradient_gets_one():
    hidden, head, target, weight = problem()
    total, _ = weighted_nll(hidden.detach(), head, target, weight)
    (grad,) = torch.autograd.grad(total, (head,))
    assert grad.abs().sum() > 0


def test_no_positions_give_zero():
    hidden, head, _, _ = problem()
    empty = torch.zeros(0, dtype=torch.int64)
    total, nll = weighted_nll(hidden[:0], head, empty, torch.zeros(0, dtype=torch.float64))
    total.backward()
    assert total == 0
    assert nll.numel() == 0
    assert head.grad.abs().sum() == 0


def test_under_autocast_all_three_products_are_taken_in_half_precision(monkeypatch):
    """Autocast leaves in-place products alone, so the head's gradient would be the slowest product of a step."""
    hidden, head, target, weight = problem()
    hidden, head = (x.detach().float().requires_grad_() for x in (hidden, head))
    seen = []
    matmul = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: seen.append((a.dtype, b.dtype)) or matmul(a, b))
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = weighted_nll(hidden, head, target, weight)
        grads = torch.autograd.grad(total, (hidden, head))
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 3
    monkeypatch.undo()
    plain = (weight * token_nll(hidden @ head.T, target)).sum()
    for got, want in zip(grads, torch.autograd.grad(plain, (hidden, head)), strict=True):
        assert got.dtype == torch.float32
        assert (got - want).abs().max() < 0.02 * want.abs().max()
