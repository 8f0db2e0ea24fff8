"""Text files in, plain or compressed: streamed, checked, and blamed by name and line if they are no text."""

from __future__ import annotations

import bz2
import codecs
import glob
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

_READ_BYTES = 1 << 16  # of a compressed file: one read can grow a thousandfold when unpacked

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}
TEXT_FORMATS = (".txt",)
ROW_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class FileFacts:
    """What a manifest says of a source file; ``text_bytes`` and the hash are of the unpacked content."""

    path: str
    bytes: int
    text_bytes: int
    sha256: str


def expand_files(files: Any) -> list[Path]:
    """The paths that ``data.files`` names: one string or a list, globs allowed (``**`` too), each path once.

    Raises:
        ValueError: nothing was given, a pattern matches nothing, a file is missing or its format is not
        known.
    """
    patterns = [files] if isinstance(files, (str, Path)) else list(files or [])
    if not patterns or not all(str(pattern).strip() for pattern in patterns):
        raise ValueError(
            "data.files is empty: data.source=text needs at least one file, e.g. data.files=book.txt"
        )
    paths: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(str(pattern)).expanduser()
        if path.exists():
            found = [path]
        else:
            found = [
                Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()
            ]
        if not found:
            raise ValueError(f"data.files={pattern}: no such file (looked in {Path.cwd()})")
        paths.update(dict.fromkeys(found))
    for path in paths:
        if path.is_dir():
            raise ValueError(
                f"data.files={path} is a directory: name its files, e.g. data.files='{path}/**/*.txt'"
            )
        format_of(path)
    return list(paths)


def format_of(path: Path) -> str:
    """The extension that tells the format, without a compression's: ``.txt`` for ``book.txt.xz``."""
    inner = _uncompressed_name(path)
    suffix = inner.suffix.lower()
    if suffix not in TEXT_FORMATS and suffix not in ROW_FORMATS:
        known, packed = " ".join([*TEXT_FORMATS, *ROW_FORMATS]), " ".join(_DECOMPRESSORS)
        raise ValueError(f"{path}: unknown file format; known are {known}, and with {packed} behind them")
    if suffix == ".parquet" and inner != Path(path.name):
        raise ValueError(f"{path}: Parquet is compressed inside; unpack the file first")
    return suffix


def stem_of(path: Path) -> str:
    """The file's name without the extensions of its format and compression: ``book`` for ``book.txt.xz``."""
    return _uncompressed_name(path).stem


def _uncompressed_name(path: Path) -> Path:
    return Path(path.stem if path.suffix.lower() in _DECOMPRESSORS else path.name)


def byte_chunks(path: Path, advance: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """The uncompressed content in chunks; ``advance`` is told of every byte read from the disk.

    Raises:
        ValueError: the file cannot be read, or its compressed data are damaged or cut off.
    """
    make = _DECOMPRESSORS.get(path.suffix.lower())
    try:
        with path.open("rb") as file:
            raw = _raw_chunks(file, advance or (lambda done: None))
            yield from raw if make is None else _unpacked(raw, make)
    except (lzma.LZMAError, zlib.error, zstandard.ZstdError, EOFError) as error:
        raise ValueError(
            f"{path}: damaged or truncated {path.suffix} data ({error}); fetch the file again"
        ) from error
    except OSError as error:
        kind = f"not valid {path.suffix} data" if error.errno is None else "cannot be read"
        raise ValueError(f"{path}: {kind} ({error.strerror or error})") from error


def _raw_chunks(file: Any, advance: Callable[[int], None]) -> Iterator[bytes]:
    while chunk := file.read(_READ_BYTES):
        advance(len(chunk))
        yield chunk


def _unpacked(chunks: Iterator[bytes], make: Callable[[], Any]) -> Iterator[bytes]:
    """Unpacks concatenated streams, as the command-line tools do; a stream that does not end is an error."""
    decompressor = None
    for chunk in chunks:
        while chunk:
            decompressor = decompressor or make()
            if data := decompressor.decompress(chunk):
                yield data
            chunk = b""
            if decompressor.eof:
                chunk = decompressor.unused_data.lstrip(b"\0")  # padding between streams
                decompressor = None
    if decompressor is not None:
        raise EOFError("the data end too early")


def text_chunks(path: Path, chunks: Iterator[bytes] | None = None) -> Iterator[str]:
    """The text of a UTF-8 file in chunks that never split a character, without a leading BOM.

    Raises:
        ValueError: invalid UTF-8 or a NUL byte, with the line, counted from 1; or as `byte_chunks`.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    for chunk in _with_end(chunks or byte_chunks(path)):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            bad = error.object[error.start]
            raise ValueError(
                f"{path}, line {line}: not UTF-8 (byte 0x{bad:02x}, {error.reason}); "
                "convert the file, e.g. with iconv -f latin1 -t utf-8"
            ) from error
        if "\0" in text:
            line += text[: text.index("\0")].count("\n")
            raise ValueError(
                f"{path}, line {line}: a NUL byte, so this is a binary file or UTF-16, not UTF-8 text"
            )
        line += text.count("\n")
        if text:
            yield text


def _with_end(chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield from chunks
    yield b""


def scan(path: Path, advance: Callable[[int], None] | None = None) -> FileFacts:
    """Reads the whole file once: its size on disk and the hash of its content.

    Raises:
        ValueError: the file is empty or blank, or as `text_chunks`. Of Parquet, only the size is checked.
    """
    digest = hashlib.sha256()
    size = 0

    def hashed() -> Iterator[bytes]:
        nonlocal size
        for chunk in byte_chunks(path, advance):
            digest.update(chunk)
            size += len(chunk)
            yield chunk

    if format_of(path) == ".parquet":
        blank = sum(map(len, hashed())) == 0
    else:
        blank = True
        for text in text_chunks(path, hashed()):
            blank = blank and not text.strip()
    if blank:
        raise ValueError(f"{path}: the file is empty")
    return FileFacts(str(path), path.stat().st_size, size, digest.hexdigest())
