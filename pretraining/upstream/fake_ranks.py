"""Make process groups in which this process is one of many ranks, and the others do not exist.

Collectives send nothing. What a rank receives is made up: every other rank sends what this one sends, and on the device
there are no numbers.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.comm.comm
import deepspeed.utils.groups
import torch
import torch.distributed as dist
from deepspeed.module_inject import layers
from deepspeed.runtime.tensor_parallel import init_utils
from deepspeed.runtime.zero import stage3, utils
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree

MOVED_BY = {"nccl": "cuda", "gloo": "cpu"}
"""Backend -> the type of device whose tensors it can move."""
COLLECTIVES = {
    "all_reduce": "allreduce allreduce_coalesced",
    "all_gather": "allgather _allgather_base all_gather_single allgather_coalesced all_gather_single_coalesced "
    "allgather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced "
    "reduce_scatter_tensor_coalesced",
    "all_to_all": "alltoall alltoall_base all_to_all_single",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "receive": "recv recv_anysource",
}
"""Name -> the methods of torch's process groups that do it."""


class Network:
    """What this rank and the others say to each other: here, what it sends is added up, and they send the same."""

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = {}
        """{collective: [times, bytes]} of this rank; bytes that go in or that come out, whichever is more."""

    def hears(self, name: str, group: dist.ProcessGroup, sides: list[list[torch.Tensor]]) -> FakeWork:
        """See a collective, and return what waits for its end.

        name: a key of `COLLECTIVES`, `barrier`, or torch's name of one that sends objects. sides: outputs, then inputs.
        """
        times, num_bytes = self.sent.get(name, (0, 0))
        moved = (sum(tensor.nbytes for tensor in side) for side in sides)
        self.sent[name] = [times + 1, num_bytes + max(moved, default=0)]
        return FakeWork()

    def object_of(self, sent: object, rank: int) -> object:
        """Return what another rank sends, where this one sends `sent`."""
        return sent


class FakeRanks(dist.ProcessGroup):
    """A process group of a backend that moves only the tensors that the real one can."""

    Options = SimpleNamespace
    backend: str
    network: Network
    work: FakeWork
    """Of the last collective."""

    def __init__(self, store: dist.Store | None, rank: int, size: int, *_: object, **__: object):
        super().__init__(rank, size)
        # torch 2.15 sets attributes of it when it has made a group (distributed_c10d.py).
        self.options = SimpleNamespace()
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return self.backend

    getBackendName = name

    def _get_backend(self, device: torch.device) -> "FakeRanks":
        return self

    # A mesh of ranks finds its groups by their names.
    group_name = ""

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    supports_splitting, supports_coalescing = True, False

    def new_group(
        self, ranks: list[int], *, group_name: str, backend: str | None = None, **_: object
    ) -> "FakeRanks | None":
        if self._rank not in ranks:
            return None
        made = type(self)(None, ranks.index(self._rank), len(ranks))
        made._set_group_name(group_name)
        made.backend = backend or self.backend
        return made

    split_group = new_group

    def shutdown(self, *_: object) -> None:
        """Do nothing, as what follows: there is nobody to connect to."""

    eager_connect_single_device = get_group_store = _start_coalescing = shutdown

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(MOVED_BY[self.backend])]

    def _end_coalescing(self, device: torch.device) -> FakeWork:
        return self.work

    def barrier(self, *_: object, **__: object) -> FakeWork:
        return self.network.hears("barrier", self, [])

    def moves(self, name: str, *args: Any) -> FakeWork:
        """Record one collective.

        Raises `RuntimeError`: a tensor lies where the backend cannot reach it.
        """
        # Outputs and inputs come as separate arguments.
        sides = [[leaf for leaf in pytree.tree_leaves(side) if torch.is_tensor(leaf)] for side in args]
        tensors = [tensor for side in sides for tensor in side]
        wanted = MOVED_BY[self.backend]
        if away := [tensor for tensor in tensors if tensor.device.type != wanted]:
            where = f"a tensor of {away[0].device.type} was given to {name}"
            raise RuntimeError(f"{self.backend} moves tensors of {wanted} alone, and {where}")
        if name == "all_reduce":
            # Every rank has the same values: their mean or maximum is the value itself.
            times = self._size if args[-1].reduceOp == dist.ReduceOp.SUM else 1
            for tensor in tensors:
                known = getattr(tensor, "known_values", None)
                tensor.known_values = None if known is None else known * times
        elif name != "broadcast":  # which keeps the values: every rank has the same
            forget_values(tensors)
        self.work = self.network.hears(name, self, sides)
        return self.work


def forget_values(tensors: list[torch.Tensor]) -> None:
    """Note that the tensors no longer hold what the host has written into them."""
    for tensor in tensors:
        tensor.known_values = None


for _name, _methods in COLLECTIVES.items():
    for _each in _methods.split():
        # the default binds the name: else all methods would share the last one
        setattr(FakeRanks, _each, lambda self, *a, _name=_name, **k: self.moves(_name, *a, *k.values()))


@contextmanager
def fake_ranks(
    network: Network, rank: int, size: int, place: tuple[int, int] | None = None
) -> Iterator[None]:
    """Make this process rank `rank` of `size` in torch's default group, by NCCL, and in DeepSpeed's.

    No group is left behind. place: (number of the rank in its node, ranks of the node); None: all ranks are in one
    node.

    Raises `RuntimeError`: this process is in a group already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a real group: leave that one first")
    # torch 2.15 makes the group for NCCL by the second of these, and takes its options from the first
    backends = {"ProcessGroupNCCL": "nccl", "ProcessGroupNCCL2": "nccl", "ProcessGroupGloo": "gloo"}
    made = {name: {"backend": backend, "network": network} for name, backend in backends.items()}
    stand_ins = {
        **{name: type(name, (FakeRanks,), attributes) for name, attributes in made.items()},
        "default_pg_nccl_timeout": timedelta(minutes=10),
        "is_nccl_available": lambda: True,
        "is_gloo_available": lambda: True,
        "get_debug_level": lambda: dist.DebugLevel.OFF,
    }
    objects = _object_collectives(network)
    local_rank, local_size = place or (rank, size)
    places = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local_size}
    # torch's recorder of collectives reads the names of its own groups
    variables = {**places, "TORCH_FR_BUFFER_SIZE": 0}
    with ExitStack() as undone:
        # The variables of a launcher, from which the libraries read their rank.
        undone.enter_context(mock.patch.dict(os.environ, {name: str(n) for name, n in variables.items()}))
        undone.enter_context(mock.patch.multiple(distributed_c10d, create=True, **stand_ins, **objects))
        # torch.distributed holds these names a second time.
        undone.enter_context(mock.patch.multiple(dist, **objects))
        # DeepSpeed keeps its groups in variables of these modules, and whether layers are split.
        for module in (deepspeed.comm.comm, deepspeed.utils.groups, layers, init_utils):
            # it keeps the groups of experts in dictionaries, which it fills
            before = {
                name: dict(value) if type(value) is dict and not name.startswith("__") else value
                for name, value in vars(module).items()
            }
            undone.callback(vars(module).update, before)
            undone.callback(vars(module).clear)
        # A store in memory: no other process will join.
        of_rank = {"rank": rank, "world_size": size, "device_id": torch.device("cuda", 0)}
        dist.init_process_group("nccl", store=dist.HashStore(), **of_rank)
        # torch notes the device at a group of its own class
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        undone.callback(dist.destroy_process_group)
        deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
        yield


def _object_collectives(network: Network) -> dict[str, Callable]:
    """Return stand-ins for the collectives of torch that pickle what they send."""

    def gathered(name: str, obj, group: dist.ProcessGroup | None) -> list:
        group = group or distributed_c10d._get_default_group()
        network.hears(name, group, [])
        return [obj if rank == group.rank() else network.object_of(obj, rank) for rank in range(group.size())]

    def all_gather_object(object_list, obj, group=None):
        object_list[:] = gathered("all_gather_object", obj, group)

    def gather_object(obj, object_gather_list=None, dst=None, group=None, group_dst=None):
        objects = gathered("gather_object", obj, group)
        if object_gather_list is not None:
            object_gather_list[:] = objects

    def broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None):
        gathered("broadcast_object_list", None, group)

    made = (all_gather_object, gather_object, broadcast_object_list)
    return {function.__name__: function for function in made}


@contextmanager
def without_other_ranks() -> Iterator[None]:
    """Leave out what ZeRO-3 does for each other rank, or asks rank 0, until the end of the block.

    It cuts each tensor into a piece for each rank: with thousands of them that takes hours for tensors without numbers.
    Shapes, memory and messages stay the same.
    """
    narrow, last = torch.Tensor.narrow, []

    def narrow_once(tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
        # the next piece of the same tensor, of the same length, differs in nothing but its numbers
        if last and last[0] is tensor and last[1:3] == [dim, length]:
            return last[3]
        piece = narrow(tensor, dim, start, length)
        last[:] = [tensor, dim, length, piece] if isinstance(tensor, FakeTensor) else []
        return piece

    wait = AllGatherCoalescedHandle.wait

    def wait_at_once(handle: AllGatherCoalescedHandle, handle_dependency: bool = True) -> None:
        if handle.complete or handle.quantization:
            return wait(handle, handle_dependency)
        handle.allgather_handle.wait()
        for param in handle.params:
            device, dtype = handle.partitions[0].device, param.ds_tensor.dtype
            param.data = torch.empty(param.ds_shape, dtype=dtype, device=device)
            param.ds_status = ZeroParamStatus.AVAILABLE
        handle.complete = True

    with ExitStack() as undone:
        enter = undone.enter_context
        undone.callback(last.clear)
        enter(mock.patch.object(torch.Tensor, "narrow", narrow_once))
        enter(mock.patch.object(AllGatherCoalescedHandle, "wait", wait_at_once))
        enter(mock.patch.object(stage3, "reduce_scatter_coalesced", _reduced_at_once))
        # rank 0 has the same list: there is no rank 0 to ask
        enter(mock.patch.object(utils, "assert_lst_len_same_as_other_ranks", lambda numbers: None))
        enter(mock.patch.object(utils, "get_lst_from_rank0", lambda numbers: numbers))
        yield


@torch.no_grad()
def _reduced_at_once(
    tensors: list[torch.Tensor], group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Do what DeepSpeed's `reduce_scatter_coalesced` does: return this rank's part of each tensor."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parts = [-(-tensor.numel() // ranks) for tensor in tensors]
    # a single tensor that the ranks divide is sent as it is
    alone = len(tensors) == 1 and parts[0] * ranks == tensors[0].numel()
    sent = tensors[0].view(-1) if alone else tensors[0].new_empty(sum(parts) * ranks)
    sent.div_(ranks)
    received = sent.narrow(0, rank * sum(parts), sum(parts))
    deepspeed.comm.comm.reduce_scatter_fn(received, sent, group=group)
    own, start = [], 0
    for part, tensor in zip(parts, tensors, strict=True):
        own.append(received.narrow(0, start, max(0, min(part, tensor.numel() - rank * part))))
        start += part
    return own
