"""Define a stage's numbered tasks, and run them in this process, in processes of this machine, or on a cluster.

A task's output appears whole or not at all, so that each task can be run again alone. The name of its folder has a
digest of everything that its output depends on. So a finished task of other input is never mistaken for this one, and a
task whose input is unchanged is never run again.
"""

import os
import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pretraining.data.progress import Progress, Silence
from pretraining.errors import UserError, nearest
from pretraining.runtime.durable_files import sync_to_disk, write_json
from pretraining.schema import REPOSITORY

if TYPE_CHECKING:
    from datatrove.executor.slurm import SlurmPipelineExecutor

    from pretraining.data.preparation.stages import Preparation

EXECUTORS = ("auto", "inline", "local", "slurm", "ray")

LOCAL_FROM_TASKS = 8
"""From this number of tasks on, the start of processes (some seconds) costs less than it gains."""

SLURM_KEYS = {
    "partition": str,
    "time": str,
    "qos": str,
    "cpus_per_task": int,
    "mem_per_cpu_gb": int,
    "max_array_size": int,
    "tasks_per_job": int,
    "mail_user": str,
    "env_command": str,
}
"""Arguments of datatrove's SlurmPipelineExecutor that `--slurm` takes."""

FINISH = "finish"
"""Name of the last job on a cluster, which publishes."""


@dataclass(frozen=True)
class Stage(ABC):
    """One step of a preparation: a task for each of its keys. The fields of a subclass are its inputs."""

    name: ClassVar[str]

    work: Path
    """The folder in which the tasks of all stages keep what they have finished."""

    @property
    @abstractmethod
    def keys(self) -> list[str]:
        """Make a digest for each task, of everything that its output depends on."""

    @abstractmethod
    def run(self, number: int, folder: Path, progress: Progress | Silence) -> None:
        """Write the output of task `number` into an empty folder."""

    def folder(self, number: int) -> Path:
        """Name the folder of the finished task's output, also before it is there."""
        return self.work / self.name / f"{number:05d}-{self.keys[number][:12]}"

    def pending(self) -> list[int]:
        """List the numbers of the tasks that are still to run."""
        return [number for number in range(len(self.keys)) if not self.folder(number).is_dir()]

    def outputs(self) -> list[Path]:
        """List the folders of all tasks; UserError if one has not finished."""
        if pending := self.pending():
            raise UserError(
                f"{self.work}: {len(pending)} tasks of the stage {self.name!r} have not finished (the first: "
                f"{pending[0]}); run the same command again: only they are repeated"
            )
        return [self.folder(number) for number in range(len(self.keys))]


def run_task(stage: Stage, number: int, progress: Progress | Silence | None = None) -> None:
    """Run one task, unless it has finished. Two processes may run the same one: the first to finish wins."""
    finished = stage.folder(number)
    if finished.is_dir():
        return
    # Two machines may run the same task in a shared folder: each builds in its own.
    part = finished.with_name(f".{finished.name}.{os.uname().nodename}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        stage.run(number, part, progress or Silence())
        # Before the rename: a power cut must not leave a finished name with half-written files.
        for path in [*part.rglob("*"), part]:
            sync_to_disk(path)
        _rename(part, finished)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _rename(part: Path, finished: Path) -> None:
    try:
        part.rename(finished)
    except OSError:
        if not finished.is_dir():  # another process's result is as good as ours
            raise


@dataclass(frozen=True)
class Execution:
    """How to run a preparation."""

    executor: str = "auto"
    workers: int = 0
    """Tasks at once; 0: as many as there are cores (`local`, `ray`: of the cluster), or no limit (`slurm`)."""
    slurm: dict = field(default_factory=dict)
    """Values of `SLURM_KEYS`."""

    def chosen(self, num_pending: int) -> str:
        """Choose for `auto`: this process, unless a stage has many tasks left and there are cores for them."""
        if self.executor != "auto":
            return self.executor
        return "local" if num_pending >= LOCAL_FROM_TASKS and self.num_workers > 1 else "inline"

    @property
    def num_workers(self) -> int:
        """Count the processes on this machine."""
        # Not `cpu_count`: a job of a cluster may use only some of the machine's cores.
        return self.workers or len(os.sched_getaffinity(0))


def read_slurm_options(words: list[str]) -> dict:
    """Read `key=value` words as arguments of the jobs; UserError for one that is unknown or no number."""
    options = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or key not in SLURM_KEYS:
            known = ", ".join(SLURM_KEYS)
            raise UserError(
                f"--slurm {word}: expected KEY=VALUE{nearest(key, SLURM_KEYS)}; there are: {known}"
            )
        try:
            options[key] = SLURM_KEYS[key](value)
        except ValueError as error:
            raise UserError(f"--slurm {word}: {key} takes a whole number") from error
    return options


def _nothing() -> None:
    """Do nothing after a task."""


def run_stages(
    preparation: "Preparation",
    execution: Execution,
    progress: Progress,
    arrived: Callable[[], None] = _nothing,
) -> None:
    """Run the pending tasks of every stage; each stage waits for the one before.

    arrived: is called before the first task of `tokenize`, and after each.
    """
    preparation.reuse_tokenizer()
    for stage in preparation.stages:
        if stage is not preparation.tokenize:
            _run_tasks(preparation, stage, stage.pending(), execution, progress)
    arrived()
    # In waves: how many tasks a portion of a source takes is known once some have been encoded.
    before: list[Path] = []
    while (survey := preparation.survey()).missing:
        bounded = preparation.bounded(survey.bounds)
        folders = [bounded.tokenize.folder(number) for number in survey.missing]
        if folders == before:
            return  # A cluster has run none of them: `finish` says so.
        _run_tasks(bounded, bounded.tokenize, survey.missing, execution, progress, arrived)
        before = folders


def _run_tasks(
    preparation: "Preparation",
    stage: Stage,
    pending: list[int],
    execution: Execution,
    progress: Progress,
    finished: Callable[[], None] = _nothing,
) -> None:
    if not pending:
        return
    progress.label(stage.name)
    executor = execution.chosen(len(pending))
    if executor == "inline":
        for number in pending:
            run_task(stage, number, progress)
            finished()
    else:
        # The other processes read the preparation from the work folder.
        preparation.save()
        (_run_on_ray if executor == "ray" else _run_in_processes)(stage, pending, execution, finished)


def _run_in_processes(
    stage: "Stage", pending: list[int], execution: Execution, finished: Callable[[], None]
) -> None:
    """Run tasks in processes of this machine, each with its share of the cores."""
    from pretraining.data.preparation.workers import run_in_workers

    workers = min(execution.num_workers, len(pending))
    num_threads = max(1, execution.num_workers // workers)
    run_in_workers(stage, pending, workers, num_threads, finished)


def _run_on_ray(
    stage: "Stage", pending: list[int], execution: Execution, finished: Callable[[], None]
) -> None:
    """Run tasks on a Ray cluster, whose nodes share the work folder."""
    from pretraining.data.preparation.ray_cluster import run_on_ray

    run_on_ray(stage, pending, execution.workers, finished)


def submit_to_slurm(preparation: "Preparation", execution: Execution) -> list[str]:
    """Submit an array job for each stage, each after the one before, and a last one that publishes; return the ids."""
    if not execution.slurm.get("partition"):
        raise UserError(
            "--slurm partition=NAME is missing: the partition that the jobs are to run in (see sinfo)"
        )
    preparation.reuse_tokenizer()
    # Of portions the first tasks that are surely needed. The last job runs those that are then still missing.
    survey = preparation.survey()
    preparation = preparation.bounded(survey.bounds)
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
    from datatrove.executor.slurm import SlurmPipelineExecutor

    # datatrove writes the script and reads the answer of sbatch. Its own jobs would load a pickle of the executor.
    # Ours start `workers`, which reads the numbers of the tasks from a file.
    logs = preparation.work / "logs" / name
    settings: dict = {"time": "24:00:00", "qos": None, "env_command": _activating_command()}
    settings |= {"workers": execution.workers or -1, **execution.slurm}  # -1: no limit
    jobs = SlurmPipelineExecutor(
        pipeline=[],
        tasks=len(pending),
        job_name=f"{preparation.data.name}-{name}",
        logging_dir=str(logs),
        **settings,
    )
    write_json(logs / "tasks.json", {"tasks": pending, "tasks_per_job": jobs.tasks_per_job})
    num_jobs = -(-len(pending) // jobs.tasks_per_job)
    largest = num_jobs if jobs.max_array_size == -1 else jobs.max_array_size
    job = None
    for first in range(0, num_jobs, largest):
        words = [sys.executable, "-m", "pretraining.data.preparation.workers", preparation.work, name, first]
        command = shlex.join(["srun", "-l", "-n", "1", *map(str, words)])
        size = min(largest, num_jobs - first)
        script = jobs.get_launch_file_contents(jobs.get_sbatch_args(size), command)
        # afterok: the stage before must succeed. afterany: arrays of one stage only take turns.
        waits = [f"afterok:{after}"] * bool(after) + [f"afterany:{job}"] * bool(job)
        job = _call_sbatch(jobs, script, [f"--dependency={','.join(waits)}"] if waits else [])
    return job


def _activating_command() -> str:
    """Write the shell command that gives a cluster's job this interpreter's packages and this repository."""
    bin_folder = shlex.quote(str(Path(sys.executable).parent))
    return f'export PATH={bin_folder}:"$PATH" PYTHONPATH={shlex.quote(str(REPOSITORY))}:"$PYTHONPATH"'


def _call_sbatch(jobs: "SlurmPipelineExecutor", script: str, options: list[str]) -> str:
    """Give one script to sbatch and return the id of the job; sbatch says on stderr why it refuses a script."""
    from datatrove.executor.slurm import launch_slurm_job

    try:
        return launch_slurm_job(script, jobs.job_id_retriever, *options)
    except FileNotFoundError as error:
        raise UserError(
            "--executor slurm: sbatch is not installed here; run it where jobs are submitted"
        ) from error
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"--executor slurm: sbatch refused the jobs of {jobs.job_name} (its reason is above); change --slurm, "
            "then run the same command again"
        ) from error
