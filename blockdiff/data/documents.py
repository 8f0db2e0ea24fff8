"""From text to documents, from documents to splits, and from long documents to pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import NamedTuple

_PIECE = 1 << 17  # characters: enough for a tokenizer to work on, small enough to hold many


class Split(Enum):
    """Which part of a corpus a document belongs to."""

    train = "train"
    val = "val"


class Document(Enum):
    """What one document is; ``auto`` is ``file`` for plain text and ``row`` for tables."""

    auto = "auto"
    file = "file"
    line = "line"
    paragraph = "paragraph"
    row = "row"


class Piece(NamedTuple):
    """A stretch of one document; ``ends`` marks the document's last."""

    split: Split
    text: str
    ends: bool


def digest(text: str) -> bytes:
    """SHA-256 of the text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def split_by_digest(key: bytes, val_fraction: float) -> Split:
    """Sends a share of ``val_fraction`` of all keys to validation.

    A function of the key alone, not of order or machine. Equal documents have equal keys, so that a
    document and its copy never lie on two sides.
    """
    return Split.val if int.from_bytes(key[:8], "big") < val_fraction * 2.0**64 else Split.train


def lines_in(chunks: Iterable[str]) -> Iterator[str]:
    """The lines of a text that comes in chunks, without their ends (LF or CRLF); blank ones too."""
    parts: list[str] = []
    for chunk in chunks:
        first, *others = chunk.split("\n")
        parts.append(first)
        for line in others:
            yield "".join(parts).removesuffix("\r")
            parts = [line]
    if last := "".join(parts):
        yield last.removesuffix("\r")


def paragraphs_in(chunks: Iterable[str]) -> Iterator[str]:
    """Runs of lines between blank lines, joined by LF."""
    lines: list[str] = []
    for line in lines_in(chunks):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def documents_in(chunks: Iterable[str], kind: Document) -> Iterator[str]:
    """The documents of one text, blank ones left out; ``file`` and ``row`` take the whole text as one."""
    match kind:
        case Document.line:
            yield from (line for line in lines_in(chunks) if line.strip())
        case Document.paragraph:
            yield from paragraphs_in(chunks)
        case _:
            text = "".join(chunks)
            if text.strip():
                yield text


def pieces_in(chunks: Iterable[str], size: int = _PIECE) -> Iterator[str]:
    """Cuts a text that comes in chunks into pieces of at most ``size`` characters, in front of white space.

    A byte-level tokenizer's words start with their white space, so it gives the pieces the tokens that it
    gives the whole text. Only where half a piece has no white space at all does a cut fall inside a word.
    """
    rest, start = "", 0
    for chunk in chunks:
        rest, start = rest[start:] + chunk, 0
        while len(rest) - start > size:
            cut = _cut(rest, start + size // 2, start + size)
            yield rest[start:cut]
            start = cut
    if rest[start:]:
        yield rest[start:]


def _cut(text: str, low: int, high: int) -> int:
    for mark in "\n ":
        cut = text.rfind(mark, low, high)
        while cut > low and text[cut - 1].isspace():
            cut -= 1
        if cut > low:
            return cut
    return high


def marked_pieces(split: Split, chunks: Iterable[str]) -> Iterator[Piece]:
    """The pieces of one document, the last one marked; a document without text gives none."""
    previous: str | None = None
    for text in pieces_in(chunks):
        if previous is not None:
            yield Piece(split, previous, ends=False)
        previous = text
    if previous is not None:
        yield Piece(split, previous, ends=True)


def stretch(chunks: Iterable[str], start: int, stop: int | None = None) -> Iterator[str]:
    """Characters ``start`` to ``stop`` (None: the end) of a text that comes in chunks."""
    position = 0
    for chunk in chunks:
        if stop is not None and position >= stop:
            return
        part = chunk[max(start - position, 0) : None if stop is None else stop - position]
        position += len(chunk)
        if part:
            yield part


def place_of_cut(chunks: Iterable[str], length: int, val_fraction: float) -> int:
    """Where to cut a text of ``length`` characters: about its last ``val_fraction`` is for validation.

    Behind the first line end past that point; where that would leave validation less than half of its share
    (a text of few long lines), behind the first space; where there is no space either, at the point itself.
    """
    target = min(max(int(length * (1 - val_fraction)), 1), length - 1)
    limit = target + (length - target) // 2
    position, space = 0, None
    for chunk in chunks:
        start = max(target - position, 0)
        end_of_line = chunk.find("\n", start) if start < len(chunk) else -1
        if end_of_line >= 0 and position + end_of_line + 1 <= limit:
            return position + end_of_line + 1
        if space is None and start < len(chunk) and (found := chunk.find(" ", start)) >= 0:
            space = position + found + 1
        position += len(chunk)
        if position > limit:
            break
    return space if space is not None and space <= limit else target


def cut_document(
    chunks: Callable[[], Iterator[str]], val_fraction: float
) -> Iterator[tuple[Split, Iterator[str]]]:
    """Splits one text itself, at `place_of_cut`: its head is a training document, its tail a validation one.

    Args:
        chunks: starts a new reading of the text.
    """
    length = sum(len(chunk) for chunk in chunks())
    if length < 2:
        raise ValueError("one character of text cannot be split into train and validation: give more text")
    cut = place_of_cut(chunks(), length, val_fraction)
    yield Split.train, stretch(chunks(), 0, cut)
    yield Split.val, stretch(chunks(), cut)
