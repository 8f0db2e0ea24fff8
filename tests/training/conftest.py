"""Fixtures of training tests: one tiny corpus for all, one directory a test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from miniature import RunConfig, miniature, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture
def make_config(tmp_path: Path, corpus: Path) -> Callable[..., RunConfig]:
    """`make_config(trainer__max_steps=3)`: a miniature run in the test's directory."""
    return partial(miniature, tmp_path, corpus)
