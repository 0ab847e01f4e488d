"""What the ladder that a run names foresees of its validation loss, and whether the run is where it should be."""

from dataclasses import dataclass, replace

import numpy as np

from pretraining.errors import UserError
from pretraining.planning.ladder import DECAYED, STABLE, Expected, read_ladder, share_words
from pretraining.planning.quantities import several
from pretraining.reporting.run_record import RunRecord

POINTS = 40
EARLIEST = 0.02
"""Share of the tokens from which on the band is drawn."""


@dataclass(frozen=True)
class Foreseen:
    """The loss of a run by tokens: from that of a rate that has fallen to 0 there, to that of a stable rate."""

    ladder: str
    """How large it is, in words."""
    end: Expected
    tokens: list[float]
    curves: dict[str, list[float]]
    """{"loss", "low", "high"} at those tokens."""
    reached: float | None = None
    """Of the last validation, if the ladder's runs were as long."""
    now: Expected | None = None
    """What it should be there, at the share of the rate that is left."""

    @property
    def has_left(self) -> bool:
        return self.now is not None and not self.now.low <= self.reached <= self.now.high

    @property
    def words(self) -> str:
        text = f"Its ladder ({self.ladder}) foresees a validation loss of {self.end.words} at the end"
        if self.now is None:
            return f"{text}."
        now = f"at its last validation {self.reached:.4f}, where {self.now.words} is foreseen"
        if self.has_left:
            worse = self.reached > self.now.high
            what = "look for the reason before you pay for the rest" if worse else "better than its family"
            return f"{text}. It has left that: {now}; {what}."
        return f"{text}. It is on its way there: {now}."


def foreseen_of(record: RunRecord) -> Foreseen | None:
    """Return what is foreseen of a run; None if it names no ladder, or one that cannot be read."""
    size, budget = record.plan.get("size"), record.recipe.get("budget") or {}
    parameters = size.get("matmul") if isinstance(size, dict) else None
    name, tokens = (record.recipe.get("report") or {}).get("ladder"), budget.get("tokens")
    if not (isinstance(name, str) and parameters and tokens):
        return None
    try:
        ladder = read_ladder(name)
    except UserError:  # a report is written all the same
        return None
    at = np.geomspace(EARLIEST * tokens, tokens, POINTS).tolist()
    curves, stable = (ladder.fits[kind].curve([parameters] * POINTS, at) for kind in (DECAYED, STABLE))
    # at the end the rate has fallen
    curves["high"][:-1] = map(max, curves["high"][:-1], stable["high"])
    share = share_words((record.plan.get("training_flops") or ladder.most_flops) / ladder.most_flops)
    size = f"{several(ladder.values['runs'], 'run')}, up to {share}"
    found = Foreseen(size, ladder.fits[DECAYED].at(parameters, tokens), at, curves)
    rows, losses = record.metrics.column("eval/loss")
    _, rates = record.metrics.column("train/learning_rate")
    if not len(rows) or not len(rates) or not rates.max() > 0 or not np.isfinite(losses[-1]):
        return found
    tokens, left = float(record.tokens[rows[-1]]), float(rates[-1] / rates.max())
    if tokens < min(point["tokens"] for point in ladder.values["points"]):
        return found  # its runs were all longer
    ends = (ladder.fits[kind].at(parameters, tokens) for kind in (DECAYED, STABLE))
    # What a falling rate brings is taken to be in proportion to how far it has fallen.
    between = [low + left * (high - low) for low, high in zip(*ends, strict=True)]
    return replace(found, reached=float(losses[-1]), now=Expected(*between))
