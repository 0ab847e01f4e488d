"""Pretend to have a GPU: training steps of any model on a machine without one, in seconds and without its memory.

Inside `fake_gpu()` torch, transformers, accelerate and DeepSpeed find a GPU and NCCL, and this process is one rank of
as many as wanted. Tensors of the device are torch's fake tensors: they have a shape, a type and a device, but no
numbers. Tensors of the host are real. A step that mixes the two fails, as it would on a GPU. If the host would wait for
the device, the wait is recorded and the answer is made up. Collectives are recorded too, and send nothing
(`fake_ranks`).

A build of torch without CUDA has no CUDA device that autograd accepts. The meta device stands in for it: Python sees
`cuda:0`, and torch's C++ sees `meta`. When the block ends, everything is as before.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import accelerate.state
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import import_utils

from pretraining.upstream.fake_ranks import Collective, fake_ranks, forget_values

aten = torch.ops.aten
CUDA = torch.device("cuda")
INNER = torch.device("meta")
"""The device that torch's C++ sees."""
MOST_KNOWN = 4096
"""Most elements of a tensor whose copy from the host is kept."""
REPOSITORY = Path(__file__).parents[2]
STANDARD_LIBRARY = str(Path(contextlib.__file__).parent)
NEVER_THE_CAUSE = ("torch/", "deepspeed/accelerator/", "deepspeed/utils/nvtx.py", "deepspeed/comm/")
"""Packages and files that only do what others ask for; the cause of a wait is their caller."""
OWN_FILES = {str(Path(__file__).with_name(f"fake_{name}.py")) for name in ("gpu", "ranks")}


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

Clock = dict["FakeStream", int]
"""{stream: how many of its operations are over} at a point of a stream or of the host's program (a vector clock)."""


def join(clock: Clock, other: Clock) -> None:
    """Let all that is over in `other` be over in `clock` too."""
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


class FakeCuda:
    """The functions of `torch.cuda` that training calls."""

    def __init__(self, machine: "FakeGpu", num_gpus: int, name: str = NAME, total_bytes: int = TOTAL_BYTES):
        self.machine, self.num_gpus, self.name, self.total_bytes = machine, num_gpus, name, total_bytes

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
            "get_device_name": lambda *_: self.name,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": lambda *_: SimpleNamespace(
                **{**_PROPERTIES, "name": self.name, "total_memory": self.total_bytes}
            ),
            "mem_get_info": lambda *_: (self.total_bytes, self.total_bytes),
            "memory_stats": lambda *_: {},
            "get_rng_state": lambda *_: state.clone(),
            "get_rng_state_all": lambda: [state.clone()],
            "random": SimpleNamespace(
                get_rng_state=lambda *_: state.clone(),
                set_rng_state=lambda *_: None,
                fork_rng=torch.random.fork_rng,
            ),
            "synchronize": lambda *_: self.machine.waits("device"),
            "Stream": lambda *_, **__: FakeStream(self.machine),
            "Event": lambda *_, **__: FakeEvent(self.machine),
            "current_stream": lambda *_: self.machine.current_stream,
            "default_stream": lambda *_: self.machine.streams[0],
            "stream": self.machine.on_stream,
            "set_stream": self.machine.streams.append,
        }


@dataclass(eq=False)
class FakeEvent:
    """An event: it has passed as soon as it is recorded, or, on a busy GPU, once the host has waited for it."""

    machine: "FakeGpu"
    clock: Clock = field(default_factory=dict)

    def record(self, stream: "FakeStream | None" = None) -> None:
        self.clock = dict((stream or self.machine.current_stream).clock)

    def wait(self, stream: "FakeStream | None" = None) -> None:
        (stream or self.machine.current_stream).wait_event(self)

    def query(self) -> bool:
        return self.machine.is_over(self.clock)

    def synchronize(self) -> None:
        self.machine.waits("event", self.clock)

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Return milliseconds, made up because nothing runs."""
        return 1.0


@dataclass(eq=False)
class FakeStream:
    """A stream, which computes nothing: it knows what comes before its next operation."""

    machine: "FakeGpu"
    device: torch.device = GPU
    clock: Clock = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine.made.append(self)

    def wait_stream(self, stream: "FakeStream") -> None:
        join(self.clock, stream.clock)

    def wait_event(self, event: FakeEvent) -> None:
        join(self.clock, event.clock)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self.machine)
        event.record(self)
        return event

    def query(self) -> bool:
        return self.machine.is_over(self.clock)

    def is_capturing(self) -> bool:
        return False

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


@dataclass
class FakeGpu:
    """What has happened on the machine; both lists may be cleared between steps."""

    world_size: int
    rank: int
    synchronisations: list[Synchronisation] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    object_of: Callable[[object, int], object] = lambda sent, rank: sent
    """Takes the object that this rank sends and another rank; returns what that rank sends."""
    busy: bool = False
    """The device is as far behind the host as it may be: an event has passed only once the host has waited for it."""
    watch: "Watch" = field(default_factory=lambda: Watch())
    """Sees every operation of the device."""
    made: list[FakeStream] = field(default_factory=list)
    """Every stream; the first is the default stream."""
    streams: list[FakeStream] = field(default_factory=list)
    """The streams whose blocks have not ended: the last is the current one."""
    host: Clock = field(default_factory=dict)
    """What the host has waited for."""
    communicators: dict[dist.ProcessGroup, FakeStream] = field(default_factory=dict)
    """NCCL has a stream of its own for each group."""

    def __post_init__(self) -> None:
        self.streams.append(FakeStream(self))
        self.watch.machine = self

    @property
    def current_stream(self) -> FakeStream:
        return self.streams[-1]

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream | None) -> Iterator[None]:
        """Make a stream the current one for the block."""
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

    def waits(self, kind: str, clock: Clock | None = None) -> None:
        """Record that the host waits here: for all of `clock`, or for the current stream, or for the device."""
        self.synchronisations.append(Synchronisation(kind, *_cause(sys._getframe(1))))
        for stream in self.made if kind == "device" else ():
            join(self.host, stream.clock)
        join(self.host, self.current_stream.clock if clock is None else clock)

    def hears(
        self, collective: Collective, group: dist.ProcessGroup, sides: list[list[torch.Tensor]]
    ) -> FakeWork:
        """Record a collective, and the wait of the host if there is one; return what waits for its end."""
        self.collectives.append(collective)
        if collective.backend != "nccl":
            return FakeWork()
        # NCCL sends objects as tensors of the device: the host waits for them, as for a barrier.
        if collective.dtype is None:
            self.waits("barrier")
        stream = self.communicators.setdefault(group, FakeStream(self))
        stream.wait_stream(self.current_stream)
        with self.on_stream(stream):
            self.launch()
            self.watch.collective(collective.name, sides)
        return _Work(self, dict(stream.clock))


class Watch:
    """Sees what the device does; here, does nothing about it."""

    machine: "FakeGpu"
    """Set by it."""

    def operator(self, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """See an operator of torch, on the current stream."""

    def collective(self, name: str, sides: list[list[torch.Tensor]]) -> None:
        """See a collective, on the stream of its group; sides: outputs, then inputs."""

    def used_on(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """See that the allocator is told of a stream that uses a tensor (`record_stream`)."""


class _Work(FakeWork):
    """The end of a collective of NCCL."""

    def __init__(self, machine: FakeGpu, clock: Clock):
        super().__init__()
        self.machine, self.clock = machine, clock

    def wait(self, *_: object) -> bool:
        """Let the current stream wait for it, not the host."""
        join(self.machine.current_stream.clock, self.clock)
        return True


def _cause(frame: FrameType) -> tuple[str, str, int]:
    """Return (file, function, line) of the innermost frame that belongs neither to torch nor to this harness."""
    while _file_of(frame.f_code.co_filename) is None and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    return _file_of(code.co_filename) or code.co_filename, code.co_name, frame.f_lineno


@cache
def _file_of(file: str) -> str | None:
    """Return `.../site-packages/deepspeed/engine.py` as `deepspeed/engine.py`; None if it is never a cause."""
    _, is_installed, inside = file.rpartition("site-packages/")
    if is_installed:
        return None if inside.startswith(NEVER_THE_CAUSE) else inside
    if file in OWN_FILES or file.startswith((STANDARD_LIBRARY, "<")):
        return None
    path = Path(file)
    return path.relative_to(REPOSITORY).as_posix() if path.is_relative_to(REPOSITORY) else path.name


class _Calls(TorchFunctionMode):
    """Changes calls from Python before torch's C++ looks at their devices."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        # The device itself stays what the caller asked for: only arguments of other calls are replaced.
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        args = tuple(map(_inner, args))
        kwargs = {name: _inner(value) for name, value in (kwargs or {}).items()}
        on_device = bool(args) and isinstance(args[0], FakeTensor)
        # As on a GPU, the numbers are real on the host first, and are then copied to the device.
        if function in _MADE_ON_THE_HOST and kwargs.get("device") == INNER:
            return function(*args, **{**kwargs, "device": "cpu"}).to(INNER)
        if function is torch.Tensor.new_tensor and on_device:
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs, "device": "cpu"}).to(INNER)
        if function is torch.Tensor.cuda:
            return args[0].to(INNER, non_blocking=kwargs.get("non_blocking", False))
        if function is F.scaled_dot_product_attention and on_device:
            return _fused_attention(*args, **kwargs)
        return function(*args, **kwargs)


_MADE_ON_THE_HOST = {torch.tensor, torch.as_tensor}


def _inner(value):
    """Return an argument as C++ takes it: the stand-in device in place of `cuda`."""
    named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return INNER if named or (isinstance(value, torch.device) and value.type == "cuda") else value


def _fused_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> torch.Tensor:
    """Call the kernel that torch takes on an H100: FlashAttention, or the memory-efficient one if that cannot be."""
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
    # This kernel takes as many heads of keys as of queries, and a mask of numbers of the full shape.
    efficient = aten._scaled_dot_product_efficient_attention
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]


class _Device(TorchDispatchMode):
    """Computes only shapes for tensors of the device, and as usual for those of the host; records waits of the host."""

    def __init__(self, machine: FakeGpu):
        super().__init__()
        self.machine = machine
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        # Above 0 while this mode is at work: then torch asks for the device, and not a caller.
        self.depth = 0

    def device_of(self, tensor: FakeTensor) -> torch.device:
        """Return `tensor.device`: `cuda:0` for callers, the stand-in backend for torch itself."""
        if tensor.fake_mode.in_kernel_invocation:
            return torch.device("meta")
        return tensor.fake_device if self.depth else GPU

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return INNER
        self.depth += 1
        try:
            self.machine.launch()
            result = self._dispatch(func, args, kwargs := kwargs or {})
            self.machine.watch.operator(func, args, kwargs, result)
            return result
        finally:
            self.depth -= 1

    def _dispatch(self, func, args, kwargs):
        tensors = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, torch.Tensor)]
        from_device = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if "device" in kwargs:
            kwargs["device"] = _inner(kwargs["device"])
        target = kwargs.get("device")
        if kwargs.pop("pin_memory", False):
            return _pin(self._dispatch(func, args, kwargs))
        if func in _READS and from_device:
            return self._read(func, args, kwargs)
        if func in (aten._to_copy.default, aten.copy_.default):
            return self._copy(func, args, kwargs)
        if target is not None and target.type == "cpu":  # for example empty_like of a tensor of the device
            args = pytree.tree_map_only(
                FakeTensor, lambda each: torch.empty(each.shape, dtype=each.dtype), args
            )
            return func(*args, **kwargs)
        if not from_device and (target is None or target.type != INNER.type):
            return func(*args, **kwargs)
        if func in _INDEXING:
            args = self._indexed(args)
        if func._schema.is_mutable:
            forget_values(tensors)
        with self.fakes:
            return func(*args, **kwargs)

    def _copy(self, func, args, kwargs):
        """Copy between host and device."""
        # A copy makes the host wait, unless it is asked not to and the host's memory is pinned.
        into, source = (None, args[0]) if func is aten._to_copy.default else args[:2]
        target = kwargs.get("device") if into is None else into.device
        from_device = isinstance(source, FakeTensor)
        to_device = (
            isinstance(into, FakeTensor)
            if into is not None
            else target is not None and target.type == INNER.type
        )
        if from_device and target is not None and target.type == "cpu":
            non_blocking = kwargs.pop("non_blocking", False) or (into is not None and args[2:] == (True,))
            if not (non_blocking and (into is None or _is_pinned(into))):
                self.machine.waits("to host")
            if into is not None:
                return into.copy_(_values(source, into.dtype))
            return _values(source, kwargs.get("dtype") or source.dtype)
        if to_device and not from_device:
            non_blocking = kwargs.get("non_blocking", False) or (into is not None and args[2:] == (True,))
            if not non_blocking and not (into is not None and source.ndim == 0):
                self.machine.waits("to device")
            if into is None:
                dtype = kwargs.get("dtype") or source.dtype
                with self.fakes:
                    into = aten.empty_strided.default(
                        source.shape, source.stride(), dtype=dtype, device=target
                    )
            # Kept if it is small: a later read of the host then gets the true numbers.
            into.known_values = source.clone() if into.numel() <= MOST_KNOWN else None
            return into
        if from_device or to_device:
            with self.fakes:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _read(self, func, args, kwargs):
        """Answer what the host cannot know without waiting: a number, or how many elements there are."""
        tensor = args[0]
        if func is aten._local_scalar_dense.default:
            self.machine.waits("item")
            return _values(tensor, tensor.dtype).item()
        if func is aten.equal.default:
            self.machine.waits("item")
            return True  # made up: there are no numbers to compare
        self.machine.waits("nonzero")
        # How many elements there are is not known: all of them, the largest answer.
        with self.fakes:
            if func is aten.masked_select.default:
                return tensor.new_empty(torch.broadcast_shapes(tensor.shape, args[1].shape).numel())
            return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)

    def _indexed(self, args):
        """Return indices as the device needs them: those of the host are copied, and masks counted; both wait."""
        indices = []
        for index in args[1]:
            if index is not None and not isinstance(index, FakeTensor):
                self.machine.waits("to device")
                with self.fakes:
                    index = torch.empty(index.shape, dtype=index.dtype, device=INNER)
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                self.machine.waits("nonzero")
                with self.fakes:
                    columns = [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
                indices += columns
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])


_READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
}
_INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


def _values(tensor: FakeTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what the host reads: the values that it wrote, if nothing has changed them since; else ones.

    Bytes and booleans are flags (DeepSpeed's overflow), and no flag is set.
    """
    known = getattr(tensor, "known_values", None)
    if known is not None:
        return known.to(dtype, copy=True)
    return torch.full(tensor.shape, 0 if tensor.dtype in (torch.bool, torch.uint8) else 1, dtype=dtype)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().is_pinned_here = True
    return tensor


def _is_pinned(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and getattr(tensor.untyped_storage(), "is_pinned_here", False)


@contextlib.contextmanager
def fake_gpu(
    world_size: int = 1,
    rank: int = 0,
    place: tuple[int, int] | None = None,
    name: str = NAME,
    total_bytes: int = TOTAL_BYTES,
    busy: bool = False,
    watch: Watch | None = None,
) -> Iterator[FakeGpu]:
    """Give this process a GPU as rank `rank` of `world_size`, until the end of the block.

    place: (number of the rank in its node, ranks of the node); None puts all ranks into one node. name, total_bytes: of
    the GPU; it computes as an H100 does. busy, watch: see `FakeGpu`.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    machine = FakeGpu(world_size, rank, busy=busy, watch=watch or Watch())
    device = _Device(machine)
    cuda = FakeCuda(machine, place[1] if place else world_size, name, total_bytes)
    with contextlib.ExitStack() as undone:
        enter = undone.enter_context
        for owner, stand_ins in _stand_ins(machine, device, cuda).items():
            for name, stand_in in stand_ins.items():
                enter(mock.patch.object(owner, name, stand_in, create=True))
        # accelerate keeps its state for the whole process: inside the block it starts empty.
        for state in ("PartialState", "AcceleratorState", "GradientState"):
            enter(mock.patch.dict(getattr(accelerate.state, state)._shared_state, clear=True))
        enter(_answers_forgotten())
        enter(_precision_kept())
        enter(
            torch.autograd.set_multithreading_enabled(False)
        )  # another thread would be outside of the modes
        enter(torch.compiler.set_stance("force_eager"))  # a compiler would ask the device for its kernels
        enter(calls := _Calls())
        # Hooks, and layers that are computed again, run inside a backward pass: their calls need the mode too.
        enter(mock.patch.object(torch.autograd, "_engine_run_backward", _inside(calls)))
        enter(device)
        object_of = lambda sent, other: machine.object_of(sent, other)  # noqa: E731
        enter(fake_ranks(rank, world_size, machine.hears, object_of, place))
        torch._C._set_only_lift_cpu_tensors(
            True
        )  # torch.tensor(..., device="cuda") is a copy that the mode sees
        undone.callback(torch._C._set_only_lift_cpu_tensors, False)
        yield machine


def _inside(calls: _Calls) -> Callable:
    run_backward = torch.autograd._engine_run_backward

    def run(*args, **kwargs):
        with calls:
            return run_backward(*args, **kwargs)

    return run


def _stand_ins(machine: FakeGpu, device: _Device, cuda: FakeCuda) -> dict[object, dict[str, object]]:
    """Return {owner: its attributes inside the block}."""
    return {
        torch.cuda: cuda.attributes(),
        torch._C: dict.fromkeys(("_get_accelerator", "_accelerator_getAccelerator"), lambda *_, **__: CUDA),
        torch.accelerator: {"current_stream": lambda *_: machine.current_stream},
        torch.cuda.nvtx: dict.fromkeys(("range_push", "range_pop"), lambda *_: 0),
        torch.cuda.nccl: {"version": lambda: (2, 29, 7)},
        real_accelerator: {"ds_accelerator": CUDA_Accelerator()},
        FakeTensor: {
            "device": property(device.device_of),
            "is_cuda": property(lambda tensor: True),
            "record_stream": lambda tensor, stream: machine.watch.used_on(tensor, stream),
            "type": _type_of,
            "tolist": lambda tensor: tensor.cpu().tolist(),
        },
        F: {"linear": F.linear},  # itself, so that it is put back: ZeRO-3 leaves its own behind
        # A parameter stays the same object when a model moves it, also if others hold references to it.
        torch.__future__: {"get_swap_module_params_on_conversion": lambda: True},
        weakref: {"getweakrefs": lambda each: []},
        torch.Tensor: {
            "pin_memory": lambda tensor, *_: _pin(tensor.clone()),
            "is_pinned": lambda tensor, *_: _is_pinned(tensor),
        },
    }


def _type_of(tensor: FakeTensor, dtype=None, *args, **kwargs):
    """Return a name like `torch.cuda.FloatTensor`, by which DeepSpeed sorts gradients into buckets."""
    if dtype is None:
        return torch.Tensor.type(tensor).replace(INNER.type, "cuda")
    return torch.Tensor.type(tensor, dtype, *args, **kwargs)


@contextlib.contextmanager
def _answers_forgotten() -> Iterator[None]:
    """Clear what transformers caches about the machine, before the block and after it."""
    # Inside, answers of the real machine would be wrong; afterwards, those of the pretended one.
    remembered = [each for each in vars(import_utils).values() if hasattr(each, "cache_clear")]
    for each in remembered:
        each.cache_clear()
    try:
        yield
    finally:
        for each in remembered:
            each.cache_clear()


@contextlib.contextmanager
def _precision_kept() -> Iterator[None]:
    """Put the precision of matrix products (TF32), which is set for the whole process, back after the block."""
    before, products = torch.backends.fp32_precision, torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.fp32_precision = before
