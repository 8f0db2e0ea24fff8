"""One process group at a time in a run directory.

The lock is an advisory lock of the operating system on `run.lock`, which vanishes with the process however it
ends, so after a kill the same machine can go on at once. File systems shared between machines may not pass
such locks on: there the file's time of change is the owner's heartbeat.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from blockdiff.training.durable import refused

NAME = "run.lock"


class RunLockedError(ValueError):
    """Another live process works in the run directory."""


class RunLock:
    """Held from `with` to its end by the first process of a run."""

    def __init__(self, directory: Path, *, beat_seconds: float = 10.0, patience: float = 3.5) -> None:
        """Args: the run directory; the time between heartbeats, and how many of them to wait for a foreign one."""
        self.path = directory / NAME
        self._beat_seconds, self._patience = beat_seconds, patience
        self._stop = threading.Event()
        self._file: Any = None

    def __enter__(self) -> Self:
        """Makes the directory if need be, and takes the lock.

        Raises:
            RunLockedError: a live process on this or another machine holds it.
            ValueError: the directory cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)
        except OSError as error:
            raise refused(self.path.parent, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._wait_for_heartbeat()
            self._sign()
        except BlockingIOError:
            self._refuse()
        except OSError as error:
            self._file.close()
            raise refused(self.path.parent, error) from error
        except BaseException:
            self._file.close()
            raise
        # Workers of a data loader must not hold the lock of a process that was killed.
        os.register_at_fork(after_in_child=self._file.close)
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the lock back. The file stays: removing it would let two processes lock two files of one name."""
        self._stop.set()
        self._file.truncate(0)
        self._file.close()

    def _sign(self) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": _now()}
        self._file.truncate(0)
        self._file.write(json.dumps(owner).encode() + b"\n")

    def _beat(self) -> None:
        while not self._stop.wait(self._beat_seconds):
            try:
                os.utime(self.path)
            except OSError:  # a failing disk shows itself where it matters: when a checkpoint is written
                continue

    def _wait_for_heartbeat(self) -> None:
        """An owner on another machine that does not lock our file: alive if its file changes while we watch."""
        owner = self._owner()
        if not owner or owner.get("host") == socket.gethostname():
            return
        seen = os.stat(self.path).st_mtime_ns
        deadline = time.monotonic() + self._patience * self._beat_seconds
        while time.monotonic() < deadline:
            time.sleep(self._beat_seconds / 10)
            if os.stat(self.path).st_mtime_ns != seen:
                self._refuse()

    def _owner(self) -> dict[str, Any]:
        self._file.seek(0)
        try:
            owner = json.loads(self._file.read())
        except ValueError:  # empty: given back in good order
            return {}
        return owner if isinstance(owner, dict) else {}

    def _refuse(self) -> None:
        owner = self._owner()
        self._file.close()
        raise RunLockedError(
            f"{self.path.parent} is in use by process {owner.get('pid', '?')} on {owner.get('host', '?')}, started "
            f"{owner.get('started', '?')}: stop it, wait for it, or choose another name=..."
        )


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Lets the processes that meet at a directory through one by one; all at once where it cannot be locked."""
    with ExitStack() as stack:
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(directory / ".turn", "a", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
