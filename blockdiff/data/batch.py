"""What the loader hands out.

Letters: B rows of one micro-batch, L seq_len.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """One micro-batch of one rank.

    Attributes:
        tokens_BL: int64.
        document_BL: int32, the document of each position, counted within the row.
        counted_BL: bool, whether the position takes part in the loss.
        sample_B: int64, index of the row in the data set; -1 for a row that only fills the batch up.
        slot_B: int64, place of the row in the global batch.
        step: int64 scalar, the optimizer step (of validation: the number of the batch).
        global_count: int64 scalar, counted positions in the whole global batch, over all micro-batches and
        ranks.
    """

    tokens_BL: Tensor
    document_BL: Tensor
    counted_BL: Tensor
    sample_B: Tensor
    slot_B: Tensor
    step: Tensor
    global_count: Tensor
