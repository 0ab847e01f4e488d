"""An analysis as sentences."""

import statistics

from pretraining.reporting.analysis import Analysis

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
    """The analysis, most important first."""
    parts = [_phase(found), _loss(found), _rate(found), _spikes(found), _target(found), _heading(found)]
    parts += [_track_record(found), _goodput(found)]
    return [part for part in parts if part]


def _phase(found: Analysis) -> str:
    told = PHASES.get(found.phase, f"The run is {found.phase}.")
    if found.state == "stopped" and found.phase != "finished":
        told += " It has stopped without an end: the same command continues it."
    if found.budget_share is not None and found.state != "finished":
        told += f" {found.budget_share:.0%} of its tokens are spent."
    return told


def _loss(found: Analysis) -> str:
    if found.loss is None:
        return ""
    told = f"Training loss {found.loss:.4f} nats a token"
    if found.validation is None:
        return f"{told}; nothing has been validated yet."
    told += f", validation loss {found.validation:.4f}"
    gap = found.validation - found.best_validation
    if gap > 0.01 * found.best_validation:
        return f"{told}, {gap:.4f} above the best it had ({found.best_validation:.4f})."
    return f"{told}."


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
    if found.heading is None or found.state == "finished":
        return f"{told}; it is not reached."
    if found.heading.high <= found.target:
        return f"{told}; the run is heading below it."
    return f"{told}; the run is heading {'near' if found.heading.low <= found.target else 'above'} it."


def _heading(found: Analysis) -> str:
    if found.heading is None or found.state == "finished":
        return ""
    made = found.heading
    return (
        f"A power law through the curve so far leads to a training loss of {made.loss:.3f} "
        f"({made.low:.3f} to {made.high:.3f}) at {found.heading_tokens:,.0f} tokens; "
        "what a falling learning rate still brings is not in it."
    )


def _track_record(found: Analysis) -> str:
    if not found.track_record:
        return ""
    middle = statistics.median(found.track_record)
    worst = max(found.track_record, key=abs)
    runs = f"{len(found.track_record)} finished run{'s' if len(found.track_record) > 1 else ''} beside it"
    return (
        f"Such fits on the first halves of {runs} were off by {middle:+.1%} in the median, "
        f"{worst:+.1%} at worst."
    )


def _goodput(found: Analysis) -> str:
    return (
        "" if found.goodput is None else f"{found.goodput:.0%} of the wall time went into steps that counted."
    )
