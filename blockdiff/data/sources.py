"""Where documents come from: the interpreter's standard library, local files, or a Hugging Face data set."""

from __future__ import annotations

import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from sysconfig import get_path
from typing import TYPE_CHECKING, Any

from blockdiff.data import hub
from blockdiff.data.config import DataConfig, Source
from blockdiff.data.documents import (
    Document,
    Piece,
    Split,
    cut_document,
    digest,
    documents_in,
    marked_pieces,
    split_by_digest,
)
from blockdiff.data.files import ROW_FORMATS, FileFacts, expand_files, format_of, scan, stem_of, text_chunks
from blockdiff.data.progress import progress
from blockdiff.data.rows import row_texts


# Tests are not what a reader calls the library's source, installed packages are not part of it, and these
# two hold tables and documentation that a script wrote (character maps, the help topics): 2 MB that drown
# the code.
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_GENERATED = {"encodings", "pydoc_data"}

_BY_CONTENT = "by a hash of the document"

# A document's text comes in chunks, which are read before the next document is asked for.
SplitDocument = tuple[Split, Iterable[str]]


@dataclass
class Corpus:
    """Documents that can be read any number of times, always in the same order.

    Attributes:
        name: names the directory of the prepared corpus.
        settings: all that the documents and their split depend on; JSON values.
        split_rule: how validation was chosen, in words.
        files: facts on the source files, for the manifest.
        bytes: of text, about; None where it is not known before all has been read.
        documents: starts a new reading.
    """

    name: str
    settings: dict[str, Any]
    split_rule: str
    documents: Callable[[], Iterator[SplitDocument]]
    files: list[FileFacts] = field(default_factory=list)
    bytes: int | None = None

    def pieces(self) -> Iterator[Piece]:
        """All documents as pieces that fit into memory."""
        for split, chunks in self.documents():
            yield from marked_pieces(split, chunks)


def open_corpus(config: DataConfig) -> Corpus:
    """Finds and checks the sources and fixes the split; nothing is tokenised yet.

    Raises:
        ValueError: a key does not fit, or a file is missing, empty, damaged or not UTF-8 text.
    """
    if not 0 < config.val_fraction < 1:
        raise ValueError(f"data.val_fraction={config.val_fraction} must lie between 0 and 1, e.g. 0.05")
    if config.max_documents is not None and config.max_documents < 2:
        raise ValueError(
            f"data.max_documents={config.max_documents} must be at least 2, one for each split, or null"
        )
    match config.source:
        case Source.stdlib:
            return _stdlib_corpus(config)
        case Source.text:
            return _text_corpus(config)
        case Source.hub:
            return _hub_corpus(config)


def _stdlib_corpus(config: DataConfig) -> Corpus:
    root = Path(get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if _is_library(path.relative_to(root))]
    names = [path.relative_to(root).as_posix() for path in paths]
    if not paths:
        raise ValueError(
            f"data.source=stdlib: no Python source in {root}; use data.source=text with your own files"
        )
    texts = [_python_text(path) for path in paths]
    facts = [
        FileFacts(n, len(text.encode()), len(text.encode()), digest(text).hex())
        for n, text in zip(names, texts, strict=True)
    ]

    def documents() -> Iterator[SplitDocument]:
        for name, text in islice(zip(names, texts, strict=True), config.max_documents):
            yield split_by_digest(digest(name), config.val_fraction), [text]

    return Corpus(
        name=config.name or "stdlib",
        settings=_settings(config, files=[[fact.path, fact.sha256] for fact in facts]),
        split_rule="by a hash of the file's path inside the library",
        documents=documents,
        files=facts,
        bytes=sum(fact.bytes for fact in facts),
    )


def _is_library(path: Path) -> bool:
    """Whether a path inside the library is source, the same on every machine with this Python version."""
    folders = set(path.parts[:-1])
    return not (
        folders & (_NOT_LIBRARY | _GENERATED) or path.parts[0].startswith(("config-", "_sysconfigdata"))
    )


def _python_text(path: Path) -> str:
    with tokenize.open(path) as file:  # heeds a coding line
        return file.read()


def _text_corpus(config: DataConfig) -> Corpus:
    paths = expand_files(config.files)
    kinds = [_kind(path, config.document) for path in paths]
    total = sum(path.stat().st_size for path in paths)
    with progress(f"Checking {len(paths)} files", total, announce=False) as advance:
        facts = [scan(path, advance) for path in paths]
    whole = [split_by_digest(bytes.fromhex(fact.sha256), config.val_fraction) for fact in facts]
    cut = set(kinds) == {Document.file} and len(set(whole)) == 1

    def chunks_of(path: Path) -> Iterator[str]:
        return _joined_rows(path, config.text_column) if format_of(path) in ROW_FORMATS else text_chunks(path)

    def documents() -> Iterator[SplitDocument]:
        for path, kind, split in zip(paths, kinds, whole, strict=True):
            if cut:
                yield from cut_document(partial(chunks_of, path), config.val_fraction)
            elif kind is Document.file:
                yield split, chunks_of(path)
            else:
                for text in _documents_of(path, kind, config.text_column):
                    yield split_by_digest(digest(text), config.val_fraction), [text]

    has_rows = any(format_of(path) in ROW_FORMATS for path in paths)
    contents = [[fact.sha256, kind.value] for fact, kind in zip(facts, kinds, strict=True)]
    column = {"text_column": config.text_column} if has_rows else {}
    return Corpus(
        name=config.name or stem_of(paths[0]),
        settings=_settings(config, files=contents, cut=cut, **column),
        split_rule=_rule_of_cut(config) if cut else _BY_CONTENT,
        documents=lambda: islice(documents(), config.max_documents),
        files=facts,
        bytes=None if has_rows else sum(fact.text_bytes for fact in facts),
    )


def _rule_of_cut(config: DataConfig) -> str:
    return f"the last {config.val_fraction:g} of each text, cut at a line end"


def _kind(path: Path, document: Document) -> Document:
    is_text = format_of(path) not in ROW_FORMATS
    match document:
        case Document.auto:
            return Document.file if is_text else Document.row
        case Document.row if is_text:
            raise ValueError(f"data.document=row: {path} has no rows; use file, line or paragraph")
        case _:
            return document


def _documents_of(path: Path, kind: Document, column: str) -> Iterator[str]:
    if format_of(path) not in ROW_FORMATS:
        yield from documents_in(text_chunks(path), kind)
        return
    for text in row_texts(path, column):
        yield from documents_in([text], kind)


def _joined_rows(path: Path, column: str) -> Iterator[str]:
    return (text if text.endswith("\n") else text + "\n" for text in row_texts(path, column))


def _hub_corpus(config: DataConfig) -> Corpus:
    place = hub.find(config)
    kind = Document.row if config.document is Document.auto else config.document
    if place.val_split:
        rule = f"the data set's own split {place.val_split!r}"
    else:
        rule = _rule_of_cut(config) if kind is Document.file else _BY_CONTENT
    request = [
        config.hub_name,
        config.hub_config,
        config.hub_revision,
        config.hub_split,
        config.hub_val_split,
    ]
    return Corpus(
        name=config.name or config.hub_name.rstrip("/").split("/")[-1],
        settings=_settings(
            config,
            hub=request,
            revision=place.revision,
            document=kind.value,
            text_column=config.text_column,
        ),
        split_rule=rule,
        documents=lambda: hub.documents(config, place, kind),
    )


def _settings(config: DataConfig, **facts: Any) -> dict[str, Any]:
    """What the documents depend on, beside facts on their source; a key without influence stays out."""
    split = {"val_fraction": config.val_fraction, "max_documents": config.max_documents}
    return {"source": config.source.value, **split, **facts}
