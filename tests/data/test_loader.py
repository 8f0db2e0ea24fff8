"""Data order: a pure function of seed and counter, the same on any number of processes and workers."""

import multiprocessing
from itertools import chain

import pytest
import torch

from blockdiff.data.loader import Batch, accumulation_of, global_samples, train_loader, val_loader
from blockdiff.data.packing import PackedDataset

EOS = 999
G = 8  # rows of a global batch


@pytest.fixture(scope="module")
def dataset(make_store):
    documents = [[(7 * d + i) % 900 for i in range(3 + 5 * d % 31)] for d in range(40)]
    return PackedDataset(make_store(documents), seq_len=16, block_size=4, eos_id=EOS)


def equal(a, b):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def global_batches(dataset, world_size, accumulation, start_step=0, max_steps=12, **options):
    """Rows of each step, put together from all ranks and micro-batches in the order of their slots."""
    micro = G // (world_size * accumulation)
    ranks = [
        list(
            train_loader(
                dataset,
                seed=5,
                global_batch_size=G,
                micro_batch_size=micro,
                rank=rank,
                world_size=world_size,
                start_step=start_step,
                max_steps=max_steps,
                **options,
            )
        )
        for rank in range(world_size)
    ]
    steps = {}
    for batch in chain.from_iterable(ranks):
        steps.setdefault(int(batch.step), []).append(batch)
    whole = {}
    for step, batches in steps.items():
        assert len(batches) == world_size * accumulation
        assert len({int(batch.global_count) for batch in batches}) == 1
        rows = [torch.cat([batch[field] for batch in batches]) for field in range(5)]
        order = rows[4].argsort()
        whole[step] = [row[order] for row in rows]
        assert whole[step][4].tolist() == list(range(G))
        assert int(batches[0].global_count) == int(whole[step][2].sum())
    return whole


def test_every_split_of_the_global_batch_sees_the_same_samples(dataset):
    one = global_batches(dataset, 1, 1)
    assert list(one) == list(range(12))
    for world_size, accumulation in ((1, 4), (2, 2), (4, 1), (2, 1), (8, 1), (1, 8)):
        other = global_batches(dataset, world_size, accumulation)
        assert list(other) == list(one)
        assert all(equal(one[step], other[step]) for step in one)


def test_slots_follow_micro_batch_then_rank(dataset):
    options = {"seed": 0, "global_batch_size": G, "micro_batch_size": 2, "world_size": 2, "max_steps": 1}
    slots = [
        [batch.slot_B.tolist() for batch in train_loader(dataset, rank=rank, **options)] for rank in range(2)
    ]
    assert slots == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_rows_are_the_samples_they_name(dataset):
    for batch in train_loader(dataset, seed=1, global_batch_size=G, micro_batch_size=4, max_steps=3):
        assert isinstance(batch, Batch)
        assert (batch.tokens_BL.dtype, batch.document_BL.dtype) == (torch.int64, torch.int32)
        assert (batch.counted_BL.dtype, batch.sample_B.dtype) == (torch.bool, torch.int64)
        assert batch.step.shape == batch.global_count.shape == ()
        for row, sample in enumerate(batch.sample_B.tolist()):
            assert equal(
                (batch.tokens_BL[row], batch.document_BL[row], batch.counted_BL[row]), dataset[sample]
            )


def test_each_epoch_is_another_permutation(dataset):
    size = len(dataset)
    assert size % G, "the epochs' borders must lie inside batches"
    steps = [global_samples(size, 3, step, G) for step in range(3 * size // G + 1)]
    order = torch.cat([torch.from_numpy(indices) for indices in steps]).tolist()
    epochs = [order[e * size : (e + 1) * size] for e in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert global_samples(size, 4, 0, G).tolist() != order[:G]


def test_order_is_written_down():
    # A change of these numbers breaks the resumption of every run that has started before it.
    assert global_samples(1000, 0, 0, 6).tolist() == [711, 398, 420, 118, 992, 857]
    assert global_samples(10**9, 7, 10**9, 3).tolist() == [774550306, 325741119, 288895325]


def test_resumed_order_is_the_rest(dataset):
    whole = global_batches(dataset, 1, 2)
    rest = global_batches(dataset, 2, 1, start_step=7)
    assert list(rest) == list(range(7, 12))
    assert all(equal(rest[step], whole[step]) for step in rest)


def test_loader_length(dataset):
    options = {"seed": 0, "global_batch_size": G, "micro_batch_size": 2}
    assert len(train_loader(dataset, start_step=3, max_steps=10, **options)) == 7 * 4
    assert list(train_loader(dataset, start_step=10, max_steps=10, **options)) == []
    assert list(train_loader(dataset, start_step=11, max_steps=10, **options)) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(dataset, workers):
    options = {"seed": 2, "global_batch_size": G, "micro_batch_size": 4, "start_step": 2, "max_steps": 9}
    alone = list(train_loader(dataset, **options))
    helped = list(train_loader(dataset, workers=workers, **options))
    assert len(alone) == len(helped) == 14
    assert all(map(equal, alone, helped))


def test_a_spawned_worker_can_load(dataset):
    loader = val_loader(dataset, micro_batch_size=8, workers=1)
    loader.multiprocessing_context = multiprocessing.get_context("spawn")
    assert all(map(equal, loader, val_loader(dataset, micro_batch_size=8)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("max_samples", [None, 1, 7, 10_000])
def test_validation_has_each_sample_once(dataset, world_size, max_samples):
    ranks = [
        list(
            val_loader(dataset, micro_batch_size=4, rank=rank, world_size=world_size, max_samples=max_samples)
        )
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    rows = []
    for together in zip(*ranks, strict=True):
        assert {int(batch.global_count) for batch in together} == {
            int(sum(b.counted_BL.sum() for b in together))
        }
        assert [slot for batch in together for slot in batch.slot_B.tolist()] == list(range(4 * world_size))
        rows += [
            (int(s), c) for batch in together for s, c in zip(batch.sample_B, batch.counted_BL, strict=True)
        ]
    samples = [sample for sample, _ in rows if sample >= 0]
    expected = min(max_samples or len(dataset), len(dataset))
    assert samples == sorted(set(samples))
    assert len(samples) == expected
    assert samples == list(range(len(dataset))) or expected < len(dataset)
    assert not any(counted.any() for sample, counted in rows if sample < 0)
    assert all(counted.shape == (dataset.seq_len,) for _, counted in rows)


def test_part_of_validation_lies_evenly(dataset):
    (batch,) = val_loader(dataset, micro_batch_size=4, max_samples=4)
    assert batch.sample_B.tolist() == [i * len(dataset) // 4 for i in range(4)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10, 4, 1), r"data\.global_batch_size=10 must be a multiple of .* = 4; nearest: 8, 12"),
        ((2, 4, 2), r"4 × 2 processes = 8; nearest: 8$"),
        ((0, 4, 2), r"data\.global_batch_size=0 must be at least 1"),
        ((4, 0, 2), r"data\.micro_batch_size=0 must be at least 1"),
    ],
)
def test_batch_sizes_must_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        accumulation_of(*sizes)


def test_corpus_smaller_than_a_batch(make_store):
    dataset = PackedDataset(make_store([[1] * 40]), seq_len=16, block_size=4, eos_id=EOS)
    with pytest.raises(ValueError, match=r"has 3 training windows .*data\.global_batch_size=4: lower it"):
        train_loader(dataset, seed=0, global_batch_size=4, micro_batch_size=4, max_steps=1)
    with pytest.raises(ValueError, match="max_samples=0"):
        val_loader(dataset, micro_batch_size=1, max_samples=0)
