"""Look back at a run: what failed first and where, since when a rank was slow, what it cost, and what to do.

It reads the run folder alone: the events, each rank's failure and log, the heartbeats of the last start, and what the
kernels of the ranks' machines had logged. On a machine of the run, it reads that machine's kernel log too. If nodes
have folders of their own, the run's address in its store holds the records of all.
"""

import itertools
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path

import numpy as np

from pretraining.checkpoints.live_files import records_of
from pretraining.command_line import OneLineParser
from pretraining.errors import one_line_errors
from pretraining.outside.files import COUNT, NUMBER, TEXT, object_of
from pretraining.outside.masking import as_json
from pretraining.outside.schema import display_path, fits
from pretraining.planning.quantities import dollars, duration, several
from pretraining.reporting.analysis import lost_words
from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.failures import NO_MEMORY, Failure, kernel_faults, read_failures, short
from pretraining.runtime.heartbeat import gone_ranks, is_gone, read_place
from pretraining.runtime.installation import as_typed
from pretraining.runtime.run_folder import RunFolder, event_seconds, unix_seconds
from pretraining.runtime.table import facts
from pretraining.runtime.wall_time import Attempt, attempts, start_rows

EXAMPLES = """examples:
  python -m pretraining.postmortem runs/tiny
  python -m pretraining.postmortem runs/30b --json
  python -m pretraining.postmortem s3://bucket/runs/30b

It needs nothing but the run folder, or its address in the store of its checkpoints, also while the run goes on. On a
node of the run it reads the kernel's log too."""

FAILED = ("crash", "hang", "gave up", "silent")
"""Ends of an attempt that somebody has to look at. Silent: whether it has ended cannot be known from here."""
_STRAGGLER = object_of(
    {
        "event": {"const": "straggler"},
        "host": TEXT,
        **dict.fromkeys(("rank", "steps"), COUNT),
        **dict.fromkeys(("own_seconds", "median_seconds"), NUMBER),
    }
)
"""Its event, as training/throughput.py finds it; any other is left out."""
_FATAL = re.compile(r"Fatal Python error: (.+)")
ADVICE = {
    "^killed by the kernel": NO_MEMORY[1],
    "(CUDA|HIP) out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED": "take a smaller micro-batch, --set "
    "training.activation_checkpointing=true or a higher ZeRO stage; train.py --plan says what fits",
    "DefaultCPUAllocator|not enough memory|[Cc]an(no|')t allocate memory|bad_alloc|MemoryError": "the machine had no "
    f"memory left: {NO_MEMORY[1]}",
    "illegal memory access|device-side assert|unspecified launch failure|misaligned": "CUDA_LAUNCH_BLOCKING=1 names "
    "the kernel; without it the traceback's line is a later one",
    "NCCL|ncclUnhandled|ibv_|DistBackendError": "run the doctor on these nodes (deepspeed --module "
    "pretraining.doctor); NCCL_DEBUG=WARN says more",
    "^a hang: ": "the stacks say where each rank waited; the rank that did not arrive is the one to look at",
    "^its launcher is gone": "what started the ranks was killed, or ended by a signal that it does not pass on: a file "
    "STOP in the run folder stops a run, and so does Ctrl-C",
    "^silent since ": "look whether its processes live; if none does, it was killed",
}
"""{pattern of what failed first: what to do}; the first that fits counts."""

NOT_FINITE = ("stability/non_finite_steps", "stability/refused_steps")
"""Metrics: steps that were not finite, and steps that were not applied."""
MANY_NOT_FINITE = 0.01  # share of the steps


@dataclass
class First:
    what: str
    where: str = ""  # the place in the code, or the file that says more
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
    failed: Attempt | None = None  # the newest attempt that failed; the fields below are about it
    first: First | None = None
    then: list[str] = field(default_factory=list)  # what the other ranks met, and which wrote nothing
    faults: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    checkpoint: str | None = None
    lost_steps: int | None = None  # steps since the checkpoint that have to be done again
    time_lost: str = ""
    not_finite: str = ""  # how many steps had a loss or gradients that are not finite, and since when
    dollars: float | None = None
    dollars_lost: float | None = None  # of all that was lost so far to failures
    advice: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> None:
    first_line = (__doc__ or "").partition("\n")[0]
    parser = OneLineParser("python -m pretraining.postmortem", description=first_line, epilog=EXAMPLES)
    what = "a run folder, such as runs/tiny, or its address in the store of its checkpoints"
    parser.add_argument("run", metavar="RUN", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    with records_of(options.run) as (folder, shown):
        found = look_back(folder)
        text = as_json(asdict(found), indent=2) if options.json else as_text(found)
    # of a run in a store, the files that were fetched
    print(text if Path(shown) == folder else text.replace(str(folder), shown))


def look_back(folder: Path) -> Postmortem:
    """Read a run folder; `UserError` if there is none, or no run has written to it."""
    record = RunRecord(folder)
    standing = record.standing()
    starts = attempts_of(record, standing.state)
    found = Postmortem(str(folder), standing.state, standing.step, starts, checkpoint=standing.checkpoint)
    if standing.checkpoint and found.state not in ("finished", "running"):
        found.lost_steps = max(0, found.step - record.checkpoint_steps()[-1])
    if spent := record.wall_time():
        found.time_lost, found.dollars = lost_words(spent), record.dollars(spent)
        if found.dollars is not None and spent.seconds:
            # GPUs are paid for while a run starts again
            by_failures = sum(spent.lost[cause] for cause in ("restart", "hang", "rollback")) / spent.seconds
            found.dollars_lost = found.dollars * by_failures
    if found.state in ("running", "silent") and not record.run.events.exists():
        found.state = "unknown"
        found.advice += [f"{record.run.events} is missing, which says how it ended: look in the run's store"]
    last = starts[-1] if starts else None
    if last and last.end in ("running", "silent"):
        # over by a failure of a rank, or by a rank that is gone while nothing is written any more; one that is gone
        # while the others still write is not yet the end
        gone = last.end == "silent" and gone_ranks(record.run.heartbeats, last.began)
        if gone or any(failure.time >= last.began for failure in read_failures(record.run)):
            last.end = found.state = "crash"  # by the clock alone it may be running, or silent
    failed = [attempt for attempt in starts if attempt.end in FAILED]
    if failed:
        found.failed = failed[-1]
        later = [each.began for each in starts if each.began > found.failed.began]
        Evidence(record, found.failed, min(later, default=float("inf"))).fill(found)
    # a run may have many such steps, go on to its end and learn nothing
    counts = [record.metrics.last(name) or 0.0 for name in NOT_FINITE]
    not_finite, refused = (int(each) if isfinite(each) else 0 for each in counts)
    if not_finite:
        first = next((event for event in record.events if event.get("event") == "non_finite"), {})
        since = f", the first at step {first['step']:,}" if "step" in first else ""
        steps = f"{several(not_finite, 'step')} of {found.step:,}{since}"
        found.not_finite = f"{steps}; {refused:,} steps were not applied"
    if not_finite > MANY_NOT_FINITE * found.step:
        found.advice += ["most likely training.learning_rate is too high; look at the first of these steps"]
    if found.state not in ("finished", "running", "unknown"):
        place = found.checkpoint or "the beginning: no checkpoint is committed"
        found.advice.append(f"the same command without --resume continues from {place}")
    return found


def as_text(found: Postmortem) -> str:
    run, first = RunFolder(Path(found.run)), found.first
    starts = several(len(found.attempts), "start")
    lines = {"run": [f"{run.path}: {found.state} at step {found.step:,}, {starts}"]}
    if found.failed is None or first is None:
        lines["failures"] = ["none" if found.attempts else "no start is on record"]
    else:
        when = f"after {clock(found.failed.ended)}" if first.time is None else clock(first.time)
        rank = None if first.rank is None else f"rank {first.rank}"
        who = " ".join(filter(None, [rank, first.host and f"on {first.host}"]))
        lines["failed first"] = [f"{', '.join(filter(None, [who, when]))}: {short(first.what)}"]
        lines |= {"where": [first.where], "then": found.then, "kernel": found.faults, "slow": found.slow}
        places = (run.failures_folder, run.logs, run.stacks)
        lines["see also"] = [f"{display_path(place)}/" for place in places if place.is_dir()]
    lines["starts"] = []
    for attempt in found.attempts[-8:]:
        lasted = duration(max(1.0, attempt.ended - attempt.began))
        steps = f"step {attempt.from_step:,} to {attempt.to_step:,} in {lasted}"
        why = f": {short(attempt.why)}" if attempt.why else ""
        line = f"{clock(attempt.began)}, {several(attempt.ranks, 'rank')}, {steps}: {attempt.end}{why}"
        lines["starts"].append(line)
    lines["not finite"] = [found.not_finite]
    if found.lost_steps:
        lines["to do again"] = [f"{several(found.lost_steps, 'step')} since {found.checkpoint}"]
    lines["time lost"] = [found.time_lost]
    if found.dollars is not None:
        lost = f", {dollars(found.dollars_lost)} of it to failures" if found.dollars_lost else ""
        lines["cost so far"] = [f"{dollars(found.dollars)}{lost}"]
    lines["what to do"] = found.advice
    # the label stands before the first of its lines
    shown = ((label, enumerate(filter(None, texts))) for label, texts in lines.items())
    return facts([("" if number else label, text) for label, texts in shown for number, text in texts])


def attempts_of(record: RunRecord, state: str) -> list[Attempt]:
    """List the attempts of a run, oldest first. state: that of the run (`Standing.state`), for the last attempt."""
    found, events = attempts(record.events, record.last_written), record.events
    # the times of all rows, events and failures; infinity for one without a time
    signs = [each.time for each in read_failures(record.run)]
    signs += [*record.metrics.times, *map(event_seconds, events)]
    spans = itertools.pairwise([*start_rows(events), len(events)])
    times = np.array(record.metrics.times)
    for attempt, (first, after) in zip(found, spans, strict=True):
        is_last = after == len(events)
        if attempt.end == "running" and state != "running":
            attempt.end = "silent" if state == "silent" else "crash"
        # a row without a time is the last attempt's
        is_own = ~(times < attempt.began)
        if not is_last:
            is_own = (times >= attempt.began) & (times < attempt.held_until)
        reached = max(*record.event_steps[first:after], record.steps[is_own].max(initial=0))
        attempt.from_step, attempt.to_step = int(record.event_steps[first]), int(reached)
        if attempt.end not in ("finished", "stopped"):
            # its last sign of life; the next start is an event too
            next_start = float("inf") if is_last else attempt.held_until
            of_attempt = (each for each in signs if attempt.began <= each < next_start)
            attempt.ended = max(of_attempt, default=attempt.began)
    return found


class Evidence:
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
        self.hosts = {failure.rank: failure.host for failure in self.failures}
        self.hosts |= {place.rank: place.host for place in self.places}
        # (host, fault): what the ranks kept when they failed, then this machine's log, if ranks ran here
        faults = {(each.host, fault.text): fault for each in self.failures for fault in each.faults}
        here = [place for place in self.places if is_gone(place)]
        if here:
            # only those that the kernel killed for memory, of all processes of this machine
            ours = {place.process for place in here} | {each.process for each in self.failures}
            for fault in kernel_faults(attempt.began):
                if fault.process is None or fault.process in ours:
                    faults[here[0].host, fault.text] = fault
        of_attempt = [(host, fault) for (host, _), fault in faults.items() if fault.time <= self.until]
        self.faults = sorted(of_attempt, key=lambda each: each[1].time)

    def fill(self, found: Postmortem) -> None:
        """Write down what failed first, what the other ranks and the kernels met, who was slow, and what to do."""
        found.first = self.first()
        if len(self.failures) > 1:
            counted = Counter(short(each.error) for each in self.failures)
            found.then = [f"{several(number, 'rank')}: {error}" for error, number in counted.most_common(4)]
        for host, fault in self.faults:
            line = f"{host}, {clock(fault.time)}: {fault.text}"
            found.faults.append(f"{line}: {fault.meaning[0]}" if fault.meaning else line)
        for event in self.record.events:
            if fits(event, _STRAGGLER) and self.attempt.began <= event_seconds(event) <= self.until:
                times = event["own_seconds"] / max(event["median_seconds"], 1e-9)
                since = max(1, int(event.get("step", 0)) - int(event["steps"]) + 1)
                who = f"rank {event['rank']} on {event['host']}"
                found.slow.append(f"{who} since step {since:,}: {times:.1f} x the median rank")
        # what to do about it, most important first
        of_gpus = [(host, fault.meaning) for host, fault in self.faults if fault.process is None]
        advice = [f"{host}: {meaning[1]}" for host, meaning in of_gpus if meaning]
        first, what = found.first, found.first.what
        fitting = [as_typed(remedy) for pattern, remedy in ADVICE.items() if re.search(pattern, what)]
        if first.rank is not None and "killed from outside" in what:
            look = f"look at {first.host or 'its host'}: kernel log (memory), the scheduler, power"
            fitting.append(f"{look}; this command says more if it runs there")
        found.advice += dict.fromkeys([*advice, *fitting[:1]])

    def first(self) -> First:
        """Find what failed first. An error that only reports that another rank is gone comes last."""
        if self.attempt.end == "hang":
            return First(f"a hang: {self.attempt.why or 'no rank moved'}", display_path(self.run.stacks))
        if self.attempt.end == "gave up":
            return First(f"training gave up: {self.attempt.why}", display_path(self.run.events))
        if self.attempt.end == "silent":
            hosts = ", ".join(sorted({place.host for place in self.places})[:4])
            what = f"silent since {clock(self.attempt.ended)}: killed, or still at work; only "
            return First(f"{what}{hosts or 'the machine of its ranks'} can tell")
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
            what = f"{who} ended without an error of its own{doing}"
            what += ": killed from outside, or its machine is gone"
            return First(what, "", silent[0], self.hosts.get(silent[0]))
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
                host = self.hosts.get(rank)
                found.append(First(fatal[1], display_path(path), rank, host, self.attempt.ended))
        return found


def _first_of(failure: Failure) -> First:
    return First(failure.error, failure.where, failure.rank, failure.host, failure.time)


def clock(when: float) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(when))} UTC"


if __name__ == "__main__":
    with one_line_errors():
        main()
