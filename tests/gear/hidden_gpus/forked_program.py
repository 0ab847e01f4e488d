"""Run a program of a launcher in a process that tests/gear/forked.py forks, in place of this fresh interpreter.

The launcher sees this process: its signals reach the forked one, whose exit code is this one's. What the launcher has
given, words, variables, folder and streams, the forked one has too.
"""

import json
import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = (
    "train.py",
    "pretraining.train",
    "pretraining.doctor",
    "pretraining.evaluation",
    "pretraining.rehearsal.rank",
)
PROGRAMS += ("deepspeed", "deepspeed.launcher.launch", "torchrun", "accelerate")
"""Those that spend seconds on imports."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def words_of_program() -> list[str] | None:
    """`SCRIPT ARGUMENTS` or `-m MODULE ARGUMENTS` of this interpreter, if it is one of PROGRAMS."""
    words = sys.orig_argv[1:]
    while words[:1] == ["-u"]:
        words = words[1:]
    program = "".join(words[1:2] if words[:1] == ["-m"] else words[:1])
    return words if Path(program).name in PROGRAMS else None


def run(pipe: str, words: list[str]) -> None:
    """Ask the server for the process, wait for its end and end with its code."""
    # beside the pipe: the server removes both at its end
    logs = Path(tempfile.mkdtemp(dir=Path(pipe).parent))
    request = {"words": words, "ranks": 0, "port": 0, "folder": str(Path.cwd()), "logs": str(logs)}
    request |= {"variables": dict(os.environ), "asked_by": os.getpid()}
    (logs / "request").write_text(json.dumps(request))
    with Path(pipe).open("w") as server:
        server.write(f"{logs}\n")
    # written by two processes, in any order: an error here would let this interpreter run the program a second time
    while not ((logs / "ranks").exists() and (logs / "pid").exists()):
        time.sleep(0.005)
    process = int((logs / "ranks").read_text())
    for number in FORWARDED:
        signal.signal(number, lambda number, _: _send(process, number))
    while not (logs / "code").exists():
        _wait_for(int((logs / "pid").read_text()))
    code = int((logs / "code").read_text())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _send(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def _wait_for(process: int) -> None:
    try:
        opened = os.pidfd_open(process)
    except ProcessLookupError:
        time.sleep(0.005)
        return
    waiting = select.poll()
    waiting.register(opened, select.POLLIN)
    waiting.poll()
    os.close(opened)
