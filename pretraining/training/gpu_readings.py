"""Read what NVML, the driver's library, says of each rank's GPU: its use, temperature, power and clocks.

Names are `hardware/gpu_<reading>` for all ranks together and, with several ranks, `.../<rank>` for each. A reading that
a GPU refuses (MIG, virtual GPUs) is absent. Without a GPU or without nvidia-ml-py, all are.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST_RANKS = 64
"""With more ranks, no rank has a metric of its own."""
HEAT = 0x8 | 0x20 | 0x40
"""Bits of `nvmlDeviceGetCurrentClocksEventReasons`: the hardware's slowdown, the driver's and hardware's for heat."""
HELD_BACK_BY = {
    0x4: "the power limit",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "the power supply",
    0x2: "clocks set by an administrator",
}
"""The same bits: why a clock under load is lower than it could be (nvml.h, nvmlClocksEventReasons)."""

# reading -> what stands for all ranks: the mean use, the hottest GPU, the power of all GPUs, the slowest clock
TOGETHER: dict[str, Callable[[Sequence[float]], float]] = {
    "utilization": lambda shares: sum(shares) / len(shares),
    "temperature_celsius": max,
    "power_watts": sum,
    "clock_mhz": min,
    "memory_clock_mhz": min,
    "thermal_slowdown": max,
}
NAMES = tuple(f"hardware/gpu_{reading}" for reading in TOGETHER)


class GpuReadings:
    """The readings of this rank's GPU."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.nvml: Any = None
        self.handle: Any = None
        if self.on_gpu:
            try:
                import pynvml

                pynvml.nvmlInit()
                # by its id: CUDA's numbers follow CUDA_VISIBLE_DEVICES, those of NVML do not
                uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
                self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except Exception:  # nvidia-ml-py is not installed, or NVML refuses in its own way
                pass
        self._energy: tuple[float, float] | None = None  # (seconds of a clock, joules) at the last reading
        self._joules()

    def read(self) -> dict[str, float]:
        """Return {name: value} of all `NAMES`, NaN for what is not known; empty without a GPU.

        The names are the same on every rank, because the ranks gather the values.
        """
        if not self.on_gpu:
            return {}
        readings = [
            self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
            self._temperature(),
            self._mean_watts(),
            self._clock_mhz(),
            self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            self._ask(lambda nvml, gpu: bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & HEAT)),
        ]
        return dict(zip(NAMES, readings, strict=True))

    def under_load(self) -> dict:
        """Return {"clock_hz", "temperature_celsius", "watts", "held_back_by"} now, without what is not known."""
        reasons = self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
        state: dict = {
            "clock_hz": 1e6 * self._clock_mhz(),
            "temperature_celsius": self._temperature(),
            "watts": self._watts(),
        }
        state = {name: value for name, value in state.items() if not math.isnan(value)}
        if not math.isnan(reasons):
            state["held_back_by"] = [why for bit, why in HELD_BACK_BY.items() if int(reasons) & bit]
        return state

    def _ask(self, question: Callable[[Any, Any], float]) -> float:
        """Return the answer, or NaN if this GPU or driver does not give it."""
        if self.handle is None:
            return math.nan
        try:
            return float(question(self.nvml, self.handle))
        except Exception:  # NVML raises classes of its own, and an old binding lacks a name
            return math.nan

    def _temperature(self) -> float:
        return self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))

    def _clock_mhz(self) -> float:
        return self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))

    def _watts(self) -> float:
        return self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3)  # milliwatts

    def _mean_watts(self) -> float:
        """Return the mean power since the last call; if the GPU does not count its energy, that of this moment."""
        before, now = self._energy, self._joules()
        if before is not None and now is not None and now[0] > before[0]:
            return (now[1] - before[1]) / (now[0] - before[0])
        return self._watts()

    def _joules(self) -> tuple[float, float] | None:
        """Read the GPU's counter of energy, and keep it with its time."""
        joules = self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3)
        self._energy = None if math.isnan(joules) else (time.monotonic(), joules)
        return self._energy


def of_all_ranks(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the metrics of the ranks' readings, [ranks, readings] in the order of `NAMES`."""
    metrics = {}
    for name, together, column in zip(NAMES, TOGETHER.values(), zip(*rows, strict=True), strict=False):
        known = {rank: round(value, 3) for rank, value in enumerate(column) if not math.isnan(value)}
        if not known:
            continue
        metrics[name] = round(together(list(known.values())), 3)
        if 1 < len(rows) <= MOST_RANKS:
            metrics |= {f"{name}/{rank}": value for rank, value in known.items()}
    return metrics
