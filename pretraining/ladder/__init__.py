"""A ladder of small runs that foresees the loss of a large one (docs/ladder.md).

from pretraining.ladder import climb

ladder = climb("tiny", widths="32,48,64", up_to=0.2)
ladder.expected(load_recipe("tiny")).loss
"""

from pathlib import Path
from typing import Any

from pretraining.planning.ladder import Ladder, read_ladder


def climb(recipe: str | Path, **options: Any) -> Ladder:
    """Train what is not finished of a recipe's ladder, fit it, and return it.

    options: those of `python -m pretraining.ladder` by name; `set` as in `pretraining.api.run`.

    Raises:
        UserError: what the command says in one line.
    """
    from pretraining.api import words_of
    from pretraining.ladder.__main__ import parse, run

    _, folder = run(parse([str(recipe), *words_of(options)]))
    return read_ladder(str(folder.absolute()))
