"""Run the stages of a preparation in this process, in processes of this machine, on Ray, or as jobs of SLURM.

python -m pretraining.data.preparation.execution WORK STAGE FIRST     what a job runs, with SLURM_ARRAY_TASK_ID
"""

import json
import multiprocessing
import os
import shlex
import signal
import subprocess
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
from pretraining.data.publishing import preparation_lock
from pretraining.errors import UserError, nearest, one_line_errors, require
from pretraining.runtime.durable_files import write_json
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
    """Values of `SLURM_KEYS`."""

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
    # Imported once, by the process from which the workers of all stages are forked. Not this module, which is the
    # program of a job, and as such is imported by each worker.
    context.set_forkserver_preload(["pretraining.data.preparation.plan", "pyarrow"])
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


# A SLURM cluster: an array job for each stage, each after the one before, and a last job that publishes.

FINISH = "finish"
"""Name of the last job, which publishes."""

SLURM_KEYS: dict = {
    "partition": None,
    "time": "24:00:00",
    "qos": None,
    "cpus_per_task": 1,
    "mem_per_cpu_gb": 2,
    "max_array_size": 1001,
    "tasks_per_job": 1,
    "mail_user": None,
    "env_command": None,
}
"""What `--slurm` takes, and its defaults. A max_array_size of -1 is no limit."""


def read_slurm_options(words: list[str]) -> dict:
    """Read `key=value` words as arguments of the jobs; UserError for one that is unknown or no number."""
    options: dict = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or key not in SLURM_KEYS:
            what = f"expected KEY=VALUE{nearest(key, SLURM_KEYS)}; there are: {', '.join(SLURM_KEYS)}"
            raise UserError(f"--slurm {word}: {what}")
        options[key] = value
        if isinstance(SLURM_KEYS[key], int):
            try:
                options[key] = number = int(value)
            except ValueError as error:
                raise UserError(f"--slurm {word}: {key} takes a whole number") from error
            if number < 1 and (key, number) != ("max_array_size", -1):
                raise UserError(f"--slurm {word}: {key} is at least 1")
    return options


def submit_to_slurm(preparation: "Preparation", execution: Execution) -> list[str]:
    """Submit the jobs; return the id of each stage's last array, and of the job that publishes."""
    if not execution.slurm.get("partition"):
        what = "the partition that the jobs are to run in (see sinfo)"
        raise UserError(f"--slurm partition=NAME is missing: {what}")
    preparation.reuse_tokenizer()
    # Of portions the first tasks that are surely needed. The last job runs those that are then still missing.
    survey = preparation.survey()
    preparation = preparation.bounded(survey)
    preparation.save()
    before = [(stage.name, stage.pending()) for stage in preparation.stages if stage.name != "tokenize"]
    stages = [each for each in [*before, (preparation.tokenize.name, survey.missing)] if each[1]]
    ids: list[str] = []
    for name, pending in [*stages, (FINISH, [0])]:
        ids.append(_submit(preparation, name, pending, execution, after=ids[-1] if ids else None))
    return ids


def _submit(
    preparation: "Preparation", name: str, pending: list[int], execution: Execution, after: str | None
) -> str:
    """Submit the tasks of one stage as array jobs, one after the other; return the id of the last one."""
    options, logs = SLURM_KEYS | execution.slurm, preparation.work / "logs" / name
    # Here, as SLURM makes no folder for what a job prints.
    (logs / "slurm_logs").mkdir(parents=True, exist_ok=True)
    write_json(logs / "tasks.json", {"tasks": pending, "tasks_per_job": options["tasks_per_job"]})
    num_jobs = -(-len(pending) // options["tasks_per_job"])
    largest = num_jobs if options["max_array_size"] == -1 else options["max_array_size"]
    job_name, log, job = f"{preparation.data.name}-{name}", logs / "slurm_logs" / "%A_%a.out", None
    # This interpreter's packages and this repository.
    bin_folder, ours = (shlex.quote(str(path)) for path in (Path(sys.executable).parent, PACKAGE.parent))
    environment = f'export PATH={bin_folder}:"$PATH" PYTHONPATH={ours}:"$PYTHONPATH"'
    for first in range(0, num_jobs, largest):
        words = [
            sys.executable,
            "-m",
            "pretraining.data.preparation.execution",
            preparation.work,
            name,
            first,
        ]
        at_once = f"%{execution.workers}" if execution.workers else ""
        as_they_are = ("cpus_per_task", "partition", "time", "qos", "mail_user")
        directives = {key.replace("_", "-"): options[key] for key in as_they_are} | {
            "mem-per-cpu": f"{options['mem_per_cpu_gb']}G",
            "nodes": 1,
            "job-name": job_name,
            "output": log,
            "error": log,
            "array": f"0-{min(largest, num_jobs - first) - 1}{at_once}",
            "mail-type": "ALL" if options["mail_user"] else None,
        }
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH --{key}={value}" for key, value in directives.items() if value),
            # A node that is lost, or taken back: the job is queued again.
            "#SBATCH --requeue",
            options["env_command"] or environment,
            "set -xe",
            "export PYTHONUNBUFFERED=TRUE",
            # Some settings of a cluster start two tasks in a job.
            f"srun -l -n 1 {shlex.join(map(str, words))}",
        ]
        script = logs / f"jobs-{first}.sbatch"
        script.write_text("\n".join(lines) + "\n")
        # afterok: the stage before must succeed. afterany: arrays of one stage only take turns.
        waits = [f"afterok:{after}"] * bool(after) + [f"afterany:{job}"] * bool(job)
        waiting = [f"--dependency={','.join(waits)}"] if waits else []
        try:
            # It says on stderr why it refuses a script, and on stdout "Submitted batch job ID".
            answer = subprocess.check_output(["sbatch", *waiting, str(script)], text=True)
        except FileNotFoundError as error:
            what = "sbatch is not installed here; run it where jobs are submitted"
            raise UserError(f"--executor slurm: {what}") from error
        except subprocess.CalledProcessError as error:
            what = f"sbatch refused the jobs of {job_name} (its reason is above); change --slurm"
            raise UserError(f"--executor slurm: {what}, then run the same command again") from error
        job = answer.split()[-1]
    return job


def run_slurm_job(work: Path, name: str, first: int) -> None:
    """Run the tasks of this job of an array that begins with job `first` of its stage; those of FINISH publish."""
    # numpy, tokenizers and pyarrow are needed from here on
    from pretraining.data.preparation.finish import finish, kept_text
    from pretraining.data.preparation.plan import Preparation

    def requeue(*_) -> None:
        """Queue the job again: the cluster takes its node back, and another job goes on with what is missing."""
        print("SIGUSR1: the job is queued again", file=sys.stderr, flush=True)
        subprocess.run(["scontrol", "requeue", os.environ.get("SLURM_JOB_ID", "")], check=False)
        sys.exit(15)

    signal.signal(signal.SIGUSR1, requeue)
    preparation = Preparation.load(work)
    if name == FINISH:
        with preparation_lock(preparation.folder):
            # How many tasks a portion takes was a guess when the jobs were submitted.
            if any(preparation.targets):
                with ProgressBar("preparing", shown=False) as progress:
                    run_stages(preparation, Execution(), progress)
            if kept := finish(preparation):
                print(kept_text(kept, kept.parent))
        return
    submitted = json.loads((work / "logs" / name / "tasks.json").read_text(encoding="utf-8"))
    # A stage with more jobs than an array may have is several arrays, and each counts from 0.
    start = (first + int(os.environ["SLURM_ARRAY_TASK_ID"])) * submitted["tasks_per_job"]
    for number in submitted["tasks"][start : start + submitted["tasks_per_job"]]:
        run_task(preparation.stage(name), number)


if __name__ == "__main__":
    with one_line_errors():
        run_slurm_job(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
