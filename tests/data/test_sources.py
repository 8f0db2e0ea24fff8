"""Sources: which documents a corpus has, and on which side of the split each one lies."""

import csv
import gzip
import json
import lzma
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from blockdiff.data.documents import Document, Split
from blockdiff.data.config import DataConfig
from blockdiff.data.config import Source
from blockdiff.data.sources import open_corpus

STORIES = [f"Story {i}: the {'very ' * (i % 5)}grey cat,\nnumber {i * i}." for i in range(60)]


def split_texts(corpus):
    """Documents of each split, put together from their pieces."""
    texts = {split: [""] for split in Split}
    for piece in corpus.pieces():
        texts[piece.split][-1] += piece.text
        if piece.ends:
            texts[piece.split].append("")
    assert all(documents.pop() == "" for documents in texts.values())
    return texts


def text_config(files, **options):
    return DataConfig(source=Source.text, files=files, **options)


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write_file


@pytest.fixture(scope="module")
def library():
    return open_corpus(DataConfig())


def test_library_holds_real_code_and_no_tests(library):
    names = [fact.path for fact in library.files]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    parts = {part for name in names for part in Path(name).parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"}
    assert names == sorted(names, key=lambda name: Path(name).parts)
    texts = split_texts(library)
    argparse = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
    assert argparse in texts[Split.train] + texts[Split.val]


def test_library_split_hangs_on_the_path_alone(library):
    share = len(split_texts(library)[Split.val]) / len(library.files)
    assert 0.02 < share < 0.09
    whole = dict(zip(names(library), sides(library), strict=True))
    part = open_corpus(DataConfig(max_documents=100))
    assert all(whole[path] is split for path, split in zip(names(part)[:100], sides(part), strict=True))


def names(corpus):
    return [fact.path for fact in corpus.files]


def sides(corpus):
    return [split for split, _ in corpus.documents()]


def write_rows(tmp_path, name):
    path = tmp_path / name
    rows = [{"id": i, "text": story} for i, story in enumerate(STORIES)]
    jsonl = "".join(json.dumps(row) + "\n" for row in rows)
    if name.endswith(".csv"):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["id", "text"], *([row["id"], row["text"]] for row in rows)])
    elif name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        pack = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress}
        path.write_bytes(pack.get(name.rsplit(".", 1)[1], bytes)(jsonl.encode()))
    return str(path)


@pytest.mark.parametrize(
    "name", ["a[1].csv", "a.parquet", "a.json", "a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst"]
)
def test_rows_of_every_format_are_the_same_documents(tmp_path, name):
    texts = split_texts(open_corpus(text_config(write_rows(tmp_path, name), val_fraction=0.2)))
    assert sorted(texts[Split.train] + texts[Split.val]) == sorted(STORIES)
    assert len(texts[Split.val]) == 13  # the hash of the content decides, so that every format agrees


@pytest.mark.parametrize(
    ("document", "count"),
    [(Document.row, 60), (Document.line, 120), (Document.paragraph, 60), (Document.file, 2)],
)
def test_documents_of_rows(tmp_path, document, count):
    corpus = open_corpus(text_config(write_rows(tmp_path, "a.jsonl"), document=document, val_fraction=0.2))
    texts = split_texts(corpus)
    assert len(texts[Split.train]) + len(texts[Split.val]) == count
    if document is Document.file:
        assert texts[Split.train][0] + texts[Split.val][0] == "".join(story + "\n" for story in STORIES)


def test_one_text_is_cut_at_a_line(write):
    text = "".join(f"line {i} of the book\n" for i in range(5000))
    corpus = open_corpus(text_config(write("book.txt", text)))
    texts = split_texts(corpus)
    ((head,), (tail,)) = texts[Split.train], texts[Split.val]
    assert head + tail == text
    assert head.endswith("\n")
    assert len(tail) / len(text) == pytest.approx(0.05, abs=0.001)
    assert "cut at a line end" in corpus.split_rule
    assert corpus.name == "book"


def test_texts_of_many_files_are_split_by_content(write):
    files = [write(f"{i}.txt", f"text number {i}\n" * 3) for i in range(40)]
    files += [write(f"copy-{i}.txt.gz", gzip.compress(f"text number {i}\n".encode() * 3)) for i in range(40)]
    texts = split_texts(open_corpus(text_config(files, val_fraction=0.2)))
    assert not set(texts[Split.train]) & set(texts[Split.val])
    assert len(texts[Split.train]) + len(texts[Split.val]) == 80
    again = split_texts(open_corpus(text_config(files[::-1], val_fraction=0.2)))
    assert {split: set(t) for split, t in again.items()} == {split: set(t) for split, t in texts.items()}


def test_equal_lines_lie_on_one_side(write):
    lines = "".join(f"verse {i % 50}\n\n" for i in range(400))
    texts = split_texts(
        open_corpus(text_config(write("song.txt", lines), document=Document.line, val_fraction=0.3))
    )
    assert not set(texts[Split.train]) & set(texts[Split.val])
    assert len(texts[Split.train]) + len(texts[Split.val]) == 400


def test_long_documents_come_in_pieces(write):
    text = "word " * 200_000
    corpus = open_corpus(text_config(write("long.txt", text)))
    pieces = list(corpus.pieces())
    assert max(len(piece.text) for piece in pieces) < 200_000
    assert sum(piece.ends for piece in pieces) == 2


def test_max_documents(write):
    lines = "".join(f"line {i}\n" for i in range(100))
    corpus = open_corpus(text_config(write("a.txt", lines), document=Document.line, max_documents=30))
    assert len(list(corpus.documents())) == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 0}, r"data\.val_fraction=0 must lie between 0 and 1"),
        ({"val_fraction": 1.0}, r"data\.val_fraction=1\.0"),
        ({"max_documents": 1}, r"data\.max_documents=1 must be at least 2"),
        ({"document": Document.row}, r"data\.document=row: .*a\.txt has no rows"),
    ],
)
def test_bad_settings(write, options, message):
    with pytest.raises(ValueError, match=message):
        open_corpus(text_config(write("a.txt", "some text\n"), **options))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', r"a\.jsonl: not valid \.jsonl"),
        (
            "a.jsonl",
            '{"story": "a"}\n',
            r"a\.jsonl has no column 'text'; set data\.text_column to one of: story",
        ),
        ("a.jsonl", '{"text": "a"}\n{"text": null}\n', None),
        (
            "a.jsonl",
            '{"text": 1}\n{"text": 2}\n',
            r"a\.jsonl, row 1: column 'text' holds a value of type int",
        ),
        ("a.csv", "id,body\n1,hello\n", r"a\.csv has no column 'text'; .* one of: id, body"),
        ("a.parquet", "not a table", r"a\.parquet: not valid \.parquet"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"a\.jsonl, line 2: not UTF-8"),
    ],
)
def test_bad_rows_are_named(write, name, content, message):
    config = text_config(write(name, content))
    if message is None:
        assert len(list(open_corpus(config).documents())) == 1
    else:
        with pytest.raises(ValueError, match=message):
            list(open_corpus(config).documents())
