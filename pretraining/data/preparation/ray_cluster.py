"""Run the tasks of a stage on a Ray cluster, whose nodes share the work folder and this repository.

Ray itself would start a lost task again at once, in the place where memory ran out. Here it moves behind all others,
as with the processes of one machine, and a task that ends its process again and again is named.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretraining.data.preparation.plan import Preparation
from pretraining.data.preparation.stage import Stage
from pretraining.data.preparation.workers import error_of, report_death
from pretraining.errors import UserError, require
from pretraining.schema import REPOSITORY

SEEN_WITHIN_SECONDS = 30.0
"""How long a shared disk may take to show here what another node has written."""


def run_on_ray(stage: Stage, numbers: list[int], workers: int, finished: Callable[[], None]) -> None:
    """Run tasks of a stage of a saved preparation on the cluster at RAY_ADDRESS, else on one that Ray starts here.

    workers: tasks at once; 0: one for each core of the cluster. finished: is called after each task.

    Raises what a task raised, and UserError if there is no cluster, if the process of one task is ended again and
    again, or if a node does not share the work folder.
    """
    ray = require("ray", "--executor ray")
    # Once for all stages: idle workers keep what they have imported. Ray ends the tasks of a process that leaves.
    if not ray.is_initialized():
        _connect(ray)
    # More than one core a task, if the cluster has more than there are tasks.
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    threads = max(1, min(sum(cores) // len(numbers), max(cores, default=1)))
    task = ray.remote(max_retries=0, num_cpus=threads)(_run_on_node)
    at_once = workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
    waiting, deaths, running = deque(numbers), Counter(), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number = waiting.popleft()
            running[task.remote(str(stage.work), stage.name, number, threads)] = number
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
                raise UserError(
                    f"--executor ray: {host} has run a task, and {stage.folder(number)} is not here: all nodes must "
                    "share the folder of --data_dir"
                )
            time.sleep(0.1)
        finished()


def _connect(ray: Any) -> None:
    settings = {"log_to_driver": False, "include_dashboard": False, "logging_level": "error"}
    # Also of nodes that were started elsewhere: the folder is the same on all of them.
    variables = {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    }
    try:
        ray.init(**settings, runtime_env={"env_vars": variables})
    except (ConnectionError, RuntimeError, ValueError) as error:
        address = os.environ.get("RAY_ADDRESS")
        where = (
            f"no cluster answers at RAY_ADDRESS={address}" if address else "no cluster can be started here"
        )
        raise UserError(
            f"--executor ray: {where} ({error}); start one with `ray start --head`, or correct the variable"
        ) from error


def _run_on_node(work: str, stage_name: str, number: int, threads: int) -> tuple[str, Exception | None]:
    """Run one task on a node; returns the node's name, and what the task raised."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    return os.uname().nodename, error_of(Preparation.load(Path(work)).stage(stage_name), number)
