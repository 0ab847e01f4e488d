"""Measure throughput: how a step's time is spent, tokens per second against the device's peak, slow ranks, the GPUs.

`StepClock` is always in exactly one phase, which the Trainer marks, so that the phases add up. `runtime.wall_time`
counts what is lost between the steps.
"""

import math
import socket
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from pretraining.errors import UserError
from pretraining.planning.gpus import FILE, find_gpu
from pretraining.planning.sizes import flops_per_token, size_of_recipe
from pretraining.planning.step_time import model_flops_utilization
from pretraining.recipe import Recipe
from pretraining.recipe.budget import Progress
from pretraining.recipe.sections import LowUse
from pretraining.runtime.process_group import gather_from_ranks, rank_and_world_size

PAUSES = ("evaluation", "saving")
"""Phases that do not belong to a step."""


class StepClock:
    """Count seconds by phase; on a GPU by its own time line.

    There a change of phase records an event on the current stream. Its time is read only after the device has passed
    it. So nothing waits, except `take` for the last event, which logging has waited for already.
    """

    def __init__(self, on_gpu: bool | None = None) -> None:
        self.on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
        self.seconds: dict[str, float] = defaultdict(float)
        self.phase = "other"
        self._mark: Any = None  # a CUDA event, or seconds without a GPU
        self._pending: deque = deque()  # (phase, its first event, the event after it)

    def start(self) -> None:
        """Forget everything. The time from here on counts as `other`."""
        self.seconds.clear()
        self._pending.clear()
        self.phase, self._mark = "other", self._now()

    def enter(self, phase: str) -> str:
        """End the current phase and begin `phase`. Return the one that ended."""
        ended, mark = self.phase, self._now()
        if self._mark is not None and self.on_gpu:
            self._pending.append((ended, self._mark, mark))
        elif self._mark is not None:
            self.seconds[ended] += mark - self._mark
        self.phase, self._mark = phase, mark
        return ended

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the block as `phase`, then return to the phase before it."""
        # phases may be nested, but the clock counts one at a time
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def take(self) -> dict[str, float]:
        """Return {phase: seconds} since the last call."""
        self.enter(self.phase)
        if self.on_gpu:
            self._mark.synchronize()
            self._fold(lambda event: True)
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken

    def settle(self) -> None:
        """Add up what the device has passed, so that few events are kept if logs are rare."""
        if self.on_gpu:
            self._fold(lambda event: event.query())

    def _now(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _fold(self, has_passed: Callable) -> None:
        # events of one stream pass in order: stop at the first that has not
        while self._pending and has_passed(self._pending[0][2]):
            phase, begin, end = self._pending.popleft()
            self.seconds[phase] += begin.elapsed_time(end) / 1e3  # milliseconds


@dataclass
class SpeedMeter:
    """Compute a run's speed from its tokens, their FLOPs and the clock of its steps."""

    progress: Progress
    world_size: int = 1
    model_flops_per_token: float = 0.0
    """FLOPs of forward and backward, with attention and active experts, as if there were no causal mask."""
    hardware_flops_per_token: float = 0.0
    """The same, with what activation checkpointing computes again."""
    peak_flops: float | None = None
    """Dense peak of one device in FLOPs per second; None if it is not known, as for a processor."""
    clock: StepClock = field(default_factory=StepClock)

    @classmethod
    def of(cls, recipe: Recipe, world_size: int, progress: Progress) -> "SpeedMeter":
        """Build the meter of a run on this machine's devices."""
        counted = flops_per_token(size_of_recipe(recipe), recipe.sequence_length)
        again = recipe.training.recomputed_share * counted.recomputed
        return cls(
            progress, world_size, counted.training, counted.training + again, device_peak_flops(recipe)
        )

    def tokens_at(self, step: int) -> int:
        return self.progress.tokens_at(step)

    def rates(self, seconds: dict[str, float], before: int, step: int) -> dict[str, float]:
        """Return metrics of the steps after `before`, up to `step`, from {phase: seconds}: means; of pauses sums."""
        steps = step - before
        in_steps = sum(value for phase, value in seconds.items() if phase not in PAUSES)
        step_seconds = in_steps / max(steps, 1)
        tokens_per_second = (self.tokens_at(step) - self.tokens_at(before)) / max(in_steps, 1e-9)
        samples_per_second = tokens_per_second / self.progress.sequence_length
        split = {
            "data_wait": seconds.get("data_wait", 0.0),
            "forward_backward": seconds.get("forward", 0.0) + seconds.get("backward", 0.0),
            "optimizer": seconds.get("optimizer", 0.0),
        }
        return {
            "throughput/tokens_per_second": round(tokens_per_second, 1),
            "throughput/tokens_per_second_per_device": round(tokens_per_second / self.world_size, 1),
            "throughput/samples_per_second": round(samples_per_second, 3),
            "throughput/step_seconds": round(step_seconds, 6),
            **{f"throughput/{name}_seconds": round(s / max(steps, 1), 6) for name, s in split.items()},
            **{f"throughput/{name}_seconds": round(seconds.get(name, 0.0), 6) for name in PAUSES},
            **self.utilization(tokens_per_second),
        }

    def remaining(self, step: int, step_seconds: float) -> dict[str, float]:
        """Return the share of the budget that is spent, and the time left at this speed, without pauses."""
        done, budget = self.tokens_at(step), self.tokens_at(self.progress.last_step)
        # by tokens: the steps of a ramp grow
        token_seconds = step_seconds / self.progress.step_sizes.at(max(0, step - 1))
        return {
            "throughput/budget_share": round(done / budget, 6),
            "throughput/seconds_left": round((budget - done) * token_seconds, 1),
        }

    def utilization(self, tokens_per_second: float) -> dict[str, float]:
        """Return MFU and HFU as shares of the dense peak (PaLM, appendix B)."""
        if self.peak_flops is None:
            return {}
        flops = {"mfu": self.model_flops_per_token, "hfu": self.hardware_flops_per_token}
        rate, ranks, peak = tokens_per_second, self.world_size, self.peak_flops
        shares = {name: model_flops_utilization(rate, each, ranks, peak) for name, each in flops.items()}
        return {f"throughput/{name}": round(share, 6) for name, share in shares.items()}


def device_peak_flops(recipe: Recipe) -> float | None:
    """Dense peak of this rank's GPU at the recipe's precision, from the planner's table; None if unknown."""
    if not torch.cuda.is_available():
        return None
    return _known_peak(torch.cuda.get_device_name(), recipe.training.product_precision)


@cache
def _known_peak(name: str, precision: str) -> float | None:
    """Return the table's peak. If it has none, rank 0 logs once why there will be no MFU."""
    try:
        return find_gpu(name).peak_flops(precision)
    except UserError:
        why = "is a slice of a GPU, and its peak" if " MIG " in name else f"or its {precision} peak"
        if rank_and_world_size()[0] == 0:
            print(f"no MFU: {name} {why} is not in {FILE}", flush=True)
        return None


def time_optimizer(optimizer: Any, clock: StepClock) -> None:
    """Mark every step of the prepared `optimizer` on the clock.

    Under ZeRO it is DeepSpeed's own optimizer, which the engine steps inside the backward call. Its step includes the
    gradient norm, the update and the gathering of updated weights.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, torch.optim.Optimizer):
        before = []
        inner.register_step_pre_hook(lambda *_: before.append(clock.enter("optimizer")))
        inner.register_step_post_hook(lambda *_: clock.enter(before.pop()) and None)
        return
    step = inner.step

    def timed_step(*args, **kwargs):
        with clock.during("optimizer"):
            return step(*args, **kwargs)

    # DeepSpeed's optimizers are no torch optimizers, and have no hooks for steps
    inner.step = timed_step


SLOW = 1.25
"""A rank is slow if it takes more than this multiple of the median ..."""
NOTABLE = 0.05
"""... if the difference is more than this share of a step ..."""
STEPS = 20
"""... for so many steps in a row."""


class Stragglers:
    """Compare the ranks' own seconds of a step: waiting for data and the forward passes.

    All ranks end a data-parallel step with the slowest one, so whole steps do not differ. The backward pass includes
    the messages between ranks. Under ZeRO-3 the forward passes do too, so there only the wait for data differs.
    """

    def __init__(self) -> None:
        _, self.world_size = rank_and_world_size()
        # gathered once: an event names the host of another rank without a collective
        self.hosts = gather_from_ranks(socket.gethostname())
        self.slow_steps = [0] * self.world_size

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of every rank, [ranks, values]. A collective."""
        if self.world_size == 1:
            return [values]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        gathered = torch.empty(self.world_size * len(values), dtype=torch.float64, device=device)
        dist.all_gather_into_tensor(gathered, mine)
        return gathered.view(self.world_size, len(values)).tolist()

    def judge(self, own_seconds: list[float], step_seconds: float, steps: int) -> list[dict]:
        """Return ranks that have just become slow, as {"rank", "host", "own_seconds", "median_seconds", "steps"}.

        own_seconds: for each rank the mean per step over the `steps` steps since the last call.
        """
        # the lower one: of two ranks the faster is the measure, and the slower can be named
        median = statistics.median_low(own_seconds)
        found = []
        for rank, own in enumerate(own_seconds):
            before = self.slow_steps[rank]
            is_slow = own > SLOW * median and own - median > NOTABLE * step_seconds
            # from 0 it is reported again if it becomes slow again
            self.slow_steps[rank] = before + steps if is_slow else 0
            if before < STEPS <= self.slow_steps[rank]:
                seconds = {"own_seconds": round(own, 6), "median_seconds": round(median, 6)}
                steps_slow = self.slow_steps[rank]
                found.append({"rank": rank, "host": self.hosts[rank], **seconds, "steps": steps_slow})
        return found


class UseWatch:
    """Look whether the use of the GPUs, or the MFU beside the plan's, is low for many steps (`monitors.low_use`)."""

    def __init__(self, settings: LowUse, planned_mfu: float | None) -> None:
        self.steps = settings.steps
        self.least = {
            "hardware/gpu_utilization": settings.gpu_utilization,
            "throughput/mfu": settings.mfu_of_plan and planned_mfu and settings.mfu_of_plan * planned_mfu,
        }
        self.low_steps = dict.fromkeys(self.least, 0)

    def judge(self, measured: dict[str, float], steps: int) -> list[dict]:
        """Return what has just been too low for long enough, as {"of", "value", "least", "steps"}.

        measured: metrics of the `steps` steps since the last call.
        """
        found = []
        for name, least in self.least.items():
            value, before = measured.get(name, math.inf), self.low_steps[name]
            # from 0 it is reported again if it falls again
            self.low_steps[name] = low_steps = before + steps if least and value < least else 0
            if before < self.steps <= low_steps:
                numbers = {"value": round(value, 4), "least": round(least, 4), "steps": low_steps}
                found.append({"of": name.partition("/")[2], **numbers})
        return found


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

READINGS: dict[str, tuple[Callable[[Sequence[float]], float], Callable[[Any, Any], float]]] = {
    "utilization": (statistics.fmean, lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
    "temperature_celsius": (
        max,
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
    "power_watts": (sum, lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),  # milliwatts
    "clock_mhz": (min, lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
    "memory_clock_mhz": (min, lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
    "thermal_slowdown": (
        max,
        lambda nvml, gpu: bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & HEAT),
    ),
}
"""Reading -> (what stands for all ranks, the question to NVML). For all: the mean use, the hottest GPU, the power of
all GPUs, the slowest clock."""
NAMES = tuple(f"hardware/gpu_{reading}" for reading in READINGS)


class GpuReadings:
    """What NVML says of this rank's GPU: its use, temperature, power and clocks.

    Names are `hardware/gpu_<reading>` for all ranks together and, with several ranks, `.../<rank>` for each. A reading
    that a GPU refuses (MIG, virtual GPUs) is absent. Without a GPU or without nvidia-ml-py, all are.
    """

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
        """Return {name: value} of all `NAMES`, the same on every rank, NaN for the unknown; empty without a GPU."""
        if not self.on_gpu:
            return {}
        # the mean power since the last call; if the GPU does not count its energy, that of this moment
        before, now = self._energy, self._joules()
        counted = before is not None and now is not None and now[0] > before[0]
        readings = [
            (now[1] - before[1]) / (now[0] - before[0])
            if reading == "power_watts" and counted
            else self._ask(question)
            for reading, (_, question) in READINGS.items()
        ]
        return dict(zip(NAMES, readings, strict=True))

    def under_load(self) -> dict:
        """Return {"clock_hz", "temperature_celsius", "watts", "held_back_by"} now, without what is not known."""
        reasons = self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
        now = {reading: self._ask(question) for reading, (_, question) in READINGS.items()}
        state: dict = {
            "clock_hz": 1e6 * now["clock_mhz"],
            "temperature_celsius": now["temperature_celsius"],
            "watts": now["power_watts"],
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

    def _joules(self) -> tuple[float, float] | None:
        """Read the GPU's counter of energy, and keep it with its time."""
        joules = self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3)
        self._energy = None if math.isnan(joules) else (time.monotonic(), joules)
        return self._energy


def of_all_ranks(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the metrics of the ranks' readings, [ranks, readings] in the order of `NAMES`."""
    metrics = {}
    for name, (together, _), column in zip(NAMES, READINGS.values(), zip(*rows, strict=True), strict=False):
        known = {rank: round(value, 3) for rank, value in enumerate(column) if not math.isnan(value)}
        if not known:
            continue
        metrics[name] = round(together(list(known.values())), 3)
        if 1 < len(rows) <= MOST_RANKS:
            metrics |= {f"{name}/{rank}": value for rank, value in known.items()}
    return metrics
