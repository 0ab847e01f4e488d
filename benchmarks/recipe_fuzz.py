"""Random recipes of legal-looking values: each must get a plan or one line, and train or be refused as the plan says.

    python benchmarks/recipe_fuzz.py --plans 2000 --runs 500 --seed 1 --keep

Keys and values are drawn from recipes/schema.json over a small recipe of four families, any ds_config, on one and two
ranks (tests/recipe_fuzz.py). A run is three real steps of `train.py`; a recipe that the plan refuses is not started,
and another is drawn in its place. Stops with an error at the first traceback, hang, second line, or recipe that the
plan accepts and `train.py` refuses though this machine is not the reason. Prints one JSON line of what came of them.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from record import parser_of, record


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    from tests.runs import Workshop

    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        workshop = Workshop(Path(folder))
        plans = fuzz_plans(workshop, options.plans, options.seed)
        runs = fuzz_runs(workshop, options.runs, options.seed, Path(folder))
    record("recipe_fuzz", {"seed": options.seed, "plans": plans, "runs": runs}, options.keep)


def fuzz_plans(workshop, number: int, seed: int) -> dict[str, int]:
    """{outcome: how many} of `number` recipes through the plan."""
    from tests.recipe_fuzz import RecipeFuzz, plan_outcome

    fuzz, counts = RecipeFuzz(seed, trains=False), Counter()
    for _ in range(number):
        settings, stage = fuzz.draw(), fuzz.draw_stage()
        outcome = plan_outcome(workshop, settings, stage, fuzz.random.choice((1, 2)))
        if outcome.kind == "defect":
            sys.exit(f"{settings} --deepspeed {stage}\n{outcome.said}")
        counts[outcome.kind] += 1
    return dict(counts)


def fuzz_runs(workshop, number: int, seed: int, folder: Path) -> dict[str, int]:
    """{outcome: how many} of `number` recipes, which the plan accepts, through three steps."""
    from tests.recipe_fuzz import RecipeFuzz, is_looser, plan_outcome, training_outcome

    fuzz, counts = RecipeFuzz(seed, trains=True), Counter()
    while counts.total() < number:
        settings, stage, ranks = fuzz.draw(), fuzz.draw_stage(), fuzz.random.choice((0, 0, 2))
        planned = plan_outcome(workshop, settings, stage, max(1, ranks))
        if planned.kind == "refused":
            continue
        output = folder / f"run-{counts.total()}"
        trained = training_outcome(workshop, settings, stage, ranks, output, timeout=600)
        if trained.kind == "defect" or is_looser(planned, trained):
            sys.exit(f"{settings} --deepspeed {stage}, {ranks} ranks\n{trained.said}")
        counts[trained.kind] += 1
        print(f"{counts.total()}/{number}", end="\r", file=sys.stderr, flush=True)
    return dict(counts)


if __name__ == "__main__":
    main()
