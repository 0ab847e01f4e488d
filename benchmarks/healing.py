"""Poisoned data in the middle of a run: how far does healing bring it back to the run on clean data?

    python benchmarks/healing.py --keep

Two ranks, ZeRO-2, the small recipe for 60 steps, of which two read noise. healing: each seed trains four times, on
clean data, and on the poisoned data with each policy (rollback, skip, log): validation loss over that of the clean run,
by policy, the worst and the median of the seeds, with the step at which the spike was seen. skipping: every stage
and precision skips the same steps; the largest difference of a training loss to one plain process of that precision.
"""

import json
import statistics

from gear import OFFLOADED, STAGES, largest_difference, parser_of, record, small_runs

POLICIES = ("rollback", "skip", "log")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--only", choices=("healing", "skipping"))
    options = parser.parse_args()
    from tests.gear.poisoned import PoisonedWorkshop

    with small_runs() as plain:
        (plain.folder / "poisoned").mkdir()
        poisoned = PoisonedWorkshop(plain.folder / "poisoned", plain.folder / "corpus")
        if options.only != "skipping":
            record("healing", healing(poisoned, options.seeds), options.keep)
        if options.only != "healing":
            for precision in ("fp32", "bf16"):
                record("skipping", {"precision": precision, **skipping(poisoned, precision)}, options.keep)


def healing(poisoned, seeds: list[int]) -> dict:
    """Validation loss after poisoned data over that after clean data, by policy."""
    from tests.gear.poisoned import FIRST_NOISY, events

    ratios: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    seen = []
    # Every source needs a stage: a share of noise too small for one block of the run.
    clean_data = f"data.mixture.stages={json.dumps([{'weights': {'text': 100_000, 'noise': 1}}])}"
    for seed in seeds:
        seeded = f"training.seed={seed}"
        clean = final_loss(poisoned.run(settings=(seeded, clean_data)))
        for policy in POLICIES:
            run = poisoned.run(settings=(seeded, f"monitors.spikes.policy={policy}"))
            ratios[policy].append(final_loss(run) / clean)
            seen.append([event["step"] - FIRST_NOISY for event in events(run, "spike")])
    values = {
        policy: {"worst": round(max(found), 5), "median": round(statistics.median(found), 5)}
        for policy, found in ratios.items()
    }
    return {"seeds": seeds, "steps_late": seen, "loss_over_clean": values}


def skipping(poisoned, precision: str) -> dict:
    """How far each stage's losses are from those of a plain process, and the steps that it refused."""
    from tests.gear.poisoned import losses

    settings = ("monitors.spikes.policy=skip", f"training.bf16={json.dumps(precision == 'bf16')}")
    plain = losses(poisoned.run("null", 1, "plain", settings))
    found = {}
    for stage in (*STAGES, *OFFLOADED):
        run = poisoned.run(stage, settings=settings)
        apart = largest_difference(losses(run), plain)
        found[stage] = {"refused": run.training_rows[-1]["stability/refused_steps"], "apart": round(apart, 7)}
    return found


def final_loss(run) -> float:
    row = run.validation_rows[-1]
    return row.get("eval/text_loss", row["eval/loss"])


if __name__ == "__main__":
    main()
