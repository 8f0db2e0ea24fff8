"""Hub data sets, tested on local directories that `datasets` loads by the same door."""

import json

import pytest

from blockdiff.data.documents import Document, Split
from blockdiff.data.config import DataConfig
from blockdiff.data.prepare import prepare
from blockdiff.data.config import Source
from blockdiff.data.sources import open_corpus
from blockdiff.data.tokenizer import TokenizerKind


def write_split(directory, split, texts):
    directory.mkdir(exist_ok=True)
    (directory / f"{split}.jsonl").write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in texts))


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return DataConfig(
        source=Source.hub,
        hub_name=str(tmp_path / "stories"),
        root=str(tmp_path / "data"),
        tokenizer=TokenizerKind.bytes,
        streaming=True,
    )


def documents(config):
    return [(split, "".join(chunks)) for split, chunks in open_corpus(config).documents()]


@pytest.mark.parametrize("streaming", [True, False])
def test_own_validation_split_without_its_copies_in_train(config, tmp_path, streaming, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    config.streaming = streaming
    write_split(tmp_path / "stories", "train", ["one", "shared", "two", "", "three"])
    write_split(tmp_path / "stories", "validation", ["shared", "four"])
    expected = [(Split.val, "shared"), (Split.val, "four")]
    expected += [(Split.train, text) for text in ("one", "two", "three")]
    assert documents(config) == expected
    config.max_documents = 2
    assert documents(config) == [*expected[:2], (Split.train, "one")]


def test_split_by_content_without_own_validation(config, tmp_path):
    texts = [f"story {i}" for i in range(200)]
    write_split(tmp_path / "stories", "train", texts * 2)
    splits = {text: split for split, text in documents(config)}
    assert 0 < sum(split is Split.val for split in splits.values()) < 30
    assert all(splits[text] is split for split, text in documents(config))


def test_none_and_named_validation(config, tmp_path):
    write_split(tmp_path / "stories", "train", [f"a{i}" for i in range(100)])
    write_split(tmp_path / "stories", "test", ["t"])
    config.hub_val_split = "test"
    assert documents(config)[0] == (Split.val, "t")
    config.hub_val_split = "none"
    assert "t" not in [text for _, text in documents(config)]
    for key, value in (("hub_val_split", "dev"), ("hub_split", "trian")):
        other = DataConfig(**{**vars(config), key: value})
        with pytest.raises(ValueError, match=rf"data\.{key}={value}: .* has only .*t"):
            open_corpus(other)
    config.hub_val_split = "train"
    with pytest.raises(ValueError, match="is the training split too"):
        open_corpus(config)


def test_rows_as_one_text(config, tmp_path):
    write_split(tmp_path / "stories", "train", ["= Title =\n", "line\n", "end"])
    write_split(tmp_path / "stories", "validation", ["v\n"])
    config.document = Document.file
    assert documents(config) == [(Split.val, "v\n"), (Split.train, "= Title =\nline\nend\n")]
    config.hub_val_split = "none"
    assert "cut at a line end" in open_corpus(config).split_rule
    (_, head), (_, tail) = documents(config)
    assert head + tail == "= Title =\nline\nend\n"


def test_prepared_once_and_again_when_the_data_change(config, tmp_path):
    write_split(tmp_path / "stories", "train", [f"story {i}" for i in range(99)])
    write_split(tmp_path / "stories", "validation", ["the end"])
    first = prepare(config)
    assert prepare(config).directory == first.directory
    assert first.manifest["splits"]["val"]["documents"] == 1
    assert "own split 'validation'" in first.manifest["split_rule"]
    write_split(tmp_path / "stories", "validation", ["another end"])
    assert prepare(config).directory != first.directory


def test_out_of_reach_but_prepared_before(config, tmp_path):
    write_split(tmp_path / "stories", "train", [f"story {i}" for i in range(99)])
    write_split(tmp_path / "stories", "validation", ["the end"])
    first = prepare(config)
    (tmp_path / "stories").rename(tmp_path / "elsewhere")
    config.hub_name = "somebody/stories"  # no network here: cannot be found
    manifest_path = first.directory / "manifest.json"
    manifest = json.loads(manifest_path.read_text())
    manifest["settings"]["hub"][0] = config.hub_name
    manifest_path.write_text(json.dumps(manifest))
    assert prepare(config).directory == first.directory
    config.val_fraction = 0.5
    with pytest.raises(
        ValueError, match=r"data\.hub_name=somebody/stories is no directory and cannot be found"
    ):
        prepare(config)


def test_name_is_needed():
    with pytest.raises(ValueError, match=r"data\.hub_name is empty"):
        open_corpus(DataConfig(source=Source.hub))
