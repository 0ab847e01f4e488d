"""What a ladder of small runs has found (`python -m pretraining.ladder`), read from its ladder.json.

Plans and reports ask it for the loss of a recipe. The fits were made when the file was written.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pretraining.errors import UserError
from pretraining.outside.files import COUNT, TEXT, object_of, read_json_value
from pretraining.outside.schema import check, listed
from pretraining.planning.scaling_laws import ParametricLoss
from pretraining.planning.setup import Setup
from pretraining.recipe import Recipe
from pretraining.recipe.fixed_keys import SOMETIMES, Change, changed_parts, curve_parts
from pretraining.runtime.installation import WORKPLACE

FILE = "ladder.json"
DECAYED, STABLE = "decayed", "stable"
"""Whose losses a law describes: those of runs at their end, or before their rate begins to fall."""
COVERED = 0.9
"""Share of the draws that an interval holds."""
SIZED = ("model.", "budget.", "mup.", "training.learning_rate", "training.weight_decay")
SIZED += ("training.warmup_steps", "training.lr_scheduler", "training.seed", "training.data_seed")
"""Keys, or how they begin, in which the members of one family differ; and numbers of `optimizer`."""


class Expected(NamedTuple):
    """A loss, and the interval that should hold the loss of one run."""

    loss: float
    low: float
    high: float

    @property
    def words(self) -> str:
        digits = 2 if self.high - self.low >= 0.02 else 4
        return f"{self.loss:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class LossFit:
    """A law through the points of a ladder, and how far it can be trusted."""

    law: ParametricLoss
    draws: tuple[ParametricLoss, ...]
    """Laws through resampled points."""
    without: tuple[ParametricLoss, ...]
    """Laws without the smallest size, the largest one, or the shortest runs: how far it is one law at all."""
    noise: float
    """Standard deviation of the logarithm of one run's loss around the law."""
    left_out: float | None
    """Largest relative error of the law without the largest size, at that size; None with too few sizes."""
    notes: tuple[str, ...] = ()
    """What the points do not carry."""

    def at(self, parameters: float, tokens: float) -> Expected:
        """Return the expected loss of a run, with its interval: law, draws with noise, and laws without a part."""
        # fixed noise, so that a page that is written again shows the same interval
        noise, place = random.Random(0), (parameters, tokens)
        drawn = sorted(law.loss(*place) * math.exp(noise.gauss(0, self.noise)) for law in self.draws)
        cut = round((1 - COVERED) / 2 * len(drawn))
        loss, *others = (law.loss(*place) for law in (self.law, *self.without))
        ends = [loss, *others, *drawn[cut : len(drawn) - cut]]
        return Expected(loss, min(ends), max(ends))

    def curve(self, parameters: Iterable[float], tokens: Iterable[float]) -> dict[str, list[float]]:
        """Return {"loss", "low", "high"} of several runs, as `at` gives them for each."""
        expected = [self.at(*place) for place in zip(parameters, tokens, strict=True)]
        return {name: [getattr(each, name) for each in expected] for name in Expected._fields}

    @classmethod
    def of(cls, values: dict) -> "LossFit":
        draws, without = (tuple(ParametricLoss(**law) for law in values[key]) for key in ("draws", "without"))
        law, notes = ParametricLoss(**values["law"]), tuple(values["notes"])
        return cls(law, draws, without, values["noise"], values["left_out"], notes)


# bounds leave out NaN and infinity
_FINITE = {"type": "number", "minimum": -1e300, "maximum": 1e300}
_LEAST_0, POSITIVE = {**_FINITE, "minimum": 0}, {**_FINITE, "exclusiveMinimum": 0, "maximum": 1e60}
_LAW = object_of({**dict.fromkeys(("E", "A", "B", "alpha", "beta"), _LEAST_0), "source": TEXT})
_LAWS = {"type": "array", "items": _LAW}
_FIT = object_of(
    {
        "law": _LAW,
        "draws": {**_LAWS, "minItems": 1},
        "without": _LAWS,
        "noise": {**_LEAST_0, "maximum": 100},
        "left_out": {**_FINITE, "type": ["number", "null"]},
        "notes": {"type": "array", "items": TEXT},
    }
)
_PLACE = dict.fromkeys(("parameters", "tokens", "flops"), POSITIVE)
_POINT = dict.fromkeys((*_PLACE, "learning_rate", "tokens_per_step"), POSITIVE)
_POINT |= {"run": TEXT, "size": TEXT, "base": {"type": "boolean"}, "metrics": object_of({"loss": POSITIVE})}
_SHAPE = object_of(
    {
        "name": TEXT,
        "target": object_of(_PLACE),
        "recipe": object_of(
            {"evaluation": {"type": "object"}, "budget": object_of({"tokens_per_step": POSITIVE})}
        ),
        "points": {"type": "array", "items": object_of(_POINT), "minItems": 1},
        "runs": COUNT,
        "faults": {"type": "array", "items": TEXT},
        "fits": {"type": "object", "required": [DECAYED, STABLE], "patternProperties": {"(?s:.*)": _FIT}},
    }
)


@dataclass(frozen=True)
class Ladder:
    """A whole ladder.json."""

    file: Path
    values: dict
    fits: dict[str, LossFit]
    """By DECAYED, STABLE, and the other metrics of validations."""

    @property
    def most_flops(self) -> float:
        return max(point["flops"] for point in self.values["points"])

    @property
    def most_tokens(self) -> float:
        return max(point["tokens"] for point in self.values["points"])

    def expected(self, recipe: Recipe, fit: str = DECAYED) -> Expected:
        return self.fits[fit].at(matmul_parameters(recipe), recipe.num_tokens)

    def differs(self, recipe: Recipe) -> list[str]:
        """Return the keys in which a recipe is not of the ladder's family: its forecast is for another one."""
        ours, theirs = recipe.to_dict(), self.values["recipe"]
        changes = changed_parts(ours, theirs)
        # at one size and length there is one rate
        is_other_size = any(change.key.startswith(("model.", "budget.")) for change in changes)

        def is_sized(change: Change) -> bool:
            # its small runs have a schedule, validations and micro-batches of their own
            if change.key in ("training.seed", "training.data_seed", *SOMETIMES):
                return True
            if change.key.startswith("optimizer."):
                numbers = not any(isinstance(value, str | bool) for value in (change.earlier, change.now))
                return is_other_size and numbers
            return is_other_size and change.key.startswith(SIZED) and change.key != "model.vocab_size"

        keys, most = [change.key for change in changes if not is_sized(change)], "max_validation_tokens"
        # the first tokens of a validation are other text than all of it
        if ours["evaluation"].get(most) != theirs["evaluation"].get(most):
            keys.append(f"evaluation.{most}")
        return keys

    def words(self, recipe: Recipe, flops: float) -> str:
        """Write what it expects of a recipe that takes so many training FLOPs, in one line."""
        share = share_words(flops / self.most_flops)
        text = f"{self.expected(recipe).words}, ladder of {self.values['runs']} runs up to {share}"
        if differs := self.differs(recipe):
            text += f"; it is of another family: {listed(differs, ', ')}"
        return text


def share_words(times: float) -> str:
    """Write which share of a recipe's compute a run has, if the recipe has so many times as much."""
    return f"1/{times:,.0f} of its compute" if times >= 1.5 else f"{1 / times:.0%} of its compute"


def matmul_parameters(recipe: Recipe) -> int:
    """Return N of a ladder's laws: the entries of the matrices that a token is multiplied with, the head included.

    Embeddings that are only looked up are not in it: in small models they are most of the rest, and compute nothing.
    """
    return Setup(recipe, None).size.matmul


def read_ladder(name: str) -> Ladder:
    """Read a ladder by its folder or file; a path that is not absolute counts from the repository.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = WORKPLACE / name
    path = path if path.suffix == ".json" else path / FILE
    if not path.is_file():
        raise UserError(f"{path}: no such ladder; make it with python -m pretraining.ladder RECIPE")
    status = path.stat()
    return _read(path, status.st_mtime_ns, status.st_size)


# the live report asks again with every page
@cache
def _read(path: Path, changed_ns: int, size: int) -> Ladder:
    try:
        values = check(read_json_value(path), _SHAPE, str(path))
        curve_parts(values["recipe"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: is no ladder ({error}); move it away and type the ladder's command again"
        ) from None
    return Ladder(path, values, {name: LossFit.of(fit) for name, fit in values["fits"].items()})


def ladder_of(recipe: Recipe) -> Ladder | None:
    """Return the ladder that a recipe names (`report.ladder`); None if it names none, or the file is not there yet.

    Raises:
        UserError: it is damaged.
    """
    name = recipe.report.ladder
    if name is None or not any((WORKPLACE / name / part).is_file() for part in ("", FILE)):
        return None
    return read_ladder(name)
