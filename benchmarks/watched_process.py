"""A command run to its end, and the most memory that it and its descendants held at once."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from record import REPOSITORY

POLL_SECONDS = 0.05


def run_watched(command: list[str]) -> tuple[str, int]:
    """(what it printed, peak bytes: proportional set size). Ends this process where the command fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=REPOSITORY
        )
        peak, stopped = [0], threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, stopped))
        watcher.start()
        output = process.communicate()[0]
        stopped.set()
        watcher.join()
        errors.seek(0)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed: {errors.read()[-2000:]}")
    return output, peak[0]


def _watch(pid: int, peak: list[int], stopped: threading.Event) -> None:
    while not stopped.is_set():
        peak[0] = max(peak[0], sum(map(memory_of, descendants(pid))))
        time.sleep(POLL_SECONDS)


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(found for child in children for found in descendants(int(child)))]


def memory_of(pid: int) -> int:
    """Bytes, pages that several processes share counted in parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
