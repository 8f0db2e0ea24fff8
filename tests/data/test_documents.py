"""From text to documents, pieces and splits."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockdiff.data.documents import (
    Document,
    Split,
    cut_document,
    digest,
    documents_in,
    marked_pieces,
    pieces_in,
    place_of_cut,
    split_by_digest,
    stretch,
)
from blockdiff.data.tokenizer import train_bpe

texts = st.text(alphabet=st.sampled_from("ab'.9é \n\t\r\u00a0\u2028"), max_size=60)


def chunked(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


@given(text=texts, size=st.integers(1, 9))
def test_lines_and_paragraphs_do_not_depend_on_chunks(text, size):
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    assert list(documents_in(chunked(text, size), Document.line)) == [line for line in lines if line.strip()]
    paragraphs = re.split(r"(?:^|\n)\s*(?=\n|$)", "\n".join("" if not li.strip() else li for li in lines))
    paragraphs = [p.strip("\n") for p in paragraphs]
    assert list(documents_in(chunked(text, size), Document.paragraph)) == [p for p in paragraphs if p.strip()]


@given(text=texts, chunk=st.integers(1, 9), size=st.integers(2, 12))
def test_pieces_add_up_and_are_small(text, chunk, size):
    pieces = list(pieces_in(chunked(text, chunk), size))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)
    marked = list(marked_pieces(Split.val, chunked(text, chunk)))
    assert [piece.ends for piece in marked] == [False] * (len(marked) - 1) + [True] * bool(marked)


def test_pieces_of_a_text_have_the_tokens_of_the_whole():
    words = "It's  the year 1999...\n\n  and we'll\tsing,\n na\u00efve \u00a0 caf\u00e9s! x = {1: 'a'}\r\n"
    text = words * 40
    tokenizer = train_bpe([text], 400)
    for size in range(40, 200):
        pieces = list(pieces_in([text], size))
        assert len(pieces) > 5
        assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)


@given(text=texts, chunk=st.integers(1, 7), start=st.integers(0, 70), stop=st.none() | st.integers(0, 70))
def test_stretch_is_a_slice(text, chunk, start, stop):
    assert "".join(stretch(chunked(text, chunk), start, stop)) == text[start:stop]


@given(text=texts.filter(lambda text: len(text) > 1), chunk=st.integers(1, 9), fraction=st.floats(0.01, 0.99))
def test_a_cut_leaves_text_on_both_sides(text, chunk, fraction):
    head, tail = cut_document(lambda: iter(chunked(text, chunk)), fraction)
    assert (head[0], tail[0]) == (Split.train, Split.val)
    head, tail = "".join(head[1]), "".join(tail[1])
    assert head
    assert tail
    assert head + tail == text


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("aaaa\nbbbb\ncccc\ndd\ndd\n", "aaaa\nbbbb\ncccc\n"),  # the line end behind the point
        ("aaaa bbbb cccc dddd ee\n", "aaaa bbbb cccc "),  # the only line end leaves nothing
        ("aaaabbbbccccddddeeee", "aaaabbbbcccc"),
    ],
)
def test_place_of_cut(text, head):
    for chunk in (1, 3, 100):
        assert text[: place_of_cut(chunked(text, chunk), len(text), 0.4)] == head


def test_one_character_cannot_be_split():
    with pytest.raises(ValueError, match="give more text"):
        list(cut_document(lambda: iter(["a"]), 0.5))


def test_split_by_digest_hits_its_share_and_is_fixed():
    splits = [split_by_digest(digest(f"document {i}"), 0.1) for i in range(20_000)]
    share = splits.count(Split.val) / len(splits)
    assert abs(share - 0.1) < 4 * (0.1 * 0.9 / 20_000) ** 0.5
    # A change of the rule would silently move documents between the splits of corpora in use.
    assert [i for i, split in enumerate(splits[:40]) if split is Split.val] == [21, 22]
