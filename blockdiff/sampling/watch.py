"""The denoising live in the terminal: masked cells, tokens coloured by the step that fixed them, NFE and tokens a
second.

Where the output is no terminal, the plain text is written as it becomes certain.
"""

from __future__ import annotations

import colorsys
import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from blockdiff.sampling.batch import BlockEvent, StepEvent
from blockdiff.sampling.protocols import TokenizerLike
from blockdiff.sampling.record import Cell, Recorder, show_token
from blockdiff.sampling.report import Generation
from blockdiff.sampling.request import Request

MASK = "░"
ROWS = 4
"""Rows that are shown together; the others are counted."""


class Watch:
    """A live view of a run: ``with Watch(...) as view: run(..., on_step=view.step, progress=view.block)``."""

    def __init__(
        self,
        requests: list[Request],
        tokenizer: TokenizerLike,
        console: Console | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Args:
        requests: of the run, in order.
        tokenizer: to show tokens.
        console: where to write; None: standard output.
        recorder: keeps all frames, for a replay; None: they are shown and forgotten.
        """
        self.console = console or Console()
        self._requests, self._tokenizer = requests, tokenizer
        self._keeps = recorder is not None
        self._recorder = recorder or Recorder()
        self._cells: dict[int, list[Cell]] = {}
        self._nfe: dict[int, int] = {}
        self._generations: dict[int, Generation] = {}
        self._shown: list[int] = []
        self._began = time.perf_counter()
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Watch:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
            self._live.stop()

    def step(self, event: StepEvent) -> None:
        """Shows a step; the sampler's `on_step`."""
        if self._live is None and not self._keeps:
            return
        frames = self._recorder.step(event)
        if self._live is None:
            return
        for frame in frames:
            cells = self._cells.setdefault(frame.request, self._given(frame.request))
            # Given blocks between holes are skipped by the sampler and filled in here from the request.
            cells += self._given(frame.request)[len(cells) : frame.start]
            cells[frame.start : frame.start + len(frame.cells)] = frame.cells
            self._nfe[frame.request] = frame.nfe
            if frame.request not in self._shown:
                self._shown.append(frame.request)
        if not self._keeps:
            self._recorder.frames.clear()
        self._live.update(self.render(), refresh=True)

    def block(self, event: BlockEvent) -> None:
        """Shows or writes a finished block; the sampler's `progress`."""
        if event.generation is not None:
            self._generations[event.request] = event.generation
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
            return
        if len(self._requests) == 1:
            # A single text appears as it grows; of several, each is written when it is whole.
            self.console.file.write(event.text + ("\n" if event.generation is not None else ""))
        elif event.generation is not None:
            self.console.file.write(f"[{event.request}] {event.generation.text}\n")
        self.console.file.flush()

    def render(self) -> RenderableType:
        """The view as it stands."""
        running = [request for request in self._shown if request not in self._generations]
        done = [request for request in self._shown if request in self._generations]
        shown = sorted((running + done[::-1])[:ROWS])
        height = max((self.console.height - 3) // max(len(shown), 1) - 2, 3)
        panels: list[RenderableType] = [self._panel(request, height) for request in shown]
        return Group(*panels, self._footer())

    def _given(self, request: int) -> list[Cell]:
        asked = self._requests[request]
        return [Cell(None if free else token, 0) for token, free in zip(asked.tokens, asked.free(), strict=True)]

    def _panel(self, request: int, height: int) -> Panel:
        cells = self._cells.get(request, [])
        generation = self._generations.get(request)
        if generation is not None:
            cells = [cell for cell in cells if cell.token is not None]
        text = Text()
        for cell in cells:
            text.append_text(_show(cell, self._tokenizer))
        lines = text.wrap(self.console, max(self.console.width - 4, 8))
        state = f"{generation.finish_reason}, " if generation is not None else ""
        made = generation.new_tokens if generation else sum(cell.step > 0 for cell in cells)
        nfe = self._nfe.get(request, 0)
        title = f"{request}: {state}NFE {nfe}, {made} tokens, {made / max(nfe, 1):.2f} a call"
        return Panel(Text("\n").join(lines[-height:]), title=title, title_align="left")

    def _footer(self) -> Text:
        seconds = max(time.perf_counter() - self._began, 1e-9)
        running = sum(
            cell.step > 0
            for request, cells in self._cells.items()
            if request not in self._generations
            for cell in cells
        )
        made = running + sum(g.new_tokens for g in self._generations.values())
        footer = Text(f" {made / seconds:,.1f} tokens/s   NFE {sum(self._nfe.values()):,}   ")
        footer.append(f"{len(self._generations)} of {len(self._requests)} texts done   step ")
        for step in range(1, 9):
            footer.append(f" {step} ", style=step_style(step))
        return footer


def step_style(step: int) -> str:
    """The colour of a step: green for the first, over blue to red; given tokens have none."""
    if step <= 0:
        return "default"
    share = min((step - 1) / 12, 1.0)
    red, green, blue = colorsys.hls_to_rgb(0.36 + 0.60 * share, 0.62, 0.75)
    return f"rgb({int(255 * red)},{int(255 * green)},{int(255 * blue)})"


def _show(cell: Cell, tokenizer: TokenizerLike) -> Text:
    if cell.token is None:
        return Text(MASK, style="dim")
    return Text(show_token(cell.token, tokenizer), style=step_style(cell.step))
