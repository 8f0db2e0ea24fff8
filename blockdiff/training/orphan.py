"""A process that another process of the run has launched ends with it."""

from __future__ import annotations

import os
import sys
import threading
import time

LAUNCHER = "BLOCKDIFF_LAUNCHER"
"""Environment variable: the process id of the launcher, which may be gone before its child can ask for its parent."""


def announce_launcher() -> None:
    """Tells the processes that this one may launch who it is."""
    os.environ[LAUNCHER] = str(os.getpid())


def end_with_launcher(grace_seconds: float = 10.0) -> None:
    """Ends this process soon after the one that announced itself.

    Once they have met, a process notices the death of another by itself; before that it would wait for one that will
    never come, as long as for one that is slow.

    Args:
        grace_seconds: time to end in good order, which is what happens when the run is over.
    """
    launcher = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        time.sleep(grace_seconds)
        print("blockdiff: the process that launched this one has ended", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
