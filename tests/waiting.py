"""Tells when something would make the host wait for a device, on a machine that has none.

Whatever turns a tensor's contents into a Python value, or a shape, waits. On the CPU it costs nothing and goes unseen;
here it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

READERS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
OPERATORS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten._unique2.default,
    torch.ops.aten.bincount.default,
}
INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}


class WaitingError(AssertionError):
    """Something would have waited."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in INDEXING and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if func in OPERATORS or by_mask:
            raise WaitingError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Within it, what would wait for the device raises a WaitingError."""

    def refuse(name: str) -> Callable[..., Any]:
        def raising(*arguments: object) -> Any:
            raise WaitingError(f"Tensor.{name} waits for the device")

        return raising

    with pytest.MonkeyPatch.context() as patch, _Watch():
        for name in READERS:
            patch.setattr(torch.Tensor, name, refuse(name))
        yield
