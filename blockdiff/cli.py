"""`blockdiff VERB key=value …`: each verb is a Hydra application over the YAML files of `conf/`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

USAGE = """usage: blockdiff VERB [key=value ...]

  train      train a model:                blockdiff train name=first block_size=8
  sample     write text with it:           blockdiff sample checkpoint=checkpoints/first prompt="def "
  evaluate   its likelihood bound:         blockdiff evaluate checkpoint=checkpoints/first
  prepare    tokenise a corpus beforehand: blockdiff prepare data=text data.files=book.txt
  sweep      block sizes against coherence: blockdiff sweep experiment=tradeoff_demo
  measure    one cell of a sweep:          blockdiff measure checkpoint=checkpoints/first output=first.json

Every verb is a Hydra application: `blockdiff VERB --help` lists its keys, `--cfg job` prints the composed config,
`-m block_size=4,8,16` runs it several times.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit status (2: bad input, 1: a run that had to end, both said on standard error)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    verb, *rest = arguments
    from blockdiff.config import VERBS
    from blockdiff.records import did_you_mean

    if verb not in VERBS:
        return _refuse(f"unknown verb {verb}{did_you_mean(verb, list(VERBS))}; verbs: {', '.join(VERBS)}")
    return _guarded(lambda: _run(verb, rest))


def _guarded(run: Callable[[], int]) -> int:
    """What `run` returns; a user's error is a message and a status instead of a traceback."""
    from blockdiff.training.errors import TrainingError

    try:
        return run()
    except (ValueError, TrainingError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        return _refuse(str(error), status=1 if isinstance(error, TrainingError) else 2)


def _refuse(message: str, status: int = 2) -> int:
    print(f"blockdiff: {message}", file=sys.stderr)
    return status


def _run(verb: str, arguments: list[str]) -> int:
    from blockdiff.composition import load_config

    arguments = [_free_text(argument) for argument in arguments]
    if any(argument.startswith("-") for argument in arguments):
        return _run_hydra(verb, arguments)
    return _VERBS[verb](load_config(verb, arguments))


def _free_text(argument: str) -> str:
    """`prompt=` takes any text as it stands: Hydra's grammar would trip over brackets, commas and outer blanks.

    A value that is quoted itself, or a list, is left to Hydra.
    """
    key, _, text = argument.partition("=")
    if key != "prompt" or text[:1] in ("'", '"', "["):
        return argument
    # Hydra reads a backslash as an escape only before a quote or at the end, OmegaConf only before an interpolation.
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text)
    return f'{key}="{escaped}"'


def _run_hydra(verb: str, arguments: list[str]) -> int:
    """Hydra's own command line: --help, --cfg, --multirun, --config-dir and the like."""
    import hydra
    from omegaconf import DictConfig

    from blockdiff.composition import CONF, register, to_config

    register()
    status = 0

    @hydra.main(config_path=str(CONF), config_name=verb, version_base="1.3")
    def application(composed: DictConfig) -> None:
        nonlocal status
        # Guarded in here: Hydra would print its own traceback and exit.
        status = max(status, _guarded(lambda: _VERBS[verb](to_config(verb, composed))))

    saved, sys.argv = sys.argv, [f"blockdiff {verb}", *arguments]
    try:
        application()
    finally:
        sys.argv = saved
    return status


def _train(config: Any) -> int:
    from blockdiff.commands import run_train

    return run_train(config)


def _prepare(config: Any) -> int:
    from blockdiff.commands import run_prepare

    return run_prepare(config)


def _sample(config: Any) -> int:
    from blockdiff.sample_command import run_sample

    return run_sample(config)


def _evaluate(config: Any) -> int:
    from blockdiff.commands import run_evaluate

    return run_evaluate(config)


def _measure(config: Any) -> int:
    from blockdiff.experiments import run_measure

    return run_measure(config)


def _sweep(config: Any) -> int:
    from blockdiff.experiments import run_sweep

    return run_sweep(config)


_VERBS: dict[str, Callable[[Any], int]] = {
    "train": _train,
    "sample": _sample,
    "evaluate": _evaluate,
    "prepare": _prepare,
    "measure": _measure,
    "sweep": _sweep,
}
