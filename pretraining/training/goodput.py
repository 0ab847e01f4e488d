"""Goodput: the share of the wall time since the first start that went into steps which counted."""

import time

from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.run_folder import RunFolder, StepTotals, first_step, stopped_seconds, unix_seconds

SECONDS = "throughput/step_seconds"


class Goodput:
    """Steps count if their rows stay in metrics.jsonl. All other time is lost: start-up, evaluation, saving, steps
    done twice after a kill or a rollback, and the time between a crash and the next start.

    The time between a stop on request and the next start is not the run's: it counts on neither side.
    """

    def __init__(self, run: RunFolder, kept_rows: list[dict]):
        """kept_rows: of metrics.jsonl, up to the step that training continues from."""
        events = read_rows(run.events)
        starts = [number for number, row in enumerate(events) if row.get("event") == "start"]
        self.began = unix_seconds(events[starts[-1]]["time"]) if starts else time.time()
        self.stopped_seconds = stopped_seconds(events[starts[-1] :]) if starts else 0.0
        timed = [(row["step"], row[SECONDS], 0.0) for row in kept_rows if SECONDS in row]
        self.good_seconds = StepTotals.of(timed, first_step(events)).seconds

    def add(self, steps: int, step_seconds: float) -> float:
        """Count `steps` steps; the goodput now."""
        self.good_seconds += steps * step_seconds
        wall_seconds = time.time() - self.began - self.stopped_seconds
        return min(1.0, self.good_seconds / wall_seconds) if wall_seconds > 0 else 1.0
