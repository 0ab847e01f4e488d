"""Detect loss spikes and plateaus, identically on every rank, and give the advice that each alert shows.

A spike is a high robust score over a window. The threshold is `monitors.spikes.score` of the recipe. stability.py
compares and acts. An alert names likely causes in the order in which to look at them.
"""

import math
from collections import deque
from itertools import islice
from statistics import median

RECENT = 16
"""Steps whose median is the expected value; few enough to follow a falling loss."""
FEWEST = 32
"""The least number of steps before anything is judged."""
NORMAL_MAD = 1.4826
"""Standard deviation of normal noise, divided by its median absolute deviation."""
TAIL_SHARE = 1 / 16
"""Share of the window's values in the upper tail, taken as exponential (peaks over threshold, Coles 2001, ch. 4)."""
RARE, RARE_SCORE = 1e-7, 6.0
"""A value that only the share `RARE` of healthy ones exceeds scores at most `RARE_SCORE`."""
SMALLEST_SCALE = 0.012
"""In log loss. A rise of less than `score` times this is no spike, even if the curve was very calm."""


class SpikeScore:
    """Score values against the last `window` of them that were no spikes themselves.

    The scores use logarithms, because spikes are factors. The course is the median of the last `RECENT` values. Noise
    is the larger of two measures: the median absolute deviation, and the upper tail of the distances to the course.
    """

    def __init__(self, window: int, smallest_scale: float = SMALLEST_SCALE):
        self.window, self.smallest_scale = window, smallest_scale
        self.values: deque[float] = deque(maxlen=RECENT)
        self.distances: deque[float] = deque(maxlen=window)
        self.rejected: list[float] = []
        self._judged_by: tuple[float, float] | None = None

    def score(self, value: float) -> float:
        """Return standard deviations above the course; inf if the value is not finite, 0 while too little is known."""
        if not math.isfinite(value):
            return math.inf
        if len(self.distances) < FEWEST:
            return 0.0
        course, scale = self._course_and_scale()
        return (_log(value) - course) / scale

    def limit(self, score: float) -> float:
        """Return the value at which `score` is reached; inf while too little is known."""
        if len(self.distances) < FEWEST:
            return math.inf
        course, scale = self._course_and_scale()
        # math.exp raises OverflowError above 709
        return math.exp(min(course + score * scale, 700.0))

    @property
    def expected(self) -> float | None:
        """The median of the last healthy values."""
        return math.exp(median(self.values)) if self.values else None

    def add(self, value: float, is_spike: bool) -> None:
        """Add a value. Spikes do not change the course, until many in a row show a new level."""
        if not math.isfinite(value):
            return
        # one healthy value ends the row of spikes
        if not is_spike:
            self.rejected.clear()
            self._judged_by = None
            if len(self.values) == RECENT:
                # to the course without the value itself; it lags behind a falling loss, which costs sensitivity but
                # raises no false alarm
                self.distances.append(_log(value) - median(self.values))
            self.values.append(_log(value))
            return
        self.rejected.append(_log(value))
        if len(self.rejected) >= max(FEWEST, self.window // 2):
            level, self.rejected, self._judged_by = self.rejected, [], None
            self.values.clear()
            self.values.extend(level)

    def _course_and_scale(self) -> tuple[float, float]:
        """Return course and scale of the values so far."""
        # kept until a value is added: the limit of a step and the score after it must agree
        if self._judged_by is None:
            ordered = sorted(self.distances)
            centre = median(ordered)
            spread = NORMAL_MAD * median([abs(d - centre) for d in ordered])
            # The value that the share RARE exceeds, if the tail is exponential: its scale is the mean excess of the
            # largest values, which are the share TAIL_SHARE.
            count = int(TAIL_SHARE * len(ordered))
            threshold = ordered[-1 - count]
            mean_excess = sum(ordered[-count:]) / count - threshold
            tail = threshold + mean_excess * math.log(TAIL_SHARE / RARE) - centre
            # a rising loss moves the course up; a falling one does not move it down
            course = median(self.values) + max(0.0, centre)
            self._judged_by = course, max(spread, tail / RARE_SCORE, self.smallest_scale)
        return self._judged_by

    def state(self) -> dict:
        return {name: list(getattr(self, name)) for name in ("values", "distances", "rejected")}

    def restore(self, state: dict) -> None:
        self.values = deque(state["values"], maxlen=RECENT)
        kept = islice(state["distances"], max(0, len(state["distances"]) - self.window), None)
        self.distances = deque(kept, maxlen=self.window)
        self.rejected, self._judged_by = list(state["rejected"]), None


def _log(value: float) -> float:
    # a loss or norm of zero has no logarithm
    return math.log(max(value, 1e-300))


LEAST_GAIN = 0.001
"""Share of the loss. A smaller gain is no progress."""


class Plateau:
    """Report once if the course has not gained `LEAST_GAIN` for so many steps, and again after a gain."""

    def __init__(self, num_steps: int | None):
        """num_steps: None never reports."""
        self.num_steps = num_steps
        self.best, self.best_step, self.told = None, 0, False

    def shows(self, step: int, expected: float | None) -> bool:
        """Return whether a plateau is to be reported now. `expected` is the course's loss after `step`."""
        if expected is None:
            return False
        if self.best is None or expected < self.best * (1 - LEAST_GAIN):
            self.best, self.best_step, self.told = expected, step, False
        if self.num_steps is None or self.told or step - self.best_step < self.num_steps:
            return False
        self.told = True
        return True

    def state(self) -> dict:
        return {"best": self.best, "best_step": self.best_step, "told": self.told}

    def restore(self, state: dict) -> None:
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
    """Return {"causes", "try"} for one kind of alert."""
    return ADVICE[kind]
