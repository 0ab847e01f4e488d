"""A run that stands still: every rank's stacks are dumped, the ranks that did not arrive named, the run left.

The launcher or `pretraining.supervise` starts it again. What waits is the main thread, in a collective without
end; the watch is a thread of its own.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pretraining.runtime.exit_codes import HANG, tell_exit_code
from pretraining.runtime.heartbeat import Heartbeat, Place, read_place
from pretraining.runtime.process_group import Agreement
from pretraining.runtime.run_folder import RunFolder, utc_now
from pretraining.training.ranks import at_leaving

LOOKS_PER_LIMIT = 20
LONGEST_LOOK_SECONDS = 30.0
SILENT_LOOKS = 4
"""A heartbeat unchanged for so many looks belongs to a process that does not run."""
ALARM = "ALARM"


class HangCallback(TrainerCallback):
    """Tells the heartbeat what the Trainer comes to. hang_minutes None: no watch."""

    def __init__(self, run: RunFolder, hang_minutes: float | None) -> None:
        self.run, self.hang_minutes = run, hang_minutes
        self.watch: Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.hang_minutes is None or self.watch is not None:
            return  # no watch, or that of the attempt before a rollback
        if state.is_world_process_zero:
            clear(self.run.heartbeats)
        Agreement().largest(0)  # nobody's file before the folder is clear
        self.watch = Watch(self.run, self.hang_minutes * 60, args.process_index, args.world_size)
        at_leaving(self.watch.close)

    def _arrive(self, phase: str, state) -> None:
        if self.watch is not None:
            self.watch.heartbeat.arrive(phase, state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._arrive("training", state)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._arrive("training", state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._arrive("training", state)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._arrive("validation", state)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._arrive("validation", state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._arrive("save", state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._arrive("end", state)


class Watch:
    """The thread that looks: writes this rank's heartbeat, and raises the alarm when it has not moved for long.

    limit_seconds: from the last arrival to the naming.
    """

    def __init__(self, run: RunFolder, limit_seconds: float, rank: int, world_size: int) -> None:
        self.run, self.limit_seconds, self.rank, self.world_size = run, limit_seconds, rank, world_size
        self.look_seconds = min(limit_seconds / LOOKS_PER_LIMIT, LONGEST_LOOK_SECONDS)
        self.heartbeat = Heartbeat(run.heartbeats, rank)
        self._beats_seen: dict[int, tuple[int, int]] = {}
        self._moves_seen: dict[int, int] = {}
        self._observed_since = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_again_and_again, name="hangs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch and remove what only it needed."""
        self._closed.set()
        self._thread.join()
        self.heartbeat.close()
        if self.rank == 0:
            clear(self.run.heartbeats)

    def _look_again_and_again(self) -> None:
        number, looked_at = 0, time.monotonic()
        while not self._closed.wait(self.look_seconds):
            slept, looked_at = time.monotonic() - looked_at, time.monotonic()
            if slept > SILENT_LOOKS * self.look_seconds:  # it was this process that stood still
                self.heartbeat.arrived_at += slept
            number += 1
            self._look(number)

    def _look(self, number: int) -> None:
        self.heartbeat.beat(number)
        waited = time.monotonic() - self.heartbeat.arrived_at
        if waited > self.limit_seconds / 2 and self._others_move(self._observe(number)):
            self.heartbeat.arrived_at, waited = time.monotonic(), 0.0
        if waited >= self.limit_seconds - self.look_seconds or (self.run.heartbeats / ALARM).exists():
            self._raise_alarm(number)

    def _observe(self, number: int) -> dict[int, Place | None]:
        """Every rank's place, and since which look its heartbeat has not changed."""
        self._observed_since = min(number, self._observed_since or number)
        places = {rank: read_place(self.run.heartbeats, rank) for rank in range(self.world_size)}
        for rank, place in places.items():
            beats = -1 if place is None else place.beats
            if self._beats_seen.get(rank, (None,))[0] != beats:
                self._beats_seen[rank] = (beats, number)
        return places

    def _others_move(self, places: dict[int, Place | None]) -> bool:
        """Whether a rank that this one may wait for has got on with a long piece of work since the last call."""
        seen = self._moves_seen
        self._moves_seen = {rank: place.moves for rank, place in places.items() if place is not None}
        return any(moves > seen.get(rank, moves) for rank, moves in self._moves_seen.items())

    def _raise_alarm(self, number: int) -> None:
        """All ranks that run come here within a look of each other; the first of them reports."""
        first = _created(self.run.heartbeats / ALARM)
        dump_stacks(self.run.stacks, self.heartbeat.place)
        places = self._observe(number)
        last = max(number, self._observed_since + SILENT_LOOKS) if first else number + 2 * SILENT_LOOKS
        while number < last:  # on a busy machine there were fewer looks than the limit has room for
            time.sleep(self.look_seconds)
            number += 1
            self.heartbeat.beat(number)
            places = self._observe(number)
        if first:
            seen = self._beats_seen.items()
            self._report(places, {rank for rank, (_, since) in seen if number - since >= SILENT_LOOKS})
        tell_exit_code(HANG)
        time.sleep(2 * self.look_seconds)  # for the others' stacks: the first to leave ends them all
        os._exit(HANG)

    def _report(self, places: dict[int, Place | None], silent: set[int]) -> None:
        late = not_arrived(places, silent)
        who = "; ".join(described(rank, places[rank], rank in silent) for rank in late)
        who = who or "every rank waits at the same place"
        minutes = round(self.limit_seconds / 60, 2)
        step = max(place.step for place in places.values() if place is not None)  # its own is among them
        told = {"minutes": minutes, "ranks": late, "who": who, "stacks": str(self.run.stacks)}
        self.run.add_event("hang", step=step, **told)
        line = f"no progress for {minutes:g} minutes; did not arrive: {who}; stacks: {self.run.stacks}"
        print(f"hang: {line}", file=sys.stderr, flush=True)


def _created(path: Path) -> bool:
    """Whether it was this rank that made the file."""
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    return True


def not_arrived(places: dict[int, Place | None], silent: set[int]) -> list[int]:
    """Ranks whose process stands still, and those that have come less far than the others."""
    furthest = max((place.arrivals for place in places.values() if place), default=0)
    behind = {rank for rank, place in places.items() if place is None or place.arrivals < furthest}
    return sorted(silent | behind)


def described(rank: int, place: Place | None, silent: bool) -> str:
    """One rank that did not arrive, in words."""
    if place is None:
        return f"rank {rank} (no heartbeat)"
    how = "its process does not run" if silent else "its process runs"
    return f"rank {rank} on {place.host} (process {place.process}, {place.phase} at step {place.step}, {how})"


def dump_stacks(folder: Path, place: Place) -> None:
    """This rank's Python stacks, of all threads, into a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{place.rank:05}.txt").open("w") as file:
        file.write(f"{utc_now()} {described(place.rank, place, silent=False)}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def clear(folder: Path) -> None:
    """Remove the heartbeats and the alarm of an earlier start."""
    for path in folder.glob("*"):
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
