"""On a tiny trained model: real text < samples < shuffled text, and a break at every block border is found."""

import numpy as np
import pytest
import torch
from models import V

from blockdiff.core.corruption import NoiseConfig, NoiseKey, corrupt
from blockdiff.data.tokenizer import byte_tokenizer
from blockdiff.evaluation.coherence import measure_coherence
from blockdiff.evaluation.copies import TrainingText
from blockdiff.evaluation.judge import DenoiserJudge
from blockdiff.evaluation.passages import Passage, shuffled
from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.sampling.config import Rule, SamplerConfig
from blockdiff.sampling.sampler import generate

LENGTH = 16


def counting(rows, seed):
    """Texts that go up by one from a random start, and skip a number now and then."""
    generator = np.random.default_rng(seed)
    steps = 1 + (generator.random((rows, LENGTH)) < 0.1)
    return torch.from_numpy(np.cumsum(steps, 1) + generator.integers(0, V, (rows, 1))) % V


def train(block_size, steps):
    torch.manual_seed(0)
    model = Denoiser(ModelConfig(layers=2, width=32, heads=2), V)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for step in range(steps):
        tokens = counting(32, step)
        counted = torch.ones_like(tokens, dtype=torch.bool)
        key = NoiseKey(0, step, torch.arange(32), 32)
        noised = corrupt(tokens, counted, block_size=block_size, mask_id=V, noise=NoiseConfig(), key=key)
        chosen = noised.masked_BKL.flatten().nonzero().squeeze(-1)
        plan = model.plan(torch.zeros_like(tokens), block_size, 1)
        loss, _ = model.weighted_nll(noised.xt_BKL, tokens, plan, chosen, noised.weight_BKL.flatten()[chosen])
        optimizer.zero_grad()
        (loss / counted.sum()).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def judge():
    return DenoiserJudge(train(1, 120), byte_tokenizer(), LENGTH)


@pytest.fixture(scope="module")
def model():
    return train(4, 120)


def measure(passages, judge):
    groups = [[passage] for passage in passages]
    real = [Passage([], row) for row in counting(24, 99).tolist()]
    training = TrainingText(np.zeros(1, np.int64))
    judged, reference = judge.read(passages), judge.read(real)
    return measure_coherence(groups, None, judged=judged, real=reference, training=training, block_size=4)


def texts(model, prompts, new_tokens, rule, **more):
    sampler = SamplerConfig(rule=rule, max_new_tokens=new_tokens, **more)
    return [g.token_ids for g in generate(model, prompts, sampler, block_size=4, seq_len=LENGTH)]


def test_real_samples_shuffled(judge, model):
    real = [Passage([], row) for row in counting(24, 7).tolist()]
    one_step = [Passage([], ids) for ids in texts(model, [[]] * 24, LENGTH, Rule.ancestral, steps=2)]
    rows = [measure(passages, judge) for passages in (real, one_step, shuffled(real, 0))]
    nats = [row.judge_nats.value for row in rows]
    assert nats[0] + 0.1 < nats[1] < nats[2] - 0.1
    distances = [row.energy_distance for row in rows]
    assert distances[0] < distances[1]
    assert distances[0] < distances[2]


def test_a_model_that_ignores_its_prefix_breaks_at_borders(judge, model):
    whole = [Passage([], ids) for ids in texts(model, [[]] * 24, LENGTH, Rule.first_hitting)]
    alone = texts(model, [[]] * 96, 4, Rule.first_hitting)  # every block is written as if nothing stood before it
    broken = [Passage([], [token for ids in alone[i : i + 4] for token in ids]) for i in range(0, 96, 4)]
    coherent, incoherent = measure(whole, judge), measure(broken, judge)
    assert incoherent.border_nats.low > 0.5
    assert coherent.border_nats.value < 0.5 * incoherent.border_nats.value
    assert incoherent.judge_nats.value > coherent.judge_nats.value + 0.2
