"""The process that started the ranks: a rank that outlives it must not go on unseen, holding the run's folder."""

import os
from functools import cache
from pathlib import Path

from pretraining.command_line import ranks_here
from pretraining.runtime.heartbeat import process_fields

# The inner process of the `deepspeed` command, which has no handler for SIGTERM: killed, it leaves this one behind.
_DEEPSPEED_INNER = b"deepspeed.launcher.launch"


def launcher_is_gone() -> bool:
    """Whether a launcher started this process and has ended since the first call. Always False for plain python."""
    return _ancestors() != _current_ancestors()


@cache
def _ancestors() -> tuple[int, ...]:
    """Processes that launched this one, nearest first."""
    return _current_ancestors()


def sibling_is_gone() -> bool:
    """Whether the launcher has fewer processes left than it started here: then it is ending what is left of a crash."""
    if not _launched() or launcher_is_gone():
        return False
    return len(_living_children(os.getppid())) < ranks_here()


def _living_children(process: int) -> list[int]:
    """Of all its threads, without those that have ended: a zombie has no command."""
    children = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children += [int(child) for child in path.read_text().split()]
        except OSError:
            continue
    return [child for child in children if _command(child)]


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
    fields = process_fields(process)
    return int(fields[1]) if fields else 0
