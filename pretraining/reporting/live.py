"""The live report: written by a process of its own, so that training never waits for it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pretraining.reporting.priority import hurry
from pretraining.runtime.run_folder import RunFolder
from pretraining.schema import REPOSITORY

LAST_PAGE_SECONDS = 60.0
"""How long the end of a run waits for its last page."""


@contextmanager
def live_report(run: RunFolder, every_seconds: float | None) -> Iterator[None]:
    """Keep `report.html` fresh while the block runs, and write it once more after it; rank 0 only.

    A block that adds nothing to metrics or events, as a refused run, leaves the page as it was.

    The writer ends with the run, however the run ends: its standard input is a pipe that nobody else holds.
    every_seconds: at most so often; None: no report.
    """
    writer = _start(run, every_seconds) if every_seconds and os.environ.get("RANK", "0") == "0" else None
    try:
        yield
    finally:
        if writer is not None:
            _stop(writer)


def _start(run: RunFolder, every_seconds: float) -> subprocess.Popen | None:
    watched = [str(run.path.resolve()), "--watch", str(every_seconds), "--since", str(time.time())]
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "pretraining.reporting", *watched],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for training; the writer still has the last page to write
        )
    except OSError:  # no memory for a process: a run without a report is still a run
        return None


def _environment() -> dict[str, str]:
    """One thread, and none of what makes a process a rank."""
    ours = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return {**{key: value for key, value in os.environ.items() if key not in dropped}, **ours}


def _stop(writer: subprocess.Popen) -> None:
    hurry(writer.pid)
    try:
        writer.communicate(timeout=LAST_PAGE_SECONDS)
    except (subprocess.TimeoutExpired, OSError):
        writer.kill()
        writer.wait()
