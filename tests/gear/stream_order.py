"""Find what no order holds on the GPU that is none: two streams, or a stream and the host, at the same memory.

The clocks of `watched_gpu` say what is over when an operation begins. Two accesses to the same storage, one of them a
write, must be in an order: the same stream, an event, a wait of a stream, the wait of a collective, or a wait of the
host between them. Memory that is freed goes back to the stream that it was made on, at once, as with CUDA's caching
allocator: another stream that used it must be over before that stream's next allocation, or recorded on the tensor
(`record_stream`). NCCL keeps what it moves until its end. What the host does with pinned memory counts as well.
"""

import sys
import weakref
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from tests.gear.watched_gpu import Watch, WatchedStream, file_of

OWN_FILES = ("tests/gear/stream_order.py",)
FRAMES = 3
"""Of a place, those that are named."""
NO_ACCESS = {
    torch.ops.aten.set_,
    torch.ops.aten._has_compatible_shallow_copy_type,
    torch.ops.aten.is_same_size,
}
"""They read no numbers."""


class Access(NamedTuple):
    """One operation that reads or writes a storage."""

    stream: WatchedStream | None
    """None: the host."""
    number: int
    """Of the stream's operation."""
    what: str
    where: tuple[str, ...]
    """The innermost functions outside torch, the innermost first."""

    def __str__(self) -> str:
        return f"{self.what} at {' < '.join(self.where)}"


class Storage:
    """What is done with one storage of the device, or with pinned memory of the host."""

    def __init__(self, stream: WatchedStream):
        self.made_on = stream
        self.write: Access | None = None
        self.reads: dict[WatchedStream | None, Access] = {}
        self.recorded: set[WatchedStream] = set()
        """The allocator knows of these."""


class StreamOrder(Watch):
    """Give it to `watched_gpu(watch=...)`; `unordered` then says which accesses have no order, and how often."""

    def __init__(self) -> None:
        self.storages: dict[int, Storage] = {}
        self.freed: list[tuple[WatchedStream, Access]] = []
        """(stream that gets the memory, last use on another one), until that stream's next allocation."""
        self.unordered: Counter[str] = Counter()
        self.num_accesses = 0

    def operator(self, function: OpOverload, args: tuple, kwargs: dict, result: Any) -> None:
        if function.is_view or function.overloadpacket in NO_ACCESS:
            return
        leaves = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, torch.Tensor)]
        on_device = any(isinstance(leaf, FakeTensor) for leaf in [*leaves, *pytree.tree_leaves(result)])
        stream = self.machine.current_stream if on_device else None
        name = function.overloadpacket.__name__
        for position, (argument, writes) in enumerate(_arguments(function)):
            given = args[position] if position < len(args) else kwargs.get(argument)
            for tensor in pytree.tree_leaves(given) if given is not None else ():
                self._access(tensor, stream, name, writes)
        if not function._schema.is_mutable:
            for tensor in pytree.tree_leaves(result):
                self._access(tensor, stream, name, writes=not name.startswith(("empty", "new_empty")))

    def collective(self, name: str, sides: list[list[torch.Tensor]]) -> None:
        for number, side in enumerate(sides):
            for tensor in side:
                if (storage := self._storage(tensor)) is not None:
                    storage.recorded.add(self.machine.current_stream)
                self._access(tensor, self.machine.current_stream, name, writes=number == 0)

    def used_on(self, tensor: torch.Tensor, stream: WatchedStream) -> None:
        if (storage := self._storage(tensor)) is not None:
            storage.recorded.add(stream)

    def _storage(self, tensor: Any) -> Storage | None:
        """Return what is known of a tensor's storage; None if nobody but the host uses it."""
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
            return None
        held = tensor.untyped_storage()
        if not isinstance(tensor, FakeTensor) and not getattr(held, "is_pinned_here", False):
            return None
        key = held._cdata
        if key not in self.storages:
            self.storages[key] = Storage(self.machine.current_stream)
            weakref.finalize(held, self._free, key)
            if isinstance(tensor, FakeTensor):
                self._allocate(self.machine.current_stream)
        return self.storages[key]

    def _access(self, tensor: Any, stream: WatchedStream | None, what: str, writes: bool) -> None:
        if (storage := self._storage(tensor)) is None:
            return
        self.num_accesses += 1
        number = 0 if stream is None else stream.clock[stream]
        access = Access(stream, number, what, _place(sys._getframe(2)))
        if storage.write is not None and not self._is_before(storage.write, stream):
            self._report(access, "writes" if writes else "reads", "written", storage.write)
        if not writes:
            storage.reads[stream] = access
            return
        for read in storage.reads.values():
            if not self._is_before(read, stream):
                self._report(access, "writes", "read", read)
        storage.write, storage.reads = access, {}

    def _is_before(self, access: Access, stream: WatchedStream | None) -> bool:
        """Return whether an access is over when the next operation of a stream, or of the host, begins."""
        # what the host has done is over before anything that it launches then
        if access.stream in (stream, None):
            return True
        clock = self.machine.host if stream is None else stream.clock
        return clock.get(access.stream, 0) >= access.number

    def _report(self, access: Access, does: str, done: str, before: Access) -> None:
        self.unordered[f"{access} {does} what is {done} by {before}"] += 1

    def _free(self, key: int) -> None:
        storage = self.storages.pop(key)
        for access in [storage.write, *storage.reads.values()]:
            if access is not None and access.stream not in (None, storage.made_on, *storage.recorded):
                self.freed.append((storage.made_on, access))

    def _allocate(self, stream: WatchedStream) -> None:
        for made_on, access in [each for each in self.freed if each[0] is stream]:
            self.freed.remove((made_on, access))
            if not self._is_before(access, stream):
                self.unordered[f"memory is given away while it is used by {access}"] += 1


@cache
def _arguments(function: OpOverload) -> list[tuple[str, bool]]:
    """Return (name, whether it is written) of each argument."""
    found = ((each.name, each.alias_info) for each in function._schema.arguments)
    return [(name, alias is not None and alias.is_write) for name, alias in found]


def _place(frame: Any) -> tuple[str, ...]:
    found: list[str] = []
    while frame is not None and len(found) < FRAMES:
        file = file_of(frame.f_code.co_filename)
        if file is not None and not file.startswith(OWN_FILES):
            found.append(f"{file}:{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)
