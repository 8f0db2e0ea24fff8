"""Where metrics go beside metrics.csv, which is always written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger


class LoggerName(Enum):
    csv = "csv"
    wandb = "wandb"
    tensorboard = "tensorboard"


@dataclass
class LoggerConfig:
    """An additional logger.

    Attributes:
        name: ``csv`` (metrics.csv alone), ``wandb`` or ``tensorboard``.
        project: of wandb.
        entity: wandb's team or user; None: the default of the account.
        offline: wandb writes to the run directory and sends nothing.
    """

    name: LoggerName = LoggerName.csv
    project: str = "blockdiff"
    entity: str | None = None
    offline: bool = False

    def check(self) -> None:
        """Raises a ValueError if the logger's package is not installed."""
        if self.name is not LoggerName.csv and find_spec(self.name.value) is None:
            raise ValueError(f"logger={self.name.value} needs its package: pip install {self.name.value}")


def build_loggers(config: LoggerConfig, directory: Path, start_step: int) -> list[Logger]:
    """Loggers of a run; a resumed run goes on in the same curves."""
    name = directory.name
    match config.name:
        case LoggerName.csv:
            return []
        case LoggerName.wandb:
            return [
                WandbLogger(
                    name=name,
                    id=name,
                    resume="allow",
                    project=config.project,
                    entity=config.entity,
                    offline=config.offline,
                    save_dir=directory,
                )
            ]
        case LoggerName.tensorboard:
            # Events behind the resumed step are of steps that are taken again.
            return [TensorBoardLogger(directory, "tensorboard", version="", purge_step=start_step + 1)]
