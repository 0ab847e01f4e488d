"""Stand in for `torch.cuda` on a machine without a GPU: one idle H100 for each rank, its streams and its events."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

GPU = torch.device("cuda", 0)
# Name and bytes as of an H100, whose compute capability is 9.0.
NAME, TOTAL_BYTES = "NVIDIA H100 80GB HBM3", 80 * 10**9
_PROPERTIES = {
    "name": NAME,
    "total_memory": TOTAL_BYTES,
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
}
# Functions that return 0, and below functions that return nothing.
_ZERO = ("current_device", "initial_seed", "utilization", "memory_allocated", "max_memory_allocated")
_ZERO += ("memory_reserved", "max_memory_reserved")
_NOTHING = ("_lazy_init", "set_device", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all")
_NOTHING += ("set_rng_state", "reset_peak_memory_stats", "reset_max_memory_allocated")

Waits = Callable[[str], None]
"""Called with what the host waits for: device, stream or event."""


class FakeCuda:
    """The functions of `torch.cuda` that training calls, and the stream that is current."""

    def __init__(self, num_gpus: int, waits: Waits):
        self.num_gpus, self.waits = num_gpus, waits
        # The first is the default stream, the last the current one.
        self.streams = [FakeStream(waits)]

    def attributes(self) -> dict[str, object]:
        """Return {name in `torch.cuda`: its stand-in}."""
        state = torch.zeros(16, dtype=torch.uint8)
        return {
            **{name: lambda *_, **__: 0 for name in _ZERO},
            **{name: lambda *_, **__: None for name in _NOTHING},
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda *_, **__: True,
            "is_current_stream_capturing": lambda: False,
            "device_count": lambda: self.num_gpus,
            "get_device_name": lambda *_: NAME,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": lambda *_: SimpleNamespace(**_PROPERTIES),
            "mem_get_info": lambda *_: (TOTAL_BYTES, TOTAL_BYTES),
            "memory_stats": lambda *_: {},
            "get_rng_state": lambda *_: state.clone(),
            "get_rng_state_all": lambda: [state.clone()],
            "synchronize": lambda *_: self.waits("device"),
            "Stream": lambda *_, **__: FakeStream(self.waits),
            "Event": lambda *_, **__: FakeEvent(self.waits),
            "current_stream": lambda *_: self.streams[-1],
            "default_stream": lambda *_: self.streams[0],
            "stream": self._on_stream,
            "set_stream": self.streams.append,
        }

    @contextlib.contextmanager
    def _on_stream(self, stream: "FakeStream | None") -> Iterator[None]:
        self.streams.append(stream or self.streams[-1])
        try:
            yield
        finally:
            self.streams.pop()


@dataclass(eq=False)
class FakeEvent:
    """An event that has passed as soon as it is recorded."""

    waits: Waits

    def record(self, stream: "FakeStream | None" = None) -> None:
        pass

    def wait(self, stream: "FakeStream | None" = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits("event")

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Return milliseconds, made up because nothing runs."""
        return 1.0


@dataclass(eq=False)
class FakeStream:
    """An idle stream; only the waits of the host for it are recorded."""

    waits: Waits
    device: torch.device = GPU

    def wait_stream(self, stream: "FakeStream") -> None:
        pass

    def wait_event(self, event: FakeEvent) -> None:
        pass

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent(self.waits)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waits("stream")
