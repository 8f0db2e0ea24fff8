"""Small token stores for the tests of packing and loading."""

import pytest

from blockdiff.data.store import ShardWriter, TokenStore


@pytest.fixture(scope="session")
def make_store(tmp_path_factory):
    """Writes documents, given as lists of token ids below 1000, and opens them as a store."""

    def make(documents):
        directory = tmp_path_factory.mktemp("store")
        writer = ShardWriter(directory, "train", 1000)
        writer.append(documents, [True] * len(documents), 1)
        return TokenStore(directory, "train", writer.close())

    return make
