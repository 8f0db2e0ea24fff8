"""Causal language models from Hugging Face directories on this disk: the only door to `transformers` (extra `hf`).

Strict where the library only warns: local files only, weights from safetensors only, no code from the directory, every
tensor accounted for, and a look at whether a token's prediction really depends on nothing behind it.

Legend: B batch, L text length, V vocabulary, D width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class PretrainedLM:
    """A causal language model with a tokenizer of its own.

    Attributes:
        path: its directory.
        model: in evaluation mode.
        tokenizer: of the tokenizers library; adds, pads and cuts nothing, and reads special tokens in a text as the
            letters that they are written with.
        bos_id: token that its texts begin with, or None.
        bos: that token as it is written, or None.
        context: longest text in tokens, the beginning token counted; None: no limit.
    """

    path: Path
    model: nn.Module
    tokenizer: Any
    bos_id: int | None
    bos: str | None
    context: int | None

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text, and the character at which each token begins."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    @torch.no_grad()
    def read(self, tokens_BL: Tensor, live_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, L, V) of the token behind each position, and last hidden states (B, L, D).

        Args:
            tokens_BL: int64, on the model's device.
            live_BL: bool; padding stands behind the text only.
        """
        found = self.model(
            input_ids=tokens_BL, attention_mask=live_BL.long(), output_hidden_states=True, use_cache=False
        )
        return found.logits, found.hidden_states[-1]


def load_pretrained(path: Path, name: str, device: torch.device, dtype: torch.dtype) -> PretrainedLM:
    """Reads a directory that `save_pretrained` wrote; nothing is downloaded and no code of the directory is run.

    Args:
        path: the directory.
        name: the key and value that errors name, such as ``judge=hf:models/gpt2``.
        device: to compute on.
        dtype: to compute in.

    Raises:
        ValueError: the extra `hf` is missing; the directory is none, holds no causal language model, weights in
            another form than safetensors, too few or too many tensors, or no fast tokenizer that fits.
    """
    library = check_directory(path, name)
    config = _config(library, path, name)
    model = _model(library, path, name, config, dtype).to(device).eval().requires_grad_(False)
    tokenizer, bos_id, bos = _tokenizer(library, path, name)
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if highest >= rows:
        raise ValueError(
            f"{name}: tokenizer.json has ids up to {highest}, but the model has embeddings for {rows} tokens: put "
            "back the tokenizer that it was trained with"
        )
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    found = PretrainedLM(path, model, tokenizer, bos_id, bos, context)
    _check_causal(found, name, rows, device)
    return found


def check_directory(path: Path, name: str) -> ModuleType:
    """What can be said of a directory before anything is loaded; returns the library that will load it.

    Raises:
        ValueError: the extra `hf` is missing, or this is no directory of a whole model.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError(f"{name} needs the package transformers: pip install 'blockdiff[hf]'") from None
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{name}: {path} is no local Hugging Face model directory (it has no config.json); nothing is downloaded: "
            "name a directory that save_pretrained wrote"
        )
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{name} holds an adapter: merge it into its base model first and save that")
    return transformers


def _config(library: ModuleType, path: Path, name: str) -> Any:
    """The directory's config, which must be that of a causal language model."""
    try:
        config = library.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises what its many parts raise
        raise ValueError(
            f"{name}: config.json is of no model that transformers {library.__version__} knows, and code that comes "
            f"with a model is never run ({_first_line(error)})"
        ) from error
    known = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for entry in known for name in ([entry] if isinstance(entry, str) else entry)}
    given = config.architectures or []
    if not set(given) & names:
        raise ValueError(
            f"{name} is no causal language model: config.json names {', '.join(given) or 'no architecture'}; take one "
            "whose architecture predicts the next token, such as GPT2LMHeadModel or LlamaForCausalLM"
        )
    return config


def _model(library: ModuleType, path: Path, name: str, config: Any, dtype: torch.dtype) -> Any:
    """The model with exactly the weights of the directory."""
    # The key was renamed; given at loading, it leaves tables of angles in the precision that the model wants.
    key = "dtype" if int(library.__version__.partition(".")[0]) >= 5 else "torch_dtype"
    try:
        model, report = library.AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **{key: dtype},
        )
    except Exception as error:  # as above, of the safetensors library too
        raise ValueError(
            f"{name}: the weights cannot be loaded; they must be whole, of config.json's shapes, and safetensors, as "
            f"save_pretrained writes them: pickled weights are never read ({_first_line(error)})"
        ) from error
    wrong = {kind: _names(report.get(kind)) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()) or report.get("error_msgs"):
        said = "; ".join(f"{kind.partition('_')[0]}: {names}" for kind, names in wrong.items() if names)
        raise ValueError(
            f"{name}: the weights are not those of config.json's {type(model).__name__} "
            f"({said or report['error_msgs']}): save the whole model again with save_pretrained"
        )
    return model


def _names(keys: Any) -> str:
    """At most eight of the tensors."""
    found = sorted(key if isinstance(key, str) else str(key[0]) for key in keys or [])
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return ", ".join(found[:8]) + more


def _tokenizer(library: ModuleType, path: Path, name: str) -> tuple[Any, int | None, str | None]:
    """The tokenizer of tokenizer.json, and the token that texts begin with."""
    if not (path / "tokenizer.json").is_file():
        raise ValueError(
            f"{name} has no tokenizer.json, and only fast tokenizers tell where a token begins: save its fast "
            "tokenizer there with save_pretrained"
        )
    try:
        fast = library.PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        inner = fast.backend_tokenizer
        plain = json.loads(inner.to_str())
        # Without special tokens a post-processor does nothing but trim spaces off the offsets.
        plain |= {"post_processor": None, "padding": None, "truncation": None}
        tokenizer = type(inner).from_str(json.dumps(plain))
    except Exception as error:  # as above, of the tokenizers library too
        raise ValueError(f"{name}: tokenizer.json or the files beside it cannot be read ({error})") from error
    tokenizer.encode_special_tokens = True
    return tokenizer, fast.bos_token_id, fast.bos_token


def _check_causal(model: PretrainedLM, name: str, rows: int, device: torch.device) -> None:
    """Raises a ValueError where a later token changes what is said of an earlier one.

    Some architectures that pass for causal attend in both directions by a switch in their config.
    """
    tokens_BL = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 2]], device=device) % rows
    logits_BLV, _ = model.read(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool))
    first_LV, second_LV = logits_BLV[:, :2].double()
    room = 16 * torch.finfo(logits_BLV.dtype).eps * first_LV.abs().max()
    if not bool(((first_LV - second_LV).abs() <= room).all()):
        raise ValueError(
            f"{name} is no causal language model: its prediction at one token changes with tokens behind it "
            "(is_decoder=false in config.json, perhaps)"
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
