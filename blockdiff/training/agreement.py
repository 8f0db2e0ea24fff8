"""Decisions that all processes of a run must take alike, made on CPUs so that no device is waited for."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


class Agreement:
    """Between the processes of the default group; a process that is alone agrees with itself."""

    def __init__(self, timeout_seconds: float) -> None:
        """Args: how long to wait for a process that does not answer. Called in all processes."""
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def largest(self, number: int) -> int:
        """The largest number that any process names."""
        if self._group is None:
            return number
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return int(numbers)

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(self.largest(int(flag)))

    def same(self, number: int) -> bool:
        """Whether all processes name the same number."""
        return self.largest(number) == -self.largest(-number)


_SIGNS = ("gloo", "NCCL", "pair closure", "closed by peer", "reset by peer", "Broken pipe")


def is_lost_process(error: RuntimeError) -> bool:
    """Whether a collective operation failed because another process ended or did not answer."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)
