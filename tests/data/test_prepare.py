"""Preparing: once, whole or not at all, and again only when something that changes the tokens has changed."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from blockdiff.data import directory as directory_module
from blockdiff.data import prepare as prepare_module
from blockdiff.data.documents import Document
from blockdiff.data.config import DataConfig
from blockdiff.data.prepare import open_prepared, prepare
from blockdiff.data.config import Source
from blockdiff.data.statistics import describe
from blockdiff.data.tokenizer import EOS, TokenizerKind, train_bpe

CONF = Path(__file__).parents[2] / "conf" / "data"


@pytest.fixture
def config(tmp_path):
    text = "".join(f"Verse {i}: {'holy ' * (i % 4)}word {i * 37 % 101}. {EOS}\n" for i in range(900))
    path = tmp_path / "book.txt"
    path.write_text(text)
    return DataConfig(
        source=Source.text,
        files=[str(path)],
        root=str(tmp_path / "data"),
        vocab_size=300,
        document=Document.line,
    )


def listing(root):
    return sorted(path.name for path in Path(root).glob("*")) if Path(root).exists() else []


def changed(config, **options):
    return DataConfig(**{**vars(config), **options})


@pytest.mark.parametrize("kind", [TokenizerKind.bytes, TokenizerKind.bpe])
def test_documents_come_back_exactly(config, kind):
    prepared = prepare(changed(config, tokenizer=kind))
    lines = Path(config.files[0]).read_text().splitlines()
    stores = (prepared.train, prepared.val)
    texts = [[prepared.tokenizer.decode(s.document(d)) for d in range(s.facts.documents)] for s in stores]
    assert sorted(texts[0] + texts[1]) == sorted(lines)
    assert not set(texts[0]) & set(texts[1])
    for store, split in zip(stores, texts, strict=True):
        assert store.facts.bytes == sum(len(text.encode()) for text in split)
        assert prepared.tokenizer.eos_id not in store.tokens
    assert sorted(path.name for path in prepared.directory.iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "train.bin",
        "train.offsets.npy",
        "val.bin",
        "val.offsets.npy",
    ]


def test_bpe_never_sees_validation(config):
    prepared = prepare(config)
    val = {prepared.tokenizer.decode(prepared.val.document(d)) for d in range(prepared.val.facts.documents)}
    train_only = [line for line in Path(config.files[0]).read_text().splitlines() if line not in val]
    assert 0 < len(val) < len(train_only)
    assert train_bpe(train_only, config.vocab_size).sha256 == prepared.tokenizer.sha256


def test_manifest_and_description(config):
    prepared = prepare(config)
    manifest = json.loads((prepared.directory / "manifest.json").read_text())
    assert manifest["files"][0]["path"] == config.files[0]
    assert manifest["fingerprint"].startswith(prepared.directory.name.rpartition("-")[2])
    val, train = prepared.val, prepared.train
    assert manifest["bytes_per_token"] == val.facts.bytes / (val.facts.tokens + val.facts.documents)
    figures = describe(prepared, seq_len=32, block_size=4, document_mask=True)
    eos, vocab = prepared.tokenizer.eos_id, prepared.tokenizer.vocab_size
    seen = Counter(train.tokens.tolist()) + Counter({eos: train.facts.documents})
    total = sum(seen.values()) + vocab
    row = val.tokens.tolist() + [eos] * val.facts.documents
    expected = sum(-math.log((seen[token] + 1) / total) for token in row) / len(row)
    assert figures["unigram_nats"] == pytest.approx(expected, rel=1e-12)
    assert figures["train"]["documents"] + figures["val"]["documents"] == 900
    assert 0 < figures["train"]["padding_share"] < 4 / 10
    assert describe(prepared, 32, 4, document_mask=False)["train"]["padding_share"] < 0.01


def test_found_again_and_made_anew(config, tmp_path):
    first = prepare(config)
    stamp = (first.directory / "train.bin").stat().st_mtime_ns
    same = [
        changed(config, files=config.files[0]),
        changed(config, global_batch_size=3, micro_batch_size=1, workers=7, document_mask=False),
        changed(
            config, max_train_samples=5, tokenizer_file="unused", hub_name="unused", text_column="unused"
        ),
    ]
    for other in same:
        assert prepare(other).directory == first.directory
    assert (first.directory / "train.bin").stat().st_mtime_ns == stamp
    different = [
        changed(config, vocab_size=280),
        changed(config, tokenizer=TokenizerKind.bytes),
        changed(config, val_fraction=0.2),
        changed(config, document=Document.paragraph, val_fraction=0.5, files=[write_second(tmp_path)]),
        changed(config, max_documents=500),
        changed(config, bpe_train_bytes=1000),
        changed(config, files=[*config.files, write_second(tmp_path)]),
    ]
    directories = {prepare(other).directory for other in different}
    assert len(directories) == len(different)
    assert first.directory not in directories
    Path(config.files[0]).write_text(Path(config.files[0]).read_text() + "One more line.\n")
    assert prepare(config).directory not in directories | {first.directory}


def write_second(tmp_path):
    path = tmp_path / "second.txt"
    path.write_text("".join(f"A second book, chapter {i}.\n\n" for i in range(50)))
    return str(path)


def test_the_same_bytes_each_time(config, tmp_path):
    a = prepare(config).directory
    b = prepare(changed(config, root=str(tmp_path / "other"))).directory
    assert a.name == b.name
    for path in a.iterdir():
        assert path.read_bytes() == (b / path.name).read_bytes()


def test_small_batches_change_nothing(config, tmp_path, monkeypatch):
    whole = prepare(config).directory
    monkeypatch.setattr(prepare_module, "_BATCH_CHARACTERS", 50)
    parts = prepare(changed(config, root=str(tmp_path / "parts"))).directory
    assert (whole / "train.bin").read_bytes() == (parts / "train.bin").read_bytes()


def test_tokenizer_from_a_file(config, tmp_path):
    bpe = prepare(config)
    path = bpe.directory / "tokenizer.json"
    copy = tmp_path / "copy.json"
    copy.write_bytes(path.read_bytes())
    prepared = prepare(changed(config, tokenizer=TokenizerKind.file, tokenizer_file=str(copy)))
    assert prepared.tokenizer.sha256 == bpe.tokenizer.sha256
    assert (prepared.directory / "train.bin").read_bytes() == (bpe.directory / "train.bin").read_bytes()
    with pytest.raises(ValueError, match=r"data\.tokenizer=file needs data\.tokenizer_file"):
        prepare(changed(config, tokenizer=TokenizerKind.file))
    with pytest.raises(ValueError, match=r"no\.json cannot be read"):
        prepare(changed(config, tokenizer=TokenizerKind.file, tokenizer_file="no.json"))


def test_errors_come_before_work_and_leave_nothing(config, tmp_path):
    with pytest.raises(ValueError, match=r"data\.vocab_size=100"):
        prepare(changed(config, vocab_size=100))
    (tmp_path / "few.txt").write_text("one line\nanother\n")
    with pytest.raises(ValueError, match=r"falls into validation \(2 in all.*raise data\.val_fraction"):
        prepare(changed(config, files=[str(tmp_path / "few.txt")], val_fraction=0.001))
    with pytest.raises(ValueError, match=r"left for training \(2 in all\); lower data\.val_fraction"):
        prepare(changed(config, files=[str(tmp_path / "few.txt")], val_fraction=0.999))
    assert listing(config.root) == []


def test_full_disk(config, monkeypatch):
    make = directory_module.tempfile.mkdtemp

    def with_full_disk(**options):
        path = make(**options)
        Path(path, "val.bin").symlink_to("/dev/full")
        return path

    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    monkeypatch.setattr(directory_module.tempfile, "mkdtemp", with_full_disk)
    with pytest.raises(ValueError, match=r"the disk is full: .* free some space or set data\.root"):
        prepare(config)
    assert listing(config.root) == []
    monkeypatch.undo()
    assert prepare(config).val.facts.documents


def test_root_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data\.root=.*file cannot be written"):
        prepare(changed(config, root=str(tmp_path / "file")))


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "train.bin", "val.offsets.npy"])
def test_damage_is_named(config, name):
    directory = prepare(config).directory
    path = directory / name
    data = path.read_bytes()
    for bad in (data[: len(data) // 2], b"", None):
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        else:
            path.symlink_to("nowhere")
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            prepare(config)
    path.unlink()
    path.write_bytes(data)
    open_prepared(directory, verify=True)


def test_flipped_bits_are_found_on_request(config):
    directory = prepare(config).directory
    path = directory / "val.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    open_prepared(directory)
    with pytest.raises(ValueError, match=r"val\.bin does not have the content"):
        open_prepared(directory, verify=True)


def test_foreign_tokenizer_and_format(config):
    directory = prepare(config).directory
    other = prepare(changed(config, vocab_size=270)).directory
    good = (directory / "tokenizer.json").read_bytes()
    (directory / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="is not the tokenizer that the corpus was prepared with"):
        open_prepared(directory)
    (directory / "tokenizer.json").write_bytes(good)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["settings"]["format"] = 99
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="has format 99, this version of blockdiff reads 1"):
        open_prepared(directory)
    with pytest.raises(ValueError, match=r"nowhere/manifest\.json cannot be read"):
        open_prepared("nowhere")


SCRIPT = """
import sys, time
from blockdiff.data import prepare as module
from blockdiff.data.config import DataConfig
from blockdiff.data.prepare import prepare
from blockdiff.data.config import Source
from blockdiff.data.documents import Document
if len(sys.argv) > 3:
    save = module.Tokenizer.save
    def slow(self, path):
        print("writing", flush=True)
        time.sleep(float(sys.argv[3]))
        save(self, path)
    module.Tokenizer.save = slow
prepared = prepare(DataConfig(source=Source.text, files=sys.argv[1], root=sys.argv[2], vocab_size=300,
                              document=Document.line))
print(prepared.directory, flush=True)
"""


def start(config, *options):
    command = [sys.executable, "-c", SCRIPT, config.files[0], config.root, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once(config):
    processes = [start(config, "0.3") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len({out.splitlines()[-1] for out, _ in outputs}) == 1
    assert listing(config.root) == [prepare(config).directory.name]
    assert all("writing" in out for out, _ in outputs), "both must have been at work"


def test_killed_while_writing(config):
    process = start(config, "60")
    assert process.stdout.readline().strip() == "writing"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    (left,) = listing(config.root)
    assert left.startswith(f".preparing-{socket.gethostname()}-{process.pid}-")
    live = Path(config.root) / f".preparing-{socket.gethostname()}-{os.getpid()}-x"
    foreign = Path(config.root) / f".preparing-elsewhere-{process.pid}-x"
    live.mkdir()
    foreign.mkdir()
    prepared = prepare(config)
    assert listing(config.root) == sorted([live.name, foreign.name, prepared.directory.name])


def test_progress_is_one_plain_line_a_step(config, capfd):
    prepare(config)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["Training", "Tokenising"]
    prepare(config)
    assert capfd.readouterr().err == ""


def test_config_takes_one_file_or_many_from_the_command_line():
    schema = OmegaConf.structured(DataConfig)
    for override, expected in (("files=a.txt", "a.txt"), ("files=[a.txt,b*.txt]", ["a.txt", "b*.txt"])):
        key, value = override.split("=")
        merged = OmegaConf.merge(schema, OmegaConf.create({key: yaml.safe_load(value)}))
        assert OmegaConf.to_object(merged).files == expected


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_conf_files_fit_the_config(path):
    merged = OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.load(path))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, DataConfig)
    assert config.global_batch_size % config.micro_batch_size == 0
    assert (config.source is Source.hub) == bool(config.hub_name)
    assert (config.tokenizer is TokenizerKind.file) == bool(config.tokenizer_file)


def test_the_presets_are_there():
    names = {path.stem for path in CONF.glob("*.yaml")}
    assert names == {"stdlib", "text", "tinystories", "openwebtext", "fineweb_edu", "wikitext103", "lm1b"}


def test_memory_stays_small_for_a_large_file(tmp_path):
    path = tmp_path / "large.txt"
    with path.open("w") as file:
        for i in range(110):
            file.write(f"line {i} of a long text without end, " * 3000 + "\n")
    code = (
        "import resource, sys\n"
        "from blockdiff.data.config import DataConfig, Source\n"
        "from blockdiff.data.prepare import prepare\n"
        "from blockdiff.data.tokenizer import TokenizerKind\n"
        "def run(path):\n"
        "    kind = TokenizerKind.bytes\n"
        "    prepare(DataConfig(source=Source.text, files=path, root=sys.argv[3], tokenizer=kind))\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(run(sys.argv[1]), run(sys.argv[2]))\n"
    )
    small = tmp_path / "small.txt"
    small.write_text("line of a text\n" * 200_000)
    out = subprocess.run(
        [sys.executable, "-c", code, str(small), str(path), str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    before, after = map(int, out.split())
    assert after - before < 20_000, f"{path.stat().st_size:,} bytes raised the peak by {after - before:,} KiB"
