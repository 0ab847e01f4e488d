"""Look back at a run: what failed first and where, since when a rank was slow, what it cost, and what to do.

It reads the run folder alone: the events, each rank's failure and log, the heartbeats of the last start, and what the
kernels of the ranks' machines had logged. On a machine of the run, it reads that machine's kernel log too. If nodes
have folders of their own, the run's address in its store holds the records of all.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pretraining.checkpoints.live_files import records_of
from pretraining.command_line import OneLineParser
from pretraining.errors import one_line_errors
from pretraining.planning.quantities import dollars, duration, several
from pretraining.reporting.evidence import FAILED, Evidence, First, attempts_of, clock, short
from pretraining.reporting.run_record import RunRecord
from pretraining.reporting.words import lost_words
from pretraining.runtime.failures import read_failures
from pretraining.runtime.heartbeat import gone_ranks
from pretraining.runtime.run_folder import RunFolder
from pretraining.runtime.table import facts
from pretraining.runtime.wall_time import Attempt
from pretraining.schema import display_path

EXAMPLES = """examples:
  python -m pretraining.postmortem runs/tiny
  python -m pretraining.postmortem runs/30b --json
  python -m pretraining.postmortem s3://bucket/runs/30b

It needs nothing but the run folder, or its address in the store of its checkpoints, also while the run goes on. On a
node of the run it reads the kernel's log too."""

NOT_FINITE = ("stability/non_finite_steps", "stability/refused_steps")
"""Metrics: steps that were not finite, and steps that were not applied."""
MANY_NOT_FINITE = 0.01
"""Share of the steps."""


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


def look_back(folder: Path) -> Postmortem:
    """Read a run folder.

    Raises:
        UserError: there is no such folder, or no run has written to it.
    """
    record = RunRecord(folder)
    standing = record.standing()
    attempts = attempts_of(record, standing.state)
    found = Postmortem(str(folder), standing.state, standing.step, attempts, checkpoint=standing.checkpoint)
    if standing.checkpoint and found.state not in ("finished", "running"):
        found.lost_steps = max(0, found.step - int(standing.checkpoint.rpartition("-")[2]))
    if spent := record.wall_time():
        found.time_lost, found.dollars = lost_words(spent), record.metrics.last("cost/dollars")
        gpu_hours = record.metrics.last("cost/gpu_hours")
        if gpu_hours and found.dollars is not None and spent.seconds:
            # GPUs are paid for while a run starts again
            by_failures = sum(spent.lost[cause] for cause in ("restart", "hang", "rollback")) / spent.seconds
            found.dollars_lost = found.dollars / gpu_hours * spent.rank_seconds / 3600 * by_failures
    if found.state in ("running", "silent") and not record.run.events.exists():
        found.state = "unknown"
        what = f"{record.run.events} is missing, which says how it ended: look in the run's store"
        found.advice.append(what)
    last = attempts[-1] if attempts else None
    if last and last.end in ("running", "silent"):
        # over by a failure of a rank, or by a rank that is gone while nothing is written any more; one that is gone
        # while the others still write is not yet the end
        gone = last.end == "silent" and gone_ranks(record.run.heartbeats, last.began)
        if gone or any(failure.time >= last.began for failure in read_failures(record.run)):
            # by the clock alone it may be running, or silent
            last.end = found.state = "crash"
    failed = [attempt for attempt in attempts if attempt.end in FAILED]
    if failed:
        found.failed = failed[-1]
        later = [each.began for each in attempts if each.began > found.failed.began]
        evidence = Evidence(record, found.failed, min(later, default=float("inf")))
        found.first, found.then = evidence.first(), evidence.others()
        found.faults, found.slow = evidence.fault_lines(), evidence.slow()
        found.advice = evidence.advice(found.first)
    _count_steps_not_finite(found, record)
    if found.state not in ("finished", "running", "unknown"):
        where = (
            f"from {found.checkpoint}"
            if found.checkpoint
            else "from the beginning: no checkpoint is committed"
        )
        found.advice.append(f"the same command continues {where}")
    return found


def _count_steps_not_finite(found: Postmortem, record: RunRecord) -> None:
    """Say how many steps had a loss or gradients that are not finite: a run may go on to its end and learn nothing."""
    number, refused = (int(record.metrics.last(name) or 0) for name in NOT_FINITE)
    if not number:
        return
    first = next((event for event in record.events if event.get("event") == "non_finite"), {})
    since = f", the first at step {first['step']:,}" if "step" in first else ""
    steps = f"{several(number, 'step')} of {found.step:,}{since}"
    found.not_finite = f"{steps}; {refused:,} steps were not applied"
    if number > MANY_NOT_FINITE * found.step:
        found.advice.append(
            "most likely training.learning_rate is too high; look at the first of these steps"
        )


def as_text(found: Postmortem) -> str:
    """Write the answer as one screen."""
    run, first = RunFolder(Path(found.run)), found.first
    lines = {
        "run": [f"{run.path}: {found.state} at step {found.step:,}, {several(len(found.attempts), 'start')}"]
    }
    if found.failed is None or first is None:
        lines["failures"] = ["none" if found.attempts else "no start is on record"]
    else:
        when = f"after {clock(found.failed.ended)}" if first.time is None else clock(first.time)
        rank, host = (
            "" if first.rank is None else f"rank {first.rank}",
            f"on {first.host}" if first.host else "",
        )
        who = " ".join(filter(None, [rank, host]))
        lines["failed first"] = [f"{f'{who}, ' if who else ''}{when}: {short(first.what)}"]
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
    shown = {label: list(filter(None, texts)) for label, texts in lines.items()}
    return facts(
        [("" if n else label, text) for label, texts in shown.items() for n, text in enumerate(texts)]
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
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
