"""The table of metrics: rows survive, rows behind a resumed step do not, files are the same byte for byte."""

from pathlib import Path

import pytest

from blockdiff.training.metrics import COLUMNS, MetricsTable, read_rows

ROWS = [
    {"step": 1, "train/nelbo": 5.25, "lr": 1e-05, "tokens_per_second": 10.0},
    {"step": 2, "train/nelbo": 1 / 3, "val/nelbo": 3.0, "val/nelbo_se": 0.0, "lr": 0.1, "tokens_per_second": 7.5},
    {"step": 3, "train/nelbo": 4.0, "lr": 0.2, "tokens_per_second": 1e6},
]


def write(directory: Path, start_step: int, rows: list[dict[str, float]]) -> bytes:
    table = MetricsTable(directory, is_bound=True, start_step=start_step)
    for row in rows:
        table.append(row)
    table.force()
    table.close()
    return table.path.read_bytes()


def test_header_and_cells(tmp_path: Path) -> None:
    text = write(tmp_path, 0, ROWS).decode()
    header = "step,train/nelbo,val/nelbo,val/nelbo_se,val/bits_per_byte,lr,tokens_per_second,mfu"
    assert text.splitlines()[0] == header
    assert text.splitlines()[2] == "2,0.3333333333333333,3.0,0.0,,0.1,7.5,"
    assert read_rows(tmp_path) == ROWS


@pytest.mark.parametrize("tail", ["", "4,2.0", "4,2.0,,,,0.3,1.0\n5,"])
def test_resume_rewrites_to_the_same_bytes(tmp_path: Path, tail: str) -> None:
    whole = write(tmp_path, 0, ROWS)
    with open(tmp_path / "metrics.csv", "a", encoding="utf-8") as file:
        file.write(tail)
    assert write(tmp_path, 2, ROWS[2:]) == whole


def test_a_new_run_in_an_old_directory_starts_empty(tmp_path: Path) -> None:
    write(tmp_path, 0, ROWS)
    write(tmp_path, 0, [])
    assert read_rows(tmp_path) == []


def test_clipped_noise_has_a_loss_and_no_bound(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path, is_bound=False, start_step=0)
    table.append({"step": 1, table.train_column: 2.0})
    table.close()
    assert read_rows(tmp_path) == [{"step": 1, "train/loss": 2.0}]
    assert tuple(table.path.read_text(encoding="utf-8").splitlines()[0].split(",")) == (*COLUMNS, "train/loss")


def test_a_foreign_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/nelbo\none,two\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.csv is no table of metrics"):
        MetricsTable(tmp_path, is_bound=True, start_step=0)


def test_no_table_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path) == []
