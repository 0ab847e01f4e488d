"""The live report: a process of its own writes the page while a run trains, so that training never waits for it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretraining.errors import UserError
from pretraining.reporting.analysis import track_record_beside
from pretraining.reporting.page import page_payload, page_text, run_payload, write_page
from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.durable_files import file_state
from pretraining.runtime.exit_codes import variables_of_a_helper
from pretraining.runtime.installation import PACKAGE
from pretraining.runtime.run_folder import RunFolder

LAST_PAGE_SECONDS = 60.0
"""How long the end of a run waits for its last page."""
CLOCK_SECONDS = 0.05
"""The clock of files may lag this far behind the processor's."""
LAST = 19
"""The lowest priority that a process can have."""


@contextmanager
def live_report(run: RunFolder, every_seconds: float | None) -> Iterator[None]:
    """Keep `report.html` fresh while the block runs, and write it once more after it; on rank 0 only.

    A block that adds nothing to metrics or events, such as a refused run, leaves the page as it was. The writer ends
    with the run, however the run ends: its standard input is a pipe that no other process holds. every_seconds:
    shortest time between two pages; None for no report.
    """
    is_wanted = every_seconds and os.environ.get("RANK", "0") == "0"
    writer = start_writer(run, every_seconds) if is_wanted else None
    before = file_state(run.events)
    try:
        yield
    finally:
        if writer is not None:
            if file_state(run.events) == before:
                # A refused run: its error must be printed before the launcher ends this rank because of the others.
                writer.kill()
            # Training is over. A user may not raise the priority of a process, but may raise that of a session.
            set_priority(writer.pid, 0)
            try:
                # The writer sleeps until its standard input ends, which `communicate` closes.
                writer.communicate(timeout=LAST_PAGE_SECONDS)
            except (subprocess.TimeoutExpired, OSError):
                writer.kill()
                writer.wait()


def start_writer(run: RunFolder, every_seconds: float) -> subprocess.Popen | None:
    """Start the process that writes the pages; None if there is no memory for it: a run without a report is a run."""
    watched = [str(run.path.resolve()), "--watch", str(every_seconds), "--since", str(time.time())]
    # PYTHONPATH: train.py may have been started from any folder. One thread: the others are training's.
    ours = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)}
    with contextlib.suppress(OSError):
        return subprocess.Popen(
            [sys.executable, "-m", "pretraining.reporting", *watched],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**variables_of_a_helper(), **ours},
            start_new_session=True,  # Ctrl-C is for training; the writer still has the last page to write
        )
    return None


def watch(folder: Path, output: Path, every_seconds: float, since: float = 0.0) -> None:
    """Write a page at most every `every_seconds`, in at most a tenth of the time, until standard input ends.

    since: UNIX seconds; the first page is written after the run has written something later than this.
    """
    set_priority(os.getpid(), LAST)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are meant for training; the last page follows its end
    record, is_over, pause = None, False, 0.0
    while not is_over:
        # wakes at once if the run ends: standard input is then readable
        is_over = bool(select.select([sys.stdin], [], [], pause)[0])
        began = time.monotonic()
        if record is None:
            with contextlib.suppress(UserError):
                record = RunRecord(folder)
                # until the run has begun there is nothing to show, and the folder may be somebody else's
                begun = record.run.recipe.exists() and record.newest_seconds >= since - CLOCK_SECONDS
                record = record if begun else None
        else:
            record.refresh()
        if record is not None:
            # Other runs are read only for the last page, because that takes time.
            history = track_record_beside(record.run.path) if is_over else []
            shown = [run_payload(record, live=not is_over, track_record=history)]
            page = page_text(page_payload(shown, None if is_over else every_seconds), record.name)
            with contextlib.suppress(OSError):  # a full disk: training reports it, and the next page may fit
                write_page(output, page)
        # nine times as long as it wrote: a page of a long run takes seconds
        pause = max(every_seconds, 9 * (time.monotonic() - began)) if record else min(1.0, every_seconds)


def set_priority(process: int, niceness: int) -> None:
    """Set the priority of a process and of its session: with autogroups Linux shares processors out by session."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, niceness)
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(niceness))
