"""Bounds of continuations against the chain rule, and the harness model (where lm-eval is installed)."""

import json
from pathlib import Path

import pytest
import torch
from models import tiny

from blockdiff.api import LanguageModel
from blockdiff.config import TrainConfig
from blockdiff.data.tokenizer import byte_tokenizer
from blockdiff.evaluation.judge import DenoiserJudge
from blockdiff.evaluation.likelihood import score_continuations
from blockdiff.evaluation.passages import Passage, rolling_windows

PASSAGES = [Passage([1, 2, 3], [4, 5]), Passage([], [6, 0, 1]), Passage([5], [])]


def test_block_size_1_is_the_judges_exact_value():
    model = tiny()
    bounds = score_continuations(model, PASSAGES, seq_len=8, block_size=1, views=2)
    for bound, judgement in zip(bounds, DenoiserJudge(model, byte_tokenizer(), 8).read(PASSAGES), strict=True):
        assert bound.nats == pytest.approx(judgement.nats_M.sum(), abs=1e-9)
        assert bound.variance == 0


def test_one_token_behind_given_ones_is_exact():
    """A single new token has one mask, whatever the block size: the given tokens of its block stay visible."""
    model = tiny()
    bound = score_continuations(model, [Passage([1, 2, 3, 4, 5], [6])], seq_len=8, block_size=4, views=2)[0]
    cache = model.new_cache(1, 8)
    model.commit(torch.tensor([[1, 2, 3, 4]]), cache, block_size=4)
    mask = model.mask_id
    log_p = model.denoise(torch.tensor([[5, mask, mask, mask]]), cache)[0, 1].log_softmax(-1)
    assert bound.nats == pytest.approx(-log_p[6].item(), abs=1e-10)
    assert bound.variance == pytest.approx(0)


def test_scores_do_not_depend_on_company():
    model = tiny()
    together = score_continuations(model, PASSAGES, seq_len=8, block_size=4, views=4)
    alone = [score_continuations(model, [p], seq_len=8, block_size=4, views=4)[0] for p in PASSAGES]
    assert [b.nats for b in together] == pytest.approx([b.nats for b in alone], abs=1e-9)


def test_long_context_loses_its_beginning():
    model = tiny()
    long, short = Passage([0, 0, 0, 1, 2, 3, 4], [5, 6]), Passage([0, 1, 2, 3, 4], [5, 6])
    one, two = score_continuations(model, [long, short], seq_len=7, block_size=1, views=2)
    assert one.nats == pytest.approx(two.nats)
    with pytest.raises(ValueError, match="seq_len=4"):
        score_continuations(model, [Passage([], [1] * 5)], seq_len=4, block_size=1, views=2)


@pytest.fixture
def lm(monkeypatch):
    harness = pytest.importorskip("blockdiff.harness", reason="lm-eval (extra eval) is not installed")
    tokenizer = byte_tokenizer()
    config = TrainConfig(block_size=4, seq_len=32)
    model = LanguageModel(config, tokenizer, tiny(vocab=tokenizer.vocab_size).float(), 0, Path("made"))
    monkeypatch.setattr(harness, "load", lambda *arguments: model)
    return harness.BlockDiffusionLM("made", views=4)


def test_the_harness_model_answers(lm):
    from lm_eval.api.instance import Instance

    def ask(kind, *arguments):
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    (bound, greedy), (empty, _) = lm.loglikelihood(
        [ask("loglikelihood", "two words ", "more"), ask("loglikelihood", "", "x")]
    )
    expected = score_continuations(
        lm.model.denoiser, [Passage(list(b"two words"), list(b" more"))], seq_len=32, block_size=4, views=4
    )[0]
    assert bound == pytest.approx(-expected.nats, rel=1e-5)
    assert bound < 0 > empty
    assert greedy is False
    text = "a text that is longer than the context of the model, which is short"
    (rolling,) = lm.loglikelihood_rolling([ask("loglikelihood_rolling", text)])
    assert rolling < -len(text)
    settings = {"until": ["\n"], "max_gen_toks": 5}
    first, again = lm.generate_until([ask("generate_until", "ab", settings), ask("generate_until", "ab", settings)])
    assert first == again  # greedy, so noise does not matter
    assert "lower bound" in lm.get_model_info()["log_likelihood"]


def test_rolling_windows_score_each_token_once():
    tokens = list(range(21))
    windows = rolling_windows(Passage([], tokens), 8)
    assert [t for w in windows for t in w.new] == tokens
    assert all(len(w.given) + len(w.new) <= 8 for w in windows)
    assert windows[1] == Passage([4, 5, 6, 7], [8, 9, 10, 11])
    assert windows[-1].given == tokens[13:20]
    assert rolling_windows(Passage([], []), 8) == []


@pytest.mark.parametrize("given", [0, 1, 3, 4, 7, 8, 20, 21])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 21, 30])
def test_rolling_windows_keep_half_a_window_of_context(given, length):
    tokens = list(range(21))
    windows = rolling_windows(Passage(tokens[:given], tokens[given:]), length)
    assert [t for w in windows for t in w.new] == tokens[given:]
    for window in windows:
        assert len(window.tokens) <= length
        start = window.new[0]
        assert window.tokens == tokens[start - len(window.given) : window.new[-1] + 1]
        assert len(window.given) >= min(start, length - max(length // 2, 1))


def test_a_small_local_task(lm, tmp_path):
    from lm_eval import simple_evaluate

    rows = [{"question": f"{n} and one is", "choices": [str(n + 1), "none"], "answer": 0} for n in range(4)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    task = {
        "task": "counting",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    found = simple_evaluate(model=lm, tasks=[task], bootstrap_iters=0, log_samples=False)
    assert 0 <= found["results"]["counting"]["acc,none"] <= 1
    assert "lower bound" in found["config"]["log_likelihood"]
