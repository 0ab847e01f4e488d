"""The exit codes of a run, and how a supervisor learns them if the launcher does not pass them on.

`torchrun` and `accelerate launch` exit with 1 for every failure. `deepspeed` exits with 0 if its inner process
was killed. `pretraining.supervise` therefore names a folder in the environment, and a rank writes the code there.
"""

import contextlib
import os
import time
from pathlib import Path

FINISHED = 0
USER_ERROR = 2  # the user has to change something, as one line on stderr says: starting again changes nothing
STOPPED = 75  # stopped on request with a committed checkpoint (EX_TEMPFAIL): start again to continue
HANG = 76  # no step was completed within `monitors.hang_minutes`: start again to continue
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT, as in a shell
GAVE_UP = 77  # the run could not heal itself: look before starting again

NOT_RESTARTED = (FINISHED, USER_ERROR, STOPPED, GAVE_UP)

SUPERVISOR = "PRETRAINING_SUPERVISOR"  # variable: names a folder that a supervisor shares with its ranks here
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", SUPERVISOR)
"""Variables that make a process a rank, or have it report its exit code as one."""


_BEGAN = time.time()


def variables_of_a_helper() -> dict[str, str]:
    """Return the variables of a process that a rank starts beside itself: it is no rank, its end is not the run's."""
    return {key: value for key, value in os.environ.items() if key not in OF_RANKS}


def supervisor_file(name: str) -> Path | None:
    """Return the path of `name` in the supervisor's folder; None if there is no supervisor."""
    folder = os.environ.get(SUPERVISOR)
    return Path(folder) / name if folder else None


def tell_exit_code(code: int) -> None:
    """Write the code for the supervisor of this machine, if there is one. The first code of an attempt counts."""
    if (path := supervisor_file("exit_code")) is None:
        return
    with contextlib.suppress(OSError):
        # of an attempt which the launcher itself has repeated
        if path.stat().st_mtime < _BEGAN:
            path.unlink()
    # "x" fails if another rank was first, from whose code those of later ranks follow, or if the folder is gone
    with contextlib.suppress(OSError), path.open("x") as file:
        file.write(str(code))
