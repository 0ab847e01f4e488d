"""A real SLURM cluster: slurmctld and a slurmd a node, on this machine or on `hosts.py` with names of their own."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.gear.hosts import Hosts
from tests.gear.runs import free_port

WAIT_SECONDS = 180
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "srun")
CONFIGURATION = """
ClusterName=here
SlurmctldHost={controller}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SlurmdTimeout=4
MessageTimeout=3
TCPTimeout=2
KillWait=2
GresTypes=gpu
NodeName={nodes} CPUs={cores} RealMemory=16000 Gres=gpu:1 State=UNKNOWN
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def installed() -> bool:
    """Are SLURM's programs here (Debian: slurmctld slurmd slurm-client), and may we start them?"""
    path = os.environ["PATH"] + ":/usr/sbin"
    return os.geteuid() == 0 and all(shutil.which(name, path=path) for name in PROGRAMS)


class Cluster:
    """A running cluster with the partition `cpu`, whose nodes say that each has one GPU.

    variables: what its commands need. hosts: None: one node, which is this machine; else the first is the controller's.
    """

    def __init__(self, folder: Path, hosts: Hosts | None):
        self.folder, self.hosts = folder, hosts
        controller, *nodes = hosts.names if hosts else ["localhost", "localhost"]
        (folder / "state").mkdir(parents=True)
        # a step's socket is in it, and its path has at most 108 characters
        self.spool = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        values = {"folder": folder, "spool": self.spool, "controller": controller, "nodes": ",".join(nodes)}
        values |= {"controller_port": free_port(), "node_port": free_port()}
        values["cores"] = len(os.sched_getaffinity(0))
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/zero\n")
        path = os.environ["PATH"] + ":/usr/sbin"
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        self._started: list[subprocess.Popen] = []
        self._start(controller, ["slurmctld", "-D"])
        for node in nodes:
            self.start_node(node)

    def start_node(self, name: str) -> None:
        (self.spool / name).mkdir(exist_ok=True)
        self._start(name, ["slurmd", "-D", "-N", name])

    def words(self, *command: str) -> list[str]:
        """A command as it is typed beside the controller."""
        return [*(self.hosts.words(self.hosts.names[0]) if self.hosts else []), *command]

    def output(self, *command: str) -> str:
        variables = {**os.environ, **self.variables}
        return subprocess.run(self.words(*command), env=variables, capture_output=True, text=True).stdout

    def wait_for_nodes(self) -> None:
        """Until every node can take a job."""
        states = {"idle"}
        self.wait(
            lambda: set(self.output("sinfo", "-h", "-N", "-o", "%t").split()) == states, "no idle nodes"
        )

    def wait_for_jobs(self) -> None:
        """Until the queue is empty."""
        self.wait(lambda: not self.output("squeue", "-h").strip(), "jobs do not end")

    def wait(self, reached: Callable[[], bool], complaint: str, pause: float = 0.3) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while not reached():
            if time.monotonic() > until:
                logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
                raise TimeoutError(f"{complaint}\n{logs}")
            time.sleep(pause)

    def stop(self) -> None:
        for process in reversed(self._started):
            process.terminate()
            process.wait()
        shutil.rmtree(self.spool, ignore_errors=True)

    def _start(self, name: str, command: list[str]) -> None:
        words = [*(self.hosts.words(name) if self.hosts else []), *command]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._started.append(subprocess.Popen(words, env={**os.environ, **self.variables}, **silent))


@contextmanager
def cluster(folder: Path, hosts: Hosts | None = None) -> Iterator[Cluster]:
    """A cluster that takes jobs."""
    made = Cluster(folder, hosts)
    try:
        made.wait_for_nodes()
        yield made
    finally:
        made.stop()
