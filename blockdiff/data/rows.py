"""The text column of JSON, CSV and Parquet files, one row at a time."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from blockdiff.data.files import ROW_FORMATS, format_of

_ROWS = 1000


def row_texts(path: Path, column: str) -> Iterator[str]:
    """The texts of a file's rows, streamed; rows without text are left out.

    Raises:
        ValueError: the file cannot be parsed, or lacks the column, or the column holds no text.
    """
    yield from column_texts(_row_batches(path), column, str(path))


def _row_batches(path: Path) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset  # takes 1.5 s to import, and most runs read plain text

    try:
        name = glob.escape(str(path))
        rows = load_dataset(ROW_FORMATS[format_of(path)], data_files=name, split="train", streaming=True)
        yield from rows.iter(_ROWS)
    except Exception as error:  # each reader behind `datasets` has its own kinds of error
        cause = error.__cause__ or error
        raise ValueError(f"{path}: not valid {format_of(path)} ({cause})") from error


def column_texts(batches: Iterable[dict[str, Any]], column: str, origin: str) -> Iterator[str]:
    """The texts of one column of batches of rows; ``origin`` names the source in errors."""
    row = 0
    for batch in batches:
        if column not in batch:
            have = ", ".join(batch)
            raise ValueError(f"{origin} has no column {column!r}; set data.text_column to one of: {have}")
        for text in batch[column]:
            row += 1
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise ValueError(
                    f"{origin}, row {row}: column {column!r} holds a value of type {kind}, not text"
                )
            if text and text.strip():
                yield text
