"""Data sets by their name on the Hugging Face Hub, or in a local directory that `datasets` can load."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from blockdiff.data.config import DataConfig
from blockdiff.data.documents import Document, Split, cut_document, digest, documents_in, split_by_digest
from blockdiff.data.rows import column_texts


_ROWS = 1000
_OWN_VALIDATION = ("validation", "valid", "val", "dev")


@dataclass
class HubPlace:
    """A data set found: its revision (None: unreachable) and its own validation split ("": none)."""

    revision: str | None
    val_split: str


def find(config: DataConfig) -> HubPlace:
    """Looks the data set up and fixes its revision, so that a change upstream makes another corpus.

    Where the Hub cannot be reached the revision is None: a corpus prepared before can still be used.

    Raises:
        ValueError: no name is given, or the data set has no such split.
    """
    from datasets import get_dataset_split_names, load_dataset_builder

    if not config.hub_name:
        raise ValueError(
            "data.hub_name is empty: data.source=hub needs a data set, e.g. roneneldan/TinyStories"
        )
    directory = Path(config.hub_name)
    try:
        builder = load_dataset_builder(config.hub_name, config.hub_config, revision=config.hub_revision)
        splits = get_dataset_split_names(config.hub_name, config.hub_config, revision=config.hub_revision)
    except (ConnectionError, FileNotFoundError) as error:
        if directory.exists():
            raise ValueError(f"data.hub_name={config.hub_name}: {error}") from error
        return HubPlace(revision=None, val_split="")
    asked = config.hub_val_split
    for key, name in (("hub_split", config.hub_split), ("hub_val_split", asked)):
        if re.split(r"[\[+]", name)[0] not in [*splits, "auto", "none"]:
            raise ValueError(f"data.{key}={name}: {config.hub_name} has only {', '.join(splits)}")
    own = next((name for name in _OWN_VALIDATION if name in splits and name != config.hub_split), "none")
    chosen = own if asked == "auto" else asked
    if chosen == config.hub_split:
        raise ValueError(
            f"data.hub_val_split={asked} is the training split too; use auto, none or another split"
        )
    revision = _directory_hash(directory) if directory.is_dir() else builder.hash
    return HubPlace(revision, val_split="" if chosen == "none" else chosen)


def documents(config: DataConfig, place: HubPlace, kind: Document) -> Iterator[tuple[Split, Iterable[str]]]:
    """The documents with their split: by the data set's own validation split, else by a hash of the text.

    Some data sets hold the same document in both of their splits: such a one is left out of training. With
    ``document=file`` the rows of a split are one text (as wikitext, whose rows are lines).
    """
    if kind is Document.file:
        yield from _whole_splits(config, place)
    elif not place.val_split:
        for text in _texts(config, place, config.hub_split, kind):
            yield split_by_digest(digest(text), config.val_fraction), [text]
    else:
        seen = set()
        for text in _texts(config, place, place.val_split, kind):
            seen.add(digest(text)[:8])
            yield Split.val, [text]
        for text in _texts(config, place, config.hub_split, kind):
            if digest(text)[:8] not in seen:
                yield Split.train, [text]


def _whole_splits(config: DataConfig, place: HubPlace) -> Iterator[tuple[Split, Iterable[str]]]:
    def rows(split: str) -> Iterator[str]:
        texts = _texts(config, place, split, Document.row)
        return (text if text.endswith("\n") else text + "\n" for text in texts)

    if place.val_split:
        yield Split.val, rows(place.val_split)
        yield Split.train, rows(config.hub_split)
    else:
        yield from cut_document(lambda: rows(config.hub_split), config.val_fraction)


def _texts(config: DataConfig, place: HubPlace, split: str, kind: Document) -> Iterator[str]:
    from datasets import load_dataset

    local = Path(config.hub_name).is_dir()
    rows = load_dataset(
        config.hub_name,
        config.hub_config,
        split=split,
        streaming=config.streaming,
        revision=None if local else place.revision,
    )
    if rows.column_names and config.text_column in rows.column_names:
        rows = rows.select_columns([config.text_column])
    texts = column_texts(rows.iter(_ROWS), config.text_column, f"data set {config.hub_name}, split {split}")
    parts = (part for text in texts for part in documents_in([text], kind))
    yield from islice(parts, config.max_documents)


def _directory_hash(directory: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        if not any(part.startswith(".") for part in Path(name).parts):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{name}\0{content}\n".encode())
    return total.hexdigest()
