"""Metrics of samples against values worked out by hand."""

import math

import numpy as np
import pytest

from blockdiff.evaluation.copies import TrainingText
from blockdiff.evaluation.distance import energy_distance
from blockdiff.evaluation.diversity import distinct, loop_share, repeated, self_overlap, unigram_entropy
from blockdiff.evaluation.syntax import parses, parses_to_last_statement


def test_entropy():
    assert unigram_entropy([[1, 1], [2, 3]]) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert unigram_entropy([[]]) == 0


def test_distinct_and_repeated():
    texts = [[1, 2, 1, 2, 1], [1, 2]]
    # Bigrams: 12 21 12 21 | 12.
    assert distinct(texts, 2) == pytest.approx(2 / 5)
    assert repeated(texts, 2) == pytest.approx(2 / 5)
    assert distinct(texts, 1) == pytest.approx(2 / 7)
    assert math.isnan(distinct(texts, 6))
    assert math.isnan(repeated(texts, 6))


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ([1, 2, 3, 4, 5, 6], 0),
        ([7, 7], 0),  # a word said twice is no loop
        ([7, 7, 7, 1], 3 / 4),
        ([9, 1, 2, 1, 2, 1, 2, 8], 6 / 8),
        ([9, 1, 2, 1, 2, 1, 8, 8], 0),  # two and a half times
        ([1, 2, 3] * 4, 1),
    ],
)
def test_loops(text, share):
    assert loop_share(text) == pytest.approx(share)


def test_self_overlap():
    assert self_overlap([[1, 2, 3], [1, 2, 4]], order=2) == pytest.approx(1 / 3)
    assert self_overlap([[1, 2], [1, 2], [3, 4]], order=2) == pytest.approx(1 / 3)
    assert math.isnan(self_overlap([[1, 2, 3]], order=2))


def test_longest_match_equals_the_plain_search():
    generator = np.random.default_rng(0)
    train = generator.integers(0, 4, 300)
    text = TrainingText(train)
    for _ in range(20):
        sample = generator.integers(0, 4, 30).tolist()
        joined = train.tolist()
        slow = max(
            size
            for size in range(31)
            for start in range(31 - size)
            if any(joined[p : p + size] == sample[start : start + size] for p in range(301 - size))
        )
        assert text.longest_match(sample) == slow
    assert text.longest_match([]) == 0
    assert text.longest_match([9, 9]) == 0
    assert TrainingText(np.array([70000, 0xD800, 0xDFFF, 5])).longest_match([1, 0xD800, 0xDFFF, 6]) == 2


@pytest.mark.parametrize(
    ("text", "whole", "to_last"),
    [
        ("x = 1\n", True, True),
        ("", False, False),
        ("x = 1\ny = (2,", False, True),
        ("x = 1\nif x:\n    y = [", False, True),
        ("x = 1\n@f\ndef g(", False, True),
        ("x = 1\nif x", False, True),
        ('x = 1\ny = """open', False, True),
        ("try:\n    x = 1\n    y = (", False, False),  # nothing is left
        ("z = 0\ntry:\n    x = 1\n    y = (", False, True),
        ("try:\n    x = 1\nexcept E:\n    y = (", False, False),
        ("x = = 1\ny = 2\n", False, False),
        ("x = = 1\ny = (", False, False),
        ("x = 1\n)) y\nz = 2\n", False, False),
        ("import", False, False),
        ("def f():\n    return 1\n\n\nclass A:\n    def g(self):\n        retu rn", False, True),
    ],
)
def test_python(text, whole, to_last):
    assert parses(text) is whole
    assert parses_to_last_statement(text) is to_last


def test_energy_distance():
    x, y = np.array([[0.0], [2.0]]), np.array([[1.0], [5.0]])
    # The spread of y is 2: points 0, 1 and 0.5, 2.5. Between: (0.5 + 2.5 + 0.5 + 1.5) / 4; within: 1 and 2.
    assert energy_distance(x, y) == pytest.approx(2 * 1.25 - 1 - 2)
    generator = np.random.default_rng(0)
    real, same = generator.normal(size=(2, 200, 8))
    far = generator.normal(0.5, 1, (200, 8))
    assert abs(energy_distance(same, real)) < 0.05
    assert energy_distance(far, real) > 0.2
    with pytest.raises(ValueError, match="two texts"):
        energy_distance(x[:1], y)
