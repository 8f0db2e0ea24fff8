"""Files that appear whole or not at all, and survive a loss of power once they are there."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".writing-"
"""Prefix of names under construction: whatever bears it may be removed by the owner of the run."""


class HashingFile:
    """A file that hashes and counts what is written to it, so that nothing is read back."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self.size = file, hashlib.sha256(), 0
        self.failure: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends; returns the number of bytes."""
        self._hash.update(data)
        try:
            self._file.write(data)
        except OSError as error:  # remembered for callers between us and whom the reason gets lost
            self.failure = error
            raise
        count = memoryview(data).nbytes
        self.size += count
        return count

    def flush(self) -> None:
        """Hands the bytes to the operating system."""
        self._file.flush()

    @property
    def sha256(self) -> str:
        """Of all bytes so far."""
        return self._hash.hexdigest()


def write_durably(path: Path, write: Callable[[HashingFile], None]) -> HashingFile:
    """Lets `write` fill a temporary file, forces it to the disk and renames it to `path`.

    Returns:
        The closed file: its size and hash.

    Raises:
        OSError: the disk is full or fails; `path` is as it was before and the temporary file is gone.
    """
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        with open(temporary, "wb") as file:
            hashing = HashingFile(file)
            write(hashing)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    force_directory(path.parent)
    return hashing


def write_text_durably(path: Path, text: str) -> None:
    """`write_durably` of UTF-8 text."""

    def write(file: HashingFile) -> None:
        file.write(text.encode())

    write_durably(path, write)


def force_directory(directory: Path) -> None:
    """Forces the names in a directory to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refused(directory: Path, error: OSError) -> ValueError:
    """For users: a run directory that cannot be written, and the remedy."""
    exists = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    return ValueError(
        f"{directory} cannot be written ({error.strerror or error}; {shutil.disk_usage(exists).free:,} bytes are free "
        "there): free some space, or set run_root to another directory"
    )


def describe_file(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, read back."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
