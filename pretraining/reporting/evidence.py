"""How the attempts of a run ended, and what its files say about one that failed: what was first, and what to do."""

import itertools
import re
import time
from collections import Counter
from dataclasses import dataclass

from pretraining.planning.quantities import several
from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.failures import NO_MEMORY, Failure, Fault, kernel_faults, read_failures
from pretraining.runtime.heartbeat import is_gone, read_place
from pretraining.runtime.run_folder import event_seconds, unix_seconds
from pretraining.runtime.wall_time import Attempt, attempts, start_rows
from pretraining.schema import display_path

FAILED = ("crash", "hang", "gave up", "silent")
"""Ends of an attempt that somebody has to look at. Silent: whether it has ended cannot be known from here."""
_FATAL = re.compile(r"Fatal Python error: (.+)")
_OUT_OF_MEMORY = re.compile(r"(CUDA|HIP) out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
_OUT_OF_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator|not enough memory|[Cc]an(no|')t allocate memory|bad_alloc|MemoryError"
)
_KERNEL_FAULT = re.compile(r"illegal memory access|device-side assert|unspecified launch failure|misaligned")
_MESSAGES = re.compile(r"NCCL|ncclUnhandled|ibv_|DistBackendError")


@dataclass
class First:
    """What failed first."""

    what: str
    where: str = ""
    """The place in the code, or the file that says more."""
    rank: int | None = None
    host: str | None = None
    time: float | None = None


def attempts_of(record: RunRecord, state: str) -> list[Attempt]:
    """List the attempts of a run, oldest first. state: that of the run (`Standing.state`), for the last attempt."""
    found, events = attempts(record.events, record.last_written), record.events
    # the times of all rows, events and failures; infinity for one without a time
    signs = [each.time for each in read_failures(record.run)]
    signs += [*record.metrics.times, *map(event_seconds, events)]
    spans = itertools.pairwise([*start_rows(events), len(events)])
    for attempt, (first, after) in zip(found, spans, strict=True):
        is_last = after == len(events)
        if attempt.end == "running" and state != "running":
            attempt.end = "silent" if state == "silent" else "crash"
        reached = max(record.event_steps[first:after])
        if is_last and len(record.steps):
            reached = max(reached, float(record.steps[-1]))
        attempt.from_step, attempt.to_step = int(record.event_steps[first]), int(reached)
        if attempt.end not in ("finished", "stopped"):
            # its last sign of life; the next start is an event too
            next_start = float("inf") if is_last else attempt.held_until
            attempt.ended = max(
                (each for each in signs if attempt.began <= each < next_start), default=attempt.began
            )
    return found


class Evidence:
    """What the files say about one attempt that failed."""

    def __init__(self, record: RunRecord, attempt: Attempt, next_start: float) -> None:
        """next_start: UNIX seconds; infinity for the last attempt."""
        self.record, self.run, self.attempt = record, record.run, attempt
        # a start of the next attempt may be logged in the second of this one's end
        self.until, is_last = next_start + 1, next_start == float("inf")
        failures = read_failures(self.run)
        self.failures = [each for each in failures if attempt.began <= each.time <= self.until]
        # each start clears the heartbeats of the one before
        ranks = range(attempt.ranks) if is_last else ()
        self.places = [place for rank in ranks if (place := read_place(self.run.heartbeats, rank))]
        self.faults = self._kernel_faults()

    def _kernel_faults(self) -> list[tuple[str, Fault]]:
        """List (host, fault): what the ranks kept when they failed, then this machine's log, if ranks ran here."""
        faults = {(each.host, fault.text): fault for each in self.failures for fault in each.kernel}
        here = [place for place in self.places if is_gone(place)]
        if here:
            # only those that the kernel killed for memory, of all processes of this machine
            ours = {place.process for place in here} | {each.process for each in self.failures}
            now = [
                each
                for each in kernel_faults(self.attempt.began)
                if each.process is None or each.process in ours
            ]
            faults |= {(here[0].host, fault.text): fault for fault in now}
        of_attempt = [(host, fault) for (host, _), fault in faults.items() if fault.time <= self.until]
        return sorted(of_attempt, key=lambda each: each[1].time)

    def fault_lines(self) -> list[str]:
        """Return what the kernels logged, with its meaning."""
        lines = [(f"{host}, {clock(fault.time)}: {fault.text}", fault.meaning) for host, fault in self.faults]
        return [f"{text}: {meaning[0]}" if meaning else text for text, meaning in lines]

    def first(self) -> First:
        """Find what failed first. An error that only reports that another rank is gone comes last."""
        if self.attempt.end == "hang":
            return First(f"a hang: {self.attempt.why or 'no rank moved'}", display_path(self.run.stacks))
        if self.attempt.end == "gave up":
            return First(f"training gave up: {self.attempt.why}", display_path(self.run.events))
        if self.attempt.end == "silent":
            hosts = ", ".join(sorted({place.host for place in self.places})[:4])
            return First(
                f"silent since {clock(self.attempt.ended)}: killed, or still at work; only "
                f"{hosts or 'the machine of its ranks'} can tell"
            )
        candidates = [_first_of(each) for each in self.failures if not each.is_consequence]
        candidates += self._fatal_errors()
        # ranks that the kernel killed because memory was short
        ranks = {place.process: place.rank for place in self.places}
        candidates += [
            First(f"killed by the kernel: {fault.meaning[0]}", "", ranks[fault.process], host, fault.time)
            for host, fault in self.faults
            if fault.process in ranks
        ]
        if candidates:
            return min(candidates, key=lambda first: first.time or 0.0)
        # others wrote an error, these did not
        silent = sorted(set(range(self.attempt.ranks)) - {each.rank for each in self.failures})
        if self.failures and silent:
            place = next((place for place in self.places if place.rank == silent[0]), None)
            doing = f", {place.phase} at step {place.step}" if place else ""
            who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent[:8]))}"
            what = (
                f"{who} ended without an error of its own{doing}: killed from outside, or its machine is gone"
            )
            return First(what, "", silent[0], self._host(silent[0]))
        if self.failures:
            return _first_of(self.failures[0])
        return First(self.attempt.why or "all ranks ended without a word: killed, or their machine is gone")

    def _fatal_errors(self) -> list[First]:
        """Find ranks that died in C code: Python's fault handler wrote their stacks into their logs."""
        found = []
        for rank in range(self.attempt.ranks):
            path = self.run.rank_log(rank)
            log = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            # cut at its starts: what is before the first, then the time and the text of each
            _, *sections = re.split(r"^--- (\S+Z) .*$", log, flags=re.M)
            starts = zip(sections[::2], sections[1::2], strict=True)
            # a process begins its section before it opens the run
            texts = [text for when, text in starts if unix_seconds(when) <= self.attempt.began + 1]
            if texts and (fatal := _FATAL.search(texts[-1])):
                found.append(First(fatal[1], display_path(path), rank, self._host(rank), self.attempt.ended))
        return found

    def _host(self, rank: int) -> str | None:
        hosts = {each.rank: each.host for each in self.failures} | {
            each.rank: each.host for each in self.places
        }
        return hosts.get(rank)

    def others(self) -> list[str]:
        """Say in few lines what the other ranks met."""
        counted = Counter(short(each.error) for each in self.failures)
        lines = [f"{several(number, 'rank')}: {error}" for error, number in counted.most_common(4)]
        return lines if len(self.failures) > 1 else []

    def slow(self) -> list[str]:
        """Say since when ranks were slow, from the attempt's `straggler` events."""
        lines = []
        for event in self.record.events:
            if event.get("event") == "straggler" and self.attempt.began <= event_seconds(event) <= self.until:
                times = event["own_seconds"] / max(event["median_seconds"], 1e-9)
                since = max(1, int(event.get("step", 0)) - int(event["steps"]) + 1)
                who = f"rank {event['rank']} on {event['host']}"
                lines.append(f"{who} since step {since:,}: {times:.1f} x the median rank")
        return lines

    def advice(self, first: First) -> list[str]:
        """Say what to do about it, most important first."""
        advice = [
            f"{host}: {fault.meaning[1]}"
            for host, fault in self.faults
            if fault.meaning and fault.process is None
        ]
        text, end = first.what, self.attempt.end
        more = ""
        if text.startswith("killed by the kernel"):
            more = NO_MEMORY[1]
        elif _OUT_OF_MEMORY.search(text):
            more = "take a smaller micro-batch, --set training.activation_checkpointing=true or a higher ZeRO stage; "
            more += "train.py --plan says what fits"
        elif _OUT_OF_HOST_MEMORY.search(text):
            more = f"the machine had no memory left: {NO_MEMORY[1]}"
        elif _KERNEL_FAULT.search(text):
            more = "CUDA_LAUNCH_BLOCKING=1 names the kernel; without it the traceback's line is a later one"
        elif _MESSAGES.search(text):
            more = "run the doctor on these nodes (deepspeed --module pretraining.doctor); NCCL_DEBUG=WARN says more"
        elif end == "hang":
            more = "the stacks say where each rank waited; the rank that did not arrive is the one to look at"
        elif end == "silent":
            more = "look whether its processes live; if none does, it was killed"
        elif first.rank is not None and "killed from outside" in text:
            more = f"look at {first.host or 'its host'}: kernel log (memory), the scheduler, power; this command says "
            more += "more if it runs there"
        return list(dict.fromkeys([*advice, *filter(None, [more])]))


def _first_of(failure: Failure) -> First:
    return First(failure.error, failure.where, failure.rank, failure.host, failure.time)


def short(error: str) -> str:
    """Return the first line of an error, at most 160 characters of it."""
    line = error.partition("\n")[0]
    return line if len(line) <= 160 else f"{line[:159]}…"


def clock(when: float) -> str:
    """Write UNIX seconds as a date and a time."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(when))} UTC"
