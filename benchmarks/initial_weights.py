"""Initial weights at a run's start: what is drawn and sent, and how much sooner all ranks have them than one alone.

    python benchmarks/initial_weights.py
    python benchmarks/initial_weights.py --ranks 2 --stage zero3 --rounds 5 --keep

`counted`: for each recipe of at least 1 B parameters, weights that are drawn and that are sent over its parameters, and
over those that the busiest ranks draw one after another. That is how many times shorter the draw becomes, without the
time of sending. Nothing is drawn for it.

`timed`: a Llama is built once by ranks that share this machine, and its weights are drawn in turns by all ranks (as in
a run) and by rank 0 alone, which sends each to the others. Seconds of each are medians over the rounds.
"""

import argparse
import json
import time
from pathlib import Path
from unittest import mock

from gear import TOKENIZER, as_ranks, is_rank, leave_at_once, llama_of, middle, parser_of, record, run_command

RANKS = (8, 64, 1024)
LEAST = 1_000_000_000


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="that draw here (default 2)")
    parser.add_argument("--stage", default="zero3", help="a ds_config (default zero3)")
    parser.add_argument("--width", type=int, default=1024, help="of the Llama (default 1024)")
    parser.add_argument("--layers", type=int, default=8, help="of the Llama (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="of each of the two (default 3)")
    options = parser.parse_args()
    if is_rank():
        return draw_on_rank(options)
    record("initial_weights", {"part": "counted", "recipes": counted()}, options.keep)
    ended = run_command(*as_ranks(options.ranks), OMP_NUM_THREADS="1")
    answer = next(line for line in ended.stdout.splitlines() if line.startswith("{"))
    values = {key: getattr(options, key) for key in ("ranks", "stage", "rounds")}
    record("initial_weights", {"part": "timed", **values, **json.loads(answer)}, options.keep)


def counted() -> dict[str, dict]:
    """{recipe: parameters, drawn and sent over them, {ranks: times shorter}}."""
    import torch
    from transformers import AutoModelForCausalLM

    from pretraining.model.build import build_config
    from pretraining.model.initial_weights import list_draws, turns
    from pretraining.recipe import load_recipe, recipe_names

    found = {}
    for name in recipe_names():
        recipe = load_recipe(name)
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(build_config(dict(recipe.model), TOKENIZER))
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


def draw_on_rank(options: argparse.Namespace) -> None:
    """One rank's part: build without weights, then draw them in both ways, round after round."""
    import torch.distributed as dist

    from pretraining.ds_config import load_ds_config
    from pretraining.model import initial_weights
    from pretraining.model.build import build_model
    from pretraining.recipe import load_recipe
    from pretraining.training.arguments import build_arguments
    from pretraining.training.ranks import join_ranks

    section, turns = llama_of(options.width, options.layers), initial_weights.turns
    join_ranks()
    arguments = build_arguments(
        load_recipe("features/gpt2", ["speed.compile=none"]), load_ds_config(options.stage), Path("unused"), 1
    )
    model = build_model(section, TOKENIZER, arguments, draw_weights=False)
    seconds: dict[str, list[float]] = {"all ranks": [], "rank 0 alone": []}
    for number in range(options.rounds + 1):
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
        medians = {who: middle(each, 3) for who, each in seconds.items()}
        shorter = round(medians["rank 0 alone"] / medians["all ranks"], 2)
        answer = {"parameters": num_parameters, "seconds": medians, "times_shorter": shorter}
        print(json.dumps(answer), flush=True)
    leave_at_once()


if __name__ == "__main__":
    main()
