"""Run one command of a step: its output is passed on, and requests to stop reach it."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from pretraining.supervise.supervisor import REQUESTS

LINES_KEPT = 20
"""Last lines of stderr, for the message about a command that failed."""


class StepEnded(Exception):
    """A step's command has ended with another exit code than 0; it has said why on stderr."""

    def __init__(self, code: int, reason: str):
        super().__init__(reason)
        self.code, self.reason = code, reason


def call(command: list[str], captured: bool = False, output: IO[str] | None = None) -> str:
    """Run a command to its end; a signal that asks this process to stop is passed on to the command.

    captured: return its stdout instead of showing it.
    output: where its stdout and stderr are shown; None: as those of this process, with bars that move.

    Raises:
        StepEnded: with the command's exit code, and the line of its error if `output` is given.
    """
    # a session of its own: Ctrl-C in a terminal reaches the command once, from here
    own: dict = {"start_new_session": True, "text": True, "errors": "replace"}
    if captured or output is not None:
        own["stdout"] = subprocess.PIPE
    if output is not None:
        own["stderr"] = subprocess.PIPE
    environment = {**os.environ, "PATH": _with_own_programs()}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, **own)
    last: deque[str] = deque(maxlen=LINES_KEPT)
    with _requests_passed_on(process):
        reader = threading.Thread(target=_show, args=(process.stderr, output, last), daemon=True)
        reader.start()
        if captured:
            answer = process.stdout.read()
        else:
            answer = ""
            _show(process.stdout, output, deque(maxlen=1))
        code = process.wait()
        reader.join()
    if code:
        said = [line.removeprefix("error: ").strip() for line in last if line.startswith("error: ")]
        code = 128 - code if code < 0 else code
        raise StepEnded(code, said[-1] if said else f"exit code {code}")
    return answer


def _show(lines: IO[str] | None, output: IO[str] | None, last: deque[str]) -> None:
    for line in lines or ():
        last.append(line)
        print(line, end="", file=output, flush=True)


def _with_own_programs() -> str:
    """Return PATH with the launchers of this environment, which need not be activated."""
    own = os.path.dirname(sys.executable)  # noqa: PTH120  as it is written: a link leads to another environment
    return os.pathsep.join([own, os.environ.get("PATH", os.defpath)])


@contextmanager
def _requests_passed_on(process: subprocess.Popen) -> Iterator[None]:
    # only the main thread may set handlers: elsewhere, whoever runs this thread ends it
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: object) -> None:
        if process.poll() is None:
            process.send_signal(number)

    earlier: dict[int, Callable | int | None] = {}
    for number in REQUESTS:
        earlier[number] = signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
