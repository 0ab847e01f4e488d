"""What a run's curve shows, as numbers and in sentences: phase, rate, spikes, where it leads, and how the run ended."""

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.errors import UserError
from pretraining.outside.schema import display_path
from pretraining.planning.comparison import measured_beside_planned
from pretraining.planning.quantities import dollars, duration, several
from pretraining.recipe.fixed_keys import differs_from_published
from pretraining.reporting.foreseen import Foreseen, foreseen_of
from pretraining.reporting.published import JUDGED, Beside, beside, curve_of, notes_beside
from pretraining.reporting.run_record import RunRecord, Standing
from pretraining.runtime.run_folder import RunFolder
from pretraining.runtime.wall_time import CAUSES, WallTime

FEWEST_ROWS = 8
"""Rows with a loss below which a curve has no rate and no phase."""
STAGNANT = 0.002
"""A curve that gained less than this share of its loss over the last quarter of the tokens stagnates ..."""
DIVERGING = -0.05
"""... and one that gained less than this diverges."""

# Spikes, found after the fact. The monitor that judges steps as they happen is another (training/).
BLOCK = 32
SPIKE_SCORE = 8.0
"""Robust standard deviations above the median of the block before."""
SPIKE_RISE = 1.08
"""A spike is also at least this multiple of that median: the noise of a quiet curve is no spike."""
SPIKE_GAP = 8
"""Rows between two spikes."""

# The power law.
EXPONENTS = np.geomspace(0.02, 2.0, 161)  # steps of 3 %
FEWEST_POINTS = 12
NUM_BUCKETS = 120
RESAMPLES = 200


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


@dataclass(frozen=True)
class PowerLaw:
    """loss(tokens) = floor + scale x (tokens / unit) ^ -exponent."""

    floor: float
    scale: float
    exponent: float
    unit: float

    def at(self, tokens: Any) -> Any:
        """Give the loss, in nats a token, at a number of tokens or at each of an array."""
        return self.floor + self.scale * (tokens / self.unit) ** -self.exponent


@dataclass(frozen=True)
class Forecast:
    """The loss that a curve is heading for, with an interval from its noise and from fits to its later parts."""

    loss: float
    low: float
    high: float
    law: PowerLaw


@dataclass
class Analysis:
    """Losses are in nats a token; None if the run does not say."""

    standing: Standing
    phase: str
    loss: float | None = None
    """Median over the last twentieth of the rows."""
    loss_rows: int = 0
    last_loss: float | None = None
    last_step: int = 0
    validation: float | None = None
    best_validation: float | None = None
    mixture_note: str | None = None
    """A sentence, if validation mixes the sources in other shares than training does."""
    gain_per_doubling: float | None = None
    """How far the loss falls with each doubling of the tokens, over the last half of them."""
    recent_gain: float | None = None
    """Share of the loss gained over the last quarter of the tokens."""
    stagnant: bool = False
    spikes: list[int] = field(default_factory=list)
    non_finite: int = 0
    target: float | None = None
    target_is_met: bool | None = None
    heading: Forecast | None = None
    heading_tokens: float = 0.0
    budget_share: float | None = None
    published: Beside | None = None
    """This run beside the one that its recipe repeats."""
    published_differs: list[str] = field(default_factory=list)
    """Keys in which that one has another model, vocabulary or text."""
    published_notes: list[str] = field(default_factory=list)
    """Sentences about these, and about why nothing of it is beside this run yet."""
    foreseen: Foreseen | None = None
    """What the ladder that it names foresees."""
    wall_time: WallTime | None = None
    """Where the time went; None if no row has a time."""
    dollars: float | None = None
    dollars_at_end: float | None = None
    """At the speed of the last rows; None if no price is known."""
    track_record: list[float] = field(default_factory=list)
    """(forecast - measured) / measured of fits on first halves of finished runs."""


def analyze(record: RunRecord, track_record: Sequence[float] = ()) -> Analysis:
    """Read the curve of a run.

    track_record: relative errors of forecasts of finished runs (`track_record_beside`).
    """
    rows, losses = record.metrics.column("train/loss")
    tokens = record.tokens[rows] if len(rows) else np.array([])
    found = Analysis(record.standing(), "not begun", track_record=list(track_record))
    found.mixture_note = record.mixture.get("validation_note")
    found.wall_time = record.wall_time()
    found.dollars = record.dollars(found.wall_time)
    found.dollars_at_end = record.metrics.last("cost/dollars_at_end")
    found.foreseen = foreseen_of(record)
    _, validation = record.metrics.column("eval/loss")
    if np.isfinite(validation).any():
        best = validation[np.isfinite(validation)].min()
        found.validation, found.best_validation = float(validation[-1]), float(best)
    if not len(rows):
        return found
    if curve := curve_of(record.recipe):
        columns = {metric: record.metrics.column(metric) for metric in JUDGED}
        places = {metric: (record.tokens[rows], values) for metric, (rows, values) in columns.items()}
        found.published = beside(curve, places)
        found.published_differs = differs_from_published(record.recipe)
        reached = float(tokens[-1])
        found.published_notes = notes_beside(curve, found.published, found.published_differs, reached)
    found.non_finite = int((~np.isfinite(losses)).sum())
    # because one row alone is noisy
    found.loss_rows = max(1, len(losses) // 20)
    found.loss = _median(losses[-found.loss_rows :])
    found.last_loss, found.last_step = float(losses[-1]), int(record.steps[rows[-1]])
    found.spikes = [int(record.steps[rows[row]]) for row in spike_rows(losses)]
    found.budget_share = record.budget_share
    usable = np.isfinite(losses) & (tokens > 0)
    some_tokens, some_losses = tokens[usable], losses[usable]
    if len(some_tokens) >= FEWEST_ROWS:
        # the slope against log2(tokens) over the last half of them, which is one doubling
        late = some_tokens >= some_tokens[-1] / 2
        if late.sum() >= 4:
            slope = np.polyfit(np.log2(some_tokens[late]), some_losses[late], 1)[0]
            found.gain_per_doubling = float(-slope)
        # Medians of thirds: one spike at either end must not make a gain or a loss.
        quarter = some_losses[some_tokens >= 0.75 * some_tokens[-1]]
        third = max(1, len(quarter) // 3)
        if begin := float(np.median(quarter[:third])):
            found.recent_gain = (begin - float(np.median(quarter[-third:]))) / abs(begin)
            is_long = len(some_losses) >= 4 * FEWEST_ROWS
            found.stagnant = is_long and DIVERGING <= found.recent_gain < STAGNANT
    found.phase = _phase(record, found, losses)
    found.target = record.recipe.get("report", {}).get("target_loss")
    reached = found.loss if found.best_validation is None else found.best_validation
    if found.target is not None and reached is not None:
        found.target_is_met = reached <= found.target
    found.heading_tokens = float(record.recipe.get("budget", {}).get("tokens") or tokens[-1])
    # a power law can only fall: it says nothing of a curve that rises
    if found.phase not in ("broken", "diverging"):
        after = after_warm_up(record)
        found.heading = forecast(tokens[after:], losses[after:], found.heading_tokens)
    return found


def _median(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def _phase(record: RunRecord, found: Analysis, losses: np.ndarray) -> str:
    _, rates = record.metrics.column("train/learning_rate")
    # The worst first: what is broken or diverging is that, finished or not.
    if not np.isfinite(losses[-1]):
        return "broken"
    if len(losses) < FEWEST_ROWS:
        return "finished with few rows" if found.standing.state == "finished" else "too few rows"
    if found.recent_gain is not None and found.recent_gain < DIVERGING:
        return "diverging"
    if found.standing.state == "finished":
        return "finished"
    if len(rates) > 2 and rates[-1] >= rates.max() and rates[-1] > rates[-2]:
        return "warming up"
    if found.stagnant:
        return "plateau"
    # 2 % below the peak: a schedule that wobbles is not yet in its decay
    falling = len(rates) > 2 and rates[-1] < rates[-2] and rates[-1] < 0.98 * rates.max()
    return "learning, with the learning rate falling" if falling else "learning"


def after_warm_up(record: RunRecord) -> int:
    """Find the first training row that a fit uses: at the peak of the learning rate, a fiftieth of the rows in."""
    _, rates = record.metrics.column("train/learning_rate")
    peak = int(np.argmax(rates)) if len(rates) else 0
    # argmax takes the first row at the peak; at most half of the rows are left out
    return min(max(peak, len(rates) // 50), len(rates) // 2)


def track_record_beside(folder: Path) -> list[float]:
    """List the relative errors of forecasts from the first halves of the finished runs beside a run folder."""
    errors = []
    for metrics in sorted(folder.resolve().parent.glob("*/metrics.jsonl")):
        with suppress(UserError, OSError):
            if (
                not metrics.parent.samefile(folder)
                and (record := RunRecord(metrics.parent)).state == "finished"
            ):
                errors.append(half_fit_error(record))
    return [error for error in errors if error is not None]


def half_fit_error(record: RunRecord) -> float | None:
    """Forecast a run's end from the first half of its tokens: (forecast - measured) / measured."""
    rows, losses = record.metrics.column("train/loss")
    if len(rows) < 4 * FEWEST_ROWS:
        return None
    tokens, first = record.tokens[rows], after_warm_up(record)
    half = int(np.searchsorted(tokens, tokens[-1] / 2))
    made = forecast(tokens[first:half], losses[first:half], float(tokens[-1]))
    # the same twentieth as `Analysis.loss`, but at least three rows
    measured = _median(losses[-max(3, len(losses) // 20) :])
    return (made.loss - measured) / measured if made and measured else None


def spike_rows(values: np.ndarray) -> list[int]:
    """Find the highest row of every spike: rows far above the median of the block before them.

    Rows that are not finite count as spikes. The first two blocks are not judged, because a curve falls steeply there.
    """
    high = ~np.isfinite(values)
    for start in range(2 * BLOCK, len(values), BLOCK):
        # from the two blocks before: the spike must not raise its own level
        before = values[start - 2 * BLOCK : start]
        usable = np.flatnonzero(np.isfinite(before))
        early, late = usable[usable < BLOCK], usable[usable >= BLOCK]
        if len(early) < BLOCK // 2 or len(late) < BLOCK // 2:
            continue
        # the median of the later half, and the robust standard deviation around the trend of both halves
        level = np.median(before[late])
        slope = (level - np.median(before[early])) / BLOCK
        residuals = before[usable] - level - slope * (usable - 1.5 * BLOCK)
        # 1.4826 makes the median absolute deviation a standard deviation, for normal noise
        spread = 1.4826 * np.median(np.abs(residuals)) + 1e-3 * abs(level)
        with np.errstate(invalid="ignore"):
            least = max(level + SPIKE_SCORE * spread, SPIKE_RISE * level)
            high[start : start + BLOCK] |= values[start : start + BLOCK] > least
    rows = np.flatnonzero(high)
    # rows that are close belong to one spike
    spikes = np.split(rows, np.flatnonzero(np.diff(rows) > SPIKE_GAP) + 1) if len(rows) else []
    heights = np.where(np.isfinite(values), values, np.inf)
    return [int(spike[np.argmax(heights[spike])]) for spike in spikes]


def forecast(tokens: np.ndarray, losses: np.ndarray, at_tokens: float) -> Forecast | None:
    """Fit the curve so far and read it at `at_tokens`; None if it has too few points.

    The fit is to medians over buckets that are even in log(tokens), weighted by the root of their rows, so that
    neither spikes nor the many late rows decide alone. For each exponent, floor and scale follow by least squares,
    with a floor of at least 0 (the form is that of Hoffmann et al. 2022, in tokens alone).

    The interval holds the middle 90 % of a moving-block bootstrap of the residuals, and the laws of the curve without
    its first quarter and half. It covers the noise, and how far the curve is a power law at all. It does not cover
    what a falling learning rate will still bring.
    """
    x, y, rows = _buckets(tokens, losses)
    if len(x) < FEWEST_POINTS:
        return None
    unit, weights = float(x[-1]), np.sqrt(rows)

    def law_from(first: int) -> PowerLaw:
        parts = _fit(x[first:] / unit, y[first:, None], weights[first:])
        floor, scale, exponent = (float(part[0]) for part in parts)
        return PowerLaw(floor, scale, exponent, unit)

    law = law_from(0)
    fitted = law.at(x)
    # residuals are scaled to equal noise before they are drawn: buckets have unequal numbers of rows
    residuals, points = (y - fitted) * np.sqrt(weights), len(y)
    # in blocks, so that their slow waves stay; a fixed seed, so that a page written again shows the same interval
    length = max(1, round(points ** (1 / 3)))
    draws = np.random.default_rng(0).integers(0, points - length + 1, size=(-(-points // length), RESAMPLES))
    drawn = (draws[:, None, :] + np.arange(length)[None, :, None]).reshape(-1, RESAMPLES)[:points]
    noisy = fitted[:, None] + residuals[drawn] / np.sqrt(weights)[:, None]
    floors, scales, exponents = _fit(x / unit, noisy, weights)
    low, high = np.quantile(floors + scales * (at_tokens / unit) ** -exponents, [0.05, 0.95])
    # the whole curve, and its later parts alone
    begins = [first for first in (0, len(x) // 4, len(x) // 2) if len(x) - first >= FEWEST_POINTS]
    ends = [low, high, *(law_from(first).at(at_tokens) for first in begins)]
    return Forecast(law.at(at_tokens), float(min(ends)), float(max(ends)), law)


def _buckets(tokens: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the curve into at most NUM_BUCKETS buckets, even in log(tokens): median tokens, median losses, rows."""
    usable = np.isfinite(losses) & (tokens > 0)
    tokens, losses = tokens[usable], losses[usable]
    if not len(tokens):
        return tokens, losses, tokens
    # beyond the last row, so that searchsorted puts it into the last bucket
    edges = np.geomspace(tokens[0], tokens[-1] * 1.0001, NUM_BUCKETS + 1)
    spans = [(a, b) for a, b in itertools.pairwise(np.searchsorted(tokens, edges)) if b > a]
    middle = np.array([[np.median(tokens[a:b]), np.median(losses[a:b]), b - a] for a, b in spans])
    return middle[:, 0], middle[:, 1], middle[:, 2]


def _fit(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find (floors, scales, exponents) [columns] of the best law for each column of y [points, columns].

    Each exponent is the best of the grid, moved to the minimum of the parabola through its error and its neighbours'.
    """
    errors = np.stack([_solve(x[:, None] ** -exponent, y, weights)[2] for exponent in EXPONENTS])
    # clip: the parabola needs a neighbour on both sides
    columns, best = np.arange(y.shape[1]), errors.argmin(axis=0).clip(1, len(EXPONENTS) - 2)
    before, here, after = (errors[best + step, columns] for step in (-1, 0, 1))
    bend = before - 2 * here + after
    shift = np.divide(0.5 * (before - after), bend, out=np.zeros_like(bend), where=bend > 0).clip(-1, 1)
    exponents = np.exp(np.interp(best + shift, np.arange(len(EXPONENTS)), np.log(EXPONENTS)))
    floors, scales, _ = _solve(x[:, None] ** -exponents, y, weights)
    return floors, scales, exponents


def _solve(powers: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Solve for (floors, scales, weighted squared errors) [columns], given powers [points, columns or 1]."""
    total, mean_p, mean_y = weights.sum(), weights @ powers / weights.sum(), weights @ y / weights.sum()
    scale = weights @ ((powers - mean_p) * (y - mean_y)) / (weights @ (powers - mean_p) ** 2)
    floor = mean_y - scale * mean_p
    # a negative floor is set to 0, and the scale solved again for it
    scale = np.where(floor < 0, weights @ (powers * y) / (weights @ powers**2), scale)
    floor = np.maximum(floor, 0.0)
    return floor, scale, weights @ (floor + scale * powers - y) ** 2 / total


def sentences(found: Analysis) -> list[str]:
    """Say what the analysis found, most important first. The run's state is not in it (`standing_text`)."""
    state = found.standing.state
    phase = PHASES.get(found.phase, f"The run {'is' if state == 'running' else 'was'} {found.phase}.")
    if found.budget_share is not None and state != "finished":
        phase += f" {found.budget_share:.0%} of its tokens are spent."
    parts = [phase]
    if found.loss is not None:
        text = f"Training loss {found.last_loss:.4f} nats a token at step {found.last_step:,}"
        if found.loss_rows > 1:
            text += f" (median of the last {found.loss_rows} rows: {found.loss:.4f})"
        if found.validation is None:
            text += "; nothing has been validated yet."
        else:
            text += f", validation loss {found.validation:.4f}"
            gap = found.validation - found.best_validation
            if gap > 0.01 * found.best_validation:
                text += f", {gap:.4f} above the best it had ({found.best_validation:.4f})"
            text += f". {found.mixture_note}" if found.mixture_note else "."
        parts.append(text)
    if (other := found.published) is not None:
        gap = other.gaps[-1]
        side = f"{abs(gap):.4f} {'above' if gap > 0 else 'below'} it"
        parts.append(
            f"The published run ({other.run}) had {JUDGED[other.metric]} {other.published[-1]:.4f} after "
            f"{other.tokens[-1]:,.0f} tokens; this one is {side}."
        )
    parts += found.published_notes
    if found.foreseen is not None:
        parts.append(found.foreseen.words)
    if found.recent_gain is not None:

        def moved(gain: float, form: str) -> str:
            return f"{'fell' if gain >= 0 else 'rose'} by {abs(gain):{form}}"

        text = f"Over the last quarter of its tokens the loss {moved(found.recent_gain, '.1%')}"
        if (gain := found.gain_per_doubling) is not None:
            # what was, and no promise: the quarter is a part of this half
            text += f"; over the last half, which is one doubling, its trend {moved(gain, '.3f')} nats"
        if found.stagnant and state == "finished":
            text += "; that is stagnation: more tokens at this rate would bring little"
        elif found.stagnant:
            text += "; that is stagnation: stop it, or continue with --allow_change training.learning_rate and a lower "
            text += "rate"
        parts.append(f"{text}.")
    are = "loss is" if found.non_finite == 1 else "losses are"
    text = f"{found.non_finite} logged {are} not finite. " if found.non_finite else ""
    plural, shown = "s" if len(found.spikes) > 1 else "", ", ".join(f"{step:,}" for step in found.spikes[-5:])
    text += f"{len(found.spikes)} spike{plural}, the last at step{plural} {shown}." if shown else "No spikes."
    parts += [text, *_words_ahead(found)]
    spent = found.wall_time
    if spent is not None and spent.counted:
        text = f"{spent.counted / spent.seconds:.1%} of the wall time went into steps that counted"
        if lost := lost_words(spent):
            text += f"; lost were {lost}"
        if spent.stopped:
            text += f"; the {duration(spent.stopped)} during which it was stopped are not in it"
        parts.append(f"{text}.")
    if found.dollars is not None:
        cost = f"It has cost {dollars(found.dollars)}"
        if state != "finished" and found.dollars_at_end is not None:
            cost += f", and will have cost {dollars(found.dollars_at_end)} at its end, without failures"
        parts.append(f"{cost}.")
    return [part for part in parts if part]


def _words_ahead(found: Analysis) -> list[str]:
    """Say whether the recipe's target is reached or near, and where the curve leads."""
    made = None if found.standing.state == "finished" else found.heading
    parts = []
    if found.target is not None and found.target_is_met:
        parts.append(f"The recipe's target of {found.target:.4f} is reached.")
    elif found.target is not None:
        then = "it is not reached"
        if made is not None:
            is_near = made.low <= found.target
            side = "below it" if made.high <= found.target else "near it" if is_near else "above it"
            then = f"the run is heading {side}"
        parts.append(f"The recipe's target is {found.target:.4f}; {then}.")
    if made is None:
        return parts
    text = f"A power law through the curve so far leads to a training loss of {made.loss:.3f} "
    text += f"({made.low:.3f} to {made.high:.3f}) at {found.heading_tokens:,.0f} tokens; "
    text += "what a falling learning rate still brings is not in it."
    if found.track_record:
        # with their signs: a median that is not near 0 shows a bias
        middle, worst = statistics.median(found.track_record), max(found.track_record, key=abs)
        runs = f"{several(len(found.track_record), 'finished run')} beside it"
        text += f" Such fits on the first halves of {runs} were off by {middle:+.1%} in the median, "
        text += f"{worst:+.1%} at worst."
    return [*parts, text]


def lost_words(spent: WallTime) -> str:
    """Say which shares of the wall time went to which cause, largest first, without those below 0.05 %."""
    shares = ((CAUSES[cause], share) for cause, share in spent.shares.items() if share >= 0.0005)
    return ", ".join(f"{share:.1%} to {name}" for name, share in shares)


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


def standing_text(standing: Standing, now: float) -> str:
    """Say in which state a run is, and since when; empty for a finished or running one.

    now: UNIX seconds, because the state depends on the clock.
    """
    since = f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(standing.since))} UTC"
    # never 0 or less, whatever the two clocks say
    since += f" ({duration(max(1.0, now - standing.since))} ago)"
    reason = f": {standing.reason}" if standing.reason else ""
    step = f"step {standing.step:,}"
    continues = "The same command without --resume continues "
    continues += f"{f'from {standing.checkpoint}' if standing.checkpoint else 'it'}."
    return {
        "killed": f"Killed after {step}: none of its processes is left; it last wrote at {since}. {continues}",
        "failed": f"Failed after {step}, {since}{reason}. Once that is mended, t{continues[1:]}",
        "stopped": f"Stopped at {step} since {since}{reason}. {continues}",
        "silent": f"Nothing was written since {since}, after {step}: it may have been killed. "
        "If no process of it is left, the same command without --resume continues it.",
        "hang": f"It hung after {step} and ended, {since}. {continues}",
        "gave up": f"It gave up at {step}, {since}{reason}. Look at it before you start it again.",
    }.get(standing.state, "")
