"""Ranks that start at once: forked from a process that has imported the libraries already.

Importing torch, transformers and DeepSpeed takes eight seconds a process, more than most runs of the tests; what
DeepSpeed imports once an optimizer of ZeRO is made, torch's compiler, takes three more.
A forked rank runs the same `train.py` with the same arguments and variables as a launcher's rank does; what
the real launchers do is tested with the real launchers.
"""

import faulthandler
import fcntl
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path

from pretraining.runtime.heartbeat import process_fields
from tests.gear.hosts import enter_space

IMPORTS = """
import gc
import wandb.sdk.launch  # a tracked run would import it: six seconds after all the others, half a second before them
import cpuinfo
import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops.op_builder.all_ops
import deepspeed.runtime.superoffload
import deepspeed.runtime.zero.muon.muon_optimizer
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.qwen3_moe.modeling_qwen3_moe
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from pretraining.checkpoints.manager import CheckpointManager
from pretraining.checkpoints.resume import find_start
from pretraining.data.mixture import build_mixture
from pretraining.data.packed_dataset import build_training_dataset
from pretraining.data.prepared import open_prepared
from pretraining.evaluation.validation import Evaluator
from pretraining.model.build import build_from_recipe
from pretraining.model.loss import build_loss
from pretraining.reporting import analysis, live
from pretraining.training import monitors, trainer
from pretraining.upstream.torch import ask_the_processor_once
from tests.gear.answers_here import answer_here
ask_the_processor_once()
answer_here()
cpuinfo.get_cpu_info()
get_checkpoint_conversion_mapping("gpt2")
gc.collect()
gc.freeze()  # a rank that collects would copy every page of what is imported here
"""


STACKS = signal.SIGUSR2


class Server:
    """The process that forks for all of pytest's workers; it ends when the last of them has closed its pipe."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.pid_file = folder / "pid"
        self.pipe = pipe = folder / "requests"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not pipe.exists():
                os.mkfifo(pipe)
            # for reading too: a pipe opens for writing alone only once the server reads it
            self.requests = os.fdopen(os.open(pipe, os.O_RDWR), "w", buffering=1)
            if not self.is_alive():
                self.pid_file.write_text(str(self._start(pipe)))

    def _start(self, pipe: Path) -> int:
        from tests.gear.runs import REPOSITORY, environment

        words = [sys.executable, "-m", "tests.gear.forked", str(pipe)]
        unused = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, cwd=REPOSITORY, env=environment(), **unused)
        return self.process.pid

    def is_alive(self) -> bool:
        """Whether it runs, whichever worker has started it."""
        known = self.pid_file.exists() and process_fields(int(self.pid_file.read_text()))
        return bool(known) and known[0] != "Z"


@cache
def server() -> Server:
    """That of this session of tests."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    return Server(Path(tempfile.gettempdir()) / f"pretraining-forks-{session}")


class ForkedRanks:
    """The part of `subprocess.Popen` that the tests use, for `ranks` processes and the one that waits for them."""

    def __init__(self, words: list[str], ranks: int, port: int, folder: Path, variables: dict, logs: Path):
        self.logs, self.returncode = logs, None
        logs.mkdir()
        request = {"words": words, "ranks": ranks, "port": port, "folder": str(folder)}
        request |= {"variables": variables, "logs": str(logs)}
        # as a file: lines that several workers write at once stay whole only if they are short
        (logs / "request").write_text(json.dumps(request))
        server().requests.write(f"{logs}\n")

    @cached_property
    def pid(self) -> int:
        """The process that waits for the ranks; the first one starts once the server has imported everything."""
        answer = self.logs / "pid"
        while not answer.exists():
            assert server().is_alive(), "the process that forks has died"
            time.sleep(0.002)
        return int(answer.read_text())

    def poll(self) -> int | None:
        """The exit code once all ranks have ended, else None."""
        code = self.logs / "code"
        if self.returncode is None and code.exists():
            self.returncode = int(code.read_text())
        elif self.returncode is None and not Path(f"/proc/{self.pid}").exists():
            self.returncode = int(code.read_text()) if code.exists() else -signal.SIGKILL
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What was written to stdout and stderr, after the end."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise AssertionError(f"the ranks have not ended in {timeout:.0f} s: {self._stacks()}")
            time.sleep(0.02)
        return (self.logs / "stdout").read_text(), (self.logs / "stderr").read_text()

    def _stacks(self) -> str:
        """Let the ranks that still run write where each of their threads is, even one that never lets another run."""
        if (ranks := self.logs / "ranks").exists():
            for rank in map(int, ranks.read_text().split()):
                with suppress(ProcessLookupError):
                    os.kill(rank, STACKS)
        time.sleep(2)
        return (self.logs / "stderr").read_text()[-20_000:]

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL to what waits for the ranks; the ranks are `processes()`."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """The waiting process, its ranks and what they started."""
        return _family(self.pid) if self.poll() is None else _survivors(self.pid)


def _family(process: int) -> list[int]:
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [process, *(each for child in children for each in _family(int(child)))]


def _survivors(waiting: int) -> list[int]:
    """What outlived the process that waited for the ranks: the rest of its session, whatever it had written down."""
    found = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    fields = {process: process_fields(process)[:4] for process in found}  # state, parent, group, session
    return [each for each, known in fields.items() if known[3:] == [str(waiting)] and known[0] != "Z"]


def serve(pipe: Path) -> None:
    """Fork the ranks that each line of the pipe asks for; write down the process that waits for them."""
    exec(IMPORTS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    faulthandler.register(STACKS, file=2)  # a rank has its own log there
    for line in pipe.open():
        request = json.loads((Path(line.rstrip("\n")) / "request").read_text())
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            _wait_for_ranks(request)
        _write_at_once(Path(request["logs"]) / "pid", child)
    shutil.rmtree(pipe.parent)


def _wait_for_ranks(request: dict) -> None:
    """As a launcher does: the first rank that fails ends the others; its code is the code of all."""
    logs, asked_by = Path(request["logs"]), request.get("asked_by")
    if asked_by:
        _take_streams(asked_by)
        _follow(asked_by)
    else:
        _redirect(logs)
    ranks = [_fork_rank(request, rank) for rank in range(max(1, request["ranks"]))]
    if asked_by:
        threading.Thread(target=_end_with, args=[asked_by], daemon=True).start()
        _write_at_once(logs / "ranks", ranks[0])
    else:
        (logs / "ranks").write_text("\n".join(map(str, ranks)))
    code, waiting = 0, set(ranks)
    while waiting:
        process, status = os.wait()
        waiting.discard(process)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in waiting:
                os.kill(other, signal.SIGTERM)
    _write_at_once(logs / "code", code)
    os._exit(0)


def _write_at_once(path: Path, number: int) -> None:
    part = path.with_suffix(".part")
    part.write_text(str(number))
    part.rename(path)


def _redirect(logs: Path) -> None:
    for number, name in ((0, os.devnull), (1, logs / "stdout"), (2, logs / "stderr")):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _take_streams(process: int) -> None:
    """Read and write what this process does: a launcher has opened its streams (tests/gear/hidden_gpus)."""
    for number, way in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_APPEND), (2, os.O_WRONLY | os.O_APPEND)):
        descriptor = os.open(f"/proc/{process}/fd/{number}", way)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # those of the server belong to files that can be searched; these may be pipes
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))


def _follow(process: int) -> None:
    """Move to the network, host name and mounts of this process, if they are others (tests/gear/hosts.py)."""
    for kind in ("net", "uts", "mnt"):
        there = Path(f"/proc/{process}/ns/{kind}")
        if there.readlink() != Path(f"/proc/self/ns/{kind}").readlink():
            enter_space(there)


def _end_with(process: int) -> None:
    """Kill this session once the process is gone: who kills what a launcher has started means its program."""
    try:
        waiting = select.poll()
        waiting.register(os.pidfd_open(process), select.POLLIN)
        waiting.poll()
    except ProcessLookupError:
        pass
    os.killpg(0, signal.SIGKILL)


def _fork_rank(request: dict, rank: int) -> int:
    process = os.fork()
    if process:
        return process
    os.environ.clear()
    os.environ.update(request["variables"])
    if request["ranks"]:  # none: a plain process, without a launcher's variables
        ranks, port = str(request["ranks"]), str(request["port"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.chdir(request["folder"])
    os._exit(_run(request["words"]))


def _run(words: list[str]) -> int:
    """Run `SCRIPT ARGUMENTS` or `-m MODULE ARGUMENTS` as the interpreter would; its exit code."""
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
