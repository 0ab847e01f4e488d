"""Machines of their own on this one: each has its network, its name, and what else is mounted there. Needs root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Hosts:
    """Network namespaces on one bridge; a command runs on one of them with its own host name and /etc/hosts."""

    def __init__(self, folder: Path, names: list[str]):
        self.names, self.table = names, folder / "hosts"
        self.mark = f"d{os.getpid() % 100_000}"
        self.subnet = f"10.{os.getpid() % 200 + 20}.7"
        lines = [f"{self.address(name)} {name}" for name in names]
        self.table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def address(self, name: str) -> str:
        return f"{self.subnet}.{self.names.index(name) + 1}"

    def space(self, name: str) -> str:
        return f"{self.mark}{name}"

    def on(self, name: str, command: list[str], mounts: dict[Path, Path] | None = None) -> list[str]:
        """The words that run a command there; `mounts` are {folder: what lies there instead on this host}."""
        binds = {Path("/etc/hosts"): self.table, **(mounts or {})}
        script = "".join(f"mount --bind '{source}' '{place}'; " for place, source in binds.items())
        script = f'set -e; hostname {name}; {script}exec "$@"'
        entered = ["ip", "netns", "exec", self.space(name), "unshare", "--uts", "--mount"]
        return [*entered, "sh", "-c", script, "sh", *map(str, command)]

    def cut(self, one: str, other: str) -> None:
        """No packet reaches `other` from `one` any more."""
        _ip("-n", self.space(one), "route", "add", "blackhole", f"{self.address(other)}/32")

    def build(self) -> None:
        bridge = f"{self.mark}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(self.names):
            space, link = self.space(name), f"{self.mark}v{number}"
            _ip("netns", "add", space)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", link, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", space, "link", "set", device, "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self.space(name)], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.mark}b"], capture_output=True)


@contextmanager
def hosts(folder: Path, *names: str) -> Iterator[Hosts | None]:
    """The hosts of these names; None if this system does not let us make them."""
    made = Hosts(folder, list(names))
    try:
        try:
            made.build()
            first = made.on(names[0], ["true"])
            able = subprocess.run(first, capture_output=True).returncode == 0
        except (OSError, subprocess.CalledProcessError):
            able = False
        yield made if able else None
    finally:
        made.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
