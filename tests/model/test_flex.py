"""FlexAttention's tiles against the pairs written out, and its kernel against SDPA."""

import pytest
import torch

from blockdiff.core.masks import CleanAttention, dual_stream_mask
from blockdiff.model.flex import TILE, plan_flex, tile_pattern

CPU = torch.device("cpu")


def tiles_of(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether some, and whether every pair of each tile is allowed; pairs beyond the end are not."""
    high, wide = (-(-size // TILE) * TILE for size in pairs.shape)
    whole = torch.zeros(high, wide, dtype=torch.bool)
    whole[: pairs.shape[0], : pairs.shape[1]] = pairs
    tiled = whole.view(high // TILE, TILE, wide // TILE, TILE)
    return tiled.any(3).any(1), tiled.all(3).all(1)


def documents(length: int, unit: int, rows: int = 2) -> torch.Tensor:
    """Rows of documents that lie end to end, with borders at multiples of the unit."""
    generator = torch.Generator().manual_seed(length + unit)
    border = torch.rand(rows, length // unit, generator=generator) < 0.02 * unit**0.5
    border[:, 0] = False
    return border.cumsum(1).repeat_interleave(unit, 1)


@pytest.mark.parametrize("clean", CleanAttention)
@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize(("length", "block_size"), [(512, 1), (512, 16), (256, 256), (600, 8), (300, 300), (48, 3)])
@pytest.mark.parametrize("noisy_only", [False, True])
def test_tiles_of_one_document_are_those_of_the_pairs(clean, views, length, block_size, noisy_only):
    queries = views * length if noisy_only else (views + 1) * length
    some, every = tile_pattern(None, length, block_size, views, clean, queries=queries, device=CPU)
    pairs = dual_stream_mask(length, block_size, views=views, clean_attention=clean)[:queries]
    want_some, want_every = tiles_of(pairs)
    assert torch.equal(some[0], want_some)
    assert torch.equal(every[0], want_every)


@pytest.mark.parametrize("clean", CleanAttention)
@pytest.mark.parametrize(("length", "block_size"), [(1024, 1), (1024, 16), (600, 8), (512, 256)])
def test_tiles_of_many_documents_leave_out_no_pair(clean, length, block_size):
    """Tiles without documents in common are skipped; near a border a tile may be looked at in vain, though seldom."""
    document = documents(length, block_size)
    some, every = tile_pattern(document, length, block_size, 1, clean, queries=2 * length, device=CPU)
    seen = asked = 0
    for row in range(len(document)):
        pairs = dual_stream_mask(length, block_size, clean_attention=clean, document_L=document[row])
        want_some, want_every = tiles_of(pairs)
        assert bool((some[row] | ~want_some).all())
        assert torch.equal(every[row], want_every)
        seen, asked = seen + int(want_some.sum()), asked + int(some[row].sum())
    assert asked <= 1.1 * seen


@pytest.mark.parametrize("clean", CleanAttention)
def test_block_mask_lists_exactly_its_tiles_and_asks_the_mask(clean):
    length, block_size = 384, 16
    document = documents(length, block_size)
    masks = plan_flex(document, block_size, views=2, clean_attention=clean).flex
    for mask, queries in ((masks.both, 3 * length), (masks.noisy_only, 2 * length)):
        some, _ = tile_pattern(document, length, block_size, 2, clean, queries=queries, device=CPU)
        assert torch.equal(mask.to_dense()[:, 0].bool(), some)
        index = torch.arange(3 * length)
        for row in range(2):
            pairs = mask.mask_mod(torch.tensor(row), torch.tensor(0), index[:queries, None], index[None])
            want = dual_stream_mask(length, block_size, views=2, clean_attention=clean, document_L=document[row])
            assert torch.equal(pairs, want[:queries])


def test_sequences_of_one_document_share_their_masks():
    one = plan_flex(torch.zeros(2, 64, dtype=torch.int32), 4, views=1, clean_attention=CleanAttention.causal)
    other = plan_flex(torch.ones(3, 64, dtype=torch.int32), 4, views=1, clean_attention=CleanAttention.causal)
    assert one.flex is other.flex
