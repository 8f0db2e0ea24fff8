"""Text to token ids and back: bytes, a byte-level BPE trained here, or any ``tokenizer.json``.

All three are a `tokenizers.Tokenizer`, so that a run directory always holds the same kind of file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

EOS = "<|endoftext|>"
_EOS_NAMES = (
    EOS,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
    "<|im_end|>",
    "<|eot_id|>",
    "[SEP]",
)


class TokenizerKind(Enum):
    """How text becomes tokens."""

    bytes = "bytes"
    bpe = "bpe"
    file = "file"


class Tokenizer:
    """A `tokenizers.Tokenizer` with an end-of-document token.

    No token stands for special text: a document that *contains* ``<|endoftext|>`` is encoded as the
    ordinary letters that it is made of, so that text can never end a document or a sample; nothing is
    added, padded or cut off.
    """

    def __init__(self, inner: tokenizers.Tokenizer, origin: str = "tokenizer"):
        inner.encode_special_tokens = True
        inner.no_padding()
        inner.no_truncation()
        vocabulary = inner.get_vocab(with_added_tokens=True)
        name = next((name for name in _EOS_NAMES if name in vocabulary), None)
        if name is None:
            known = " ".join(_EOS_NAMES)
            raise ValueError(
                f"{origin} has no end-of-document token; add one of these as special token: {known}"
            )
        self._inner = inner
        self.eos_id: int = vocabulary[name]
        self.vocab_size: int = max(vocabulary.values()) + 1  # ids may have gaps

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a ``tokenizer.json``.

        Raises:
            ValueError: the file is missing, no tokenizer, or has no end-of-document token.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"tokenizer file {path} cannot be read ({error})") from error
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, origin: str = "tokenizer") -> Tokenizer:
        """The tokenizer that ``to_json`` wrote; ``origin`` names it in errors."""
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"{origin} is not a tokenizer.json of the tokenizers library ({error})"
            ) from error
        return cls(inner, origin)

    @classmethod
    def from_hub(cls, name: str) -> Tokenizer:
        """The tokenizer of a model on the Hugging Face Hub, e.g. ``gpt2``.

        Raises:
            ValueError: there is none of that name, or the Hub cannot be reached.
        """
        try:
            return cls(tokenizers.Tokenizer.from_pretrained(name), name)
        except Exception as error:
            message = str(error).strip().splitlines()[0]
            raise ValueError(
                f"data.tokenizer_file={name} is neither a file nor the name of a model on the Hub ({message})"
            ) from error

    def to_json(self) -> str:
        """The whole tokenizer as one JSON text, the same after a round trip."""
        return self._inner.to_str()

    def save(self, path: str | Path) -> None:
        """Writes ``tokenizer.json``."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @cached_property
    def sha256(self) -> str:
        """Hash of the JSON text: equal for tokenizers that do the same."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    @cached_property
    def byte_level(self) -> bool:
        """Whether each token is a fixed string of bytes, so that any text can be read back exactly."""
        decoder = json.loads(self.to_json()).get("decoder") or {}
        return "ByteLevel" in {
            part["type"] for part in [decoder, *decoder.get("decoders", [])] if "type" in part
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end-of-document token."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode` for many texts, on all cores."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special tokens leave no text, bytes that are not UTF-8 become U+FFFD."""
        if self.byte_level:
            return self.decode_bytes(ids).decode("utf-8", errors="replace")
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of token ids; of a byte-level tokenizer they add up, so that a stream may cut anywhere.

        A tokenizer of another kind has only whole texts: there the bytes are those of `decode`.
        """
        if self.byte_level:
            return b"".join([self._bytes[i] for i in ids])
        return self.decode(ids).encode("utf-8")

    @cached_property
    def _bytes(self) -> list[bytes]:
        byte_of = {character: byte for byte, character in enumerate(_byte_alphabet())}
        table = [b""] * self.vocab_size
        for token, index in self._inner.get_vocab(with_added_tokens=False).items():
            table[index] = b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode("utf-8") for c in token)
        for index, added in self._inner.get_added_tokens_decoder().items():
            table[index] = b"" if added.special else added.content.encode("utf-8")
        return table


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens, whose ids are the bytes, and the end-of-document token 256."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    inner = _byte_level(models.BPE(vocab=vocabulary, merges=[]), use_regex=False)
    inner.add_special_tokens([EOS])
    return Tokenizer(inner)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) of at most ``vocab_size`` tokens.

    The end-of-document token is one of them. The result depends on the texts alone, not on threads. Small
    texts give fewer tokens than asked for: pairs that occur once are not merged.

    Raises:
        ValueError: ``vocab_size`` does not hold the 256 bytes and the end token.
    """
    if vocab_size < 257:
        raise ValueError(
            f"data.vocab_size={vocab_size} must be at least 257: 256 bytes and the end-of-document token"
        )
    inner = _byte_level(models.BPE(), use_regex=True)
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer=trainer)
    return Tokenizer(inner)


def _byte_level(model: models.BPE, use_regex: bool) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = decoders.ByteLevel()
    return inner


def _byte_alphabet() -> Iterator[str]:
    """The printable character that stands for each byte in byte-level tokenizers, in the order of the bytes.

    Printable Latin-1 characters stand for themselves, the others for the code points from 256 on.
    """
    shifted = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte)
        else:
            yield chr(shifted)
            shifted += 1
