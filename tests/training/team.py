"""One process of several: does the jobs of a list, one after the other, together with its companions.

Launched by `torchrun`; the arguments are a directory, the corpus, and the jobs as JSON. A job is a set of changes of
the miniature run, with `"fails"` one that ends because a checkpoint could not be written, or `{"copy": [name, step,
copy]}`: what a kill after that step would have left of a run.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent


def launch(processes: int, directory: Path, corpus: Path, jobs: list[dict[str, Any]]) -> None:
    """Does the jobs with so many processes, and shows what they said if one of them fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, __file__, str(directory), str(corpus), json.dumps(jobs)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def main(directory: Path, corpus: Path, jobs: list[dict[str, Any]]) -> None:
    from leftovers import as_if_killed_after
    from miniature import miniature, run

    from blockdiff.core.corruption import CorruptionKind, Fit, ViewKind
    from blockdiff.training.config import Strategy
    from blockdiff.training.errors import CheckpointWriteError

    torch.set_num_threads(1)
    # Graphs are captured and differentiated as ever; generating code for them would take a CPU minutes.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    for job in jobs:
        if "copy" in job:
            name, step, copy = job["copy"]
            if dist.get_rank() == 0:
                as_if_killed_after(directory / "checkpoints" / name, step, directory / "checkpoints" / copy)
            dist.barrier()
            continue
        failing = job.pop("fails", None)
        choices = {
            "trainer__strategy": Strategy,
            "noise__corruption": CorruptionKind,
            "noise__view_kind": ViewKind,
            "noise__fit": Fit,
        }
        job |= {key: choices[key](value) for key, value in job.items() if key in choices}
        config = miniature(directory, corpus, trainer__devices=dist_size(), **job)
        with pytest.raises(CheckpointWriteError, match=failing) if failing else nullcontext():
            run(config, preview)


def dist_size() -> int:
    """Processes of this launch."""
    return int(os.environ["WORLD_SIZE"])


def preview(denoiser: Any, count: int) -> list[str]:
    """Needs the whole weights: fails where they are split and only some processes ask."""
    with torch.no_grad():
        logits = denoiser.denoise(torch.full((count, 4), denoiser.mask_id), denoiser.new_cache(count, 8))
    return [str(int(row.argmax())) for row in logits]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
