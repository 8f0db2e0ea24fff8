"""A sweep's plan, its resumption, and its report from cells whose numbers are made by hand and by a tiny model."""

import csv
import json
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from blockdiff.evaluation.config import SweepConfig
from blockdiff.evaluation.plots import likelihood, positions, tradeoff
from blockdiff.evaluation.report import write_report
from blockdiff.evaluation.study import collect
from blockdiff.evaluation.sweep import Kind, Model, plan_cells, run_cells, sampler_settings
from blockdiff.evaluation.verdict import choose, verdict
from blockdiff.training import loggers


def models():
    return [Model(f"b{size}", f"runs/s-b{size}", size, size, [f"block_size={size}"]) for size in (1, 4)]


def sweep(tmp_path, **more):
    return SweepConfig(name="s", block_size=[1, 4], steps=[1, 4], output=str(tmp_path), **more)


def interval(value, width=0.1):
    return {"value": value, "low": value - width, "high": value + width}


def coherence(nats, repeated=0.1, entropy=5.0):
    return {
        "texts": 4,
        "empty": 1,
        "new_tokens": 40,
        "judge_tokens": 40,
        "judge_nats": interval(nats),
        "judge_bits_per_byte": interval(nats / 2, 0.05),
        "border_nats": interval(0.5),
        "unigram_entropy": entropy,
        **{f"distinct_{order}": 0.5 for order in (1, 2, 3)},
        "repeated_4": repeated,
        "loops": 0.0,
        "self_overlap": 0.01,
        "match_mean": 3.0,
        "match_longest": 7,
        "parses": None,
        "parses_to_last": None,
        "energy_distance": 0.2,
    }


NATS = {"b1": 2.0, "b4-one by one": 2.01, "b4-1 step": 2.5}
SPEED = {"b1": 100.0, "b4-one by one": 90.0, "b4-1 step": 400.0}


def speed(rate):
    row = dict.fromkeys(("ttft_ms", "latency_p50_ms", "latency_p95_ms", "nfe", "commit_nfe", "tokens_per_forward"), 1.0)
    more = {"stream_tokens_per_second": rate, "cache_mib": 1.0, "peak_mib": None}
    spread = [0.9 * rate, 1.1 * rate]
    return {"batch_size": 1, "tokens_per_second": rate, "tokens_per_second_spread": spread, **row, **more}


def numbers_of(cell, nats=NATS, **more):
    """What a measurement would leave, with values that a reader can follow."""
    facts = {"corpus": "c", "vocab_size": 7, "parameters": 99, "seq_len": 8, "unigram_nats": 1.9}
    facts |= {"train_tokens": 1000, "train_flops": 3e15, "step": 5}
    if cell.kind is Kind.reference:
        return facts | {
            **{
                f"{name}_{kind}": coherence(1.5) for name in ("real", "shuffled") for kind in ("prompted", "unprompted")
            },
            "prompted_examples": [{"prompt": "To <be>", "text": "or not"}],
        }
    if cell.kind is Kind.likelihood:
        true = {"exact": True, "windows": 2, "tokens": 16, **{k: interval(1.0) for k in ("low", "high", "bound")}}
        return facts | {
            "nelbo": interval(1.1),
            "noise_error": 0.01,
            "bits_per_byte": 1.5,
            "left_to_right": interval(1.2),
            "true": true | {"looseness": interval(0.05, 0.01)},
        }
    key = cell.model if cell.model == "b1" else f"{cell.model}-{cell.sampler}"
    rule = "ancestral" if "steps" in cell.sampler else "first_hitting"
    row = coherence(nats[key], **more)
    texts = [{"nats": 10 * nats[key] + n, "tokens": 10} for n in (-1, 0, 1)]
    protocol = {"device": "d", "device_type": "cpu", "precision": "float32", "threads": 1, "torch": "2", "prompts": 5}
    protocol |= {"shortest_prompt": 1, "longest_prompt": 2, "new_tokens": 3, "seq_len": 8, "repeats": 3}
    return facts | {
        "passages": "the beginnings",
        "judge": "runs/s-b1 (step 5), with a tokenizer",
        "config": {"judge": "runs/s-b1", "sampler": {"rule": rule}},
        **dict.fromkeys(("prompted", "unprompted"), row),
        **{f"{k}_texts": texts for k in ("prompted", "unprompted")},
        **{f"{k}_ended": 0.25 for k in ("prompted", "unprompted")},
        "prompted_examples": [{"prompt": "To <be>", "text": f"by {key}"}],
        "speed": [speed(SPEED[key])],
        "protocol": protocol,
    }


class Worker:
    """Stands for `blockdiff`: leaves the numbers of a cell, and counts."""

    def __init__(self, failing=(), stop_after=None, make=numbers_of):
        self.ran, self.failing, self.stop_after, self.make = [], failing, stop_after, make

    def __call__(self, cell):
        if self.stop_after is not None and len(self.ran) == self.stop_after:
            raise KeyboardInterrupt
        self.ran.append(cell.name)
        if cell.name in self.failing:
            return "status 1"
        if cell.kind is Kind.likelihood:
            self._arrays(cell)
        if cell.kind is not Kind.train:
            cell.output.write_text(json.dumps(self.make(cell)))
        return None

    def _arrays(self, cell):
        nats_WL = np.full((3, 8), 1.0) if cell.model == "b1" else np.tile([1.6, 1.1, 1.1, 1.1], (3, 2))
        arrays = {
            "sample_W": np.arange(3),
            "nats_WL": nats_WL,
            "counted_WL": np.ones((3, 8), bool),
            "document_WL": np.zeros((3, 8), np.int32),
            "variance_W": np.zeros(3),
        }
        np.savez(
            cell.output.with_suffix(".npz"), **{f"{p}_{k}": v for p in ("bound", "curve") for k, v in arrays.items()}
        )


def done(tmp_path, worker=None, **more):
    config = sweep(tmp_path, **more)
    (tmp_path / "cells").mkdir(exist_ok=True)
    cells = plan_cells(config, models(), 4)
    return config, run_cells(cells, worker or Worker(), say=lambda text: None)


def test_the_plan_is_ordinary_commands_in_order(tmp_path):
    cells = plan_cells(sweep(tmp_path, measure=["weights=raw"]), models(), 4)
    assert [cell.name for cell in cells] == [
        "train-b1",
        "train-b4",
        "reference",
        "likelihood-b1",
        "samples-b1-one-by-one",
        "likelihood-b4",
        "samples-b4-one-by-one",
        "samples-b4-1-step",
    ]
    last = cells[-1]
    assert last.needs == ["train-b1", "train-b4"]  # its own model, and the judge
    assert last.command[:2] == ["measure", "part=samples"]
    for argument in ("checkpoint=runs/s-b4", "judge=runs/s-b1", "pack_block_size=4", "weights=raw", "sampler.steps=1"):
        assert argument in last.command
    other = plan_cells(sweep(tmp_path, measure=["weights=ema"]), models(), 4)
    assert other[-1].output != last.output
    assert other[0].output == cells[0].output  # training does not depend on how it is measured


def test_mismatched_block_sizes_are_asked_for_and_marked(tmp_path):
    given = [Model("m-at-b2", "m", 2, 4, None)]
    cells = plan_cells(sweep(tmp_path), given, 4)
    assert all("allow_untrained_block_size=true" in cell.command for cell in cells)
    assert not any(cell.kind is Kind.train or "judge" in " ".join(cell.command) for cell in cells)


def test_sampler_settings_of_a_block_size():
    config = SweepConfig(steps=[1, 4, 8], threshold=[0.9], samplers=["rule=entropy_bound entropy_bound=0.5"])
    assert [label for label, _ in sampler_settings(config, 1)] == ["one by one"]
    labels = [label for label, _ in sampler_settings(config, 8)]
    assert labels == ["one by one", "1 step", "4 steps", "threshold 0.9", "entropy_bound 0.5"]
    assert sampler_settings(config, 8)[-1][1] == ["sampler.rule=entropy_bound", "sampler.entropy_bound=0.5"]


def test_a_killed_sweep_goes_on_where_it_was(tmp_path):
    first = Worker(stop_after=4)
    with pytest.raises(KeyboardInterrupt):
        done(tmp_path, first)
    second = Worker()
    _, outcomes = done(tmp_path, second)
    assert len(first.ran) == 4
    assert first.ran + second.ran == [outcome.cell.name for outcome in outcomes]
    assert all(outcome.numbers is not None for outcome in outcomes)
    third = Worker()
    done(tmp_path, third)
    assert third.ran == []


def test_a_broken_file_is_no_finished_cell(tmp_path):
    _, outcomes = done(tmp_path)
    outcomes[-1].cell.output.write_text('{"half')
    again = Worker()
    done(tmp_path, again)
    assert again.ran == [outcomes[-1].cell.name]


def test_a_failing_cell_takes_only_what_needs_it(tmp_path):
    config, outcomes = done(tmp_path, Worker(failing=["train-b4", "samples-b1-one-by-one"]))
    failed = {o.cell.name: o.failure for o in outcomes if o.failure}
    assert failed["train-b4"] == "status 1"
    assert failed["likelihood-b4"] == "not run: it needs train-b4"
    assert set(failed) == {
        "train-b4",
        "likelihood-b4",
        "samples-b4-one-by-one",
        "samples-b4-1-step",
        "samples-b1-one-by-one",
    }
    page = write_report(config, models(), outcomes).html.read_text()
    assert "not run: it needs train-b4" in page
    assert tables(page)["likelihood"][0][0] == "b1"


class _Tables(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tables, self.cell, self.sources = {}, None, []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "table":
            self.rows = self.tables.setdefault(attributes["id"], [])
        elif tag == "tr":
            self.row = []
        elif tag == "td":
            self.cell = ""
        self.sources += [value for key, value in attributes.items() if key in ("src", "href")]

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag):
        if tag == "td":
            self.row.append(self.cell)
            self.cell = None
        elif tag == "tr" and self.row:
            self.rows.append(self.row)


def tables(page):
    parser = _Tables()
    parser.feed(page)
    return parser.tables


def test_the_report_holds_the_cells_numbers(tmp_path):
    config, outcomes = done(tmp_path)
    written = write_report(config, models(), outcomes)
    page = written.html.read_text()
    parser = _Tables()
    parser.feed(page)
    assert parser.sources
    assert all(source.startswith("data:image/png;base64,") for source in parser.sources)
    assert "<script" not in page
    found = parser.tables
    b1, b4 = found["likelihood"]
    assert b1[5] == "0.0000 [0.0000, 0.0000]"
    assert b4[5] == "0.2250 [0.2250, 0.2250]"  # (1.6 + 3 · 1.1) / 4 less 1, the same in each window
    assert b4[8] == "0.500 [0.500, 0.500]"
    real, *rows, shuffled = found["coherence-prompted"]
    assert (real[0], shuffled[0], len(rows)) == ("real text", "shuffled", 3)
    assert rows[0][5] == f"{np.exp(2):.2f} [{np.exp(1.9):.2f}, {np.exp(2.1):.2f}]"
    assert rows[0][6] == "1.000 [0.950, 1.050]"
    assert rows[0][3:5] == ["1", "25.0%"]
    assert page.count("Judge: runs/s-b1 (step 5), with a tokenizer. Its perplexity is per token of its own") == 2
    assert found["speed"][2][3] == "400 (360 to 440)"
    assert "To &lt;be&gt;" in page
    markdown = written.markdown.read_text()
    assert "| b4 | 1 step | 1 | 400 (360 to 440) |" in markdown
    with written.csv.open() as file:
        flat = list(csv.DictReader(file))
    assert [row["sampler"] for row in flat] == ["one by one", "one by one", "1 step"]
    assert float(flat[2]["prompted_judge_nats_value"]) == 2.5
    assert float(flat[2]["border_jump_value"]) == pytest.approx(0.5)
    assert all(path.stat().st_size > 5000 for path in written.plots)


def test_plots_by_their_data(tmp_path):
    _, outcomes = done(tmp_path)
    study = collect(models(), outcomes)
    one, four = tradeoff(study, 1)
    assert (one.label, four.label) == ("b1", "b4")
    assert four.x == [90.0, 400.0]
    assert four.y == pytest.approx([np.exp(2.01), np.exp(2.5)])
    assert four.names == ["one by one", "1 step"]
    bound, true = likelihood(study)
    assert bound.x == true.x == [1.0, 4.0]
    assert bound.y == [1.0, 1.0]
    (curve,) = positions(study)
    assert curve.y == pytest.approx([0.6, 0.1, 0.1, 0.1])


def test_the_verdict_names_the_fastest_within_the_constraint(tmp_path):
    config, outcomes = done(tmp_path)
    study = collect(models(), outcomes)
    text = verdict(study, config.tolerance)
    assert "block size 4, one by one" in text  # one step is faster, but 65 % above
    assert "0.90×" in text
    assert "+1.0%" in text
    assert "block size 4, 1 step, 4.00× faster" in verdict(study, 1.0)
    assert "No setting stays within 0%" in verdict(study, 0.0)


def test_a_repetitive_sampler_is_never_recommended(tmp_path):
    loops = {"b1": 2.0, "b4-one by one": 2.3, "b4-1 step": 0.5}

    def make(cell):
        return numbers_of(cell, loops, **({"repeated": 0.9} if cell.sampler == "1 step" else {}))

    config, outcomes = done(tmp_path, Worker(make=make))
    study = collect(models(), outcomes)
    _, best = choose(study, config.tolerance, 1)
    assert best is None
    assert "Left out, because a low perplexity comes from repetition" in verdict(study, config.tolerance)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_report_opens_in_a_browser(tmp_path):
    config, outcomes = done(tmp_path)
    written = write_report(config, models(), outcomes)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    ran = subprocess.run([*command, written.html.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert tables(ran.stdout) == tables(written.html.read_text())
    assert ":CONSOLE" not in ran.stderr


def test_plots_go_to_wandb_only(monkeypatch, tmp_path):
    shown = {}

    class Wandb:
        def log_image(self, key, images):
            shown[key] = images

    monkeypatch.setattr(loggers, "WandbLogger", Wandb)
    loggers.log_plots([Wandb(), object()], [tmp_path / "likelihood.png"])
    assert shown == {"likelihood": [str(tmp_path / "likelihood.png")]}


def test_config_rules_are_named():
    for more, text in (
        ({"name": "a/b"}, "name=a/b"),
        ({"block_size": [4, 4]}, "block_size"),
        ({"steps": [0]}, "steps"),
        ({"threshold": [2.0]}, "threshold"),
    ):
        with pytest.raises(ValueError, match=text):
            SweepConfig(**more).check()
