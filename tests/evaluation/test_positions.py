"""Window scores against the slow path, curves and intervals against values worked out by hand, and a planted break."""

import numpy as np
import pytest
import torch
from models import V, text, tiny

from blockdiff.core.corruption import NoiseConfig, NoiseKey, corrupt
from blockdiff.data.loader import Batch
from blockdiff.evaluation.exact import exact_block_nats
from blockdiff.evaluation.intervals import mean_interval, paired_difference, ratio_interval
from blockdiff.evaluation.positions import border_jump, by_position
from blockdiff.evaluation.windows import (
    WindowNats,
    common_block_size,
    left_to_right_nats,
    true_nats,
    window_nats,
)
from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.model.scoring import score_blocks


def batches(tokens, document, counted, sample):
    return [Batch(tokens, document, counted, sample, sample, torch.tensor(0), counted.sum())]


def made(nats, document=None, counted=None):
    nats = np.array(nats, dtype=np.float64)
    return WindowNats(
        sample_W=np.arange(len(nats)),
        nats_WL=nats,
        counted_WL=np.ones(nats.shape, bool) if counted is None else np.array(counted),
        document_WL=np.zeros(nats.shape, np.int32) if document is None else np.array(document, np.int32),
        variance_W=np.zeros(len(nats)),
    )


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_windows_add_up_to_the_bound(block_size):
    model, (tokens, document, counted, sample) = tiny(), text(rows=3)
    sample[1] = -1  # a row that only fills the batch up
    scores = window_nats(model, batches(tokens, document, counted, sample), block_size=block_size, views=3)
    blocks = score_blocks(model, tokens, document, counted, sample, block_size=block_size, views=3)
    kept = [0, 2]
    np.testing.assert_allclose(scores.window_nats, blocks.mean(1).sum(-1)[kept].numpy(), atol=1e-10)
    assert scores.window_tokens.tolist() == counted[kept].sum(1).tolist()
    if block_size > 1:
        expected = (blocks.var(1).sum(-1) / 3)[kept].sum().sqrt() / counted[kept].sum()
        assert scores.noise_error == pytest.approx(expected.item())
    else:
        assert scores.noise_error == 0


def test_left_to_right_equals_the_plain_loop():
    model, (tokens, document, counted, sample) = tiny(), text(rows=1)
    counted[:] = True
    document[:] = 0
    scores = left_to_right_nats(model, batches(tokens, document, counted, sample), block_size=4)
    for position in range(8):
        start = position // 4 * 4
        cache = model.new_cache(1, 8)
        if start:
            model.commit(tokens[:, :start], cache, block_size=4)
        noisy = torch.where(torch.arange(start, start + 4) < position, tokens[:, start : start + 4], V)
        log_p = model.denoise(noisy, cache)[0, position - start].log_softmax(-1)
        assert scores.nats_WL[0, position] == pytest.approx(-log_p[tokens[0, position]].item(), abs=1e-10)


def test_true_nats_are_exact_or_bracketed():
    model, (tokens, document, counted, sample) = tiny(), text()
    loader = batches(tokens, document, counted, sample)
    exact = true_nats(model, loader, block_size=4, largest_exact=4, orders=2)
    expected = exact_block_nats(model, tokens, document, counted, block_size=4).sum(-1).numpy()
    np.testing.assert_allclose(exact.low_W, expected)
    assert exact.exact
    assert (exact.low_W == exact.high_W).all()
    ends = true_nats(model, loader, block_size=4, largest_exact=2, orders=8)
    assert not ends.exact
    assert (ends.low_W < ends.high_W).all()


def test_curve_and_jump_by_hand():
    # Block size 2; the second document of window 0 starts at position 4, so only blocks 1 and 3 follow a block.
    windows = made(
        [[9, 9, 5, 1, 9, 9, 3, 2], [9, 9, 4, 2, 4, 2, 4, 2]],
        document=[[0, 0, 0, 0, 1, 1, 1, 1], [0] * 8],
    )
    first, second = by_position(windows, 2)
    assert first.value == pytest.approx((5 + 3 + 4 + 4 + 4) / 5)
    assert second.value == pytest.approx((1 + 2 + 2 + 2 + 2) / 5)
    jump = border_jump(windows, 2)
    assert jump.to_interior.value == pytest.approx(((4 - 1.5) + (4 - 2)) / 2)
    assert jump.to_last.value == pytest.approx(((4 - 9) + (4 - (9 + 2 + 2) / 3)) / 2)
    assert border_jump(windows, 1) is None
    level = made(windows.nats_WL - 1.0, document=windows.document_WL)
    assert border_jump(windows, 2, level).to_interior.value == pytest.approx(0)


def test_uncounted_positions_are_left_out():
    windows = made([[1, 1, 5, 0]], counted=[[True, True, True, False]])
    assert by_position(windows, 2)[0].value == 5
    assert np.isnan(by_position(windows, 2)[1].value)


def test_other_windows_are_refused():
    with pytest.raises(ValueError, match="pack_block_size"):
        border_jump(made([[1, 2, 3, 4]]), 2, made([[1, 2, 3, 4]], counted=[[True, True, True, False]]))


def test_intervals_cover_and_pairing_helps():
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        sample = generator.normal(3.0, 1.0, 40)
        interval = mean_interval(sample)
        hits += interval.low <= 3.0 <= interval.high
    assert 178 <= hits <= 198  # 95 % nominal; the bootstrap of 40 values is a little short
    tokens = np.full(50, 10.0)
    hard = generator.normal(30, 8, 50)
    easy = hard - generator.normal(1.0, 0.2, 50)
    paired = paired_difference(hard, easy, tokens)
    alone = ratio_interval(hard, tokens)
    assert paired.excludes_zero
    assert paired.high - paired.low < 0.1 * (alone.high - alone.low)
    assert not paired_difference(hard, hard[::-1], tokens).excludes_zero


def test_common_block_size_is_a_border_for_all():
    assert common_block_size([1, 4, 6]) == 12


@pytest.fixture(scope="module")
def counter() -> Denoiser:
    """Trained to count: each text goes up by one from a random start, so only the first token is uncertain."""
    torch.manual_seed(0)
    model = Denoiser(ModelConfig(layers=2, width=32, heads=2), V)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for step in range(150):
        tokens = (torch.randint(0, V, (32, 1)) + torch.arange(8)) % V
        counted = torch.ones_like(tokens, dtype=torch.bool)
        noised = corrupt(
            tokens,
            counted,
            block_size=4,
            mask_id=V,
            noise=NoiseConfig(),
            key=NoiseKey(0, step, torch.arange(32), 32),
        )
        chosen = noised.masked_BKL.flatten().nonzero().squeeze(-1)
        plan = model.plan(torch.zeros_like(tokens), 4, 1)
        loss, _ = model.weighted_nll(noised.xt_BKL, tokens, plan, chosen, noised.weight_BKL.flatten()[chosen])
        optimizer.zero_grad()
        (loss / counted.sum()).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


class Forgetful(Denoiser):
    """Ignores the prefix: every block is a document of its own."""

    def plan(self, document_BL, block_size, views=1):
        block = torch.arange(document_BL.shape[1]) // block_size
        return super().plan(block.expand_as(document_BL), block_size, views)


def test_a_model_that_ignores_its_prefix_shows_at_the_border(counter):
    tokens = (torch.arange(V)[:, None] + torch.arange(8)) % V
    loader = batches(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool), torch.arange(V))
    forgetful = Forgetful(counter.config, V)
    forgetful.load_state_dict(counter.state_dict())
    whole = border_jump(left_to_right_nats(counter, loader, block_size=4), 4)
    broken = border_jump(left_to_right_nats(forgetful, loader, block_size=4), 4)
    assert abs(whole.to_interior.value) < 0.3
    assert broken.to_interior.value > 1.2  # log 7 = 1.95 nats of a start that has to be guessed
    assert broken.to_interior.excludes_zero
