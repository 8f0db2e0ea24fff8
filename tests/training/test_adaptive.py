"""Noise that follows measurements: what it measures, when it changes, and that a run stays a function of its config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from leftovers import as_if_killed_after, assert_same, curves
from miniature import RunConfig, final_checkpoint, miniature, run
from team import launch

from blockdiff.build import build_denoiser, pack
from blockdiff.core.corruption import CorruptionKind, Fit, NoiseConfig, NoiseKey, ViewKind, corrupt
from blockdiff.core.fitting import QUANTUM
from blockdiff.core.randomness import Stream, hash_int
from blockdiff.data.batch import Batch
from blockdiff.data.loader import TrainBatches
from blockdiff.data.prepare import prepare
from blockdiff.model.denoiser import Denoiser
from blockdiff.training.adaptive import AdaptiveNoise
from blockdiff.training.checkpoints import list_checkpoints
from blockdiff.training.metrics import read_rows
from blockdiff.training.staging import noise_batch

Make = Callable[..., RunConfig]
OFTEN: dict[str, Any] = {"noise__fit_every": 3, "noise__fit_warmup": 4}
COUNTS = {"noise__fit": Fit.counts, **OFTEN}
PAIRS = {"noise__views": 2, "noise__view_kind": ViewKind.complementary, **COUNTS}
CLIP = {
    "noise__corruption": CorruptionKind.bernoulli,
    "noise__fit": Fit.clip,
    "noise__fit_every": 2,
    "noise__fit_warmup": 0,
}


def first_batch(config: RunConfig) -> tuple[Denoiser, Batch]:
    prepared = prepare(config.data)
    batches = TrainBatches(pack(config, prepared, "train"), seed=config.seed, global_batch_size=4, micro_batch_size=4)
    return build_denoiser(config, prepared.tokenizer.vocab_size).double(), batches[0]


def test_the_measured_gradients_are_those_of_each_block_alone(make_config: Make) -> None:
    """In a pass with weights, against one pass per block without, by the cell of its count."""
    config = make_config(**COUNTS)
    denoiser, batch = first_batch(config)
    key = NoiseKey(config.seed, 0, batch.slot_B, 4)
    noised = noise_batch(batch, key, config.noise, block_size=4, mask_id=denoiser.mask_id)
    chosen, weight = noised.chosen_M, noised.weight_M
    plan = denoiser.plan(batch.document_BL, 4)
    adaptive = AdaptiveNoise(config.noise, 4)
    adaptive.begin(torch.device("cpu"), True)
    watch = adaptive.watch(noised, weight * 0.25)
    nats, _ = denoiser.weighted_nll(noised.xt_BKL, batch.tokens_BL, plan, chosen, weight, watch)
    (nats * 0.25).backward()
    expected = torch.zeros(2, 4, dtype=torch.float64)
    for block in range(batch.tokens_BL.numel() // 4):
        mine = chosen[chosen // 4 == block]
        if len(mine):
            ones = torch.ones(len(mine), dtype=torch.float64)
            hidden = denoiser.hidden(noised.xt_BKL, batch.tokens_BL, plan, mine).detach().requires_grad_()
            nll = torch.nn.functional.cross_entropy(
                denoiser.logits(hidden), batch.tokens_BL.flatten()[mine], reduction="none"
            )
            (slope,) = torch.autograd.grad((nll * ones).sum(), hidden)
            expected[:, len(mine) - 1] += torch.tensor([1.0, float(slope.sum(0).square().sum()) / len(mine)])
    found = adaptive.state(lambda x: x)["new"]
    assert torch.equal(found[0].double(), expected[0])
    torch.testing.assert_close(found[1].double() * QUANTUM, expected[1], rtol=1e-4, atol=1e-6)


def test_a_probe_measures_the_clipped_loss_in_each_cell(make_config: Make) -> None:
    """Against a pass for each cell; nothing is measured between the steps that a search is due after."""
    config = make_config(**CLIP)
    denoiser, batch = first_batch(config)
    adaptive = AdaptiveNoise(config.noise, 4)
    early = NoiseKey(config.seed, 0, batch.slot_B, 4)
    loaded = noise_batch(batch, early, config.noise, block_size=4, mask_id=denoiser.mask_id)
    adaptive.probe(denoiser, loaded, early)
    assert not adaptive.state(lambda x: x)["new"].any()
    key = NoiseKey(config.seed, 1, batch.slot_B, 4)
    adaptive.probe(denoiser, loaded, key)
    found = adaptive.state(lambda x: x)["new"].double()
    counted = batch.counted_BL.unflatten(1, (-1, 4)).sum(-1)
    assert (found[0] == (counted > 0).sum()).all()
    for cell in (0, 4, 9):
        noise = NoiseConfig(corruption=CorruptionKind.bernoulli, clip=[cell / 10, (cell + 1) / 10])
        probe_key = key._replace(seed=hash_int(config.seed, Stream.PROBE))
        noised = corrupt(
            batch.tokens_BL, batch.counted_BL, block_size=4, mask_id=denoiser.mask_id, noise=noise, key=probe_key
        )
        every = torch.arange(batch.tokens_BL.numel())
        with torch.no_grad():
            logits = denoiser(noised.xt_BKL, batch.tokens_BL, denoiser.plan(batch.document_BL, 4), every)
        nll = torch.nn.functional.cross_entropy(logits, batch.tokens_BL.flatten(), reduction="none").view(4, -1)
        nats = (nll * noised.weight_BKL[:, 0]).unflatten(1, (-1, 4)).sum(-1) / counted.clamp(min=1)
        for row, expected in ((1, nats.sum()), (2, nats.square().sum())):
            assert float(found[row, cell]) * QUANTUM == pytest.approx(float(expected), rel=1e-4)


def test_noise_changes_after_warm_up_and_only_when_due(make_config: Make) -> None:
    config = make_config(trainer__max_steps=8, trainer__checkpoint_every=1, trainer__keep_last=99, **COUNTS)
    states = {
        int(path.stem.removeprefix("step-")): torch.load(path, weights_only=True)["fit"]
        for path in list_checkpoints(run(config).directory)
    }
    laws = {step: states[step]["law"] for step in sorted(states)}
    assert [step for step, law in laws.items() if law is None] == [1, 2, 3, 4, 5]
    assert torch.equal(laws[6], laws[7])
    assert torch.equal(laws[7], laws[8])
    assert not states[3]["new"].any()
    assert states[4]["new"][0].sum() > 0


@pytest.mark.parametrize("changes", [COUNTS, PAIRS, CLIP], ids=["counts", "pairs", "clip"])
def test_going_on_is_never_having_stopped(make_config: Make, changes: dict[str, Any]) -> None:
    config = make_config(trainer__max_steps=10, trainer__keep_last=99, **changes)
    straight = run(config)
    for path in list_checkpoints(straight.directory)[:-1:2]:
        name = f"killed-after-{int(path.stem.removeprefix('step-'))}"
        as_if_killed_after(straight.directory, int(path.stem.removeprefix("step-")), straight.directory.parent / name)
        config.name = name
        resumed = run(config)
        assert_same(final_checkpoint(resumed), final_checkpoint(straight))
        assert curves(resumed.directory) == curves(straight.directory)


@pytest.mark.parametrize("changes", [COUNTS, PAIRS, CLIP], ids=["counts", "pairs", "clip"])
def test_a_step_does_not_depend_on_how_its_batch_is_split(make_config: Make, changes: dict[str, Any]) -> None:
    """1 × 4 = 2 × 2 = 4 × 1, the fit included: its sums are whole numbers, so it is the very same."""
    results = []
    for micro in (1, 2, 4):
        precise = {"trainer__precision": "64-true", "trainer__log_every": 1}
        config = make_config(
            name=f"micro{micro}", trainer__max_steps=10, data__micro_batch_size=micro, **precise, **changes
        )
        summary = run(config)
        column = "train/nelbo" if config.noise.is_bound else "train/loss"
        losses = torch.tensor([row[column] for row in read_rows(summary.directory)], dtype=torch.float64)
        results.append((losses, final_checkpoint(summary)["fit"]))
    for losses, fit in results[1:]:
        torch.testing.assert_close(losses, results[0][0], rtol=1e-10, atol=0)
        assert fit["clip"] == results[0][1]["clip"]
        assert fit["challenger"] == results[0][1]["challenger"]
        torch.testing.assert_close(fit["known"], results[0][1]["known"], rtol=1e-6, atol=0.1)
    # The fit did something: without it the run is another one.
    if config.noise.fit is Fit.counts:
        config.name, config.noise.fit = "plain", Fit.none
        plain = torch.tensor([row["train/nelbo"] for row in read_rows(run(config).directory)], dtype=torch.float64)
        assert torch.equal(plain[:6], results[-1][0][:6])
        assert not torch.equal(plain[6:], results[-1][0][6:])


def test_a_search_leaves_the_whole_interval_and_is_never_reported_as_a_bound(make_config: Make) -> None:
    summary = run(make_config(trainer__max_steps=8, **CLIP))
    assert not summary.train_is_bound
    assert final_checkpoint(summary)["fit"]["clip"] != [0.0, 1.0]


def test_two_processes_fit_what_one_fits(make_config: Make, tmp_path: Path, corpus: Path) -> None:
    """Whole and split weights; resumed within an interval, the sums of all processes are counted once."""
    common: dict[str, Any] = {
        "data__micro_batch_size": 1,
        "trainer__max_steps": 10,
        "trainer__log_every": 1,
        "trainer__keep_last": 99,
    }
    double = {**common, "trainer__precision": "64-true"}
    kinds = {"counts": PAIRS, "clip": CLIP}
    jobs: list[dict[str, Any]] = []
    for kind, changes in kinds.items():
        plain = {key: value.value if hasattr(value, "value") else value for key, value in changes.items()}
        jobs += [
            {"name": f"two-{kind}", **double, **plain},
            {"copy": [f"two-{kind}", 4, f"again-{kind}"]},
            {"name": f"again-{kind}", **double, **plain},
            {"name": f"split-{kind}", **common, **plain, "trainer__strategy": "fsdp"},
        ]
    launch(2, tmp_path, corpus, jobs)
    for kind, changes in kinds.items():
        run(miniature(tmp_path, corpus, name=f"one-{kind}", **double, **changes))
        directory = tmp_path / "checkpoints"
        one, two, again, split = (curves(directory / f"{who}-{kind}") for who in ("one", "two", "again", "split"))
        assert again == two
        for rows, rel in ((two, 1e-10), (split, 1e-4)):
            for row, same in zip(rows, one, strict=True):
                assert row.keys() == same.keys()
                # The standard error is the root of a difference of nearly equal sums.
                expected = {key: value for key, value in same.items() if key != "val/nelbo_se"}
                assert {key: row[key] for key in expected} == pytest.approx(expected, rel=rel)
