"""Every read and write of the GPU has an order, under every layout: the weights of a step are those of that step.

Real training steps on a GPU that is none, with a clock for each stream. Nothing on a processor shows a missing order:
there is one stream. On a GPU it shows as a curve that differs at every start.

The clocks of `watched_gpu` say what is over when an operation begins. Two accesses to the same storage, one of them a
write, must be in an order: the same stream, an event, a wait of a stream, the wait of a collective, or a wait of the
host between them. Memory that is freed goes back to the stream that it was made on, at once, as with CUDA's caching
allocator: another stream that used it must be over before that stream's next allocation, or recorded on the tensor
(`record_stream`). NCCL keeps what it moves until its end. What the host does with pinned memory counts as well.
"""

import json
import sys
import weakref
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import bitsandbytes  # noqa: F401  # accelerate imports it beside an offloaded optimizer; it must see the real machine
import pytest
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from pretraining.checkpoints.background import HostSnapshot
from pretraining.checkpoints.export import averaged_weights
from pretraining.ds_config import DS_CONFIGS
from pretraining.model.parallel import ExpertDispatch
from pretraining.rehearsal.rank import EvenDispatch, choose_evenly
from pretraining.training.operators import keep_compiled_operators
from pretraining.upstream import deepspeed as upstream
from tests.gear.runs import EXPERTS, LLAMA
from tests.gear.watched_gpu import Watch, WatchedStream, file_of, watched_gpu
from tests.training import test_fake_gpu
from tests.training.test_fake_gpu import (  # noqa: F401
    EVERY_MONITOR,
    FREE,
    GPT2,
    LOSS,
    MIXTRAL,
    MUON,
    NORM,
    last_step,
    split,
)

OWN_FILE = "tests/training/test_stream_order.py"
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
        if file not in (None, OWN_FILE):
            found.append(f"{file}:{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)


NONE_WHOLE = {"stage3_param_persistence_threshold": 0}
"""No parameter stays whole on every rank."""
CLIPPED = {"optimizer": {"adaptive_clip": 0.01}}
RECOMPUTED = {"training": {"activation_checkpointing": True}}
CASES = {
    "zero1": ("zero1", {}, GPT2, {}),
    "zero1, split layers": ("zero1_tp2", {}, LLAMA, {}),
    "zero2": ("zero2", {}, MIXTRAL, {"optimizer": MUON}),
    "zero2, overlapped": ("zero2", {"overlap_comm": True}, LLAMA, {}),
    "zero2, split experts": ("zero2_ep2", {}, EXPERTS, {}),
    "zero3, split experts recomputed": ("zero3:expert=2", NONE_WHOLE, EXPERTS, RECOMPUTED),
    "zero2, offloaded": ("zero2_offload", {}, LLAMA, {}),
    "zero3": ("zero3", {}, LLAMA, {}),
    "zero3, muon": ("zero3", NONE_WHOLE, LLAMA, {"optimizer": MUON}),
    "zero3, no parameter whole": ("zero3", NONE_WHOLE, LLAMA, {}),
    "zero3, not overlapped": ("zero3", {"overlap_comm": False}, LLAMA, {"optimizer": {"clip_value": 1.0}}),
    "zero3, little prefetch": ("zero3", {"stage3_prefetch_bucket_size": 1}, LLAMA, CLIPPED),
    "zero3, mixture": ("zero3", {}, EXPERTS, {}),
    "zero3, split layers": ("zero3:tensor=2", {}, LLAMA, {}),
    "zero3, split sequences": ("zero3:sequence=2", NONE_WHOLE, LLAMA, {}),
    "zero3, recomputed": ("zero3", NONE_WHOLE, LLAMA, RECOMPUTED | {"monitors": EVERY_MONITOR}),
    "zero3, offloaded": ("zero3_offload", NONE_WHOLE, LLAMA, {}),
    "hpZ": ("zero3_hpz", {}, LLAMA, {}),
    "hpZ, no parameter whole": ("zero3_hpz", NONE_WHOLE, LLAMA, {}),
}


def ordered_steps(folder: Path, split, ds_config: str, changes: dict, model: dict, sections: dict, **fake):  # noqa: F811
    """Train three steps that are not logged, on rank 0 of 16; return (what has no order, where the host waits)."""
    name, colon, degrees = ds_config.partition(":")
    if changes:
        values = json.loads((DS_CONFIGS / f"{name}.json").read_text())
        values["zero_optimization"] |= changes
        path = folder / f"{name}.json"
        path.write_text(json.dumps({key: value for key, value in values.items() if key != "$schema"}))
        ds_config = f"{path}{colon}{degrees}"
    sections = {**sections, "training": {**sections.get("training", {}), "logging_steps": 100}}
    keep_compiled_operators()  # what the session has compiled, and not a second time
    order, build, agree = StreamOrder(), test_fake_gpu.build_from_recipe, EvenDispatch.agree

    def built_on_the_device(*args, **keywords):  # a split layer's weights do not move there one by one
        with torch.device("cuda" if degrees.startswith("tensor") or "tp" in name else "cpu"):
            model = build(*args, **keywords)
        choose_evenly(model)
        return model

    def agreed_evenly(*args):
        ExpertDispatch.agree(*args)  # made-up numbers choose no experts: of the real one order and wait count
        waits = list(order.machine.synchronisations)
        answer = agree(*args)
        order.machine.synchronisations[:] = waits
        return answer

    with (
        mock.patch.object(test_fake_gpu, "STEPS", 3),
        mock.patch.object(test_fake_gpu, "build_from_recipe", built_on_the_device),
        mock.patch.object(EvenDispatch, "agree", agreed_evenly),
    ):
        # two nodes of eight: hpZ keeps the weights whole in each
        waits = last_step(folder, split, ds_config, 16, model, watch=order, **sections, **fake)
    assert order.num_accesses > 1_000
    return order.unordered, waits


@pytest.mark.parametrize("case", CASES)
def test_every_access_has_an_order(tmp_path, split, case):  # noqa: F811
    """Promise: the curve belongs to the recipe. The host waits for nothing here that a logged step would wait for."""
    unordered, _ = ordered_steps(tmp_path, split, *CASES[case])
    assert not unordered


@pytest.mark.parametrize("case", ["zero3", "zero3, no parameter whole", "hpZ"])
def test_without_the_wait_of_the_gathering_stream_the_order_is_missed(tmp_path, split, monkeypatch, case):  # noqa: F811
    """The detector can fail: a step's last writes, then the next pass's gather."""
    monkeypatch.setattr(upstream, "gather_after_writes", lambda optimizer: None)
    unordered, _ = ordered_steps(tmp_path, split, *CASES[case])
    assert any("_all_gather_dtype" in each and "_reassign_or_swap_out" in each for each in unordered)


def test_without_a_wait_for_the_reductions_the_order_is_missed(tmp_path, split, monkeypatch):  # noqa: F811
    """The detector can fail: gradients that are reduced on their own stream, and the step that reads them."""
    wait_stream = WatchedStream.wait_stream

    def wait_for_none_but_gathers(later: WatchedStream, earlier: WatchedStream) -> None:
        if earlier is later.machine.streams[0] or later is not later.machine.streams[0]:
            wait_stream(later, earlier)

    monkeypatch.setattr(WatchedStream, "wait_stream", wait_for_none_but_gathers)
    unordered, _ = ordered_steps(tmp_path, split, *CASES["zero3"])
    assert any("stage3.py" in each for each in unordered)


BUSY = {
    "zero1": set(),
    "zero2": set(),
    "zero2, split experts": {"pretraining/model/parallel.py:agree"},
    "zero2, overlapped": {"deepspeed/runtime/zero/stage_1_and_2.py:independent_gradient_partition_epilogue"},
    "zero3": {
        "deepspeed/runtime/zero/partitioned_param_coordinator.py:_fetch_sub_module_impl",
        "deepspeed/runtime/zero/stage3.py:__reduce_and_partition_ipg_grads",
    },
}
BUSY["hpZ"] = BUSY["zero3"] | {"deepspeed/runtime/zero/partition_parameters.py:_partition_param_sec"}
"""Where the host waits in a micro-batch if the GPU is behind it: DeepSpeed keeps two fetches and buckets in flight; and
hpZ cuts every gathered parameter for its own node."""


COUNTED = {"zero2, split experts": EXPERTS["num_hidden_layers"], "zero3": 17, "hpZ": 17 + 16}
"""As docs/measured.md says."""


@pytest.mark.parametrize("case", BUSY)
def test_a_busy_gpu_is_waited_for_only_where_it_is_written(tmp_path, split, case):  # noqa: F811
    """Promise: honest numbers. README's waits of a step are those of stages 0 to 2."""
    _, waits = ordered_steps(tmp_path, split, *CASES[case], busy=True)
    assert set(waits.micro_batches) == BUSY[case]
    if case in COUNTED:
        assert waits.micro_batches.total() == COUNTED[case]
    assert set(waits.step) == {NORM, *LOSS} | {each for each in waits.step if each in BUSY[case]}


def test_averaged_weights_are_gathered_as_they_were_set(tmp_path, split):  # noqa: F811
    """Promise: honest numbers. A validation computes with the average, and the next step with the trained weights."""

    def averaging(trainer, *_, **__):
        with averaged_weights(trainer) as there_are:
            assert there_are
            trainer.model_wrapped.eval()
            trainer.model_wrapped(input_ids=torch.zeros(1, 64, dtype=torch.int64, device="cuda"))
            trainer.model_wrapped.train()

    after = mock.patch.object(test_fake_gpu.PretrainingTrainer, "_maybe_log_save_evaluate", averaging)
    with after:
        unordered, _ = ordered_steps(tmp_path, split, "zero3", NONE_WHOLE, LLAMA, {"training": FREE})
    assert not unordered


def test_a_snapshot_is_taken_before_the_next_step_writes():
    """Promise: nothing committed is lost. A checkpoint holds one step's numbers, and is read once all are there."""
    order, snapshot = StreamOrder(), HostSnapshot()
    with watched_gpu(watch=order):
        tensors = {"a": torch.zeros(64, device="cuda"), "b": torch.zeros(8, device="cuda")}
        assert snapshot.make_room(tensors)
        for _ in range(2):
            copies = snapshot.take(tensors)
            for tensor in tensors.values():
                tensor.add_(1)
            for copy in copies.values():
                copy.sum()  # the host reads it, as the thread that writes the checkpoint does
    assert order.num_accesses and not order.unordered


def test_what_has_no_order_is_found():
    """The detector: two streams, the host and pinned memory, and memory that is given away too early."""

    def unordered(work) -> list[str]:
        order = StreamOrder()
        with watched_gpu(watch=order):
            work(torch.zeros(8, device="cuda"), torch.cuda.Stream())
        return [each.partition(" at ")[0] for each in order.unordered]

    def read_elsewhere(tensor, stream, *, wait=False, recorded=True):
        stream.wait_stream(torch.cuda.current_stream()) if wait else None
        with torch.cuda.stream(stream):
            tensor.sum()
        tensor.record_stream(stream) if recorded else None

    def written_while_read(tensor, stream):
        read_elsewhere(tensor, stream, wait=True)
        tensor.add_(1)

    def read_by_the_host(tensor, stream):
        copy = torch.zeros(8).pin_memory()
        copy.copy_(tensor, non_blocking=True)
        copy.sum()

    def given_away(tensor, stream, *, recorded=False, waits=lambda event: None):
        gone = torch.ones(8, device="cuda")
        read_elsewhere(gone, stream, wait=True, recorded=recorded)
        waits(stream.record_event())
        del gone
        torch.ones(8, device="cuda")

    assert unordered(read_elsewhere) == ["sum"]
    assert unordered(lambda *each: read_elsewhere(*each, wait=True)) == []
    assert unordered(written_while_read) == ["add_"]
    assert unordered(read_by_the_host) == ["sum"]
    assert unordered(given_away) == ["memory is given away while it is used by sum"]
    assert unordered(lambda *each: given_away(*each, recorded=True)) == []
    assert unordered(lambda *each: given_away(*each, waits=lambda event: event.wait())) == []
    assert unordered(lambda *each: given_away(*each, waits=lambda event: event.synchronize())) == []
