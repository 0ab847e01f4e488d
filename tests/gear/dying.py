"""An extension with which an evaluation dies: DIES="<part>:<n>:<how>" for the n-th call of one of its parts."""

import os
import time
from collections.abc import Callable

from transformers import TrainerCallback

from pretraining import extend
from pretraining.checkpoints import background
from pretraining.evaluation import sampling, scores, validation

PARTS = {
    "validation": (validation.Validation, "measure"),
    "sample": (sampling, "sample_text"),
    "task": (scores.HellaSwag, "measure"),
}


@extend.callback
class Nothing(TrainerCallback):
    """What a recipe must find in a module that it names."""


def dying(function: Callable, number: int, how: str) -> Callable:
    """The function, which in its `number`-th call raises an error, or does not end."""
    calls = []

    def call(*args, **keywords):
        calls.append(args)
        if len(calls) < number:
            return function(*args, **keywords)
        if how == "raises":
            raise RuntimeError("died on purpose")
        time.sleep(600)

    return call


def slow(function: Callable) -> Callable:
    """The function half a second later: what is written behind an evaluation is not there when it dies."""

    def call(*args, **keywords):
        time.sleep(0.5)
        return function(*args, **keywords)

    return call


if os.environ.get("DIES"):
    part, number, how = os.environ["DIES"].split(":")
    owner, name = PARTS[part]
    setattr(owner, name, dying(getattr(owner, name), int(number), how))
    background.write_rank_file = slow(background.write_rank_file)
