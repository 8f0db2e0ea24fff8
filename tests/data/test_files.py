"""Files in: every compression, every format, and each complaint names its file and line."""

import bz2
import gzip
import lzma

import pytest
import zstandard

from blockdiff.data.files import byte_chunks, expand_files, format_of, scan, stem_of, text_chunks

TEXT = "Zwölf Boxkämpfer\r\njagen 🦊\n\nund\tmehr\n" * 3000
COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.fixture
def write(tmp_path):
    def write_file(name, data):
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return write_file


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_every_compression_gives_the_same_text_and_hash(write, suffix):
    data = TEXT.encode()
    plain = write("book.txt", data)
    # Two streams one after the other are one file, as `cat a.gz b.gz` makes.
    pack = COMPRESS.get(suffix, bytes)
    path = write(f"copy.txt{suffix}", pack(data[:1001]) + pack(data[1001:]))
    read = []
    facts = scan(path, read.append)
    assert "".join(text_chunks(path)) == TEXT
    assert facts.sha256 == scan(plain).sha256
    assert facts.text_bytes == len(data)
    assert sum(read) == facts.bytes == path.stat().st_size


@pytest.mark.parametrize("suffix", COMPRESS)
def test_cut_off_and_foreign_compressed_files_are_named(write, suffix):
    packed = COMPRESS[suffix](TEXT.encode())
    for data in (packed[: len(packed) // 2], packed[:-3], TEXT.encode()):
        path = write(f"broken.txt{suffix}", data)
        with pytest.raises(ValueError, match=rf"broken\.txt\{suffix}.*{suffix[1:]}"):
            list(byte_chunks(path))


@pytest.mark.parametrize("lines_before", [0, 2, 40_000])
def test_invalid_utf8_names_file_and_line(write, lines_before):
    path = write("latin.txt", b"a line of text\n" * lines_before + b"caf\xe9 noir\nmore\n")
    with pytest.raises(ValueError, match=rf"latin\.txt, line {lines_before + 1}: not UTF-8 \(byte 0xe9"):
        scan(path)


def test_unfinished_character_at_the_end_of_a_file(write):
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        scan(write("cut.txt", b"first\nsecond \xf0\x9f"))


def test_binary_file_names_line(write):
    with pytest.raises(ValueError, match=r"image\.txt, line 3: a NUL byte"):
        scan(write("image.txt", b"one\ntwo\nthr\x00ee\n"))


@pytest.mark.parametrize("name", ["none.txt", "none.jsonl", "none.parquet", "none.csv"])
def test_empty_file(write, name):
    with pytest.raises(ValueError, match=f"{name}: the file is empty"):
        scan(write(name, b""))


def test_blank_file_is_empty(write):
    with pytest.raises(ValueError, match="the file is empty"):
        scan(write("blank.txt", b" \n\t\n"))


def test_byte_order_mark_is_not_text(write):
    assert "".join(text_chunks(write("bom.txt", b"\xef\xbb\xbfhello"))) == "hello"


def test_files_given_as_string_list_or_pattern(write, tmp_path):
    a, b = write("a.txt", "a"), write("b.txt.gz", b"")
    (tmp_path / "deep").mkdir()
    c = write("deep/c.jsonl", "c")
    assert expand_files(str(a)) == [a]
    assert expand_files([str(b), str(a)]) == [b, a]
    assert expand_files(f"{tmp_path}/*") == [a, b]  # not the directory
    assert expand_files([str(a), f"{tmp_path}/**/*.*"]) == [a, b, c]


def test_a_name_with_brackets_is_not_a_pattern(write):
    assert expand_files(str(write("part[1].txt", "a"))) == [write("part[1].txt", "a")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "data.files is empty"),
        ("", "data.files is empty"),
        (["missing.txt"], r"data\.files=missing\.txt: no such file"),
        (["*.nothing"], r"data\.files=\*\.nothing: no such file"),
    ],
)
def test_no_files(files, message):
    with pytest.raises(ValueError, match=message):
        expand_files(files)


def test_directory_and_unknown_format(write, tmp_path):
    with pytest.raises(ValueError, match=r"is a directory: .*\*\*/\*\.txt"):
        expand_files(str(tmp_path))
    with pytest.raises(ValueError, match=r"song\.mp3: unknown file format; known are \.txt"):
        expand_files(str(write("song.mp3", "x")))
    with pytest.raises(ValueError, match="Parquet is compressed inside"):
        expand_files(str(write("a.parquet.gz", "x")))


def test_names(tmp_path):
    assert stem_of(tmp_path / "kjv.txt.xz") == "kjv"
    assert stem_of(tmp_path / "v1.2.jsonl") == "v1.2"
    assert format_of(tmp_path / "A.TXT.XZ") == ".txt"
