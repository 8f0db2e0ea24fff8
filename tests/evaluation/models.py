"""Tiny denoisers and texts for the tests of this folder."""

import torch

from blockdiff.core.masks import CleanAttention
from blockdiff.model.denoiser import Denoiser, ModelConfig

V = 7


def tiny(clean=CleanAttention.causal, vocab=V, seed=0, std=0.3) -> Denoiser:
    torch.manual_seed(seed)
    model = Denoiser(ModelConfig(layers=2, width=16, heads=2, clean_attention=clean), vocab).double()
    for weight in model.parameters():  # far from the initial values, so that every part matters
        torch.nn.init.normal_(weight, std=std) if weight.dim() > 1 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.eval().requires_grad_(False)


def text(rows=2, length=8, seed=1, vocab=V):
    """tokens, document, counted, sample: the second document of each row starts in its middle and ends in padding."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, vocab, (rows, length))
    document = (torch.arange(length) >= length // 2).long().repeat(rows, 1)
    counted = torch.ones(rows, length, dtype=torch.bool)
    counted[0, -1] = False
    return tokens, document, counted, torch.arange(rows)
