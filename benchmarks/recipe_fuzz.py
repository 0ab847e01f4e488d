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
from pathlib import Path

from gear import parser_of, record, small_runs


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--checks", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with small_runs() as workshop:
        plans = fuzz_plans(workshop, options.plans, options.seed)
        checks = fuzz_checks(workshop, options.checks, options.seed)
        runs = fuzz_runs(workshop, options.runs, options.seed, workshop.folder)
    counts = {name: dict(each) for name, each in {"plans": plans, "checks": checks, "runs": runs}.items()}
    counts["defects"] = sum(each["defect"] for each in (plans, checks, runs))
    record("recipe_fuzz", {"seed": options.seed, **counts}, options.keep)
    sys.exit(int(counts["defects"] > 0))


def fuzz_plans(workshop, number: int, seed: int) -> Counter:
    """How many of `number` recipes came to what in the plan."""
    from tests.gear.recipe_fuzz import RecipeFuzz, plan_outcome

    fuzz, counts = RecipeFuzz(seed, trains=False), Counter()
    for _ in range(number):
        settings, stage = fuzz.draw(), fuzz.draw_stage()
        outcome = plan_outcome(workshop, settings, stage, fuzz.random.choice((1, 2)))
        counts[outcome.kind] += 1
        if outcome.kind == "defect":
            show(f"plan: {settings} --deepspeed {stage}\n{outcome.said}")
    return counts


def fuzz_checks(workshop, number: int, seed: int) -> Counter:
    """How many of `number` recipes came to what in the plan; a defect where preparation or start do not agree."""
    from tests.gear.recipe_fuzz import checked_recipes

    counts = Counter()
    for settings, stage, planned, wrong in checked_recipes(workshop, number, seed):
        counts["defect" if wrong else planned.kind] += 1
        if wrong:
            show(f"check: {settings} --deepspeed {stage}\n{wrong}")
    return counts


def fuzz_runs(workshop, number: int, seed: int, folder: Path) -> Counter:
    """How many of `number` recipes, all of which the plan accepts, came to what in three steps."""
    from tests.gear.recipe_fuzz import RecipeFuzz, is_looser, plan_outcome, training_outcome

    fuzz, counts, output = RecipeFuzz(seed, trains=True), Counter(), folder / "run"
    while counts.total() < number:
        settings, stage, ranks = fuzz.draw(), fuzz.draw_stage(), fuzz.random.choice((0, 0, 2))
        planned = plan_outcome(workshop, settings, stage, max(1, ranks))
        if planned.kind == "refused":
            continue
        trained = training_outcome(workshop, settings, stage, ranks, output, timeout=600)
        is_defect = trained.kind == "defect" or is_looser(planned, trained)
        counts["defect" if is_defect else trained.kind] += 1
        if is_defect:
            show(f"run: {settings} --deepspeed {stage}, {ranks} ranks\n{trained.said}")
        shutil.rmtree(output, ignore_errors=True)
        print(f"{counts.total()}/{number}", end="\r", file=sys.stderr, flush=True)
    return counts


def show(defect: str) -> None:
    print(f"\n{defect}\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
