"""A run that failed is looked back at: what failed first, where, what it cost, and what to do; on real ranks."""

import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from pretraining.checkpoints.live_files import NODES, records_of
from pretraining.errors import UserError
from pretraining.postmortem import as_text, look_back, main
from pretraining.reporting.analysis import analyze, standing_text
from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.durable_files import append_row, read_rows, write_json
from pretraining.runtime.failures import LOG, Failure, kernel_faults, read_failures
from pretraining.runtime.heartbeat import Heartbeat, heartbeat_path
from pretraining.runtime.lock import LOCK
from pretraining.runtime.run_folder import RunFolder, unix_seconds
from tests.gear.finished_data import refusal
from tests.gear.runs import completed, execute, start_and_kill

FAILING = """
import os
import signal

from transformers import TrainerCallback

from pretraining import extend


@extend.callback
class FailsOnRankOne(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        at, _, how = os.environ.get("FAILS_AT", "").partition(":")
        if os.environ["RANK"] != "1" or str(state.global_step) != at:
            return
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        raise RuntimeError("the machine is on fire")
"""
PRICE = "report.dollars_per_gpu_hour=3.6"


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture(scope="module")
def failed(workshop, tmp_path_factory) -> dict:
    """One run that is killed, then dies in C code, then fails in Python, then ends; what was found after each.

    It takes four starts of two ranks, on which four tests look back.
    """
    folder = tmp_path_factory.mktemp("failed")
    (folder / "failing.py").write_text(FAILING)
    settings = (f'extensions=["{folder / "failing.py"}"]', PRICE)
    command = workshop.command(folder / "run", settings=settings)
    found = {}
    for how in ("6:killed", "7:segfault", "8:raised", ""):
        finished = execute(command, FAILS_AT=how)
        assert (finished.code == 0) == (not how), finished.output
        found[how.partition(":")[2] or "finished"] = look_back(folder / "run")
        if "raised" in how:
            found["standing"] = RunRecord(folder / "run").standing()
    return {**found, "folder": folder / "run"}


def test_a_killed_rank_is_the_one_that_wrote_no_error(failed):
    """SIGKILL leaves no time to write: the others' errors are its consequences."""
    found = failed["killed"]
    assert found.state == "killed" and found.attempts[-1].end == "crash"
    assert found.first.rank == 1 and "ended without an error of its own" in found.first.what
    assert found.checkpoint and found.lost_steps == found.step - int(found.checkpoint.rpartition("-")[2])
    assert found.advice[-1] == f"the same command without --resume continues from {found.checkpoint}"


def test_a_rank_that_died_in_c_code_is_named_by_its_log(failed):
    found = failed["segfault"]
    assert (found.first.rank, found.first.what) == (1, "Segmentation fault")
    assert found.first.where.endswith("logs/rank-00001.log")


def test_the_error_of_the_rank_that_failed_first_is_told_with_its_place(failed):
    """Rank 0 only met a closed connection."""
    found = failed["raised"]
    assert (found.first.rank, found.first.what) == (1, "RuntimeError: the machine is on fire")
    assert found.first.time and re.search(r"/failing\.py:\d+ in ", found.first.where)
    assert found.state == "failed"
    told = standing_text(failed["standing"], time.time())
    assert (
        told.startswith("Failed after step ")
        and ": RuntimeError: the machine is on fire. Once that is" in told
    )
    assert [attempt.end for attempt in found.attempts] == ["crash", "crash", "crash"]
    text = as_text(found)
    assert "failed first  rank 1 on" in text and "the machine is on fire" in text and "$" in text
    kept = read_failures(RunFolder(failed["folder"]))
    assert "failing.py" in next(each for each in kept if "fire" in each.error).traceback


def test_a_finished_run_still_knows_what_failed_and_what_that_cost(failed):
    """Every start, the failure before the last one, and the money; the command line gives the same as JSON."""
    found = failed["finished"]
    assert found.state == "finished" and [each.end for each in found.attempts] == ["crash"] * 3 + ["finished"]
    assert "on fire" in found.first.what and not [line for line in found.advice if "continues" in line]
    assert "restarts after a crash" in found.time_lost
    assert 0 < found.dollars_lost < found.dollars
    # the time after the last row is paid for too
    spent = RunRecord(failed["folder"]).wall_time()
    assert found.dollars == pytest.approx(spent.rank_seconds / 3600 * 3.6, rel=0.01)
    command = [sys.executable, "-m", "pretraining.postmortem", f"{failed['folder']}/", "--json"]
    answer = json.loads(execute(command).stdout)
    assert answer["first"]["what"] == found.first.what and answer["dollars"] == found.dollars


@pytest.mark.skipif(
    not os.access(LOG, os.W_OK), reason=f"needs to write to {LOG}: root, outside of a container"
)
def test_a_gpu_fault_in_the_kernels_log_is_found_and_explained(tmp_path):
    """A real line of the real kernel log, as NVIDIA's driver writes it."""
    began = time.time()
    LOG.write_bytes(b"NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=python, GPU has fallen off the bus.\n")
    (fault,) = [each for each in kernel_faults(began - 1) if each.xid == 79 and "4242" in each.text]
    assert "fallen off" in fault.meaning[0] and abs(fault.time - time.time()) < 5
    assert not [each for each in kernel_faults(time.time() + 60) if each.xid]
    run = _folder_with_failure(tmp_path, "RuntimeError: CUDA error: unknown error", [fault.__dict__])
    found = look_back(run)
    assert "fallen off the bus" in found.faults[0] and "have the GPU checked" in found.advice[0]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "smaller micro-batch"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", "less of it in host memory"),
        ("RuntimeError: NCCL Error 2: unhandled system error", "doctor"),
    ],
)
def test_what_to_do_follows_from_the_error(tmp_path, error, advice):
    found = look_back(_folder_with_failure(tmp_path, error))
    assert found.first.what == error and advice in found.advice[0]


def test_a_run_that_was_killed_before_its_first_heartbeat_does_not_run(workshop, run):
    """Its lock says so at once, on its machine; a lock that another machine left says nothing."""
    # the file is there a moment before its first row
    start_and_kill(workshop.command(run.path, "null", 1, "plain"), lambda: read_rows(run.events))
    shutil.rmtree(run.heartbeats, ignore_errors=True)
    # a process that is killed may take a moment to let go of its files
    until = time.monotonic() + 60
    while look_back(run.path).state == "running" and time.monotonic() < until:
        time.sleep(0.05)
    found = look_back(run.path)
    assert (found.state, found.attempts[-1].end) == ("killed", "crash")
    assert "killed, or their machine is gone" in found.first.what
    assert " after 20" in as_text(found), "no later start is taken for its end"
    (run.path / LOCK).write_text("process 7 on another-machine")
    assert look_back(run.path).state == "running"


def test_a_launcher_that_was_killed_alone_is_named(run):
    """The ranks have saved and left by themselves: they did not end without a word."""
    append_row(run.events, {"time": "2026-01-01T00:00:00Z", "event": "start", "world_size": 2})
    stopped = {"event": "stopped", "step": 25, "reason": "its launcher is gone", "asked": False}
    append_row(run.events, {"time": "2026-01-01T00:01:00Z", **stopped})
    found = look_back(run.path)
    assert (found.state, found.attempts[0].end) == ("stopped", "crash")
    assert found.first.what == "its launcher is gone" and "a file STOP in the run folder" in found.advice[0]


def test_a_failure_is_as_old_as_the_last_sign_of_life(run):
    """Nobody looked for five hours: it was not the next start that ended the run."""
    began = unix_seconds("2026-01-01T00:00:00Z")
    append_row(run.events, {"time": "2026-01-01T00:00:00Z", "event": "start", "world_size": 2})
    append_row(run.metrics, {"step": 1, "time": began + 600.5, "throughput/step_seconds": 0.1})
    append_row(run.events, {"time": "2026-01-01T05:00:00Z", "event": "resume", "step": 0, "world_size": 2})
    first, _ = look_back(run.path).attempts
    assert (first.end, first.ended - first.began) == ("crash", 600.5)


def test_an_address_without_a_run_is_one_line_that_names_it(run, tmp_path, monkeypatch):
    """Nothing of a temporary folder, and no credential. A run's place in a mounted store may be given by its name."""
    address = f"file://{tmp_path}/none"
    with pytest.raises(UserError, match=f"{address}: no run there"), records_of(address):
        pass
    assert "s3://***@bucket/runs/x holds a credential" in refusal(main, ["s3://me:sesame@bucket/runs/x"])
    run.add_event("start", step=0, world_size=1)
    (run.path / NODES).mkdir()
    monkeypatch.chdir(tmp_path)
    with records_of("run") as (folder, shown):
        assert look_back(folder).state == "running" and shown == str(run.path)


def test_a_run_without_its_events_is_not_said_to_run(run):
    """They alone say how it ended: no state is made up for it."""
    append_row(run.metrics, {"step": 40, "time": time.time(), "throughput/step_seconds": 0.1})
    found = look_back(run.path)
    assert found.state == "unknown" and len(found.advice) == 1
    assert "events.jsonl is missing" in found.advice[0]
    # a long path moves the ends of lines
    assert "unknown at step 40, 0 starts" in " ".join(as_text(found).split())


def test_numbers_that_are_none_break_nothing(tmp_path):
    """A folder may be a stranger's, or come from a program of one's own."""
    run = RunFolder(_folder_with_failure(tmp_path, "RuntimeError: on fire"))
    run.add_event("straggler", step=1, rank=0)
    append_row(run.metrics, {"step": 2, "time": time.time(), "stability/non_finite_steps": math.inf})
    assert look_back(run.path).first.what == "RuntimeError: on fire"
    rows = [{"step": n, "train/loss": 3.0, "train/tokens": math.inf if n == 9 else n} for n in range(1, 60)]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert analyze(RunRecord(run.path)).loss == 3.0


def test_steps_that_change_nothing_are_no_good_end(run):
    """A rate of 30,000: the run ends by itself, and has learnt nothing."""
    run.add_event("start", step=0, world_size=1)
    run.add_event("non_finite", step=3, loss=math.nan)
    counts = {"stability/non_finite_steps": 38, "stability/refused_steps": 37}
    append_row(run.metrics, {"step": 40, "time": time.time(), "throughput/step_seconds": 0.1, **counts})
    run.add_event("end", eval_loss=10.0)
    found = look_back(run.path)
    assert found.not_finite == "38 steps of 40, the first at step 3; 37 steps were not applied"
    assert "training.learning_rate" in found.advice[0] and found.not_finite in as_text(found)


def test_a_lost_connection_comes_last_whatever_the_clocks_say(tmp_path):
    """Rank 0 noticed that rank 2 was gone before rank 2 had written its own error."""
    run = _folder_with_failure(tmp_path, "RuntimeError: Connection closed by peer [10.0.0.2]:3333")
    _add_failure(run, 2, "ValueError: bad sample", after_seconds=1.0)
    assert kernel_faults(0.0, tmp_path / "none") == [], "a log that cannot be read is no error"
    found = look_back(run)
    assert (found.first.rank, found.first.what) == (2, "ValueError: bad sample")


def test_a_silent_run_is_called_ended_only_where_its_processes_can_be_looked_for(run):
    """Of another machine, as in records of a store, the clock alone speaks; here a rank that is gone ends the doubt."""
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600))
    append_row(run.events, {"time": began, "event": "start", "step": 0, "world_size": 2})
    Heartbeat(run.heartbeats, 0).beat(1)
    found = look_back(run.path)
    assert (found.state, found.attempts[-1].end) == ("silent", "silent"), "its one process lives, quietly"
    assert found.first.what.startswith(f"silent since {began[:10]} {began[11:19]} UTC")
    code = "import sys; from pathlib import Path; from pretraining.runtime.heartbeat import Heartbeat; "
    code += "Heartbeat(Path(sys.argv[1]), 1).beat(1)"
    completed([sys.executable, "-c", code, str(run.heartbeats)])
    assert look_back(run.path).attempts[-1].end == "crash", "rank 1 is gone"
    path = heartbeat_path(run.heartbeats, 1)
    write_json(path, {**json.loads(path.read_text()), "machine": "another", "host": "node-7"})
    found = look_back(run.path)
    assert found.attempts[-1].end == "silent" and "node-7" in found.first.what
    assert "look whether its processes live" in as_text(found)


def _folder_with_failure(folder: Path, error: str, faults: list[dict] | None = None) -> Path:
    run = RunFolder(folder / "run")
    run.add_event("start", step=0, world_size=4)
    append_row(run.metrics, {"step": 1, "time": time.time(), "throughput/step_seconds": 0.1})
    _add_failure(run.path, 0, error, faults=faults)
    return run.path


def _add_failure(run: Path, rank: int, error: str, after_seconds: float = 0.0, faults=None) -> None:
    known = {"host": "node-1", "process": 1, "where": "", "traceback": error, "expected": False}
    failure = Failure(time.time() + after_seconds, rank, error=error, faults=tuple(faults or ()), **known)
    append_row(RunFolder(run).failures(rank), failure.__dict__)
