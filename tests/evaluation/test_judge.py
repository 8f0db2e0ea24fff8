"""The judge against the plain loop, passages, the table's row, and the speed protocol's counting."""

import math

import numpy as np
import pytest
import torch
from models import V, tiny

from blockdiff.data.store import ShardWriter, TokenStore
from blockdiff.data.tokenizer import byte_tokenizer
from blockdiff.evaluation.coherence import border_interval, byte_interval, measure_coherence
from blockdiff.evaluation.config import SamplesConfig, SpeedConfig
from blockdiff.evaluation.copies import TrainingText
from blockdiff.evaluation.judge import DenoiserJudge, Judgement
from blockdiff.evaluation.passages import Passage, choose_passages, shuffled, without_prompt
from blockdiff.evaluation.throughput import measure_speed, protocol, speed_prompts
from blockdiff.sampling.config import Rule, SamplerConfig


def store(directory, documents):
    writer = ShardWriter(directory, "val", 100)
    for document in documents:
        writer.append([document], [True], len(document))
    return TokenStore(directory, "val", writer.close())


def test_the_judge_equals_the_plain_loop_whatever_else_is_read():
    model = tiny()
    passages = [Passage([1, 2], [3, 4, 5]), Passage([], [6, 0]), Passage([1], [])]
    read = DenoiserJudge(model, byte_tokenizer(), 8, batch_size=2).read(passages)
    for passage, judgement in zip(passages, read, strict=True):
        tokens = passage.given + passage.new
        slow = []
        for place in range(len(passage.given), len(tokens)):
            cache = model.new_cache(1, 8)
            if place:
                model.commit(torch.tensor([tokens[:place]]), cache)
            log_p = model.denoise(torch.tensor([[V]]), cache)[0, 0].log_softmax(-1)
            slow.append(-log_p[tokens[place]].item())
        np.testing.assert_allclose(judgement.nats_M, slow, atol=1e-10)
        assert judgement.place_M.tolist() == list(range(len(passage.given), len(tokens)))
        assert judgement.byte_count == len(passage.new)
    assert read[2].feature_D is None
    assert read[0].feature_D.shape == (16,)
    with pytest.raises(ValueError, match="seq_len=4"):
        DenoiserJudge(model, byte_tokenizer(), 4).read(passages)


def test_passages_start_documents_or_are_cut_from_within(tmp_path):
    config = SamplesConfig(prompts=2, prompt_tokens=2, new_tokens=3)
    long = [[2, 3, 4, 5, 6, 7], [8] * 5, [9] * 6, [10] * 7]
    many = choose_passages(store(tmp_path, [[1] * 4, *long]), config)
    assert many.passages == [Passage([2, 3], [4, 5, 6]), Passage([9, 9], [9, 9, 9])]
    assert many.others == [Passage([8, 8], [8, 8, 8]), Passage([10, 10], [10, 10, 10])]
    assert "beginnings" in many.origin
    single = choose_passages(store(tmp_path, [list(range(40))]), config)
    assert single.passages == [Passage([0, 1], [2, 3, 4]), Passage([20, 21], [22, 23, 24])]
    assert single.others == [Passage([10, 11], [12, 13, 14]), Passage([30, 31], [32, 33, 34])]
    assert "within" in single.origin
    with pytest.raises(ValueError, match="room for 3 passages of 5 tokens"):
        choose_passages(store(tmp_path, [list(range(19))]), config)
    mixed = shuffled(single.passages, 1)
    assert [sorted(p.new) for p in mixed] == [[2, 3, 4], [22, 23, 24]]
    assert without_prompt(single.passages)[0] == Passage([], [0, 1, 2])


def test_border_difference_by_hand():
    # Block size 2, two given tokens: new tokens at 2, 3, 4, 5; the borders are 2 and 4.
    judged = [
        Judgement(np.array([5.0, 1.0, 4.0, 2.0]), np.arange(2, 6), 4, None),
        Judgement(np.array([9.0, 9.0]), np.arange(2), 2, None),
    ]
    assert border_interval(judged, 2).value == pytest.approx(4.5 - 1.5)
    assert math.isnan(border_interval(judged, 1).value)
    # A judge of other tokens: two begin in the first token of a block, one in its second, none in the last block.
    other = [Judgement(np.array([5.0, 3.0, 1.0]), np.array([2, 2, 3]), 6, None)]
    assert border_interval(other, 2).value == pytest.approx(4 - 1)


def test_bits_per_byte_by_hand():
    judged = [Judgement(np.array([1.0, 3.0]), np.arange(2), 6, None), Judgement(np.array([2.0]), np.arange(1), 2, None)]
    assert byte_interval(judged).value == pytest.approx(6 / math.log(2) / 8)
    assert math.isnan(byte_interval([]).value)


def test_a_row_counts_empty_texts_and_keeps_them():
    judge = DenoiserJudge(tiny(), byte_tokenizer(), 8)
    groups = [[Passage([1], [2, 3, 2, 3, 2, 3]), Passage([1], [])], [Passage([4], [5, 6, 0, 1, 2, 3])] * 2]
    row = measure_coherence(
        groups,
        ["x = 1", "", "y =", "z = 1"],
        judged=judge.read([p for g in groups for p in g]),
        real=judge.read([Passage([1], [2, 2]), Passage([1], [4, 5])]),
        training=TrainingText(np.array([5, 6, 0, 9, 2, 3])),
        block_size=2,
    )
    assert (row.texts, row.empty, row.new_tokens) == (4, 1, 18)
    assert row.self_overlap == pytest.approx(0.5)  # nothing in common with the empty one, alike in the second group
    assert (row.match_mean, row.match_longest) == ((2 + 0 + 3 + 3) / 4, 3)
    assert row.loops == pytest.approx(1 / 3)
    assert row.parses == 0.5
    nats = sum(j.nats_M.sum() for j in judge.read([p for g in groups for p in g]))
    assert row.judge_nats.value == pytest.approx(nats / 18)
    assert row.judge_tokens == 18
    assert row.judge_bits_per_byte.value == pytest.approx(nats / 18 / math.log(2))  # a byte a token
    assert math.isfinite(row.energy_distance)
    blind = measure_coherence(groups, None, judged=[], real=[], training=TrainingText(np.array([1])), block_size=2)
    assert math.isnan(blind.judge_nats.value)
    assert math.isnan(blind.parses)


def test_speed_counts_new_tokens_only(tmp_path):
    model = tiny(vocab=100).float()
    text = store(tmp_path, [list(range(100))])
    config = SpeedConfig(prompts=5, shortest_prompt=2, longest_prompt=6, new_tokens=8, batch_sizes=[1, 3], repeats=2)
    prompts = speed_prompts(text, config)
    assert sorted(len(p) for p in prompts) == [2, 3, 4, 5, 6]
    sampler = SamplerConfig(rule=Rule.first_hitting)
    one, three = measure_speed(model, prompts, sampler, config, block_size=2, seq_len=16)
    assert (one.batch_size, three.batch_size) == (1, 3)
    for speed in (one, three):
        low, high = speed.tokens_per_second_spread
        assert 0 < low <= speed.tokens_per_second <= high
        assert speed.latency_p50_ms <= speed.latency_p95_ms
        # One token a call, and a call for prompts that are longer than the block that is committed in passing.
        assert 8 <= speed.nfe <= 10
        assert speed.tokens_per_forward == pytest.approx(8 / speed.nfe)
    assert one.nfe == three.nfe
    facts = protocol(model, config, block_size=2, seq_len=16)
    assert facts["precision"] == "float32"
    assert facts["new_tokens"] == 8
    with pytest.raises(ValueError, match=r"speed\.repeats=0"):
        SpeedConfig(repeats=0).check()
