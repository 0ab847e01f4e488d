"""Machines of their own on this one: each has its network, its name, and what else is mounted there. Needs root."""

import ctypes
import hashlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

NEW_MOUNTS, NEW_NAMES = 0x00020000, 0x04000000
BIND, PRIVATE = 0x1000, 0x4000 | 0x40000
"""Flags of clone(2) and mount(2)."""


class Hosts:
    """Network namespaces on one bridge, each with a host name and /etc/hosts of its own; a process enters one."""

    def __init__(self, folder: Path, names: list[str]):
        self.names, self.table = names, folder / "hosts"
        digest = hashlib.blake2b(str(folder).encode(), digest_size=3)  # the same in every process of a test
        self.mark, self.subnet = f"d{digest.hexdigest()}", f"10.{digest.digest()[0]}.{digest.digest()[1]}"
        self.outside = f"{self.subnet}.254"
        """Where the hosts reach what runs on this machine outside them."""
        lines = [f"{self.address(name)} {name}" for name in names]
        self.table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def address(self, name: str) -> str:
        return f"{self.subnet}.{self.names.index(name) + 1}"

    def space(self, name: str) -> str:
        return f"{self.mark}{name}"

    def enter(self, name: str, mounts: dict[Path, Path]) -> None:
        """Move this process there; `mounts` are {folder: what lies there instead}. It must have one thread."""
        enter_space(Path("/run/netns", self.space(name)))
        _system("unshare", NEW_NAMES | NEW_MOUNTS)
        socket.sethostname(name)
        _system("mount", b"none", b"/", None, PRIVATE, None)
        for place, source in {Path("/etc/hosts"): self.table, **mounts}.items():
            _system("mount", os.fsencode(source), os.fsencode(place), None, BIND, None)

    def words(self, name: str, mounts: Mapping[Path, Path] = MappingProxyType({})) -> list[str]:
        """What comes before a command that is to run there; its folders are this machine's, but for these."""
        places = {Path("/etc/hosts"): self.table, **mounts}
        binds = "".join(f"mount --bind {source} {place}; " for place, source in places.items())
        arrive = f'hostname {name}; {binds}exec "$@"'
        space = f"--net=/run/netns/{self.space(name)}"
        return ["nsenter", space, "unshare", "--uts", "--mount", "sh", "-c", arrive, name]

    def pull_plug(self, name: str) -> None:
        """The host is gone in one moment: no packet says goodbye, and what ran there has ended."""
        _ip("-n", self.space(name), "link", "set", "eth0", "down")
        self._kill(name)

    def plug_in(self, name: str) -> None:
        """The host is back, and nothing runs there."""
        _ip("-n", self.space(name), "link", "set", "eth0", "up")

    def _kill(self, name: str) -> None:
        listing = ["ip", "netns", "pids", self.space(name)]
        while processes := subprocess.run(listing, capture_output=True, text=True).stdout.split():
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            time.sleep(0.01)

    def cut(self, one: str, other: str) -> None:
        """No packet reaches `other` from `one` any more."""
        _ip("-n", self.space(one), "route", "add", "blackhole", f"{self.address(other)}/32")

    def build(self) -> None:
        bridge = f"{self.mark}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        _ip("addr", "add", f"{self.outside}/24", "dev", bridge)
        for number, name in enumerate(self.names):
            space, link = self.space(name), f"{self.mark}v{number}"
            _ip("netns", "add", space)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", link, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", space, "link", "set", device, "up")

    def remove(self) -> None:
        for number, name in enumerate(self.names):
            self._kill(name)
            # the network itself may outlive its name, until its last connection is given up
            subprocess.run(["ip", "link", "del", f"{self.mark}v{number}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", self.space(name)], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.mark}b"], capture_output=True)


@contextmanager
def hosts(folder: Path, *names: str) -> Iterator[Hosts | None]:
    """The hosts of these names; None if this system does not let us make them."""
    made = Hosts(folder, list(names))
    try:
        try:
            made.build()
            able = True
        except (OSError, subprocess.CalledProcessError):
            able = False
        yield made if able else None
    finally:
        made.remove()


def enter_space(namespace: Path) -> None:
    """Move this process, which must have one thread, to a namespace."""
    with namespace.open() as opened:
        _system("setns", opened.fileno(), 0)


def _system(call: str, *arguments) -> None:
    """A call of the C library that Python 3.11 has no name for."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, call)(*arguments):
        raise OSError(ctypes.get_errno(), call)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
