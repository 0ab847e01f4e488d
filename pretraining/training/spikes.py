"""Loss spikes and plateaus, computed identically on every rank, and the advice that each alert shows.

A spike is a high robust score over a window. The threshold is `monitors.spikes.score` of the recipe; stability.py
compares and acts. An alert names likely causes in the order in which to look at them.
"""

import math
from collections import deque
from itertools import islice

RECENT = 16
"""Steps whose median is the course; short enough to follow a falling loss."""
FEWEST = 32
"""Steps without which nothing is judged."""
NORMAL_MAD = 1.4826
"""Standard deviations in a median absolute deviation of normal noise."""
TAIL_SHARE = 1 / 16
"""Of the window's values: the upper tail, taken for exponential (peaks over a threshold, Coles 2001, chapter 4) ..."""
RARE, RARE_SCORE = 1e-7, 6.0
"""... up to the value that so small a share of healthy ones exceeds, which scores at most `RARE_SCORE`."""
SMALLEST_SCALE = 0.012
"""In log loss: a rise of less than `score` times this is no spike however calm the curve was."""


class SpikeScore:
    """Scores values against the last `window` of them that were no spikes themselves.

    Works on logarithms: spikes are factors. The course is the median of the last `RECENT` values, which lags
    behind a falling loss: that costs sensitivity and never raises a false alarm. Noise is measured by the
    median absolute deviation and by where the upper tail of the distances to the course leads, whichever is larger.
    """

    def __init__(self, window: int, smallest_scale: float = SMALLEST_SCALE):
        self.window, self.smallest_scale = window, smallest_scale
        self.values: deque[float] = deque(maxlen=RECENT)
        self.distances: deque[float] = deque(maxlen=window)
        self.rejected: list[float] = []
        self._judged_by: tuple[float, float] | None = None

    def score(self, value: float) -> float:
        """Standard deviations above the course; inf for a value that is not finite, 0 while too little is known."""
        if not math.isfinite(value):
            return math.inf
        if len(self.distances) < FEWEST:
            return 0.0
        course, scale = self._course_and_scale()
        return (_log(value) - course) / scale

    def limit(self, score: float) -> float:
        """The value at which `score` is reached; inf while too little is known."""
        if len(self.distances) < FEWEST:
            return math.inf
        course, scale = self._course_and_scale()
        return math.exp(min(course + score * scale, 700.0))

    @property
    def expected(self) -> float | None:
        """The median of the last healthy values."""
        return math.exp(_median(self.values)) if self.values else None

    def add(self, value: float, is_spike: bool) -> None:
        """Remember a value. Spikes leave the course as it is, until a whole new level shows."""
        if not math.isfinite(value):
            return
        if not is_spike:
            self.rejected.clear()
            self._accept(_log(value))
            return
        self.rejected.append(_log(value))
        if len(self.rejected) >= max(FEWEST, self.window // 2):
            self._begin_at_new_level()

    def _accept(self, value: float) -> None:
        self._judged_by = None
        if len(self.values) == RECENT:
            self.distances.append(value - _median(self.values))
        self.values.append(value)

    def _begin_at_new_level(self) -> None:
        level, self.rejected, self._judged_by = self.rejected, [], None
        self.values.clear()
        self.values.extend(level)

    def _course_and_scale(self) -> tuple[float, float]:
        """Of the values so far; the limit of a step and the score after it are read from the same."""
        self._judged_by = self._judged_by or self._measured()
        return self._judged_by

    def _measured(self) -> tuple[float, float]:
        ordered = sorted(self.distances)
        centre = _median_of_sorted(ordered)
        spread = NORMAL_MAD * _median([abs(d - centre) for d in ordered])
        tail = _rare_value(ordered) - centre
        return _median(self.values) + max(0.0, centre), max(spread, tail / RARE_SCORE, self.smallest_scale)

    def state(self) -> dict:
        """What a checkpoint keeps, as JSON values."""
        return {name: list(getattr(self, name)) for name in ("values", "distances", "rejected")}

    def restore(self, state: dict) -> None:
        """Continue from what `state` returned."""
        self.values = deque(state["values"], maxlen=RECENT)
        kept = islice(state["distances"], max(0, len(state["distances"]) - self.window), None)
        self.distances = deque(kept, maxlen=self.window)
        self.rejected, self._judged_by = list(state["rejected"]), None


def _rare_value(ordered: list[float]) -> float:
    """Where an exponential tail, with the mean excess of the last `TAIL_SHARE` of the values, has `RARE` left."""
    count = int(TAIL_SHARE * len(ordered))
    threshold = ordered[-1 - count]
    return threshold + (sum(ordered[-count:]) / count - threshold) * math.log(TAIL_SHARE / RARE)


def _log(value: float) -> float:
    return math.log(max(value, 1e-300))


def _median(values) -> float:
    return _median_of_sorted(sorted(values))


def _median_of_sorted(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


LEAST_GAIN = 0.001
"""Of the loss: less than this is no progress."""


class Plateau:
    """Shows once when the course has not gained `LEAST_GAIN` for so many steps; again after it fell and stopped."""

    def __init__(self, num_steps: int | None):
        """num_steps: None never shows."""
        self.num_steps = num_steps
        self.best, self.best_step, self.told = None, 0, False

    def shows(self, step: int, expected: float | None) -> bool:
        """Whether to report a plateau now; `expected` is the course's loss after `step`."""
        if expected is None:
            return False
        if self.best is None or expected < self.best * (1 - LEAST_GAIN):
            self.best, self.best_step, self.told = expected, step, False
        if self.num_steps is None or self.told or step - self.best_step < self.num_steps:
            return False
        self.told = True
        return True

    def state(self) -> dict:
        """What a checkpoint keeps, as JSON values."""
        return {"best": self.best, "best_step": self.best_step, "told": self.told}

    def restore(self, state: dict) -> None:
        """Continue from what `state` returned."""
        self.best, self.best_step, self.told = state["best"], state["best_step"], state["told"]


ADVICE = {
    "spike": {
        "causes": [
            "the data of these samples (see documents and flagged)",
            "the learning rate is high for this point of the schedule",
            "the second moments lag behind larger gradients",
        ],
        "try": [
            "look at the samples: python -m pretraining.data inspect DATA --sample N --recipe RECIPE",
            "monitors.spikes.policy rollback: goes back and leaves these samples out",
            "a lower training.learning_rate, a longer warmup_steps, a lower adam_beta2 (0.95)",
            "a lower training.max_grad_norm",
        ],
    },
    "non_finite": {
        "causes": [
            "a number beyond the precision's range: attention scores or logits that grow",
            "the data of these samples (see documents and flagged)",
            "the learning rate",
        ],
        "try": [
            "training.bf16 in place of training.fp16, or fp32 for some steps to find the place",
            "a lower training.learning_rate or training.max_grad_norm",
        ],
    },
    "gradient_explosion": {
        "causes": [
            "the learning rate is close to what this model bears",
            "unusual samples: repeated tokens, one language among others",
        ],
        "try": [
            "nothing yet where the loss holds: training.max_grad_norm bounds the step",
            "a lower training.learning_rate",
        ],
    },
    "starved_experts": {
        "causes": [
            "the balancing loss weighs too little beside the cross-entropy",
            "the routers settled while the learning rate was high",
        ],
        "try": [
            "a higher model.router_aux_loss_coef (0.01 is common)",
            "loss.router_z_loss (0.001), a longer training.warmup_steps",
        ],
    },
    "plateau": {
        "causes": [
            "the learning rate has decayed, or is too high to settle",
            "the model has learned what its size and this data allow",
        ],
        "try": [
            "compare with the validation loss: a gap says memorised data, none says capacity",
            "another schedule or learning rate in a run of its own, from an earlier checkpoint",
        ],
    },
}


def advice(kind: str) -> dict[str, list[str]]:
    """{"causes", "try"} of one kind of alert."""
    return ADVICE[kind]
