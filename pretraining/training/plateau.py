"""A loss that has stopped falling."""

LEAST_GAIN = 0.001
"""Of the loss: less than this is no progress."""


class Plateau:
    """Shows once when the course has not gained `LEAST_GAIN` for so many steps; again after it fell and stopped."""

    def __init__(self, num_steps: int | None):
        """num_steps: None never shows."""
        self.num_steps = num_steps
        self.best, self.best_step, self.told = None, 0, False

    def shows(self, step: int, expected: float | None) -> bool:
        """Whether a plateau is to be told of now; `expected` is the course's loss after `step`."""
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
