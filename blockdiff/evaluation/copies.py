"""How long a stretch of the training text a sample repeats, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Tokens become characters, so that Python's substring search does the work; surrogates, which no codec reads, are
# skipped.
_SURROGATES, _SURROGATES_SIZE = 0xD800, 0x800


class TrainingText:
    """Training tokens as one long string to be searched."""

    def __init__(self, tokens: NDArray[Any]) -> None:
        """Args: tokens, one-dimensional ids below 1,000,000; documents lie end to end."""
        self.size = len(tokens)
        self._text = _as_text(np.asarray(tokens))

    def longest_match(self, text: Sequence[int]) -> int:
        """Tokens of the longest stretch of `text` that stands in the training text; matches may span documents."""
        needle, best = _as_text(np.asarray(text, dtype=np.int64)), 0
        for start in range(len(needle)):
            # Only a longer match than the best is looked for: nearly all starts cost one search.
            while start + best < len(needle) and needle[start : start + best + 1] in self._text:
                best += 1
        return best


def _as_text(tokens: NDArray[Any]) -> str:
    code = tokens.astype(np.uint32)
    code += np.where(code >= _SURROGATES, np.uint32(_SURROGATES_SIZE), np.uint32(0))
    return code.astype("<u4").tobytes().decode("utf-32-le")
