"""The text column of JSON, CSV and Parquet files, one row at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from blockdiff.data.files import ROW_FORMATS, format_of

_ROWS = 1000


def row_texts(path: Path, column: str) -> Iterator[str]:
    """The texts of a file's rows, streamed; rows without text are left out.

    Raises:
        ValueError: the file cannot be parsed, or lacks the column.
    """
    from datasets import load_dataset  # takes 1.5 s to import, and most runs read plain text

    try:
        rows = load_dataset(ROW_FORMATS[format_of(path)], data_files=str(path), split="train", streaming=True)
        yield from column_texts(rows.iter(_ROWS), column, str(path))
    except ValueError:
        raise
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
