"""Requests to stop, heard at once and obeyed at the next step border.

SIGTERM and SIGUSR1 (what SLURM sends before it takes a machine away) and Ctrl-C save a checkpoint and end the
run. The process's exit code is then 128 + the number of the signal: 143, 138 and 130.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

from blockdiff.training.agreement import Agreement

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """The signal that asked this process to stop, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Takes the signals over from whoever has them, until `restore`. For the main thread."""
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._hear)

    def agree(self, agreement: Agreement) -> None:
        """A signal to any process of the run is one to all of them."""
        number = agreement.largest(self.signal or 0)
        self.signal = signal.Signals(number) if number else None

    def restore(self) -> None:
        """Gives the signals back."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _hear(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal is signal.SIGINT:
            self.restore()
            raise KeyboardInterrupt
        again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
        self.signal = signal.Signals(number)
        print(
            f"\n{self.signal.name}: saving a checkpoint at the next step border{again}",
            file=sys.stderr,
            flush=True,
        )
