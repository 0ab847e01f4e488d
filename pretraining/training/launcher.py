"""The process that started the ranks: a rank that outlives it must not go on unseen, holding the run's folder."""

import os
from functools import cache
from pathlib import Path

# The inner process of the `deepspeed` command, which has no handler for SIGTERM: killed, it leaves this one behind.
_DEEPSPEED_INNER = b"deepspeed.launcher.launch"


def launcher_is_gone() -> bool:
    """Whether a launcher started this process and has ended since the first call. Always False for plain python."""
    return _ancestors() != _current_ancestors()


@cache
def _ancestors() -> tuple[int, ...]:
    """Processes that launched this one, nearest first."""
    return _current_ancestors()


def _current_ancestors() -> tuple[int, ...]:
    if not _launched():
        return ()
    parent = os.getppid()
    inner = _DEEPSPEED_INNER in _command(parent)
    return (parent, _parent_of(parent)) if inner else (parent,)


@cache
def _launched() -> bool:
    """Asked before `join_ranks` sets a launcher's variables for a plain process."""
    return "WORLD_SIZE" in os.environ


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent_of(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0
