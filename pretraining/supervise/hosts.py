"""The hosts of a `deepspeed --hostfile` command, how the supervisor reaches each of them, and what it does there.

Nothing of the supervisor's environment reaches other hosts by itself, nor do signals and exit codes. So an agent
(`serve`) runs there, at the other end of an ssh connection that notices within a minute that the host is gone. It reads
one word a line:

    stop    ask the ranks here to stop
    kill    kill what the supervisor has started here
    end 60  wait so many seconds until it has ended, kill the rest, answer with the exit code or `none`, and leave
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from pretraining.errors import UserError
from pretraining.outside.files import read_bytes
from pretraining.runtime.exit_codes import GAVE_UP, HANG, STOPPED, SUPERVISOR, USER_ERROR
from pretraining.runtime.installation import WORKPLACE

READY, NO_CODE = "ready", "none"
SECONDS_TO_LEAVE = 60.0  # time that ranks have to save after their launcher is gone


def started_here(folder: Path) -> list[int]:
    """List the processes of this machine that the supervisor with this folder has started, children of children too."""
    # by the environment, which every child inherits: parents may have ended already
    wanted = f"{SUPERVISOR}={folder}".encode()
    started = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to another user
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                started.append(int(process.name))
    return started


def kill_all(folder: Path) -> None:
    """Send SIGKILL to these processes, and to those that they start meanwhile."""
    while processes := started_here(folder):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def end_what_is_left(folder: Path, seconds: float | None = None) -> bool:
    """End ranks that outlived their launcher, killed if still there after `seconds`; return whether there were any."""
    time.sleep(0.1)  # a process that is just being started shows no environment yet
    until = time.monotonic() + (SECONDS_TO_LEAVE if seconds is None else seconds)
    outlived = bool(started_here(folder))
    while started_here(folder) and time.monotonic() < until:
        time.sleep(0.2)
    kill_all(folder)
    return outlived


def told_code(folder: Path) -> int | None:
    told = folder / "exit_code"
    return int(told.read_text()) if told.exists() else None


SSH_OPTIONS = "-o ServerAliveInterval=15 -o ServerAliveCountMax=4 -o ConnectTimeout=10"
"""A host that sends nothing for a minute is gone; ssh itself would wait for hours."""
SECONDS_AFTER_A_LOSS = 10.0  # ranks that wait for a lost host have nothing that they could save
SSH_VARIABLE = "PDSH_SSH_ARGS_APPEND"
VARIABLES_FILE = "DS_ENV_FILE"  # names the file of variables that DeepSpeed sets on each host

VALUES = """hostfile include exclude num_nodes num_gpus master_port master_addr node_rank launcher
    launcher_args enable_each_rank_log autotuning bind_core_list ssh_port venv_script log_level"""
SWITCHES = "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank quiet"
"""Options of the `deepspeed` command, with and without a value (0.19.8)."""
ORDER = (USER_ERROR, GAVE_UP, STOPPED, HANG)  # which counts if hosts differ, and one has not finished


@dataclass
class Hosts:
    """The hosts of a command that DeepSpeed starts through pdsh, and in a start of it the agent on each."""

    typed: list[str]
    options: argparse.Namespace  # those before the script
    script: int  # its place among the words
    slots: dict[str, list[int]]  # the GPUs of each, read once: the file may be edited meanwhile
    agents: dict[str, subprocess.Popen] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)  # {host: the code that a rank told}, after `end`

    @classmethod
    def of(cls, words: list[str], also_one: bool = False) -> "Hosts | None":
        """Return None if this is no such command with a hostfile. A single host is one only if `also_one`."""
        if Path(words[0]).name not in ("deepspeed", "ds"):
            return None
        try:
            options = _parser().parse_args(words[1:])
        except ValueError:
            return None  # DeepSpeed itself says what is wrong
        if options.no_ssh or options.launcher.lower() != "pdsh" or not Path(options.hostfile).is_file():
            return None
        # the words after the script are not the launcher's
        made = cls(words, options, len(words) - len(options.rest) - 1, _chosen_slots(options))
        # DeepSpeed starts a single host's ranks on this machine
        return made if also_one or options.force_multi or len(made.slots) > 1 else None

    def on(self, slots: dict[str, list[int]]) -> list[str]:
        """Return the command for these hosts alone."""
        include = "@".join(f"{host}:{','.join(map(str, numbers))}" for host, numbers in slots.items())
        # the last of two equal options counts; a single host may be another one than this machine
        chosen = [f"--include={include}", "--exclude=", "--num_nodes=-1", "--num_gpus=-1", "--force_multi"]
        script, *rest = self.typed[self.script :]
        # a shell there reads the words again, and DeepSpeed quotes those with a space alone
        rest = [word if " " in word else shlex.quote(word) for word in rest]
        return [*self.typed[: self.script], *chosen, script, *rest]

    def ssh(self, host: str) -> list[str]:
        port = [] if self.options.ssh_port is None else ["-p", str(self.options.ssh_port)]
        # ssh takes the first of two values: what the user wrote for pdsh counts
        typed = shlex.split(os.environ.get(SSH_VARIABLE, ""))
        return ["ssh", "-o", "BatchMode=yes", *typed, *SSH_OPTIONS.split(), *port, "--", host]

    def reach(self, folder: Path) -> None:
        """Start the agents, and leave out who is missing. folder: the supervisor's, of the same name on all hosts."""
        if shutil.which("pdsh") is None:
            what = "pdsh is not installed here, through which DeepSpeed starts its hosts; install it"
            raise UserError(what)
        words = [sys.executable, "-m", "pretraining.supervise.hosts", str(folder)]
        there = f"cd {shlex.quote(str(WORKPLACE))} && exec {shlex.join(words)}"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started = {
            host: subprocess.Popen([*self.ssh(host), there], start_new_session=True, **pipes)
            for host in self.slots
        }
        for host, agent in started.items():
            # the shell there may print lines of its own before
            if any(line.strip() == READY for line in agent.stdout):
                self.agents[host] = agent
            else:
                agent.wait()
                self.missing.append(host)
                del self.slots[host]

    def variables(self, folder: Path, ours: dict[str, str]) -> dict[str, str]:
        """Write a file of variables for all hosts: the user's and ours. Return DeepSpeed's variables that name it."""
        name = os.environ.get(VARIABLES_FILE, ".deepspeed_env")
        files = dict.fromkeys([Path.home() / name, Path(name).absolute()])  # as DeepSpeed looks for them
        lines = [line for file in files if file.is_file() for line in file.read_text().splitlines()]
        lines += [f"{key}={value}" for key, value in ours.items()]
        written = folder / "variables"
        written.write_text("".join(f"{line}\n" for line in lines if line.strip()))
        typed = os.environ.get(SSH_VARIABLE, "")
        return {VARIABLES_FILE: str(written), SSH_VARIABLE: f"{typed} {SSH_OPTIONS}".strip()}

    def send(self, word: str) -> None:
        """Give every agent a word; one that is gone gets none."""
        for agent in self.agents.values():
            with contextlib.suppress(OSError):
                agent.stdin.write(f"{word}\n")
                agent.stdin.flush()

    def watch(self, launcher: subprocess.Popen, say: Callable[[str], None]) -> threading.Thread:
        """Watch the hosts until the launcher's end, in a thread; if one is lost, end the others, which wait for it."""

        def look() -> None:
            while launcher.poll() is None:
                lost = [host for host, agent in self.agents.items() if agent.poll() is not None]
                if lost:
                    rest = ", ".join(host for host in self.agents if host not in lost) or "no other"
                    say(f"{', '.join(lost)} lost; the run is ended on {rest}")
                    self.end(SECONDS_AFTER_A_LOSS)
                    return
                time.sleep(0.2)

        thread = threading.Thread(target=look, name="hosts", daemon=True)
        thread.start()
        return thread

    def end(self, seconds: float = SECONDS_TO_LEAVE) -> None:
        """Have agents end what is left after `seconds`, and collect the codes. A second call does nothing."""
        self.send(f"end {seconds:g}")
        for host, agent in self.agents.items():
            said = [line.strip() for line in agent.stdout]
            agent.wait()
            if said and said[-1] != NO_CODE:
                self.codes[host] = int(said[-1])
        self.agents = {}

    def code(self, launchers: int) -> int:
        """Return what the ranks told, after `end`; else the launcher's own code.

        What a user has to change comes first: the ranks of other hosts fail because of it.
        """
        told = sorted(set(self.codes.values()) & set(ORDER), key=ORDER.index)
        # the first host has rank 0, which ends last
        return told[0] if told else self.codes.get(next(iter(self.slots)), launchers)


def _chosen_slots(options: argparse.Namespace) -> dict[str, list[int]]:
    """Return {host: the numbers of its GPUs} of the file as it is now, as DeepSpeed chooses them."""
    slots = {host: list(range(number)) for host, number in _hosts_in(Path(options.hostfile)).items()}
    typed = options.include or options.exclude  # `beta@gamma:0,2`; no numbers: all
    parts = [part.partition(":") for part in typed.split("@") if part]
    try:
        named = {host: [int(each) for each in numbers.split(",") if each] for host, _, numbers in parts}
    except ValueError:
        what = f"{typed!r}, which the command names, is not HOST:NUMBER,NUMBER@HOST"
        raise UserError(f"{options.hostfile}: {what}") from None
    if unknown := [host for host in named if host not in slots]:
        raise UserError(f"{options.hostfile}: it has no host {unknown[0]}, which the command names")
    if options.include:
        slots = {host: named[host] or every for host, every in slots.items() if host in named}
    else:
        for host, numbers in named.items():
            slots[host] = [each for each in slots[host] if numbers and each not in numbers]
    if options.num_nodes > 0:
        slots = dict(list(slots.items())[: options.num_nodes])
    if options.num_gpus > 0:
        slots = {host: list(range(options.num_gpus)) for host in slots}
    if not (left := {host: numbers for host, numbers in slots.items() if numbers}):
        what = f"{options.hostfile}: no host with a GPU is left to start on; add `NAME slots=NUMBER`"
        raise UserError(what)
    return left


def _hosts_in(path: Path) -> dict[str, int]:
    """Read {host: number of GPUs}."""
    slots: dict[str, int] = {}
    try:
        lines = read_bytes(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = re.match(r"(\S+)\s+slots=(\d+)", line)
        # ssh and pdsh would take other names for options, patterns or files
        if match is None or not re.fullmatch(r"(?:\w[\w.-]*@)?\w[\w.:-]*", match[1], re.ASCII):
            raise UserError(f"{path}: line {number} is not `NAME slots=NUMBER`: {line[:80]!r}")
        if match[1] in slots:
            raise UserError(f"{path}: line {number} names this host twice: {line[:80]}")
        if len(match[2]) > 4:
            raise UserError(f"{path}: line {number}: no host has so many GPUs: {line[:80]}")
        slots[match[1]] = int(match[2])
    return slots


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    """Parse the options of the `deepspeed` command, to find the script and the hosts."""
    parser = _Parser(add_help=False)
    short = {"hostfile": ["-H"], "include": ["-i"], "exclude": ["-e"], "quiet": ["-q"]}
    short["num_gpus"] = ["--num_accelerators"]
    numbers = {"num_nodes", "num_gpus"}
    for name in VALUES.split():
        typed = {"type": int, "default": -1} if name in numbers else {}
        parser.add_argument(f"--{name}", *short.get(name, []), **typed)
    for name in SWITCHES.split():
        parser.add_argument(f"--{name}", *short.get(name, []), action="store_true")
    parser.set_defaults(hostfile="/job/hostfile", include="", exclude="", launcher="pdsh")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


def serve(folder: Path) -> None:
    """Do what the words on standard input ask for, one a line, until `end`."""
    # the machine of the supervisor has the folder already, and the supervisor removes it there
    made = not folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        (folder / "exit_code").unlink(missing_ok=True)
        print(READY, flush=True)
        # ends without `end` if the supervisor or the way to it is gone
        for line in sys.stdin:
            match line.split():
                case ["stop"]:
                    (folder / "STOP").touch()
                case ["kill"]:
                    kill_all(folder)
                case ["end", seconds]:
                    end_what_is_left(folder, float(seconds))
                    code = told_code(folder)
                    print(NO_CODE if code is None else code, flush=True)
                    return
    finally:
        if made:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
