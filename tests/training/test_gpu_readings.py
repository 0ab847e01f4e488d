"""What NVML says of each rank's GPU, by a stand-in of its module: the driver's library needs a GPU."""

import math
import sys
from types import SimpleNamespace

import pytest

from pretraining.training import throughput
from pretraining.training.throughput import NAMES, GpuReadings, of_all_ranks


class Refused(Exception):
    """How NVML refuses: by a class of its own."""


class Nvml(SimpleNamespace):
    """The functions of nvidia-ml-py that are called, with its names, units and constants."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    energy, refuses = [1_000, 61_000], ()

    def nvmlInit(self):
        self.asked = []

    def __getattribute__(self, name):
        if name in object.__getattribute__(self, "refuses"):
            raise Refused("Not Supported")
        return super().__getattribute__(name)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-0d1e"
        return "gpu"

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return {self.NVML_TEMPERATURE_GPU: 71}[sensor]

    def nvmlDeviceGetPowerUsage(self, gpu):
        return 512_345

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        return self.energy.pop(0)

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        return {self.NVML_CLOCK_SM: 1755, self.NVML_CLOCK_MEM: 2619}[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return 0x4 | 0x40  # the power cap, and heat


@pytest.fixture
def nvml(monkeypatch):
    """NVML on a machine with a GPU, whose clock stands at 10 s, then at 110 s."""
    module = Nvml(energy=[1_000, 61_000])
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="0d1e"))
    moments = iter([10.0, 110.0])
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    return module


def test_a_gpu_says_how_it_does(nvml):
    """Shares, degrees, watts and megahertz; the power is the mean since the last reading, by the GPU's own counter."""
    found = GpuReadings().read()
    assert tuple(found) == NAMES
    assert list(found.values()) == [0.87, 71, 0.6, 1755, 2619, 1]


def test_a_gpu_under_load_says_what_holds_it_back(nvml):
    """As the doctor shows it; what the GPU refuses is left out."""
    readings = GpuReadings()
    state = {"clock_hz": 1.755e9, "temperature_celsius": 71, "watts": 512.345}
    assert readings.under_load() == {**state, "held_back_by": ["the power limit", "heat (hardware)"]}
    nvml.refuses = ("nvmlDeviceGetCurrentClocksEventReasons",)
    assert readings.under_load() == state


def test_what_a_gpu_refuses_is_not_known(nvml):
    """Without a counter of energy the power of the moment; every rank has the same names, and none raises."""
    nvml.refuses = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetUtilizationRates")
    found = GpuReadings().read()
    assert tuple(found) == NAMES and math.isnan(found["hardware/gpu_utilization"])
    assert found["hardware/gpu_power_watts"] == 512.345
    assert "hardware/gpu_utilization" not in of_all_ranks([list(found.values())])
    nvml.refuses = ("nvmlInit",)
    assert all(math.isnan(value) for value in GpuReadings().read().values())


def test_nothing_is_read_without_a_gpu_or_its_package(monkeypatch):
    assert GpuReadings().read() == {} and of_all_ranks([[], []]) == {}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert of_all_ranks([list(GpuReadings().read().values())]) == {}


def test_ranks_are_read_together_and_each_by_itself():
    """Mean use, the hottest, the power of all, the slowest clock; a rank that does not know is left out."""
    rows = [[0.5, 60, 300, 1900, 2600, 0], [1.0, 80, 500, 1500, math.nan, 1]]
    found = of_all_ranks(rows)
    together = {name.removeprefix("hardware/gpu_"): found[name] for name in NAMES}
    assert list(together.values()) == [0.75, 80, 800, 1500, 2600, 1]
    assert found["hardware/gpu_power_watts/1"] == 500
    assert "hardware/gpu_memory_clock_mhz/1" not in found
    assert not [name for name in of_all_ranks(rows[:1]) if name.count("/") > 1]
    assert len(of_all_ranks(rows * 64)) == len(NAMES)
