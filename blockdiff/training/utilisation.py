"""How much of the machine's arithmetic a run makes use of.

MFU, model FLOPs utilisation (Chowdhery et al., "PaLM", 2022, appendix B): the useful operations of the steps taken,
over what the devices could have done in the same time. On GPUs the latter is the makers' figure; elsewhere it is the
rate of matrix products at the network's own shapes, measured at launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import lightning as L
import torch

from blockdiff.model.compute import Product
from blockdiff.model.rate import measured_rate
from blockdiff.training.config import TrainerConfig
from blockdiff.training.peak import known_peak
from blockdiff.training.trainer import resolve_precision

DTYPES = {"32-true": torch.float32, "64-true": torch.float64, "bf16-mixed": torch.bfloat16}


@dataclass
class Utilisation:
    """Of one launch.

    Attributes:
        config: may state the peak rate of a device, and says in what precision products are taken.
        products: of one window.
        step_flops: useful operations of one optimizer step, over all processes.
        micro_batch_size: windows that a device takes at a time.
        peak: operations a second of all devices together; NaN where it is not known.
    """

    config: TrainerConfig
    products: list[Product]
    step_flops: float
    micro_batch_size: int
    peak: float = math.nan

    def begin(self, trainer: L.Trainer) -> str | None:
        """Finds the peak; all processes come here. Returns what to tell the user where it is not known."""
        strategy = trainer.strategy
        # Processes that share the cores of a CPU must measure at the same time: then each finds its own share of them.
        strategy.barrier("peak")
        peak = torch.tensor(self._device_peak(strategy.root_device), dtype=torch.float32, device=strategy.root_device)
        self.peak = float(strategy.reduce(peak, reduce_op="sum"))
        if not math.isnan(self.peak):
            return None
        return (
            f"no MFU is shown: the peak rate of {torch.cuda.get_device_name(strategy.root_device)} in "
            f"{resolve_precision(self.config)} is not known; trainer.peak_tflops=… states it"
        )

    def of(self, steps: int, seconds: float) -> float | None:
        """The share of the peak that `steps` in `seconds` have made use of; None where the peak is not known."""
        return None if math.isnan(self.peak) else steps * self.step_flops / (seconds * self.peak)

    def _device_peak(self, device: torch.device) -> float:
        if self.config.peak_tflops is not None:
            return self.config.peak_tflops * 1e12
        dtype = DTYPES[resolve_precision(self.config)]
        if device.type == "cuda":
            peak = known_peak(torch.cuda.get_device_name(device), dtype)
            return math.nan if peak is None else peak
        return measured_rate(self.products, windows=self.micro_batch_size, device=device, dtype=dtype)
