"""The run's table of metrics: one row a logging or validation step, exact across kills.

Rows are appended; on a resume everything behind the resumed step is cut off, for those steps are taken again.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from blockdiff.training.durable import write_text_durably

NAME = "metrics.csv"
COLUMNS = ("step", "train/nelbo", "val/nelbo", "val/nelbo_se", "val/bits_per_byte", "lr", "tokens_per_second", "mfu")
CLOCKED = ("tokens_per_second", "mfu")
"""What a clock measures: all other columns are the same in a run that was killed and one that was not."""
LOSS_COLUMN = "train/loss"
"""Takes the place of train/nelbo where the training loss is no bound (clipped noise)."""

Row = Mapping[str, float]


class MetricsTable:
    """Appends rows to `metrics.csv`."""

    def __init__(self, directory: Path, *, is_bound: bool, start_step: int) -> None:
        """Opens the table and cuts off rows behind `start_step`, and a last line that a kill cut short.

        Args:
            directory: of the run.
            is_bound: whether the training loss is a bound; otherwise it has the column train/loss.
            start_step: finished steps that the run goes on from.
        """
        self.path = directory / NAME
        self.columns = COLUMNS if is_bound else (*COLUMNS, LOSS_COLUMN)
        self.train_column = COLUMNS[1] if is_bound else LOSS_COLUMN
        kept = [row for row in read_rows(directory) if row["step"] <= start_step]
        text = ",".join(self.columns) + "\n" + self._lines(kept)
        if not self.path.exists() or self.path.read_text(encoding="utf-8") != text:
            write_text_durably(self.path, text)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self._unwritten = b""

    def append(self, row: Row) -> None:
        """Adds a row; columns that it lacks stay empty. What a full disk does not take is kept for later."""
        self._unwritten += self._lines([row]).encode()
        with suppress(OSError):
            self._write()

    def force(self) -> None:
        """Forces all rows to the disk: a checkpoint must not outlive the rows before it.

        Raises:
            OSError: the disk does not take them.
        """
        self._write()
        os.fsync(self._file.fileno())

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Ends the table."""
        self._file.close()

    def _lines(self, rows: Sequence[Row]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, lineterminator="\n").writerows(map(_cells, rows))
        return text.getvalue()


def read_rows(directory: Path) -> list[dict[str, float]]:
    """The whole rows of a run's table, without empty cells; none where there is no table."""
    path = directory / NAME
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    try:
        return [_numbers(row) for row in csv.DictReader(whole)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of metrics ({error}); move it away, the run writes a new one") from None


def _cells(row: Row) -> dict[str, float]:
    return {name: int(value) if name == "step" else float(value) for name, value in row.items()}


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    return _cells({name: float(cell) for name, cell in row.items() if cell} | {"step": int(row["step"])})
