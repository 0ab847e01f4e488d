"""Run one command to its end: what it prints is shown or returned, and requests to stop reach it."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO

from pretraining.runtime.signals import ASKING

LINES_KEPT = 20
"""Last lines of a command, for the message if it fails."""


class CommandEnded(Exception):
    """A command has ended with another exit code than 0; it has said why on stderr."""

    def __init__(self, code: int, reason: str, lines: Iterable[str] = ()):
        super().__init__(reason)
        self.code, self.reason, self.lines = code, reason, lines


def call(command: list[str], captured: bool = False, show: Callable[[str], None] | None = None) -> str:
    """Run a command to its end; a signal that asks this process to stop is passed on to the command.

    captured: return its stdout instead of showing it.
    show: gets each line of its stdout and stderr; None: they are those of this process, with bars that move.

    Raises:
        CommandEnded: with the command's exit code, and its last lines of stderr if `show` is given.
    """
    process = subprocess.Popen(
        command,
        env=os.environ | environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if captured or show else None,
        stderr=subprocess.PIPE if show else None,
        text=True,
        errors="replace",
        # a session of its own: Ctrl-C in a terminal reaches the command once, from here
        start_new_session=True,
    )

    def pass_on(number: int, frame: object) -> None:
        if process.poll() is None:
            process.send_signal(number)

    def read(lines: IO[str] | None, last: deque[str]) -> None:
        for line in lines or ():
            last.append(line)
            show(line)

    last: deque[str] = deque(maxlen=LINES_KEPT)
    with handlers_kept() as may_set:
        for number in ASKING if may_set else ():
            signal.signal(number, pass_on)
        reader = threading.Thread(target=read, args=(process.stderr, last), daemon=True)
        reader.start()
        answer = process.stdout.read() if captured else ""
        read(process.stdout, deque(maxlen=1))
        code = process.wait()
        reader.join()
    if code:
        code = 128 - code if code < 0 else code
        raise CommandEnded(code, error_line(last) or f"exit code {code}", last)
    return answer


def error_line(lines: Iterable[str]) -> str | None:
    """Find the error that a command has reported last in one line."""
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
