"""Who sees whom in the dual-stream pass, as one predicate on (stream, position, block, document).

The input of a training pass is K noisy views of a sequence and its clean copy, all at the same positions:

* a noisy token sees its own noisy block, in both directions, and all clean tokens of strictly earlier blocks;
* a clean token sees clean tokens up to itself (``causal``) or up to the end of its block (``block``).

Nothing sees across a document border. The predicate broadcasts, so that the same lines give the dense mask of the
tests,
the small masks of query groups and the element-wise mask of FlexAttention. (Arriola et al., "Block diffusion", 2025,
section 4, for the ``block`` variant.)
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

CLEAN = -1


class CleanAttention(Enum):
    causal = "causal"
    block = "block"


class Place(NamedTuple):
    """Where tokens stand; integer tensors that broadcast against each other.

    Attributes:
        view: index of the noisy view, or `CLEAN`.
        position: position in the sequence.
        block: index of the block.
        document: index of the document.
    """

    view: Tensor
    position: Tensor
    block: Tensor
    document: Tensor


def may_attend(query: Place, key: Place, clean_attention: CleanAttention) -> Tensor:
    """Bool of the places' broadcast shape: may this query attend to this key?"""
    query_clean, key_clean = query.view == CLEAN, key.view == CLEAN
    match clean_attention:
        case CleanAttention.causal:
            clean_sees = key.position <= query.position
        case CleanAttention.block:
            clean_sees = key.block <= query.block
    allowed = torch.where(
        query_clean,
        key_clean & clean_sees,
        torch.where(key_clean, key.block < query.block, (key.view == query.view) & (key.block == query.block)),
    )
    return allowed & (key.document == query.document)


def dual_stream_mask(
    length: int,
    block_size: int,
    *,
    views: int = 1,
    clean_attention: CleanAttention = CleanAttention.causal,
    document_L: Tensor | None = None,
) -> Tensor:
    """The dense mask (T, T) over [view 0 ; … ; view K−1 ; clean], T = (K + 1)·L: the oracle of the fast paths."""
    position_L = torch.arange(length)
    document_L = torch.zeros_like(position_L) if document_L is None else document_L
    view_T = torch.cat([torch.arange(views), torch.tensor([CLEAN])]).repeat_interleave(length)
    position_T = position_L.repeat(views + 1)
    place = Place(view_T, position_T, position_T // block_size, document_L.repeat(views + 1))
    query = Place(*(x[:, None] for x in place))
    key = Place(*(x[None, :] for x in place))
    return may_attend(query, key, clean_attention)
