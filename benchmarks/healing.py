"""Poisoned data in the middle of a run: how far does healing bring it back to the run on clean data?

    python benchmarks/healing.py --keep

Two ranks, ZeRO-2, the small recipe for 60 steps, of which two read noise. Each seed trains four times: on clean data,
and on the poisoned data with each policy (rollback, skip, log). Prints one JSON line: validation loss over that of the
clean run, by policy, the worst and the median of the seeds, with the step at which the spike was seen.
"""

import json
import statistics
import tempfile
from pathlib import Path

from record import parser_of, record

POLICIES = ("rollback", "skip", "log")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    options = parser.parse_args()
    from tests.poisoned import FIRST_NOISY, PoisonedWorkshop, events
    from tests.runs import Workshop

    ratios: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    seen = []
    with tempfile.TemporaryDirectory(prefix="healing_") as folder:
        plain = Workshop(Path(folder) / "plain")
        (Path(folder) / "poisoned").mkdir()
        poisoned = PoisonedWorkshop(Path(folder) / "poisoned", plain.folder / "corpus")
        # Every source needs a stage: a share of noise too small for one block of the run.
        clean_data = f"data.mixture.stages={json.dumps([{'weights': {'text': 100_000, 'noise': 1}}])}"
        for seed in options.seeds:
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
    record("healing", {"seeds": options.seeds, "steps_late": seen, "loss_over_clean": values}, options.keep)


def final_loss(run) -> float:
    """Validation loss of the text, at the end."""
    row = run.validation_rows[-1]
    return row.get("eval/text_loss", row["eval/loss"])


if __name__ == "__main__":
    main()
