"""From token ids to text, piece by piece: no split UTF-8 character, nothing of a stop string shown.

Work is done on bytes: a stop string may begin in one block and end in the next, and in the middle of tokens.
"""

from __future__ import annotations

import codecs

from blockdiff.sampling.protocols import TokenizerLike


class TextStream:
    """The text of one row as it grows.

    Attributes:
        text: what has been given out.
        stopped: whether a stop string was met.
        kept: once stopped, how many of the pushed ids the text needs.
    """

    def __init__(self, tokenizer: TokenizerLike, stop: list[str]) -> None:
        self.text = ""
        self.stopped = False
        self.kept = 0
        self._tokenizer = tokenizer
        self._stop = [text.encode() for text in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []
        self._anchor = 0
        self._held = b""
        self._given_out = 0

    def push(self, ids: list[int]) -> str:
        """Takes further ids and gives out what can no longer change; characters wait until they are whole."""
        assert not self.stopped, "nothing follows a stop string"
        data = self._held + self._bytes_of(ids)
        cut = min((at for at in (data.find(stop) for stop in self._stop) if at >= 0), default=None)
        if cut is not None:
            self.stopped = True
            self.kept = self._tokens_for(self._given_out + cut)
            return self._give(data[:cut], final=True)
        hold = max((_overlap(data, stop) for stop in self._stop), default=0)
        self._held = data[len(data) - hold :]
        return self._give(data[: len(data) - hold], final=False)

    def finish(self) -> str:
        """Gives out what waited for more."""
        if self.stopped:
            return ""
        held, self._held = self._held, b""
        return self._give(held, final=True)

    def _bytes_of(self, ids: list[int]) -> bytes:
        """The bytes that `ids` add. Decoded together with the ids before them: a text's first token may read
        otherwise."""
        before = self._tokenizer.decode_bytes(self._ids[self._anchor :])
        after = self._tokenizer.decode_bytes(self._ids[self._anchor :] + ids)
        assert after.startswith(before), "a tokenizer's bytes must grow at the end only"
        if ids:
            self._anchor = len(self._ids)
        self._ids += ids
        return after[len(before) :]

    def _tokens_for(self, size: int) -> int:
        """The fewest ids whose bytes hold the first `size` bytes."""
        count = len(self._ids)
        while count and len(self._tokenizer.decode_bytes(self._ids[: count - 1])) >= size:
            count -= 1
        return count

    def _give(self, data: bytes, *, final: bool) -> str:
        self._given_out += len(data)
        piece = self._decoder.decode(data, final)
        self.text += piece
        return piece


def _overlap(data: bytes, stop: bytes) -> int:
    """Length of the longest end of `data` with which `stop` could begin."""
    return next((size for size in range(min(len(stop) - 1, len(data)), 0, -1) if data.endswith(stop[:size])), 0)
