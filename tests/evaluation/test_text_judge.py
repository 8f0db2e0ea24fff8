"""A judge with tokens of its own: against the plain loop over its tokens, and against characters counted by hand."""

import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the extra hf is not installed")

from models import tiny
from pretrained_models import CORPUS, save_model

from blockdiff.composition import load_config
from blockdiff.data.config import DataConfig
from blockdiff.data.documents import Document
from blockdiff.data.prepare import prepare
from blockdiff.data.sources import Source
from blockdiff.data.tokenizer import TokenizerKind, byte_tokenizer, train_bpe
from blockdiff.evaluation import text_judge
from blockdiff.evaluation.config import SamplesConfig, SpeedConfig, SweepConfig
from blockdiff.evaluation.measure import Subject, measure_reference, measure_samples
from blockdiff.evaluation.passages import Passage
from blockdiff.evaluation.sweep import Kind, Model, plan_cells
from blockdiff.evaluation.text_judge import TextJudge, text_and_starts
from blockdiff.model.pretrained import load_pretrained
from blockdiff.sampling.config import Rule, SamplerConfig

BYTES = byte_tokenizer()
PAIRS = [
    ("the red", " cat sat on the mat, and the old dog"),
    ("", "the hat"),
    ("the naï", "ve café – 20 €"),
    ("a", ""),
    ("", "x"),
    ("the old d", "og"),
]


def passage(given, new, tokenizer=BYTES):
    return Passage(tokenizer.encode(given), tokenizer.encode(new))


@pytest.fixture(scope="module", params=[("gpt2", "<|endoftext|>"), ("llama", "<|endoftext|>"), ("llama", None)])
def model(request, tmp_path_factory):
    kind, bos = request.param
    directory = save_model(tmp_path_factory.mktemp("hf") / kind, kind, bos=bos)
    return load_pretrained(directory, "judge", torch.device("cpu"), torch.float64)


def plain(model, given, new):
    """Nats and characters of the judged tokens, one token after the other, each behind its prefix alone."""
    ids, begins = model.encode(given + new)
    bos = [] if model.bos_id is None else [model.bos_id]
    nats, at = [], []
    for place in range(len(ids)):
        prefix = bos + ids[:place]
        if begins[place] < len(given) or not prefix or not new:
            continue
        logits = model.model(input_ids=torch.tensor([prefix])).logits[0, -1]
        nats.append(-logits.log_softmax(-1)[ids[place]].item())
        at.append(begins[place])
    return nats, at


def test_the_judge_equals_the_plain_loop_whatever_else_is_read(model):
    read = TextJudge(model, BYTES, batch_size=4).read([passage(*pair) for pair in PAIRS])
    for (given_text, new), judgement in zip(PAIRS, read, strict=True):
        nats, at = plain(model, given_text, new)
        np.testing.assert_allclose(judgement.nats_M, nats, atol=1e-9)
        # A byte is a token of the passage: the byte in which each judged token's first character begins.
        text = given_text + new
        assert judgement.place_M.tolist() == [len(text[:place].encode()) for place in at]
        assert judgement.byte_count == (len(text[at[0] :].encode()) if at else 0)
        assert (judgement.feature_D is None) == (not at)


def test_a_judgement_does_not_depend_on_company_or_batch(model, monkeypatch):
    passages = [passage(*pair) for pair in PAIRS]
    alone = [TextJudge(model, BYTES).read([p])[0] for p in passages]
    for batch_size, order, memory in (
        (2, [3, 1, 0, 2, 5, 4], 2**26),
        (16, [5, 4, 3, 2, 1, 0], 2**26),
        (16, [0, 1, 2, 3, 4, 5], 1),
    ):
        monkeypatch.setattr(text_judge, "LOGITS_PER_PASS", memory)
        together = TextJudge(model, BYTES, batch_size).read([passages[i] for i in order])
        for index, judgement in zip(order, together, strict=True):
            np.testing.assert_allclose(judgement.nats_M, alone[index].nats_M, atol=1e-9)
            if alone[index].feature_D is not None:
                np.testing.assert_allclose(judgement.feature_D, alone[index].feature_D, atol=1e-9)


def test_features_are_the_states_that_predict(model):
    """At the last layer: the head of the model on them gives the nats."""
    (judgement,) = TextJudge(model, BYTES).read([passage("the red", " cat sat")])
    ids, _ = model.encode("the red cat sat")
    bos = [] if model.bos_id is None else [model.bos_id]
    found = model.model(input_ids=torch.tensor([bos + ids]), output_hidden_states=True).hidden_states[-1][0]
    count = len(judgement.nats_M)
    np.testing.assert_allclose(judgement.feature_D, found[-1 - count : -1].mean(0).detach().numpy(), atol=1e-9)


@pytest.mark.parametrize("bos", ["<|endoftext|>", None])
def test_long_texts_are_read_in_windows(tmp_path, bos):
    directory = save_model(tmp_path / "short", context=9, bos=bos)
    model = load_pretrained(directory, "judge", torch.device("cpu"), torch.float64)
    new = " the hat, the old dog and – xyz – a café. the red cat sat on"
    (judgement,) = TextJudge(model, BYTES, batch_size=3).read([passage("the red", new)])
    ids, begins = model.encode("the red" + new)
    head = [] if model.bos_id is None else [model.bos_id]
    room = 9 - len(head)
    start = next(i for i, begin in enumerate(begins) if begin >= 7)
    assert len(ids) > 2 * room
    slow, edge = [], max(room, start + room // 2)
    for place in range(start, len(ids)):
        if place == edge:  # the next half window
            edge += room // 2
        left = max(min(edge, len(ids)) - room, 0)
        logits = model.model(input_ids=torch.tensor([head + ids[left:place]])).logits[0, -1]
        slow.append(-logits.log_softmax(-1)[ids[place]].item())
    np.testing.assert_allclose(judgement.nats_M, slow, atol=1e-9)


def test_tokens_belong_to_where_they_begin():
    """The passage's tokens against the judge's, on characters: borders need no common cut."""
    ours = train_bpe(["the red cat sat"] * 9, 290)
    ids = ours.encode("the red cat")
    text, starts = text_and_starts(ours, ids)
    assert text == "the red cat"
    assert [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)] == [ours.decode([i]) for i in ids]


@example([0xED, 0xA0, 0])  # no character begins with these two bytes
@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 256), st.sampled_from(list("é€😀".encode()))), max_size=12))
def test_starts_on_any_bytes(ids):
    """Broken characters too: the text is that of the whole, and each character has one token it begins in."""
    text, starts = text_and_starts(BYTES, ids)
    data = bytes(i for i in ids if i < 256)
    assert text == data.decode("utf-8", "replace") == BYTES.decode(ids)
    seen, expected = 0, []
    for index in ids:
        expected.append(len(data[:seen].decode("utf-8", "replace")))
        seen += index < 256
    assert starts == expected


def test_starts_of_a_tokenizer_of_words(tmp_path):
    from blockdiff.data.tokenizer import Tokenizer

    path = tmp_path / "tokenizer.json"
    vocabulary = {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3, "[SEP]": 4}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [{"id": 4, "content": "[SEP]", **special}],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
                "model": {
                    "type": "WordPiece",
                    "unk_token": "[UNK]",
                    "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 100,
                    "vocab": vocabulary,
                },
            }
        )
    )
    tokenizer = Tokenizer.load(path)
    assert text_and_starts(tokenizer, tokenizer.encode("the cats the")) == ("the cats the", [0, 3, 7, 8])


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    place = tmp_path_factory.mktemp("corpus")
    (place / "text.txt").write_text("\n".join(f"{line} {n}" for n in range(20) for line in CORPUS))
    config = DataConfig(
        source=Source.text,
        files=str(place / "text.txt"),
        root=str(place / "data"),
        document=Document.line,
        val_fraction=0.3,
        tokenizer=TokenizerKind.bytes,
    )
    return Subject(tiny(vocab=257).float(), prepare(config), 4, 4, 64, True)


def test_a_cell_of_a_sweep_with_another_judge(subject, tmp_path):
    directory = save_model(tmp_path / "gpt2")
    judge = TextJudge(load_pretrained(directory, "judge", torch.device("cpu"), torch.float32), BYTES)
    samples = SamplesConfig(prompts=3, candidates=2, prompt_tokens=8, new_tokens=12)
    speed = SpeedConfig(prompts=1, shortest_prompt=4, longest_prompt=4, new_tokens=4, batch_sizes=[1], repeats=1)
    numbers = measure_samples(subject, SamplerConfig(rule=Rule.first_hitting), samples, speed, judge).numbers
    row = numbers["prompted"]
    assert numbers["judge"] == judge.description
    for part in ("GPT2LMHeadModel", "vocabulary of 297", "begin with <|endoftext|>", "64 tokens"):
        assert part in numbers["judge"]
    assert sum(text["tokens"] for text in numbers["prompted_texts"]) == row["judge_tokens"] > 0
    total = sum(text["nats"] for text in numbers["prompted_texts"])
    assert row["judge_nats"]["value"] == pytest.approx(total / row["judge_tokens"])
    assert 0 < row["judge_bits_per_byte"]["value"] < np.inf
    assert np.isfinite(row["border_nats"]["value"])
    assert np.isfinite(row["energy_distance"])
    reference = measure_reference(subject, samples, judge).numbers
    assert reference["judge"] == judge.description
    assert np.isfinite(reference["real_prompted"]["judge_bits_per_byte"]["value"])


def test_the_reference_is_of_a_model_that_has_a_corpus():
    models = [Model(f"b{size}", f"runs/b{size}", size, size, [f"block_size={size}"]) for size in (4, 1)]
    cells = plan_cells(SweepConfig(judge="hf:models/gpt2"), models, 4)
    (reference,) = (cell for cell in cells if cell.kind is Kind.reference)
    assert reference.needs == ["train-b1"]
    assert {"checkpoint=runs/b1", "judge=hf:models/gpt2"} <= set(reference.command)
    sampled = [cell for cell in cells if cell.kind is Kind.samples]
    assert all("judge=hf:models/gpt2" in cell.command for cell in sampled)
    assert all(cell.needs == [f"train-{cell.model}"] for cell in sampled)
    given_alone = plan_cells(SweepConfig(judge="hf:models/gpt2"), [Model("a", "runs/a", 4, 4, None)], 4)
    assert "checkpoint=runs/a" in next(cell.command for cell in given_alone if cell.kind is Kind.reference)


def test_the_command_line_takes_the_spelling():
    config = load_config(
        "measure", ["checkpoint=a", "output=b.json", "part=samples", "judge=hf:/some/where/gpt2-x_1.0"]
    )
    assert config.judge == "hf:/some/where/gpt2-x_1.0"
