"""What the supervisor runs on each host: it passes a stop on, ends what is left, and names the exit code of a rank.

`pretraining.supervise` starts it through ssh on every host of `deepspeed --hostfile`. It reads one word a line:

    stop    ask the ranks here to stop
    kill    kill what the supervisor has started here
    end 60  wait so many seconds until it has ended, kill the rest, answer with the exit code or `none`, and leave
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from pretraining.runtime.exit_codes import SUPERVISOR

READY, NO_CODE = "ready", "none"
SECONDS_TO_LEAVE = 60.0
"""Time that ranks have to save after their launcher is gone."""


def started_here(folder: Path) -> list[int]:
    """List the processes of this machine that the supervisor with this folder has started, children of children too."""
    # by the environment, which every child inherits: parents may have ended already
    wanted = f"{SUPERVISOR}={folder}".encode()
    started = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                started.append(int(process.name))
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
    return started


def kill_all(folder: Path) -> None:
    """Send SIGKILL to these processes, and to those that they start meanwhile."""
    while processes := started_here(folder):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def end_what_is_left(folder: Path, seconds: float | None = None) -> bool:
    """End ranks that outlived their launcher; return whether there were any.

    They save and leave when they notice; those that are still there after `seconds` are killed.
    """
    time.sleep(0.1)  # a process that is just being started shows no environment yet
    until = time.monotonic() + (SECONDS_TO_LEAVE if seconds is None else seconds)
    outlived = bool(started_here(folder))
    while started_here(folder) and time.monotonic() < until:
        time.sleep(0.2)
    kill_all(folder)
    return outlived


def told_code(folder: Path) -> int | None:
    """Return the exit code that a rank of this machine has told; None if none has."""
    told = folder / "exit_code"
    return int(told.read_text()) if told.exists() else None


def main(folder: Path) -> None:
    # the machine of the supervisor has the folder already, and the supervisor removes it there
    made = not folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        (folder / "exit_code").unlink(missing_ok=True)
        print(READY, flush=True)
        # ends without `end` if the supervisor or the way to it is gone
        for line in sys.stdin:
            match line.split():
                case ["stop"]:
                    (folder / "STOP").touch()
                case ["kill"]:
                    kill_all(folder)
                case ["end", seconds]:
                    end_what_is_left(folder, float(seconds))
                    code = told_code(folder)
                    print(NO_CODE if code is None else code, flush=True)
                    return
    finally:
        if made:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
