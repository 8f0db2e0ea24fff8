"""Tiny Hugging Face models with tokenizers of their own, written to disk for the tests of judge and loader."""

import json
from pathlib import Path

import torch
import transformers

from blockdiff.data.tokenizer import EOS, train_bpe

CORPUS = ["the red cat sat on the mat, the old dog sat on the hat", "a naïve café – 20 €, the cat"] * 3


def save_tokenizer(directory: Path, bos: str | None) -> int:
    """A small byte-level BPE whose post-processor trims spaces off the offsets, as some published ones do; its size."""
    tokenizer = train_bpe(CORPUS, 300)
    data = json.loads(tokenizer.to_json())
    data["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (directory / "tokenizer.json").write_text(json.dumps(data))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS} | ({"bos_token": bos} if bos else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.vocab_size


def save_model(directory: Path, kind: str = "gpt2", context: int = 64, bos: str | None = EOS) -> Path:
    """A random model whose every weight matters: GPT-2 with beginning token, Llama or BERT."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    size = save_tokenizer(directory, bos)
    more = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    match kind:
        case "gpt2":
            config = transformers.GPT2Config(
                vocab_size=size, n_positions=context, n_embd=16, n_layer=2, n_head=2, **more
            )
            model = transformers.GPT2LMHeadModel(config)
        case "llama":
            config = transformers.LlamaConfig(
                vocab_size=size,
                max_position_embeddings=context,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=False,
                **more,
            )
            model = transformers.LlamaForCausalLM(config)
        case "bert":
            config = transformers.BertConfig(
                vocab_size=size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
            )
            model = transformers.BertLMHeadModel(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2) if weight.dim() > 1 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(directory)
    return directory
