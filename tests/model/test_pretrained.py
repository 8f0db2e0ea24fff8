"""Loading of Hugging Face directories: what is read, and that whatever does not fit is refused by name."""

import json
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the extra hf is not installed")

from pretrained_models import save_model, save_tokenizer
from safetensors.torch import load_file, save_file

from blockdiff.model.pretrained import load_pretrained


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("hf") / "gpt2")


@pytest.fixture
def directory(whole, tmp_path):
    import shutil

    return shutil.copytree(whole, tmp_path / "gpt2")


def load(directory, dtype=torch.float64):
    return load_pretrained(directory, f"judge=hf:{directory}", torch.device("cpu"), dtype)


def refused(directory, *texts):
    with pytest.raises(ValueError) as caught:
        load(directory)
    assert f"judge=hf:{directory}" in str(caught.value)
    for text in texts:
        assert text in str(caught.value)


def edit(directory, name, **values):
    data = json.loads((directory / name).read_text()) | values
    (directory / name).write_text(json.dumps(data))


def test_weights_are_those_of_the_file_in_the_precision_asked_for(whole):
    found = load(whole)
    state = load_file(whole / "model.safetensors")
    for name, weight in found.model.transformer.state_dict().items():
        torch.testing.assert_close(weight, state[f"transformer.{name}"].double(), rtol=0, atol=0)
    assert not found.model.training
    assert found.context == 64
    assert found.bos == "<|endoftext|>"
    assert load(whole, torch.bfloat16).model.dtype == torch.bfloat16


def test_tokens_begin_where_their_characters_do(whole):
    model = load(whole)
    # A space belongs to the word behind it, although this tokenizer's own offsets leave it out.
    assert model.encode("the cat")[1] == [0, 3]
    # A character that was not in its corpus is a token a byte.
    assert model.encode("the ¥")[1] == [0, 3, 4, 4]
    ids, _ = model.encode("<|endoftext|>")
    assert model.bos_id not in ids  # letters, as anyone may write them


def test_no_directory(tmp_path):
    refused(tmp_path / "nowhere", "no local Hugging Face model directory", "nothing is downloaded")
    refused(tmp_path, "has no config.json")


def test_missing_extra(whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(whole, "pip install 'blockdiff[hf]'")


def test_adapters_are_not_followed(directory):
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere"}))
    refused(directory, "adapter")


def test_other_architectures(directory):
    edit(directory, "config.json", architectures=["GPT2ForSequenceClassification"])
    refused(directory, "no causal language model", "GPT2ForSequenceClassification")
    edit(directory, "config.json", architectures=None)
    refused(directory, "no architecture")


def test_a_model_that_looks_ahead(tmp_path):
    """Its architecture passes for causal, its attention is not."""
    refused(save_model(tmp_path / "bert", "bert"), "changes with tokens behind it")


def test_code_of_the_directory_is_never_run(directory):
    (directory / "modeling.py").write_text("raise SystemExit('this code ran')")
    edit(
        directory,
        "config.json",
        model_type="own",
        auto_map={"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"},
    )
    refused(directory, "never run")


def test_pickled_weights_are_never_read(directory):
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(state, directory / "pytorch_model.bin")
    refused(directory, "pickled weights are never read")


def test_missing_and_unexpected_tensors_are_named(directory):
    path = directory / "model.safetensors"
    state = load_file(path)
    taken = state.pop("transformer.h.1.mlp.c_fc.weight")
    save_file(state, path, metadata={"format": "pt"})
    refused(directory, "missing: transformer.h.1.mlp.c_fc.weight")
    save_file(
        state | {"transformer.h.1.mlp.c_fc.weight": taken, "more": torch.zeros(1)}, path, metadata={"format": "pt"}
    )
    refused(directory, "unexpected: more")


def test_other_shapes(directory):
    edit(directory, "config.json", n_inner=48)
    refused(directory)


def test_truncated_weights(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(directory, "the weights cannot be loaded")


def test_tokenizers_that_do_not_fit(directory, tmp_path):
    data = json.loads((directory / "tokenizer.json").read_text())
    data["added_tokens"].append(data["added_tokens"][0] | {"id": 297, "content": "<|more|>"})
    (directory / "tokenizer.json").write_text(json.dumps(data))
    refused(directory, "ids up to 297", "embeddings for 297")
    (directory / "tokenizer.json").write_text("{}")
    refused(directory, "cannot be read")
    (directory / "tokenizer.json").unlink()
    refused(directory, "no tokenizer.json")
    save_tokenizer(directory, None)
    assert load(directory).bos_id is None
