"""What a run shows while it trains: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from blockdiff.training.metrics import Row

PLAIN_SECONDS = 20.0


class Display:
    """Loss, validation bound, tokens a second, MFU and the time left."""

    def __init__(self, console: Console, train_column: str) -> None:
        """Args: where to print, and the metric that is the training loss."""
        self.console, self._train_column = console, train_column
        self._facts: dict[str, str] = {}
        self._progress: Progress | None = None
        self._last_line = -PLAIN_SECONDS
        self._began, self._first_step, self._max_steps = 0.0, -1, 0

    def start(self, step: int, max_steps: int) -> None:
        """Begins at `step` of `max_steps`."""
        self._first_step, self._max_steps = -1, max_steps
        if not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
        )
        self._task = self._progress.add_task("", total=max_steps, completed=step, facts="")
        self._progress.start()

    def advance(self, step: int) -> None:
        """One more step is done. A launch's first one takes longer than others: time counts from its end."""
        if self._first_step < 0:
            self._began, self._first_step = time.monotonic(), step
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def show(self, row: Row) -> None:
        """Shows a row of metrics."""
        validated = "val/nelbo" in row
        self._facts["loss"] = f"train {row[self._train_column]:.3f}"
        if validated:
            self._facts["val"] = f"val {row['val/nelbo']:.3f}±{row['val/nelbo_se']:.3f}"
        if "tokens_per_second" in row:
            self._facts["speed"] = f"{row['tokens_per_second']:,.0f} tokens/s"
        if "mfu" in row:
            self._facts["mfu"] = f"MFU {row['mfu']:.1%}"
        facts = "  ".join(self._facts[key] for key in ("loss", "val", "speed", "mfu") if key in self._facts)
        if self._progress is not None:
            self._progress.update(self._task, facts=facts)
        elif validated or time.monotonic() - self._last_line >= PLAIN_SECONDS:
            self._last_line = time.monotonic()
            step = int(row["step"])
            self._print(f"step {step}/{self._max_steps}  {facts}{self._left(step)}")

    def note(self, text: str) -> None:
        """Prints a message above the bar."""
        self._print(escape(text))

    def preview(self, step: int, text: str) -> None:
        """Prints a sample above the bar."""
        self.console.rule(f"[dim]a sample at step {step}[/dim]", align="left", style="dim")
        # What a young model writes may hold any control character; a terminal would obey it.
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text.rstrip())
        self._print(escape(shown))
        self.console.rule(style="dim")

    def stop(self) -> None:
        """Ends the bar; may be called twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _left(self, step: int) -> str:
        done = step - self._first_step
        if done < 1:
            return ""
        return f"  {_clock((time.monotonic() - self._began) / done * (self._max_steps - step))} left"

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
