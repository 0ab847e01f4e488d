"""Account for the wall time of a run: what its steps took, what was lost to which cause, and what all of it cost.

Everything here is a function of the rows of events.jsonl and metrics.jsonl, so that a run, its report and a look back
at it give the same numbers.
"""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from pretraining.runtime.run_folder import (
    STARTS,
    RunFolder,
    StepTotals,
    event_seconds,
    first_step,
    read_events,
    step_of_event,
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


CLAIMED = ("saving", "validation", "data", "slow_rank", "counted")  # those first whose length is known best

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


@dataclass
class Attempt:
    """A run between one start and the next, in UNIX seconds."""

    began: float
    ended: float  # its end, or its last sign of life, if it was not given the time to say more
    ranks: int
    from_step: int
    to_step: int  # the newest that it is known to have reached
    end: str
    """finished, stopped, rollback, hang, "gave up", crash, running, silent, or met anew (torchrun takes in a node)."""
    why: str = ""
    held_until: float = 0.0  # when its GPUs were free: at its end or a stop; else at the next start

    @property
    def seconds(self) -> float:
        """Its wall time; if it crashed, with the time until the next start."""
        return self.held_until - self.began

    @property
    def lost_as(self) -> str:
        """The cause to which the time after its last row that counts is lost."""
        known = dict.fromkeys(("finished", "stopped", "running", "silent"), "start")
        return known.get(self.end, self.end if self.end in CAUSES else "restart")


def start_rows(events: list[dict]) -> list[int]:
    """List the numbers of the rows with which an attempt begins."""
    return [n for n, row in enumerate(events) if row.get("event") in STARTS and isfinite(event_seconds(row))]


def attempts(events: list[dict], until: float) -> list[Attempt]:
    """List a run's attempts by the rows of events.jsonl; one without an end ends at `until` (UNIX seconds)."""
    found: list[Attempt] = []
    for first, after in itertools.pairwise([*start_rows(events), len(events)]):
        rows, following = events[first:after], events[after] if after < len(events) else None
        began = event_seconds(rows[0])
        end, last = _end_of(rows, following)
        next_start = until if following is None else event_seconds(following)
        at = event_seconds(last) if end in ("finished", "stopped") else next_start
        # a clock that is set back must not make time negative
        held_until = max(began, at if isfinite(at) else next_start)
        why = next((str(last[key]) for key in ("reason", "who", "why") if last.get(key)), "")
        ranks, step = int(rows[0].get("world_size") or 1), int(step_of_event(rows[0]) or 0)
        found.append(Attempt(began, held_until, ranks, step, step, end, why, held_until))
    return found


def _end_of(rows: list[dict], following: dict | None) -> tuple[str, dict]:
    """Return how an attempt ended, and by which event; without one, it runs if no start follows."""
    ends = {"end": "finished", "hang": "hang", "gave_up": "gave up", "failed": "crash"}
    if following:
        ends["rollback"] = "rollback"
    for event in reversed(rows):
        kind = event.get("event")
        # "asked" is only written if nobody asked, as when the launcher was gone
        if kind == "stopped" and not event.get("asked", True):
            return "crash", event
        if kind == "stopped":
            # started again by its launcher, or by the supervisor
            return "met anew" if following and following.get("restart") else "stopped", event
        if kind in ends:
            return ends[kind], event
    return "crash" if following else "running", {}


@dataclass(frozen=True)
class WallTime:
    """How the wall time of a run was spent: each second in a step that counts, or lost to one cause."""

    seconds: float
    rank_seconds: float  # the same, times the ranks: a GPU is paid for while its run starts again too
    counted: float  # seconds of the steps that count, without those in which they waited
    lost: dict[str, float]  # {cause: seconds}, of CAUSES
    stopped: float  # between an end or a stop on request and the next start; in no other field

    @classmethod
    def of(cls, events: list[dict], rows: Iterable[Row], until: float, validated: float = 0.0) -> "WallTime":
        """Account for a run.

        rows: those kept, in their order. until: UNIX seconds, if the run has not ended. validated: UNIX seconds at
        which the validation after the last row had been made.
        """
        spent = dict.fromkeys(("counted", *CAUSES), 0.0)
        all_attempts, rows = attempts(events, until), list(rows)
        before, position, begun_after = float(first_step(events)), 0, "start"
        for attempt, after in itertools.zip_longest(all_attempts, all_attempts[1:]):
            reached, claims = attempt.began, dict.fromkeys(CLAIMED, 0.0)
            # of the steps of a row, those up to this attempt's checkpoint were done in the one before
            before = max(before, attempt.from_step)
            while position < len(rows) and (after is None or rows[position].time < after.began):
                row = rows[position]
                steps = max(0.0, row.step - before)
                each = (row.saving, row.validation, steps * row.data, steps * row.slow_rank)
                claims["counted"] += max(0.0, steps * row.step_seconds - each[2] - each[3])
                for cause, claim in zip(CLAIMED, each, strict=False):
                    claims[cause] += max(0.0, claim)
                reached = min(max(reached, row.time), attempt.held_until)
                before, position = row.step, position + 1
            # between the start and the last row that counts, what its rows do not account for
            _divide(spent, reached - attempt.began, claims, begun_after)
            # after that row: the last save and validation, steps that are done again, the time until the next start
            claims = {}
            if after is None and reached > attempt.began:
                saves = [row for row in events if row.get("event") == "save"]
                waits = [row.get("blocked_seconds") for row in saves if (step_of_event(row) or 0) >= before]
                claims["saving"] = sum(float(each or 0.0) for each in waits)
                claims["validation"] = min(validated, attempt.held_until) - reached - claims["saving"]
            _divide(spent, attempt.held_until - reached, claims, attempt.lost_as)
            begun_after = attempt.lost_as
        total = sum(attempt.seconds for attempt in all_attempts)
        rank_seconds = sum(attempt.seconds * attempt.ranks for attempt in all_attempts)
        pairs = itertools.pairwise(all_attempts)
        stopped = sum(max(0.0, after.began - before.held_until) for before, after in pairs)
        return cls(total, rank_seconds, spent.pop("counted"), spent, stopped)

    @property
    def shares(self) -> dict[str, float]:
        """{cause: share of the wall time}, largest first, without causes that took nothing."""
        rising = sorted(self.lost.items(), key=lambda item: -item[1])
        return {cause: lost / self.seconds for cause, lost in rising if lost > 0 and self.seconds > 0}


def _divide(spent: dict[str, float], seconds: float, claims: dict[str, float], rest: str) -> None:
    """Add seconds to the causes that claim them, none twice, and what nobody claims to `rest`."""
    for cause, claim in claims.items():
        taken = min(seconds, max(0.0, claim))
        spent[cause] += taken
        seconds -= taken
    spent[rest] += seconds


@dataclass(frozen=True)
class Price:
    dollars_per_gpu_hour: float
    source: str  # who says so: the recipe, or a provider of the price table with the date

    def dollars(self, rank_seconds: float) -> float:
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
