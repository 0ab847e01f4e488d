"""A run that stands still is left with exit code 76, and the ranks that did not arrive are named."""

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.exit_codes import HANG
from pretraining.runtime.heartbeat import HeartbeatRecord, long_work, read_place, work_done
from pretraining.runtime.run_folder import RunFolder

LIMIT_SECONDS = 3.0


class Ranks:
    """Processes with a watch each, as ranks of one run: what they do is a function of (watch, rank).

    They begin when the writing end of `gate` is closed: on a busy machine a fork may take as long as the limit.
    """

    def __init__(self, run: RunFolder, world_size: int, work: Callable, gate: tuple[int, int]):
        from pretraining.training.hangs import Watch

        self.dir, self.processes, self.codes = run, [], []
        for rank in range(world_size):
            process = os.fork()
            if process == 0:
                os.close(gate[1])
                os.read(gate[0], 1)
                watch = Watch(run, LIMIT_SECONDS, rank, world_size)
                work(watch, rank)
                watch.close()
                os._exit(0)
            self.processes.append(process)

    def kill(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.processes[rank], number)

    def wait(self) -> None:
        """For the exit codes, in the order of the ranks."""
        self.codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in self.processes]

    def wait_for_an_event(self) -> None:
        until = time.monotonic() + 60
        while not self.events and time.monotonic() < until:
            time.sleep(0.01)

    def wait_for_arrivals(self) -> None:
        """Until the heartbeat of each rank says that it has come to its first place."""
        while not all(place and place.arrivals for place in map(self.place, range(len(self.processes)))):
            time.sleep(0.01)

    def place(self, rank: int) -> HeartbeatRecord | None:
        return read_place(self.dir.heartbeats, rank)

    @property
    def events(self) -> list[dict]:
        return read_rows(self.dir.events)


def collective_without_end(watch, rank: int) -> None:
    watch.heartbeat.arrive("training", 3)
    time.sleep(120)


def rank_2_in_its_loader(watch, rank: int) -> None:
    watch.heartbeat.arrive("training", 7)
    if rank != 2:
        watch.heartbeat.arrive("training", 8)
    time.sleep(120)


def slow_progress(watch, rank: int) -> None:
    """Half as long again as the limit in all."""
    for step in range(5):
        watch.heartbeat.arrive("validation", step)
        time.sleep(LIMIT_SECONDS * 0.3)


def one_long_step(watch, rank: int) -> None:
    watch.heartbeat.arrive("training", 1)
    time.sleep(LIMIT_SECONDS * 1.7)


def rank_0_writes(watch, rank: int) -> None:
    """Half as long again as the limit; the others wait for it, as in a collective."""
    watch.heartbeat.arrive("end", 9)
    if rank != 0:
        return time.sleep(LIMIT_SECONDS * 1.7)
    with long_work():
        for _ in range(30):
            time.sleep(LIMIT_SECONDS * 0.05)
            work_done()


def a_thread_writes_while_training_hangs(watch, rank: int) -> None:
    """Bytes behind training do not hide that it stands still."""
    watch.heartbeat.arrive("training", 5)
    while True:
        time.sleep(0.05)
        work_done()


def a_store_that_takes_nothing(watch, rank: int) -> None:
    """A wait for the last upload in which no byte is sent."""
    watch.heartbeat.arrive("end", 9)
    with long_work():
        time.sleep(120)


def a_library_writes(watch, rank: int) -> None:
    """An export, of which only the growing folder tells."""
    watch.heartbeat.arrive("end", 9)
    folder = watch.run.path / "export.partial"
    folder.mkdir(exist_ok=True)
    with long_work(growing=folder):
        for _ in range(30):
            time.sleep(LIMIT_SECONDS * 0.05)
            with (folder / f"{rank}").open("a") as file:
                file.write("more")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[Callable, Ranks]:
    """Runs of three ranks, all at the same time; of the first one rank is stopped, of the last all for a while."""
    works = (collective_without_end, rank_2_in_its_loader, slow_progress, one_long_step, rank_0_writes)
    works += (a_thread_writes_while_training_hangs, a_store_that_takes_nothing, a_library_writes)
    gate = os.pipe()
    runs = {work: Ranks(RunFolder(tmp_path_factory.mktemp("run")), 3, work, gate) for work in works}
    os.close(gate[1])
    for work, stopped in ((one_long_step, (0, 1, 2)), (collective_without_end, (1,))):
        runs[work].wait_for_arrivals()
        runs[work].kill(signal.SIGSTOP, *stopped)
    time.sleep(LIMIT_SECONDS * 1.2)
    runs[one_long_step].kill(signal.SIGCONT, 0, 1, 2)
    runs[collective_without_end].wait_for_an_event()
    runs[collective_without_end].kill(signal.SIGKILL, 1)
    for run in runs.values():
        run.wait()
    return runs


def test_a_stopped_process_is_named(finished):
    """SIGSTOP to one of three ranks: the others say which, leave their stacks and end with 76."""
    run = finished[collective_without_end]
    assert run.codes == [HANG, -signal.SIGKILL, HANG]
    (event,) = run.events
    assert (event["event"], event["ranks"]) == ("hang", [1])
    assert f"process {run.processes[1]}, training at step 3, its process does not run" in event["who"]
    stacks = {path.name: path.read_text() for path in run.dir.stacks.iterdir()}
    assert sorted(stacks) == ["rank-00000.txt", "rank-00002.txt"]
    assert all("collective_without_end" in text for text in stacks.values())


def test_a_rank_that_came_less_far_is_named(finished):
    """Its process runs, in a loader that never answers: it has not come to the step the others wait in."""
    run = finished[rank_2_in_its_loader]
    assert run.codes == [HANG] * 3
    (event,) = run.events
    assert (event["ranks"], event["step"]) == ([2], 8) and "training at step 7, its process runs" in event[
        "who"
    ]
    assert len(list(run.dir.stacks.iterdir())) == 3


@pytest.mark.parametrize("work", [slow_progress, one_long_step, rank_0_writes, a_library_writes])
def test_what_is_slow_or_was_suspended_is_not_hung(finished, work):
    """Longer than the limit, with progress in between: no alarm, and nothing is left behind.

    So is a last save, upload or export, on one rank or on all; and a job whose ranks all wake up long after their last
    step is given its time again.
    """
    run = finished[work]
    assert run.codes == [0, 0, 0] and not run.events
    assert work is a_library_writes or list(run.dir.path.iterdir()) == []


@pytest.mark.parametrize("work", [a_thread_writes_while_training_hangs, a_store_that_takes_nothing])
def test_work_that_nobody_waits_for_or_that_does_not_move_is_no_progress(finished, work):
    """A stuck store is found, and so is a hang behind which a thread still writes."""
    run = finished[work]
    assert run.codes == [HANG] * 3 and [event["event"] for event in run.events] == ["hang"]


@pytest.mark.parametrize("arrivals, expected", [([4, 4, 4], []), ([4, 3, 4], [1]), ([4, None, 3], [1, 2])])
def test_who_did_not_arrive(arrivals, expected, tmp_path):
    """Less far than the furthest, or without a heartbeat."""
    from pretraining.training.hangs import Watch

    places = {
        rank: number and HeartbeatRecord(rank, "a", 1, "training", 1, number, 1)
        for rank, number in enumerate(arrivals)
    }
    run = RunFolder(tmp_path)
    Watch._report(SimpleNamespace(run=run, limit_seconds=60.0), places, set())
    assert [event["ranks"] for event in read_rows(run.events)] == [expected]


def test_what_is_no_heartbeat_stays(tmp_path):
    """A start clears those of the one before it; a file or folder of somebody else is left, with the folder."""
    from pretraining.training.hangs import ALARM, clear

    (tmp_path / "notes").mkdir()
    for name in ("rank-00000.json", "rank-00001.json", ALARM, "measured.csv"):
        (tmp_path / name).write_text("")
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["measured.csv", "notes"]
