"""What runs on a machine with PyTorch and rich alone: the network, sampling, and the speed measurements."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ABSENT = (
    "lightning", "hydra", "omegaconf", "datasets", "tokenizers", "yaml", "wandb", "matplotlib", "safetensors",
    "zstandard", "jinja2", "scipy",
)  # fmt: skip
NEEDED = (
    "blockdiff.core.corruption",
    "blockdiff.model.denoiser",
    "blockdiff.model.compilation",
    "blockdiff.sampling.batch",
    "blockdiff.training.staging",
    "blockdiff.training.optimizer",
    "blockdiff.training.meter",
    "blockdiff.training.ema",
    "benchmarks.training",
    "benchmarks.sampling",
)


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_network_sampling_and_benchmarks_need_torch_and_rich_alone() -> None:
    run(f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import {', '.join(NEEDED)}")


def test_what_is_absent_would_be_missed() -> None:
    with pytest.raises(AssertionError, match="lightning"):
        run(f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import blockdiff.training.module")


def test_script_is_whole() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / "gpu.sh")], check=True)
