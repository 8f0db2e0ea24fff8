"""The exact likelihood against all S! orders, one forward pass a step, and against the bounds around it."""

import itertools
import math

import pytest
import torch
from models import V, text, tiny

from blockdiff.core.masks import CleanAttention
from blockdiff.evaluation.bracket import bracket_block_nats, draw_orders, importance_lower, tangent_upper
from blockdiff.evaluation.exact import exact_block_nats, subset_recursion, subsets
from blockdiff.evaluation.masked import masked_log_probs


def slow_block_nats(model, tokens, document, counted, block_size):
    """Every order of every block, revealed position by position through the plain cached pass, document by document."""
    rows, length = tokens.shape
    nats = torch.zeros(rows, length // block_size, dtype=torch.float64)
    for row, block in itertools.product(range(rows), range(length // block_size)):
        places = range(block * block_size, (block + 1) * block_size)
        live = [p for p in places if counted[row, p]]
        prefix = [p for p in range(places[0]) if document[row, p] == document[row, places[0]]]
        total = 0.0
        for order in itertools.permutations(live):
            weight = 1.0
            for step, position in enumerate(order):
                visible = order[:step]
                noisy = torch.tensor([[tokens[row, p] if p in visible else V for p in places]])
                cache = model.new_cache(1, length)
                if prefix:
                    model.commit(tokens[row, prefix][None], cache, block_size=block_size)
                logits = model.denoise(noisy, cache)[0, position - places[0]]
                weight *= float(logits.softmax(-1)[tokens[row, position]])
            total += weight
        nats[row, block] = -math.log(total / math.factorial(len(live))) if live else 0.0
    return nats


def enumerated_bound(model, tokens, document, counted, block_size):
    """The bound itself, free of noise: the mean over n of S/n times the mean over all masks of n positions."""
    assert bool(counted.all())
    masked = subsets(block_size)[1:].repeat(1, tokens.shape[1] // block_size)[None].expand(len(tokens), -1, -1)
    log_p = masked_log_probs(model, tokens, document, counted, masked, masked, block_size=block_size)
    size = subsets(block_size)[1:].sum(-1)
    weight = torch.tensor([1 / (n * math.comb(block_size, n)) for n in size.tolist()], dtype=torch.float64)
    return -(log_p.unflatten(-1, (-1, block_size)).sum(-1) * weight[None, :, None]).sum(1)


@pytest.mark.parametrize(("block_size", "clean"), [(1, "causal"), (2, "block"), (4, "causal")])
def test_exact_equals_enumeration_of_all_orders(block_size, clean):
    # The oracle renumbers documents from 0: rotary attention depends on distances alone.
    model = tiny(CleanAttention[clean])
    tokens, document, counted, _ = text(rows=1)
    counted[0, 5:] = False
    fast = exact_block_nats(model, tokens, document, counted, block_size=block_size)
    slow = slow_block_nats(model, tokens, document, counted, block_size)
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    assert (fast > 0).any()


def test_the_recursion_equals_enumeration_on_a_random_table():
    size = 5
    torch.manual_seed(0)
    log_p = torch.log(torch.rand(3, 2**size, size, dtype=torch.float64))
    counted = torch.ones(3, size, dtype=torch.bool)
    counted[1, [0, 3]] = False
    counted[2] = False
    fast = subset_recursion(log_p, counted)
    for case in range(3):
        live = [i for i in range(size) if counted[case, i]]
        total = 0.0
        for order in itertools.permutations(live):
            weight = 1.0
            for step, position in enumerate(order):
                # An uncounted position never matters: rows that differ in it alone are read at the counted part.
                weight *= math.exp(log_p[case, sum(1 << i for i in order[step:]), position])
            total += weight
        same = log_p[case]
        if case == 1:  # make rows with and without the uncounted positions alike, as the model's are
            same = torch.stack([log_p[case, r & 0b10110] for r in range(2**size)])
            fast[1] = subset_recursion(same, counted[1])
        assert fast[case].item() == pytest.approx(math.log(total / math.factorial(len(live))), abs=1e-12)


def test_subsets_are_the_bits():
    assert subsets(2).tolist() == [[False, False], [True, False], [False, True], [True, True]]


def test_views_per_pass_change_nothing():
    model, (tokens, document, counted, _) = tiny(), text()
    one = exact_block_nats(model, tokens, document, counted, block_size=4, views_per_pass=1)
    torch.testing.assert_close(
        exact_block_nats(model, tokens, document, counted, block_size=4, views_per_pass=16), one, atol=1e-12, rtol=0
    )


def test_the_bound_lies_above_and_the_bracket_around():
    model = tiny(std=0.2)
    tokens, document, counted, sample = text(rows=4)
    counted[:] = True
    exact = exact_block_nats(model, tokens, document, counted, block_size=4)
    bound = enumerated_bound(model, tokens, document, counted, 4)
    low, high = bracket_block_nats(model, tokens, document, counted, sample, block_size=4, orders=256)
    gap = (bound - exact).sum()
    assert bool((bound.sum(1) > exact.sum(1)).all())
    assert low.sum() < high.sum()
    assert abs(low.sum() - exact.sum()) < 0.2 * gap
    assert abs(high.sum() - exact.sum()) < 0.2 * gap


def test_both_ends_hold_in_expectation():
    """A distribution of weights whose mean is known: ends averaged over many draws lie on their sides of log z."""
    torch.manual_seed(0)
    log_w = torch.randn(200_000, 4, dtype=torch.float64) * 0.8 - 0.32  # mean weight 1, log z = 0
    low, high = importance_lower(log_w, 1), tangent_upper(log_w, 1)
    assert low.mean() < -0.02
    assert high.mean() > 0.02
    constant = torch.full((1, 3), -2.5, dtype=torch.float64)
    assert importance_lower(constant, 1).item() == pytest.approx(-2.5)
    assert tangent_upper(constant, 1).item() == pytest.approx(-2.5)
    two = torch.log(torch.tensor([[1.0, 3.0]], dtype=torch.float64))
    by_hand = ((1 / 3 - 1 + math.log(3)) + (3 - 1 + 0)) / 2
    assert tangent_upper(two, 1).item() == pytest.approx(by_hand)


def test_orders_are_uniform_and_leave_padding_for_last():
    counted = torch.tensor([[True] * 3 + [False]])
    place = draw_orders(counted, torch.tensor([5]), 4, 6000, seed=3)[0]
    assert bool((place[:, 3] == 3).all())
    share = torch.stack([(place[:, 0] == step).double().mean() for step in range(3)])
    torch.testing.assert_close(share, torch.full((3,), 1 / 3, dtype=torch.float64), atol=0.03, rtol=0)


def test_limits_are_named():
    model, (tokens, document, counted, sample) = tiny(), text(length=16)
    with pytest.raises(ValueError, match="block_size=16"):
        exact_block_nats(model, tokens, document, counted, block_size=16)
    with pytest.raises(ValueError, match="orders=1"):
        bracket_block_nats(model, tokens, document, counted, sample, block_size=4, orders=1)
