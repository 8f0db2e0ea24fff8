import pytest
import torch

from blockdiff.core.masks import CleanAttention, dual_stream_mask


def allowed_by_the_book(q, k, length, block_size, views, clean_attention, document):
    """The sentences of DESIGN §2, one pair of tokens at a time."""
    (q_view, q_position), (k_view, k_position) = divmod(q, length), divmod(k, length)
    if document[q_position] != document[k_position]:
        return False
    q_block, k_block = q_position // block_size, k_position // block_size
    q_clean, k_clean = q_view == views, k_view == views
    if q_clean:
        if not k_clean:
            return False
        return k_position <= q_position if clean_attention is CleanAttention.causal else k_block <= q_block
    if k_clean:
        return k_block < q_block
    return q_view == k_view and q_block == k_block


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("block_size", [1, 2, 4, 12])
@pytest.mark.parametrize("views", [1, 3])
def test_mask_is_the_rule_pair_by_pair(clean_attention, block_size, views):
    length = 12
    document = [0] * 12 if block_size == 12 else [0] * 4 + [1] * 8
    mask = dual_stream_mask(
        length, block_size, views=views, clean_attention=clean_attention, document_L=torch.tensor(document)
    )
    total = (views + 1) * length
    expected = [
        [allowed_by_the_book(q, k, length, block_size, views, clean_attention, document) for k in range(total)]
        for q in range(total)
    ]
    assert torch.equal(mask, torch.tensor(expected))
