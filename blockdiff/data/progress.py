"""Progress of slow steps: a bar on a terminal, one plain line elsewhere, always on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[[int], None]


@contextmanager
def progress(description: str, total_bytes: int | None, announce: bool = True) -> Iterator[Advance]:
    """Shows a step that handles ``total_bytes`` bytes and yields a function that is told of bytes done.

    A total of None is not known before; ``announce=False`` leaves the plain line out, for steps seldom
    slow. Once everything has been handed in, the bar pulses: what is still computed then has no known end.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        if announce:
            console.print(description, markup=False, highlight=False, soft_wrap=True)
        yield lambda done: None
        return
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(), DownloadColumn()]
    columns += [TimeElapsedColumn()] if total_bytes is None else [TaskProgressColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(description, total=total_bytes)
        handed_in = 0

        def advance(done: int) -> None:
            nonlocal handed_in
            handed_in += done
            full = total_bytes is not None and handed_in >= total_bytes
            bars.update(task, completed=handed_in, total=None if full else total_bytes)

        yield advance
