"""A run folder as the report reads it: every file optional but the metrics, none trusted to be whole."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretraining.errors import UserError
from pretraining.heartbeat import killed_ranks
from pretraining.reporting.metrics_file import MetricsFile
from pretraining.run_dir import RunDir, read_rows, unix_seconds

ENDINGS = {"end": "finished", "stopped": "stopped", "hang": "hang", "gave_up": "gave up"}
"""Events after which no process of the run is left, until a start or a resume -> the state that they mean."""
SILENT_SECONDS = 600.0
FEWEST_SILENT_SECONDS = 120.0


@dataclass(frozen=True)
class Standing:
    """How a run stands at one moment."""

    state: str
    """finished, stopped, hang or "gave up" as its last event says; without such an event killed if its processes are
    gone for certain, else running or silent, as the clock says.
    """
    since: float
    """UNIX seconds: of that event; of a run without one, of what it wrote last."""
    step: int
    reason: str = ""
    """Who asked for a stop, or why it gave up."""
    checkpoint: str | None = None
    """The newest that is committed in the run folder: what the same command continues from."""


class RunRecord:
    """What the files of one run say; `refresh` reads again what has changed.

    Raises:
        UserError: no such folder, or one that no run has written to.
    """

    def __init__(self, folder: Path):
        self.run = RunDir(folder)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give run folders, such as runs/tiny")
        if not (self.run.metrics.exists() or self.run.events.exists()):
            raise UserError(
                f"{folder}: no metrics.jsonl there, so no run has logged a step; give run folders, such as runs/tiny"
            )
        self.metrics = MetricsFile(self.run.metrics)
        self.refresh()

    def refresh(self) -> "RunRecord":
        """Read what is new."""
        self.metrics.read()
        self.events = read_rows(self.run.events)
        self.samples = [row for row in read_rows(self.run.samples) if isinstance(row.get("step"), int)]
        self.recipe, self.plan = _object(self.run.recipe), _object(self.run.plan)
        self.environment, self.mixture = _object(self.run.environment), _object(self.run.mixture)
        self.name = str(self.recipe.get("name") or self.run.path.resolve().name)
        self._place_rows()
        return self

    def _place_rows(self) -> None:
        """Step, tokens and hours of every row; hours are wall time since the first start, or training time."""
        self.steps = np.array(self.metrics.steps)
        rows, tokens = self.metrics.column("train/tokens")
        per_step = self.recipe.get("budget", {}).get("tokens_per_step", 0)
        known = len(rows) == len(self.steps) and len(rows) > 0
        self.tokens = tokens if known else self.steps * float(per_step or 0)
        times = np.array(self.metrics.times)
        self.has_times = bool(len(times)) and not np.isnan(times).any()
        if self.has_times:
            began = min([times[0], *(self.event_time(event) for event in self.events[:1])])
            self.hours = np.maximum(0.0, times - began) / 3600
        else:
            self.hours = self._training_hours()

    def _training_hours(self) -> np.ndarray:
        rows, seconds = self.metrics.column("throughput/step_seconds")
        if not len(rows):
            return np.zeros(len(self.steps))
        done = np.cumsum(np.diff(self.steps[rows], prepend=0) * seconds)
        return np.interp(self.steps, self.steps[rows], done) / 3600

    def at_step(self, step: float) -> dict[str, float]:
        """{"step", "tokens", "hours"} of a step, between the logged ones by interpolation."""
        if not len(self.steps):
            return {"step": step, "tokens": 0.0, "hours": 0.0}
        places = {"tokens": self.tokens, "hours": self.hours}
        return {
            "step": float(step),
            **{name: float(np.interp(step, self.steps, x)) for name, x in places.items()},
        }

    def step_of(self, event: dict) -> float:
        """The step an event belongs to: its own, its checkpoint's, else that of the last row before it."""
        if isinstance(event.get("step"), int | float):
            return float(event["step"])
        number = str(event.get("checkpoint") or "").rpartition("-")[2]
        if number.isdigit():
            return float(number)
        if event.get("event") == "start" or not len(self.steps):
            return 0.0
        if event.get("event") == "end" or not self.has_times:
            return float(self.steps[-1])
        before = np.searchsorted(np.array(self.metrics.times), self.event_time(event), side="right")
        return float(self.steps[before - 1]) if before else 0.0

    @staticmethod
    def event_time(event: dict) -> float:
        """UNIX seconds of an event; infinity where it does not say."""
        try:
            return float(unix_seconds(event["time"]))
        except (KeyError, TypeError, ValueError):
            return float("inf")

    def standing(self, now: float | None = None) -> Standing:
        """How the run stands at `now`, in UNIX seconds: at the time of the call if not given."""
        kinds = ("start", "resume", *ENDINGS)
        last = next((event for event in reversed(self.events) if event.get("event") in kinds), {})
        checkpoint = next((f"checkpoint-{step}" for step in reversed(self.checkpoint_steps())), None)
        if last.get("event") in ENDINGS:
            reason = str(last.get("reason") or last.get("why") or "")
            since, step = min(self.event_time(last), time.time()), int(self.step_of(last))
            return Standing(ENDINGS[last["event"]], since, step, reason, checkpoint)
        step = int(self.steps[-1]) if len(self.steps) else 0
        if killed := killed_ranks(self.run.heartbeats, self.event_time(last) if last else 0.0):
            step = max(step, *(place.step for place in killed))
            return Standing("killed", self.last_written, step, checkpoint=checkpoint)
        silent = (time.time() if now is None else now) - self.last_written > self.silent_after
        return Standing("silent" if silent else "running", self.last_written, step, checkpoint=checkpoint)

    def checkpoint_steps(self) -> list[int]:
        """Steps of the committed checkpoints that lie in the run folder, rising."""
        folders = [path.parent.name for path in self.run.path.glob("checkpoint-*/committed.json")]
        return sorted(int(name.rpartition("-")[2]) for name in folders if name.rpartition("-")[2].isdigit())

    @property
    def state(self) -> str:
        """Of the standing at this moment."""
        return self.standing().state

    @property
    def last_written(self) -> float:
        """UNIX seconds of the last row or event, by its own time: a copy of the folder keeps it."""
        times = [*self.metrics.times[-1:], *(self.event_time(event) for event in self.events[-1:])]
        return max((moment for moment in times if np.isfinite(moment)), default=self.newest_seconds)

    @property
    def silent_after(self) -> float:
        """Seconds without a row or an event after which a run without an ending counts as silent.

        Three times its longest pause since it was last started, which holds its validations and saves.
        """
        starts = [event for event in self.events if event.get("event") in ("start", "resume")]
        opened = self.event_time(starts[-1]) if starts else 0.0
        times = np.array(self.metrics.times)
        pauses = np.diff(times[times >= opened])
        return max(FEWEST_SILENT_SECONDS, 3 * float(pauses.max())) if len(pauses) else SILENT_SECONDS

    @property
    def newest_seconds(self) -> float:
        """UNIX seconds at which the files of rows and events were last changed."""
        files = [path for path in (self.run.metrics, self.run.events) if path.exists()]
        return max((path.stat().st_mtime for path in files), default=0.0)


def _object(path: Path) -> dict:
    """The object in a JSON file; empty where there is none or it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
