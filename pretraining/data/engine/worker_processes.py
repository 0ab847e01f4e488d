"""datatrove's executor for this machine, with workers each of which may die and take no more than its task along.

Its own pool waits for ever for what a worker was doing that the kernel killed, most often for want of memory.
"""

import copy
import os
import signal
import sys
import threading
import traceback
from collections import Counter, deque
from contextlib import suppress

import multiprocess
from datatrove.executor.local import LocalPipelineExecutor
from multiprocess import connection, forkserver

from pretraining.errors import UserError

MOST_DEATHS = 3
"""So often may the process of one task be killed; each time the task is put behind all others."""

PRELOADED = ["pretraining.data.engine.datatrove_tasks", "pyarrow"]
"""Imported once, by the process from which the workers of all stages are forked."""


class WorkerProcesses(LocalPipelineExecutor):
    """Runs every rank in one of `workers` processes.

    `run` raises what a task raised, and UserError where the process of one task is killed again and again. The
    workers end with this process, however it ends.
    """

    def run(self) -> None:
        """Run all ranks; returns when the last one is done."""
        self._launched = True
        context = multiprocess.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        _start_forkserver()
        waiting, deaths, workers = deque(range(self.tasks)), Counter(), []
        try:
            while waiting or any(worker.rank is not None for worker in workers):
                self._hand_out(waiting, workers, context)
                for worker in _answering(workers):
                    if worker.died():
                        workers.remove(worker)
                        deaths[worker.rank] += 1
                        self._put_back(worker, deaths[worker.rank], waiting)
        finally:
            for worker in workers:
                worker.end()

    def _hand_out(self, waiting: deque, workers: list, context) -> None:
        """A rank for every idle worker; new workers in the place of those that died."""
        while waiting and len(workers) < self.workers:
            workers.append(Worker(self, context))
        for worker in workers:
            if waiting and worker.rank is None:
                worker.give(waiting.popleft())

    def _put_back(self, worker: "Worker", num_deaths: int, waiting: deque) -> None:
        step, how = self.pipeline[0], worker.end()
        task = f"task {step.numbers[worker.rank]} of the stage {step.stage!r}"
        if num_deaths == MOST_DEATHS:
            raise UserError(
                f"{task}: its process was ended {MOST_DEATHS} times ({how}); if memory ran out, take fewer --workers; "
                "the same command goes on with what is missing"
            )
        print(f"the process of {task} was ended ({how}): the task is run again", file=sys.stderr, flush=True)
        waiting.append(worker.rank)


def _start_forkserver() -> None:
    """Deaf to Ctrl-C from its birth, as it is once it has imported what it preloads."""
    if threading.current_thread() is not threading.main_thread():
        return forkserver.ensure_running()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


class Worker:
    """One process, the channel to it, and the rank it has been given."""

    def __init__(self, executor: WorkerProcesses, context):
        self._channel, theirs = context.Pipe()
        threads = os.environ.get("RAYON_NUM_THREADS")
        self._process = context.Process(target=_serve, args=(executor, theirs, threads), daemon=True)
        self._process.start()
        theirs.close()
        self.rank: int | None = None

    def give(self, rank: int) -> None:
        """Have it run a rank. A process that is gone already is found out when its answer is read."""
        self.rank = rank
        with suppress(OSError):
            self._channel.send(rank)

    def fileno(self) -> int:
        """For `connection.wait`: readable where the process has answered, or died."""
        return self._channel.fileno()

    def died(self) -> bool:
        """Read the answer: False for a rank that is done; raises what the task raised."""
        try:
            error = self._channel.recv()
        except (EOFError, OSError):
            return True
        if error is not None:
            raise error
        self.rank = None
        return False

    def end(self) -> str:
        """End the process; how it ended."""
        self._process.kill()
        self._process.join()
        self._channel.close()
        code = self._process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _answering(workers: list[Worker]) -> list[Worker]:
    """Those busy ones that have something to say; waits for the first."""
    return connection.wait([worker for worker in workers if worker.rank is not None])


def _serve(executor: WorkerProcesses, channel, threads: str | None) -> None:
    """A worker's life: ranks in, None or an error out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal; the parent decides
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if threads is not None:
        os.environ["RAYON_NUM_THREADS"] = threads
    with suppress(EOFError, BrokenPipeError):
        while True:
            channel.send(_error_of(copy.deepcopy(executor), channel.recv()))


def _leave_with_parent() -> None:
    connection.wait([multiprocess.parent_process().sentinel])
    os._exit(1)


def _error_of(executor: WorkerProcesses, rank: int) -> Exception | None:
    try:
        executor._run_for_rank(rank)
    except Exception as error:
        error.add_note(f"in a worker:\n{traceback.format_exc()}")
        return error
    return None
