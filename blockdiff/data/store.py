"""Token shards: one flat file of ids a split, memory-mapped, with the places where documents begin."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class ShardFacts:
    """What the manifest says of one split; ``bytes`` are those of the documents' UTF-8 text."""

    documents: int
    tokens: int
    bytes: int
    dtype: str
    sha256: str


def shard_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type that holds all token ids."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class ShardWriter:
    """Appends documents to ``<split>.bin``; `close` writes ``<split>.offsets.npy``.

    Attributes:
        counts_V: how often each token has been written, int64.
    """

    def __init__(self, directory: Path, split: str, vocab_size: int):
        self.counts_V = np.zeros(vocab_size, dtype=np.int64)
        self._path = directory / f"{split}.bin"
        self._offsets_path = directory / f"{split}.offsets.npy"
        self._file = self._path.open("wb")
        self._dtype = shard_dtype(vocab_size)
        self._hash = hashlib.sha256()
        self._offsets = array("q", [0])
        self._tokens = 0
        self._bytes = 0

    def append(self, ids: Sequence[Sequence[int]], ends: Sequence[bool], text_bytes: int) -> None:
        """Adds pieces of documents.

        Args:
            ids: token ids of each piece.
            ends: whether the piece completes its document.
            text_bytes: UTF-8 bytes of all these pieces' text.
        """
        places = self._tokens + np.cumsum([len(piece) for piece in ids], dtype=np.int64)
        tokens = np.fromiter(chain.from_iterable(ids), dtype=self._dtype, count=sum(map(len, ids)))
        data = tokens.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._offsets.frombytes(places[np.asarray(ends, dtype=bool)].tobytes())
        self.counts_V += np.bincount(tokens, minlength=len(self.counts_V))
        self._tokens += len(tokens)
        self._bytes += text_bytes

    def close(self) -> ShardFacts:
        """Completes both files."""
        self._file.close()
        np.save(self._offsets_path, np.frombuffer(self._offsets, dtype=np.int64))
        return ShardFacts(
            documents=len(self._offsets) - 1,
            tokens=self._tokens,
            bytes=self._bytes,
            dtype=self._dtype.name,
            sha256=self._hash.hexdigest(),
        )


class TokenStore:
    """One split of a prepared corpus, read-only.

    Attributes:
        tokens: all documents end to end, without end-of-document tokens; memory-mapped.
        offsets: int64 (documents + 1); document d is ``tokens[offsets[d]:offsets[d + 1]]``.
        facts: counts of documents, tokens and bytes.
    """

    def __init__(self, directory: Path, split: str, facts: ShardFacts, verify: bool = False):
        """Maps the files.

        Raises:
            ValueError: a file is missing, or does not have the size (with ``verify``: the hash) that the
            manifest says.
        """
        self.path = directory / f"{split}.bin"
        self.facts = facts
        dtype = np.dtype(facts.dtype)
        self._check_size(facts.tokens * dtype.itemsize)
        if verify:
            self._check_hash()
        self.offsets: NDArray[np.int64] = self._read_offsets(directory / f"{split}.offsets.npy")
        self.tokens: NDArray[Any] = (
            np.memmap(self.path, dtype=dtype, mode="r") if facts.tokens else np.zeros(0, dtype=dtype)
        )

    def document(self, index: int) -> NDArray[Any]:
        """Token ids of one document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker process maps the file itself instead of being sent the tokens."""
        return TokenStore, (self.path.parent, self.path.stem, self.facts)

    def _check_size(self, expected: int) -> None:
        if not self.path.exists():
            raise damaged(self.path, "is missing")
        if (size := self.path.stat().st_size) != expected:
            raise damaged(self.path, f"has {size:,} bytes instead of {expected:,}")

    def _check_hash(self) -> None:
        with self.path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.facts.sha256:
                raise damaged(self.path, "does not have the content that was prepared")

    def _read_offsets(self, path: Path) -> NDArray[np.int64]:
        try:
            offsets = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise damaged(path, f"cannot be read ({error})") from error
        fits = offsets.dtype == np.int64 and offsets.shape == (self.facts.documents + 1,)
        if not fits or offsets[0] != 0 or offsets[-1] != self.facts.tokens:
            raise damaged(path, "does not fit the manifest")
        return offsets


def damaged(path: Path, what: str) -> ValueError:
    """The error for a file of a prepared corpus that is not what it should be."""
    return ValueError(f"prepared corpus: {path} {what}; delete the directory {path.parent} and prepare again")
