"""An analysis as sentences, and the few lines with which a run ends."""

import os
import statistics
import time

from pretraining.planning.comparison import measured_beside_planned
from pretraining.planning.quantities import dollars, duration, several
from pretraining.reporting.analysis import Analysis
from pretraining.reporting.run_record import RunRecord, Standing
from pretraining.runtime.run_folder import RunFolder
from pretraining.runtime.wall_time import CAUSES, WallTime
from pretraining.schema import display_path

PHASES = {
    "not begun": "No step has been logged yet.",
    "too few rows": "Too few rows are logged to judge the curve.",
    "finished with few rows": "The run is finished; too few rows are logged to judge its curve.",
    "broken": "The loss is not a number: the run is broken since then.",
    "diverging": "The loss is rising: it is diverging.",
    "warming up": "The learning rate is still warming up.",
    "plateau": "The loss is on a plateau.",
    "finished": "The run is finished.",
}


def sentences(found: Analysis) -> list[str]:
    """Say what the analysis found, most important first. The run's state is not in it (`standing_text`)."""
    state = found.standing.state
    phase = PHASES.get(found.phase, f"The run {'is' if state == 'running' else 'was'} {found.phase}.")
    if found.budget_share is not None and state != "finished":
        phase += f" {found.budget_share:.0%} of its tokens are spent."
    parts = [
        phase,
        _loss(found),
        _rate(found),
        _spikes(found),
        _target(found),
        _heading(found),
        _goodput(found),
    ]
    if found.dollars is not None:
        cost = f"It has cost {dollars(found.dollars)}"
        if state != "finished" and found.dollars_at_end is not None:
            cost += f", and will have cost {dollars(found.dollars_at_end)} at its end, without failures"
        parts.append(f"{cost}.")
    return [part for part in parts if part]


def standing_text(standing: Standing, now: float) -> str:
    """Say in which state a run is, and since when; empty for a finished or running one.

    Args:
        now: UNIX seconds, because the state depends on the clock.
    """
    since = f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(standing.since))} UTC"
    # never 0 or less, whatever the two clocks say
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


def _loss(found: Analysis) -> str:
    if found.loss is None:
        return ""
    text = f"Training loss {found.last_loss:.4f} nats a token at step {found.last_step:,}"
    if found.loss_rows > 1:
        text += f" (median of the last {found.loss_rows} rows: {found.loss:.4f})"
    if found.validation is None:
        return f"{text}; nothing has been validated yet."
    text += f", validation loss {found.validation:.4f}"
    gap = found.validation - found.best_validation
    if gap > 0.01 * found.best_validation:
        text += f", {gap:.4f} above the best it had ({found.best_validation:.4f})"
    return f"{text}. {found.mixture_note}" if found.mixture_note else f"{text}."


def _rate(found: Analysis) -> str:
    if found.recent_gain is None:
        return ""
    text = f"Over the last quarter of its tokens the loss {_moved(found.recent_gain, '.1%')}"
    if (gain := found.gain_per_doubling) is not None:
        # what was, and no promise: the quarter is a part of this half
        text += f"; over the last half, which is one doubling, its trend {_moved(gain, '.3f')} nats"
    if found.stagnant:
        text += "; that is stagnation: " + (
            "more tokens at this rate would bring little"
            if found.standing.state == "finished"
            else "stop it, or continue with --allow_change training.learning_rate and a lower rate"
        )
    return f"{text}."


def _moved(gain: float, form: str) -> str:
    return f"{'fell' if gain >= 0 else 'rose'} by {abs(gain):{form}}"


def _spikes(found: Analysis) -> str:
    are = "loss is" if found.non_finite == 1 else "losses are"
    text = f"{found.non_finite} logged {are} not finite. " if found.non_finite else ""
    if not found.spikes:
        return f"{text}No spikes."
    shown = ", ".join(f"{step:,}" for step in found.spikes[-5:])
    plural = "s" if len(found.spikes) > 1 else ""
    return f"{text}{len(found.spikes)} spike{plural}, the last at step{plural} {shown}."


def _target(found: Analysis) -> str:
    if found.target is None:
        return ""
    if found.target_is_met:
        return f"The recipe's target of {found.target:.4f} is reached."
    text = f"The recipe's target is {found.target:.4f}"
    if found.heading is None or found.standing.state == "finished":
        return f"{text}; it is not reached."
    if found.heading.high <= found.target:
        return f"{text}; the run is heading below it."
    return f"{text}; the run is heading {'near' if found.heading.low <= found.target else 'above'} it."


def _heading(found: Analysis) -> str:
    if found.heading is None or found.standing.state == "finished":
        return ""
    made = found.heading
    text = f"A power law through the curve so far leads to a training loss of {made.loss:.3f} "
    text += f"({made.low:.3f} to {made.high:.3f}) at {found.heading_tokens:,.0f} tokens; "
    text += "what a falling learning rate still brings is not in it."
    if found.track_record:
        # with their signs: a median that is not near 0 shows a bias
        middle, worst = statistics.median(found.track_record), max(found.track_record, key=abs)
        runs = f"{several(len(found.track_record), 'finished run')} beside it"
        text += f" Such fits on the first halves of {runs} were off by {middle:+.1%} in the median, "
        text += f"{worst:+.1%} at worst."
    return text


def _goodput(found: Analysis) -> str:
    spent = found.wall_time
    if spent is None or not spent.counted:
        return ""
    text = f"{spent.counted / spent.seconds:.1%} of the wall time went into steps that counted"
    if lost := lost_words(spent):
        text += f"; lost were {lost}"
    if spent.stopped:
        text += f"; the {duration(spent.stopped)} during which it was stopped are not in it"
    return f"{text}."


def lost_words(spent: WallTime, least: float = 0.0005) -> str:
    """Say which shares of the wall time went to which cause, largest first, without those below `least`."""
    return ", ".join(
        f"{share:.1%} to {CAUSES[cause]}" for cause, share in spent.shares.items() if share >= least
    )


def report_end(run: RunFolder) -> None:
    """Print, on rank 0, the results of a finished run, what it took, and where its files are."""
    if os.environ.get("RANK", "0") != "0":
        return
    record, end = RunRecord(run.path), run.last_event("end")
    bits, unigram = end["eval_bits_per_byte"], end["unigram_bits_per_byte"]
    result = f"validation loss {end['eval_loss']:.4f} nats per token, {bits:.4f} bits per byte "
    result += f"({bits / unigram:.3f} of the unigram entropy {unigram:.4f}, which frequencies of tokens alone reach)"
    if (trained := record.metrics.last("train/loss")) is not None:
        result += f"; training loss of the last row {trained:.4f}"
    # without stops on request, which may last for days
    seconds = WallTime.of(record.events, (), record.last_written).seconds
    steps, tokens = record.taken()
    took = f"{steps:,.0f} steps, {tokens:,.0f} tokens in {duration(max(1.0, seconds))}"
    if speed := record.speed():
        took += f", {duration(speed['training_seconds'])} of them in its steps: "
        took += f"{speed['tokens_per_second']:,.0f} tokens/s"
    rows = {
        "result": result,
        "took": took,
        "measured": measured_beside_planned(run.path),
        "export": display_path(run.export),
        "report": display_path(run.report) if record.recipe.get("report", {}).get("every_seconds") else "",
    }
    print("\n".join(f"{label:<10}{value}" for label, value in rows.items() if value), flush=True)
