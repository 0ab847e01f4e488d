"""Start a run again when it crashes or hangs, under any launcher, and answer with the code it really ended with.

    python -m pretraining.supervise -- deepspeed --num_gpus=8 train.py --recipe 30b

A request to stop (SIGTERM, SIGUSR1, SIGINT) goes to the ranks themselves, past the launcher and its 30 seconds.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretraining.command_line import not_negative_integer, positive_number
from pretraining.errors import UserError, one_line_errors
from pretraining.runtime.exit_codes import FINISHED, NOT_RESTARTED, SUPERVISOR
from pretraining.runtime.restarts import RESTART, STARTED

EXAMPLES = """examples:
  python -m pretraining.supervise -- deepspeed --num_gpus=8 train.py --recipe 30b
  python -m pretraining.supervise --restarts 3 --within_hours 1 -- python train.py --recipe tiny
  python -m pretraining.supervise --restarts 0 -- torchrun --nproc_per_node=8 train.py --recipe 30b

exit codes: 0 finished, 2 user error, 75 stopped on request with a committed checkpoint, 76 hang, 77 healing gave up;
anything else is a crash. A crash and 76 are started again. Several machines: one supervisor on each."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
CRASH = 1
SECONDS_TO_LEAVE = 60.0
"""What ranks have to save in, once their launcher is gone."""
SAME_REQUEST_SECONDS = 2.0
"""Within this time a second signal is the first one, come by another way."""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    with _folder() as folder:
        supervisor = Supervisor(options.command, folder)
        starts: list[float] = []
        while True:
            starts.append(time.monotonic())
            code = supervisor.run(len(starts) - 1)
            recent = [when for when in starts if when > time.monotonic() - options.within_hours * 3600]
            if supervisor.asked or code in NOT_RESTARTED:
                return code
            if len(recent) > options.restarts:
                _say(
                    f"exit code {code}; started {len(recent)} times in {options.within_hours:g} hours: no more"
                )
                return code
            pause = min(FIRST_PAUSE_SECONDS * 2 ** (len(recent) - 1), LONGEST_PAUSE_SECONDS)
            _say(f"exit code {code}; starting again in {pause:g} seconds")
            supervisor.wait(pause)
            if supervisor.asked:
                return code


class Supervisor:
    """One run, started as often as it takes.

    folder: of this machine; a rank leaves its exit code there, and a file `STOP` asks the ranks to stop.
    """

    def __init__(self, command: list[str], folder: Path):
        self.command, self.folder, self.asked = command, folder, False
        self._asked_at, self._started = 0.0, time.time()
        for number in REQUESTS:
            signal.signal(number, self._ask)

    def run(self, restarts: int) -> int:
        """Start the command, wait for its end and the end of all it started; its exit code."""
        (self.folder / "exit_code").unlink(missing_ok=True)
        names = {SUPERVISOR: str(self.folder), RESTART: str(restarts), STARTED: str(self._started)}
        try:
            launcher = subprocess.Popen(self.command, env={**os.environ, **names}, start_new_session=True)
        except OSError as error:
            raise UserError(f"{self.command[0]}: cannot be started: {error.strerror}") from error
        code = launcher.wait()
        outlived = self._end_what_is_left()
        told = self.folder / "exit_code"
        if told.exists():
            return int(told.read_text())
        return CRASH if outlived and code == FINISHED else code

    def wait(self, seconds: float) -> None:
        """Until the next start, or a request to stop, after which there is none."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.asked:
            time.sleep(0.1)

    def _end_what_is_left(self) -> bool:
        """Whether ranks outlived their launcher: they save and leave once they notice, or are killed."""
        time.sleep(0.1)  # a process that is just being started shows no environment yet
        until = time.monotonic() + SECONDS_TO_LEAVE
        outlived = bool(started_here(self.folder))
        while started_here(self.folder) and time.monotonic() < until:
            time.sleep(0.2)
        kill_all(self.folder)
        return outlived

    def _ask(self, number: int, frame) -> None:
        """The first request goes to the ranks by way of a file; a second one, seconds later, ends them at once."""
        if not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
            (self.folder / "STOP").touch()
        elif time.monotonic() - self._asked_at > SAME_REQUEST_SECONDS:
            kill_all(self.folder)


def started_here(folder: Path) -> list[int]:
    """Processes of this machine that a supervisor with this folder has started, however deep."""
    wanted = f"{SUPERVISOR}={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def kill_all(folder: Path) -> None:
    """SIGKILL them, and what they start meanwhile."""
    while processes := started_here(folder):
        for process in processes:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="supervise_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say(line: str) -> None:
    print(f"supervise: {line}", file=sys.stderr, flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pretraining.supervise",
        description="Start a run again when it crashes or hangs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--restarts",
        type=not_negative_integer,
        default=10,
        metavar="N",
        help="at most so many (default: 10) ...",
    )
    parser.add_argument(
        "--within_hours", type=positive_number, default=24.0, metavar="HOURS", help="... in this time (24)"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: a launcher and train.py")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    with one_line_errors():
        code = main()
    sys.exit(code)
