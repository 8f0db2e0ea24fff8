"""The block loop against hand-computed texts and NFE, and batches against rows alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from oracle import ByteTokenizer, OracleDenoiser, says

from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.sampling.config import Order, Rule, SamplerConfig
from blockdiff.sampling.report import Generation
from blockdiff.sampling.sampler import generate, stream

PLANNED = [
    SamplerConfig(rule=Rule.ancestral, steps=3),
    SamplerConfig(rule=Rule.first_hitting),
    SamplerConfig(rule=Rule.fixed, order=Order.random, tokens_per_step=2),
    SamplerConfig(rule=Rule.fixed, order=Order.left_to_right),
]
OTHERS = [
    SamplerConfig(rule=Rule.confidence, threshold=0.3),
    SamplerConfig(rule=Rule.factor, factor=1.5),
    SamplerConfig(rule=Rule.entropy_bound, entropy_bound=1.0),
    *(SamplerConfig(rule=Rule.fixed, order=order) for order in (Order.confidence, Order.margin, Order.entropy)),
]


def name(config: SamplerConfig) -> str:
    return config.rule.value + (f"-{config.order.value}" if config.rule is Rule.fixed else "")


@pytest.fixture(scope="module")
def denoiser() -> Denoiser:
    torch.manual_seed(0)
    model = Denoiser(ModelConfig(layers=2, width=32, heads=4, kv_heads=2), 13).double().eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model


PROMPTS = [[1, 2, 3], [], [4] * 8, [5] * 9, list(range(1, 13)), [7] * 21, [6, 6, 6, 6]]


def tokens_and_cost(generations: list[Generation]) -> list[tuple[object, ...]]:
    return [(g.token_ids, g.nfe, g.commit_nfe, g.finish_reason) for g in generations]


@pytest.mark.parametrize("remask", [0.0, 0.5])
@pytest.mark.parametrize("config", PLANNED + OTHERS, ids=name)
def test_batch_of_ragged_prompts_equals_rows_alone(denoiser: Denoiser, config: SamplerConfig, remask: float) -> None:
    config = replace(config, max_new_tokens=11, batch_size=3, remask=remask)
    together = generate(denoiser, PROMPTS, config, block_size=4, seq_len=32, eos_id=0)
    backwards = generate(denoiser, PROMPTS[::-1], config, block_size=4, seq_len=32, eos_id=0)
    alone = [generate(denoiser, [p], config, block_size=4, seq_len=32, eos_id=0)[0] for p in PROMPTS]
    assert tokens_and_cost(together) == tokens_and_cost(alone)
    assert tokens_and_cost(backwards[::-1]) == tokens_and_cost(alone)
    assert len({g.nfe for g in alone}) > 1, "the case should hold rows of unlike cost"


def test_single_precision_logits_hardly_depend_on_companions(denoiser: Denoiser) -> None:
    single = Denoiser(denoiser.config, denoiser.vocab_size).eval()
    single.load_state_dict(denoiser.state_dict())
    config = SamplerConfig(max_new_tokens=8, logprobs=True)
    together = generate(single, PROMPTS, config, block_size=4, seq_len=32)
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = generate(single, [prompt], config, block_size=4, seq_len=32)[0]
        assert row.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_copies_of_a_prompt_differ_and_seeds_reproduce(denoiser: Denoiser) -> None:
    config = SamplerConfig(max_new_tokens=12)
    run = lambda seed: [  # noqa: E731
        g.token_ids for g in generate(denoiser, [[1]] * 6, replace(config, seed=seed), block_size=4, seq_len=16)
    ]
    assert len({tuple(ids) for ids in run(3)}) == 6
    assert run(3) == run(3) != run(4)


TEXT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7]
SURE = [0.97, 0.95, 0.6, 0.9, 0.99, 0.5, 0.4, 0.3, 0.96, 0.5, 0.99, 0.95]


@pytest.mark.parametrize(
    ("config", "calls_by_block"),
    [
        (SamplerConfig(rule=Rule.first_hitting), [4, 4, 4]),
        (SamplerConfig(rule=Rule.fixed, order=Order.left_to_right, tokens_per_step=3), [2, 2, 2]),
        (SamplerConfig(rule=Rule.fixed, order=Order.random, steps=3), [3, 3, 3]),
        (SamplerConfig(rule=Rule.fixed, order=Order.confidence, tokens_per_step=3), [2, 2, 2]),
        (SamplerConfig(rule=Rule.fixed, order=Order.margin, steps=4), [4, 4, 4]),
        (SamplerConfig(rule=Rule.fixed, order=Order.entropy, tokens_per_step=4), [1, 1, 1]),
        # Above 0.9 at once, then one by one: block 1 {0, 1, 3} + {2}, block 2 {0} + 3 single, block 3 {0, 2,
        # 3} + {1}.
        (SamplerConfig(rule=Rule.confidence, threshold=0.9), [2, 4, 2]),
        (SamplerConfig(rule=Rule.confidence, threshold=0.45), [1, 3, 1]),
        (SamplerConfig(rule=Rule.confidence, threshold=1.0), [4, 4, 4]),
        # Factor 0.19, block 1: 2·0.03 and 3·0.05 are below, 4·0.1 is not -> {0, 1}; then 2·0.1 is not -> one,
        # and the last. Block 2: 2·0.01 is below, 3·0.5 is not -> one a step. Block 3: 2·0.01, 3·0.04 -> two,
        # then one, then the last.
        (SamplerConfig(rule=Rule.factor, factor=0.19), [3, 4, 3]),
    ],
)
def test_text_and_nfe_of_an_oracle(config: SamplerConfig, calls_by_block: list[int]) -> None:
    oracle = OracleDenoiser(says(TEXT, SURE, 9), 9)
    config = replace(config, temperature=0.0, max_new_tokens=12, logprobs=True)
    events = list(stream(oracle, [[]], config, block_size=4, seq_len=12))
    row = events[-1].generation
    assert row is not None
    assert row.token_ids == TEXT
    assert [e.nfe for e in events] == [sum(calls_by_block[: i + 1]) for i in range(3)]
    assert (row.nfe, row.commit_nfe, row.finish_reason) == (sum(calls_by_block), 0, "length")
    assert row.logprobs == pytest.approx(torch.tensor(SURE).log().tolist(), abs=1e-6)
    assert oracle.calls.count("both") == 2
    assert oracle.calls.count("commit") == 0, "the last block is nobody's prefix"


def test_steps_at_which_an_oracles_tokens_were_fixed() -> None:
    config = SamplerConfig(threshold=0.9, temperature=0.0, max_new_tokens=8, logprobs=True)
    row = generate(OracleDenoiser(says(TEXT, SURE, 9), 9), [[]], config, block_size=4, seq_len=8)[0]
    assert row.steps == [1, 1, 2, 1, 1, 2, 3, 4]


def entropy_of(p: float, vocab: int) -> float:
    rest = torch.full((vocab - 1,), (1 - p) / (vocab - 1), dtype=torch.float64)
    return float(-(p * torch.tensor(p, dtype=torch.float64).log() + (rest * rest.log()).sum()))


def test_entropy_bound_by_hand() -> None:
    low = [entropy_of(p, 9) for p in (0.97, 0.95)]
    # Sums before the last term: 0, H(.97), H(.97) + H(.95): a bound between the last two takes two positions.
    config = SamplerConfig(
        rule=Rule.entropy_bound,
        entropy_bound=low[0] + 0.5 * low[1],
        temperature=0.0,
        max_new_tokens=4,
        logprobs=True,
    )
    row = generate(OracleDenoiser(says(TEXT, SURE, 9), 9), [[]], config, block_size=4, seq_len=4)[0]
    assert row.steps is not None
    assert [step == 1 for step in row.steps] == [True, True, False, False]


def test_ancestral_calls_are_the_filled_cells_of_the_grid() -> None:
    from blockdiff.core.randomness import uniform
    from blockdiff.sampling.noise import Draw, plan_words, request_key

    config = SamplerConfig(rule=Rule.ancestral, steps=3, temperature=0.0, max_new_tokens=12, logprobs=True)
    row = generate(OracleDenoiser(says(TEXT, SURE, 9), 9), [[]], config, block_size=4, seq_len=12)[0]
    key_1 = torch.tensor([request_key(0, [0], 0)])
    level = uniform(plan_words(Draw.REVEAL, key_1, torch.arange(12)[None], 0), torch.float64)[0]
    cells = (level * 3).long().view(3, 4).tolist()
    assert row.nfe == sum(len(set(block)) for block in cells)
    assert row.steps == [sorted(set(block)).index(cell) + 1 for block in cells for cell in block]


def oracle_of(text: list[int], vocab: int = 9) -> OracleDenoiser:
    return OracleDenoiser(says(text, [0.99] * len(text), vocab), vocab)


@pytest.mark.parametrize(
    ("given", "nfe", "commit_nfe"),
    [
        (0, 8, 0),  # two blocks, one token a step
        (3, 5, 0),  # one position left in the first block
        (4, 4, 0),  # a prompt of one block rides on the first step
        (5, 3, 0),
        (7, 1, 0),
    ],
)
def test_prompts_around_a_block_border(given: int, nfe: int, commit_nfe: int) -> None:
    text = TEXT[:8]
    config = SamplerConfig(rule=Rule.first_hitting, temperature=0.0, max_new_tokens=8 - given)
    row = generate(oracle_of(text), [text[:given]], config, block_size=4, seq_len=8)[0]
    assert row.token_ids == text[given:]
    assert (row.nfe, row.commit_nfe, row.prompt_tokens, row.new_tokens) == (nfe, commit_nfe, given, 8 - given)


def test_long_prompts_are_prefilled_but_for_their_last_block() -> None:
    text = (TEXT * 4)[:20]
    config = SamplerConfig(rule=Rule.first_hitting, temperature=0.0, max_new_tokens=3)
    oracle = oracle_of(text)
    row = generate(oracle, [text[:13]], config, block_size=4, seq_len=20)[0]
    assert row.token_ids == text[13:16]
    assert (row.nfe, row.commit_nfe) == (4, 1)
    assert oracle.calls == ["commit", "both", "denoise", "denoise"]


@pytest.mark.parametrize("new", [1, 3, 4, 5, 7])
def test_max_new_tokens_cuts_inside_a_block_and_saves_its_calls(new: int) -> None:
    config = SamplerConfig(rule=Rule.first_hitting, temperature=0.0, max_new_tokens=new)
    row = generate(oracle_of(TEXT), [[]], config, block_size=4, seq_len=12)[0]
    assert (row.token_ids, row.nfe, row.finish_reason) == (TEXT[:new], new, "length")


@pytest.mark.parametrize("config", PLANNED + OTHERS, ids=name)
def test_end_of_text_inside_a_block(config: SamplerConfig) -> None:
    text = [3, 1, 4, 1, 5, 8, 6, 8]
    config = replace(config, temperature=0.0, max_new_tokens=8, logprobs=True)
    row = generate(oracle_of(text), [[]], config, block_size=4, seq_len=8, eos_id=8)[0]
    assert (row.token_ids, row.finish_reason, row.new_tokens) == ([3, 1, 4, 1, 5], "eos", 5)
    assert row.logprobs is not None
    assert len(row.logprobs) == 5


def test_adaptive_rules_make_no_calls_for_what_lies_right_of_the_end() -> None:
    sure = [0.5, 0.99, 0.4, 0.3]
    config = SamplerConfig(threshold=0.9, temperature=0.0, max_new_tokens=4)
    row = generate(OracleDenoiser(says([1, 8, 2, 3], sure, 9), 9), [[]], config, block_size=4, seq_len=4, eos_id=8)[0]
    assert (row.token_ids, row.nfe) == ([1], 2)


def test_end_of_text_in_a_prompt_ends_nothing() -> None:
    text = [3, 8, 4, 1, 5, 2, 6, 7]
    config = SamplerConfig(temperature=0.0, max_new_tokens=5)
    row = generate(oracle_of(text), [text[:3]], config, block_size=4, seq_len=8, eos_id=8)[0]
    assert row.token_ids == text[3:]


def test_finished_rows_leave_and_queued_ones_join_at_the_border() -> None:
    texts = {1: [1, 8, 8, 8], 2: [2, 3, 4, 5, 6, 7, 8, 8], 3: [3, 8, 8, 8]}

    def answer(prefix: list[int], block: list[int], place: int) -> list[float]:
        text = texts[(prefix + block)[0]]
        return [0.0 if token == text[len(prefix) + place] else -9.0 for token in range(9)]

    oracle = OracleDenoiser(answer, 9)
    config = SamplerConfig(rule=Rule.first_hitting, temperature=0.0, max_new_tokens=7, batch_size=2)
    events = list(stream(oracle, [[1], [2], [3]], config, block_size=4, seq_len=8, eos_id=8))
    assert [(e.request, e.start) for e in events] == [(0, 0), (1, 0), (1, 4), (2, 0)]
    done = {e.request: e.generation for e in events if e.generation is not None}
    assert [done[i].token_ids for i in range(3)] == [[], [3, 4, 5, 6, 7], []]
    # The third row's block of 3 open positions is settled while the second goes on to its fourth step: it
    # waits.
    assert [done[i].nfe for i in range(3)] == [3, 7, 3]
    assert len(oracle.calls) == 7


def test_one_token_vocabulary() -> None:
    for config in PLANNED + OTHERS:
        config = replace(config, max_new_tokens=6)
        row = generate(OracleDenoiser(lambda prefix, block, place: [0.3], 1), [[0]], config, block_size=4, seq_len=8)[0]
        assert row.token_ids == [0] * 6


def test_stop_string_across_blocks() -> None:
    text = list(b"abc END def xyz.")
    answer = says(text, [0.99] * 16, 256)
    config = SamplerConfig(rule=Rule.first_hitting, temperature=0.0, max_new_tokens=16, stop=["ND d", "zzz"])
    oracle = OracleDenoiser(answer, 256)
    events = list(stream(oracle, [[]], config, block_size=4, seq_len=16, tokenizer=ByteTokenizer()))
    row = events[-1].generation
    assert row is not None
    assert (row.text, row.token_ids, row.finish_reason) == ("abc E", list(b"abc E"), "stop")
    assert "".join(e.text for e in events) == row.text
    assert [e.text for e in events] == ["abc ", "E", ""]
    assert row.nfe == 12, "the fourth block is never begun"


def test_stream_of_several_byte_characters() -> None:
    text = list("añ€𝄞bçd.".encode())
    assert len(text) == 15
    text.append(0xE2)  # a character that is never finished
    config = SamplerConfig(rule=Rule.first_hitting, temperature=0.0, max_new_tokens=16)
    events = list(
        stream(
            OracleDenoiser(says(text, [0.9] * 16, 256), 256),
            [[]],
            config,
            block_size=2,
            seq_len=16,
            tokenizer=ByteTokenizer(),
        )
    )
    assert "".join(e.text for e in events) == bytes(text).decode(errors="replace")
    assert all("\ufffd" not in e.text for e in events[:-1])
    assert events[0].text == "a"


def test_compiled_parts_give_the_same_text(denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    # The graphs are captured and run as they are: making machine code of them takes a minute and is not ours to test.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = SamplerConfig(max_new_tokens=6, batch_size=3, logprobs=True)
    plain = generate(denoiser, PROMPTS[:3], config, block_size=4, seq_len=16)
    compiled = generate(denoiser, PROMPTS[:3], replace(config, compile=True), block_size=4, seq_len=16)
    for a, b in zip(plain, compiled, strict=True):
        assert (a.token_ids, a.nfe) == (b.token_ids, b.nfe)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-8)
    assert "_orig_mod" not in "".join(denoiser.state_dict())
