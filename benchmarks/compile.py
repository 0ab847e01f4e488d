"""Time of a forward and backward pass: as it is, with compiled blocks, compiled whole, and in fp8; in turns.

    python benchmarks/compile.py --keep
    python benchmarks/compile.py --zero3 --keep
    python benchmarks/compile.py --recipe 124m --micro_batch 16 --keep        (needs a GPU)
    python benchmarks/compile.py --recipe 7b --layers 4 --fp8 rowwise_with_gw_hp --keep        (needs a Hopper GPU)

The recipe's model and loss at its own length, bf16 on a GPU; no optimizer. `first_seconds` is the first pass, which
compiles; `seconds` the median of the rounds after two more; `time_ratio` (from neighbouring rounds) is against `none`;
`graphs` those of the first pass, `recompilations` those after it. One JSON line a way. Peak bytes on a GPU only.

`--zero3` runs under the hooks of ZeRO-3, one rank, which gather the weights of a compiled block as one; the whole model
cannot be compiled there.
"""

import os
from tempfile import TemporaryDirectory

from gear import TOKENIZER, chosen, middle, parser_of, record, seconds_in_turns, timed


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="features/gpt2")
    parser.add_argument("--micro_batch", type=int, help="default: the recipe's")
    parser.add_argument("--layers", type=int, help="default: the recipe's")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--fp8", nargs="*", default=[], help="kinds of speed.fp8, with compiled blocks")
    parser.add_argument("--zero3", action="store_true", help="under DeepSpeed's ZeRO-3, one rank")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    names = ("none", "blocks") if options.zero3 else ("none", "blocks", "whole")
    ways = {way: {"compile": way, "fp8": "none"} for way in names}
    ways |= {f"blocks, {kind}": {"compile": "blocks", "fp8": kind} for kind in options.fp8}
    import torch
    from torch._dynamo.utils import counters

    from tests.gear.tracked_memory import peak_bytes

    passes, first, graphs = {}, {}, {}
    for way, speed in ways.items():
        passes[way] = prepared({**speed, "compile_backend": options.backend, "compile_mode": None}, options)
        before = counters["stats"]["unique_graphs"]
        first[way] = timed(passes[way])
        after_first = counters["stats"]["unique_graphs"]
        for _ in range(2):
            timed(passes[way])
        graphs[way] = after_first - before, counters["stats"]["unique_graphs"] - after_first
    seconds = seconds_in_turns(passes, options.rounds)
    for way in ways:
        row = {
            "way": way,
            "first_seconds": round(first[way], 3),
            "seconds": middle(seconds[way], 5),
            "time_ratio": middle(a / b for a, b in zip(seconds[way], seconds["none"], strict=True)),
            "graphs": graphs[way][0],
            "recompilations": graphs[way][1],
            "peak_bytes": peak_bytes(passes[way]) if torch.cuda.is_available() else None,
        }
        record("compile", {**chosen(options, "fp8"), **row}, options.keep)


def prepared(speed: dict, options):
    """Return a function that runs one micro-batch forward and backward, through the repository's own model and loss."""
    import torch
    from transformers import TrainingArguments

    from pretraining.model.build import build_model
    from pretraining.model.loss import build_loss
    from pretraining.recipe import load_recipe
    from pretraining.recipe.model import own_key
    from pretraining.recipe.sections import Speed

    recipe = load_recipe(options.recipe)
    if options.layers:
        layers = f"model.{own_key(recipe.model, 'num_hidden_layers')}={options.layers}"
        recipe = load_recipe(options.recipe, [layers])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (options.micro_batch or recipe.micro_batch, recipe.sequence_length)
    ids = torch.randint(recipe.model.vocab_size, shape, device=device)
    config = stage_3(recipe, shape[0], device) if options.zero3 else None
    with TemporaryDirectory() as folder:
        keywords = {"use_cpu": device != "cuda", "bf16": device == "cuda", "seed": 42, "deepspeed": config}
        arguments = TrainingArguments(output_dir=folder, **keywords)
        model = build_model(recipe.model, TOKENIZER, arguments, speed=Speed(**speed))
    if not options.zero3:
        model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    loss = build_loss(model.train(), recipe.loss)
    if options.zero3:
        import deepspeed

        # its optimizer is never stepped
        optimizer = torch.optim.AdamW(model.parameters())
        model = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step() -> None:
        nats = loss(model(input_ids=ids), ids)
        model.backward(nats) if options.zero3 else nats.backward()
        model.zero_grad()

    return step


def stage_3(recipe, micro_batch: int, device: str) -> dict:
    """A config of ZeRO-3 whose only rank is this process, for models built after it."""
    from pretraining.planning.memory.states import block_gathering
    from pretraining.planning.shapes import layer_numel, parameter_tensors
    from pretraining.training.ranks import join_ranks
    from tests.gear.runs import free_port

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=os.environ.get("MASTER_PORT", str(free_port())))
    join_ranks()
    ahead = block_gathering({}, layer_numel(parameter_tensors(recipe.model)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **ahead}
    bf16 = {"enabled": device == "cuda"}
    return {"train_micro_batch_size_per_gpu": micro_batch, "bf16": bf16, "zero_optimization": zero}


if __name__ == "__main__":
    main()
