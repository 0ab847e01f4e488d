"""Where a run is in its budget: the one answer to how many steps, tokens and samples there are at a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pretraining.recipe.budget import StepSizes
from pretraining.recipe.recipe import Recipe

SCHEDULE_KEYS = ("training.lr_scheduler_type", "training.lr_scheduler_kwargs", "training.warmup_steps")
STEP_SIZE, RAMP = "budget.tokens_per_step", "budget.ramp"


class Resize(NamedTuple):
    """A change of `budget.tokens_per_step` on the way, after `step` steps."""

    step: int
    earlier: int
    now: int


def resizes_in(changes: Sequence[dict], recipe: Recipe) -> tuple[Resize, ...]:
    """Return the changes of the step's size through which a schedule that counts steps keeps its place.

    changes: what the run has accepted, in order: {"step", "key", "from", "to"} each. A schedule that was itself changed
    counts the steps as they are from there on. So does one that met a change while the steps' size rose by a ramp.
    """
    if any(change["key"] == RAMP for change in changes):
        return ()
    renewed = max((change["step"] for change in changes if change["key"] in SCHEDULE_KEYS), default=-1)
    first = max(renewed + 1, recipe.step_sizes.ramp_steps)
    sizes = [change for change in changes if change["key"] == STEP_SIZE and change["step"] >= first]
    return tuple(Resize(change["step"], change["from"], change["to"]) for change in sizes)


@dataclass(frozen=True)
class Progress:
    """Steps, tokens and samples of a run that begins, or goes on, after `step` steps and `tokens` tokens.

    The two numbers agree with the recipe's step sizes unless these were changed on the way (`--allow_change`): tokens
    that were consumed stay consumed, and the run ends when its budget is used up.
    """

    step_sizes: StepSizes
    sequence_length: int
    budget_tokens: int
    step: int = 0
    tokens: int = 0
    resizes: tuple[Resize, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, step: int = 0, tokens: int = 0, changes: Sequence[dict] = ()) -> "Progress":
        """Take sizes, length and budget from the recipe. changes: what the run has accepted on the way."""
        sizes, resizes = recipe.step_sizes, resizes_in(changes, recipe)
        return cls(sizes, recipe.sequence_length, recipe.budget.tokens, step, tokens, resizes)

    @property
    def extra_tokens(self) -> int:
        """Tokens consumed beyond `step` steps of the recipe: 0 unless step sizes changed on the way."""
        return self.tokens - self.step_sizes.tokens_at(self.step)

    @property
    def first_sample(self) -> int:
        """Position in the global order of the first sample to be read, in samples of the recipe's length."""
        return self.tokens // self.sequence_length

    @property
    def last_step(self) -> int:
        """The optimizer step that uses up the budget."""
        return max(self.step, self.step_sizes.steps_within(self.budget_tokens - self.extra_tokens))

    def tokens_at(self, step: int) -> int:
        return self.extra_tokens + self.step_sizes.tokens_at(step)

    def samples_at(self, step: int) -> int:
        """Return the samples consumed after `step`, which is the position of the next one."""
        return self.tokens_at(step) // self.sequence_length

    def full_steps_at(self, step: int) -> float:
        """Return the tokens consumed after `step` in steps of full size, by which a schedule in tokens counts."""
        return self.tokens_at(step) / self.step_sizes.full

    def schedule_steps_at(self, step: int) -> float:
        """Return where a schedule that counts steps is after `step`.

        It counts steps of the size with which it began. A later step of twice that size moves it on by two, so that the
        rate stays where it was when the size changed.
        """
        place: float = step
        for at, earlier, now in reversed(self.resizes):
            # from here backwards: steps after the change, in steps of the size before it
            place = at + (place - at) * now / earlier if step > at else place
        return place
