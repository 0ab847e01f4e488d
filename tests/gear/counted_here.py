"""Count models in the process that asks: by the program's own function, without the seconds of its imports.

A class of the user's own in a test's folder is counted by the program itself, and so is what a fresh interpreter asks.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pretraining.recipe import model as model_section
from tests.gear.runs import REPOSITORY

PROGRAM = ("-m", "pretraining.model.counting")


def count_here() -> None:
    """Answer what this process would ask of the program."""
    model_section.ask = answer


ask = model_section.ask


def answer(program: Sequence[str], question: str, **variables: str) -> dict:
    own = program[2:]
    if (*program[:2],) != PROGRAM or not all(REPOSITORY in Path(module).parents for module in own):
        return ask(program, question, **variables)
    from pretraining.model.counting import counted

    return json.loads(json.dumps(counted(json.loads(question), own)))
