"""Where tasks run: in this process, in processes of this machine, or on a cluster through datatrove's executors."""

import os
import subprocess
from typing import Any

from pretraining.data.engine.preparation import Preparation
from pretraining.data.engine.tasks import Stage, run_task
from pretraining.data.execution import Execution
from pretraining.data.packages import require
from pretraining.errors import UserError


def run_stages(preparation: Preparation, execution: Execution) -> None:
    """Run what is still to run of every stage, here; each stage waits for the one before."""
    for stage in preparation.stages():
        pending = stage.pending(preparation.work)
        if not pending:
            continue
        preparation.progress.label(stage.name)
        if execution.chosen(len(pending)) == "inline":
            for number in pending:
                run_task(stage, preparation.work, number)
        else:
            _run_in_processes(preparation, stage, pending, execution)


def _run_in_processes(
    preparation: Preparation, stage: Stage, pending: list[int], execution: Execution
) -> None:
    """The tasks in processes, each with its share of the cores; the first error of a task is raised here."""
    from pretraining.data.engine.datatrove_tasks import StageTask, first_error, quiet_logger

    preparation.save()
    workers = min(execution.num_workers, len(pending))
    os.environ["RAYON_NUM_THREADS"] = str(max(1, execution.num_workers // workers))
    settings = {"logging_dir": str(preparation.work / "logs" / stage.name), "skip_completed": False}
    step = StageTask(str(preparation.work), stage.name, pending, logs=False)
    quiet_logger()
    try:
        _executor(execution.executor)(pipeline=[step], tasks=len(pending), workers=workers, **settings).run()
    except Exception as error:
        raise first_error(stage, preparation.work) or error from error


def _executor(name: str) -> type:
    """datatrove's executor class for processes here (`local`) or on a Ray cluster (`ray`)."""
    if name == "ray":
        require("ray", "--executor ray")
        from datatrove.executor.ray import RayPipelineExecutor

        return RayPipelineExecutor
    from pretraining.data.engine.worker_processes import WorkerProcesses

    return WorkerProcesses


def submit_to_slurm(preparation: Preparation, execution: Execution) -> list[str]:
    """Submit one array job a stage, each after the one before, and a last one that publishes; their job ids."""
    from datatrove.executor.slurm import SlurmPipelineExecutor

    from pretraining.data.engine.datatrove_tasks import (
        FinishTask,
        StageTask,
        activating_command,
        quiet_logger,
    )

    quiet_logger()
    preparation.save()
    steps = [
        (stage.name, StageTask(str(preparation.work), stage.name, pending), len(pending))
        for stage in preparation.stages()
        if (pending := stage.pending(preparation.work))
    ]
    steps.append(("finish", FinishTask(str(preparation.work)), 1))
    settings: dict[str, Any] = {
        "partition": None,
        "time": "24:00:00",
        "qos": None,
        "env_command": activating_command(),
    }
    settings |= {"workers": execution.workers or -1, **execution.slurm}
    if not settings["partition"]:
        raise UserError(
            "--slurm partition=NAME is missing: the partition that the jobs are to run in (see sinfo)"
        )
    previous, ids = None, []
    for name, step, num_tasks in steps:
        previous = SlurmPipelineExecutor(
            pipeline=[step],
            tasks=num_tasks,
            job_name=f"{preparation.data['name']}-{name}",
            logging_dir=str(preparation.work / "logs" / name),
            skip_completed=False,
            depends=previous,
            **settings,
        )
        _submit(previous)
        ids.append(previous.job_id)
    return ids


def _submit(executor) -> None:
    """Hand one stage's jobs to sbatch; it says on stderr why it refuses some."""
    try:
        executor.run()
    except FileNotFoundError as error:
        raise UserError(
            "--executor slurm: sbatch is not installed here; run it where jobs are submitted"
        ) from error
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"--executor slurm: sbatch refused the jobs of {executor.job_name} (its reason is above); change --slurm, "
            "then run the same command again"
        ) from error
