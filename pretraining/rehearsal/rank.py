"""Be one rank of a run whose other ranks do not exist: start, step, save, and start again from what was saved.

The caller's `attempt` is the real one, with the real data, Trainer, DeepSpeed engine and monitors. Tensors of the GPU
have shapes and no numbers (upstream/fake_gpu.py), and files of checkpoints have names and sizes and no bytes.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import pretraining.checkpoints.choosing as choosing
import pretraining.checkpoints.trainer_state as trainer_state
import pretraining.data.block_guard as block_guard
import pretraining.model.build as build
from pretraining.checkpoints.identity import metrics_at
from pretraining.checkpoints.live_state import live_state
from pretraining.checkpoints.manager import CheckpointManager
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.prepared import PreparedData
from pretraining.errors import UserError
from pretraining.model.expert_parallel import ExpertDispatch
from pretraining.planning.run_plan import RunPlan
from pretraining.recipe import Recipe
from pretraining.rehearsal.stand_in_checkpoint import changed_small_files, write_stand_in
from pretraining.rehearsal.stand_in_data import StandInData
from pretraining.runtime.exit_codes import STOPPED
from pretraining.runtime.process_group import deciding_alone
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.arrival import arriving_data
from pretraining.training.monitors import Monitors
from pretraining.upstream.fake_gpu import GPU, FakeGpu, fake_gpu
from pretraining.upstream.fake_ranks import without_other_ranks

MOST_MICRO_BATCHES = 2
"""Of a step: any further one does the same."""
SOON_HOURS = 1e-9
"""A time limit that is over at the end of the first step: the run then saves and leaves."""


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    rank: int
    world_size: int
    node: int
    local_rank: int
    ranks_of_node: int

    @classmethod
    def of(cls, rank: int, world_size: int, nodes: int) -> "Place":
        """Find the place of a rank. If the ranks do not divide among the nodes, the first nodes have one more."""
        fewest, fuller = divmod(world_size, nodes)
        in_fuller = fuller * (fewest + 1)
        if rank < in_fuller:
            return cls(rank, world_size, rank // (fewest + 1), rank % (fewest + 1), fewest + 1)
        node, local_rank = divmod(rank - in_fuller, fewest)
        return cls(rank, world_size, fuller + node, local_rank, fewest)


@dataclass
class Done:
    """What one start of one rank did."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By what took them."""
    samples: list[int] = field(default_factory=list)
    """Positions in the run, in the order in which they were read."""
    shards: set[str] = field(default_factory=set)
    """Files of the data that were read."""
    step: int = 0
    """After which the start ended."""
    checkpoint_bytes: int = 0
    """Of this rank's files."""
    sent: dict[str, list[int]] = field(default_factory=dict)
    """{collective: [times, bytes]} of this start."""

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the block's time to `what`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began


def start_as(
    place: Place,
    attempt: Callable[..., bool],
    recipe: Recipe,
    plan: RunPlan,
    data: PreparedData,
    run: RunFolder,
    options: argparse.Namespace,
) -> Done:
    """Do one start of the run as this rank: from its beginning, or from the checkpoint in the folder; then one step.

    attempt: train.py's. plan: on the machine that is rehearsed. run: a folder of this rehearsal.
    """
    done, began = Done(), time.perf_counter()
    gpu = plan.machine.gpu if plan.machine else None
    named = {"name": gpu.name, "total_bytes": gpu.memory_bytes} if gpu else {}
    options = argparse.Namespace(
        **{**vars(options), "resume": "auto", "force": True, "while_preparing": False}
    )
    here = place.local_rank, place.ranks_of_node
    with ExitStack() as undone:
        enter = undone.enter_context
        machine = enter(fake_gpu(place.world_size, place.rank, here, **named))
        enter(without_other_ranks())
        enter(deciding_alone())
        for patch in _stand_ins(done, place):
            enter(patch)
        if isinstance(data, StandInData):  # nothing can be learned from it
            enter(mock.patch.object(block_guard, "open_guard", lambda *_: None))
        recipe, plan = shortened(recipe), _with_few_micro_batches(recipe, plan)
        monitors = Monitors(run, recipe)
        arrival = enter(arriving_data(recipe, options.data_dir, run, monitors.stop))
        try:
            attempt(recipe, plan, data, run, monitors, options, arrival)
        except SystemExit as left:
            if left.code != STOPPED:
                raise
        done.sent = _sums(machine)
    done.seconds["step"] = max(0.0, time.perf_counter() - began - sum(done.seconds.values()))
    return done


def shortened(recipe: Recipe) -> Recipe:
    """Return the recipe of a run that ends after its first step and reports to nobody."""
    checkpoints = replace(recipe.checkpoints, time_limit_hours=SOON_HOURS, upload=None, background=False)
    own = {"report_to": "none", "dataloader_num_workers": 0}
    training = type(recipe.training)({**recipe.training, **own})
    return replace(recipe, training=training, checkpoints=checkpoints)


def _with_few_micro_batches(recipe: Recipe, plan: RunPlan) -> RunPlan:
    if recipe.step_sizes.ramp_steps:
        return plan  # the first steps have a share of them
    return replace(plan, accumulation_steps=min(plan.accumulation_steps, MOST_MICRO_BATCHES))


def _stand_ins(done: Done, place: Place) -> Iterator[Any]:
    """Yield the patches for what a rehearsal cannot do: draw billions of numbers, and write billions of bytes."""
    build_model, read = build.build_model, PackedDataset.__getitems__
    load_state = CheckpointManager.load_state

    def built_on_the_device(*args: Any, **keywords: Any) -> Any:
        with done.timed("build"), torch.device(GPU):
            return build_model(*args, **keywords)

    def read_and_noted(dataset: PackedDataset, indices: list[int]) -> Any:
        if dataset.order is not None:  # not a validation
            _note(done, dataset, indices)
        return read(dataset, indices)

    def saved(manager: CheckpointManager, trainer: Any) -> None:
        with done.timed("save"):
            _save(manager, trainer, place, done)

    def loaded(manager: CheckpointManager, trainer: Any, folder: Path) -> None:
        with done.timed("load"):
            load_state(manager, trainer, folder)

    yield mock.patch.object(build, "build_model", built_on_the_device)
    yield mock.patch.object(build, "initialise_weights", lambda *_: None)
    yield mock.patch.object(choosing, "changed_files", changed_small_files)
    yield mock.patch.object(PackedDataset, "__getitems__", read_and_noted)
    yield mock.patch.object(CheckpointManager, "save", saved)
    yield mock.patch.object(CheckpointManager, "load_state", loaded)
    yield mock.patch.object(ExpertDispatch, "_agree", _agree_evenly)


def _agree_evenly(
    dispatch: ExpertDispatch, numbers: torch.Tensor
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Do what `ExpertDispatch._agree` does, for routers that choose every expert equally often."""
    each, more = divmod(len(numbers), dispatch.experts)
    counts = [each + (expert < more) for expert in range(dispatch.experts)]
    going = torch.tensor(counts, device=numbers.device)
    dist.all_to_all_single(torch.empty_like(going), going, group=dispatch.group)
    of_ranks = [counts[first : first + dispatch.local] for first in range(0, len(counts), dispatch.local)]
    own = of_ranks[dist.get_rank(dispatch.group)]
    coming = torch.tensor([own] * dispatch.ranks, device=numbers.device)
    return coming, list(map(sum, of_ranks)), [sum(own)] * dispatch.ranks


def _note(done: Done, dataset: PackedDataset, indices: list[int]) -> None:
    done.samples += [dataset.first_sample + int(index) for index in indices]
    for block in dataset.block_numbers(indices).tolist():
        source, stretches = dataset.place(block)
        split = dataset.splits[source]
        for start, stop in stretches:
            numbers = range(split.locate(start)[0], split.locate(stop - 1)[0] + 1)
            done.shards |= {split.shard_entries[number]["file"] for number in numbers}


def _save(manager: CheckpointManager, trainer: Any, place: Place, done: Done) -> None:
    """Do what `CheckpointManager.save` does, with a stand-in for the disk and for the other ranks."""
    step = trainer.state.global_step
    if done.step == step:
        return
    done.step = step
    share = trainer_state.rank_share(trainer)
    files = share.files or trainer_state.shared_files(trainer, live_state(trainer.model, trainer.optimizer))
    marker = manager.identity.marker_at(step, metrics_at(step, trainer.state.log_history))
    done.checkpoint_bytes = sum(tensor.nbytes for tensor in share.tensors.values())
    folder = manager.run.checkpoint(step)
    if manager.start.checkpoint is None:  # nobody continues from the second one
        shared = manager.identity.layout["zero_stage"] in (None, 0)
        write_stand_in(folder, place.rank, place.world_size, *share._replace(files=files), marker, shared)


def _sums(machine: FakeGpu) -> dict[str, list[int]]:
    times, sizes = Counter[str](), Counter[str]()
    for each in machine.collectives:
        times[each.name] += 1
        sizes[each.name] += each.bytes
    return {name: [times[name], sizes[name]] for name in times}


def check_samples(done: Done, place: Place, recipe: Recipe, ranks_per_sample: int, first: int) -> None:
    """Raise `UserError` unless a rank has read the samples that are its own: no other rank reads one of them."""
    groups, group = place.world_size // ranks_per_sample, place.rank // ranks_per_sample
    size = recipe.micro_batch
    for number, sample in enumerate(done.samples):
        micro_batch, row = divmod(number, size)
        own = first + (micro_batch * groups + group) * size + row
        if sample != own:
            raise UserError(
                f"rank {place.rank} read sample {sample:,} of the run as its {number + 1}., and its own is {own:,}: "
                "another rank reads that one too; please report this"
            )
