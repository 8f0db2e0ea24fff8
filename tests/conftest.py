"""Shared settings of the test run."""

import torch

# Two test processes on two cores must not fight over threads; tiny tensors gain nothing from more than one.
torch.set_num_threads(1)
