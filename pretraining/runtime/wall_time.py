"""Account for the wall time of a run: what its steps took, what was lost to which cause, and what all of it cost.

Everything here is a function of the rows of events.jsonl and metrics.jsonl, so that a run, its report and a look back
at it give the same numbers.
"""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pretraining.runtime.run_folder import (
    STARTS,
    RunFolder,
    StepTotals,
    first_step,
    read_events,
    unix_seconds,
)

SECONDS = "throughput/step_seconds"
CAUSES = {
    "start": "starting and ending",
    "restart": "restarts after a crash, with the steps done again",
    "hang": "hangs, until the next start, with the steps done again",
    "rollback": "rollbacks, with the steps done again",
    "validation": "validations",
    "saving": "waiting for saves",
    "data": "waiting for data",
    "slow_rank": "waiting for a slow rank",
}
"""{cause of lost time: how it is called}"""


METRICS = {
    "step_seconds": SECONDS,
    "data": "throughput/data_wait_seconds",
    "slow_rank": "throughput/slow_rank_seconds",
    "validation": "throughput/evaluation_seconds",
    "saving": "throughput/saving_seconds",
}
"""{field of `Row`: the metric that it is}"""


class Row(NamedTuple):
    """What one row of metrics.jsonl says about time. The first three are means per step, pauses are sums."""

    step: float
    time: float
    step_seconds: float
    data: float = 0.0
    slow_rank: float = 0.0
    validation: float = 0.0
    saving: float = 0.0


@dataclass(frozen=True)
class Attempt:
    """A run between one start and the next, in UNIX seconds."""

    began: float
    ended: float
    """When its GPUs were free: at its end or a stop on request; else when the next attempt began."""
    ranks: int
    lost_as: str
    """The cause to which the time after its last row that counts is lost."""

    @property
    def seconds(self) -> float:
        """Its wall time; if it crashed, with the time until the next start."""
        return self.ended - self.began


def start_rows(events: list[dict]) -> list[int]:
    """List the numbers of the rows with which an attempt begins."""
    return [number for number, row in enumerate(events) if row.get("event") in STARTS and "time" in row]


def goes_on_by_itself(start: dict) -> bool:
    """Say if a start was made by the launcher, or the supervisor, of the one before, as if torchrun takes in a node."""
    return bool(start.get("restart"))


def attempts(events: list[dict], until: float) -> list[Attempt]:
    """List the attempts of a run.

    events: rows of events.jsonl. until: UNIX seconds at which the last attempt ends if it has no end.
    """
    found: list[Attempt] = []
    events = [row for row in events if "time" in row]
    starts = start_rows(events)
    for first, after in itertools.pairwise([*starts, len(events)]):
        began, is_last = unix_seconds(events[first]["time"]), after == len(events)
        ended, lost_as = (until, "start") if is_last else (unix_seconds(events[after]["time"]), "restart")
        goes_on = not is_last and goes_on_by_itself(events[after])
        for event in events[first:after]:
            kind = event.get("event")
            if kind == "rollback" and not is_last:
                lost_as = "rollback"
            elif kind == "hang":
                lost_as = "hang"
            # "asked" is only written if nobody asked, as when the launcher was gone
            elif kind == "end" or (kind == "stopped" and event.get("asked", True) and not goes_on):
                ended, lost_as = unix_seconds(event["time"]), "start"
        # a clock that is set back must not make time negative
        found.append(Attempt(began, max(began, ended), int(events[first].get("world_size") or 1), lost_as))
    return found


def stopped_seconds(events: list[dict]) -> float:
    """Add up the seconds between every end or stop on request and the next start, from the rows of events.jsonl."""
    found = attempts(events, 0.0)
    return sum(max(0.0, after.began - before.ended) for before, after in itertools.pairwise(found))


@dataclass(frozen=True)
class WallTime:
    """How the wall time of a run was spent. The time between a stop on request and the next start is nobody's."""

    seconds: float
    rank_seconds: float
    """The same, times the ranks: a GPU is paid for while its run starts again too."""
    lost: dict[str, float]
    """{cause: seconds}, of CAUSES. What is left of `seconds` are the steps that count."""

    @classmethod
    def of(cls, events: list[dict], rows: Iterable[Row], until: float) -> "WallTime":
        """Account for a run. rows: those kept, in their order. until: UNIX seconds, if the run has not ended."""
        lost = dict.fromkeys(CAUSES, 0.0)
        all_attempts, rows = attempts(events, until), list(rows)
        before, position, begun_after = float(first_step(events)), 0, "start"
        for attempt, after in itertools.zip_longest(all_attempts, all_attempts[1:]):
            next_start = after.began if after else float("inf")
            accounted, reached = 0.0, attempt.began
            while position < len(rows) and rows[position].time < next_start:
                row = rows[position]
                steps = max(0.0, row.step - before)
                lost["data"] += steps * row.data
                lost["slow_rank"] += steps * row.slow_rank
                lost["validation"] += row.validation
                lost["saving"] += row.saving
                accounted += steps * row.step_seconds + row.validation + row.saving
                before, reached, position = row.step, row.time, position + 1
            # between the start and the last row that counts, what its rows do not account for
            lost[begun_after] += max(0.0, reached - attempt.began - accounted)
            # after that row: steps that are done again, the time until the next start, the closing validation
            lost[attempt.lost_as] += max(0.0, attempt.ended - reached)
            begun_after = attempt.lost_as
        total = sum(attempt.seconds for attempt in all_attempts)
        rank_seconds = sum(attempt.seconds * attempt.ranks for attempt in all_attempts)
        return cls(total, rank_seconds, lost)

    @property
    def shares(self) -> dict[str, float]:
        """{cause: share of the wall time}, largest first, without causes that took nothing."""
        rising = sorted(self.lost.items(), key=lambda item: -item[1])
        return {cause: lost / self.seconds for cause, lost in rising if lost > 0 and self.seconds > 0}


@dataclass(frozen=True)
class Price:
    """What a GPU costs."""

    dollars_per_gpu_hour: float
    source: str
    """Who says so: the recipe, or a provider of the price table with the date."""

    def dollars(self, rank_seconds: float) -> float:
        """Give the cost of so many seconds of one rank."""
        return rank_seconds / 3600 * self.dollars_per_gpu_hour


class Goodput:
    """Steps count if their rows stay in metrics.jsonl. All other time is lost: start-up, evaluation, saving, steps
    done twice after a kill or a rollback, and the time between a crash and the next start.

    The time between a stop on request and the next start is not the run's: it counts on neither side.
    """

    def __init__(
        self, run: RunFolder, kept_rows: list[dict], ranks: int = 1, price: Price | None = None
    ) -> None:
        """kept_rows: of metrics.jsonl, up to the step that training continues from."""
        events, now = read_events(run.events), time.time()
        past = WallTime.of(events, (), now)
        # what came before this moment, and what the clock adds from here on
        self.seconds_before, self.rank_seconds_before, self.since = past.seconds, past.rank_seconds, now
        self.ranks, self.price = ranks, price
        timed = [(row["step"], row[SECONDS], 0.0) for row in kept_rows if SECONDS in row]
        self.good_seconds = StepTotals.of(timed, first_step(events)).seconds
        self.paused_seconds = 0.0
        self.own_seconds = 0.0

    def add(self, steps: int, step_seconds: float) -> float:
        """Count `steps` steps, and return the goodput now."""
        self.good_seconds += steps * step_seconds
        wall_seconds = self.seconds_before + time.time() - self.since
        return min(1.0, self.good_seconds / wall_seconds) if wall_seconds > 0 else 1.0

    def cost(self, in_steps: float, paused: float, seconds_left: float) -> dict[str, float]:
        """Return what the run has cost, and what it will have cost at its end; empty if no price is known.

        in_steps, paused: seconds of steps and of pauses since the last call. seconds_left: of the steps that remain,
        to which the pauses of this attempt are added in proportion. Failures are not foreseen.
        """
        self.own_seconds += in_steps
        self.paused_seconds += paused
        if self.price is None:
            return {}
        spent = self.rank_seconds_before + (time.time() - self.since) * self.ranks
        left = seconds_left * (1 + self.paused_seconds / max(self.own_seconds, 1e-9)) * self.ranks
        return {
            "cost/gpu_hours": round(spent / 3600, 6),
            "cost/dollars": round(self.price.dollars(spent), 6),
            "cost/dollars_at_end": round(self.price.dollars(spent + left), 6),
        }
