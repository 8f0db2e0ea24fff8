"""From a config to a tokenised corpus on the disk: done once, found again by its fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockdiff.data.config import DataConfig
from blockdiff.data.directory import appearing
from blockdiff.data.documents import Document, Piece, Split
from blockdiff.data.progress import progress
from blockdiff.data.sources import Corpus, open_corpus
from blockdiff.data.store import ShardFacts, ShardWriter, TokenStore, damaged
from blockdiff.data.tokenizer import Tokenizer, TokenizerKind, byte_tokenizer, train_bpe

FORMAT = 1  # of the shards and of everything that changes tokens without being a key of the config
_BATCH_CHARACTERS = 1 << 20  # tokenised at once; each token takes about 100 bytes of memory here


@dataclass
class PreparedData:
    """A tokenised corpus. ``manifest`` holds what is known of it: see `data/README.md` for its keys."""

    directory: Path
    train: TokenStore
    val: TokenStore
    tokenizer: Tokenizer
    manifest: dict[str, Any]


def prepare(config: DataConfig) -> PreparedData:
    """Finds the corpus that the config describes under ``data.root``, or makes it.

    The directory appears whole or not at all: it is written under another name, forced to the disk and
    renamed. Two processes may prepare the same corpus at once; the first to finish wins and both use its
    result. With several training processes let one call this before the others: they then find the
    directory.

    Raises:
        ValueError: bad config, bad sources, a damaged directory, an empty split or a full disk.
    """
    corpus = open_corpus(config)
    tokenizer = _ready_tokenizer(config)
    settings = {"format": FORMAT, **corpus.settings, **_tokenizer_settings(config, tokenizer)}
    root = Path(config.root).expanduser()
    if "revision" in settings and settings["revision"] is None:
        return open_prepared(_prepared_before(root, config, settings))
    fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    directory = root / f"{_file_name(corpus.name)}-{fingerprint[:12]}"
    if directory.exists():
        return open_prepared(directory)
    with appearing(directory) as temporary:
        tokenizer = tokenizer or _train_tokenizer(config, corpus)
        manifest = _write_shards(corpus, tokenizer, temporary)
        manifest = {"name": corpus.name, "fingerprint": fingerprint, "settings": settings, **manifest}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return open_prepared(directory)


def open_prepared(directory: str | Path, verify: bool = False) -> PreparedData:
    """Opens a directory that `prepare` made; ``verify`` reads everything and compares the hashes.

    Raises:
        ValueError: the directory is missing, incomplete or damaged; names the file.
    """
    directory = Path(directory)
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        shards = {split: ShardFacts(**facts) for split, facts in manifest["splits"].items()}
        tokenizer_sha256, version = manifest["tokenizer"]["sha256"], manifest["settings"]["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"cannot be read ({type(error).__name__}: {error})") from error
    if version != FORMAT:
        raise damaged(path, f"has format {version}, this version of blockdiff reads {FORMAT}")
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    if tokenizer.sha256 != tokenizer_sha256:
        raise damaged(directory / "tokenizer.json", "is not the tokenizer that the corpus was prepared with")
    train, val = (TokenStore(directory, split.value, shards[split.value], verify) for split in Split)
    return PreparedData(directory, train, val, tokenizer, manifest)


def _ready_tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer if it is known without the corpus."""
    match config.tokenizer:
        case TokenizerKind.bytes:
            return byte_tokenizer()
        case TokenizerKind.bpe:
            if config.vocab_size < 257:
                train_bpe([], config.vocab_size)
            return None
        case TokenizerKind.file:
            if not config.tokenizer_file:
                raise ValueError(
                    "data.tokenizer=file needs data.tokenizer_file, a tokenizer.json or a model's name"
                )
            path = Path(config.tokenizer_file).expanduser()
            if path.exists() or path.suffix == ".json":
                return Tokenizer.load(path)
            return Tokenizer.from_hub(config.tokenizer_file)


def _tokenizer_settings(config: DataConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is not None:
        return {"tokenizer": tokenizer.sha256}
    return {"tokenizer": "bpe", "vocab_size": config.vocab_size, "bpe_train_bytes": config.bpe_train_bytes}


def _train_tokenizer(config: DataConfig, corpus: Corpus) -> Tokenizer:
    total = min(corpus.bytes, config.bpe_train_bytes) if corpus.bytes else None
    with progress(f"Training a tokenizer of {config.vocab_size:,} tokens on {corpus.name}", total) as advance:

        def texts() -> Iterator[str]:
            done = 0
            for piece in corpus.pieces():
                size = len(piece.text.encode("utf-8"))
                if piece.split is Split.train:
                    if done >= config.bpe_train_bytes:
                        return
                    done += size
                    yield piece.text
                advance(size)

        return train_bpe(texts(), config.vocab_size)


def _write_shards(corpus: Corpus, tokenizer: Tokenizer, directory: Path) -> dict[str, Any]:
    writers = {split: ShardWriter(directory, split.value, tokenizer.vocab_size) for split in Split}
    with progress(f"Tokenising {corpus.name} into {directory.parent}", corpus.bytes) as advance:
        for pieces in _batches(corpus.pieces()):
            sizes = [len(piece.text.encode("utf-8")) for piece in pieces]
            ids = tokenizer.encode_batch([piece.text for piece in pieces])
            for split, writer in writers.items():
                own = [i for i, piece in enumerate(pieces) if piece.split is split]
                ends = [pieces[i].ends for i in own]
                writer.append([ids[i] for i in own], ends, sum(sizes[i] for i in own))
            advance(sum(sizes))
    shards = {split: writer.close() for split, writer in writers.items()}
    for split, facts in shards.items():
        if not facts.documents:
            raise ValueError(_empty_split(split, shards, corpus))
    tokenizer.save(directory / "tokenizer.json")
    val = shards[Split.val]
    counts = {split: _with_ends(writers[split].counts_V, shards[split], tokenizer.eos_id) for split in Split}
    return {
        "split_rule": corpus.split_rule,
        "files": [asdict(fact) for fact in corpus.files],
        "tokenizer": {
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
        },
        "splits": {split.value: asdict(facts) for split, facts in shards.items()},
        "bytes_per_token": val.bytes / (val.tokens + val.documents),
        "unigram_nats": unigram_nats(counts[Split.train], counts[Split.val]),
    }


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _with_ends(counts_V: NDArray[np.int64], facts: ShardFacts, eos_id: int) -> NDArray[np.int64]:
    counts_V = counts_V.copy()
    counts_V[eos_id] += facts.documents
    return counts_V


def unigram_nats(train_counts_V: NDArray[np.int64], val_counts_V: NDArray[np.int64]) -> float:
    """Nats per token of validation under the add-one smoothed token frequencies of training.

    What a model reaches that knows nothing but how often each token occurs; end-of-document tokens count.
    """
    log_p_V = np.log(train_counts_V + 1.0) - np.log(float(train_counts_V.sum() + len(train_counts_V)))
    return float(-(val_counts_V * log_p_V).sum() / val_counts_V.sum())


def _empty_split(split: Split, shards: dict[Split, ShardFacts], corpus: Corpus) -> str:
    total = sum(facts.documents for facts in shards.values())
    if split is Split.train:
        return f"no document of {corpus.name} is left for training ({total} in all); lower data.val_fraction"
    return (
        f"no document of {corpus.name} falls into validation ({total} in all, split {corpus.split_rule}): "
        "raise data.val_fraction, use more text, or smaller documents (data.document=paragraph)"
    )


def _prepared_before(root: Path, config: DataConfig, settings: dict[str, Any]) -> Path:
    """The newest corpus that was prepared from the same data set at any revision: the Hub is out of reach."""
    found = []
    for path in sorted(root.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime):
        try:
            before = json.loads(path.read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if {**before, "revision": None} == settings:
            found.append(path.parent)
    if not found:
        raise ValueError(
            f"data.hub_name={config.hub_name} is no directory and cannot be found on the Hugging Face Hub "
            f"(network? name?), and {root} has no corpus prepared from it with these settings"
        )
    return found[-1]


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".") or "corpus"
