"""What steps did, copied to the host: the material of the live view and of the replay.

Watching reads the device after each step. Nobody who does not watch pays for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from blockdiff.sampling.batch import StepEvent
from blockdiff.sampling.protocols import TokenizerLike


@dataclass
class Cell:
    """One position of a text.

    Attributes:
        token: its id, None while masked.
        step: the how-many-th call of its block fixed it; 0 for given tokens.
    """

    token: int | None
    step: int


@dataclass
class Frame:
    """One row after a step.

    Attributes:
        request: index of the request.
        start: absolute position of the block.
        cells: of the block; positions beyond the end of the text are left out.
        nfe: the row's calls so far.
        seconds: since the recording began.
        tokens: fixed so far in the whole text, given ones left out.
    """

    request: int
    start: int
    cells: list[Cell]
    nfe: int
    seconds: float
    tokens: int


@dataclass
class Recorder:
    """Keeps the frames of all rows. Hand `step` to the sampler as `on_step`."""

    frames: list[Frame] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    _block: dict[int, int] = field(default_factory=dict)
    _done: dict[int, int] = field(default_factory=dict)
    _fixed: dict[int, int] = field(default_factory=dict)

    def step(self, event: StepEvent) -> list[Frame]:
        """Records a step and returns the frames of the rows that took part in it.

        Before a block's first step another frame is recorded, with all its free positions masked.
        """
        seconds = time.perf_counter() - self.began
        x_BS, free_BS, step_BS = (x.tolist() for x in (event.block.x_BS, event.block.free_BS, event.block.step_BS))
        starts = event.block.position_BS[:, 0].tolist()
        new = []
        for row, request in enumerate(event.requests):
            if not event.active[row]:
                continue
            mask = event.block.mask_id
            cells = [
                Cell(None if x == mask else x, 0 if x == mask else step)
                for x, free, step in zip(x_BS[row], free_BS[row], step_BS[row], strict=True)
                if free or x != mask
            ]
            fixed = sum(x != mask and free for x, free in zip(x_BS[row], free_BS[row], strict=True))
            done = self._done_before(request, starts[row])
            self._fixed[request] = fixed
            if event.turn.step == 0:
                hidden = [Cell(None, 0) if cell.token is None or cell.step else cell for cell in cells]
                self.frames.append(Frame(request, starts[row], hidden, event.nfe[row] - 1, seconds, done))
            new.append(Frame(request, starts[row], cells, event.nfe[row], seconds, done + fixed))
        self.frames += new
        return new

    def _done_before(self, request: int, start: int) -> int:
        """Tokens fixed in the blocks before this one; what the last block ended with is added when the next begins."""
        if self._block.get(request) != start:
            self._done[request] = self._done.get(request, 0) + self._fixed.get(request, 0)
            self._block[request] = start
        return self._done[request]


def show_token(token: int, tokenizer: TokenizerLike) -> str:
    """A token as text; bytes that are no character of their own are shown in angle brackets."""
    data = tokenizer.decode_bytes([token])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"‹{data.hex()}›"
