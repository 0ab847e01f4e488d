"""Run the tasks of a stage in processes of this machine.

If one dies, only its task is lost. Python's own pools wait forever for a worker that the kernel killed, most often
because memory ran out.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, forkserver
from pathlib import Path

from pretraining.data.preparation.plan import Preparation
from pretraining.data.preparation.stage import Stage, run_task
from pretraining.errors import UserError

MOST_DEATHS = 3
"""How often the process of one task may be killed; each time the task moves behind all others."""

PRELOADED = ["pretraining.data.preparation.workers", "pyarrow"]
"""Imported once, by the process from which the workers of all stages are forked."""


def run_in_workers(
    stage: Stage,
    numbers: list[int],
    num_workers: int,
    num_threads: int,
    finished: Callable[[], None],
) -> None:
    """Run tasks of a stage of a saved preparation in `num_workers` processes; return when the last one is done.

    finished: is called after each task.

    Raises what a task raised, and UserError if the process of one task is killed again and again. The workers end
    with this process, however it ends.
    """
    # Forked from a clean process: a fork of this one would copy its threads' locks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The fork server ignores Ctrl-C by itself, but only once it has imported what it preloads. So it is started with
    # Ctrl-C ignored; only the main thread may set a signal handler.
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, before)
    else:
        forkserver.ensure_running()
    waiting, deaths, workers = deque(numbers), Counter(), []
    try:
        while waiting or any(worker.number is not None for worker in workers):
            while waiting and len(workers) < num_workers:  # also in the place of those that died
                workers.append(_TaskProcess(context, stage, num_threads))
            for worker in workers:
                if waiting and worker.number is None:
                    worker.give(waiting.popleft())
            for worker in connection.wait([worker for worker in workers if worker.number is not None]):
                if worker.died():
                    workers.remove(worker)
                    deaths[worker.number] += 1
                    report_death(stage, worker.number, worker.end(), deaths[worker.number])
                    # Behind all others: if memory ran out, it may have more room at the end.
                    waiting.append(worker.number)
                else:
                    finished()
    finally:
        for worker in workers:
            worker.end()


def report_death(stage: Stage, number: int, how: str, num_deaths: int) -> None:
    """Say that a task's process was ended, and is run again; UserError if that was once too often."""
    task = f"task {number} of the stage {stage.name!r}"
    if num_deaths == MOST_DEATHS:
        raise UserError(
            f"{task}: its process was ended {MOST_DEATHS} times ({how}); if memory ran out, take fewer --workers; "
            "the same command goes on with what is missing"
        )
    print(f"the process of {task} was ended ({how}): the task is run again", file=sys.stderr, flush=True)


class _TaskProcess:
    """One process, the channel to it, and the number of the task it runs."""

    def __init__(self, context, stage: Stage, num_threads: int):
        self._channel, theirs = context.Pipe()
        given = str(stage.work), stage.name, num_threads, theirs
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        # Else this process would hold the worker's end open, and never see that the worker died.
        theirs.close()
        self.number: int | None = None

    def give(self, number: int) -> None:
        self.number = number
        with suppress(OSError):  # a process that is gone is noticed when its answer is read
            self._channel.send(number)

    def fileno(self) -> int:
        """Return the descriptor for `connection.wait`: it is readable once the process has answered, or died."""
        return self._channel.fileno()

    def died(self) -> bool:
        """Read the answer: False if the task is done, True if the process died; raise what the task raised."""
        try:
            error = self._channel.recv()
        except (EOFError, OSError):
            return True
        if error is not None:
            raise error
        self.number = None
        return False

    def end(self) -> str:
        """End the process and return how it ended."""
        self._process.kill()
        self._process.join()
        self._channel.close()
        code = self._process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _serve(work: str, stage_name: str, num_threads: int, channel) -> None:
    """Live as a worker: numbers of tasks come in, None or an error goes out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal; the parent decides

    def leave_with_parent() -> None:
        # A worker that is in the middle of a task does not read its channel, so a thread watches the parent.
        connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    # Before an encoder is opened: rayon reads it when its threads start.
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    stage = Preparation.load(Path(work)).stage(stage_name)
    with suppress(EOFError, BrokenPipeError):
        while True:
            channel.send(error_of(stage, channel.recv()))


def error_of(stage: Stage, number: int) -> Exception | None:
    """Run one task, and return what it raised, which another process can be sent."""
    try:
        run_task(stage, number)
    except Exception as error:
        # A traceback cannot be pickled: it travels as text.
        error.add_note(f"in a worker:\n{traceback.format_exc()}")
        return error
    return None
