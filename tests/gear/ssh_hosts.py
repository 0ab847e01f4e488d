"""Hosts (hosts.py) that are reached by ssh, with keys of their own: nothing of this machine's ~/.ssh is used."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.gear.hosts import Hosts, hosts

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "pdsh")
SERVER = """
ListenAddress 0.0.0.0
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
"""
CLIENT = """
Host *
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking yes
"""
CLIENT_FILE = Path("/etc/ssh/ssh_config")
SECONDS = 20.0


def installed() -> bool:
    """Are the programs here (Debian: openssh-server openssh-client pdsh), and may we start them?"""
    path = os.environ["PATH"] + ":/usr/sbin"
    return os.geteuid() == 0 and all(shutil.which(name, path=path) for name in PROGRAMS)


class SshHosts:
    """Hosts with an ssh server each.

    A command on one reaches the others by their names. disks: {host: {folder: what is there instead}}.
    """

    def __init__(self, folder: Path, made: Hosts, disks: dict[str, dict[Path, Path]]):
        self.folder, self.hosts, self.disks = folder, made, disks
        folder.mkdir()
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        public = (folder / "host.pub").read_text()
        (folder / "known").write_text("".join(f"{name} {public}" for name in made.names))
        (folder / "server").write_text(SERVER.format(folder=folder))
        (folder / "client").write_text(CLIENT.format(folder=folder))
        Path("/run/sshd").mkdir(exist_ok=True)  # its service would make it at boot
        for name in made.names:
            self.start(name)

    def start(self, name: str) -> None:
        """Start the host's ssh server, and wait until it answers."""
        sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
        # its own processes alone are seen there
        apart = ["unshare", "--pid", "--fork", "--mount-proc"]
        server = [*apart, sshd, "-D", "-f", str(self.folder / "server")]
        log = (self.folder / f"{name}.log").open("w")
        subprocess.Popen(self.words(name, *server), stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + SECONDS
        while True:
            try:
                socket.create_connection((self.hosts.address(name), 22), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < until, (self.folder / f"{name}.log").read_text()
                time.sleep(0.02)

    def words(self, name: str, *command: str) -> list[str]:
        """A command as it is typed there. Each host has its share of the cores."""
        mounts = {CLIENT_FILE: self.folder / "client", **self.disks.get(name, {})}
        cores, number = sorted(os.sched_getaffinity(0)), self.hosts.names.index(name)
        share = ",".join(map(str, cores[number :: len(self.hosts.names)] or cores))
        return [*self.hosts.words(name, mounts), "taskset", "--cpu-list", share, *command]


@contextmanager
def ssh_hosts(folder: Path, *names: str, disks: dict | None = None) -> Iterator[SshHosts | None]:
    """The hosts; None if this system does not let us make them."""
    with hosts(folder, *names) as made:
        yield None if made is None else SshHosts(folder / "ssh", made, disks or {})
