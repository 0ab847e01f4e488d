"""The console of a run is kept in its folder: whole lines, no secrets, bounded, and nothing of a refused run."""

import faulthandler
import os
import signal
import sys

import pytest

from pretraining.checkpoints.live_files import LIVE_LOG_BYTES, NODES, LiveFiles, fetch_records
from pretraining.checkpoints.remote import RemoteRun
from pretraining.errors import UserError
from pretraining.postmortem import look_back
from pretraining.runtime import console_log
from pretraining.runtime.console_log import console_tail, kept_console
from pretraining.runtime.run_folder import RunFolder


@pytest.fixture
def run(tmp_path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def test_a_run_keeps_what_it_printed(workshop):
    """The lines on the terminal, those before the folder was opened too, under the command that was typed."""
    run = workshop.plain()
    kept = run.dir.console_log.read_text(encoding="utf-8").splitlines()
    assert kept[0].startswith("--- ") and "train.py" in kept[0]
    printed = [line for line in run.finished.stdout.splitlines() if line]
    assert len(printed) > 5 and set(printed) <= set(kept)


def test_a_start_that_is_refused_writes_nothing(tmp_path, run):
    """Neither into a new folder nor into that of an earlier run, whose events stay as they were."""
    for folder in (RunFolder(tmp_path / "new"), run):
        with pytest.raises(UserError), kept_console(folder):
            print("reading the recipe")
            raise UserError("no such key")
        assert not folder.console_log.exists()
    run.begin()
    with kept_console(run):
        print("an earlier start's event is none of this one")
    assert not run.console_log.exists() and not (tmp_path / "new").exists()


def test_lines_are_whole_and_hold_no_secret(run, monkeypatch, capsys):
    """Parts of lines are joined, a bar leaves its last state, secrets are masked, on the terminal too."""
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    with kept_console(run):
        print("before the first event")
        run.begin()
        print("a ", end="")
        print("line of hf_very_secret")
        print("\r10%\r20%\r100%", file=sys.stderr)
        print("cut" * 700)
        print("no end", end="")
    lines = run.console_log.read_text(encoding="utf-8").splitlines()[1:]
    assert lines[:3] == ["before the first event", "a line of ***", "100%"]
    assert len(lines[3]) == 2000 and lines[4] == "no end"
    shown = capsys.readouterr()
    assert "a line of ***\n" in shown.out and "\r10%\r20%\r100%" in shown.err
    with kept_console(run):
        run.begin()
        print("a second start")
    assert run.console_log.read_text(encoding="utf-8").count("--- ") == 2


@pytest.mark.parametrize(
    "error, last, is_traced",
    [
        (UserError("a line for the user"), "error: a line", False),
        (ValueError("a bug"), "ValueError: a bug", True),
        (KeyboardInterrupt(), "KeyboardInterrupt", True),
        (SystemExit(75), "stopped on request", False),
    ],
)
def test_the_error_that_ends_a_run_is_its_last_line(run, error, last, is_traced):
    """One line of what a user can mend, else the traceback; an exit code is none: a stop has said why already."""
    with pytest.raises(type(error)), kept_console(run):
        run.begin()
        print("stopped on request")
        raise error
    kept = run.console_log.read_text(encoding="utf-8")
    assert kept.splitlines()[-1].startswith(last) and ("Traceback" in kept) == is_traced


def test_the_log_is_bounded(run, monkeypatch):
    """A full file becomes the older one; the page reads the newest lines of both."""
    monkeypatch.setattr(console_log, "MOST_BYTES", 10_000)
    with kept_console(run):
        run.begin()
        for number in range(3000):
            print(f"line {number:04}")
    files = sorted(run.path.glob("console*.log"))
    assert [file.name for file in files] == ["console.1.log", "console.log"]
    assert all(file.stat().st_size <= 10_000 for file in files)
    tail = console_tail(run.console_log, 12_000).splitlines()
    assert tail == [f"line {number:04}" for number in range(3000 - len(tail), 3000)] and len(tail) > 1000
    assert console_tail(run.path / "none.log", 100) == ""


def test_every_rank_has_a_log_of_its_own_and_no_process_that_it_forks(run, monkeypatch):
    """A worker of the data loader prints to the terminal alone."""
    with kept_console(run):
        run.begin()
        print("ours")
        worker = os.fork()
        if worker == 0:
            print("of a worker")
            os._exit(0)
        os.waitpid(worker, 0)
    assert run.console_log.read_text(encoding="utf-8").splitlines()[1:] == ["ours"]
    monkeypatch.setenv("RANK", "1")
    with kept_console(run):
        run.begin()
        print("of rank 1")
    assert "rank 1" not in run.console_log.read_text(encoding="utf-8")
    log = run.path / "logs" / "rank-00001.log"
    assert log.read_text(encoding="utf-8").splitlines()[1:] == ["of rank 1"]


def test_a_rank_that_dies_in_c_code_leaves_its_stacks_in_its_log(run):
    """SIGSEGV, as from a broken kernel: Python cannot print any more, its fault handler can."""
    worker = os.fork()
    if worker == 0:
        os.environ["RANK"] = "3"
        faulthandler.disable()  # pytest's
        with kept_console(run):
            run.begin()
            os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(0)
    _, status = os.waitpid(worker, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    kept = run.rank_log(3).read_text(encoding="utf-8")
    assert "Fatal Python error: Segmentation fault" in kept and "test_console_log.py" in kept


def test_a_log_that_grows_does_not_reach_the_store_whole_each_minute(tmp_path, run):
    """Its end does, which still says in which start a rank died, and how; all of it follows once the run ends."""
    run.begin()
    run.add_event("start", step=0, world_size=2)
    run.add_event("failed", reason="a rank was gone")
    log = run.rank_log(1)
    log.parent.mkdir()
    began = run.last_event("start")["time"]
    lines = "".join(f"line {number} of a rank that says much\n" for number in range(20_000))
    log.write_text(f"--- {began} train.py --recipe tiny\n{lines}Fatal Python error: Segmentation fault\n")
    sent = {"events.jsonl": run.events, f"{NODES}/node0-1/logs/{log.name}": log}
    store = tmp_path / "store"
    in_store = store / "run" / NODES / "node0-1" / "logs" / log.name
    files = LiveFiles(run, RemoteRun(str(store), "run"), lambda: sent)
    files.send(LIVE_LOG_BYTES)
    first, *rest = in_store.read_text().splitlines()
    assert in_store.stat().st_size < LIVE_LOG_BYTES + 1000 < log.stat().st_size
    assert first.startswith(f"--- {began} train.py --recipe tiny [cut: ")
    assert rest == log.read_text().splitlines()[-len(rest) :], "whole lines"
    found = look_back(fetch_records(f"{store}/run", tmp_path / "fetched").path)
    assert (found.first.rank, found.first.what) == (1, "Segmentation fault")
    before = in_store.stat()
    files.send(LIVE_LOG_BYTES)
    assert in_store.stat().st_mtime_ns == before.st_mtime_ns, "nothing is new"
    files.send()
    assert in_store.read_bytes() == log.read_bytes()
