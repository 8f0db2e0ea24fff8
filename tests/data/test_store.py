"""Token shards: what was written is read back, and what was damaged is named."""

import pickle

import numpy as np
import pytest

from blockdiff.data.store import ShardWriter, TokenStore

DOCUMENTS = [[5, 6, 7], [8], [], [9, 10, 11, 12]]


def write(directory, vocab_size=100):
    writer = ShardWriter(directory, "train", vocab_size)
    first, second, third, fourth = DOCUMENTS
    writer.append([first[:2], first[2:], second, third], [False, True, True, True], 40)
    writer.append([], [], 0)
    writer.append([fourth[:3]], [False], 3)
    writer.append([fourth[3:]], [True], 1)
    facts = writer.close()
    return writer, facts


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, "uint16"), (1 << 16, "uint16"), (65_537, "uint32")])
def test_round_trip(tmp_path, vocab_size, dtype):
    writer, facts = write(tmp_path, vocab_size)
    store = TokenStore(tmp_path, "train", facts, verify=True)
    assert [store.document(d).tolist() for d in range(4)] == DOCUMENTS
    assert store.tokens.dtype == dtype
    assert isinstance(store.tokens, np.memmap)
    assert (facts.documents, facts.tokens, facts.bytes) == (4, 8, 44)
    assert (
        writer.counts_V.tolist()
        == np.bincount(np.concatenate(DOCUMENTS).astype(int), minlength=vocab_size).tolist()
    )


def test_pickling_sends_no_tokens(tmp_path):
    _, facts = write(tmp_path)
    store = TokenStore(tmp_path, "train", facts)
    data = pickle.dumps(store)
    (tmp_path / "train.bin").write_bytes(np.arange(8, dtype=np.uint16).tobytes())
    assert pickle.loads(data).tokens.tolist() == list(range(8))


def test_damaged_files_are_named(tmp_path):
    _, facts = write(tmp_path)
    shard, offsets = tmp_path / "train.bin", tmp_path / "train.offsets.npy"
    good, good_offsets = shard.read_bytes(), offsets.read_bytes()
    shard.write_bytes(good[:-2])
    with pytest.raises(
        ValueError, match=r"train\.bin has 14 bytes instead of 16; delete the directory .*prepare"
    ):
        TokenStore(tmp_path, "train", facts)
    shard.write_bytes(good[:-1] + b"\xff")
    TokenStore(tmp_path, "train", facts)
    with pytest.raises(ValueError, match=r"train\.bin does not have the content"):
        TokenStore(tmp_path, "train", facts, verify=True)
    shard.write_bytes(good)
    for bad, message in (
        (good_offsets[:-1], r"train\.offsets\.npy (cannot be read|does not fit)"),
        (b"", r"train\.offsets\.npy cannot be read"),
        (good_offsets[:-8] + b"\x09" + b"\0" * 7, r"train\.offsets\.npy does not fit the manifest"),
    ):
        offsets.write_bytes(bad)
        with pytest.raises(ValueError, match=message):
            TokenStore(tmp_path, "train", facts)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train\.bin is missing"):
        TokenStore(tmp_path, "train", facts)
