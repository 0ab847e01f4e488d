"""An analysis as sentences, and the few lines with which a run ends."""

import os
import statistics
import time

from pretraining.planning.quantities import duration, num_bytes
from pretraining.reporting.analysis import Analysis
from pretraining.reporting.run_record import RunRecord, Standing
from pretraining.runtime.run_folder import RunFolder, stopped_seconds

PHASES = {
    "not begun": "No step has been logged yet.",
    "just begun": "The run has just begun: too few rows to judge.",
    "broken": "The loss is not a number: the run is broken since then.",
    "diverging": "The loss is rising: it is diverging.",
    "warming up": "The learning rate is still warming up.",
    "plateau": "The loss is on a plateau.",
    "finished": "The run is finished.",
}


def sentences(found: Analysis) -> list[str]:
    """The analysis, most important first. How the run stands is `standing_text`: it depends on the clock."""
    parts = [_phase(found), _loss(found), _rate(found), _spikes(found), _target(found), _heading(found)]
    return [part for part in [*parts, _goodput(found)] if part]


def standing_text(standing: Standing, now: float) -> str:
    """How a run stands, and since when, as it is at `now` in UNIX seconds; empty for a finished or running one."""
    since = f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(standing.since))} UTC"
    since += f" ({duration(max(1.0, now - standing.since))} ago)"
    reason = f": {standing.reason}" if standing.reason else ""
    continues = (
        f"The same command continues {f'from {standing.checkpoint}' if standing.checkpoint else 'it'}."
    )
    return {
        "killed": f"Killed after step {standing.step:,}: none of its processes is left; it last wrote at {since}. "
        f"{continues}",
        "stopped": f"Stopped at step {standing.step:,} since {since}{reason}. {continues}",
        "silent": f"Nothing was written since {since}, after step {standing.step:,}: it may have been killed. "
        f"If no process of it is left, the same command continues it.",
        "hang": f"It hung after step {standing.step:,} and ended, {since}. {continues}",
        "gave up": f"It gave up at step {standing.step:,}, {since}{reason}. Look at it before you start it again.",
    }.get(standing.state, "")


def _phase(found: Analysis) -> str:
    state = found.standing.state
    told = PHASES.get(found.phase, f"The run {'is' if state == 'running' else 'was'} {found.phase}.")
    if found.budget_share is not None and state != "finished":
        told += f" {found.budget_share:.0%} of its tokens are spent."
    return told


def _loss(found: Analysis) -> str:
    if found.loss is None:
        return ""
    told = f"Training loss {found.last_loss:.4f} nats a token at step {found.last_step:,}"
    if found.loss_rows > 1:
        told += f" (median of the last {found.loss_rows} rows: {found.loss:.4f})"
    if found.validation is None:
        return f"{told}; nothing has been validated yet."
    told += f", validation loss {found.validation:.4f}"
    gap = found.validation - found.best_validation
    if gap > 0.01 * found.best_validation:
        told += f", {gap:.4f} above the best it had ({found.best_validation:.4f})"
    return f"{told}. {found.mixture_note}" if found.mixture_note else f"{told}."


def _rate(found: Analysis) -> str:
    if found.recent_gain is None:
        return ""
    told = f"Over the last quarter of its tokens the loss {_moved(found.recent_gain)}"
    if found.gain_per_doubling is not None:
        told += f"; each doubling of the tokens lowers it by {found.gain_per_doubling:.3f} at this point"
    if found.stagnant:
        told += "; that is stagnation: try a lower learning rate, or stop here"
    return f"{told}."


def _moved(gain: float) -> str:
    return f"fell by {gain:.1%}" if gain >= 0 else f"rose by {-gain:.1%}"


def _spikes(found: Analysis) -> str:
    are = "loss is" if found.non_finite == 1 else "losses are"
    told = f"{found.non_finite} logged {are} not finite. " if found.non_finite else ""
    if not found.spikes:
        return f"{told}No spikes."
    shown = ", ".join(f"{step:,}" for step in found.spikes[-5:])
    plural = "s" if len(found.spikes) > 1 else ""
    return f"{told}{len(found.spikes)} spike{plural}, the last at step{plural} {shown}."


def _target(found: Analysis) -> str:
    if found.target is None:
        return ""
    if found.target_is_met:
        return f"The recipe's target of {found.target:.4f} is reached."
    told = f"The recipe's target is {found.target:.4f}"
    if found.heading is None or found.standing.state == "finished":
        return f"{told}; it is not reached."
    if found.heading.high <= found.target:
        return f"{told}; the run is heading below it."
    return f"{told}; the run is heading {'near' if found.heading.low <= found.target else 'above'} it."


def _heading(found: Analysis) -> str:
    if found.heading is None or found.standing.state == "finished":
        return ""
    made = found.heading
    return (
        f"A power law through the curve so far leads to a training loss of {made.loss:.3f} "
        f"({made.low:.3f} to {made.high:.3f}) at {found.heading_tokens:,.0f} tokens; "
        f"what a falling learning rate still brings is not in it.{_track_record(found)}"
    )


def _track_record(found: Analysis) -> str:
    if not found.track_record:
        return ""
    middle = statistics.median(found.track_record)
    worst = max(found.track_record, key=abs)
    runs = f"{len(found.track_record)} finished run{'s' if len(found.track_record) > 1 else ''} beside it"
    return (
        f" Such fits on the first halves of {runs} were off by {middle:+.1%} in the median, "
        f"{worst:+.1%} at worst."
    )


def _goodput(found: Analysis) -> str:
    if found.goodput is None:
        return ""
    told = f"{found.goodput:.0%} of the wall time went into steps that counted"
    if found.stopped_seconds:
        told += f"; the {duration(found.stopped_seconds)} during which it was stopped are not in it"
    return f"{told}."


def report_end(run: RunFolder) -> None:
    """Rank 0 prints what came out of a finished run, what it took, and where it lies."""
    if os.environ.get("RANK", "0") == "0":
        print(end_text(RunRecord(run.path)), flush=True)


def end_text(record: RunRecord) -> str:
    """The results of a finished run, by its files."""
    run, end = record.run, record.run.last_event("end")
    bits, unigram, trained = (
        end["eval_bits_per_byte"],
        end["unigram_bits_per_byte"],
        record.metrics.last("train/loss"),
    )
    lines = [
        f"validation loss {end['eval_loss']:.4f} nats per token, {bits:.4f} bits per byte "
        f"({bits / unigram:.3f} of the unigram entropy {unigram:.4f})"
        + ("" if trained is None else f"; training loss of the last row {trained:.4f}"),
        _taken(record, end.get("measured", {})),
        f"export: {run.export}",
        f"report: {run.report}" if record.recipe.get("report", {}).get("every_seconds") else None,
    ]
    return "\n".join(filter(None, lines))


def _taken(record: RunRecord, measured: dict) -> str:
    """Steps, tokens, and the time since the first start without that during which the run was stopped on request."""
    times = [record.event_time(event) for event in record.events]
    seconds = times[-1] - times[0] - stopped_seconds(record.events)
    told = f"{record.steps[-1]:,.0f} steps, {record.tokens[-1]:,.0f} tokens in {duration(max(1.0, seconds))}"
    if speed := record.speed():
        rate = f"{speed['tokens_per_second']:,.0f} tokens/s"
        told += f", {duration(speed['training_seconds'])} of them in its steps ({rate})"
    if "peak_memory_bytes" in measured:
        whose = "GPU memory" if record.metrics.last("memory/peak_bytes") else "memory beyond its libraries"
        told += f"; a rank's peak {whose} {num_bytes(measured['peak_memory_bytes'])}"
    return told
