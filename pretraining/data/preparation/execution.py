"""Run the stages of a preparation in this process, in processes of this machine, or on Ray; `slurm` submits jobs."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import TYPE_CHECKING

from pretraining.data.preparation.stage import Stage, run_task
from pretraining.data.progress import ProgressBar
from pretraining.errors import UserError, require
from pretraining.runtime.installation import PACKAGE
from pretraining.runtime.processes import handlers_kept

if TYPE_CHECKING:
    from pretraining.data.preparation.plan import Preparation

EXECUTORS = ("auto", "inline", "local", "slurm", "ray")

LOCAL_FROM_TASKS = 8
"""From this number of tasks on, the start of processes (some seconds) costs less than it gains."""


@dataclass(frozen=True)
class Execution:
    """How to run a preparation."""

    executor: str = "auto"
    workers: int = 0
    """Tasks at once; 0: as many as there are cores (`local`, `ray`: of the cluster), or no limit (`slurm`)."""
    slurm: dict = field(default_factory=dict)
    """Values of `slurm.SLURM_KEYS`."""

    def __post_init__(self) -> None:
        if self.slurm and self.executor != "slurm":
            raise UserError("--slurm: says how SLURM's jobs run; add --executor slurm, or leave it out")


def run_stages(
    preparation: "Preparation",
    execution: Execution,
    progress: ProgressBar,
    arrived: Callable[[], None] = lambda: None,
) -> None:
    """Run the pending tasks of every stage in turn; `arrived` is called before the first of `tokenize`, and after."""
    preparation.reuse_tokenizer()

    def run(planned: "Preparation", stage: Stage, pending: list[int], finished: Callable[[], None]) -> None:
        """Run some tasks of a stage; `finished` is called after each."""
        if not pending:
            return
        progress.label(stage.name)
        # Not `cpu_count`: a job of a cluster may use only some of the machine's cores.
        cores = execution.workers or len(os.sched_getaffinity(0))
        executor = execution.executor
        if executor == "auto":
            executor = "local" if len(pending) >= LOCAL_FROM_TASKS and cores > 1 else "inline"
        if executor == "inline":
            for number in pending:
                run_task(stage, number, progress)
                finished()
            return
        # The other processes read the preparation from the work folder.
        planned.save()
        if executor == "ray":
            run_on_ray(stage, pending, execution.workers, finished)
        else:
            # Each process has its share of the cores.
            workers = min(cores, len(pending))
            run_in_workers(stage, pending, workers, max(1, cores // workers), finished)

    for stage in preparation.stages:
        if stage is not preparation.tokenize:
            run(preparation, stage, stage.pending(), lambda: None)
    arrived()
    # In waves: how many tasks a portion of a source takes is known once some have been encoded.
    before: list[Path] = []
    while missing := (survey := preparation.survey()).missing:
        bounded = preparation.bounded(survey)
        folders = [bounded.tokenize.folder(number) for number in missing]
        if folders == before:
            return  # A cluster has run none of them: `finish` says so.
        run(bounded, bounded.tokenize, missing, arrived)
        before = folders


# Processes of this machine. If one dies, only its task is lost. Python's own pools wait forever for a worker that the
# kernel killed, most often because memory ran out.

MOST_DEATHS = 3
"""How often the process of one task may be killed; each time the task moves behind all others."""


def run_in_workers(
    stage: Stage, numbers: list[int], num_workers: int, num_threads: int, finished: Callable[[], None]
) -> None:
    """Run tasks of a stage of a saved preparation in `num_workers` processes; return when the last one is done.

    finished: is called after each task. Raises what a task raised, and UserError if the process of one task is killed
    again and again. The workers end with this process, however it ends.
    """
    # Forked from a clean process: a fork of this one would copy its threads' locks.
    context = multiprocessing.get_context("forkserver")
    # Imported once, by the process from which the workers of all stages are forked.
    preparation = "pretraining.data.preparation"
    context.set_forkserver_preload([f"{preparation}.execution", f"{preparation}.plan", "pyarrow"])
    # The fork server ignores Ctrl-C by itself, but only once it has imported what it preloads. So it is started with
    # Ctrl-C ignored; only the main thread may set a signal handler.
    with handlers_kept() as may_set:
        if may_set:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
    waiting, deaths, processes = deque(numbers), Counter(), {}
    idle: list[connection.Connection] = []
    running: dict[connection.Connection, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                if not idle:  # also in the place of those that died
                    idle.append(_start_worker(context, stage, num_threads, processes))
                channel = idle.pop()
                running[channel] = waiting.popleft()
                with suppress(OSError):  # a process that is gone is noticed when its answer is read
                    channel.send(running[channel])
            # A channel can be read once its process has answered, or died.
            for channel in connection.wait(running):
                number = running.pop(channel)
                try:
                    error = channel.recv()
                except (EOFError, OSError):
                    deaths[number] += 1
                    report_death(stage, number, _end(channel, processes.pop(channel)), deaths[number])
                    # Behind all others: if memory ran out, it may have more room at the end.
                    waiting.append(number)
                    continue
                if error is not None:
                    raise error
                idle.append(channel)
                finished()
    finally:
        for channel, process in processes.items():
            _end(channel, process)


def report_death(stage: Stage, number: int, how: str, num_deaths: int) -> None:
    """Report that a task's process was ended, and is run again; UserError if that was once too often."""
    task = f"task {number} of the stage {stage.name!r}"
    if num_deaths == MOST_DEATHS:
        what = f"its process was ended {MOST_DEATHS} times ({how}); if memory ran out, take fewer --workers"
        raise UserError(f"{task}: {what}; the same command goes on with what is missing")
    print(f"the process of {task} was ended ({how}): the task is run again", file=sys.stderr, flush=True)


def _start_worker(context, stage: Stage, num_threads: int, processes: dict):
    """Start one process, and return the channel to it; `processes` gains it."""
    channel, theirs = context.Pipe()
    given = str(stage.work), stage.name, num_threads, theirs
    process = context.Process(target=_serve, args=given, daemon=True)
    process.start()
    # Else this process would hold the worker's end open, and never see that the worker died.
    theirs.close()
    processes[channel] = process
    return channel


def _end(channel, process) -> str:
    """End a process and return how it ended."""
    process.kill()
    process.join()
    channel.close()
    code = process.exitcode or 0
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _serve(work: str, stage_name: str, num_threads: int, channel) -> None:
    """Live as a worker: numbers of tasks come in, None or an error goes out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal; the parent decides

    def leave_with_parent() -> None:
        # A worker that is in the middle of a task does not read its channel, so a thread watches the parent.
        connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    stage = _load_stage(work, stage_name, num_threads)
    with suppress(EOFError, BrokenPipeError):
        while True:
            channel.send(error_of(stage, channel.recv()))


def _load_stage(work: str, name: str, num_threads: int) -> Stage:
    """Load a stage of a saved preparation in the process that runs its tasks."""
    # Before an encoder is opened: rayon reads it when its threads start.
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    from pretraining.data.preparation.plan import Preparation

    return Preparation.load(Path(work)).stage(name)


def error_of(stage: Stage, number: int) -> Exception | None:
    """Run one task, and return what it raised, which another process can be sent."""
    try:
        run_task(stage, number)
    except Exception as error:
        # A traceback cannot be pickled: it travels as text.
        error.add_note(f"in a worker:\n{traceback.format_exc()}")
        return error
    return None


# A Ray cluster, whose nodes share the work folder and this repository. Ray itself would start a lost task again at
# once, in the place where memory ran out. Here it moves behind all others, as with the processes of one machine, and a
# task that ends its process again and again is named.

SEEN_WITHIN_SECONDS = 30.0
"""How long a shared disk may take to show here what another node has written."""


def run_on_ray(stage: Stage, numbers: list[int], workers: int, finished: Callable[[], None]) -> None:
    """Run tasks of a stage of a saved preparation on the cluster at RAY_ADDRESS, else on one that Ray starts here.

    workers: tasks at once; 0: one for each core of the cluster. finished: is called after each task. Raises what a task
    raised, and UserError if there is no cluster, if the process of one task is ended again and again, or if a node does
    not share the work folder.
    """
    ray = require("ray", "--executor ray")
    # Once for all stages: idle workers keep what they have imported. Ray ends the tasks of a process that leaves.
    if not ray.is_initialized():
        settings = {"log_to_driver": False, "include_dashboard": False, "logging_level": "error"}
        # Also of nodes that were started elsewhere: the folder is the same on all of them.
        path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(":")
        try:
            ray.init(**settings, runtime_env={"env_vars": {"PYTHONPATH": path}})
        except (ConnectionError, RuntimeError, ValueError) as error:
            address = os.environ.get("RAY_ADDRESS")
            where = f"answers at RAY_ADDRESS={address}" if address else "can be started here"
            remedy = "start one with `ray start --head`, or correct the variable"
            raise UserError(f"--executor ray: no cluster {where} ({error}); {remedy}") from error
    # More than one core a task, if the cluster has more than there are tasks.
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    threads = max(1, min(sum(cores) // len(numbers), max(cores, default=1)))

    task = ray.remote(max_retries=0, num_cpus=threads)(_run_on_node)
    at_once = workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
    waiting, deaths, running = deque(numbers), Counter(), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number = waiting.popleft()
            running[task.remote(number, str(stage.work), stage.name, threads)] = number
        done, _ = ray.wait(list(running))
        number = running.pop(done[0])
        try:
            host, error = ray.get(done[0])
        except ray.exceptions.RayError as lost:
            deaths[number] += 1
            report_death(stage, number, type(lost).__name__, deaths[number])
            waiting.append(number)
            continue
        if error is not None:
            raise error
        until = time.monotonic() + SEEN_WITHIN_SECONDS
        while not stage.folder(number).is_dir():
            if time.monotonic() > until:
                what = f"{host} has run a task, and {stage.folder(number)} is not here"
                raise UserError(f"--executor ray: {what}: all nodes must share the folder of --data_dir")
            time.sleep(0.1)
        finished()


def _run_on_node(number: int, *place) -> tuple[str, Exception | None]:
    """Run one task on a node; returns the node's name, and what the task raised. place: of `_load_stage`."""
    return os.uname().nodename, error_of(_load_stage(*place), number)
