"""Tests of what is different on CUDA: they need one CUDA device, and nothing beyond PyTorch and pytest.

`DEVICE=cpu pytest tests/gpu` runs what a CPU can of them, to try the tests themselves.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
DEVICE = os.environ.get("DEVICE", "cuda")

# Functions that they share with the tests on a CPU.
for folder in ("model", "training"):
    sys.path.append(str(HERE.parent / folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if DEVICE == "cuda" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif DEVICE != "cuda" and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason="means nothing on a CPU"))


@pytest.fixture
def device() -> str:
    return DEVICE
