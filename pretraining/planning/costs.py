"""What a run costs: GPU-hours, dollars, energy, and the disk and the time that its checkpoints take."""

import math
from dataclasses import asdict, dataclass

from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu, prices_of

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Price:
    """Dollars of a run at one provider."""

    provider: str
    place: str
    dollars_per_gpu_hour: float
    dollars: float
    date: str | None
    """Of the price; None of one's own."""
    source: str


@dataclass(frozen=True)
class Cost:
    """GPU-hours and what follows from them."""

    gpu_hours: float
    prices: tuple[Price, ...]
    """Cheapest first; empty where the table has no price for the GPU."""
    energy_kwh: float
    """GPUs at their rated power, times the data centre's overhead."""

    def to_dict(self) -> dict:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class CheckpointCost:
    """What checkpointing takes, and what a failure costs."""

    bytes: float
    every_seconds: float
    written: int
    """Checkpoints over the whole run."""
    kept: int
    write_seconds: float
    failure_seconds: float
    """Mean time between failures of all GPUs together."""
    disk: dict | None = None
    """The disk's rate as it was measured on this machine (`machine_rates`); None if it is assumed."""

    @property
    def write_share(self) -> float:
        """Share of the run spent writing, if training waits for it."""
        return self.write_seconds / (self.every_seconds + self.write_seconds)

    @property
    def lost_share(self) -> float:
        """Share of the run done twice: half an interval for every failure."""
        return self.every_seconds / 2 / self.failure_seconds

    @property
    def best_every_seconds(self) -> float:
        """The interval that loses least: sqrt(2 x time to write x time between failures) (Young 1974)."""
        return math.sqrt(2 * self.write_seconds * self.failure_seconds)

    def to_dict(self) -> dict:
        """Plain JSON values, derived ones included."""
        derived = ("write_share", "lost_share", "best_every_seconds")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def gpu_hours(num_gpus: int, seconds: float) -> float:
    """GPUs times hours."""
    return num_gpus * seconds / SECONDS_PER_HOUR


def run_cost(gpu: Gpu, hours: float, own_price: float | None = None) -> Cost:
    """Dollars at every known provider, and energy, of `hours` GPU-hours.

    Args:
        own_price: dollars per GPU-hour that take the place of the table's.
    """
    entries = [
        {"provider": "yours", "place": "--price", "dollars_per_gpu_hour": own_price, "source": "given"}
    ]
    entries = entries if own_price else prices_of(gpu)
    prices = tuple(
        Price(
            provider=entry["provider"],
            place=entry["place"],
            dollars_per_gpu_hour=entry["dollars_per_gpu_hour"],
            dollars=hours * entry["dollars_per_gpu_hour"],
            date=entry.get("date"),
            source=entry["source"],
        )
        for entry in entries
    )
    return Cost(hours, prices, energy_kwh(gpu.watts, hours))


def energy_kwh(watts: float, hours: float, overhead: float | None = None) -> float:
    """Energy of `hours` GPU-hours at rated power times the overhead (PUE) (Touvron et al. 2023, section 6)."""
    overhead = overhead or table("rates")["power_usage_effectiveness"]["value"]
    return watts * hours * overhead / 1000


def checkpoint_cost(
    num_bytes: float,
    every_steps: int,
    step_seconds: float,
    written: int,
    kept: int,
    num_gpus: int,
    disk: dict | None = None,
) -> CheckpointCost:
    """Cadence, disk and lost work of a checkpoint of `num_bytes` every `every_steps` optimizer steps.

    disk: the measured rate of the disk, as `machine_rates` keeps it.
    """
    rates = table("rates")
    speed = (disk or rates["disk_bytes_per_second"])["value"]
    return CheckpointCost(
        bytes=num_bytes,
        every_seconds=every_steps * step_seconds,
        written=written,
        kept=kept,
        write_seconds=num_bytes / speed,
        failure_seconds=rates["gpu_hours_between_failures"]["value"] * SECONDS_PER_HOUR / num_gpus,
        disk=disk,
    )
