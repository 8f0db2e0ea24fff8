"""Where metrics go beside metrics.csv, which is always written."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from blockdiff.training.config import LoggerConfig, LoggerName


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


def log_plots(loggers: list[Logger], plots: list[Path]) -> None:
    """Shows images in W&B, each under its file's name; other loggers take none."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            for path in plots:
                logger.log_image(key=path.stem, images=[str(path)])
