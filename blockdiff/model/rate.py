"""How fast this machine multiplies matrices of a network's own shapes: what its training can at best come near.

Legend: R rows.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from blockdiff.model.compute import Product

ROUND_FLOPS = 8e9
"""Operations of one round at launch; networks that need more are measured with fewer rows, but never below 256."""
LAUNCH_SECONDS = 0.25


class ProductRound:
    """Each product of a network once, forward and both gradients, as a training step takes them.

    Attributes:
        flops: operations of a window's products.
    """

    def __init__(
        self, products: list[Product], *, windows: int, rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Args: products of one window; windows of a call; rows R that a call has at most; where and in what type."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self._cases: list[tuple[Tensor, Tensor, Tensor, float]] = []
        for product in products:
            together = min(round(product.tokens * windows), rows)
            if together:
                # Of the window's share of this product, one call does this part.
                calls = product.tokens / together
                x_RI, weight_OI = draw(together, product.inputs), draw(product.outputs, product.inputs)
                self._cases.append((x_RI, weight_OI, draw(together, product.outputs), calls))
        self.flops = sum(product.flops for product in products)
        self._device = device

    def seconds(self) -> float:
        """Runs each product once, and says how long all products of a window take at these speeds."""
        return sum(calls * self._time(*tensors) for *tensors, calls in self._cases)

    def rate(self) -> float:
        """Operations a second, each product weighted by its work."""
        return self.flops / self.seconds()

    def _time(self, x_RI: Tensor, weight_OI: Tensor, grad_RO: Tensor) -> float:
        wait(self._device)
        began = time.perf_counter()
        torch.mm(x_RI, weight_OI.T)
        torch.mm(grad_RO, weight_OI)
        torch.mm(grad_RO.T, x_RI)
        wait(self._device)
        return time.perf_counter() - began


def measured_rate(products: list[Product], *, windows: int, device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a network's products on this device, the median over about a quarter of a second.

    Args:
        products: of one window (`blockdiff.model.compute.training_products`).
        windows: of one micro-batch.
        device: of the network.
        dtype: that products are taken in.
    """
    per_row = sum(6 * product.inputs * product.outputs for product in products)
    rows = max(round(ROUND_FLOPS / per_row), 256)
    round_ = ProductRound(products, windows=windows, rows=rows, device=device, dtype=dtype)
    rates: list[float] = []
    began = time.perf_counter()
    while not rates or time.perf_counter() - began < LAUNCH_SECONDS:
        rates.append(round_.rate())
    # The first round also fetches memory and wakes threads.
    return statistics.median(rates[1:] or rates)


def wait(device: torch.device) -> None:
    """Until the device has done all it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
