"""What a run's curve shows, as numbers; `words` says them."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pretraining.errors import UserError
from pretraining.reporting.curve_fit import Forecast, forecast
from pretraining.reporting.run_record import RunRecord, Standing
from pretraining.reporting.spikes import spike_rows
from pretraining.runtime.run_folder import stopped_seconds

FEWEST_ROWS = 8
STAGNANT = 0.002
"""Share of the loss gained over the last quarter of the tokens, below which a curve stagnates."""


@dataclass
class Analysis:
    """Losses in nats a token; None where the run does not say."""

    standing: Standing
    phase: str
    loss: float | None = None
    """Median over the last twentieth of the rows."""
    loss_rows: int = 0
    """How many rows these are."""
    last_loss: float | None = None
    last_step: int = 0
    validation: float | None = None
    best_validation: float | None = None
    mixture_note: str | None = None
    """If the validation holds another mixture of the sources than training does: a sentence that says so."""
    gain_per_doubling: float | None = None
    """How far the loss falls with each doubling of the tokens, over the last half of them."""
    recent_gain: float | None = None
    """Share of the loss gained over the last quarter of the tokens."""
    stagnant: bool = False
    spikes: list[int] = field(default_factory=list)
    """Steps."""
    non_finite: int = 0
    target: float | None = None
    target_is_met: bool | None = None
    heading: Forecast | None = None
    heading_tokens: float = 0.0
    budget_share: float | None = None
    goodput: float | None = None
    stopped_seconds: float = 0.0
    """How long it was stopped on request between its starts: no part of the goodput's wall time."""
    track_record: list[float] = field(default_factory=list)
    """(forecast - measured) / measured of fits on first halves of finished runs."""


def analyze(record: RunRecord, track_record: list[float] = ()) -> Analysis:
    """Read the curve of a run."""
    rows, losses = record.metrics.column("train/loss")
    tokens = record.tokens[rows] if len(rows) else np.array([])
    found = Analysis(record.standing(), "not begun", track_record=list(track_record))
    found.mixture_note = record.mixture.get("validation_note")
    found.stopped_seconds = stopped_seconds(record.events)
    _, validation = record.metrics.column("eval/loss")
    finite = validation[np.isfinite(validation)]
    if len(finite):
        found.validation, found.best_validation = float(validation[-1]), float(finite.min())
    if not len(rows):
        return found
    found.non_finite = int((~np.isfinite(losses)).sum())
    found.loss_rows = max(1, len(losses) // 20)
    found.loss = _median(losses[-found.loss_rows :])
    found.last_loss, found.last_step = float(losses[-1]), int(record.steps[rows[-1]])
    found.spikes = [int(record.steps[rows[row]]) for row in spike_rows(losses)]
    found.budget_share, found.goodput = record.budget_share, record.metrics.last("throughput/goodput")
    _rate(found, tokens, losses)
    found.phase = _phase(record, found, losses)
    _target(found, record)
    _head(found, record, tokens, losses)
    return found


def _median(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def _rate(found: Analysis, tokens: np.ndarray, losses: np.ndarray) -> None:
    """Slope against log2(tokens) over the last half; gain over the last quarter, between medians."""
    usable = np.isfinite(losses) & (tokens > 0)
    tokens, losses = tokens[usable], losses[usable]
    if len(tokens) < FEWEST_ROWS:
        return
    late = tokens >= tokens[-1] / 2
    if late.sum() >= 4:
        found.gain_per_doubling = float(-np.polyfit(np.log2(tokens[late]), losses[late], 1)[0])
    quarter = losses[tokens >= 0.75 * tokens[-1]]
    third = max(1, len(quarter) // 3)
    begin, end = np.median(quarter[:third]), np.median(quarter[-third:])
    found.recent_gain = float((begin - end) / abs(begin)) if begin else None
    found.stagnant = len(losses) >= 4 * FEWEST_ROWS and found.recent_gain < STAGNANT


def _phase(record: RunRecord, found: Analysis, losses: np.ndarray) -> str:
    _, rates = record.metrics.column("train/learning_rate")
    if not np.isfinite(losses[-1]):
        return "broken"
    if len(losses) < FEWEST_ROWS:
        return "just begun"
    if found.recent_gain is not None and found.recent_gain < -0.05:
        return "diverging"
    if found.standing.state == "finished":
        return "finished"
    if len(rates) > 2 and rates[-1] >= rates.max() and rates[-1] > rates[-2]:
        return "warming up"
    if found.stagnant:
        return "plateau"
    falling = len(rates) > 2 and rates[-1] < rates[-2] and rates[-1] < 0.98 * rates.max()
    return "learning, with the learning rate falling" if falling else "learning"


def _target(found: Analysis, record: RunRecord) -> None:
    """`report.target_loss` of the recipe, against the best validation loss so far, else the training loss."""
    found.target = record.recipe.get("report", {}).get("target_loss")
    reached = found.loss if found.best_validation is None else found.best_validation
    if found.target is not None and reached is not None:
        found.target_is_met = reached <= found.target


def _head(found: Analysis, record: RunRecord, tokens: np.ndarray, losses: np.ndarray) -> None:
    budget = record.recipe.get("budget", {}).get("tokens")
    found.heading_tokens = float(budget or tokens[-1])
    after = after_warm_up(record)
    found.heading = forecast(tokens[after:], losses[after:], found.heading_tokens)


def after_warm_up(record: RunRecord) -> int:
    """First training row that a fit uses: the learning rate is at its peak, and a fiftieth of the rows is over."""
    _, rates = record.metrics.column("train/learning_rate")
    peak = int(np.argmax(rates)) if len(rates) else 0
    return min(max(peak, len(rates) // 50), len(rates) // 2)


def track_record_of(folder: Path, but: Path | None = None) -> list[float]:
    """Relative errors of forecasts from the first halves of the finished runs in `folder`, against their ends."""
    errors = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (path / "metrics.jsonl").is_file() and (but is None or path.resolve() != but.resolve()):
            try:
                record = RunRecord(path)
            except (UserError, OSError):
                continue
            if record.state == "finished" and (error := half_fit_error(record)) is not None:
                errors.append(error)
    return errors


def half_fit_error(record: RunRecord) -> float | None:
    """(forecast - measured) / measured, from the first half of a run's tokens to its end."""
    rows, losses = record.metrics.column("train/loss")
    if len(rows) < 4 * FEWEST_ROWS:
        return None
    tokens, first = record.tokens[rows], after_warm_up(record)
    half = int(np.searchsorted(tokens, tokens[-1] / 2))
    made = forecast(tokens[first:half], losses[first:half], float(tokens[-1]))
    measured = _median(losses[-max(3, len(losses) // 20) :])
    return (made.loss - measured) / measured if made and measured else None
