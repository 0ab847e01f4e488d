"""Start a run again when it crashes or hangs, under any launcher, and return the exit code of the run itself.

    python -m pretraining.supervise -- deepspeed --num_gpus=8 train.py --recipe 30b
    python -m pretraining.supervise --min_hosts 15 -- deepspeed --hostfile hosts.txt train.py --recipe 30b

A request to stop (SIGTERM, SIGUSR1, SIGINT) goes to the ranks themselves, past the launcher and its 30 seconds.
The hosts of DeepSpeed's hostfile are looked after too (`hosts.py`).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from pretraining.command_line import OneLineParser, not_negative_integer, positive_integer, positive_number
from pretraining.errors import UserError
from pretraining.runtime.exit_codes import FINISHED, HANG, NOT_RESTARTED, STOPPED, SUPERVISOR
from pretraining.runtime.processes import ASKING, RESTART, SAME_REQUEST_SECONDS, STARTED
from pretraining.supervise.hosts import Hosts, end_what_is_left, kill_all, told_code

EXAMPLES = """examples:
  python -m pretraining.supervise -- deepspeed --num_gpus=8 train.py --recipe 30b
  python -m pretraining.supervise --restarts 3 --within_hours 1 -- python train.py --recipe tiny
  python -m pretraining.supervise --restarts 0 -- torchrun --nproc_per_node=8 train.py --recipe 30b
  python -m pretraining.supervise --min_hosts 15 -- deepspeed --hostfile hosts.txt train.py --recipe 30b

exit codes: 0 finished, 2 user error, 75 stopped on request with a committed checkpoint, 76 hang, 77 healing gave up;
anything else is a crash. A crash and 76 are started again. Several machines: one supervisor on each; for `deepspeed
--hostfile`, one where the command is typed."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
CRASH = 1
MEET_ANEW = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable of torchrun, without which nodes that stay look for the ranks' store on a first node that may be gone
(upstream/torchrun.py)."""
OPEN_COMMAND = (sys.executable, "-m", "pretraining.meeting_point", "--open")
"""Finds a meeting that is not over, in a process of its own: it imports torch."""


def main(arguments: list[str] | None = None) -> int:
    what = "Start a run again when it crashes or hangs."
    parser = OneLineParser("python -m pretraining.supervise", description=what, epilog=EXAMPLES)
    add = parser.add_argument
    what = "at most so many (default: 10) ..."
    add("--restarts", type=not_negative_integer, default=10, metavar="N", help=what)
    add("--within_hours", type=positive_number, default=24.0, metavar="HOURS", help="... in this time (24)")
    what = "with `deepspeed --hostfile`: start without hosts that do not answer, if N answer "
    add("--min_hosts", type=positive_integer, metavar="N", help=f"{what}(default: all must)")
    add("command", nargs="+", metavar="COMMAND", help="after --: a launcher and train.py")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="supervise_", ignore_cleanup_errors=True) as folder:
        supervisor = Supervisor(options.command, Path(folder), min_hosts=options.min_hosts)
        starts: list[float] = []
        while True:
            # not time.time(): a clock that is set back must not allow more starts
            starts.append(time.monotonic())
            code = supervisor.run(len(starts) - 1)
            recent = [when for when in starts if when > time.monotonic() - options.within_hours * 3600]
            # a run that was asked to stop may still crash on the way: it is not started again
            if supervisor.asked or code in NOT_RESTARTED:
                return code
            if len(recent) > options.restarts:
                times = f"started {len(recent)} times in {options.within_hours:g} hours"
                _say(f"exit code {code}; {times}: no more")
                return code
            # doubles with each start: 5, 10, 20 ... seconds
            pause = min(FIRST_PAUSE_SECONDS * 2 ** (len(recent) - 1), LONGEST_PAUSE_SECONDS)
            _say(f"exit code {code}; starting again in {pause:g} seconds")
            supervisor.wait(pause)
            # the request may have come during the pause
            if supervisor.asked:
                return code


class Supervisor:
    """One run, which is started as often as needed.

    folder: a folder of this machine. A rank writes its exit code there, and a file `STOP` asks the ranks to stop.
    read: gets each line that the command prints, on stdout or stderr; without it both are the supervisor's own.
    variables: of the environment, beside this process's.
    min_hosts: start on the hosts of the hostfile that answer, if they are so many. None: on all.
    """

    def __init__(
        self,
        command: list[str],
        folder: Path,
        read: Callable[[str], None] | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        min_hosts: int | None = None,
    ):
        self.command, self.folder, self.asked = command, folder, False
        self.min_hosts = min_hosts
        self._hosts: Hosts | None = None
        self._read, self._variables = read, variables
        self._asked_at, self._started = 0.0, time.time()
        # only the main thread may set handlers: elsewhere, nobody can ask
        if threading.current_thread() is threading.main_thread():
            for number in ASKING:
                signal.signal(number, self._ask)

    def run(self, restarts: int) -> int:
        """Start the command, wait until it and all it started have ended, and return the exit code."""
        # the code of the start before must not count for this one
        (self.folder / "exit_code").unlink(missing_ok=True)
        names = {SUPERVISOR: str(self.folder), RESTART: str(restarts), STARTED: str(self._started)}
        self._hosts = hosts = Hosts.of(self.command, also_one=self.min_hosts is not None)
        if hosts is None:
            if self.min_hosts is not None:
                raise UserError("--min_hosts is for `deepspeed --hostfile FILE` through pdsh; leave it away")
            command = self._command_that_meets() if restarts else self.command
            return STOPPED if self.asked else self._run_launcher(command, names)
        try:
            hosts.reach(self.folder)
            answer, file = len(hosts.agents), hosts.options.hostfile
            least = answer + len(hosts.missing) if self.min_hosts is None else self.min_hosts
            gone = f"no answer through ssh from {', '.join(hosts.missing)}"
            if hosts.missing and answer < max(1, least):
                _say(f"{gone}; mend this, edit {file} (each start reads it), or allow fewer by --min_hosts")
                return CRASH
            if hosts.missing:
                _say(f"{gone}; starting on {', '.join(hosts.agents)}")
            if self.asked:  # while the hosts were reached
                return STOPPED
            variables = {**names, **hosts.variables(self.folder, {**names, **self._variables})}
            code = self._run_launcher(hosts.on(hosts.slots), variables)
        finally:
            hosts.end()
        return hosts.code(code)

    def _command_that_meets(self) -> list[str]:
        """Return the command; that of a torchrun whose meeting stays over with the next `--rdzv_id`."""
        if Path(self.command[0]).name != "torchrun" or not any("rdzv" in word for word in self.command):
            return self.command
        words = [*OPEN_COMMAND, *self.command]
        asking = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        while asking.poll() is None and not self.asked:
            time.sleep(0.1)
        asking.kill()
        answer = asking.communicate()[0].splitlines()
        if asking.returncode or not answer:
            return self.command
        command = json.loads(answer[-1])
        if command != self.command:
            _say("the meeting of the last start stays over; meeting by the next --rdzv_id")
        return command

    def _run_launcher(self, command: list[str], variables: dict[str, str]) -> int:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        # a session of its own: Ctrl-C reaches the supervisor alone, which asks the ranks
        options: dict = {"start_new_session": True, **({} if self._read is None else pipes)}
        options["env"] = {MEET_ANEW: "1", **os.environ, **variables, **self._variables}
        try:
            launcher = subprocess.Popen(command, **options)
        except OSError as error:
            raise UserError(f"{command[0]}: cannot be started: {error.strerror}") from error
        watch = None if self._hosts is None else self._hosts.watch(launcher, _say)
        for line in launcher.stdout or ():
            self._read(line)
        code = launcher.wait()
        if watch is not None:
            watch.join()
        outlived = end_what_is_left(self.folder)
        told = told_code(self.folder)
        # torchrun has started the ranks again by itself after a hang, and they have finished
        if told == HANG and code == FINISHED and not outlived:
            return FINISHED
        # a launcher returns a code of its own, often 1, whatever its ranks returned
        if told is not None:
            return told
        # a launcher that ended well before its ranks did not see how they ended
        if outlived and code == FINISHED:
            return CRASH
        return 128 - code if code < 0 else code  # as a shell tells the signal that ended it

    def wait(self, seconds: float) -> None:
        """Wait until the next start, or until a request to stop, after which there is none."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.asked:
            time.sleep(0.1)

    def _ask(self, number: int, frame) -> None:
        """Pass the first request on to the ranks by a file; on a second one, seconds later, kill them."""
        first, hosts = not self.asked, self._hosts
        if first:
            self.asked, self._asked_at = True, time.monotonic()
            (self.folder / "STOP").touch()
        elif time.monotonic() - self._asked_at <= SAME_REQUEST_SECONDS:
            return
        if hosts is not None:
            hosts.send("stop" if first else "kill")
        if not first:
            kill_all(self.folder)


def _say(line: str) -> None:
    print(f"supervise: {line}", file=sys.stderr, flush=True)
