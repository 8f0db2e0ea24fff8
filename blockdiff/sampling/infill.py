"""Texts with holes: ``"def add(a, b):<hole:24>return result"``.

``<hole:N>`` stands for N tokens to be made. Given tokens never change. Inside a block, a hole sees what is given on
both sides of it; blocks depend causally on each other, so what stands in *later* blocks cannot be seen while a hole is
filled: a hole that reaches a block border is filled there without knowing how the text goes on. Blocks without a hole
are committed as they are. The end of text may be drawn only where nothing given follows.
"""

from __future__ import annotations

import re

from blockdiff.sampling.protocols import TokenizerLike
from blockdiff.sampling.request import Request

HOLE = re.compile(r"<hole:(\d+)>")


def parse(text: str, tokenizer: TokenizerLike) -> Request:
    """A request from text: a prompt to be continued, or, where it has holes, a text to be completed and not continued.

    Raises:
        ValueError: a hole of no tokens, or one that is not closed.
    """
    parts = HOLE.split(text)
    for given in parts[::2]:
        if "<hole:" in given:
            at = given.index("<hole:")
            raise ValueError(
                f"{given[at : at + 20]!r} is no hole: write <hole:N> with N, the number of tokens it holds"
            )
    if len(parts) == 1:
        return Request(tokenizer.encode(text))
    tokens: list[int] = []
    holes = []
    for given, length in zip(parts[::2], [*map(int, parts[1::2]), 0], strict=True):
        # An empty piece is not encoded: some tokenizers would put a token of their own there.
        tokens += tokenizer.encode(given) if given else []
        if length:
            holes.append((len(tokens), length))
            tokens += [0] * length
    if len(holes) != len(parts) // 2:
        raise ValueError(f"<hole:0> in {text[:40]!r} holds no token: write <hole:N> with N at least 1")
    return Request(tokens, holes, new_tokens=0)
