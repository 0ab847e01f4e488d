"""Write a run's page again and again until the run is over."""

import select
import signal
import sys
import time
from pathlib import Path

from pretraining.errors import UserError
from pretraining.reporting.analysis import track_record_of
from pretraining.reporting.page_text import page_text, write_page
from pretraining.reporting.payload import page_payload, run_payload
from pretraining.reporting.priority import give_way
from pretraining.reporting.run_record import RunRecord

CLOCK_SECONDS = 0.05
"""The clock of files may lag so far behind the processor's."""


def watch(folder: Path, output: Path, every_seconds: float, since: float = 0.0) -> None:
    """A page at most every `every_seconds`, and not more than a tenth of the time, until standard input ends.

    since: UNIX seconds; the first page comes once the run has written something after it.
    """
    give_way()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for training: the last page comes after its end
    record, is_over, pause = None, False, 0.0
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], pause)[0])
        began = time.monotonic()
        record = _opened(folder, since) if record is None else record.refresh()
        if record is not None:
            _write(record, output, None if is_over else every_seconds)
        pause = max(every_seconds, 9 * (time.monotonic() - began)) if record else min(1.0, every_seconds)


def _opened(folder: Path, since: float) -> RunRecord | None:
    """The run, once it has written something."""
    try:
        record = RunRecord(folder)
    except UserError:
        return None
    return record if record.newest_seconds >= since - CLOCK_SECONDS else None


def _write(record: RunRecord, output: Path, every_seconds: float | None) -> None:
    history = [] if every_seconds else track_record_of(record.run.path.parent, but=record.run.path)
    payload = page_payload(
        [run_payload(record, live=bool(every_seconds), track_record=history)], every_seconds
    )
    try:
        write_page(output, page_text(payload, record.name))
    except OSError:  # a full disk: training says so, and the next page may fit
        return
