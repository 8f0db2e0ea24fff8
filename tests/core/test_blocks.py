import pytest
import torch

from blockdiff.core.blocks import check_block_size, split_blocks


def test_message_names_the_nearest_divisors():
    with pytest.raises(ValueError, match=r"block_size=48 must divide seq_len=1024; nearest: 32, 64"):
        check_block_size(48, 1024)


@pytest.mark.parametrize("size", [0, -4, 2048])
def test_sizes_out_of_range_are_refused(size):
    with pytest.raises(ValueError, match="must divide"):
        check_block_size(size, 1024)


@pytest.mark.parametrize("size", [1, 4, 1024])
def test_divisors_pass(size):
    check_block_size(size, 1024)
    assert split_blocks(torch.arange(1024), size).shape == (1024 // size, size)
