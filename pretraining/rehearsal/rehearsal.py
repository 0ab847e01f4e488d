"""Rehearse a run on many nodes: what would fail in its first minutes fails here, in one line.

Parts that do not depend on each other are all done, so that one rehearsal finds every fault. If there is none, the
first, a middle and the last rank follow, which take longest: processes of their own (rank.py), two at a time.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pretraining.checkpoints.folders import refuse_foreign_files
from pretraining.checkpoints.remote import RemoteRun
from pretraining.command_line import started_by_launcher
from pretraining.data.packed_dataset import build_training_dataset
from pretraining.data.prepared import PreparedData
from pretraining.data.streaming.remote_data import StreamedSplit
from pretraining.data.tokenizer import refuse_missing_folder
from pretraining.errors import UserError, fault_in_user_code, file_error, require
from pretraining.outside.addresses import hub_repository
from pretraining.planning.gate import check_plan
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.need import memory_need
from pretraining.planning.quantities import num_bytes, several
from pretraining.planning.run_plan import Machine, RunPlan, build_run_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import Recipe
from pretraining.recipe.fixed_keys import changes_of_run
from pretraining.rehearsal.stand_in_data import StandInData, stand_in_data
from pretraining.runtime.host import cores, disk_room_bytes, existing_folder, loopback_name
from pretraining.runtime.imports import prepare_imports
from pretraining.runtime.installation import WORKPLACE
from pretraining.runtime.run_folder import RunFolder

ELSEWHERE = "elsewhere"
AT_ONCE = 2
"""Ranks that are rehearsed at the same time, if there are as many cores."""
SAYS_EVERY_SECONDS = 30.0
"""A rehearsal says at least so often that its ranks are at work."""
STEPS_COMPARED = 2
PROBE_BYTES = 1 << 20
MOST_HOST_BYTES = 4 << 30
"""Of offloaded states, which a rehearsal really holds."""


@dataclass
class RehearsedPart:
    """One part of a rehearsal: what was done, how long it took, and what is wrong."""

    name: str
    seconds: float = 0.0
    found: str = ""
    fault: str | None = None
    notes: list[str] = field(default_factory=list)
    """What is unwise, or was not looked at."""


def rehearse(
    recipe: Recipe,
    ds_config: dict | None,
    options: argparse.Namespace,
    open_data: Callable[..., PreparedData],
    attempt: Callable[..., bool],
) -> None:
    """Rehearse the start of a run and print what was found; open_data, attempt: train.py's.

    Raises `UserError`: the first fault. All of them are printed before.
    """
    rehearsal = Rehearsal(recipe, ds_config, options)
    rehearsal.do(open_data, attempt)
    faults = [f"{part.name}: {part.fault}" for part in rehearsal.parts if part.fault]
    if options.json:
        answer = {
            "recipe": recipe.name,
            "world_size": rehearsal.world_size,
            "nodes": rehearsal.nodes,
            "gpu": rehearsal.gpu.name if rehearsal.gpu else None,
            "seconds": round(time.perf_counter() - rehearsal.began, 2),
            "faults": faults,
            "parts": [asdict(part) for part in rehearsal.parts],
            "ranks": rehearsal.ranks,
            "memory_bytes": memory_need(rehearsal.setup).parts,
        }
        print(json.dumps(answer, indent=2), flush=True)
    if faults:
        more = f" (and {several(len(faults) - 1, 'fault')} more, above)" if len(faults) > 1 else ""
        raise UserError(f"{faults[0]}{more}")


def rehearsed_ranks(world_size: int) -> list[int]:
    return sorted({0, world_size // 2, world_size - 1})


class Rehearsal:
    """One rehearsal of a run."""

    def __init__(self, recipe: Recipe, ds_config: dict | None, options: argparse.Namespace) -> None:
        self.recipe, self.ds_config, self.options = recipe, ds_config, options
        self.world_size: int = options.world_size
        self.setup = Setup(recipe, ds_config, self.world_size)
        self.is_elsewhere = options.rehearse == ELSEWHERE
        self.gpu = find_gpu(options.gpu) if options.gpu else None
        gpus_of_a_node = self.gpu.gpus_per_node if self.gpu else 8
        self.nodes: int = options.nodes or -(-self.world_size // gpus_of_a_node)
        self.run = RunFolder(options.output_dir or WORKPLACE / "runs" / recipe.name)
        self.parts: list[RehearsedPart] = []
        self.ranks: list[dict] = []
        self.plan: RunPlan | None = None
        self.data: PreparedData | None = None
        self.began = time.perf_counter()

    def do(self, open_data: Callable[..., PreparedData], attempt: Callable[..., bool]) -> None:
        """Do every part, and print a line for each."""
        kind = f", {self.gpu.name}" if self.gpu else ""
        nodes = several(self.nodes, "node")
        self._print(
            f"rehearsal of {self.recipe.name} on {several(self.world_size, 'rank')} of {nodes}{kind}\n"
        )
        self._do("plan", self._plan)
        self._do("run folder", self._run_folder)
        self._do("store", self._store)
        self._do("data", partial(self._data, open_data))
        if self.data is not None:
            self._do("samples", self._samples)
        prepare_imports()
        self._do("environment", self._environment)
        if any(part.fault for part in self.parts):
            # they take minutes, and what is wrong already has to be mended first
            self._print("           not rehearsed: the ranks; mend what is above, then rehearse again")
        else:
            self._do("ranks", partial(self._ranks, attempt))

    def _do(self, name: str, look: Callable[[RehearsedPart], str]) -> None:
        part, began = RehearsedPart(name), time.perf_counter()
        self.parts.append(part)
        try:
            part.found = look(part)
        except UserError as error:
            part.fault = str(error)
        except OSError as error:
            if (refusal := file_error(error)) is None:
                raise
            part.fault = str(refusal)
        part.seconds = round(time.perf_counter() - began, 2)
        self._print(f"{name:<12} {'FAULT: ' if part.fault else ''}{part.fault or part.found}", timed=True)
        for note in part.notes:
            self._print(f"{'':>24}note: {note}")

    def _print(self, line: str, timed: bool = False) -> None:
        since = f"[{time.perf_counter() - self.began:6.1f} s] " if timed else ""
        # with --json the answer alone is on stdout
        print(f"{since}{line}", file=sys.stderr if self.options.json else sys.stdout, flush=True)

    def _plan(self, part: RehearsedPart) -> str:
        plan, gpu = build_run_plan(self.setup), self.gpu
        continues = not self.is_elsewhere and self.run.recipe.exists()
        machine = Machine(
            gpu_memory_bytes=gpu.memory_bytes if gpu else None,
            gpu=gpu,
            has_bf16="bf16" in gpu.dense_peak_flops if gpu else None,
            disk_room_bytes=None if self.is_elsewhere else disk_room_bytes(self.run.path, continues),
            ranks_per_host=-(-self.world_size // self.nodes),
            continues=continues,
        )
        self.plan = replace(plan, machine=machine)
        verdict = check_plan(self.setup, machine)
        part.notes += map(str, verdict.warnings)
        if verdict.refusals and not self.options.force:
            part.notes += [f"also: {each}" for each in verdict.refusals[1:]]
            raise UserError(str(verdict.refusals[0]))
        if gpu is None:
            part.notes.append("--gpu NAME lets the plan judge the memory of each GPU")
        need = memory_need(self.setup, machine.gpu_memory_bytes)
        there = f" of {num_bytes(gpu.memory_bytes)}" if gpu else ""
        memory = f"{num_bytes(need.total)}{there} on each GPU, {need.largest} the most"
        disk = f"checkpoints need {num_bytes(plan.saved_bytes)} of disk"
        return f"{memory}; {plan.setup.recipe.num_steps:,} steps; {disk}"

    def _run_folder(self, part: RehearsedPart) -> str:
        if self.is_elsewhere:
            return f"{self.run.path}: not looked at (the disk of the nodes is another)"
        changes_of_run(self.run.path, self.recipe.to_dict(), self.options.allow_change)
        refuse_foreign_files(self.run)
        if self.options.resume == "auto" and self.run.is_finished(self.recipe.to_dict()):
            what = "this run is finished: nothing would start; choose another --output_dir"
            raise UserError(f"{self.run.path}: {what}")
        state = "goes on" if self.run.recipe.exists() else "new"
        began, folder = time.perf_counter(), existing_folder(self.run.path)
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = folder  # not that of the probe
            raise
        seconds = time.perf_counter() - began
        free = num_bytes(disk_room_bytes(self.run.path, state == "goes on"))
        place = "" if folder in (self.run.path, self.run.path.parent) else f", on the disk of {folder}"
        return f"{self.run.path}: {state}{place}; room for {free}; 1 MB written in {1000 * seconds:.0f} ms"

    def _store(self, part: RehearsedPart) -> str:
        address = self.recipe.checkpoints.upload
        if not address:
            if self.nodes > 1:
                why = f"unless all nodes share the disk of {self.run.path}, a lost node takes its part of every "
                part.notes.append(f"{why}checkpoint along: --set checkpoints.upload=s3://bucket/runs")
            return "none (checkpoints.upload)"
        store = RemoteRun(address).at_first_contact()
        if repository := hub_repository(address):
            # read only: on the hub each write is a commit, which would stay
            system, _ = require("fsspec", "checkpoints.upload").core.url_to_fs(address)
            store.ask(partial(system.ls, repository), "")
            return f"{address}: can be read; whether it can be written, the run will try"
        # beside the run's folder, so that nothing of it is touched and nothing stays
        probe = f".{self.run.path.name}.rehearsal"
        # of a store that is a folder: those that are not there yet, and go again
        folders = [] if store.folder is None else [store.folder, *store.folder.parents]
        made = [each for each in folders if not each.exists()]
        began, content, where = time.perf_counter(), os.urandom(PROBE_BYTES), store.where(probe)
        store.write_bytes(probe, content)
        written = time.perf_counter() - began
        found = store.read_if_there(probe)
        read = time.perf_counter() - began - written
        store.remove(probe)
        for folder in made:
            folder.rmdir()
        if found != content:
            raise UserError(f"{where}: what was written was not read back; check checkpoints.upload")
        return f"{where}: 1 MB written in {1000 * written:.0f} ms, read in {1000 * read:.0f} ms"

    def _data(self, open_data: Callable[..., PreparedData], part: RehearsedPart) -> str:
        try:
            data = open_data(self.recipe, self.options)
        except UserError as error:
            if not self.is_elsewhere:
                raise
            part.notes.append(f"stand-in data, as {error}")
            if isinstance(name := self.recipe.data.tokenizer, str):
                refuse_missing_folder(name)
            data = stand_in_data(self.recipe, Path(f"stand-in-{self.recipe.data.name}")).for_run(self.recipe)
        number = sum(len(split["shards"]) for split in data.manifest["splits"].values())
        found = f"{data.manifest['name']}: {data.train.num_tokens:,} tokens in {several(number, 'shard')}"
        self.data = data
        if isinstance(data, StandInData):
            return f"{found}, none of which exists"
        for split in (each for each in (data.train, data.validation) if isinstance(each, StreamedSplit)):
            sizes = split.remote.store.sizes(split.name) or {}
            for shard in split.shard_entries:
                # a web server lists no sizes, and often nothing: asked for each file
                name = f"{split.name}/{shard['file']}"
                size = sizes.get(shard["file"]) or split.remote.store.size(name)
                if size not in (None, shard["size"]):
                    what = f"shard is {size:,} bytes, expected {shard['size']:,} bytes; copy the data there again"
                    raise UserError(f"{split.folder}/{shard['file']}: {what}")
        fingerprint = data.manifest["tokenizer"]["fingerprint"]
        return f"{found}, all there; its tokenizer is {fingerprint}, of {len(data.tokenizer):,} tokens"

    def _samples(self, part: RehearsedPart) -> str:
        dataset = build_training_dataset(self.data, self.recipe, 0)
        first = self.recipe.step_sizes.tokens_at(STEPS_COMPARED) // self.recipe.sequence_length
        count = min(first, len(dataset))
        different = len(np.unique(dataset.block_numbers(np.arange(count))))
        groups = several(self.world_size // self.setup.degrees.ranks_per_sample, "group")
        read = f"the first {STEPS_COMPARED} steps read {count:,} samples, {different:,} different blocks"
        return f"{read}, on {groups} of ranks" + ("; no two groups share one" if different == count else "")

    def _environment(self, part: RehearsedPart) -> str:
        from pretraining.extend import load_extensions
        from pretraining.training.trackers import build_trackers

        if started_by_launcher():
            raise UserError("a rehearsal is one process, whatever --world_size: leave the launcher out")
        load_extensions(self.recipe.extensions)
        named = self.recipe.training.report_to
        with mock.patch.dict(os.environ):  # trackers name their folders in variables
            project, prometheus = self.recipe.training.get("project"), self.recipe.monitors.prometheus
            build_trackers(named, self.run, self.recipe.name, project, prometheus)
        if self.nodes > 1 and not self.is_elsewhere and (name := loopback_name()):
            what = "leads to a loopback address: nodes like it cannot meet"
            part.notes.append(f"{name}, the name of this host, {what}")
        if port := os.environ.get("MASTER_PORT"):
            try:
                socket.create_server(("", int(port))).close()
            except (OSError, ValueError, OverflowError):
                what = "is taken on this host, or is no port; choose another"
                raise UserError(f"MASTER_PORT={port} {what}") from None
        trackers = named if isinstance(named, str) else ", ".join(named)
        return f"{several(len(self.recipe.extensions), 'extension')}; trackers: {trackers or 'none'}"

    def _ranks(self, attempt: Callable[..., bool], part: RehearsedPart) -> str:
        need = memory_need(self.setup)
        if need.state.host > MOST_HOST_BYTES:
            what = f"each rank keeps {num_bytes(need.state.host)} of offloaded states in host memory"
            remedy = "rehearse the same recipe without offload, or on more ranks"
            raise UserError(f"{what}, and so would a rehearsal; {remedy}")
        ranks = rehearsed_ranks(self.world_size)
        # forked: a rank begins with what this process has imported
        context, at_once = multiprocessing.get_context("fork"), max(1, min(AT_ONCE, int(cores())))
        shown = ", ".join(f"{each:,}" for each in ranks)
        said = f"{shown}, {at_once} of them at a time: two starts each, which may take minutes"
        self._print(f"{'ranks':<12} {said}", timed=True)
        from pretraining.rehearsal import rank as rehearsed  # the libraries, once for all ranks

        folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
        places = [rehearsed.RankPlace.of(each, self.world_size, self.nodes) for each in ranks]
        waiting, running = list(places), {}
        while waiting or running:
            while waiting and len(running) < at_once:
                place = waiting.pop(0)
                running[place] = context.Process(target=_be, args=(self, folder, place, attempt))
                running[place].start()
            ended = [process.sentinel for process in running.values()]
            if not multiprocessing.connection.wait(ended, SAYS_EVERY_SECONDS):
                names = ", ".join(f"{place.rank:,}" for place in running)
                self._print(f"still at work: {names}; what they print is in {folder}", timed=True)
            for place in [place for place, process in running.items() if not process.is_alive()]:
                running.pop(place).join()
                self._take(folder, place)
        if not any(each.get("log") for each in self.ranks):
            shutil.rmtree(folder)
        self.ranks.sort(key=lambda each: each["rank"])
        if fault := next((each["fault"] for each in self.ranks if each["fault"]), None):
            raise UserError(fault)
        return f"{shown}: two starts each, a step and a save in both; the second from the marker of the first"

    def _take(self, folder: Path, place: Any) -> None:
        """Read what a rank has left, and print it."""
        path, log = (folder / f"{place.rank}{suffix}" for suffix in (".json", ".log"))
        killed = f"rank {place.rank}: its process was killed, perhaps for its memory; its output is {log}"
        nothing = {"rank": place.rank, "fault": killed, "log": str(log)}
        answer = json.loads(path.read_text()) if path.exists() else nothing
        self.ranks.append(answer)
        if answer["fault"]:
            return
        first, second = answer["starts"]
        seconds = {name: first["seconds"].get(name, 0) for name in ("build", "step", "save")}
        words = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        again = second["seconds"].get("load", 0) + second["seconds"].get("step", 0)
        sent = sum(size for _, size in first["sent"].values())
        self._print(
            f"rank {place.rank:<7,} node {place.node}, {words}, resume {again:.1f} s; samples "
            f"{first['samples'][0]:,} to {first['samples'][-1]:,} from {several(len(first['shards']), 'shard')}; "
            f"writes {num_bytes(first['checkpoint_bytes'])} a checkpoint; moves {num_bytes(sent)}",
            timed=True,
        )


def _be(rehearsal: Rehearsal, folder: Path, place: Any, attempt: Callable) -> None:
    """Be a rank, in a process of its own: start twice, and leave an answer."""
    from pretraining.rehearsal import rank as rehearsed

    log = folder / f"{place.rank}.log"
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    answer: dict = {"rank": place.rank, "node": place.node, "local_rank": place.local_rank, "fault": None}
    run, recipe = RunFolder(folder / f"run-{place.rank}"), rehearsal.recipe
    asked = recipe, rehearsal.plan, rehearsal.data, rehearsal.options
    try:
        starts = [rehearsed.start_as(place, attempt, asked, run) for _ in range(2)]
        ranks_per_sample = rehearsal.setup.degrees.ranks_per_sample
        rehearsed.check_samples(starts[0], place, recipe.micro_batch, ranks_per_sample)
        answer["starts"] = [{**asdict(each), "shards": sorted(each.shards)} for each in starts]
        # Linux counts in KiB
        answer["peak_host_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # of a checkpoint the files that have this rank's number, or none
        mine, files = f"rank-{place.rank:05d}-of", (path for path in run.path.rglob("*") if path.is_file())
        names = sorted(str(path.relative_to(run.path)) for path in files)
        answer["writes"] = [name for name in names if "rank-" not in name or mine in name]
    except UserError as error:
        answer["fault"] = f"rank {place.rank}: {error}"
    except BaseException as error:
        traceback.print_exc()
        known = fault_in_user_code(error) or file_error(error)
        first_line = (str(error).splitlines() or [""])[0]
        unknown = f"{type(error).__name__}: {first_line}; its output is {log}"
        answer["fault"] = f"rank {place.rank}: {known or unknown}"
        answer["log"] = None if known else str(log)
    (folder / f"{place.rank}.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # torch's threads and groups need no farewell
