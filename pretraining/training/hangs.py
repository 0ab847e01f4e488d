"""End a run that hangs: write every rank's stacks, name the ranks that did not arrive, and exit.

The launcher or `pretraining.supervise` starts the run again. The main thread waits in a collective without end, so
the watch is another thread.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerCallback

from pretraining.runtime.exit_codes import HANG, tell_exit_code
from pretraining.runtime.heartbeat import Heartbeat, HeartbeatRecord, heartbeat_path, read_place
from pretraining.runtime.process_group import Messages, largest_over_ranks
from pretraining.runtime.run_folder import RunFolder, utc_now
from pretraining.training.ranks import AT_LEAVING

LOOKS_PER_LIMIT = 20
LONGEST_LOOK_SECONDS = 30.0
SILENT_LOOKS = 4
"""If a heartbeat has not changed for so many looks, its process does not run."""
ALARM = "ALARM"


class HangCallback(TrainerCallback):
    """Report to the heartbeat which place the Trainer has reached. hang_minutes None: no watch."""

    def __init__(self, run: RunFolder, hang_minutes: float | None) -> None:
        self.run, self.hang_minutes = run, hang_minutes
        self.watch: Watch | None = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.hang_minutes is None or self.watch is not None:
            return  # no watch, or that of the attempt before a rollback
        if self.run.disks.is_first:
            clear(self.run.heartbeats)
        largest_over_ranks(0)  # wait: a rank may write its file only after the folder has been cleared
        self.watch = Watch(self.run, self.hang_minutes * 60, args.process_index, args.world_size)
        AT_LEAVING.append(self.watch.close)

    @staticmethod
    def _arrives(phase: str) -> Callable:
        def arrive(self, args, state, control, **kwargs) -> None:
            if self.watch is not None:
                self.watch.heartbeat.arrive(phase, state.global_step)

        return arrive

    on_step_begin = on_substep_end = on_step_end = _arrives("training")
    on_prediction_step = on_evaluate = _arrives("validation")
    on_save = _arrives("save")
    on_train_end = _arrives("end")


class Watch:
    """Run a thread that writes this rank's heartbeat, and raises the alarm if the rank has not moved for long.

    limit_seconds: from the last arrival to the report.
    """

    def __init__(self, run: RunFolder, limit_seconds: float, rank: int, world_size: int) -> None:
        self.run, self.limit_seconds, self.rank, self.world_size = run, limit_seconds, rank, world_size
        # many looks fit into the limit: SILENT_LOOKS of them tell a process that does not run
        self.look_seconds = min(limit_seconds / LOOKS_PER_LIMIT, LONGEST_LOOK_SECONDS)
        self.heartbeat = Heartbeat(run.heartbeats, rank)
        carries = run.disks.is_first and not run.disks.shared
        self._relay = Relay(run, self.look_seconds) if carries else None
        self._beats_seen: dict[int, tuple[int, int]] = {}
        self._moves_seen: dict[int, int] = {}
        self._observed_since = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_again_and_again, name="hangs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch and remove its files."""
        self._closed.set()
        self._thread.join()
        self.heartbeat.close()
        if self._relay is not None:
            self._relay.close()
        if self.run.disks.is_first:
            clear(self.run.heartbeats)

    def _look_again_and_again(self) -> None:
        number, looked_at = 0, time.monotonic()
        while not self._closed.wait(self.look_seconds):
            slept, looked_at = time.monotonic() - looked_at, time.monotonic()
            # this process itself was stopped, as by SIGSTOP: that time does not count
            if slept > SILENT_LOOKS * self.look_seconds:
                self.heartbeat.arrived_at += slept
            number += 1
            self.heartbeat.beat(number)
            waited = time.monotonic() - self.heartbeat.arrived_at
            # before half the limit there is no need to read the files of all ranks
            if waited > self.limit_seconds / 2:
                places, seen = self._observe(number), self._moves_seen
                self._moves_seen = {rank: place.moves for rank, place in places.items() if place is not None}
                # another rank has moved forward in long work since the last look: this one may wait for it
                if any(moves > seen.get(rank, moves) for rank, moves in self._moves_seen.items()):
                    self.heartbeat.arrived_at, waited = time.monotonic(), 0.0
            # one look early, or the next look would come after the limit; an alarm of another rank counts too
            if waited >= self.limit_seconds - self.look_seconds or (self.run.heartbeats / ALARM).exists():
                self._raise_alarm(number)

    def _observe(self, number: int) -> dict[int, HeartbeatRecord | None]:
        """Read every rank's place, and note since which look its heartbeat has not changed."""
        if self._relay is not None:
            self._relay.wanted = True
        self._observed_since = min(number, self._observed_since or number)
        places = {rank: read_place(self.run.heartbeats, rank) for rank in range(self.world_size)}
        for rank, place in places.items():
            beats = -1 if place is None else place.beats
            if self._beats_seen.get(rank, (None,))[0] != beats:
                self._beats_seen[rank] = (beats, number)
        return places

    def _raise_alarm(self, number: int) -> None:
        """Write the stacks, report and exit. All running ranks come here within one look; the first one reports."""
        first, place = _created(self.run.heartbeats / ALARM), self.heartbeat.place
        self.run.stacks.mkdir(parents=True, exist_ok=True)
        with (self.run.stacks / f"rank-{place.rank:05}.txt").open("w") as file:
            file.write(f"{utc_now()} {described(place.rank, place, silent=False)}\n\n")
            # faulthandler writes to the descriptor itself, past Python's buffer
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        places = self._observe(number)
        # the others wait longer, so that they do not end while the first one still observes
        last = max(number, self._observed_since + SILENT_LOOKS) if first else number + 2 * SILENT_LOOKS
        while number < last:  # a busy machine may have had too few looks to judge by
            time.sleep(self.look_seconds)
            number += 1
            self.heartbeat.beat(number)
            places = self._observe(number)
        if first:
            seen = self._beats_seen.items()
            self._report(places, {rank for rank, (_, since) in seen if number - since >= SILENT_LOOKS})
        tell_exit_code(HANG)
        self.run.fail()
        # others still write stacks: the launcher ends all ranks after the first exit
        time.sleep(2 * self.look_seconds)
        # not sys.exit: that would end this thread only, and the main thread waits for ever
        os._exit(HANG)

    def _report(self, places: dict[int, HeartbeatRecord | None], silent: set[int]) -> None:
        # those whose process does not run, and those that are behind the others
        furthest = max((place.arrivals for place in places.values() if place), default=0)
        behind = {rank for rank, place in places.items() if place is None or place.arrivals < furthest}
        late = sorted(silent | behind)
        who = "; ".join(described(rank, places[rank], rank in silent) for rank in late)
        who = who or "every rank waits at the same place"
        minutes = round(self.limit_seconds / 60, 2)
        step = max(place.step for place in places.values() if place is not None)  # its own is among them
        told = {"minutes": minutes, "ranks": late, "who": who, "stacks": str(self.run.stacks)}
        self.run.add_event("hang", step=step, **told)
        line = f"no progress for {minutes:g} minutes; did not arrive: {who}; stacks: {self.run.stacks}"
        print(f"hang: {line}", file=sys.stderr, flush=True)


class Relay:
    """A thread that carries heartbeats, and the alarm, between run folders that nodes have of their own.

    It is not the watch: a message waits as long as the process of rank 0 is stopped, and the watch must not.
    """

    def __init__(self, run: RunFolder, look_seconds: float) -> None:
        self.folder, self.disks, self.look_seconds = run.heartbeats, run.disks, look_seconds
        self.wanted = False
        """Whether this node's ranks look at those of others."""
        self._messages = Messages("heartbeats")
        self._closed = threading.Event()
        threading.Thread(target=self._carry_again_and_again, name="heartbeats", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _carry_again_and_again(self) -> None:
        here = self.disks.first_rank
        # without rank 0, nobody can be asked: each node then goes by its own ranks
        with contextlib.suppress(RuntimeError, OSError):
            while not self._closed.wait(self.look_seconds / 2):
                own = [heartbeat_path(self.folder, rank) for rank in self.disks.groups()[here]]
                places = {path.name: path.read_text() for path in own if path.exists()}
                self._messages.send(str(here), json.dumps(places).encode())
                if (self.folder / ALARM).exists():
                    self._messages.send(ALARM, b"yes")
                elif self._messages.read(ALARM) is not None and not self._closed.is_set():
                    _created(self.folder / ALARM)
                for other in set(self.disks.first_ranks) - {here} if self.wanted else ():
                    for name, text in json.loads(self._messages.read(str(other)) or "{}").items():
                        (self.folder / name).write_text(text)


def _created(path: Path) -> bool:
    with contextlib.suppress(FileExistsError):
        # it fails if the file exists, so exactly one rank succeeds
        path.touch(exist_ok=False)
        return True
    return False


def described(rank: int, place: HeartbeatRecord | None, silent: bool) -> str:
    """Describe in words one rank that did not arrive."""
    if place is None:
        return f"rank {rank} (no heartbeat)"
    how = "its process does not run" if silent else "its process runs"
    return f"rank {rank} on {place.host} (process {place.process}, {place.phase} at step {place.step}, {how})"


def clear(folder: Path) -> None:
    """Remove the heartbeats and the alarm of an earlier start; what else is there stays."""
    for path in (*folder.glob("rank-*.json"), folder / ALARM):
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
