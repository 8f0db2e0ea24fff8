"""Peak rates of GPUs: dense matrix products as their makers state them, with sums in single precision.

Lightning has such a table too, but it takes sparse figures for dense ones on some devices (H200, H100 NVL), those of
shaders for those of tensor cores on others (RTX), and an L40S for an L4.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """TFLOP/s in bfloat16, in TensorFloat-32 (on AMD: its like), and in float32."""

    bfloat16: float
    tfloat32: float
    float32: float


# Sources: NVIDIA's data sheets of A10, A40, A100, L4, L40, L40S, H100, H200, GH200 and Blackwell, halved where they
# state sparse figures; its white papers on GA102, Ada and RTX Blackwell; AMD's data sheet of MI300X. Names are matched
# whole, so that a slice of a device (MIG), a notebook's or a curtailed one (4090 D) counts as unknown.
PEAKS = {
    r"A[18]00(-(SXM4|PCIE)-\d+GB| \d+GB PCIe)": Peak(312, 156, 19.5),
    r"H100 \d+GB HBM\d": Peak(989.4, 494.7, 66.9),
    r"H100 PCIe": Peak(756, 378, 51.2),
    r"H[12]00 NVL": Peak(835.5, 417.5, 60),
    r"(H200|GH200 \d+GB?( HBM3e)?)": Peak(989.4, 494.7, 66.9),
    r"B200": Peak(2250, 1100, 75),
    r"L4": Peak(121, 60, 30.3),
    r"L40": Peak(181, 90.5, 90.5),
    r"L40S": Peak(362, 183, 91.6),
    r"A10": Peak(125, 62.5, 31.2),
    r"A40": Peak(149.7, 74.8, 37.4),
    r"RTX A6000": Peak(154.8, 77.4, 38.7),
    r"GeForce RTX 3090": Peak(71, 35.6, 35.6),
    r"GeForce RTX 4090": Peak(165.2, 82.6, 82.6),
    r"GeForce RTX 5090": Peak(209.5, 104.8, 104.8),
    r"AMD Instinct MI300X": Peak(1307.4, 653.7, 163.4),
}


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """Operations a second of the GPU of this name, as torch tells it; None where it is not known.

    Args:
        name: of the device.
        dtype: that products are taken in. Single precision means TensorFloat-32 where torch was allowed it.
    """
    peak = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name.removeprefix("NVIDIA "))), None)
    if peak is None:
        return None
    if dtype is torch.bfloat16:
        return peak.bfloat16 * 1e12
    if dtype is torch.float32:
        exact = torch.get_float32_matmul_precision() == "highest"
        return (peak.float32 if exact else peak.tfloat32) * 1e12
    return None
