"""Every YAML file composes, and what does not fit is named before any work."""

from pathlib import Path

import pytest

from blockdiff.composition import CONF, load_config
from blockdiff.config import VERBS, TrainConfig
from blockdiff.core.corruption import CorruptionKind
from blockdiff.records import from_plain, to_plain

GROUP_FILES = [path.relative_to(CONF) for path in sorted(CONF.glob("*/*.yaml"))]


def verbs_with(path: Path) -> list[str]:
    if path.stem.startswith("tradeoff"):
        return ["sweep"]
    return {"sampler": ["train", "sample"], "data": ["train", "prepare"]}.get(path.parent.name, ["train"])


@pytest.mark.parametrize("path", GROUP_FILES, ids=str)
def test_every_group_file_composes(path: Path):
    for verb in verbs_with(path):
        needed = ["checkpoint=x"] if verb == "sample" else []
        assert isinstance(load_config(verb, [f"{path.parent.name}={path.stem}", *needed]), VERBS[verb])


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_composes_by_itself(verb):
    needed = {"sample": ["checkpoint=x"], "evaluate": ["checkpoint=x"], "measure": ["checkpoint=x", "output=x"]}
    assert isinstance(load_config(verb, needed.get(verb, [])), VERBS[verb])


def test_values_reach_the_dataclasses():
    config = load_config("train", ["model=tiny", "noise=bernoulli_clipped", "optimizer.lr=0.5", "block_size=4"])
    assert (config.model.width, config.optimizer.lr, config.block_size) == (448, 0.5, 4)
    assert config.noise.corruption is CorruptionKind.bernoulli
    assert config.noise.clip == [0.3, 0.8]


def test_published_recipes_hold_their_numbers():
    for name, size in (("bd3lm_owt", 16), ("mdlm_owt", 1024), ("ar_owt", 1)):
        config = load_config("train", [f"experiment={name}"])
        assert (config.model.layers, config.model.width, config.seq_len, config.block_size) == (12, 768, 1024, size)
        assert (config.data.global_batch_size, config.trainer.max_steps) == (512, 1_000_000)


def test_a_run_config_survives_its_yaml():
    config = load_config("train", ["data=text", "data.files=[a.txt,b.txt]", "model.kv_heads=2"])
    assert from_plain(TrainConfig, to_plain(config)) == config


@pytest.mark.parametrize("files", ["book.txt", "[a.txt,b.txt]", "'*.txt'"])
def test_files_may_be_one_or_a_list(files):
    given = load_config("train", ["data=text", f"data.files={files}"]).data.files
    assert given == (["a.txt", "b.txt"] if files.startswith("[") else files.strip("'"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["modle.layers=3"], r"unknown key modle.layers in modle.layers=3; did you mean model.layers\?"),
        (["trainer.maxsteps=3"], r"did you mean trainer.max_steps\?"),
        (["+trainer.maxsteps=3"], r"did you mean trainer.max_steps\?"),
        (["+colour=3"], "unknown key colour"),
        (["model=huge"], "Available options in 'model'"),
        (["seed=abc"], "seed"),
        (["noise.corruption=gaussian"], "exact_count"),
        (["block_size=48"], "block_size=48 must divide seq_len=256; nearest: 32, 64"),
        (["noise.clip=[0.1,0.9]"], "needs noise.corruption=bernoulli"),
        (["model.heads=3"], "model.heads=3 must divide model.width=128"),
        (["optimizer.lr=-1"], "optimizer.lr=-1"),
        (["trainer.max_steps=0"], "trainer.max_steps=0"),
    ],
)
def test_bad_input_is_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config("train", overrides)


def test_a_missing_checkpoint_is_asked_for():
    with pytest.raises(ValueError, match="checkpoint is needed: blockdiff sample checkpoint="):
        load_config("sample", [])
