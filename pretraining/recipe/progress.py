"""Where a run is in its budget: the one answer to how many steps, tokens and samples there are at a step."""

from dataclasses import dataclass

from pretraining.recipe.budget import StepSizes
from pretraining.recipe.recipe import Recipe


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

    @classmethod
    def of(cls, recipe: Recipe, step: int = 0, tokens: int = 0) -> "Progress":
        """Take sizes, length and budget from the recipe."""
        return cls(recipe.step_sizes, recipe.sequence_length, recipe.budget.tokens, step, tokens)

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
        """Return the tokens consumed after `step`."""
        return self.extra_tokens + self.step_sizes.tokens_at(step)

    def samples_at(self, step: int) -> int:
        """Return the samples consumed after `step`, which is the position of the next one."""
        return self.tokens_at(step) // self.sequence_length

    def full_steps_at(self, step: int) -> float:
        """Return the tokens consumed after `step` in steps of full size, by which a schedule in tokens counts."""
        return self.tokens_at(step) / self.step_sizes.full
