"""Seconds until `--plan`, an answer of planning or a recipe error, as a user waits: fresh processes, medians of five.

python benchmarks/plan.py --keep
"""

import statistics
import subprocess
import sys
import time

from record import REPOSITORY, parser_of, record

REPEATS = 5
PLANNING = ("-m", "pretraining.planning")
TRILLION = [
    *("--recipe", "65b"),
    *("--set", "model.n_embd=25600", "--set", "model.n_layer=128", "--set", "model.n_head=160"),
    *("--set", "budget.tokens_per_step=8388608", "--set", "budget.tokens=1006632960000"),
    *("--set", "training.per_device_train_batch_size=1", "--world_size", "4096"),
]
"""A model of 1.01e12 parameters on 4,096 GPUs."""
QUESTIONS = {
    "gpus": ["gpus"],
    "flops": ["flops", "--recipe", "30b"],
    "chinchilla": ["chinchilla", "--recipe", "30b"],
    "cost": ["cost", "--recipe", "30b", "--world_size", "8", "--gpu", "H200"],
    "cost, 1T on 4,096": ["cost", *TRILLION, "--gpu", "H100"],
    "parallelism, 1T on 4,096": ["parallelism", *TRILLION, "--gpu", "H100"],
    "fit, 30b": ["fit", "--recipe", "30b", "--world_size", "8", "--gpu", "H200"],
    "fit, 1T on 4,096": ["fit", *TRILLION, "--gpu", "H100"],
}


def main() -> None:
    options = parser_of(__doc__).parse_args()
    from pretraining.recipe import recipe_names

    plans = {name: seconds_of("--recipe", name, "--plan") for name in recipe_names()}
    plans["1T on 4,096"] = seconds_of(*TRILLION, "--plan", "--gpu", "H100")
    answers = {name: seconds_of(*words, command=PLANNING) for name, words in QUESTIONS.items()}
    errors = {
        "unknown recipe": seconds_of("--recipe", "tinny"),
        "unknown key": seconds_of("--recipe", "30b", "--set", "model.n_layers=3"),
        "heads do not divide": seconds_of("--recipe", "30b", "--set", "model.n_head=50"),
    }
    values = {"plan_seconds": plans, "planning_seconds": answers, "error_seconds": errors}
    values["imports_torch"] = imports_torch()
    record("plan", values, options.keep)


def seconds_of(*arguments: str, command: tuple[str, ...] = ("train.py",)) -> float:
    """Median wall seconds of `python <command> ...`."""
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run([sys.executable, *command, *arguments], cwd=REPOSITORY, capture_output=True)
        taken.append(time.perf_counter() - started)
    return round(statistics.median(taken), 3)


def imports_torch() -> bool:
    command = [sys.executable, "-X", "importtime", "train.py", "--recipe", "30b", "--plan", "--gpu", "H200"]
    lines = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stderr.splitlines()
    return any(line.rpartition("|")[2].strip() in ("torch", "transformers") for line in lines)


if __name__ == "__main__":
    main()
