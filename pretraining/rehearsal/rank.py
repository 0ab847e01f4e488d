"""Be one rank of a run whose other ranks do not exist: start, step, save, and start again from what was saved.

The caller's `attempt` is the real one, with the real data, Trainer, DeepSpeed engine and monitors. Tensors of the GPU
have shapes and no numbers (upstream/fake_gpu.py), and files of checkpoints have names and sizes and no bytes.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pretraining.checkpoints import shard_files
from pretraining.checkpoints.format import commit_checkpoint, file_entry, receipt_name, write_bytes
from pretraining.checkpoints.live_state import LiveState
from pretraining.checkpoints.manager import CheckpointManager, RankShare, rank_share, shared_files
from pretraining.data.block_guard import BlockGuard
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.prepared import PreparedData
from pretraining.data.shards import TokenSplit
from pretraining.errors import UserError
from pretraining.model.parallel import Agreed, ExpertDispatch, expert_modules
from pretraining.planning.run_plan import RunPlan
from pretraining.planning.shapes import ranks_met
from pretraining.recipe import Recipe
from pretraining.rehearsal.stand_in_data import StandInData
from pretraining.runtime.exit_codes import STOPPED
from pretraining.runtime.process_group import deciding_alone
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.arrival import Arrival
from pretraining.training.monitors import Job, RunMonitors
from pretraining.upstream.fake_gpu import GPU, fake_gpu
from pretraining.upstream.fake_ranks import without_other_ranks

MOST_MICRO_BATCHES = 2
"""Of a step: any further one does the same."""
SOON_HOURS = 1e-9
"""A time limit that is over at the end of the first step: the run then saves and leaves."""
MOST_READ_BYTES = 1 << 30
"""Of a file that the marker lists: the next start compares all its bytes."""
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is."""

    rank: int
    world_size: int
    node: int
    local_rank: int
    ranks_of_node: int

    @classmethod
    def of(cls, rank: int, world_size: int, nodes: int) -> "RankPlace":
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
        began = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began


Asked = tuple[Recipe, RunPlan, PreparedData, argparse.Namespace]
"""What is rehearsed, with the plan on its machine, the data and the options of train.py."""


def start_as(place: RankPlace, attempt: Callable[[Job], bool], asked: Asked, run: RunFolder) -> Done:
    """Do one start of the run as this rank: from its beginning, or from the checkpoint in the folder; then one step.

    attempt: train.py's. run: a folder of this rehearsal.
    """
    done, began, (recipe, plan, data, options) = Done(), time.perf_counter(), asked
    gpu = plan.machine.gpu if plan.machine else None
    named = {"gpu": (gpu.name, gpu.memory_bytes)} if gpu else {}
    typed = {**vars(options), "resume": "auto", "force": True, "while_preparing": False}
    if not recipe.step_sizes.ramp_steps:  # else the first steps have a share of them
        plan = replace(plan, accumulation_steps=min(plan.accumulation_steps, MOST_MICRO_BATCHES))
    # the recipe of a run that ends after its first step and reports to nobody
    checkpoints = replace(recipe.checkpoints, time_limit_hours=SOON_HOURS, upload=None, background=False)
    alone = {**recipe.training, "report_to": "none", "dataloader_num_workers": 0, "eval_on_start": False}
    recipe = replace(recipe, training=alone, checkpoints=checkpoints)
    here = place.local_rank, place.ranks_of_node
    gpu_of_none = fake_gpu(place.world_size, place.rank, here, **named)
    with gpu_of_none as network, without_other_ranks(), deciding_alone():
        monitors = RankMonitors(run, recipe, done, isinstance(data, StandInData))
        with closing(Arrival(recipe, options.data_dir, run, monitors.stop)) as arrival:
            work = recipe, plan, data, run, argparse.Namespace(**typed), monitors, arrival
            try:
                attempt(Job(*work, GPU, partial(RankCheckpoints, place, done)))
            except SystemExit as left:
                if left.code != STOPPED:
                    raise
        done.sent = network.sent
    done.seconds["step"] = max(0.0, time.perf_counter() - began - sum(done.seconds.values()))
    return done


class RankMonitors(RunMonitors):
    """The monitors of a rank; they note too what it reads, and when the model is about to be built."""

    def __init__(self, run: RunFolder, recipe: Recipe, done: Done, without_data: bool) -> None:
        super().__init__(run, recipe)
        self.done, self.without_data = done, without_data

    def begin(self, plan: RunPlan, start: Any, dataset: PackedDataset) -> None:
        super().begin(plan, start, dataset)
        # nothing can be learned from blocks that stand in
        dataset.guard = NotingGuard(self.done, None if self.without_data else dataset.guard)
        self.done.seconds["build"] = -time.perf_counter()


class NotingGuard(BlockGuard):
    """Notes each block that is read, and has it looked at by the guard, if there is one."""

    def __init__(self, done: Done, guard: BlockGuard | None) -> None:
        self.done, self.guard = done, guard

    def look(
        self, tokens: np.ndarray, split: TokenSplit, stretches: Sequence[tuple[int, int]], **place: int
    ) -> dict[str, float]:
        self.done.samples.append(place["sample"])
        for start, stop in stretches:
            numbers = range(split.locate(start)[0], split.locate(stop - 1)[0] + 1)
            self.done.shards |= {split.shard_entries[number]["file"] for number in numbers}
        return self.guard.look(tokens, split, stretches, **place) if self.guard else {}

    def leaves_out(self, reasons: dict) -> bool:
        return self.guard is not None and self.guard.leaves_out(reasons)


class RankCheckpoints(CheckpointManager):
    """Saves neither the bytes of tensors nor what other ranks would; loads as ever. Made when the model is built."""

    def __init__(self, place: RankPlace, done: Done, *of_run: Any) -> None:
        done.seconds["build"] += time.perf_counter()
        super().__init__(*of_run)
        self.place, self.done = place, done

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        choose_evenly(model)

    def save(self, trainer: Any, validation_follows: bool = False) -> None:
        step = trainer.state.global_step
        if self.done.step == step:
            return
        self.done.step = step
        with self.done.timed("save"):
            share = rank_share(trainer)
            files = share.files or shared_files(trainer, LiveState(trainer.model, trainer.optimizer))
            marker = self.identity.marker_at(step, trainer.state.log_history)
            self.done.checkpoint_bytes = sum(tensor.nbytes for tensor in share.tensors.values())
            if self.start.checkpoint is not None:
                return  # nobody continues from the second one
            shared = self.identity.layout["zero_stage"] in (None, 0)
            folder, ranks = self.run.checkpoint(step), (self.place.rank, self.place.world_size)
            write_stand_in(folder, *ranks, share._replace(files=files), marker, shared)

    def load_state(self, trainer: Any, folder: Path) -> None:
        with self.done.timed("load"):
            super().load_state(trainer, folder)


class EvenDispatch(ExpertDispatch):
    """Experts split over ranks, for routers that choose every expert equally often: on the device are no numbers."""

    def __init__(self, dispatch: ExpertDispatch) -> None:
        vars(self).update(vars(dispatch))

    def agree(self, owners: torch.Tensor, travels: torch.Tensor) -> Agreed:
        going = torch.zeros(self.ranks, 2, dtype=torch.int64, device=owners.device)
        dist.all_to_all_single(torch.empty_like(going), going, group=self.group)
        tokens, chosen = owners.shape
        to_each = round(tokens * ranks_met(self.local * self.ranks, chosen, self.ranks) / self.ranks)
        return Agreed([to_each] * self.ranks, [to_each] * self.ranks, tokens * chosen)


def choose_evenly(model: torch.nn.Module) -> None:
    for experts in expert_modules(model):
        if isinstance(experts.forward, ExpertDispatch):
            experts.forward = EvenDispatch(experts.forward)


def check_samples(done: Done, place: RankPlace, size: int, ranks_per_sample: int) -> None:
    """Raise `UserError` unless a rank has read the samples that are its own: no other rank reads one of them.

    done: of a start from the beginning. size: the samples of a micro-batch.
    """
    groups, group = place.world_size // ranks_per_sample, place.rank // ranks_per_sample
    for number, sample in enumerate(done.samples):
        micro_batch, row = divmod(number, size)
        own = (micro_batch * groups + group) * size + row
        if sample != own:
            what = f"read sample {sample:,} of the run as its {number + 1}., and its own is {own:,}"
            raise UserError(f"rank {place.rank} {what}: another rank reads that one too; please report this")


def write_stand_in(folder: Path, rank: int, ranks: int, share: RankShare, marker: dict, shared: bool) -> None:
    """Write and commit a checkpoint as rank `rank` of `ranks` from what it holds, without the bytes of its tensors.

    Names, headers, sizes, receipts and the marker are those of a real checkpoint, except that the marker does not list
    a file of too many zeros to read them all. The tensors are holes in the files, which take no room on the disk and
    are read as zeros. The other ranks' files hold what this rank's does not, so that a run can continue from it.

    shared: whether every rank needs all parameters, of which each saves a share.
    """
    tensors, files, receipt = share
    folder.mkdir(parents=True)
    entries = {name: write_bytes(folder / name, content) for name, content in files.items()}
    held = _missing_fragments(tensors, json.loads(files[shard_files.STATE_FILE]), shared)
    # the first of the others holds what is missing
    content: dict[int, Tensors] = {rank: tensors, 0 if rank else 1: held}
    for each in range(ranks):
        path, own = folder / shard_files.rank_file(each, ranks), content.get(each, {})
        header, num_bytes = shard_files.file_header(own)
        places = json.loads(header[8:])
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + num_bytes)
            # the states of its random generators are written: nobody could go on from zeros
            for name in (name for name in own if "@" not in name):
                file.seek(len(header) + places[name]["data_offsets"][0])
                file.write(own[name].numpy().tobytes())
        is_listed = len(header) + num_bytes <= MOST_READ_BYTES
        entry = {path.name: file_entry(path)} if is_listed else {}
        of_rank = {**(entries if each == rank else {}), **entry}
        # not through the disk's cache and back, as a real one: a rehearsal has nothing to lose
        receipt_text = json.dumps({"files": of_rank, **receipt})
        (folder / receipt_name(each, ranks)).write_text(receipt_text, encoding="utf-8")
    commit_checkpoint(folder, marker)


def _missing_fragments(tensors: Tensors, state: dict, shared: bool) -> dict[str, torch.Tensor]:
    """Return what other ranks must hold: the elements of each state that this one reads and `tensors` do not have."""
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    states: dict[str, torch.dtype] = {shard_files.MASTER: torch.float32}
    cut = set()
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        name, at, start = rest.rpartition("@")
        if not at or start == "whole":
            continue
        if name not in state["parameters"] and kind != shard_files.BUFFER:
            cut.add(name.partition("@")[0])  # a part of a split layer: this rank reads no other
            continue
        spans[kind, name].append((int(start), int(start) + tensor.numel()))
        if kind != shard_files.BUFFER:
            states[kind] = tensor.dtype
    wanted = [
        (kind, name, prod(entry["shape"]), dtype)
        for name, entry in state["parameters"].items()
        if name not in cut
        # no optimizer steps a frozen parameter: every rank reads all of it
        if shared or name not in state["scalars"]
        for kind, dtype in states.items()
        if kind == shard_files.MASTER or name in state["scalars"]
    ]
    wanted += [
        (shard_files.BUFFER, name, prod(entry["shape"]), getattr(torch, entry["dtype"]))
        for name, entry in state["buffers"].items()
    ]
    missing: dict[str, torch.Tensor] = {}
    for kind, name, numel, dtype in wanted:
        at = 0
        # what no span covers
        for start, stop in [*sorted(spans[kind, name]), (numel, numel)]:
            if start > at:
                key = shard_files.fragment_key(kind, name, at)
                missing[key] = torch.empty(start - at, dtype=dtype, device="meta")
            at = max(at, stop)
    return missing
