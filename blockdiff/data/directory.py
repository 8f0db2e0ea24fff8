"""Directories that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_UNFINISHED = ".preparing-"


@contextmanager
def appearing(directory: Path) -> Iterator[Path]:
    """Yields a temporary directory that becomes ``directory`` if all goes well, and vanishes otherwise.

    The files are forced to the disk before the rename. Where another process was faster its directory stays.

    Raises:
        ValueError: the disk is full, or the parent directory cannot be written.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _sweep(directory.parent)
        prefix = f"{_UNFINISHED}{socket.gethostname()}-{os.getpid()}-"
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    except OSError as error:
        raise ValueError(f"data.root={directory.parent} cannot be written ({error.strerror})") from error
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's directories are private
        _force_to_disk([*temporary.iterdir(), temporary])
        try:
            temporary.rename(directory)
        except OSError:
            if not directory.exists():
                raise
        _force_to_disk([directory.parent])
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(directory.parent).free
        raise ValueError(
            f"the disk is full: {directory} could not be written ({free:,} bytes are free now that the "
            "unfinished files are removed); free some space or set data.root to another disk"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _force_to_disk(paths: Iterable[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sweep(root: Path) -> None:
    """Removes what killed processes of this machine left behind."""
    prefix = f"{_UNFINISHED}{socket.gethostname()}-"
    for path in root.glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix).split("-")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, OSError):
            continue
