"""The average against its definition, weight by weight."""

import pytest
import torch
from torch import nn

from blockdiff.training.ema import averaged_copy, decay_at, update_average


def test_average_is_the_written_out_recursion() -> None:
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    average = averaged_copy(network)
    expected = [w.detach().clone() for w in network.parameters()]
    for step in range(5):
        for weight in network.parameters():
            weight.data.add_(torch.randn_like(weight))
        update_average(average, network, step, 0.4)
        decay = min(0.4, (1 + step) / (10 + step))
        expected = [decay * e + (1 - decay) * w.detach() for e, w in zip(expected, network.parameters(), strict=True)]
    for one, other in zip(average.parameters(), expected, strict=True):
        torch.testing.assert_close(one.detach(), other)


def test_average_is_frozen_and_at_least_single_precision() -> None:
    low, high = averaged_copy(nn.Linear(2, 2).bfloat16()), averaged_copy(nn.Linear(2, 2).double())
    assert {w.dtype for w in low.parameters()} == {torch.float32}
    assert {w.dtype for w in high.parameters()} == {torch.float64}
    assert not any(w.requires_grad for w in low.parameters())


def test_half_precision_weights_are_averaged_in_single() -> None:
    network = nn.Linear(1, 1, bias=False).bfloat16()
    network.weight.data.fill_(0)
    average = averaged_copy(network)
    network.weight.data.fill_(1)
    update_average(average, network, 10**6, 0.999)
    assert average.weight.item() == pytest.approx(0.001, rel=1e-4)


def test_decay_warms_up() -> None:
    assert decay_at(0, 0.99) == 0.1
    assert decay_at(10**6, 0.99) == 0.99
