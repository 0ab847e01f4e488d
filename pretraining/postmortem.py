"""Look back at a run: what failed first and where, since when a rank was slow, what it cost, and what to do.

It reads the run folder alone: the events, each rank's failure and log, the heartbeats of the last start, and what the
kernels of the ranks' machines had logged. On a machine of the run, it reads that machine's kernel log too. If nodes
have folders of their own, the run's address in its store holds the records of all.
"""

import argparse
import itertools
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pretraining.addresses import is_remote
from pretraining.checkpoints.live_files import NODES, fetch_records, store_of_parts
from pretraining.errors import UserError, one_line_errors
from pretraining.planning.quantities import dollars, duration, facts, several
from pretraining.reporting.analysis import timed_rows
from pretraining.reporting.run_record import RunRecord
from pretraining.reporting.words import lost_words
from pretraining.runtime import wall_time
from pretraining.runtime.failures import Failure, read_failures
from pretraining.runtime.heartbeat import Place, gone_ranks, is_gone, read_place
from pretraining.runtime.kernel_log import NO_MEMORY, Fault, kernel_faults
from pretraining.runtime.run_folder import RunFolder, unix_seconds
from pretraining.runtime.wall_time import WallTime, start_rows
from pretraining.schema import display_path

EXAMPLES = """examples:
  python -m pretraining.postmortem runs/tiny
  python -m pretraining.postmortem runs/30b --json
  python -m pretraining.postmortem s3://bucket/runs/30b

It needs nothing but the run folder, or its address in the store of its checkpoints, also while the run goes on. On a
node of the run it reads the kernel's log too."""

FAILED = ("crash", "hang", "gave up", "silent")
"""Ends of an attempt that somebody has to look at. Silent: whether it has ended cannot be known from here."""
NOT_FINITE = ("stability/non_finite_steps", "stability/refused_steps")
"""Metrics: steps that were not finite, and steps that were not applied."""
MANY_NOT_FINITE = 0.01
"""Share of the steps."""
_FATAL = re.compile(r"Fatal Python error: (.+)")
_OUT_OF_MEMORY = re.compile(r"(CUDA|HIP) out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
_OUT_OF_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator|not enough memory|[Cc]an(no|')t allocate memory|bad_alloc|MemoryError"
)
_KERNEL_FAULT = re.compile(r"illegal memory access|device-side assert|unspecified launch failure|misaligned")
_MESSAGES = re.compile(r"NCCL|ncclUnhandled|ibv_|DistBackendError")


@dataclass
class Attempt:
    """A run between one start and the next."""

    began: float
    """UNIX seconds, as below."""
    ended: float
    """Its end, or its last sign of life, if it was not given the time to say more."""
    ranks: int
    from_step: int
    to_step: int
    """The newest that it is known to have reached."""
    end: str
    """finished, stopped, rollback, running, met anew (as if torchrun takes in a node), or one of FAILED."""
    why: str = ""


@dataclass
class First:
    """What failed first."""

    what: str
    where: str = ""
    """The place in the code, or the file that says more."""
    rank: int | None = None
    host: str | None = None
    time: float | None = None


@dataclass
class Postmortem:
    """What the files of a run say about its end."""

    run: str
    state: str
    step: int
    attempts: list[Attempt]
    failed: Attempt | None = None
    """The newest attempt that failed; the fields below are about it."""
    first: First | None = None
    then: list[str] = field(default_factory=list)
    """What the other ranks met, and which wrote nothing."""
    faults: list[str] = field(default_factory=list)
    """Lines of the kernels' logs, with their meaning."""
    slow: list[str] = field(default_factory=list)
    checkpoint: str | None = None
    lost_steps: int | None = None
    """Steps since the checkpoint that have to be done again."""
    time_lost: str = ""
    not_finite: str = ""
    """How many steps had a loss or gradients that are not finite, and since when."""
    dollars: float | None = None
    dollars_lost: float | None = None
    """Of all that was lost so far to failures."""
    advice: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> None:
    """Print what is known about the end of a run."""
    options = _parse(arguments)
    with records_of(options.run) as (folder, shown):
        found = look_back(folder)
        text = json.dumps(asdict(found), indent=2) if options.json else as_text(found)
    print(text.replace(str(folder), shown))


@contextmanager
def records_of(run: str) -> Iterator[tuple[Path, str]]:
    """Yield a folder with the records of all ranks, and its name: that of the run, or its address in a store.

    run: a run folder, or an address. If it is the folder of one node among several, the store has the others' records.
    """
    if not is_remote(run) and (Path(run) / NODES).is_dir():
        run = address = str(Path(run).absolute())  # the run's place in a store that is mounted here
    else:
        address = run if is_remote(run) else store_of_parts(Path(run))
    if address is None:
        yield Path(run), run
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            found, shown = fetch_records(address, Path(folder)).path, address
        except UserError as error:
            if address == run:
                raise
            print(f"{error}: what follows is from this node alone", file=sys.stderr)
            found, shown = Path(run), run
        yield found, shown


def look_back(folder: Path) -> Postmortem:
    """Read a run folder.

    Raises:
        UserError: there is no such folder, or no run has written to it.
    """
    record = RunRecord(folder)
    standing = record.standing()
    attempts = attempts_of(record, standing.state)
    found = Postmortem(str(folder), standing.state, standing.step, attempts, checkpoint=standing.checkpoint)
    _count_costs(found, record)
    if attempts and _has_ended(record.run, attempts[-1]):
        # by the clock alone it may be running, or silent
        attempts[-1].end = found.state = "crash"
    failed = [attempt for attempt in attempts if attempt.end in FAILED]
    if failed:
        found.failed = failed[-1]
        later = [each.began for each in attempts if each.began > found.failed.began]
        _Evidence(record, found.failed, min(later, default=float("inf"))).judge(found)
    _count_steps_not_finite(found, record)
    _advise_to_continue(found)
    return found


def _has_ended(run: RunFolder, last: Attempt) -> bool:
    """Say if an attempt without an end is over: a rank has failed, or is gone while nothing is written any more."""
    if last.end not in ("running", "silent"):
        return False
    # one that is gone while the others still write is not yet the end
    is_over = last.end == "silent" and bool(gone_ranks(run.heartbeats, last.began))
    return is_over or any(failure.time >= last.began for failure in read_failures(run))


def attempts_of(record: RunRecord, state: str) -> list[Attempt]:
    """List the attempts of a run, oldest first. state: that of the run (`Standing.state`), for the last attempt."""
    starts = start_rows(record.events)
    times = wall_time.attempts(record.events, record.last_written)
    found = []
    spans = itertools.pairwise([*starts, len(record.events)])
    for timed, (first, after) in zip(times, spans, strict=True):
        is_last = after == len(record.events)
        end, why = _end_of(record.events[first:after], is_last, state)
        if end == "stopped" and not is_last and wall_time.goes_on_by_itself(record.events[after]):
            end = "met anew"
        from_step, reached = int(record.event_steps[first]), max(record.event_steps[first:after])
        if is_last and len(record.steps):
            reached = max(reached, float(record.steps[-1]))
        next_start = float("inf") if is_last else timed.ended
        ended = timed.ended if end in ("finished", "stopped") else _last_sign(record, timed.began, next_start)
        found.append(Attempt(timed.began, ended, timed.ranks, from_step, int(reached), end, why))
    return found


def _last_sign(record: RunRecord, began: float, next_start: float) -> float:
    """Return the time of the last row, event or failure between two starts; all are UNIX seconds."""
    failures = [each.time for each in read_failures(record.run)]
    times = [*record.metrics.times, *map(record.event_time, record.events), *failures]
    # the next start is an event too; one without a time has infinity
    return max((each for each in times if began <= each < next_start), default=began)


def _end_of(rows: list[dict], is_last: bool, state: str) -> tuple[str, str]:
    """Say how an attempt ended, and why, from its events."""
    for event in reversed(rows):
        match event.get("event"):
            case "end":
                return "finished", ""
            case "stopped" if event.get("asked", True):
                return "stopped", str(event.get("reason", ""))
            case "hang":
                return "hang", str(event.get("who", ""))
            case "gave_up":
                return "gave up", str(event.get("why", ""))
            case "rollback" if not is_last:
                return "rollback", str(event.get("why", ""))
            case "failed":
                return "crash", str(event.get("reason", ""))
    return (state, "") if is_last and state in ("running", "silent") else ("crash", "")


class _Evidence:
    """What the files say about one attempt that failed."""

    def __init__(self, record: RunRecord, attempt: Attempt, next_start: float) -> None:
        """next_start: UNIX seconds; infinity for the last attempt."""
        self.record, self.run, self.attempt = record, record.run, attempt
        # a start of the next attempt may be logged in the second of this one's end
        self.until, is_last = next_start + 1, next_start == float("inf")
        failures = read_failures(self.run)
        self.failures = [each for each in failures if attempt.began <= each.time <= self.until]
        # each start clears the heartbeats of the one before
        self.places = list(filter(None, self._heartbeats())) if is_last else []
        self.faults = self._kernel_faults()

    def _heartbeats(self) -> list[Place | None]:
        return [read_place(self.run.heartbeats, rank) for rank in range(self.attempt.ranks)]

    def _kernel_faults(self) -> list[tuple[str, Fault]]:
        """List (host, fault): what the ranks kept when they failed, then this machine's log, if ranks ran here."""
        kept = {(each.host, fault.text): fault for each in self.failures for fault in each.kernel}
        here = [place for place in self.places if is_gone(place)]
        if here:
            now = kernel_faults(self.attempt.began)
            # only those that the kernel killed for memory, of all processes of this machine
            ours = {place.process for place in here} | {each.process for each in self.failures}
            known = [fault for fault in now if fault.process is None or fault.process in ours]
            kept |= {(here[0].host, fault.text): fault for fault in known}
        found = [(host, fault) for (host, _), fault in kept.items() if fault.time <= self.until]
        return sorted(found, key=lambda each: each[1].time)

    def judge(self, found: Postmortem) -> None:
        """Fill in what is known about the failure."""
        found.first, found.then = self._first(), self._others()
        found.faults = [_fault_text(host, fault) for host, fault in self.faults]
        found.slow = self._slow()
        found.advice = self._advice(found.first)

    def _first(self) -> First:
        """Find what failed first. An error that only reports that another rank is gone comes last."""
        if self.attempt.end == "hang":
            return First(f"a hang: {self.attempt.why or 'no rank moved'}", display_path(self.run.stacks))
        if self.attempt.end == "gave up":
            return First(f"training gave up: {self.attempt.why}", display_path(self.run.events))
        if self.attempt.end == "silent":
            hosts = ", ".join(sorted({place.host for place in self.places})[:4])
            return First(
                f"silent since {_clock(self.attempt.ended)}: killed, or still at work; only "
                f"{hosts or 'the machine of its ranks'} can tell"
            )
        own = [each for each in self.failures if not each.is_consequence]
        candidates = [_first_of(each) for each in own] + self._fatal_errors() + self._killed_for_memory()
        if candidates:
            return min(candidates, key=lambda first: first.time or 0.0)
        if self._silent_ranks:
            return self._killed_from_outside()
        if self.failures:
            return _first_of(self.failures[0])
        return First(self.attempt.why or "all ranks ended without a word: killed, or their machine is gone")

    def _fatal_errors(self) -> list[First]:
        """Find ranks that died in C code: Python's fault handler wrote their stacks into their logs."""
        found = []
        for rank in range(self.attempt.ranks):
            path = self.run.rank_log(rank)
            # a process begins its section before it opens the run
            texts = [text for began, text in _sections(path) if began <= self.attempt.began + 1]
            if texts and (fatal := _FATAL.search(texts[-1])):
                found.append(First(fatal[1], display_path(path), rank, self._host(rank), self.attempt.ended))
        return found

    def _killed_for_memory(self) -> list[First]:
        """Find ranks that the kernel killed because memory was short."""
        ranks = {place.process: place for place in self.places}
        return [
            First(f"killed by the kernel: {fault.meaning[0]}", "", place.rank, host, fault.time)
            for host, fault in self.faults
            if fault.process is not None and fault.meaning and (place := ranks.get(fault.process))
        ]

    @property
    def _silent_ranks(self) -> list[int]:
        """Ranks that wrote no error, if others did."""
        return (
            sorted(set(range(self.attempt.ranks)) - {each.rank for each in self.failures})
            if self.failures
            else []
        )

    def _killed_from_outside(self) -> First:
        silent = self._silent_ranks
        first = silent[0]
        place = next((place for place in self.places if place.rank == first), None)
        doing = f", {place.phase} at step {place.step}" if place else ""
        who = f"rank {first}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent[:8]))}"
        what = f"{who} ended without an error of its own{doing}: killed from outside, or its machine is gone"
        return First(what, "", first, self._host(first))

    def _host(self, rank: int) -> str | None:
        places = [place.host for place in self.places if place.rank == rank]
        return next(iter([*places, *(each.host for each in self.failures if each.rank == rank)]), None)

    def _others(self) -> list[str]:
        """Say in few lines what the other ranks met."""
        counted = Counter(_short(each.error) for each in self.failures)
        lines = [f"{several(number, 'rank')}: {error}" for error, number in counted.most_common(4)]
        return lines if len(self.failures) > 1 else []

    def _slow(self) -> list[str]:
        """Say since when ranks were slow, from the attempt's `straggler` events."""
        found = []
        for event in self.record.events:
            if event.get("event") != "straggler" or not self._is_of_attempt(event):
                continue
            times = event["own_seconds"] / max(event["median_seconds"], 1e-9)
            since = max(1, int(event.get("step", 0)) - int(event["steps"]) + 1)
            found.append(
                f"rank {event['rank']} on {event['host']} since step {since:,}: {times:.1f} x the median rank"
            )
        return found

    def _is_of_attempt(self, event: dict) -> bool:
        return self.attempt.began <= self.record.event_time(event) <= self.until

    def _advice(self, first: First) -> list[str]:
        """Say what to do about it, most important first."""
        found = []
        for host, fault in self.faults:
            if fault.meaning and fault.process is None:
                found.append(f"{host}: {fault.meaning[1]}")
        text = first.what
        if first.what.startswith("killed by the kernel"):
            found.append(NO_MEMORY[1])
        elif _OUT_OF_MEMORY.search(text):
            found.append(
                "take a smaller micro-batch, --set training.activation_checkpointing=true or a higher ZeRO stage; "
                "train.py --plan says what fits"
            )
        elif _OUT_OF_HOST_MEMORY.search(text):
            found.append(f"the machine had no memory left: {NO_MEMORY[1]}")
        elif _KERNEL_FAULT.search(text):
            found.append(
                "CUDA_LAUNCH_BLOCKING=1 names the kernel; without it the traceback's line is a later one"
            )
        elif _MESSAGES.search(text):
            found.append(
                "run the doctor on these nodes (deepspeed --module pretraining.doctor); NCCL_DEBUG=WARN says more"
            )
        elif self.attempt.end == "hang":
            found.append(
                "the stacks say where each rank waited; the rank that did not arrive is the one to look at"
            )
        elif self.attempt.end == "silent":
            found.append("look whether its processes live; if none does, it was killed")
        elif first.rank is not None and "killed from outside" in text:
            found.append(
                f"look at {first.host or 'its host'}: kernel log (memory), the scheduler, power; this command says "
                "more if it runs there"
            )
        return list(dict.fromkeys(found))


def _first_of(failure: Failure) -> First:
    return First(failure.error, failure.where, failure.rank, failure.host, failure.time)


def _fault_text(host: str, fault: Fault) -> str:
    meaning = f": {fault.meaning[0]}" if fault.meaning else ""
    return f"{host}, {_clock(fault.time)}: {fault.text}{meaning}"


def _short(error: str) -> str:
    line = error.partition("\n")[0]
    return line if len(line) <= 160 else f"{line[:159]}…"


def _sections(path: Path) -> list[tuple[float, str]]:
    """Cut a rank's log at its starts: (UNIX seconds, text)."""
    if not path.is_file():
        return []
    parts = re.split(r"^--- (\S+Z) .*$", path.read_text(encoding="utf-8", errors="replace"), flags=re.M)
    return [(unix_seconds(when), text) for when, text in zip(parts[1::2], parts[2::2], strict=True)]


def _count_costs(found: Postmortem, record: RunRecord) -> None:
    """Set what the run has lost and cost so far."""
    if found.checkpoint and found.state not in ("finished", "running"):
        found.lost_steps = max(0, found.step - int(found.checkpoint.rpartition("-")[2]))
    if not record.has_times:
        return
    spent = WallTime.of(record.events, timed_rows(record), record.last_written)
    found.time_lost = lost_words(spent)
    gpu_hours = record.metrics.last("cost/gpu_hours")
    found.dollars = record.metrics.last("cost/dollars")
    if gpu_hours and found.dollars is not None and spent.seconds:
        # GPUs are paid for while a run starts again
        by_failures = sum(spent.lost[cause] for cause in ("restart", "hang", "rollback")) / spent.seconds
        found.dollars_lost = found.dollars / gpu_hours * spent.rank_seconds / 3600 * by_failures


def _count_steps_not_finite(found: Postmortem, record: RunRecord) -> None:
    """Say how many steps had a loss or gradients that are not finite: a run may go on to its end and learn nothing."""
    number, refused = (int(record.metrics.last(name) or 0) for name in NOT_FINITE)
    if not number:
        return
    first = next((event for event in record.events if event.get("event") == "non_finite"), {})
    since = f", the first at step {first['step']:,}" if "step" in first else ""
    found.not_finite = (
        f"{several(number, 'step')} of {found.step:,}{since}; {refused:,} steps were not applied"
    )
    if number > MANY_NOT_FINITE * found.step:
        found.advice.append(
            "most likely training.learning_rate is too high; look at the first of these steps"
        )


def _advise_to_continue(found: Postmortem) -> None:
    if found.state in ("finished", "running"):
        return
    where = (
        f"from {found.checkpoint}" if found.checkpoint else "from the beginning: no checkpoint is committed"
    )
    found.advice.append(f"the same command continues {where}")


def as_text(found: Postmortem) -> str:
    """Write the answer as one screen."""
    run = Path(found.run)
    rows = [("run", f"{run}: {found.state} at step {found.step:,}, {several(len(found.attempts), 'start')}")]
    first = found.first
    if found.failed is None or first is None:
        rows.append(("failures", "none" if found.attempts else "no start is on record"))
    else:
        when = f"after {_clock(found.failed.ended)}" if first.time is None else _clock(first.time)
        where = [
            f"rank {first.rank}" if first.rank is not None else "",
            f"on {first.host}" if first.host else "",
        ]
        who = " ".join(filter(None, where))
        rows.append(("failed first", f"{f'{who}, ' if who else ''}{when}: {_short(first.what)}"))
        rows += [("where", first.where)] if first.where else []
        rows += (
            _labelled("then", found.then) + _labelled("kernel", found.faults) + _labelled("slow", found.slow)
        )
        rows += _more_files(run)
    rows += _labelled("starts", [_attempt_text(each) for each in found.attempts[-8:]])
    rows += [("not finite", found.not_finite)] if found.not_finite else []
    if found.lost_steps:
        rows.append(("to do again", f"{several(found.lost_steps, 'step')} since {found.checkpoint}"))
    rows += [("time lost", found.time_lost)] if found.time_lost else []
    if found.dollars is not None:
        lost = f", {dollars(found.dollars_lost)} of it to failures" if found.dollars_lost else ""
        rows.append(("cost so far", f"{dollars(found.dollars)}{lost}"))
    return facts(rows + _labelled("what to do", found.advice))


def _labelled(label: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(label if number == 0 else "", line) for number, line in enumerate(lines)]


def _more_files(run: Path) -> list[tuple[str, str]]:
    folder = RunFolder(run)
    places = (folder.failures_folder, folder.logs, folder.stacks)
    return _labelled("see also", [f"{display_path(place)}/" for place in places if place.is_dir()])


def _attempt_text(attempt: Attempt) -> str:
    lasted = duration(max(1.0, attempt.ended - attempt.began))
    why = f": {_short(attempt.why)}" if attempt.why else ""
    steps = f"step {attempt.from_step:,} to {attempt.to_step:,}"
    return (
        f"{_clock(attempt.began)}, {several(attempt.ranks, 'rank')}, {steps} in {lasted}: {attempt.end}{why}"
    )


def _clock(when: float) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(when))} UTC"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pretraining.postmortem",
        description=(__doc__ or "").partition("\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = "a run folder, such as runs/tiny, or its address in the store of its checkpoints"
    parser.add_argument("run", metavar="RUN", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    with one_line_errors():
        main()
