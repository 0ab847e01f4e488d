"""Pretend to have a GPU: training steps of any model on a machine without one, in seconds and without its memory.

Inside `fake_gpu()` torch, transformers, accelerate and DeepSpeed find a GPU and NCCL, and this process is one rank of
as many as wanted. Tensors of the device are torch's fake tensors: they have a shape, a type and a device, but no
numbers. Tensors of the host are real. A step that mixes the two fails, as it would on a GPU. What the host would wait
for is made up, and collectives send nothing (`fake_ranks`).

A build of torch without CUDA has no CUDA device that autograd accepts. The meta device stands in for it: Python sees
`cuda:0`, and torch's C++ sees `meta`. When the block ends, everything is as before. Held by test_fake_gpu.py and
test_rehearsal.py; may go once torch can pretend to have a GPU.
"""

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import accelerate.state
import torch
import torch.nn.functional as F
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import import_utils

from pretraining.upstream.fake_ranks import Network, fake_ranks, forget_values

aten = torch.ops.aten
CUDA = torch.device("cuda")
INNER = torch.device("meta")
"""The device that torch's C++ sees."""
MOST_KNOWN = 4096
"""Most elements of a tensor whose copy from the host is kept."""
GPU = torch.device("cuda", 0)
# Name and bytes as of an H100, whose compute capability is 9.0.
NAME, TOTAL_BYTES = "NVIDIA H100 80GB HBM3", 80 * 10**9
_ZERO = """current_device initial_seed utilization memory_allocated max_memory_allocated memory_reserved
    max_memory_reserved"""
"""Functions of `torch.cuda` that return 0, and below those that return nothing."""
_NOTHING = """_lazy_init set_device empty_cache ipc_collect manual_seed manual_seed_all set_rng_state
    reset_peak_memory_stats reset_max_memory_allocated synchronize set_stream"""


class FakeStream:
    """A stream or an event, on which everything is over at once."""

    device = GPU

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    def synchronize(self, *_: Any) -> None:
        pass

    record = wait = wait_stream = wait_event = synchronize


def _functions_of_cuda(num_gpus: int, name: str, total_bytes: int) -> dict[str, object]:
    """Return {name in `torch.cuda`: its stand-in}, of those that training calls."""
    state, stream = torch.zeros(16, dtype=torch.uint8), FakeStream()
    of_random = {"get_rng_state": lambda *_: state.clone(), "set_rng_state": lambda *_: None}
    of_random["fork_rng"] = torch.random.fork_rng
    of_gpu = {"name": name, "total_memory": total_bytes, "major": 9, "minor": 0, "multi_processor_count": 132}
    return {
        # a function of its own for each: torch's compiler tells functions apart by what they are
        **{name: lambda *_, **__: 0 for name in _ZERO.split()},
        **{name: lambda *_, **__: None for name in _NOTHING.split()},
        **{name: lambda *_, **__: stream for name in ("current_stream", "default_stream")},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: num_gpus,
        "get_device_name": lambda *_: name,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(**of_gpu),
        "mem_get_info": lambda *_: (total_bytes, total_bytes),
        "memory_stats": lambda *_: {},
        "get_rng_state": lambda *_: state.clone(),
        "get_rng_state_all": lambda: [state.clone()],
        "random": SimpleNamespace(**of_random),
        "Stream": lambda *_, **__: FakeStream(),
        "Event": lambda *_, **__: FakeStream(),
        "stream": lambda _: contextlib.nullcontext(),
    }


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
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") == INNER:
            return function(*args, **{**kwargs, "device": "cpu"}).to(INNER)
        if function is torch.Tensor.new_tensor and on_device:
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs, "device": "cpu"}).to(INNER)
        if function is torch.Tensor.cuda:
            return args[0].to(INNER, non_blocking=kwargs.get("non_blocking", False))
        if function is F.scaled_dot_product_attention and on_device:
            return _fused_attention(*args, **kwargs)
        return function(*args, **kwargs)


def _inner(value):
    """Return an argument as C++ takes it: the stand-in device in place of `cuda`."""
    named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return INNER if named or (isinstance(value, torch.device) and value.type == "cuda") else value


def _fused_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **named) -> Any:
    """Call the kernel that torch takes on an H100: FlashAttention, or the memory-efficient one if that cannot be."""
    scale = named.get("scale")
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


class Device(TorchDispatchMode):
    """Computes only shapes for tensors of the device, and as usual for those of the host."""

    def __init__(self) -> None:
        super().__init__()
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
            return self._dispatch(func, args, kwargs or {})
        finally:
            self.depth -= 1

    def waits(self, kind: str) -> None:
        """Called where the host waits: item, nonzero, to host, to device (a blocking copy); here that takes no time."""

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
        if func.is_view and len(tensors) == 1:
            # the kernel of the stand-in is asked at once, in a tenth of the time of torch's mode
            with in_kernel_invocation_manager(self.fakes):
                views = func(*args, **kwargs)
            if isinstance(views, torch.Tensor):
                return FakeTensor(self.fakes, views, INNER)
            return [FakeTensor(self.fakes, view, INNER) for view in views]
        with self.fakes:
            return func(*args, **kwargs)

    def _copy(self, func, args, kwargs):
        # A copy makes the host wait, unless it is asked not to and the host's memory is pinned.
        into, source = (None, args[0]) if func is aten._to_copy.default else args[:2]
        target = kwargs.get("device") if into is None else into.device
        to_host, to_device = (target is not None and target.type == kind for kind in ("cpu", INNER.type))
        non_blocking = kwargs.get("non_blocking", False) or (into is not None and args[2:] == (True,))
        if isinstance(source, FakeTensor) and to_host:
            if not (non_blocking and (into is None or _is_pinned(into))):
                self.waits("to host")
            found = _values(source, kwargs.get("dtype") or (source if into is None else into).dtype)
            return found if into is None else into.copy_(found)
        if to_device and not isinstance(source, FakeTensor):
            if not non_blocking and not (into is not None and source.ndim == 0):
                self.waits("to device")
            if into is None:
                layout = {"dtype": kwargs.get("dtype") or source.dtype, "device": target}
                with self.fakes:
                    into = aten.empty_strided.default(source.shape, source.stride(), **layout)
            # Kept if it is small: a later read of the host then gets the true numbers.
            into.known_values = source.clone() if into.numel() <= MOST_KNOWN else None
            return into
        with self.fakes if to_device or isinstance(source, FakeTensor) else contextlib.nullcontext():
            return func(*args, **kwargs)

    def _read(self, func, args, kwargs):
        """Answer what the host cannot know without waiting: a number, or how many elements there are."""
        tensor = args[0]
        if func is aten._local_scalar_dense.default:
            self.waits("item")
            return _values(tensor, tensor.dtype).item()
        if func is aten.equal.default:
            self.waits("item")
            return True  # made up: there are no numbers to compare
        self.waits("nonzero")
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
                self.waits("to device")
                with self.fakes:
                    index = torch.empty(index.shape, dtype=index.dtype, device=INNER)
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                self.waits("nonzero")
                with self.fakes:
                    columns = [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
                indices += columns
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])


_READS = {aten._local_scalar_dense.default, aten.equal.default}
_READS |= {aten.nonzero.default, aten.masked_select.default}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_INDEXING |= {aten._index_put_impl_.default}


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


def _is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
    return not isinstance(tensor, FakeTensor) and getattr(tensor.untyped_storage(), "is_pinned_here", False)


@contextlib.contextmanager
def fake_gpu(
    world_size: int = 1,
    rank: int = 0,
    place: tuple[int, int] | None = None,
    gpu: tuple[str, int] = (NAME, TOTAL_BYTES),
    network: Network | None = None,
    device: Device | None = None,
) -> Iterator[Network]:
    """Give this process a GPU as rank `rank` of `world_size`, until the end of the block.

    place: (number of the rank in its node, ranks of the node); None puts all ranks into one node. gpu: name and bytes
    of the GPU; it computes as an H100 does. network, device: those of a test, which see what they are asked.

    Raises `RuntimeError`: this process is in a process group already.
    """
    network, device = network or Network(), device or Device()
    run_backward = torch.autograd._engine_run_backward

    def run_inside(*args, **kwargs):
        with calls:
            return run_backward(*args, **kwargs)

    stand_ins: dict[object, dict[str, object]] = {
        torch.cuda: _functions_of_cuda(place[1] if place else world_size, *gpu),
        torch._C: dict.fromkeys(("_get_accelerator", "_accelerator_getAccelerator"), lambda *_, **__: CUDA),
        torch.accelerator: {"current_stream": lambda *_: torch.cuda.current_stream()},
        torch.cuda.nvtx: dict.fromkeys(("range_push", "range_pop"), lambda *_: 0),
        torch.cuda.nccl: {"version": lambda: (2, 29, 7)},
        real_accelerator: {"ds_accelerator": CUDA_Accelerator()},
        FakeTensor: {
            "device": property(device.device_of),
            "is_cuda": property(lambda tensor: True),
            "record_stream": lambda tensor, stream: None,
            "type": _type_of,
            "tolist": lambda tensor: tensor.cpu().tolist(),
        },
        F: {"linear": F.linear},  # itself, so that it is put back: ZeRO-3 leaves its own behind
        # A parameter stays the same object when a model moves it, also if others hold references to it.
        torch.__future__: {"get_swap_module_params_on_conversion": lambda: True},
        weakref: {"getweakrefs": lambda each: []},
        torch.Tensor: {"pin_memory": lambda tensor, *_: _pin(tensor.clone()), "is_pinned": _is_pinned},
        # Hooks, and layers that are computed again, run inside a backward pass: their calls need the mode too.
        torch.autograd: {"_engine_run_backward": run_inside},
    }
    with contextlib.ExitStack() as undone:
        enter = undone.enter_context
        for owner, attributes in stand_ins.items():
            for attribute, stand_in in attributes.items():
                enter(mock.patch.object(owner, attribute, stand_in, create=True))
        # accelerate keeps its state for the whole process: inside the block it starts empty.
        for state in ("PartialState", "AcceleratorState", "GradientState"):
            enter(mock.patch.dict(getattr(accelerate.state, state)._shared_state, clear=True))
        # What transformers remembers about the real machine would be wrong inside, and what it then remembers outside.
        for each in vars(import_utils).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()
                undone.callback(each.cache_clear)
        # The precision of matrix products (TF32) is set for the whole process.
        undone.callback(setattr, torch.backends, "fp32_precision", torch.backends.fp32_precision)
        undone.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        # another thread would be outside of the modes
        enter(torch.autograd.set_multithreading_enabled(False))
        enter(torch.compiler.set_stance("force_eager"))  # a compiler would ask the device for its kernels
        enter(calls := _Calls())
        enter(device)
        enter(fake_ranks(network, rank, world_size, place))
        # torch.tensor(..., device="cuda") is then a copy that the mode sees
        torch._C._set_only_lift_cpu_tensors(True)
        undone.callback(torch._C._set_only_lift_cpu_tensors, False)
        yield network


def _type_of(tensor: FakeTensor, dtype=None, *args, **kwargs):
    """Return a name like `torch.cuda.FloatTensor`, by which DeepSpeed sorts gradients into buckets."""
    if dtype is None:
        return torch.Tensor.type(tensor).replace(INNER.type, "cuda")
    return torch.Tensor.type(tensor, dtype, *args, **kwargs)
