"""The rate of products: which products are timed, and how their times are weighted."""

import pytest
import torch

from blockdiff.core.corruption import NoiseConfig
from blockdiff.model.compute import Product, training_products
from blockdiff.model.denoiser import ModelConfig
from blockdiff.model.rate import ProductRound, measured_rate

CPU, SINGLE = torch.device("cpu"), torch.float32


def seconds_at(rate: float):
    """Stands for the clock: each product takes as long as at this many operations a second."""

    def time(self, x_RI, weight_OI, grad_RO):
        assert grad_RO.shape == (len(x_RI), len(weight_OI))
        return 6 * x_RI.numel() * len(weight_OI) / rate

    return time


@pytest.mark.parametrize("rows", [4, 10**6], ids=["cut", "whole"])
def test_at_a_constant_rate_that_rate_is_found(monkeypatch, rows):
    monkeypatch.setattr(ProductRound, "_time", seconds_at(1e9))
    products = training_products(ModelConfig(layers=3), 40, 32, 4, NoiseConfig(views=2))
    round_ = ProductRound(products, windows=2, rows=rows, device=CPU, dtype=SINGLE)
    assert round_.flops == sum(product.flops for product in products)
    assert round_.rate() == pytest.approx(1e9)
    monkeypatch.setattr("blockdiff.model.rate.LAUNCH_SECONDS", 0.0)
    assert measured_rate(products, windows=2, device=CPU, dtype=SINGLE) == pytest.approx(1e9)


def test_products_weigh_by_their_work(monkeypatch):
    """3/4 of the work at 1 GFLOP/s and 1/4 at 4: (3/4 + 1/16)⁻¹ GFLOP/s, however many rows are timed."""
    slow, fast = Product(8, 8, 300), Product(16, 8, 50)

    def time(self, x_RI, weight_OI, grad_RO):
        return seconds_at(1e9 if x_RI.shape[1] == 8 else 4e9)(self, x_RI, weight_OI, grad_RO)

    monkeypatch.setattr(ProductRound, "_time", time)
    round_ = ProductRound([slow, fast, Product(8, 8, 0)], windows=1, rows=20, device=CPU, dtype=SINGLE)
    assert round_.rate() == pytest.approx(1e9 / (3 / 4 + 1 / 16))


def test_a_real_round_takes_time():
    products = training_products(ModelConfig(layers=2, width=32), 40, 32, 4, NoiseConfig())
    assert 1e5 < ProductRound(products, windows=1, rows=64, device=CPU, dtype=torch.float64).rate() < 1e13
