"""How a process of a run is asked to stop, runs a command to its end, and is started again by its launcher.

Signals are noticed at once, whatever the main thread waits for, and reach the commands that a process runs. A run that
is started again has the same command, but must not begin anew.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from pretraining.runtime.exit_codes import INTERRUPTED, STOPPED, SUPERVISOR, supervisor_file, tell_exit_code
from pretraining.runtime.run_folder import STARTS, RunFolder, read_events

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
INSISTING = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_SECONDS = 2.0  # within which Ctrl-C from the terminal and from the launcher is one request
_LAST_SECONDS = 5.0


class SignalListener:
    """Keep the first signal that asked to stop. A second one, seconds later, ends the process at once.

    in_vain: called at each SIGTERM. True if the ranks cannot agree on a stop any more: the process then ends at once.
    """

    def __init__(self, in_vain: Callable[[], bool] = lambda: False):
        self.in_vain = in_vain
        self.received: int | None = None
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)  # set_wakeup_fd refuses a descriptor that blocks
        self._before = {number: signal.signal(number, _wake_the_listener) for number in ASKING}
        # Python runs handlers between two instructions of the main thread, which may wait in a collective for minutes.
        # The pipe is written to at once, and a thread reads it.
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        # Around a fork the signals are blocked: the new process gets them once `_forget` is done.
        hold = partial(signal.pthread_sigmask, signal.SIG_BLOCK, ASKING)
        release = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ASKING)
        os.register_at_fork(before=hold, after_in_parent=release, after_in_child=_forget)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def close(self) -> None:
        """Put the handlers back that were there before: nobody asks for what was received any more."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)

    def _listen(self) -> None:
        first_at = 0.0
        # each byte is one signal's number
        while numbers := os.read(self._read_end, 64):
            for number in numbers:
                if number not in ASKING:
                    continue
                if number == signal.SIGTERM and self.in_vain():
                    os._exit(128 + number)
                if self.received is None:
                    self.received, first_at = number, time.monotonic()
                elif number in INSISTING and time.monotonic() - first_at > SAME_REQUEST_SECONDS:
                    os._exit(128 + number)


def ignore_in_worker() -> None:
    """Make a data worker ignore the signals that ask to stop. It ends with its rank, which torch's workers watch."""
    for number in ASKING:
        # launchers and terminals signal workers too, and the rank fails if one of its workers dies
        signal.signal(number, signal.SIG_IGN)


def kill_workers() -> None:
    """Kill, at exit, the data workers that are left: they ignore multiprocessing's SIGTERM, and it would wait."""
    import multiprocessing  # not above: a plan does without

    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def end_with_standard_input() -> None:
    """End this process as Ctrl-C would once its standard input ends: with the process that holds the other end."""

    def wait() -> None:
        while os.read(0, 64):
            continue
        # to that thread, so that it leaves a system call too
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(_LAST_SECONDS)
        # a library may look at no signal, or the process may have been started to ignore this one
        os._exit(INTERRUPTED)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _wake_the_listener(number, frame) -> None:
    """Do nothing. Only a signal with a handler of Python's wakes the listener, through the pipe."""


def _forget() -> None:
    """Restore the default handlers in a forked process, which must not write into its parent's pipe."""
    # the hooks of `register_at_fork` stay for ever, even if another handler has replaced ours
    if signal.getsignal(signal.SIGTERM) is _wake_the_listener:
        signal.set_wakeup_fd(-1)
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


LINES_KEPT = 20  # last lines of a command, for the message if it fails


class CommandEnded(Exception):
    """A command has ended with another exit code than 0; it has said why on stderr."""

    def __init__(self, code: int, reason: str, lines: Iterable[str] = ()):
        super().__init__(reason)
        self.code, self.reason, self.lines = code, reason, lines


class CommandOutput(NamedTuple):
    """What a command that ended well has printed, and whether it was asked to stop, which came too late for it."""

    text: str
    stop_asked: bool


def call(
    command: list[str], captured: bool = False, show: Callable[[str], None] | None = None
) -> CommandOutput:
    """Run a command to its end; a signal that asks this process to stop is passed on to the command.

    captured: return its stdout instead of showing it. show: gets each line of its stdout and stderr; None: they are
    those of this process, with bars that move. Raises `CommandEnded` with the command's exit code, and its last lines
    of stderr if `show` is given; with `STOPPED` if a signal that was passed on has ended it.
    """
    settings: dict = {"env": os.environ | environment(), "text": True, "errors": "replace"}
    stdout = subprocess.PIPE if captured or show else None
    stderr = subprocess.PIPE if show else None
    streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
    # a session of its own: Ctrl-C in a terminal reaches the command once, from here
    process = subprocess.Popen(command, start_new_session=True, **settings, **streams)

    def read(lines: IO[str] | None, last: deque[str]) -> None:
        for line in lines or ():
            last.append(line)
            show(line)

    last: deque[str] = deque(maxlen=LINES_KEPT)
    asked: list[int] = []

    def pass_on(number: int, frame) -> None:
        asked.append(number)
        # looks first whether the command has ended
        process.send_signal(number)

    with handlers_kept() as may_set:
        for number in ASKING if may_set else ():
            signal.signal(number, pass_on)
        reader = threading.Thread(target=read, args=(process.stderr, last), daemon=True)
        reader.start()
        answer = process.stdout.read() if captured else ""
        read(process.stdout, deque(maxlen=1))
        code = process.wait()
        reader.join()
    code = 128 - code if code < 0 else code
    if code - 128 in asked and code != INTERRUPTED:
        raise CommandEnded(STOPPED, "stopped on request", last)
    if code:
        raise CommandEnded(code, error_line(last) or f"exit code {code}", last)
    return CommandOutput(answer, bool(asked))


def error_line(lines: Iterable[str]) -> str | None:
    errors = [line.removeprefix("error: ").strip() for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else None


def environment() -> dict[str, str]:
    """Return PATH with the launchers of this environment, which need not be activated."""
    programs = os.path.dirname(sys.executable)  # noqa: PTH120  as it is written: a link leads to another environment
    return {"PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])}


@contextmanager
def handlers_kept() -> Iterator[bool]:
    """Put the handlers of signals that ask to stop back at the end; False if this thread may set none."""
    # only the main thread may: elsewhere, whoever runs this thread ends it
    may_set = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in ASKING if may_set}
    try:
        yield may_set
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


RESTART = "PRETRAINING_RESTART"  # variable: how many times a supervisor has started this run again
STARTED = "PRETRAINING_STARTED"  # variable: UNIX seconds of the supervisor's start, for the time limit
_TORCHRUN_RESTART = "TORCHELASTIC_RESTART_COUNT"
_TORCHRUNS = ("torchrun", "torch.distributed.run", "accelerate")


def launch_details() -> dict:
    """Return {"launch": the same in all restarts, "restart": their number}; empty if nothing restarts the run."""
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor:
        # without the host: after the loss of one, rank 0 may be on another
        return {"launch": f"{supervisor}:{os.environ.get(STARTED, '')}", "restart": _restarts()}
    if _TORCHRUN_RESTART in os.environ:
        # torchrun's process starts every attempt, so its id is the same in all of them
        return {"launch": f"{socket.gethostname()}:{os.getppid()}", "restart": _restarts()}
    return {}


def resume_after_restart(run: RunFolder, resume: str) -> str:
    """Return `--resume` as typed, or `auto` if this launch has begun the run before and now starts it again."""
    launches = [(run.last_event(kind) or {}).get("launch") for kind in STARTS]
    # the launch of the newest event counts: a run of that name from an earlier launch must not be continued unasked
    return "auto" if _restarts() and launch_details()["launch"] in launches else resume


def leave_again_if_stopped(run: RunFolder) -> None:
    """Raise `SystemExit(75)` if this launch was asked to stop before."""
    # `torchrun --max-restarts` takes exit code 75 for a crash, and starts the run again
    if not _restarts():
        return
    rows = [*read_events(run.events), *read_events(run.node_events)]
    stops = [row for row in rows if row.get("event") == "stopped"]
    # a torchrun that gets SIGTERM ends with its ranks; if it starts them again, it sent SIGTERM because a node came
    stopped = [row.get("launch") for row in stops if row.get("reason") != signal.SIGTERM.name]
    if launch_details()["launch"] not in stopped:
        return
    tell_exit_code(STOPPED)
    if _TORCHRUN_RESTART in os.environ:
        # asked to end; else it starts this rank as often as `--max-restarts` allows
        launcher = os.getppid()
        with suppress(OSError):  # another system, or it has ended
            words = Path(f"/proc/{launcher}/cmdline").read_text().split("\0")
            if any(Path(word).name in _TORCHRUNS for word in words):
                os.kill(launcher, signal.SIGTERM)
    raise SystemExit(STOPPED)


def starts_again_after_a_signal() -> bool:
    """Return whether a signal may come from a torchrun that starts the ranks again, because a node has come or gone."""
    stop = supervisor_file("STOP")
    return _TORCHRUN_RESTART in os.environ and not (stop and stop.exists())


def _restarts() -> int:
    return sum(int(os.environ.get(name, "0")) for name in (RESTART, _TORCHRUN_RESTART))
