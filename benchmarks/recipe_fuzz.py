"""Random recipes of legal-looking values: each must get a plan or one line, and train or be refused as the plan says.

    python benchmarks/recipe_fuzz.py --plans 2000 --checks 1000 --runs 500 --seed 1 --keep

Keys and values are drawn from recipes/schema.json over a small recipe of four families, any ds_config, on one and two
ranks (tests/gear/recipe_fuzz.py). A run is three real steps of `train.py`; a recipe that the plan refuses is not
started, and another is drawn in its place. A traceback, a hang, a second line, or a recipe that the plan accepts and
`train.py` refuses though this machine is not the reason, is a defect: it is shown on stderr as soon as it is found, and
the exit code is 1. Checks, over fifteen types of models and all filters, compare what the plan, a preparation
before it reads a text, and a start before its first step refuse. Prints one JSON line of what came of them.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator

from gear import parser_of, record, small_runs


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--checks", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts: dict = {}
    with small_runs() as workshop:
        for name, tries in {"plans": planned, "checks": checked, "runs": trained}.items():
            counts[name] = Counter()
            for settings, stage, kind, said in tries(workshop, getattr(options, name), options.seed):
                counts[name][kind] += 1
                if kind == "defect":
                    print(f"\n{name}: {settings} {stage}\n{said}\n", file=sys.stderr, flush=True)
    counts["defects"] = sum(each["defect"] for each in counts.values())
    record("recipe_fuzz", {"seed": options.seed, **counts}, options.keep)
    sys.exit(int(counts["defects"] > 0))


def planned(workshop, number: int, seed: int) -> Iterator[tuple]:
    """Yield settings, ds_config, and what they came to in the plan."""
    from tests.gear.recipe_fuzz import RecipeFuzz, plan_outcome

    fuzz = RecipeFuzz(seed, trains=False)
    for _ in range(number):
        settings, stage = fuzz.draw(), fuzz.draw_stage()
        outcome = plan_outcome(workshop, settings, stage, fuzz.random.choice((1, 2)))
        yield settings, stage, outcome.kind, outcome.said


def checked(workshop, number: int, seed: int) -> Iterator[tuple]:
    """Yield the same; a defect if preparation or start do not agree with the plan."""
    from tests.gear.recipe_fuzz import checked_recipes

    for settings, stage, plan, wrong in checked_recipes(workshop, number, seed):
        yield settings, stage, "defect" if wrong else plan.kind, wrong


def trained(workshop, number: int, seed: int) -> Iterator[tuple]:
    """Yield what recipes that the plan accepts came to in three steps."""
    from tests.gear.recipe_fuzz import RecipeFuzz, is_looser, plan_outcome, training_outcome

    fuzz, output, done = RecipeFuzz(seed, trains=True), workshop.folder / "run", 0
    while done < number:
        settings, stage, ranks = fuzz.draw(), fuzz.draw_stage(), fuzz.random.choice((0, 0, 2))
        plan = plan_outcome(workshop, settings, stage, max(1, ranks))
        if plan.kind == "refused":
            continue
        done += 1
        outcome = training_outcome(workshop, settings, stage, ranks, output, timeout=600)
        shutil.rmtree(output, ignore_errors=True)
        print(f"{done}/{number}", end="\r", file=sys.stderr, flush=True)
        kind = "defect" if is_looser(plan, outcome) else outcome.kind
        yield settings, f"{stage}, {ranks} ranks", kind, outcome.said


if __name__ == "__main__":
    main()
