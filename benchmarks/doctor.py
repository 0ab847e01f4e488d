"""Seconds that the doctor takes: alone for every recipe, and under a launcher on two ranks of this machine.

    python benchmarks/doctor.py --keep
    python benchmarks/doctor.py --launched_recipe 7b --rounds 1

One JSON line for each way. `findings` counts its verdicts; `faults` are what it says will break here. That planted
faults are named is what test_doctor.py and test_doctor_cluster.py hold it to.
"""

import sys
from collections import Counter

from gear import middle, parser_of, record, run_command


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--launched_recipe", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from pretraining.recipe import recipe_names

    alone = [sys.executable, "-m", "pretraining.doctor", "--json"]
    for recipe in recipe_names():
        measured = examined([*alone, "--recipe", recipe], options.rounds)
        record("doctor", {"way": "alone", "recipe": recipe, **measured}, options.keep)
    launched = ["deepspeed", "--num_gpus=2", "--module", "pretraining.doctor", "--json"]
    measured = examined([*launched, "--recipe", options.launched_recipe], 1)
    record("doctor", {"way": "deepspeed", "recipe": options.launched_recipe, **measured}, options.keep)


def examined(command: list[str], rounds: int) -> dict:
    """Median seconds of a command, its exit code, and what it found."""
    from tests.gear.runs import answer_of

    runs = [run_command(*command, code=None) for _ in range(rounds)]
    answer = answer_of(runs[-1].stdout)
    findings = answer["findings"]
    return {
        "seconds": middle((run.seconds for run in runs), 2),
        "exit_code": runs[-1].code,
        "findings": dict(Counter(each["verdict"] for each in findings)),
        "faults": [each["check"] for each in findings if each["verdict"] == "will break"],
    }


if __name__ == "__main__":
    main()
