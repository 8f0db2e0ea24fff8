import pytest
import torch

from blockdiff.core.schedule import Schedule, alpha, nelbo_weight


@pytest.mark.parametrize("schedule", Schedule)
def test_alpha_falls_from_one_to_zero(schedule):
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    value, _ = alpha(t, schedule)
    assert value[0] == pytest.approx(1, abs=1e-12)
    assert value[-1] == pytest.approx(0, abs=1e-12)
    assert (value.diff() < 0).all()


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("power", [1.0, 2.0, 3.5])
def test_slope_is_the_derivative(schedule, power):
    t = torch.linspace(0.05, 0.95, 50, dtype=torch.float64, requires_grad=True)
    value, slope = alpha(t, schedule, power)
    (expected,) = torch.autograd.grad(value.sum(), t)
    assert torch.allclose(slope, expected, atol=1e-12)


def test_linear_weight_is_one_over_t():
    t = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    assert torch.allclose(nelbo_weight(t, Schedule.linear), 1 / t)
