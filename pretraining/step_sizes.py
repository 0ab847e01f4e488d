"""Tokens of every optimizer step: the same throughout, or rising in stairs while a run is young (`budget.ramp`)."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from pretraining.schema import problem

LR_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""The learning rate goes as this power of a step's size over the full size."""

MOST_STAIRS = 10_000
"""Of a ramp: more of them are a slip of the keyboard, and would take long to lay out."""
MOST_UNITS = 1_000_000
"""Sequences up to which a dividing increment is looked for."""


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
    def of(cls, budget: dict) -> "StepSizes":
        """Sizes rise from `from_tokens_per_step` by `increment` over `over_tokens`, each for an equal share of them.

        A stair ends with the first step that completes its share, as in Megatron-LM's --rampup-batch-size; one that
        the step before has used up is left out.
        """
        full, ramp = budget["tokens_per_step"], budget.get("ramp")
        if ramp is None:
            return cls((Stair(0, 0, full),))
        stairs, steps, tokens = [], 0, 0
        sizes = range(ramp["from_tokens_per_step"], full, increment_of(ramp))
        for number, size in enumerate(sizes, start=1):
            left = Fraction(number * ramp["over_tokens"], len(sizes)) - tokens
            count = max(0, -(-left // size))
            stairs += [Stair(steps, tokens, size)] * (count > 0)
            steps, tokens = steps + count, tokens + count * size
        return cls((*stairs, Stair(steps, tokens, full)), ramp["lr_scaling"])

    @property
    def full(self) -> int:
        """Tokens of a step after the ramp: the largest."""
        return self.stairs[-1].tokens_per_step

    @property
    def all(self) -> list[int]:
        """Every size there is, rising."""
        return [stair.tokens_per_step for stair in self.stairs]

    @property
    def ramp_steps(self) -> int:
        """Steps before the size is full."""
        return self.stairs[-1].first_step

    def at(self, step: int) -> int:
        """Tokens of the step after `step` steps."""
        return self._stair(step).tokens_per_step

    def tokens_at(self, steps: int) -> int:
        """Tokens of the first `steps` steps together."""
        stair = self._stair(steps)
        return stair.tokens_before + (steps - stair.first_step) * stair.tokens_per_step

    def steps_within(self, tokens: int) -> int:
        """Whole steps from the beginning that so many tokens pay for."""
        place = bisect_right(self.stairs, tokens, key=lambda stair: stair.tokens_before) - 1
        stair = self.stairs[max(0, place)]
        return stair.first_step + (tokens - stair.tokens_before) // stair.tokens_per_step

    def lr_factor(self, finished_steps: int) -> float:
        """What the schedule's learning rate is multiplied with in the step after `finished_steps` steps."""
        return (self.at(finished_steps) / self.full) ** LR_POWERS[self.lr_scaling]

    def _stair(self, step: int) -> Stair:
        place = bisect_right(self.stairs, step, key=lambda stair: stair.first_step) - 1
        return self.stairs[max(0, place)]


def increment_of(ramp: dict) -> int:
    """By how much a stair is higher than the one before: the first one's size where the recipe does not say."""
    return ramp["increment"] or ramp["from_tokens_per_step"]


def check_ramp(budget: dict, length: int, where: str) -> None:
    """`UserError` where the stairs do not lead to `tokens_per_step` in whole sequences within the budget."""
    ramp, full = budget["ramp"], budget["tokens_per_step"]
    if ramp is None:
        return
    first, increment = ramp["from_tokens_per_step"], increment_of(ramp)
    if first >= full:
        what = f"is {first}, not below budget.tokens_per_step {full}; leave the ramp out, or begin lower"
        raise problem(where, "budget.ramp.from_tokens_per_step", what)
    stairs = {"ramp.from_tokens_per_step": first, "ramp.increment": increment}
    for key in stairs:
        check_multiple(stairs, key, length, f"the sequence length {length}", where)
    if (full - first) % increment:
        units = (full - first) // length
        dividing = (unit * length for unit in range(1, min(units, MOST_UNITS) + 1) if units % unit == 0)
        near = min(dividing, key=lambda each: abs(each - increment))
        what = f"{increment} does not lead from {first} to {full} in whole stairs; the nearest that does is {near}"
        raise problem(where, "budget.ramp.increment", what)
    if (stairs := (full - first) // increment) > MOST_STAIRS:
        what = f"is {increment}, which makes {stairs} stairs from {first} to {full}; at most {MOST_STAIRS}: raise it"
        raise problem(where, "budget.ramp.increment", what)
    if ramp["over_tokens"] > budget["tokens"]:
        what = f"is {ramp['over_tokens']}, more than budget.tokens {budget['tokens']}"
        raise problem(where, "budget.ramp.over_tokens", what)


def check_division(sizes: StepSizes, length: int, ranks: int, micro_batch: int, where: str) -> None:
    """`UserError` where ranks x micro-batch x length does not divide every step, with what would."""
    at_once = ranks * micro_batch
    size = next((size for size in sizes.all if size % (at_once * length)), None)
    if size is None:
        return
    what = (
        f"a step of {size // length} sequences is not a multiple of {at_once} = {ranks} ranks x {micro_batch} "
        "per_device_train_batch_size; "
    )
    shared, rest = divmod(math.gcd(*sizes.all) // length, ranks)
    if rest:
        what += f"make from_tokens_per_step and increment multiples of {ranks * length}, or take fewer ranks"
    else:
        fitting = next(micro for micro in range(min(micro_batch, shared), 0, -1) if shared % micro == 0)
        what += f"training.per_device_train_batch_size={fitting} divides every step"
    raise problem(where, "budget.ramp", what)


def check_multiple(budget: dict, key: str, unit: int, unit_words: str, where: str) -> None:
    """`UserError` with the nearest that are, where `budget[key]` is not a multiple of `unit`."""
    if budget[key] % unit:
        what = f"{budget[key]} is not a multiple of {unit_words}; {nearest_multiples(budget[key], unit)}"
        raise problem(where, f"budget.{key}", what)


def nearest_multiples(value: int, unit: int) -> str:
    """What a message says of the multiples next to a value."""
    below = value // unit * unit
    return f"the nearest are {below} and {below + unit}" if below else f"the nearest is {unit}"
