"""Documents laid end to end and cut into windows, computed from the documents' lengths alone.

Letters: L seq_len, S block_size, I any number of window indices. A *place* is a position in the whole
packed row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from blockdiff.core.blocks import check_block_size
from blockdiff.data.store import TokenStore

Ints = NDArray[np.int64]


class Window(NamedTuple):
    """One sample: ``tokens_L`` int64, ``document_L`` int32 (0, 1, … in the window), ``counted_L`` bool."""

    tokens_L: Tensor
    document_L: Tensor
    counted_L: Tensor


class PackedDataset(Dataset[Window]):
    """Fixed windows over the documents of a split.

    Each document is followed by one end-of-document token. With ``document_mask`` it is then padded to a
    multiple of ``block_size`` with places that are not counted, so that no block spans two documents; a
    place of padding belongs to the document in front of it. Without it documents follow each other directly
    and a window is one document. The last window is filled up with uncounted places. Every document token
    and every end token is counted in exactly one window.

    Attributes:
        eos_id: the end-of-document token, which also fills places of padding.
        padding_share: share of all places that are not counted.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_len: int,
        block_size: int,
        eos_id: int,
        document_mask: bool = True,
        max_samples: int | None = None,
    ):
        """Lays the windows out; reads no token.

        Args:
            max_samples: keep the first so many windows only.

        Raises:
            ValueError: ``block_size`` does not divide ``seq_len``, or ``max_samples`` is not positive.
        """
        check_block_size(block_size, seq_len)
        if max_samples is not None and max_samples < 1:
            raise ValueError(f"data.max_train_samples={max_samples} must be at least 1, or null for all")
        self.store = store
        self.seq_len = seq_len
        self.eos_id = eos_id
        self.document_mask = document_mask
        counted = np.diff(store.offsets) + 1
        unit = block_size if document_mask else 1
        # Place where each document begins, and behind them the place where the last one ends.
        self._starts: Ints = np.concatenate([[0], np.cumsum(-(-counted // unit) * unit)])
        windows = -(-int(self._starts[-1]) // seq_len)
        self._windows = windows if max_samples is None else min(windows, max_samples)
        places = self._windows * seq_len
        self.padding_share = 1.0 - float(self._counted_before(np.array([places]))[0]) / max(places, 1)

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> Window:
        if not 0 <= index < self._windows:
            raise IndexError(f"window {index} of {self._windows}")
        place_L = index * self.seq_len + np.arange(self.seq_len)
        first, last = np.searchsorted(self._starts[1:-1], [place_L[0], place_L[-1]], side="right")
        document_L = first + np.searchsorted(self._starts[first + 1 : last + 1], place_L, side="right")
        offsets = self.store.offsets[first : last + 2]
        inside_L = place_L - self._starts[document_L]
        length_L = np.diff(offsets)[document_L - first]
        source_L = offsets[document_L - first] + inside_L
        has_token_L = inside_L < length_L
        tokens_L = np.full(self.seq_len, self.eos_id, dtype=np.int64)
        source = source_L[has_token_L]  # ascending without gaps: documents lie end to end in the store
        if len(source):
            tokens_L[has_token_L] = self.store.tokens[source[0] : source[-1] + 1]
        if not self.document_mask:
            document_L = np.full(self.seq_len, first)
        return Window(
            torch.from_numpy(tokens_L),
            torch.from_numpy((document_L - first).astype(np.int32)),
            torch.from_numpy(inside_L <= length_L),
        )

    def counted_tokens(self, index_I: Ints) -> Ints:
        """Number of counted positions of each window, int64, from the documents' lengths alone."""
        place_I = np.asarray(index_I, dtype=np.int64) * self.seq_len
        return self._counted_before(place_I + self.seq_len) - self._counted_before(place_I)

    def _counted_before(self, place_I: Ints) -> Ints:
        """Number of counted places in front of each given place."""
        document_I = np.searchsorted(self._starts[1:-1], place_I, side="right")
        begin_I = self.store.offsets[document_I]
        length_I = self.store.offsets[document_I + 1] - begin_I
        inside_I = np.minimum(place_I - self._starts[document_I], length_I + 1)
        return begin_I + document_I + inside_I

