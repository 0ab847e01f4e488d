"""See what the GPU that is none is asked: every wait of the host, every collective, and what comes before what.

The fake GPU of the package makes answers up and sees nothing. This one has a clock for each stream, and may be busy.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor

from pretraining.upstream import fake_gpu as device
from pretraining.upstream import fake_ranks
from tests.gear.runs import REPOSITORY

STANDARD_LIBRARY = str(Path(contextlib.__file__).parent)
NEVER_THE_CAUSE = ("torch/", "deepspeed/accelerator/", "deepspeed/utils/nvtx.py", "deepspeed/comm/")
"""Packages and files that only do what others ask for; the cause of a wait is their caller."""
OWN_FILES = {device.__file__, fake_ranks.__file__, __file__}

Clock = dict["WatchedStream", int]
"""{stream: how many of its operations are over} at a point of a stream or of the host's program (a vector clock)."""


def join(clock: Clock, other: Clock) -> None:
    """Let all that is over in `other` be over in `clock` too."""
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


@dataclass(eq=False)
class WatchedEvent(device.FakeStream):
    """An event: it has passed as soon as it is recorded, or, on a busy GPU, once the host has waited for it."""

    machine: "WatchedGpu"
    clock: Clock = field(default_factory=dict)

    def record(self, stream: "WatchedStream | None" = None) -> None:
        self.clock = dict((stream or self.machine.current_stream).clock)

    def wait(self, stream: "WatchedStream | None" = None) -> None:
        (stream or self.machine.current_stream).wait_event(self)

    def query(self) -> bool:
        return self.machine.is_over(self.clock)

    def synchronize(self) -> None:
        self.machine.waits("event", self.clock)


@dataclass(eq=False)
class WatchedStream(device.FakeStream):
    """A stream, which computes nothing: it knows what comes before its next operation."""

    machine: "WatchedGpu"
    clock: Clock = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine.made.append(self)

    def wait_stream(self, stream: "WatchedStream") -> None:
        join(self.clock, stream.clock)

    def wait_event(self, event: WatchedEvent) -> None:
        join(self.clock, event.clock)

    def record_event(self, event: WatchedEvent | None = None) -> WatchedEvent:
        event = event or WatchedEvent(self.machine)
        event.record(self)
        return event

    def query(self) -> bool:
        return self.machine.is_over(self.clock)

    def synchronize(self) -> None:
        self.machine.waits("stream", self.clock)


@dataclass(frozen=True)
class Synchronisation:
    """One wait of the host for the device."""

    kind: str
    """item, nonzero, to host, to device (a blocking copy), device, stream, event, barrier."""
    file: str
    """File of the innermost frame that caused it, beginning with its package: `deepspeed/runtime/engine.py`."""
    function: str
    line: int

    @property
    def where(self) -> str:
        """Return file and function."""
        # Without the line, which changes with each edit of the file.
        return f"{self.file}:{self.function}"


@dataclass(frozen=True)
class Collective:
    """One operation of this rank with the others of a group."""

    name: str
    backend: str
    """nccl or gloo."""
    group_size: int
    bytes: int
    """Bytes that go in or that come out on this rank, whichever is more."""


class Watch:
    """Sees what the device does; here, does nothing about it."""

    machine: "WatchedGpu"
    """Set by it."""

    def operator(self, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """See an operator of torch, on the current stream."""

    def collective(self, name: str, sides: list[list[torch.Tensor]]) -> None:
        """See a collective, on the stream of its group; sides: outputs, then inputs."""

    def used_on(self, tensor: torch.Tensor, stream: WatchedStream) -> None:
        """See that the allocator is told of a stream that uses a tensor (`record_stream`)."""


class WatchedGpu(fake_ranks.Network):
    """What has happened on the machine; both lists may be cleared between steps.

    busy: the device is as far behind the host as it may be: an event has passed only once the host has waited for it.
    watch: sees every operation of the device.
    """

    def __init__(self, world_size: int, busy: bool = False, watch: Watch | None = None):
        self.world_size, self.busy, self.watch = world_size, busy, watch or Watch()
        self.synchronisations: list[Synchronisation] = []
        self.collectives: list[Collective] = []
        self.made: list[WatchedStream] = []
        """Every stream; the first is the default stream."""
        self.streams = [WatchedStream(self)]
        """The streams whose blocks have not ended: the last is the current one."""
        self.host: Clock = {}
        """What the host has waited for."""
        self.communicators: dict[dist.ProcessGroup, WatchedStream] = {}
        """NCCL has a stream of its own for each group."""
        self.watch.machine = self

    @property
    def current_stream(self) -> WatchedStream:
        return self.streams[-1]

    @contextlib.contextmanager
    def on_stream(self, stream: WatchedStream | None) -> Iterator[None]:
        self.streams.append(stream or self.current_stream)
        try:
            yield
        finally:
            self.streams.pop()

    def is_over(self, clock: Clock) -> bool:
        """Return whether all of `clock` is over for somebody who asks without waiting."""
        return not self.busy or all(self.host.get(stream, 0) >= number for stream, number in clock.items())

    def launch(self) -> None:
        """Begin an operation on the current stream: what the host has waited for is over before it begins."""
        clock, stream = self.current_stream.clock, self.current_stream
        join(clock, self.host)
        clock[stream] = clock.get(stream, 0) + 1

    def functions_of_cuda(self) -> dict[str, object]:
        """{name in `torch.cuda`: its stand-in}, of those by which streams order what is done."""
        return {
            "Stream": lambda *_, **__: WatchedStream(self),
            "Event": lambda *_, **__: WatchedEvent(self),
            "current_stream": lambda *_: self.current_stream,
            "default_stream": lambda *_: self.streams[0],
            "stream": self.on_stream,
            "set_stream": self.streams.append,
            "synchronize": lambda *_: self.waits("device"),
        }

    def waits(self, kind: str, clock: Clock | None = None) -> None:
        """Record that the host waits here: for all of `clock`, or for the current stream, or for the device."""
        self.synchronisations.append(Synchronisation(kind, *_cause(sys._getframe(1))))
        for stream in self.made if kind == "device" else ():
            join(self.host, stream.clock)
        join(self.host, self.current_stream.clock if clock is None else clock)

    def hears(self, name: str, group: dist.ProcessGroup, sides: list[list[torch.Tensor]]) -> FakeWork:
        """Record a collective, and the wait of the host if there is one; return what waits for its end."""
        moved = max((sum(tensor.nbytes for tensor in side) for side in sides), default=0)
        self.collectives.append(Collective(name, group.name(), group.size(), moved))
        if group.name() != "nccl":
            return FakeWork()
        # NCCL sends objects as tensors of the device: the host waits for them, as for a barrier.
        if not any(sides):
            self.waits("barrier")
        stream = self.communicators.setdefault(group, WatchedStream(self))
        stream.wait_stream(self.current_stream)
        with self.on_stream(stream):
            self.launch()
            self.watch.collective(name, sides)
        return _Work(self, dict(stream.clock))


class _Work(FakeWork):
    """The end of a collective of NCCL."""

    def __init__(self, machine: WatchedGpu, clock: Clock):
        super().__init__()
        self.machine, self.clock = machine, clock

    def wait(self, *_: object) -> bool:
        """Let the current stream wait for it, not the host."""
        join(self.machine.current_stream.clock, self.clock)
        return True


class _WatchedDevice(device.Device):
    """Has the machine see each operator, and each wait of the host."""

    def __init__(self, machine: WatchedGpu):
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        self.depth += 1
        try:
            self.machine.launch()
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self.machine.watch.operator(func, args, kwargs, result)
            return result
        finally:
            self.depth -= 1

    def waits(self, kind: str) -> None:
        self.machine.waits(kind)


def _cause(frame: FrameType) -> tuple[str, str, int]:
    """Return (file, function, line) of the innermost frame that belongs neither to torch nor to this harness."""
    while file_of(frame.f_code.co_filename) is None and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    return file_of(code.co_filename) or code.co_filename, code.co_name, frame.f_lineno


@cache
def file_of(file: str) -> str | None:
    """Return `.../site-packages/deepspeed/engine.py` as `deepspeed/engine.py`; None if it is never a cause."""
    _, is_installed, inside = file.rpartition("site-packages/")
    if is_installed:
        return None if inside.startswith(NEVER_THE_CAUSE) else inside
    if file in OWN_FILES or file.startswith((STANDARD_LIBRARY, "<")):
        return None
    path = Path(file)
    return path.relative_to(REPOSITORY).as_posix() if path.is_relative_to(REPOSITORY) else path.name


@contextlib.contextmanager
def watched_gpu(
    world_size: int = 1, rank: int = 0, busy: bool = False, watch: Watch | None = None
) -> Iterator[WatchedGpu]:
    """Give this process a GPU (`fake_gpu`) that is watched; busy, watch: see `WatchedGpu`."""
    machine = WatchedGpu(world_size, busy, watch)

    def record_stream(tensor: FakeTensor, stream: WatchedStream) -> None:
        machine.watch.used_on(tensor, stream)

    with (
        device.fake_gpu(world_size, rank, network=machine, device=_WatchedDevice(machine)),
        mock.patch.multiple(torch.cuda, **machine.functions_of_cuda()),
        mock.patch.object(FakeTensor, "record_stream", record_stream),
    ):
        yield machine
