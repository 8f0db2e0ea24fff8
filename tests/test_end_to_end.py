"""`python train.py` as a user types it, then everything that a trained run is for."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import blockdiff
from blockdiff import cli

ROOT = Path(__file__).parent.parent
TINY = [
    "data=text",
    "data.files=corpus.txt",
    "data.tokenizer=bytes",
    "data.document=line",
    "data.val_fraction=0.2",
    "data.global_batch_size=8",
    "data.micro_batch_size=4",
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.kv_heads=1",
    "block_size=4",
    "seq_len=32",
    "name=tiny",
    "optimizer.lr=0.01",
    "optimizer.warmup_steps=5",
    "trainer.max_steps=40",
    "trainer.compile=false",
    "trainer.val_every=20",
    "trainer.checkpoint_every=20",
    "sampler.max_new_tokens=16",
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory with a trained run, made by the command itself."""
    place = tmp_path_factory.mktemp("work")
    lines = [
        f"the {a} {b} sat on the {c}" for a in ("red", "old", "big") for b in ("cat", "dog") for c in ("mat", "hat")
    ]
    (place / "corpus.txt").write_text("\n".join(f"{line} {i}" for i in range(12) for line in lines) + "\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *TINY],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (place / "output.txt").write_text(done.stdout)
    return place


@pytest.fixture
def run(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    return Path("checkpoints/tiny")


def test_run_directory_is_complete(run):
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "tokenizer.json", "metrics.csv", "samples.txt", "loss.png", "step-00000040.ckpt"} <= names
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    bound = ["val/nelbo", "val/nelbo_se", "val/bits_per_byte"]
    assert list(rows[0]) == ["step", "train/nelbo", *bound, "lr", "tokens_per_second", "mfu"]
    validated = [row for row in rows if row["val/nelbo"]]
    assert [int(row["step"]) for row in validated] == [20, 40]
    assert float(validated[-1]["val/nelbo"]) < float(validated[0]["val/nelbo"]) < 5.6
    assert float(validated[-1]["val/nelbo_se"]) > 0


def test_output_names_bound_and_baseline(workplace):
    text = (workplace / "output.txt").read_text()
    assert "unigram entropy" in text
    assert "val bound" in text
    assert "checkpoints/tiny" in text


def test_same_command_again_finds_nothing_to_do(run, capsys):
    assert cli.main(["train", *TINY]) == 0
    assert "all 40 steps are done" in capsys.readouterr().out


def test_other_config_is_refused_with_the_difference(run, capsys):
    assert cli.main(["train", *TINY, "model.width=64"]) == 2
    error = capsys.readouterr().err
    assert "model.width: 32 -> 64" in error
    assert "name=" in error


def test_loaded_model_generates_streams_and_scores(run):
    model = blockdiff.load(run)
    assert model.step == 40
    assert model.config.block_size == 4
    (result,) = model.generate("the red", max_new_tokens=10)
    assert len(result.token_ids) <= 10
    assert result.finish_reason in ("length", "eos")
    events = list(model.stream("the red", max_new_tokens=10))
    assert "".join(event.text for event in events) == result.text
    score = model.nelbo(["the red cat sat on the mat 3"], samples=4)
    assert score.byte_count == 28
    assert score.token_count == 29
    assert 0 < score.nelbo < 5.6
    assert model.nelbo("the red", block_size=1).standard_error == 0


def test_public_functions_take_a_path(run):
    text = blockdiff.generate(str(run), "the", max_new_tokens=8)[0].text
    assert text == blockdiff.load(run).generate("the", max_new_tokens=8)[0].text
    assert blockdiff.score(str(run), "the old cat").nelbo > 0


def test_raw_and_averaged_weights_differ(run):
    averaged, raw = blockdiff.load(run), blockdiff.load(run, weights="raw")
    assert averaged.nelbo("the old cat").nelbo != raw.nelbo("the old cat").nelbo


def test_evaluation_repeats_the_reported_bound(run, capsys):
    assert cli.main(["evaluate", f"checkpoint={run}", "views=2", "output=score.json"]) == 0
    results = json.loads(Path("score.json").read_text())
    with (run / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert results["nats_per_token"] == pytest.approx(float(last["val/nelbo"]), abs=1e-6)
    assert results["standard_error"] == pytest.approx(float(last["val/nelbo_se"]), abs=1e-6)
    assert "bits per byte" in capsys.readouterr().out


def test_samples_come_as_json_lines_from_a_file_of_prompts(run, capsys):
    Path("prompts.txt").write_text("the red\nthe old\n")
    assert (
        cli.main(["sample", f"checkpoint={run}", "prompts=prompts.txt", "format=jsonl", "sampler.max_new_tokens=8"])
        == 0
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["the red", "the old"]
    assert all(row["new_tokens"] <= 8 and row["nfe"] >= 2 for row in rows)


def test_holes_are_filled_and_given_text_stays(run):
    text = blockdiff.load(run).generate("the <hole:5> sat on")[0].text
    assert text.startswith("the ")
    assert text.endswith(" sat on")


@pytest.mark.parametrize("verb", ["sample", "evaluate"])
def test_untrained_block_size_needs_to_be_asked_for(run, verb, capsys):
    assert cli.main([verb, f"checkpoint={run}", "block_size=8"]) == 2
    assert "allow_untrained_block_size=true" in capsys.readouterr().err
    assert cli.main([verb, f"checkpoint={run}", "block_size=8", "allow_untrained_block_size=true"]) == 0


def test_prompt_longer_than_the_context_is_refused(run, capsys):
    assert cli.main(["sample", f"checkpoint={run}", f"prompt={'a' * 40}"]) == 2
    assert "exceeds seq_len=32" in capsys.readouterr().err


def test_foreign_tokenizer_is_refused(run, tmp_path):
    import shutil

    from blockdiff.data.tokenizer import train_bpe

    copy = shutil.copytree(run, tmp_path / "copy")
    train_bpe(["the red cat sat on the mat"] * 3, 300).save(copy / "tokenizer.json")
    with pytest.raises(ValueError, match="was trained with 257"):
        blockdiff.load(copy)


@pytest.mark.parametrize("damage", ["truncated", "foreign", "empty"])
def test_damaged_checkpoint_is_named(run, tmp_path, damage):
    import shutil

    copy = shutil.copytree(run, tmp_path / "copy")
    path = copy / "step-00000040.ckpt"
    data = path.read_bytes()
    path.write_bytes({"truncated": data[: len(data) // 2], "foreign": b"hello" * 1000, "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"step-00000040\.ckpt"):
        blockdiff.load(path)
    assert blockdiff.load(copy).step == 20


def test_loading_needs_neither_lightning_nor_hydra(run):
    code = (
        "import sys\n"
        "for name in ('lightning', 'hydra', 'omegaconf', 'wandb'): sys.modules[name] = None\n"
        f"import blockdiff; print(blockdiff.load({str(run)!r}).generate('the', max_new_tokens=4)[0].new_tokens)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_watch_writes_plain_text_where_there_is_no_terminal_and_trace_a_page(run, capsys):
    options = [f"checkpoint={run}", "prompt=the", "sampler.max_new_tokens=8"]
    assert cli.main(["sample", *options]) == 0
    plain = capsys.readouterr().out
    assert cli.main(["sample", *options, "watch=true", "trace=replay.html"]) == 0
    assert capsys.readouterr().out.strip() in plain
    page = Path("replay.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    assert cli.main(["sample", *options, "trace=nowhere/replay.html"]) == 2


def test_exported_weights_are_the_same_model(run, tmp_path):
    model = blockdiff.load(run)
    exported = blockdiff.load(model.save(tmp_path / "out"))
    assert exported.step == 40
    assert exported.nelbo("the old cat") == model.nelbo("the old cat")
    with pytest.raises(ValueError, match="is not empty"):
        model.save(tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        blockdiff.load(tmp_path / "out")
