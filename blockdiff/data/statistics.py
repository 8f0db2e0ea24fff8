"""What a prepared corpus looks like to a model: the figures that the command line prints."""

from __future__ import annotations

from typing import Any

from blockdiff.data.packing import PackedDataset
from blockdiff.data.prepare import PreparedData


def describe(prepared: PreparedData, seq_len: int, block_size: int, document_mask: bool) -> dict[str, Any]:
    """Figures of a corpus, by split where both have one.

    Returns:
        ``directory``, ``vocab_size``, ``bytes_per_token`` and ``unigram_nats`` (of validation, end-of-
        document tokens counted; nats per token of the add-one smoothed unigram model of the training
        split), ``split_rule``; and ``train`` and ``val``, each with ``documents``, ``tokens`` (without end
        tokens), ``bytes``, ``windows`` and ``padding_share``.
    """
    manifest = prepared.manifest
    figures: dict[str, Any] = {
        "directory": str(prepared.directory),
        "vocab_size": prepared.tokenizer.vocab_size,
        "bytes_per_token": manifest["bytes_per_token"],
        "unigram_nats": manifest["unigram_nats"],
        "split_rule": manifest["split_rule"],
    }
    for name, store in (("train", prepared.train), ("val", prepared.val)):
        packed = PackedDataset(
            store,
            seq_len=seq_len,
            block_size=block_size,
            eos_id=prepared.tokenizer.eos_id,
            document_mask=document_mask,
        )
        figures[name] = {
            "documents": store.facts.documents,
            "tokens": store.facts.tokens,
            "bytes": store.facts.bytes,
            "windows": len(packed),
            "padding_share": packed.padding_share,
        }
    return figures
