"""Infilling, windows, streams that are closed, cached against uncached, and what is refused."""

from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from oracle import ByteTokenizer, OracleDenoiser, says
from torch import Tensor

from blockdiff.core.masks import CleanAttention
from blockdiff.model.cache import KVCache
from blockdiff.model.denoiser import Denoiser, ModelConfig
from blockdiff.sampling.batch import Batch
from blockdiff.sampling.config import Order, Rule, SamplerConfig, Window
from blockdiff.sampling.infill import parse
from blockdiff.sampling.request import Request
from blockdiff.sampling.sampler import generate, run, stream

GREEDY = SamplerConfig(temperature=0.0)


def test_holes_are_parsed_and_their_text_is_encoded_around_them() -> None:
    request = parse("ab<hole:3>c<hole:2>", ByteTokenizer())
    assert request.tokens == [97, 98, 0, 0, 0, 99, 0, 0]
    assert request.holes == [(2, 3), (6, 2)]
    assert request.new_tokens == 0
    assert parse("no hole < here", ByteTokenizer()) == Request(list(b"no hole < here"))


@pytest.mark.parametrize("text", ["a<hole:0>b", "a<hole:>b", "a<hole:x>b", "a<hole:3"])
def test_broken_holes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="<hole:N>"):
        parse(text, ByteTokenizer())


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "config",
    [SamplerConfig(rule=rule) for rule in Rule] + [SamplerConfig(rule=Rule.first_hitting, remask=0.5)],
    ids=lambda c: c.rule.value,
)
def test_an_oracle_fills_holes_and_nothing_else(config: SamplerConfig, block_size: int) -> None:
    whole = "def add(a, b): return a + b"
    ids = list(whole.encode()) + [1] * 8
    holed = whole[:4] + "<hole:3>" + whole[7:9] + "<hole:10>" + whole[19:]
    oracle = OracleDenoiser(says(ids, [0.99] * len(ids), 256), 256)
    config = replace(config, temperature=0.0)
    row = generate(oracle, [holed], config, block_size=block_size, seq_len=32, tokenizer=ByteTokenizer())[0]
    assert row.text == whole
    assert [bytes(hole) for hole in row.holes] == [whole[4:7].encode(), whole[9:19].encode()]
    assert (row.new_tokens, row.prompt_tokens, row.finish_reason) == (13, len(whole) - 13, "length")
    events = list(stream(oracle, holed, config, block_size=block_size, seq_len=32, tokenizer=ByteTokenizer()))
    assert "".join(event.text for event in events) == whole
    assert sum(len(event.token_ids) for event in events) == 13


def test_a_hole_sees_both_sides_within_its_block_and_no_later_block() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def answer(prefix: list[int], block: list[int], place: int) -> list[float]:
        seen.append((prefix, block))
        return [0.0] * 8

    request = Request([1, 2, 0, 3, 4, 5, 6, 7], [(2, 1)], new_tokens=0)
    oracle = OracleDenoiser(answer, 8)
    row = generate(oracle, [request], GREEDY, block_size=4, seq_len=8)[0]
    assert seen == [([], [1, 2, 8, 3])]
    assert row.token_ids == [1, 2, 0, 3, 4, 5, 6, 7]
    assert row.nfe == 1, "what stands behind the last hole needs no call"


def test_given_blocks_between_holes_are_committed() -> None:
    tokens = [9, 0, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 0, 5]
    text = [9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 0, 0]
    oracle = OracleDenoiser(says(text, [0.9] * 16, 10), 10)
    row = generate(oracle, [Request(tokens, [(1, 1), (12, 1)], 0)], GREEDY, block_size=4, seq_len=16)[0]
    assert row.token_ids == text[:14]
    assert oracle.calls == ["denoise", "commit", "both"]
    assert (row.nfe, row.commit_nfe) == (3, 1)


def test_text_ends_only_where_nothing_given_follows() -> None:
    """The oracle wants the end of text everywhere; between given tokens it may not have it."""
    oracle = OracleDenoiser(lambda prefix, block, place: [9.0, 1.0, 0.0], 3)
    row = generate(oracle, [Request([2, 0, 2, 0, 0], [(1, 1), (3, 2)], 0)], GREEDY, block_size=2, seq_len=8, eos_id=0)[
        0
    ]
    assert row.token_ids == [2, 1, 2]
    assert row.finish_reason == "eos"


def test_holes_beside_prompts_in_one_batch() -> None:
    torch.manual_seed(1)
    model = Denoiser(ModelConfig(layers=2, width=32, heads=2), 13).double().eval()
    requests = [Request([1, 0, 0, 4, 5, 0, 7, 8, 9, 10], [(1, 2), (5, 1)], 0), Request([3] * 6), Request([], seed=5)]
    config = SamplerConfig(max_new_tokens=7, batch_size=2, logprobs=True)
    together = generate(model, requests, config, block_size=4, seq_len=16, eos_id=0)
    for request, row in zip(requests, together, strict=True):
        alone = generate(model, [request], config, block_size=4, seq_len=16, eos_id=0)[0]
        assert (row.token_ids, row.nfe) == (alone.token_ids, alone.nfe)
        assert row.logprobs == pytest.approx(alone.logprobs, abs=1e-10)


class Uncached:
    """Answers each call by the training pass over the whole text so far: nothing is reused."""

    def __init__(self, model: Denoiser, block_size: int) -> None:
        self.model, self.block_size = model, block_size
        self.mask_id, self.vocab_size = model.mask_id, model.vocab_size

    def compiled(self) -> Self:
        return self

    def packed(self) -> Self:
        return self

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache.empty(layers=1, batch=batch, kv_heads=1, head_dim=1, capacity=capacity, dtype=torch.float64)

    def commit(self, x0_BT: Tensor, cache: KVCache, *, lengths=None, block_size=None) -> None:  # type: ignore[no-untyped-def]
        lengths = lengths or [x0_BT.shape[1]] * len(x0_BT)
        for row, length in enumerate(lengths):
            start = cache.lengths[row]
            cache.keys[0][row, 0, start : start + length, 0] = x0_BT[row, :length].double()
        cache.advance(lengths)

    def denoise(self, xt_BS: Tensor, cache: KVCache, chosen_BM: Tensor | None = None) -> Tensor:
        assert chosen_BM is not None
        rows = []
        for row, xt_S in enumerate(xt_BS):
            start, size = cache.lengths[row], xt_BS.shape[1]
            prefix = cache.keys[0][row, 0, :start, 0].long()
            x0 = torch.cat([prefix, torch.zeros(size, dtype=torch.int64)])[None]
            xt = torch.cat([prefix, xt_S])[None, None]
            plan = self.model.plan(torch.zeros_like(x0), self.block_size)
            rows.append(self.model(xt, x0, plan, start + chosen_BM[row]))
        return torch.stack(rows)

    def commit_and_denoise(self, x0_BS, xt_BS, cache, chosen_BM=None, *, lengths=None):  # type: ignore[no-untyped-def]
        self.commit(x0_BS, cache, lengths=lengths)
        return self.denoise(xt_BS, cache, chosen_BM)


@pytest.mark.parametrize("clean", list(CleanAttention))
@pytest.mark.parametrize("block_size", [1, 2, 4, 12])
def test_cached_equals_uncached_equals_dual_stream(clean: CleanAttention, block_size: int) -> None:
    torch.manual_seed(2)
    model = Denoiser(ModelConfig(layers=2, width=32, heads=4, kv_heads=2, clean_attention=clean), 11).double().eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    prompts = [[1, 2, 3, 4, 5], [], [7]]
    config = SamplerConfig(max_new_tokens=7, threshold=0.4, logprobs=True)
    cached = generate(model, prompts, config, block_size=block_size, seq_len=12)
    slow = generate(Uncached(model, block_size), prompts, config, block_size=block_size, seq_len=12)
    for a, b in zip(cached, slow, strict=True):
        assert (a.token_ids, a.nfe, a.steps) == (b.token_ids, b.nfe, b.steps)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-10)


def test_block_size_one_is_plain_autoregressive_sampling() -> None:
    """Greedy at S = 1 is the loop: clean prefix, one mask, likeliest token. One call a token, whatever the rule."""
    torch.manual_seed(3)
    model = Denoiser(ModelConfig(layers=2, width=32, heads=4), 11).double().eval()
    text = [5]
    for _ in range(7):
        cache = model.new_cache(1, 16)
        model.commit(torch.tensor([text]), cache)
        text.append(int(model.denoise(torch.tensor([[model.mask_id]]), cache).argmax()))
    for rule in Rule:
        row = generate(model, [[5]], replace(GREEDY, rule=rule, max_new_tokens=7), block_size=1, seq_len=8)[0]
        assert ([5, *row.token_ids], row.nfe) == (text, 7)


def test_sliding_window_forgets_the_oldest_blocks_and_restarts_positions() -> None:
    seen: list[list[int]] = []

    def answer(prefix: list[int], block: list[int], place: int) -> list[float]:
        seen.append(prefix)
        return [0.0 if token == len(seen) % 7 else -9.0 for token in range(7)]

    oracle = OracleDenoiser(answer, 7)
    config = SamplerConfig(
        rule=Rule.fixed,
        order=Order.left_to_right,
        temperature=0.0,
        max_new_tokens=10,
        window=Window.sliding,
        window_keep=4,
    )
    row = generate(oracle, [[]], config, block_size=2, seq_len=6)[0]
    ids = [n % 7 for n in range(1, 11)]
    assert row.token_ids == ids
    # Blocks 0, 1, 2 fill the window of 6; then 4 tokens are read again in front of each block.
    assert seen[::2] == [[], ids[:2], ids[:4], ids[2:6], ids[4:8]]
    assert (row.nfe, row.commit_nfe) == (12, 2), "each slide reads its kept tokens again, the last block in passing"


def test_sliding_window_with_a_model_equals_a_fresh_start_on_what_is_kept() -> None:
    torch.manual_seed(4)
    model = Denoiser(ModelConfig(layers=2, width=32, heads=4), 11).double().eval()
    prompt = [t % 11 for t in range(21)]
    config = replace(GREEDY, rule=Rule.fixed, order=Order.left_to_right, max_new_tokens=3, window=Window.sliding)
    slid = generate(model, [prompt], config, block_size=4, seq_len=16)[0]
    # The prompt's block 5 begins at 20: behind 8 kept tokens, so what is seen is the text from 12.
    fresh = generate(model, [prompt[12:]], config, block_size=4, seq_len=16)[0]
    assert slid.token_ids == fresh.token_ids


def test_window_error_refuses_before_work() -> None:
    oracle = OracleDenoiser(lambda prefix, block, place: [0.0], 1)
    with pytest.raises(ValueError, match=r"prompt of 6 tokens \+ max_new_tokens=3 exceeds seq_len=8"):
        generate(oracle, [[0], [0] * 6], replace(GREEDY, max_new_tokens=3), block_size=4, seq_len=8)
    assert oracle.calls == []


def test_without_a_number_a_row_goes_on_to_the_end_of_its_window() -> None:
    oracle = OracleDenoiser(lambda prefix, block, place: [0.0, 1.0], 2)
    row = generate(oracle, [[0] * 3], replace(GREEDY, max_new_tokens=None), block_size=4, seq_len=8)[0]
    assert (len(row.token_ids), row.finish_reason) == (5, "window")


def test_a_closed_stream_stops_and_a_cancelled_row_frees_its_place() -> None:
    oracle = OracleDenoiser(lambda prefix, block, place: [0.0, 1.0], 2)
    events = stream(oracle, [[0]], replace(GREEDY, max_new_tokens=15), block_size=4, seq_len=16)
    next(events)
    made = len(oracle.calls)
    events.close()
    assert list(events) == []
    assert len(oracle.calls) == made

    batch = Batch(oracle, replace(GREEDY, max_new_tokens=8, batch_size=2), block_size=4, seq_len=16)
    for first in (0, 1, 0):
        batch.submit(Request([first]))
    batch.advance()
    assert [row.index for row in batch.rows] == [0, 1]
    gone = batch.cancel(0)
    assert gone is not None
    assert (gone.finish_reason, gone.token_ids) == ("cancelled", [1, 1, 1])
    assert batch.cancel(0) is None
    assert [row.index for row in batch.rows] == [1]
    batch.advance()
    assert [row.index for row in batch.rows] == [1, 2], "the place goes to the next in the queue"
    queued = batch.submit(Request([1, 1]))
    assert batch.cancel(queued).token_ids == []  # type: ignore[union-attr]
    while not batch.idle:
        batch.advance()
    assert batch.cache.lengths == [0, 0]


def test_cancelled_companions_change_nothing() -> None:
    torch.manual_seed(5)
    model = Denoiser(ModelConfig(layers=2, width=32, heads=4), 11).double().eval()
    config = SamplerConfig(max_new_tokens=10, batch_size=3)
    alone = generate(model, [[1, 2, 3]], config, block_size=4, seq_len=16)[0]
    batch = Batch(model, config, block_size=4, seq_len=16)
    for prompt in ([5], [1, 2, 3], [6] * 5):
        batch.submit(Request(prompt))
    done = {}
    while not batch.idle:
        done.update({e.request: e.generation for e in batch.advance() if e.generation})
        batch.cancel(0)
    assert done[1].token_ids == alone.token_ids
    assert 0 not in done


def test_reports_add_up() -> None:
    oracle = OracleDenoiser(lambda prefix, block, place: [0.0, 1.0], 2)
    config = replace(GREEDY, rule=Rule.first_hitting, max_new_tokens=6, batch_size=2)
    result = run(oracle, [[0] * 9, [0], [1] * 4], config, block_size=4, seq_len=16)
    figures = result.report
    assert figures.new_tokens == 18
    assert figures.prompt_tokens == 14
    assert figures.nfe == sum(g.nfe for g in result.generations) == 19
    assert figures.commit_nfe == 1
    assert figures.calls == len(oracle.calls)
    assert figures.cache_bytes == 2 * 2 * 20 * 8, "keys and values of 2 places, 16 + 4 positions of one double"
    assert figures.tokens_per_forward == pytest.approx(18 / 19)
    for g in result.generations:
        assert g.denoise_nfe == 6
        assert g.ttft_s == g.block_seconds[0]
        assert g.tokens_per_second == pytest.approx(6 / sum(g.block_seconds))
    assert result.generations[2].queue_s > 0
    assert {name for name, _ in figures.lines()} >= {"new tokens", "NFE, denoise + commit", "KV cache"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.5}, "threshold=1.5"),
        ({"steps": 4}, "steps=4 has no effect with rule=confidence"),
        ({"tokens_per_step": 2}, "set rule=fixed"),
        ({"rule": Rule.fixed, "steps": 2, "tokens_per_step": 2}, "set one"),
        ({"rule": Rule.ancestral, "steps": 0}, "steps=0 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"banned_tokens": [9]}, "banned_tokens holds 9"),
        ({"banned_tokens": [0, 1, 2]}, "bans all 3 tokens"),
        ({"remask": 1.0}, "remask=1.0"),
        ({"factor": 0.0}, "factor=0.0"),
        ({"entropy_bound": -0.1}, "entropy_bound=-0.1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"stop": [""]}, "empty string"),
        ({"stop": ["x"]}, "needs a tokenizer"),
        ({"window_keep": 4}, "window=error"),
        ({"window": Window.sliding, "window_keep": 3, "max_new_tokens": 9}, "multiple of block_size=4"),
        ({"window": Window.sliding, "max_new_tokens": None}, "set max_new_tokens"),
    ],
)
def test_bad_settings_name_key_value_and_remedy(options: dict[str, Any], message: str) -> None:
    oracle = OracleDenoiser(lambda prefix, block, place: [0.0] * 3, 3)
    with pytest.raises(ValueError) as caught:
        generate(oracle, [[]], replace(SamplerConfig(), **options), block_size=4, seq_len=8)
    assert message in str(caught.value)
    assert oracle.calls == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5], "token 5 at position 0"),
        (Request([0, 0], [(1, 2)]), "leaves the text"),
        (Request([0, 0, 0], [(1, 1), (1, 1)]), "overlaps another"),
        ("text", "needs a tokenizer"),
        (Request([0], new_tokens=0), "new_tokens=0"),
    ],
)
def test_bad_prompts_are_named(prompt: Any, message: str) -> None:
    oracle = OracleDenoiser(lambda prefix, block, place: [0.0] * 3, 3)
    with pytest.raises(ValueError) as caught:
        generate(oracle, [prompt], replace(GREEDY, max_new_tokens=2), block_size=4, seq_len=8)
    assert message in str(caught.value)
