"""Seconds that the doctor takes: alone for every recipe, and under a launcher on two ranks of this machine.

    python benchmarks/doctor.py --keep
    python benchmarks/doctor.py --launched_recipe 7b --rounds 1

One JSON line for each way. `findings` counts its verdicts; `faults` are what it says will break here. That planted
faults are named is what test_doctor.py and test_doctor_cluster.py hold it to.
"""

import json
import statistics
import subprocess
import sys
import time
from collections import Counter

from gear import REPOSITORY, parser_of, record


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
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        seconds.append(time.perf_counter() - began)
    answer = json.JSONDecoder().raw_decode(finished.stdout[finished.stdout.index("{\n") :])[0]
    findings = answer["findings"]
    return {
        "seconds": round(statistics.median(seconds), 2),
        "exit_code": finished.returncode,
        "findings": dict(Counter(each["verdict"] for each in findings)),
        "faults": [each["check"] for each in findings if each["verdict"] == "will break"],
    }


if __name__ == "__main__":
    main()
