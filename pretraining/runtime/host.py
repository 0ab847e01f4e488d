"""Find what this machine offers: memory, cores, free disk space, and a name under which other machines reach it.

A container's limits count if they are lower than the machine's.
"""

import ipaddress
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_NO_LIMIT = 1 << 60  # and more mean no limit: cgroup v1 then reports nearly the largest number, v2 `max`

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable: the network interface that gloo uses. Without it, gloo uses the one that the host's own name leads to."""


def host_memory_bytes() -> int | None:
    """Return the memory of this machine, or the container's limit if that is less; None if neither is known."""
    known = [container_memory_bytes()]
    with suppress(ValueError, OSError):
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(filter(None, known), default=None)


def container_memory_bytes() -> int | None:
    """Return what the control groups allow this process and its neighbours together; None without a limit."""
    # groups are nested: the tightest limit holds
    return min((limit for limit, _ in _memory_limits()), default=None)


def free_memory_bytes() -> int | None:
    """Return the free memory of machine and container, with the kernel's cache of files; None if it is not reported."""
    left = [limit - taken for limit, taken in _memory_limits()]
    return min([*filter(None, [kernel_bytes("MemAvailable")]), *left], default=None)


def kernel_bytes(name: str) -> int | None:
    """Read one entry of /proc/meminfo, such as MemAvailable, SwapTotal or SwapFree; None if it is missing."""
    found = re.search(rf"^{name}: +(\d+) kB$", system_text(_MEMINFO), re.M)
    return int(found[1]) * 1024 if found else None  # meminfo writes kB and means KiB


def is_seen(path: Path) -> bool:
    with suppress(OSError):
        path.stat()
        return True
    return False


def existing_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest folder above it that exists and can be seen."""
    path = path.expanduser().absolute()
    return next(place for place in (path, *path.parents) if is_seen(place))


def unwritable(folder: Path) -> str:
    """Return why nothing can be written there; empty if it can."""
    # by writing: permission bits say nothing of read-only mounts and quotas
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""


def disk_room_bytes(run_folder: Path, continues: bool) -> int:
    """Return the free bytes on the run folder's disk. continues: old checkpoints, to be replaced, count as free."""
    room = shutil.disk_usage(existing_folder(run_folder)).free
    if continues:
        files = [path for path in run_folder.glob("checkpoint-*/**/*") if path.is_file()]
        room += sum(path.stat().st_size for path in files)
    return room


def cores() -> float:
    """Return the number of cores that this process may use: its affinity, or its container's quota if that is less."""
    # macOS has no sched_getaffinity
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [float(bound)]
    for folder, name in _groups("cpu", "cpu.max", "cpu.cfs_quota_us"):
        # v2 has `quota period` in one file, v1 has two files
        if name == "cpu.max":
            quota, _, period = system_text(folder / name).partition(" ")
        else:
            quota, period = system_text(folder / name), system_text(folder / "cpu.cfs_period_us")
        # without a quota, v2 has the word max and v1 has -1: neither is a number
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits)


def system_text(path: Path) -> str:
    """Read a file of /proc or /sys; an empty string if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes taken) of each control group with a limit. Cached files that can be dropped do not count."""
    for folder, name in _groups("memory", "memory.max", "memory.limit_in_bytes"):
        limit = _whole(folder / name)
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _whole(folder / ("memory.current" if name == "memory.max" else "memory.usage_in_bytes")) or 0
        # v1 has two such lines: for the group alone, and as `total_` with the groups below it
        files = re.findall(r"inactive_file (\d+)$", system_text(folder / "memory.stat"), re.M)
        yield limit, max(0, used - max(map(int, files), default=0))


def _groups(controller: str, file: str, file_of_v1: str) -> Iterator[tuple[Path, str]]:
    """Yield the folders of this process's control groups for `controller`, up to the root, with the file to read."""
    for line in system_text(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        # v2 has one line without controllers; "unified" is its folder beside v1
        if not controllers:
            roots, name = (_CGROUPS, _CGROUPS / "unified"), file
        elif controller in controllers.split(","):
            roots, name = (_CGROUPS / controllers, _CGROUPS / controller), file_of_v1
        else:
            continue
        # In a container the root is often the process's own group, whatever path /proc gives.
        for root in dict.fromkeys(roots):
            own = root / path.lstrip("/")
            yield from ((folder, name) for folder in (own, *own.parents) if folder.is_relative_to(root))


def _whole(path: Path) -> int | None:
    text = system_text(path)
    return int(text) if text.isdigit() else None


def loopback_name() -> str | None:
    """Return this host's own name if gloo would listen under it at a loopback address; None if all is well.

    Gloo takes the first address of the name that this host can listen on, and the loopback address if there is none
    (torch 2.13, `ProcessGroupGloo::createDefaultDevice`). On Debian and Ubuntu, /etc/hosts maps the name to 127.0.1.1.
    """
    if os.environ.get(GLOO_INTERFACE):
        return None
    usable = own_address()
    outside = usable is not None and not ipaddress.ip_address(usable.partition("%")[0]).is_loopback
    return None if outside else socket.gethostname()


def own_address() -> str | None:
    """Return the first address of this host's own name on which it can listen; None if there is none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, *_, address in found:
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            return address[0]
    return None
