"""Tokens of every optimizer step: the same throughout, or rising in stairs while a run is young (`budget.ramp`).

`Budget.of` makes whole steps of tokens, also of those of warm-up and decay. `Progress` is the one answer to how many
steps, tokens and samples there are at a step of a run.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from pretraining.outside.schema import Wrong
from pretraining.recipe.section import Section, key

LR_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""The learning rate goes as this power of a step's size over the full size."""

MOST_STAIRS = 10_000
"""Of a ramp: more of them are a slip of the keyboard, and would take long to lay out."""
MOST_UNITS = 1_000_000
"""Sequences up to which a dividing increment is looked for."""

IN_STEPS = ("tokens", "warmup_tokens", "decay_tokens")
"""Keys of the budget that are rounded to whole steps."""
SCHEDULE_KEYS = ("training.lr_scheduler_type", "training.lr_scheduler_kwargs", "training.warmup_steps")
STEP_SIZE, RAMP = "budget.tokens_per_step", "budget.ramp"
TOKENS_OR_SHARE = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1000000000000000000}


class Ramp(Section):
    """Smaller steps at first, by accumulation: their size rises in equal stairs."""

    from_tokens_per_step: int = key(minimum=1)
    """Tokens of the first step."""
    over_tokens: int = key(minimum=1)
    """Tokens after which a step has tokens_per_step; each stair has an equal share of them."""
    increment: int | None = key(default=None, minimum=1)
    """Tokens by which a stair is higher than the one before; null: from_tokens_per_step."""
    lr_scaling: Literal["none", "sqrt", "linear"] = key(default="none")
    """How the learning rate goes with the size of a step: not at all, as its root (Adam), in proportion (SGD)."""


class Budget(Section):
    """How long to train; steps and gradient accumulation follow from it."""

    tokens: int = key(minimum=1, maximum=1000000000000000000)
    """Tokens to train on, in whole steps: the nearest multiple of tokens_per_step is taken."""
    tokens_per_step: int = key(minimum=1, maximum=1000000000000000000)
    """Tokens per optimizer step, at any number of GPUs: a multiple of the sequence length."""
    warmup_tokens: int | None = key(default=None, schema=TOKENS_OR_SHARE)
    """Tokens over which the learning rate rises, or below 1 their share of tokens, in place of training.warmup_steps;
    the schedule then counts tokens. Rounded to whole steps."""
    decay_tokens: int | None = key(default=None, schema=TOKENS_OR_SHARE)
    """Last tokens, over which warmup_stable_decay falls, or below 1 their share of tokens (0.2: the last fifth), in
    place of num_decay_steps; the schedule then counts tokens. Rounded to whole steps."""
    ramp: Ramp | None = key(default=None)

    @property
    def step_sizes(self) -> "StepSizes":
        return StepSizes.of(self.tokens_per_step, self.ramp)

    @classmethod
    def of(cls, values: Mapping) -> "Budget":
        """The section, with what counts tokens in whole steps, one at least; a share below 1 is one of the tokens."""
        unit = values["tokens_per_step"]
        given = {name: values[name] for name in IN_STEPS if values.get(name) is not None}
        tokens = {name: each * given["tokens"] if each < 1 else each for name, each in given.items()}
        # by integers: a budget is too large for a float
        steps = {name: max(1, (2 * int(each) + unit) // (2 * unit)) for name, each in tokens.items()}
        if given["tokens"] < unit:  # a slip in either: `check_together` says so
            del steps["tokens"]
        return super().of({**values, **{name: unit * count for name, count in steps.items()}})

    def rounded(self, values: Mapping) -> list[str]:
        """Say of each of `values`, from which the section is built, what it was rounded to."""
        return [
            f"budget.{name}: {values[name]:,} is read as {tokens:,}, {tokens // self.tokens_per_step:,} steps"
            for name in IN_STEPS
            if (tokens := getattr(self, name)) not in (None, values.get(name))
        ]

    def check_together(self, at: str) -> Wrong:
        """The run has a step, and warm-up and decay fit into it."""
        unit = self.tokens_per_step
        yield from check_multiple(self.tokens, f"{at}.tokens", unit, f"{at}.tokens_per_step {unit}")
        spent = (self.warmup_tokens or 0) + (self.decay_tokens or 0)
        if spent > self.tokens:
            name = "decay_tokens" if self.decay_tokens else "warmup_tokens"
            what = f"is {getattr(self, name)}; warm-up and decay together take {spent}, more than {at}.tokens"
            yield f"{at}.{name}", f"{what} {self.tokens}: shorten them"

    def check_length(self, length: int) -> Wrong:
        """A step, and a step of the ramp, is whole sequences of `length` tokens; the stairs lead to a full step."""
        full, words = self.tokens_per_step, f"the sequence length {length}"
        yield from check_multiple(full, "budget.tokens_per_step", length, words)
        if self.ramp is None:
            return
        at, first, increment = "budget.ramp", self.ramp.from_tokens_per_step, increment_of(self.ramp)
        if first >= full:
            what = f"is {first}, not below budget.tokens_per_step {full}; leave the ramp out, or begin lower"
            yield f"{at}.from_tokens_per_step", what
        yield from check_multiple(first, f"{at}.from_tokens_per_step", length, words)
        yield from check_multiple(increment, f"{at}.increment", length, words)
        if (full - first) % increment:
            units = (full - first) // length
            # increments that divide the way up into whole stairs of whole sequences
            dividing = (unit * length for unit in range(1, min(units, MOST_UNITS) + 1) if units % unit == 0)
            near = min(dividing, key=lambda each: abs(each - increment))
            what = f"{increment} does not lead from {first} to {full} in whole stairs"
            yield f"{at}.increment", f"{what}; the nearest that does is {near}"
        if (stairs := (full - first) // increment) > MOST_STAIRS:
            what = f"is {increment}, which makes {stairs} stairs from {first} to {full}"
            yield f"{at}.increment", f"{what}; at most {MOST_STAIRS}: raise it"
        if self.ramp.over_tokens > self.tokens:
            yield f"{at}.over_tokens", f"is {self.ramp.over_tokens}, more than budget.tokens {self.tokens}"


class Stair(NamedTuple):
    """Steps of one size."""

    first_step: int
    """Steps before it."""
    tokens_before: int
    tokens_per_step: int


@dataclass(frozen=True)
class StepSizes:
    """A function of the recipe's budget alone, whatever runs it; steps are counted from 0."""

    stairs: tuple[Stair, ...]
    """In order; the last one has no end."""
    lr_scaling: str = "none"

    @classmethod
    def of(cls, full: int, ramp: Ramp | None = None) -> "StepSizes":
        """Sizes rise from `from_tokens_per_step` by `increment` over `over_tokens`, each for an equal share of them.

        A stair ends with the first step that completes its share, as in Megatron-LM's --rampup-batch-size; one that
        the step before has used up is left out.
        """
        if ramp is None:
            return cls((Stair(0, 0, full),))
        stairs, steps, tokens = [], 0, 0
        sizes = range(ramp.from_tokens_per_step, full, increment_of(ramp))
        for number, size in enumerate(sizes, start=1):
            # a Fraction: equal shares need not be whole numbers of tokens
            left = Fraction(number * ramp.over_tokens, len(sizes)) - tokens
            # rounded up: the stair ends with the step that completes its share
            count = max(0, -(-left // size))
            stairs += [Stair(steps, tokens, size)] * (count > 0)
            steps, tokens = steps + count, tokens + count * size
        return cls((*stairs, Stair(steps, tokens, full)), ramp.lr_scaling)

    @property
    def full(self) -> int:
        """Tokens of a step after the ramp: the largest."""
        return self.stairs[-1].tokens_per_step

    @property
    def all(self) -> list[int]:
        return [stair.tokens_per_step for stair in self.stairs]

    @property
    def ramp_steps(self) -> int:
        """Steps before the size is full."""
        return self.stairs[-1].first_step

    def at(self, step: int) -> int:
        return self._stair(step).tokens_per_step

    def tokens_at(self, steps: int) -> int:
        stair = self._stair(steps)
        return stair.tokens_before + (steps - stair.first_step) * stair.tokens_per_step

    def steps_within(self, tokens: int) -> int:
        """Whole steps from the beginning that so many tokens pay for."""
        # the last stair that begins within these tokens
        place = bisect_right(self.stairs, tokens, key=lambda stair: stair.tokens_before) - 1
        stair = self.stairs[max(0, place)]
        return stair.first_step + (tokens - stair.tokens_before) // stair.tokens_per_step

    def lr_factor(self, finished_steps: int) -> float:
        """What the schedule's learning rate is multiplied with in the step after `finished_steps` steps."""
        # 1 for full steps, whatever the power
        return (self.at(finished_steps) / self.full) ** LR_POWERS[self.lr_scaling]

    def _stair(self, step: int) -> Stair:
        place = bisect_right(self.stairs, step, key=lambda stair: stair.first_step) - 1
        return self.stairs[max(0, place)]


class Resize(NamedTuple):
    """A change of `budget.tokens_per_step` on the way, after `step` steps."""

    step: int
    earlier: int
    now: int


def kept_resizes(changes: Sequence[dict], sizes: StepSizes) -> tuple[Resize, ...]:
    """Return the changes of the step's size through which a schedule that counts steps keeps its place.

    Those that follow the newest change of the schedule itself, since it counts steps as they are then, and the end of a
    ramp. A changed ramp leaves none.
    """
    if any(change["key"] == RAMP for change in changes):
        return ()
    renewed = [change["step"] for change in changes if change["key"] in SCHEDULE_KEYS]
    first = max(max(renewed, default=-1) + 1, sizes.ramp_steps)
    kept = [change for change in changes if change["key"] == STEP_SIZE and change["step"] >= first]
    return tuple(Resize(change["step"], change["from"], change["to"]) for change in kept)


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
    counts_tokens: bool = False  # whether the schedule does, in units of full steps, and not steps

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

    def schedule_place(self, step: int) -> float:
        """Return where the schedule is after `step`: by tokens in steps of full size, or by steps.

        These are of the size with which it began. A later step of twice that size moves it on by two, so that the rate
        stays where it was when the size changed.
        """
        if self.counts_tokens:
            return self.tokens_at(step) / self.step_sizes.full
        place: float = step
        for at, earlier, now in reversed(self.resizes):
            # from here backwards: steps after the change, in steps of the size before it
            place = at + (place - at) * now / earlier if step > at else place
        return place


def increment_of(ramp: Ramp) -> int:
    """By how much a stair is higher than the one before: the first one's size where the recipe does not say."""
    return ramp.increment or ramp.from_tokens_per_step


def check_multiple(value: int, key: str, unit: int, unit_words: str) -> Wrong:
    """`value` is a multiple of `unit`; else the nearest multiples are named."""
    if value % unit:
        yield key, f"{value} is not a multiple of {unit_words}; {nearest_multiples(value, unit)}"


def nearest_multiples(value: int, unit: int) -> str:
    """What a message says of the multiples next to a value."""
    below = value // unit * unit
    return f"the nearest are {below} and {below + unit}" if below else f"the nearest is {unit}"
