"""A run folder as the report reads it: every file is optional but the metrics, and none is trusted to be whole."""

import math
import os
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from pretraining.errors import UserError
from pretraining.outside.files import object_of, parse_json, read_json_value, regular
from pretraining.outside.schema import fits
from pretraining.recipe import recipe_schema
from pretraining.recipe.budget import Ramp, StepSizes
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.failures import read_failures, short
from pretraining.runtime.heartbeat import gone_ranks
from pretraining.runtime.lock import was_killed
from pretraining.runtime.metric_names import PLACE, grouped
from pretraining.runtime.run_folder import (
    STARTS,
    RunFolder,
    StepTotals,
    event_seconds,
    events_of,
    first_step,
    step_in_name,
    step_of_event,
)
from pretraining.runtime.wall_time import METRICS, SECONDS, Row, WallTime

ENDINGS = {"end": "finished", "stopped": "stopped", "hang": "hang", "gave_up": "gave up"}
"""{event after which no process of the run is left, until a start or a resume: the state that it means}"""
SILENT_SECONDS = 600.0
FEWEST_SILENT_SECONDS = 120.0
TAIL_BYTES = 64 << 10
"""Of events.jsonl, for a list of runs: in it is the last start or end, with all scores, and the notices sent of it."""
TAIL = (1, 4 << 10)
"""Blocks of metrics.jsonl, and bytes of each: the end, for a list of runs."""
FIRST_LOOK = (160, 32 << 10)
"""Spread over all of it, with its end, for a long run that has not been read yet."""


@dataclass(frozen=True)
class Standing:
    state: str
    """finished, stopped, hang or "gave up", from its last event. Without such an event: failed if a rank wrote an error
    since, killed if its processes are certainly gone, else running or silent, by the clock.
    """
    since: float
    """UNIX seconds of that event; without one, of what the run wrote last."""
    step: int
    reason: str = ""
    """Who asked for a stop, why it gave up, or the error."""
    checkpoint: str | None = None
    """The newest committed one in the run folder: the same command continues from it."""


class RunRecord:
    """What the files of one run say; `refresh` reads what has changed.

    Raises `UserError` if there is no such folder, or no run has written to it.
    """

    def __init__(self, folder: Path, excerpt: tuple[int, int] | None = None) -> None:
        self.run, self.excerpt = RunFolder(folder), excerpt
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give run folders, such as runs/tiny")
        if not (self.run.metrics.exists() or self.run.events.exists()):
            what = "no metrics.jsonl there, so no run has logged a step; give run folders, such as runs/tiny"
            raise UserError(f"{folder}: {what}")
        self.metrics = MetricsFile(self.run.metrics, excerpt)
        self.refresh()

    def refresh(self) -> "RunRecord":
        self.metrics.read()
        is_tail = self.excerpt is TAIL
        events = read_rows(self.run.events, TAIL_BYTES if is_tail else None)
        if is_tail:  # what says how the run stands, and when it wrote last
            events = [row for row in events[:-1] if row.get("event") in (*STARTS, *ENDINGS)] + events[-1:]
        self.events = events_of(events)
        samples = [] if is_tail else read_rows(self.run.samples)
        self.samples = [row for row in samples if isinstance(row.get("step"), int)]
        self.recipe = _object(self.run.recipe)
        others = (self.run.plan, self.run.environment, self.run.mixture)
        self.plan, self.environment, self.mixture = ({} if is_tail else _object(path) for path in others)
        self.name = str(self.recipe.get("name") or self.run.path.resolve().name)
        self._place_rows()
        return self

    def _place_rows(self) -> None:
        """Find step, tokens and hours of every row, then the step of every event, then the newest place of all.

        Hours are wall time since the first start; if rows have no time, training time. An event's step is its own or
        its checkpoint's, else the newest that was known then.
        """
        self.steps = np.array(self.metrics.steps)
        rows, tokens = self.metrics.column("train/tokens")
        per_step = self.recipe.get("budget", {}).get("tokens_per_step", 0)
        # else an estimate, which ignores a ramp
        known = len(rows) == len(self.steps) and len(rows) > 0 and bool(np.isfinite(tokens).all())
        self.tokens = tokens if known else self.steps * float(per_step or 0)
        times = np.array(self.metrics.times)
        self.has_times = bool(len(times)) and not np.isnan(times).any()
        if self.has_times:
            # the start event is earlier than the first row, by the steps before it
            began = min([times[0], *(event_seconds(event) for event in self.events[:1])])
            self.hours = np.maximum(0.0, times - began) / 3600
        else:
            rows, seconds = self.metrics.column(SECONDS)
            # A row has the seconds of one step, averaged since the row before.
            done = np.cumsum(np.diff(self.steps[rows], prepend=first_step(self.events)) * seconds)
            self.hours = np.interp(self.steps, self.steps[rows], done) / 3600 if len(rows) else 0 * self.steps
        self.event_steps, newest_then = [], 0.0
        for event in self.events:
            if (step := step_of_event(event)) is None:
                # an end follows every row, whatever the clocks say
                at_end = event.get("event") == "end" or not self.has_times
                before = np.searchsorted(times, np.inf if at_end else event_seconds(event), side="right")
                step = max([newest_then, *self.steps[:before][-1:]])
            # a start may go back to an earlier step, nothing else does
            newest_then = step if event.get("event") in STARTS else max(newest_then, step)
            self.event_steps.append(float(step))
        # `newest_step`: of the last row and of the events since the last start, which may be later
        starts = [n for n, event in enumerate(self.events) if event.get("event") in STARTS]
        since = self.event_steps[starts[-1] if starts else 0 :]
        self.newest_step = max([0.0, *self.steps[-1:], *since])
        # `at_step` interpolates between these; one more place is added if events are newer than rows
        self._known = {"step": self.steps, "tokens": self.tokens, "hours": self.hours}
        if len(self.steps) and self.newest_step <= self.steps[-1]:
            return
        newest = {name: float(known[-1]) if len(known) else 0.0 for name, known in self._known.items()}
        newest["tokens"] += self.tokens_at(int(self.newest_step)) - self.tokens_at(int(newest["step"]))
        newest["step"] = self.newest_step
        if self.has_times:
            newest["hours"] += max(0.0, self.last_written - self.metrics.times[-1]) / 3600
        self._known = {name: np.append(known, newest[name]) for name, known in self._known.items()}

    def tokens_at(self, step: int) -> int:
        """Return the tokens of so many steps by the recipe's step sizes; 0 if it has none."""
        budget = self.recipe.get("budget") or {}
        if not budget.get("tokens_per_step"):
            return 0
        ramp = Ramp.of(budget["ramp"]) if budget.get("ramp") else None
        return StepSizes.of(budget["tokens_per_step"], ramp).tokens_at(step)

    def taken(self) -> tuple[float, float]:
        """Return the steps and tokens of this folder: without those before the checkpoint with which it began."""
        if not len(self.steps):
            return 0.0, 0.0
        first, last = first_step(self.events), float(self.steps[-1])
        return last - first, float(self.tokens[-1]) - self.tokens_at(first)

    def wall_time(self) -> WallTime | None:
        """Account for its time; None if a row has no time."""
        if not self.has_times:
            return None
        validations, _ = self.metrics.column("eval/loss")
        validated = self.metrics.times[validations[-1]] if len(validations) else 0.0
        columns = {}
        for field_name, metric in METRICS.items():
            rows, values = self.metrics.column(metric)
            columns[field_name] = np.zeros(len(self.steps))
            columns[field_name][rows] = values
        timed, _ = self.metrics.column(SECONDS)
        places = np.stack([self.steps, np.array(self.metrics.times), *columns.values()])
        rows_of_steps = [Row(*row) for row in places[:, timed].T.tolist()]
        return WallTime.of(self.events, rows_of_steps, self.last_written, validated)

    def speed(self) -> dict[str, float]:
        """Average over all kept steps: {"tokens_per_second", "step_seconds", "training_seconds", "mfu"}, if known."""
        speed = self._totals("tokens_per_second").speed()
        utilization = self._totals("mfu")  # its `tokens` are the sum of MFU times seconds
        return speed | ({"mfu": utilization.tokens / utilization.seconds} if utilization.seconds else {})

    def _totals(self, rate: str) -> StepTotals:
        rows, seconds = self.metrics.column(SECONDS)
        rated, rates = self.metrics.column(f"throughput/{rate}")
        _, of_both, of_rates = np.intersect1d(rows, rated, assume_unique=True, return_indices=True)
        columns = self.steps[rows[of_both]], seconds[of_both], rates[of_rates]
        return StepTotals.of(zip(*map(np.ndarray.tolist, columns), strict=True), first_step(self.events))

    def at_step(self, step: float) -> dict[str, float]:
        """Give {"step", "tokens", "hours"} of a step; between known steps by interpolation."""
        places = {name: float(np.interp(step, self._known["step"], x)) for name, x in self._known.items()}
        return {**places, "step": float(step)}

    @property
    def budget_share(self) -> float | None:
        """Share of the token budget spent at the newest step; None if unknown."""
        rows, shares = self.metrics.column("throughput/budget_share")
        tokens = self.at_step(self.newest_step)["tokens"]
        budget = (self.recipe.get("budget") or {}).get("tokens")
        if len(rows) and self.tokens[rows[-1]]:
            return min(1.0, float(shares[-1] * tokens / self.tokens[rows[-1]]))
        return min(1.0, tokens / budget) if budget else None

    def standing(self, now: float | None = None) -> Standing:
        """Judge the run's state at `now`, in UNIX seconds (default: the time of the call)."""
        last: dict[str, Any] = {}
        for event, step in zip(self.events, self.event_steps, strict=True):
            if event.get("event") in (*STARTS, *ENDINGS):
                last, last_step = event, int(step)
        committed = self.checkpoint_steps()
        checkpoint = f"checkpoint-{committed[-1]}" if committed else None
        if last.get("event") in ENDINGS:
            reason = str(last.get("reason") or last.get("why") or "")
            since = min(event_seconds(last), time.time())  # infinity if the event has no time
            return Standing(ENDINGS[last["event"]], since, last_step, reason, checkpoint)
        began = event_seconds(last) if last else 0.0
        killed = gone_ranks(self.run.heartbeats, began, or_none=True)
        quiet_seconds = (time.time() if now is None else now) - self.last_written
        state = "silent" if quiet_seconds > self.silent_after else "running"
        # certain, and so before the clock, which can only suspect it; by the lock, before its ranks had heartbeats
        if killed or was_killed(self.run.path):
            state = "killed"
        step = int(max([self.newest_step, *(place.step for place in killed)]))
        errors = [each for each in read_failures(self.run) if each.time >= began and not each.is_consequence]
        if errors:
            return Standing("failed", errors[0].time, step, short(errors[0].error), checkpoint)
        return Standing(state, self.last_written, step, checkpoint=checkpoint)

    def dollars(self, spent: WallTime | None) -> float | None:
        """Return what it has cost so far, the time after its last row included; None if no price is known."""
        dollars, gpu_hours = map(self.metrics.last, ("cost/dollars", "cost/gpu_hours"))
        if dollars is None or not gpu_hours or spent is None:
            return dollars
        return dollars / gpu_hours * spent.rank_seconds / 3600

    def checkpoint_steps(self) -> list[int]:
        return sorted(map(step_in_name, self.run.committed()))

    @property
    def state(self) -> str:
        return self.standing().state

    @property
    def last_written(self) -> float:
        """UNIX seconds of the last row or event, by its own time, which a copy of the folder keeps."""
        times = [*self.metrics.times[-1:], *(event_seconds(event) for event in self.events[-1:])]
        return max((moment for moment in times if np.isfinite(moment)), default=self.newest_seconds)

    @property
    def silent_after(self) -> float:
        """Seconds without a row or an event after which a run without an ending counts as silent.

        Three times its longest pause since its last start; validations and saves are such pauses.
        """
        starts = [event for event in self.events if event.get("event") in STARTS]
        opened = event_seconds(starts[-1]) if starts else 0.0
        times = np.array(self.metrics.times)
        if self.metrics.is_excerpt:
            return SILENT_SECONDS  # what is between its blocks are no pauses
        # not across a restart: that pause says nothing about this one
        pauses = np.diff(times[times >= opened])
        return max(FEWEST_SILENT_SECONDS, 3 * float(pauses.max())) if len(pauses) else SILENT_SECONDS

    @property
    def newest_seconds(self) -> float:
        """UNIX seconds of the last change to the files of rows and events."""
        files = [path for path in (self.run.metrics, self.run.events) if path.exists()]
        return max((path.stat().st_mtime for path in files), default=0.0)


_NUMBER = {"type": ["number", "null"]}
_RAMP = recipe_schema()["properties"]["budget"]["properties"]["ramp"]
_SHAPES: dict[str, dict] = {
    "budget": object_of({}, {"tokens": _NUMBER, "tokens_per_step": _NUMBER, "ramp": _RAMP}),
    "report": object_of({}, {"target_loss": _NUMBER, "every_seconds": _NUMBER}),
    "size": {"type": ["object", "null"], "properties": {"matmul": _NUMBER}},
    "training_flops": _NUMBER,
    "run": object_of({}, {"sources": {"type": "array", "items": {"type": "object"}}}),
    "predicted": {"type": ["object", "null"]},
    "checkpoint_bytes": _NUMBER,
}
"""What the report relies on in recipe, plan and mixture."""


def _object(path: Path) -> dict:
    """Read the object in a JSON file, without keys that have another shape; empty if it cannot be read."""
    try:
        value = read_json_value(path)
    except (OSError, ValueError):
        return {}
    items = value.items() if isinstance(value, dict) else ()
    return {key: item for key, item in items if key not in _SHAPES or fits(item, _SHAPES[key])}


class MetricsFile:
    """The rows of a metrics.jsonl, column by column: a million rows fit in memory.

    `read` reads what was added since the last call. A line that is no row (a dying run left it half-written) is
    skipped and counted. A file that was replaced, as a resumed run does, is read anew.

    excerpt: blocks of a longer file that are read in place of all of it; what is added later is read all the same.
    """

    def __init__(self, path: Path, excerpt: tuple[int, int] | None = None) -> None:
        self.path, self.excerpt = path, excerpt
        self._forget()

    def _forget(self) -> None:
        self.offset, self.broken_lines, self.is_excerpt = 0, 0, False
        self.last_line = b""
        self.steps, self.times = array("d"), array("d")
        # arrays, not lists: 16 bytes a value, so that a million rows fit
        self.columns: dict[str, tuple[array, array]] = {}  # name -> (row numbers, values)
        self._names: dict[str, str] = {}

    def read(self) -> None:
        if not self.path.is_file():
            return
        with open(self.path, "rb", opener=regular) as file:
            # Another file under this name, or other rows in it: not by its inode, which a new file may have again.
            file.seek(self.offset - len(self.last_line))
            if file.read(len(self.last_line)) != self.last_line:
                self._forget()
            if self.excerpt is not None and not self.offset:
                self._read_blocks(file, file.seek(0, os.SEEK_END), *self.excerpt)
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written, or never finished
                self.offset += len(line)
                self.last_line = line
                self._add(line)

    def _read_blocks(self, file: BinaryIO, size: int, blocks: int, block_bytes: int) -> None:
        """Add the rows of all blocks but the last, and set the offset to that one's first row."""
        while True:
            if size <= 2 * blocks * block_bytes:
                return  # it is short enough to be read whole
            file.seek(size - block_bytes)
            file.readline()
            if b"\n" in file.read():
                break
            block_bytes *= 8  # a row of many layers may be longer than a block
        self.is_excerpt = True
        for start in np.linspace(size - block_bytes, 0, blocks).astype(int)[::-1].tolist():
            file.seek(start)
            if start:
                file.readline()  # the rest of a row
            self.offset = file.tell()
            if start + block_bytes < size:
                for line in file.readlines(block_bytes):
                    self._add(line)

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Give (row numbers, values) of a metric; both are empty if no row has it."""
        rows, values = self.columns.get(name, (array("q"), array("d")))
        return np.array(rows, dtype=np.int64), np.array(values, dtype=np.float64)

    def names(self) -> list[str]:
        return sorted(self.columns)

    def last(self, name: str) -> float | None:
        return self.columns[name][1][-1] if name in self.columns else None

    def _add(self, line: bytes) -> None:
        try:
            row = orjson.loads(line)
        except ValueError:
            row = None
            with suppress(ValueError):
                row = parse_json(line)  # Python writes NaN, which is no JSON: orjson refuses it
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int | float) or not math.isfinite(step):
            self.broken_lines += bool(line.strip())
            return
        number = len(self.steps)
        self.steps.append(row["step"])
        # NaN keeps the column as long as the steps
        self.times.append(row["time"] if isinstance(row.get("time"), int | float) else math.nan)
        for name, value in row.items():
            if name not in PLACE and isinstance(value, int | float):
                if name not in self._names:
                    self._names[name] = grouped(name)
                    self.columns.setdefault(self._names[name], (array("q"), array("d")))
                rows, values = self.columns[self._names[name]]
                rows.append(number)
                values.append(value)
