"""Seconds until `--plan`, an answer of planning or a recipe error, as a user waits: fresh processes, medians of five.

python benchmarks/plan.py --keep

A model type that no formula describes is counted by building it, once: `counted_seconds` has the first plan, which
builds, and the next, which remembers.
"""

import json
import sys
import tempfile
from functools import partial

from gear import llama_of, middle, parser_of, record, run_command

PLANNING = ("-m", "pretraining.planning")
LLAMA = ("--recipe", "llama-70b", "--world_size", "1024", "--gpu", "H100")
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
    "fit, llama-70b on 1,024": ["fit", *LLAMA],
    "fit, 1T on 4,096": ["fit", *TRILLION, "--gpu", "H100"],
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of which the median is taken")
    options = parser.parse_args()
    seconds_of = partial(seconds_until, repeats=options.repeats)
    from pretraining.recipe import recipe_names

    plans = {name: seconds_of("--recipe", name, "--plan") for name in recipe_names()}
    plans["1T on 4,096"] = seconds_of(*TRILLION, "--plan", "--gpu", "H100")
    plans["llama-70b on 1,024"] = seconds_of(*LLAMA, "--plan")
    answers = {name: seconds_of(*words, command=PLANNING) for name, words in QUESTIONS.items()}
    errors = {
        "unknown recipe": seconds_of("--recipe", "tinny", code=2),
        "unknown key": seconds_of("--recipe", "30b", "--set", "model.n_layers=3", code=2),
        "heads do not divide": seconds_of("--recipe", "30b", "--set", "model.n_head=50", code=2),
    }
    values = {"plan_seconds": plans, "planning_seconds": answers, "error_seconds": errors}
    values |= {"counted_seconds": counted_seconds(options.repeats), "imports_torch": imports_torch()}
    record("plan", values, options.keep)


def seconds_until(
    *arguments: str, command: tuple[str, ...] = ("train.py",), repeats: int, code: int = 0, **variables
) -> float:
    """Return the median wall seconds of `python <command> ...`, which has to end with `code`."""
    words = [sys.executable, *command, *arguments]
    return middle((run_command(*words, code=code, **variables).seconds for _ in range(repeats)), 3)


def counted_seconds(repeats: int) -> dict[str, float]:
    """Of the first plan of a qwen2 of 350 million parameters, and of the following ones."""
    model = {
        **llama_of(1024, 24),
        "model_type": "qwen2",
        "vocab_size": 50304,
        "max_position_embeddings": 1024,
    }
    with tempfile.TemporaryDirectory() as folder:
        words = ("--recipe", "350m", "--set", f"model={json.dumps(model)}", "--plan")
        place = {"PRETRAINING_MODEL_CACHE": folder}
        first = seconds_until(*words, repeats=1, **place)
        return {"first": first, "next": seconds_until(*words, repeats=repeats, **place)}


def imports_torch() -> bool:
    words = ["-X", "importtime", "train.py", "--recipe", "30b", "--plan", "--gpu", "H200"]
    lines = run_command(sys.executable, *words).stderr.splitlines()
    return any(line.rpartition("|")[2].strip() in ("torch", "transformers") for line in lines)


if __name__ == "__main__":
    main()
