"""The settings of data as one plain dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from blockdiff.data.documents import Document
from blockdiff.data.tokenizer import TokenizerKind


class Source(Enum):
    """Where the documents come from."""

    stdlib = "stdlib"
    text = "text"
    hub = "hub"


@dataclass
class DataConfig:
    """Where the text comes from, how it becomes tokens, and how tokens become batches.

    Attributes:
        source: the standard library, local files, or a Hugging Face data set.
        name: of the corpus, part of its directory's name; empty: taken from the source.
        root: directory for prepared corpora.
        files: for ``text``: a path or pattern, or a list of them.
        document: what one document is; ``auto``: the file for plain text, the row for tables.
        text_column: of JSON, CSV, Parquet and hub data sets.
        val_fraction: share of the documents for validation, where the source has no split of its own.
        max_documents: stop reading after so many documents (of each split of a hub data set).
        hub_name, hub_config, hub_revision, hub_split: as `datasets.load_dataset` takes them.
        hub_val_split: a split's name; ``auto``: ``validation`` or the like if there is one; ``none``.
        streaming: read a hub data set without storing a copy of it.
        tokenizer: ``bytes``, ``bpe`` (trained on the training split) or ``file``.
        tokenizer_file: for ``file``: a ``tokenizer.json``, or the name of a model on the Hub, e.g. ``gpt2``.
        vocab_size: for ``bpe``: number of tokens at most.
        bpe_train_bytes: for ``bpe``: train on so many bytes from the start of the training split.
        document_mask: attention and blocks stay within a document; documents are padded to whole blocks.
        global_batch_size: windows an optimizer step, over all devices.
        micro_batch_size: windows a forward pass on one device.
        workers: processes that load batches, on each device; 0: the training process itself.
        max_train_samples: train on the first so many windows only.
    """

    source: Source = Source.stdlib
    name: str = ""
    root: str = "data"
    files: Any = field(default_factory=list)
    document: Document = Document.auto
    text_column: str = "text"
    val_fraction: float = 0.05
    max_documents: int | None = None
    hub_name: str = ""
    hub_config: str | None = None
    hub_revision: str | None = None
    hub_split: str = "train"
    hub_val_split: str = "auto"
    streaming: bool = False
    tokenizer: TokenizerKind = TokenizerKind.bpe
    tokenizer_file: str = ""
    vocab_size: int = 1024
    bpe_train_bytes: int = 1_000_000_000
    document_mask: bool = True
    global_batch_size: int = 8
    micro_batch_size: int = 8
    workers: int = 0
    max_train_samples: int | None = None
