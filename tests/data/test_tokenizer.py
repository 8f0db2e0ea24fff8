"""Tokenizers: exact round trips, an end token that no text can write, and the same result every time."""

import os
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from blockdiff.data.tokenizer import EOS, Tokenizer, byte_tokenizer, train_bpe

SAMPLE = "def add(a, b):\n    return a + b  # Größe 🦊\n" * 5
BYTES = byte_tokenizer()
BPE = train_bpe([SAMPLE], 300)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@given(text=st.text() | st.lists(st.sampled_from([*"\r\n\t \0'é🦊", EOS])).map("".join))
def test_round_trip_is_exact(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == text.encode()
    assert tokenizer.eos_id not in ids
    assert max(ids, default=0) < tokenizer.vocab_size


@given(text=st.text())
def test_byte_ids_are_the_bytes(text):
    assert BYTES.encode(text) == list(text.encode())


def test_vocabularies():
    assert (BYTES.vocab_size, BYTES.eos_id) == (257, 256)
    assert 257 < BPE.vocab_size <= 300
    assert sorted(BPE._inner.get_vocab().values()) == list(range(BPE.vocab_size))
    assert len(BPE.encode(SAMPLE)) < len(SAMPLE) / 2
    assert BPE.decode([*BPE.encode("a"), BPE.eos_id]) == "a"
    assert BPE.encode_batch(["a", "", SAMPLE]) == [BPE.encode("a"), [], BPE.encode(SAMPLE)]


def test_broken_characters_decode_to_the_replacement_character():
    assert BYTES.decode([0x61, 0xF0, 0x9F]) == "a\ufffd"
    assert BYTES.decode_bytes([0xF0, 0x9F]) == b"\xf0\x9f"


def test_save_and_load(tmp_path):
    path = tmp_path / "tokenizer.json"
    for tokenizer in (BYTES, BPE):
        tokenizer.save(path)
        loaded = Tokenizer.load(path)
        assert loaded.sha256 == tokenizer.sha256
        assert loaded.encode(SAMPLE + EOS) == tokenizer.encode(SAMPLE + EOS)
        assert (loaded.eos_id, loaded.vocab_size) == (tokenizer.eos_id, tokenizer.vocab_size)
    assert BYTES.sha256 != BPE.sha256


def test_training_does_not_depend_on_threads():
    code = (
        "from blockdiff.data.tokenizer import train_bpe\n"
        "texts = [f'{i} sheep, {i * i} legs\\n' * 3 for i in range(300)]\n"
        "print(train_bpe(texts, 600).sha256)"
    )
    hashes = set()
    for threads in ("1", "4"):
        env = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        hashes.add(
            subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout
        )
    assert len(hashes) == 1


def test_vocab_size_must_hold_the_bytes():
    with pytest.raises(ValueError, match=r"data\.vocab_size=256 must be at least 257"):
        train_bpe(["text"], 256)


def word_level(*specials):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 7}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(specials))
    return inner


def test_foreign_tokenizer_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    inner = word_level("[CLS]", "</s>")
    # A file may ask for padding, truncation and added tokens: none of them may touch a corpus.
    inner.enable_padding(length=9)
    inner.enable_truncation(2)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $0 </s>", special_tokens=[("[CLS]", 3), ("</s>", 4)]
    )
    inner.save(str(path))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("a b a c") == tokenizer.encode_batch(["a b a c"])[0] == [0, 1, 0, 7]
    assert tokenizer.eos_id == 4
    assert tokenizer.vocab_size == 8  # ids have gaps
    assert not tokenizer.byte_level
    assert tokenizer.decode([0, 1, 4]) == "a b"
    assert tokenizer.decode_bytes([0, 1]) == b"a b"


def test_bad_tokenizer_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    word_level("[PAD]").save(str(path))
    with pytest.raises(ValueError, match=r"tokenizer\.json has no end-of-document token"):
        Tokenizer.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(path)
    with pytest.raises(ValueError, match=r"missing\.json cannot be read"):
        Tokenizer.load(tmp_path / "missing.json")
