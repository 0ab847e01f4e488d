"""The session's fixtures, and the order: what fails in milliseconds runs before what takes seconds."""

import atexit
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.gear.answers_here import answer_here
from tests.gear.runs import (
    ANSWERS,
    BIN,
    STEPS,
    Finished,
    Run,
    Started,
    Workshop,
    committed,
    execute,
    made_once,
    start_and_kill,
)

# Hundreds of processes import the same modules: each compiles them once, whatever the shell says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What a shell starts behind its back is deaf to Ctrl-C, and so would be the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each of pytest's workers computes on its share of the cores, and what waits does not spin.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // WORKERS)), "OMP_WAIT_POLICY": "PASSIVE"}

COLLECTIONS = pytest.StashKey[int]()
"""Full garbage collections of this process, as the last test left them."""

COMPILE_SECONDS = 3600
"""On a machine with other work; a lonely one takes two minutes, and the next session of its tests none."""

# Checkpoints and journals wait for the disk; what a test must not lose, it loses by a kill, not by a power cut.
IN_MEMORY = Path("/dev/shm")
if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# Files that start training processes: every other file runs before them, and those with the most work first, so that
# no worker is left alone with a long one at the end.
LAUNCHING = """
    stream_order first_day wheel slurm hostfile readme planning_memory one_curve curve compiling roofline layouts
    vocabulary_parallel fleet own_disks doctor_cluster chaos healing loss
    refusals sweep bad_input averages muon nothing_lost saved_first reshard model one_loss
    uploaded_run other_models trackers pipeline flows ray stopping clipping groups activations document_masking
    batch_ramp branch while_preparing given_weights wide_weights extensions reporting run_folder features export
    loss_scale scores schedules launchers throughput ladder report_page served_page operations checkpoint_export
    background_saving gradient_monitors balance gate notices console_log rehearsal postmortem ranks_apart
"""

# What a program has answered is known to all processes, those of the tests and those that they start.
os.environ["PRETRAINING_MODEL_CACHE"] = ANSWERS
# Plans know nothing of what the doctor measured on this machine, and no folder below this one can be made.
os.environ["PRETRAINING_DOCTOR_FOLDER"] = str(Path(os.devnull, "doctor"))
os.environ["PATH"] = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from every test but those of `pytest -m gpu`, before torch is imported.

    The others start several ranks on any machine, which meet over gloo.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()  # until the files of tests have imported the libraries, whose modules live as long as the process


def pytest_collection_finish() -> None:
    """Count models, and read configs, in this process, which has imported transformers.

    Leave what is imported out of every later garbage collection: each would look at two million objects.
    """
    answer_here()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # triton would list what is never freed as leaks
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave the libraries out again, if a test has trained in this process: `PretrainingTrainer.release` unfreezes.

    It collects too. To count what is frozen takes a tenth of a second, which most tests would wait for in vain.
    """
    collections = gc.get_stats()[2]["collections"]
    if item.config.stash.get(COLLECTIONS, 0) != collections and not gc.get_freeze_count():
        gc.freeze()
    item.config.stash[COLLECTIONS] = collections


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU if there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU: pytest -m gpu")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail `pytest -m gpu` on a machine with a GPU if no test has run: torch cannot use what the driver lists."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.option.markexpr != "gpu" or reporter is None or not session.testscollected:
        return
    if not any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "error")) and num_gpus():
        reporter.write_line("nvidia-smi lists a GPU, and no test could use it", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@cache
def num_gpus() -> int:
    """GPUs that the driver lists, whether torch can use them or not."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests first, then the files that launch processes."""
    launching = LAUNCHING.split()

    def place(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return launching.index(name) + 1 if name in launching else 0

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def operators(request) -> Iterator[Callable[[], Finished]]:
    """DeepSpeed's CPU operators, compiled while the unit tests run; the returned function waits for them."""
    if not any("workshop" in item.fixturenames for item in request.session.items):
        yield lambda: None
        return
    compiling = Started(["forked", "0", "-m", "tests.gear.compile_operators"])
    yield cache(lambda: compiling.finish(COMPILE_SECONDS))
    compiling.kill()


@pytest.fixture(autouse=True)
def watches() -> Iterator[None]:
    """No watch for hangs outlives its test: minutes later it would end this process, and fail whatever runs then."""
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name == "hangs"]


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder of this session, the same for all its processes."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def workshop(shared, operators) -> Workshop:
    """The small corpus, prepared, and the runs made of it."""
    operators()  # a run has a time limit, in which a busy machine may not compile
    return made_once(shared / "workshop.prepared", lambda: Workshop(shared / "workshop"))


@pytest.fixture(scope="session")
def resumed(workshop) -> tuple[Run, list[str]]:
    """A tracked two-rank ZeRO-2 run, killed at a random step and started again by the same command.

    With it, the checkpoints that were committed when it was killed, newest first.
    """
    return made_once(workshop.folder / "killed.run", lambda: _killed_and_resumed(workshop))


def _killed_and_resumed(workshop: Workshop) -> tuple[Run, list[str]]:
    step = int(os.environ.get("KILL_AT_STEP") or random.SystemRandom().randrange(1, STEPS))
    print(f"to repeat this kill: KILL_AT_STEP={step}")
    output = workshop.folder / "killed"
    run = Run(output)
    command = workshop.command(output, "zero2", settings=('training.report_to=["wandb","tensorboard"]',))
    start_and_kill(command, lambda: any(row["step"] >= step for row in run.rows))
    assert not run.dir.export.exists()
    before = committed(output)
    run.finished = execute(command)
    assert run.finished.code == 0, run.finished.output
    return run, before


@pytest.fixture
def disk_of(tmp_path) -> Iterator[Callable[[str], Path]]:
    """A file system of its own, of the size asked for; the test is left out where none may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("may not mount a file system here")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", "-l", disk], check=True)
