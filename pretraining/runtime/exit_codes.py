"""The codes a run ends with, and how a supervisor learns them where the launcher keeps them to itself.

`torchrun` and `accelerate launch` answer 1 for every failure, and `deepspeed` answers 0 where its inner process
was killed. `pretraining.supervise` names a folder in the environment: a rank leaves the code there.
"""

import os
from pathlib import Path

FINISHED = 0
USER_ERROR = 2
"""What one line on stderr says; starting again changes nothing."""
STOPPED = 75
"""Stopped on request with a committed checkpoint (EX_TEMPFAIL): start again to continue."""
HANG = 76
"""No step was completed within `monitors.hang_minutes`: start again to continue."""
INTERRUPTED = 130
"""Ctrl-C, as a shell has it."""
GAVE_UP = 77
"""The run could not heal itself: look before starting again."""

NOT_RESTARTED = (FINISHED, USER_ERROR, STOPPED, GAVE_UP)

SUPERVISOR = "PRETRAINING_SUPERVISOR"
"""Variable: a folder of this machine, shared by a supervisor and the ranks it started."""


def supervisor_file(name: str) -> Path | None:
    """`name` in the supervisor's folder; None where there is no supervisor."""
    folder = os.environ.get(SUPERVISOR)
    return Path(folder) / name if folder else None


def tell_exit_code(code: int) -> None:
    """Leave the code for the supervisor of this machine, if there is one; the first one told counts."""
    path = supervisor_file("exit_code")
    if path is not None:
        try:
            with path.open("x") as file:
                file.write(str(code))
        except OSError:
            return
