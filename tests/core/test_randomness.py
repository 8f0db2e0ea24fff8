import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdiff.core.randomness import hash_counters, hash_int, mix, permute_index, uniform

WORD = 1 << 64


def splitmix_oracle(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 % WORD
    x ^= x >> 27
    x = x * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def test_mix_is_splitmix64_on_unsigned_words():
    values = [0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    signed = torch.tensor([v - WORD if v >= WORD // 2 else v for v in values])
    assert [int(v) % WORD for v in mix(signed)] == [splitmix_oracle(v) for v in values]


def test_hash_of_tensors_equals_hash_of_integers():
    got = hash_counters(7, 3, torch.tensor([[4], [5]]), torch.tensor([0, 9]))
    assert [[int(x) % WORD for x in row] for row in got] == [[hash_int(7, 3, a, b) for b in (0, 9)] for a in (4, 5)]


def test_hash_does_not_depend_on_where_tensors_begin():
    as_tensors = hash_counters(torch.tensor(7), torch.tensor(3), torch.tensor(4))
    assert int(as_tensors) % WORD == hash_int(7, 3, 4)


def test_order_of_counters_matters():
    assert hash_int(1, 2) != hash_int(2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_lies_inside_the_open_interval(dtype):
    extreme = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    u = uniform(extreme, dtype)
    assert ((u > 0) & (u < 1)).all()
    assert torch.isfinite(torch.log(u) + torch.log1p(-u)).all()


def test_uniform_draws_are_uniform_and_uncorrelated():
    u = uniform(hash_counters(0, torch.arange(200)[:, None], torch.arange(500)), torch.float64).numpy()
    counts, _ = np.histogram(u, bins=50, range=(0, 1))
    assert ((counts - 2000) ** 2 / 2000).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.012
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.012


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**63))
def test_permutation_is_a_bijection(size, key):
    image = permute_index(torch.arange(size), size, key)
    assert sorted(image.tolist()) == list(range(size))


def test_permutation_of_a_part_is_part_of_the_permutation():
    whole = permute_index(torch.arange(1001), 1001, 5)
    assert torch.equal(permute_index(torch.tensor([3, 999]), 1001, 5), whole[[3, 999]])


def test_permutations_differ_by_key_and_spread():
    first, second = (permute_index(torch.arange(4096), 4096, key) for key in (1, 2))
    assert (first == second).float().mean() < 0.01
    assert (first == torch.arange(4096)).float().mean() < 0.01


def test_every_index_goes_everywhere_equally_often():
    images = torch.stack([permute_index(torch.arange(6), 6, key) for key in range(3000)])
    for column in images.T:
        counts = torch.bincount(column, minlength=6).double()
        assert ((counts - 500) ** 2 / 500).sum() < 20.5  # chi-square, 5 degrees of freedom, p = 0.001
