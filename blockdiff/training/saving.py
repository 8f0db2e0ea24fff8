"""Checkpoints of a run: written through Lightning's door for them, and thinned out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.plugins.io import CheckpointIO

from blockdiff.training.checkpoints import checkpoint_path, open_checkpoint, prune, save_checkpoint
from blockdiff.training.config import OnCheckpointError, TrainerConfig
from blockdiff.training.errors import CheckpointWriteError


class DurableCheckpointIO(CheckpointIO):
    """Reads and writes single files as `training.checkpoints` defines them.

    A failure to write is kept, not raised: only one of several processes writes, and the others must not be
    left waiting for it.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        """Args: what manifests say beside step, sizes and hashes."""
        self.facts = facts
        self._failure: OSError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        try:
            save_checkpoint(checkpoint, Path(path), self.facts)
        except OSError as error:
            self._failure = error

    def take_failure(self) -> str | None:
        """Why the last save failed, once; None if it did not."""
        failure, self._failure = self._failure, None
        return None if failure is None else str(failure)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        # The optimizer keeps the tensors that it is given, and must not work on pages of a file.
        return open_checkpoint(Path(path), mapped=False)

    def remove_checkpoint(self, path: str | Path) -> None:
        raise AssertionError("checkpoints are removed by training.checkpoints.prune")


class Saver:
    """Saves the run's state at a step border."""

    def __init__(self, directory: Path, config: TrainerConfig, io: DurableCheckpointIO, last_good: Path | None) -> None:
        """Args: the run directory, what to keep, the file door, and the checkpoint that the run goes on from."""
        self.directory, self.config, self.io = directory, config, io
        self.last_good = last_good

    def save(self, trainer: L.Trainer, step: int, ending: bool) -> str | None:
        """Writes the checkpoint of `step`, in all processes together.

        Args:
            trainer: that trains.
            step: finished steps.
            ending: whether the run ends here: then there is no later checkpoint to wait for.

        Returns:
            A warning if it could not be written and the run goes on nevertheless.

        Raises:
            CheckpointWriteError: it could not be written, and the config says stop or the run ends.
        """
        path = checkpoint_path(self.directory, step)
        if path == self.last_good:
            return None
        trainer.save_checkpoint(path, weights_only=False)
        failure = trainer.strategy.broadcast(self.io.take_failure())
        if failure is None:
            self.last_good = path
            if trainer.is_global_zero:
                prune(self.directory, self.config.keep_last, self.config.keep_every)
            return None
        message = (
            f"the checkpoint of step {step} could not be written ({failure}); {describe_last_good(self.last_good)}"
        )
        if ending or self.config.on_checkpoint_error is OnCheckpointError.stop:
            raise CheckpointWriteError(
                f"{message}. Free some space and give the same command again (trainer.on_checkpoint_error=continue "
                "would go on to the next checkpoint)"
            )
        return message + ". The run goes on (trainer.on_checkpoint_error=continue)"


def describe_last_good(path: Path | None) -> str:
    """For messages: which checkpoint is left."""
    return f"the last good checkpoint is {path}" if path else "there is no earlier checkpoint"
