"""Prepare on a SLURM cluster: an array job for each stage, each after the one before, and a last job that publishes.

python -m pretraining.data.preparation.slurm WORK STAGE FIRST       what a job runs, with SLURM_ARRAY_TASK_ID
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pretraining.data.preparation.execution import Execution, run_stages
from pretraining.data.preparation.stage import run_task
from pretraining.data.progress import ProgressBar
from pretraining.data.publishing import preparation_lock
from pretraining.errors import UserError, nearest, one_line_errors
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.installation import PACKAGE

if TYPE_CHECKING:
    from pretraining.data.preparation.plan import Preparation

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
        words = [sys.executable, "-m", "pretraining.data.preparation.slurm", preparation.work, name, first]
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
