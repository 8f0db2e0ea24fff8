"""Packing against a loop over documents and tokens, and the invariants that the loss relies on."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdiff.core.blocks import check_block_size
from blockdiff.data.packing import PackedDataset

EOS = 999


def oracle(documents, seq_len, block_size, document_mask):
    """Windows as (tokens, document, counted), by the plainest loop."""
    row = []
    for number, document in enumerate(documents):
        row += [(token, number, True) for token in [*document, EOS]]
        while document_mask and len(row) % block_size:
            row.append((EOS, number, False))
    while len(row) % seq_len:
        row.append((EOS, len(documents) - 1, False))
    windows = []
    for start in range(0, len(row), seq_len):
        window = row[start : start + seq_len]
        first = window[0][1]
        document = [number - first if document_mask else 0 for _, number, _ in window]
        windows.append(([t for t, _, _ in window], document, [c for _, _, c in window]))
    return windows


layouts = st.tuples(
    st.lists(st.integers(0, 25), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 5), st.booleans()
)


def make(make_store, layout):
    lengths, block_size, blocks, document_mask = layout
    token = iter(range(10_000))
    documents = [[next(token) % 900 for _ in range(length)] for length in lengths]
    seq_len = block_size * blocks
    dataset = PackedDataset(
        make_store(documents), seq_len=seq_len, block_size=block_size, eos_id=EOS, document_mask=document_mask
    )
    return documents, dataset, oracle(documents, seq_len, block_size, document_mask)


@settings(max_examples=150, deadline=None)
@given(layout=layouts)
def test_windows_equal_the_oracle(make_store, layout):
    _, dataset, expected = make(make_store, layout)
    windows = [dataset[i] for i in range(len(dataset))]
    assert [(t.tolist(), d.tolist(), c.tolist()) for t, d, c in windows] == expected
    for tokens, document, counted in windows:
        assert (tokens.dtype, document.dtype, counted.dtype) == (torch.int64, torch.int32, torch.bool)
    counts = [sum(counted) for _, _, counted in expected]
    index = np.arange(len(dataset))[::-1]
    assert dataset.counted_tokens(index).tolist() == counts[::-1]
    places = dataset.seq_len * len(dataset)
    assert dataset.padding_share == pytest.approx(1 - sum(counts) / places, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(layout=layouts)
def test_each_token_is_counted_once_in_order_and_blocks_have_one_document(make_store, layout):
    documents, dataset, _ = make(make_store, layout)
    counted = [
        int(t) for window in map(dataset.__getitem__, range(len(dataset))) for t in window[0][window[2]]
    ]
    assert counted == [token for document in documents for token in [*document, EOS]]
    if layout[3]:
        for index in range(len(dataset)):
            blocks = dataset[index].document_L.reshape(-1, layout[1])
            assert (blocks == blocks[:, :1]).all()


def test_first_windows_only(make_store):
    store = make_store([[1] * 50])
    whole = PackedDataset(store, seq_len=8, block_size=4, eos_id=EOS)
    first = PackedDataset(store, seq_len=8, block_size=4, eos_id=EOS, max_samples=2)
    assert (len(whole), len(first)) == (7, 2)
    assert first.padding_share == 0
    assert whole.padding_share == pytest.approx(1 - 51 / 56)
    with pytest.raises(IndexError):
        first[2]
    with pytest.raises(ValueError, match="max_train_samples=0"):
        PackedDataset(store, seq_len=8, block_size=4, eos_id=EOS, max_samples=0)


def test_pickled_data_set_is_the_same(make_store):
    dataset = PackedDataset(make_store([[1, 2, 3], [4] * 9]), seq_len=8, block_size=2, eos_id=EOS)
    copy = pickle.loads(pickle.dumps(dataset))
    for index in range(len(dataset)):
        assert all(torch.equal(a, b) for a, b in zip(copy[index], dataset[index], strict=True))


def test_a_window_reads_only_its_own_tokens(make_store):
    store = make_store([list(range(i, i + 20)) for i in range(0, 800, 20)])
    dataset = PackedDataset(store, seq_len=16, block_size=4, eos_id=EOS)
    reads = []

    class Spy:
        def __getitem__(self, key):
            reads.append(key.stop - key.start)
            return tokens[key]

    tokens, store.tokens = store.tokens, Spy()
    dataset.counted_tokens(np.arange(len(dataset)))
    assert not reads
    for index in range(len(dataset)):
        dataset[index]
    assert max(reads) <= 16
    assert sum(reads) == 800


@pytest.mark.parametrize(
    ("block_size", "seq_len", "nearest"),
    [(48, 1024, "32, 64"), (0, 8, "1"), (9, 8, "8"), (3, 8, "2, 4"), (-1, 8, "1")],
)
def test_block_size_must_divide(block_size, seq_len, nearest):
    with pytest.raises(
        ValueError, match=rf"block_size={block_size} must divide seq_len={seq_len}; nearest: {nearest}$"
    ):
        check_block_size(block_size, seq_len)
