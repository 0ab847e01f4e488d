"""What this machine has for its processes: memory, cores, room on a disk (less, if its container says so), and a name
under which other machines reach it.
"""

import ipaddress
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_NO_LIMIT = 1 << 60
"""A container without a limit reports a number near the largest there is (cgroup v1) or the word max (v2)."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The network interface that gloo listens on; without it, the one to which the host's own name leads."""


def host_memory_bytes() -> int | None:
    """Memory of this machine, or what its container allows if that is less; None if neither is said."""
    return min(filter(None, (_physical_bytes(), container_memory_bytes())), default=None)


def container_memory_bytes() -> int | None:
    """What the control groups around this process allow it and its neighbours together; None without a limit."""
    return min((limit for limit, _ in _memory_limits()), default=None)


def free_memory_bytes() -> int | None:
    """Memory that can still be taken: of the machine, and of the container; None if the system does not say.

    What the kernel keeps of files counts as free.
    """
    left = [limit - taken for limit, taken in _memory_limits()]
    return min([*filter(None, [kernel_bytes("MemAvailable")]), *left], default=None)


def kernel_bytes(name: str) -> int | None:
    """An entry of /proc/meminfo, as MemAvailable, SwapTotal or SwapFree; None if there is none."""
    found = re.search(rf"^{name}: +(\d+) kB$", system_text(_MEMINFO), re.M)
    return int(found[1]) * 1024 if found else None


def is_seen(path: Path) -> bool:
    """Whether it is there and no folder above it is closed to us (`Path.exists` raises then)."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def existing_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there already and can be seen."""
    path = path.expanduser().absolute()
    return next(place for place in (path, *path.parents) if is_seen(place))


def disk_room_bytes(run_folder: Path, continues: bool) -> int:
    """Free bytes on the disk on which the run folder lies or will lie.

    continues: the checkpoints that are there make room for those to come, and count as free.
    """
    own = [path for path in run_folder.glob("checkpoint-*/**/*") if path.is_file()] if continues else []
    free = shutil.disk_usage(existing_folder(run_folder)).free
    return free + sum(path.stat().st_size for path in own)


def cores() -> float:
    """Cores that this process may use: of those it is bound to, what its container's quota leaves."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(bound), *_quotas()])


def system_text(path: Path) -> str:
    """What a file of /proc or /sys says; nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _quotas() -> Iterator[float]:
    """Cores' worth of time a second: `quota period` in one file (v2), or a file each (v1)."""
    for folder, name in _groups("cpu", "cpu.max", "cpu.cfs_quota_us"):
        if name == "cpu.max":
            quota, _, period = system_text(folder / name).partition(" ")
        else:
            quota, period = system_text(folder / name), system_text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes taken without those of files that can be given back) of each control group that has a limit."""
    for folder, name in _groups("memory", "memory.max", "memory.limit_in_bytes"):
        limit = _whole(folder / name)
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _whole(folder / ("memory.current" if name == "memory.max" else "memory.usage_in_bytes")) or 0
        # v1 says it twice, for the group alone and, `total_`, with those below it
        files = re.findall(r"inactive_file (\d+)$", system_text(folder / "memory.stat"), re.M)
        yield limit, max(0, used - max(map(int, files), default=0))


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _groups(controller: str, file: str, file_of_v1: str) -> Iterator[tuple[Path, str]]:
    """The folders of this process's control groups for `controller`, up to the root, each with the file to read.

    In a container the root is often the process's own group, whatever /proc says of its path.
    """
    for line in system_text(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots, name = (_CGROUPS, _CGROUPS / "unified"), file
        elif controller in controllers.split(","):
            roots, name = (_CGROUPS / controllers, _CGROUPS / controller), file_of_v1
        else:
            continue
        for root in dict.fromkeys(roots):
            own = root / path.lstrip("/")
            yield from ((folder, name) for folder in (own, *own.parents) if folder.is_relative_to(root))


def _whole(path: Path) -> int | None:
    text = system_text(path)
    return int(text) if text.isdigit() else None


def loopback_name() -> str | None:
    """This host's own name if gloo would listen under it where no other host can reach it; None if all is well.

    Gloo takes the first address of the name that this host can listen on, and the loopback address if there is none
    (torch 2.13, `ProcessGroupGloo::createDefaultDevice`). On Debian and Ubuntu, /etc/hosts gives the name to 127.0.1.1.
    """
    if os.environ.get(GLOO_INTERFACE):
        return None
    usable = own_address()
    outside = usable is not None and not ipaddress.ip_address(usable.partition("%")[0]).is_loopback
    return None if outside else socket.gethostname()


def own_address() -> str | None:
    """The first address of this host's own name on which it can listen; None if it has none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return next((address[0] for family, *_, address in found if _can_listen(family, address)), None)


def _can_listen(family: int, address: tuple) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
    except OSError:
        return False
    return True
