"""Model FLOPs utilisation: its formula, the known peaks, and what a run shows of it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from leftovers import as_if_killed_after
from miniature import RunConfig, run

from blockdiff.data.tokenizer import byte_tokenizer
from blockdiff.model.compute import Product, training_flops
from blockdiff.training import utilisation
from blockdiff.training.border import Pace
from blockdiff.training.config import TrainerConfig
from blockdiff.training.metrics import read_rows
from blockdiff.training.peak import known_peak
from blockdiff.training.utilisation import Utilisation

Make = Callable[..., RunConfig]


def whole_run(config: RunConfig) -> tuple[float, list[float]]:
    """Operations of a step of a run in miniature, and the MFU of each row but that of the first step."""
    printed = io.StringIO()
    summary = run(config, printed=printed)
    vocab_size = byte_tokenizer().vocab_size
    window = training_flops(config.model, vocab_size, config.seq_len, config.block_size, config.noise)
    rows = read_rows(summary.directory)
    assert f"MFU {rows[-1]['mfu']:.1%}" in printed.getvalue()
    assert not {"mfu", "tokens_per_second"} & rows[0].keys()  # of the first step
    return config.data.global_batch_size * window, [row["mfu"] for row in rows[1:]]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_mfu_is_operations_over_seconds_and_peak(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """At 0.25 s a step, whatever a validation or a checkpoint takes; the rows are of steps 1, 2, 3, 4 and 6."""
    laps = iter([1, 1, 1, 2])
    monkeypatch.setattr(Pace, "lap", lambda self, tokens: 0.25 * next(laps))
    config = make_config(data__micro_batch_size=4 // accumulation, trainer__peak_tflops=2e-6)
    step_flops, shown = whole_run(config)
    assert shown == [pytest.approx(step_flops / (0.25 * 2e6))] * 4


def test_a_resumed_launch_counts_its_own_steps(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after step 4, of which the checkpoint tells; step 5 is the first of its launch.

    So the row of step 6 holds the loss of steps 4 to 6, but tokens, time and work of 6 alone.
    """
    monkeypatch.setattr(Pace, "lap", lambda self, tokens: 1.0)
    changes = {"trainer__val_every": 99, "trainer__checkpoint_every": 4}
    each = read_rows(run(make_config(name="each", trainer__log_every=1, **changes)).directory)
    straight = run(make_config(name="straight", trainer__log_every=3, **changes))
    work = [row["mfu"] / each[-1]["mfu"] for row in read_rows(straight.directory)[1:]]
    assert work == [pytest.approx(2), pytest.approx(3)]  # rows of steps 3 and 6
    as_if_killed_after(straight.directory, 4, straight.directory.parent / "killed")
    last = read_rows(run(make_config(name="killed", trainer__log_every=3, **changes)).directory)[-1]
    assert (last["step"], last["mfu"]) == (6, each[-1]["mfu"])
    assert last["tokens_per_second"] == each[-1]["tokens_per_second"]


def test_a_run_begun_without_the_column_goes_on(make_config: Make) -> None:
    """Its rows stay as they were, byte for byte, and get an empty cell."""
    changes = {"trainer__checkpoint_every": 3, "trainer__keep_last": 9}
    first = run(make_config(**changes))
    path = first.directory / "metrics.csv"
    before = [line.rsplit(",", 1)[0] for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("\n".join(before) + "\n", encoding="utf-8")
    for late in first.directory.glob("step-00000006.*"):
        late.unlink()
    settings = first.directory / "config.yaml"
    settings.write_text(settings.read_text(encoding="utf-8").replace("  peak_tflops: 1.0\n", ""), encoding="utf-8")
    assert run(make_config(**changes)).step == 6
    after = path.read_text(encoding="utf-8").splitlines()
    assert after[0] == before[0] + ",mfu"
    assert after[1:4] == [line + "," for line in before[1:4]]
    assert ["mfu" in row for row in read_rows(first.directory)] == [False] * 4 + [True]  # 4 is its launch's first


def test_other_devices_are_measured_at_launch(make_config: Make) -> None:
    """A CPU's peak is a rate of products, so the share lies somewhere between nothing and a little above one."""
    _, (shown,) = whole_run(make_config(trainer__peak_tflops=None, trainer__max_steps=2))
    assert 0 < shown < 2


PRODUCT = Product(4, 4, 8)


def launched_on(device: torch.device, processes: int) -> SimpleNamespace:
    """As much of a Trainer as the peak needs: all processes have found the same."""

    def reduce(tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
        assert reduce_op == "sum"
        return tensor.cpu() * processes

    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=device, barrier=lambda name: None, reduce=reduce), world_size=processes
    )


def test_peaks_of_all_processes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilisation, "measured_rate", lambda products, windows, device, dtype: 3e9 * windows)
    found = Utilisation(TrainerConfig(precision="32-true"), [PRODUCT], 1e9, micro_batch_size=2)
    assert found.begin(launched_on(torch.device("cpu"), 4)) is None  # type: ignore[arg-type]
    assert found.peak == pytest.approx(24e9)
    assert found.of(12, 1.0) == pytest.approx(0.5)
    stated = Utilisation(TrainerConfig(peak_tflops=0.5), [PRODUCT], 1e9, micro_batch_size=2)
    assert stated.begin(launched_on(torch.device("cpu"), 2)) is None  # type: ignore[arg-type]
    assert stated.peak == pytest.approx(1e12)


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA Unheard-of", None)])
def test_gpus_have_the_peak_of_their_name(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    real = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda value, device, **more: real(value, **more))  # there is no GPU
    found = Utilisation(TrainerConfig(precision="bf16-mixed"), [PRODUCT], 1e12, micro_batch_size=2)
    said = found.begin(launched_on(torch.device("cuda"), 2))  # type: ignore[arg-type]
    if peak is None:
        assert said is not None
        assert "NVIDIA Unheard-of in bf16-mixed is not known; trainer.peak_tflops=" in said
        assert math.isnan(found.peak)
        assert found.of(1, 1.0) is None
    else:
        assert said is None
        assert found.peak == pytest.approx(2 * peak)


@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100 80GB PCIe", 312e12), ("A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835.5e12), ("NVIDIA H200", 989.4e12),
        ("NVIDIA GH200 480GB", 989.4e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("NVIDIA L40", 181e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12), ("NVIDIA B200", 2250e12), ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None), ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA A10G", None), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_names_are_matched_whole(name: str, bfloat16: float | None) -> None:
    assert known_peak(name, torch.bfloat16) == bfloat16


def test_single_precision_is_tensor_float_where_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.float64) is None
