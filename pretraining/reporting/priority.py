"""Whose turn it is at the processor: training's, then the report's."""

import contextlib
import os
from pathlib import Path

LAST = 19
"""The nicest that a process can be."""


def give_way() -> None:
    """The last in line from here on; a session of its own counts as a whole where Linux shares out by session."""
    _set_priority(os.getpid(), LAST)


def hurry(process: int) -> None:
    """In line like everybody: training is over. Without the right to it, where Linux goes by session alone."""
    _set_priority(process, 0)


def _set_priority(process: int, niceness: int) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, niceness)
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(niceness))
