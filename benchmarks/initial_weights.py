"""Initial weights at a run's start: what is drawn and sent, and how much sooner all ranks have them than one alone.

    python benchmarks/initial_weights.py
    python benchmarks/initial_weights.py --ranks 2 --stage zero3 --rounds 5 --keep

`counted`: for each recipe of at least 1 B parameters, weights that are drawn and that are sent over its parameters, and
over those that the busiest ranks draw one after another. That is how many times shorter the draw becomes, without the
time of sending. Nothing is drawn for it.

`timed`: a Llama is built once by ranks that share this machine, and its weights are drawn in turns by all ranks (as in
a run) and by rank 0 alone, which sends each to the others. Seconds of each are medians over the rounds.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest import mock

from gear import REPOSITORY, parser_of, record

RANKS = (8, 64, 1024)
LEAST = 1_000_000_000
ASKED = "INITIAL_WEIGHTS_ASKED"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="that draw here (default 2)")
    parser.add_argument("--stage", default="zero3", help="a ds_config (default zero3)")
    parser.add_argument("--width", type=int, default=1024, help="of the Llama (default 1024)")
    parser.add_argument("--layers", type=int, default=8, help="of the Llama (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="of each of the two (default 3)")
    options = parser.parse_args()
    record("initial_weights", {"part": "counted", "recipes": counted()}, options.keep)
    record("initial_weights", {"part": "timed", **timed(vars(options))}, options.keep)


def counted() -> dict[str, dict]:
    """{recipe: parameters, drawn and sent over them, {ranks: times shorter}}."""
    import torch
    from transformers import AutoModelForCausalLM

    from pretraining.model.build import build_config
    from pretraining.model.initial_weights import list_draws, turns
    from pretraining.recipe import load_recipe, recipe_names

    found, tokens = {}, SimpleNamespace(bos_token_id=0, eos_token_id=0)
    for name in recipe_names():
        recipe = load_recipe(name)
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(build_config(dict(recipe.model), tokens))
            model.tie_weights()
            draws = list_draws(model)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if num_parameters < LEAST:
            continue
        num_sent = sum(draw.num_kept for draw in draws)
        longest = {n: sum(max(draw.num_kept for draw in turn) for turn in turns(draws, n)) for n in RANKS}
        found[name] = {
            "parameters": num_parameters,
            "drawn": round(sum(p.numel() for draw in draws for p in draw.lent) / num_parameters, 3),
            "sent": round(num_sent / num_parameters, 3),
            "times_shorter": {ranks: round(num_sent / number, 2) for ranks, number in longest.items()},
        }
    return found


def timed(asked: dict) -> dict:
    """Seconds of both on ranks of a launch of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={asked['ranks']}", __file__]
    environment = {**os.environ, ASKED: json.dumps(asked), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, cwd=REPOSITORY, text=True)
    if finished.returncode:
        raise SystemExit(finished.stderr[-6000:])
    answer = next(line for line in finished.stdout.splitlines() if line.startswith("{"))
    return {**{key: asked[key] for key in ("ranks", "stage", "rounds")}, **json.loads(answer)}


def draw_on_rank(asked: dict) -> None:
    """One rank's part: build without weights, then draw them in both ways, round after round."""
    import torch.distributed as dist

    from pretraining.ds_config import load_ds_config
    from pretraining.model import initial_weights
    from pretraining.model.build import build_model
    from pretraining.recipe import load_recipe
    from pretraining.training.arguments import build_arguments
    from pretraining.training.ranks import join_ranks, leave_ranks

    width, turns = asked["width"], initial_weights.turns
    section = {
        "model_type": "llama",
        "vocab_size": 16384,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": asked["layers"],
        "num_attention_heads": width // 64,
    }
    join_ranks()
    arguments = build_arguments(
        load_recipe("tiny", ["speed.compile=none"]), load_ds_config(asked["stage"]), Path("unused"), 1
    )
    tokens = SimpleNamespace(bos_token_id=0, eos_token_id=0)
    model = build_model(section, tokens, arguments, draw_weights=False)
    seconds: dict[str, list[float]] = {"all ranks": [], "rank 0 alone": []}
    for number in range(asked["rounds"] + 1):
        # one after the other and back, so that a machine which slows down favours none
        for who in sorted(seconds, reverse=number % 2 == 1):
            alone = mock.patch.object(initial_weights, "turns", lambda draws, ranks: turns(draws, 1))
            dist.barrier()
            began = time.perf_counter()
            with alone if who == "rank 0 alone" else mock.MagicMock():
                initial_weights.initialise_weights(model, seed=1)
            dist.barrier()
            if number:  # the first time also takes memory
                seconds[who].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        num_parameters = sum(getattr(each, "ds_numel", each.numel()) for each in model.parameters())
        middle = {who: round(median(each), 3) for who, each in seconds.items()}
        shorter = round(middle["rank 0 alone"] / middle["all ranks"], 2)
        print(
            json.dumps({"parameters": num_parameters, "seconds": middle, "times_shorter": shorter}),
            flush=True,
        )
    leave_ranks()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    if ASKED in os.environ:
        draw_on_rank(json.loads(os.environ[ASKED]))
    else:
        main()
