"""Scores of texts: exact at block size 1, unbiased elsewhere, and the same whatever else is scored."""

import itertools
import math

import pytest
import torch

from blockdiff.core.objective import token_nll
from blockdiff.evaluation.likelihood import score_texts
from blockdiff.model.denoiser import Denoiser, ModelConfig

V, EOS, L = 9, 8, 12


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = Denoiser(ModelConfig(layers=2, width=16, heads=2), V).double()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.5)
    return model.eval().requires_grad_(False)


TEXTS = [[1, 2, 3, 4, 5], [7], [], [int(i) % 7 for i in range(30)]]


def score(model, texts, **options):
    settings = {"eos_id": EOS, "seq_len": L, "block_size": 4, "views": 4, **options}
    return score_texts(model, texts, **settings)


def plain_nll(model, tokens):
    """The loop over positions: clean prefix, then one [MASK]."""
    total = 0.0
    for i, token in enumerate(tokens):
        cache = model.new_cache(1, i + 1)
        if i:
            model.commit(torch.tensor([tokens[:i]]), cache)
        logits = model.denoise(torch.tensor([[model.mask_id]]), cache)
        total += float(token_nll(logits[0], torch.tensor([token])))
    return total


def test_block_size_one_is_the_loop_over_positions(model):
    for text, bound in zip(TEXTS, score(model, TEXTS, block_size=1), strict=True):
        tokens = [*text, EOS]
        windows = [tokens[i : i + L] for i in range(0, len(tokens), L)]
        assert bound.nats == pytest.approx(sum(plain_nll(model, w) for w in windows), abs=1e-9)
        assert bound.tokens == len(tokens)
        assert bound.standard_error == 0


def test_bound_is_the_average_over_all_masks(model):
    """One block of 3 tokens: Σ_n 1/n · E_{|M| = n} Σ nll by enumeration, within four standard errors."""
    tokens = torch.tensor([[3, 1, EOS]])
    expected = 0.0
    for mask in itertools.product((False, True), repeat=3):
        n = sum(mask)
        if n:
            xt = torch.where(torch.tensor([mask]), model.mask_id, tokens)
            logits = model.denoise(xt, model.new_cache(1, 3))[0]
            expected += float(token_nll(logits, tokens[0])[list(mask)].sum()) / n / math.comb(3, n)
    (bound,) = score(model, [[3, 1]], block_size=3, views=4000)
    assert abs(bound.nats - expected) < 4 * math.sqrt(bound.variance)
    assert math.sqrt(bound.variance) < 0.05 * expected


def test_scores_do_not_depend_on_companions_order_or_batch_size(model):
    alone = [score(model, [text])[0] for text in TEXTS]
    for size, order in ((1, [0, 1, 2, 3]), (2, [3, 1, 0, 2]), (16, [2, 3, 0, 1])):
        together = score(model, [TEXTS[i] for i in order], micro_batch_size=size)
        for i, bound in zip(order, together, strict=True):
            assert bound.nats == pytest.approx(alone[i].nats, abs=1e-10)
            assert bound.variance == pytest.approx(alone[i].variance, abs=1e-10)


def test_same_text_same_noise_and_another_seed_another(model):
    first, second = score(model, [TEXTS[3], TEXTS[3]])
    assert first == second
    assert score(model, [TEXTS[3]], seed=5)[0].nats != first.nats


def test_standard_error_is_that_of_repeated_evaluations(model):
    bounds = [score(model, [TEXTS[3]], views=2, seed=seed)[0] for seed in range(300)]
    nats = torch.tensor([b.nats for b in bounds])
    claimed = torch.tensor([b.variance for b in bounds]).mean().sqrt()
    assert float(nats.std()) == pytest.approx(float(claimed), rel=0.15)


def test_block_size_must_divide(model):
    with pytest.raises(ValueError, match="block_size=5 must divide seq_len=12"):
        score(model, TEXTS, block_size=5)
