"""Whether samples of Python are Python."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings


def parses(text: str) -> bool:
    """Whether `ast.parse` accepts the whole text; an empty one does not count."""
    if not text.strip():
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a sample's invalid escape is no concern of ours
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def parses_to_last_statement(text: str) -> bool:
    """Whether the text is accepted once its last, unfinished statement is cut off.

    Cut are the last logical line, and with it the headers (``if x:``, ``@decorator``) that it leaves without a body,
    and a ``try`` that it leaves without a handler. Whatever stands before must parse.
    """
    if parses(text):
        return True
    lines = text.splitlines(keepends=True)
    starts = _statement_starts(text)
    if not starts:
        return False
    cut = _drop_headers(lines, starts, len(starts) - 1)
    kept = "".join(lines[: starts[cut]])
    if parses(kept):
        return True
    opened = _open_try(lines, starts[:cut])
    if opened is None:
        return False
    return parses("".join(lines[: starts[_drop_headers(lines, starts, opened)]]))


def _statement_starts(text: str) -> list[int]:
    """Indices of the physical lines on which logical lines begin, as far as the text can be read."""
    starts: list[int] = []
    fresh = True
    skipped = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                fresh = True
            elif fresh and token.type not in skipped:
                starts.append(token.start[0] - 1)
                fresh = False
    except (tokenize.TokenError, SyntaxError):
        # An open bracket or string at the end: its statement has begun, or begins where reading stopped.
        if fresh and starts:
            starts.append(_next_line(text, starts[-1]))
    return starts


def _next_line(text: str, line: int) -> int:
    """The first line with content behind the statement of `line`."""
    lines = text.splitlines()
    return next((i for i in range(line + 1, len(lines)) if lines[i].strip()), line)


def _drop_headers(lines: list[str], starts: list[int], cut: int) -> int:
    """Moves a cut in front of the headers that it would leave without a body."""
    while cut > 0:
        last = "".join(lines[starts[cut - 1] : starts[cut]]).split("#")[0].strip()
        if not (last.endswith(":") or last.startswith("@")):
            break
        cut -= 1
    return cut


def _open_try(lines: list[str], starts: list[int]) -> int | None:
    """Index of the last ``try:`` without ``except`` or ``finally`` at its own depth behind it."""
    closed: set[int] = set()
    for index in range(len(starts) - 1, -1, -1):
        line = lines[starts[index]]
        depth = len(line) - len(line.lstrip())
        word = line.strip()
        if word.startswith(("except", "finally")):
            closed.add(depth)
        elif word.startswith("try:"):
            if depth not in closed:
                return index
            closed.discard(depth)
    return None
