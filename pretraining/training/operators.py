"""DeepSpeed compiles its operators when they are first used; a killed compile must not stop every later run.

torch marks a compile by a file named `lock` in the operator's folder, and waits for it without end
(`torch.utils.file_baton`). SIGKILL leaves that file behind.
"""

import fcntl
import os
import time
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path

import cpuinfo
import torch.utils.cpp_extension as cpp_extension

# Where a lock may belong to a process of another machine, which cannot be seen from here.
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.", "9p", "virtiofs")


def ask_the_processor_once() -> None:
    """DeepSpeed asks py-cpuinfo for the processor's features for every operator, a second each."""
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)


def announce_compiles() -> None:
    """From now on rank 0 says when an operator is compiled or waited for: both take a silent minute."""
    if not hasattr(cpp_extension.load, "__wrapped__"):
        cpp_extension.load = _announced(cpp_extension.load)


def _announced(load: Callable) -> Callable:
    @wraps(load)
    def announced(name: str, *args, **kwargs):
        folder = Path(cpp_extension._get_build_directory(name, False))
        if (folder / "lock").exists():
            _say(f"waiting for another process that compiles in {folder}")
        elif not (folder / f"{name}.so").exists():
            _say(f"compiling DeepSpeed's CPU operators ({name}: about a minute, once)")
        return load(name, *args, **kwargs)

    return announced


def _say(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, flush=True)


def _root() -> Path:
    """Where torch compiles, one folder an operator."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


def clear_abandoned_locks() -> list[Path]:
    """Remove the locks of compiles whose process is gone; returns what was removed.

    A compile keeps its lock file open, so a lock that no process of this machine has open is abandoned. The
    compiler that a killed process leaves behind still writes into the folder: its end is waited for.
    A folder on a network filesystem is left alone: set TORCH_EXTENSIONS_DIR to a local one there.
    """
    root = _root()
    if not any(root.glob("**/lock")) or _filesystem(root).startswith(_NETWORK_FILESYSTEMS):
        return []
    with (root / ".clearing").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        seen = {lock: _identity(lock) for lock in root.glob("**/lock")}
        opened = _links("fd/*")
        # One that was there all the while and that nobody had open; not one made since by another compile.
        abandoned = [
            lock
            for lock, identity in seen.items()
            if identity and str(lock.resolve()) not in opened and _identity(lock) == identity
        ]
        for lock in abandoned:
            _wait_for_compiler(lock.parent)
            lock.unlink(missing_ok=True)
    return abandoned


def _identity(lock: Path) -> tuple[int, int] | None:
    try:
        status = lock.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _wait_for_compiler(folder: Path) -> None:
    """Return once no process works in `folder`, as ninja and the compilers it starts do."""
    said = False
    while str(folder.resolve()) in _links("cwd"):
        if not said:
            _say(f"waiting for the compiler that a killed run left at work in {folder}")
        said = True
        time.sleep(0.2)


def _links(name: str) -> set[str]:
    """Where these links of all processes of this machine, as far as we may look, lead: open files, folders."""
    found = set()
    for link in Path("/proc").glob(f"[0-9]*/{name}"):
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue
    return found


def _filesystem(folder: Path) -> str:
    """Type of the filesystem that holds `folder`: that of the longest mount point above it."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    held = {point: kind for _, point, kind, *_ in mounts if folder.resolve().is_relative_to(point)}
    return held[max(held, key=len)] if held else ""
