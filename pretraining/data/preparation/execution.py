"""Run the stages of a preparation in this process, in processes of this machine, or on a Ray cluster.

SLURM's jobs are in `slurm`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pretraining.data.preparation.stage import Stage, run_task
from pretraining.data.progress import ProgressBar
from pretraining.errors import UserError, nearest

if TYPE_CHECKING:
    from pretraining.data.preparation.plan import Preparation

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
"""What `--slurm` takes; `slurm` has their defaults."""


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

    def chosen(self, num_pending: int) -> str:
        """Choose for `auto`: this process, unless a stage has many tasks left and there are cores for them."""
        if self.executor != "auto":
            return self.executor
        return "local" if num_pending >= LOCAL_FROM_TASKS and self.num_workers > 1 else "inline"

    @property
    def num_workers(self) -> int:
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
        no_limit = key == "max_array_size" and options[key] == -1
        if isinstance(options[key], int) and options[key] < 1 and not no_limit:
            raise UserError(f"--slurm {word}: {key} is at least 1")
    return options


def run_stages(
    preparation: "Preparation",
    execution: Execution,
    progress: ProgressBar,
    arrived: Callable[[], None] = lambda: None,
) -> None:
    """Run the pending tasks of every stage; each stage waits for the one before.

    arrived: is called before the first task of `tokenize`, and after each.
    """
    preparation.reuse_tokenizer()
    for stage in preparation.stages:
        if stage is not preparation.tokenize:
            _run_tasks(preparation, stage, stage.pending(), execution, progress, lambda: None)
    arrived()
    # In waves: how many tasks a portion of a source takes is known once some have been encoded.
    before: list[Path] = []
    while missing := (survey := preparation.survey()).missing:
        bounded = preparation.bounded(survey.bounds)
        folders = [bounded.tokenize.folder(number) for number in missing]
        if folders == before:
            return  # A cluster has run none of them: `finish` says so.
        _run_tasks(bounded, bounded.tokenize, missing, execution, progress, arrived)
        before = folders


def _run_tasks(
    preparation: "Preparation",
    stage: Stage,
    pending: list[int],
    execution: Execution,
    progress: ProgressBar,
    finished: Callable[[], None],
) -> None:
    """Run some tasks of a stage; `finished` is called after each."""
    if not pending:
        return
    progress.label(stage.name)
    executor = execution.chosen(len(pending))
    if executor == "inline":
        for number in pending:
            run_task(stage, number, progress)
            finished()
        return
    # The other processes read the preparation from the work folder.
    preparation.save()
    if executor == "ray":
        from pretraining.data.preparation.ray_cluster import run_on_ray

        return run_on_ray(stage, pending, execution.workers, finished)
    from pretraining.data.preparation.workers import run_in_workers

    # Each process has its share of the cores.
    workers = min(execution.num_workers, len(pending))
    run_in_workers(stage, pending, workers, max(1, execution.num_workers // workers), finished)
