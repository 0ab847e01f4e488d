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
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from gear import parser_of, record

TOKENIZER = SimpleNamespace(bos_token_id=0, eos_token_id=0)
LAYERS = {"gpt2": "n_layer"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="tiny")
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
    values = {key: value for key, value in vars(options).items() if key not in ("keep", "fp8")}
    for row in measure(ways, options):
        record("compile", {**values, **row}, options.keep)


def measure(ways: dict[str, dict], options) -> list[dict]:
    """One row a way."""
    from torch._dynamo.utils import counters

    passes, first, graphs = {}, {}, {}
    for way, speed in ways.items():
        passes[way] = prepared({**speed, "compile_backend": options.backend, "compile_mode": None}, options)
        before = counters["stats"]["unique_graphs"]
        first[way], _ = timed(passes[way])
        after_first = counters["stats"]["unique_graphs"]
        for _ in range(2):
            timed(passes[way])
        graphs[way] = after_first - before, counters["stats"]["unique_graphs"] - after_first
    seconds, peaks = {way: [] for way in ways}, {}
    for number in range(options.rounds):
        for way in ways if number % 2 else reversed(ways):
            taken, peaks[way] = timed(passes[way])
            seconds[way].append(taken)
    return [
        {
            "way": way,
            "first_seconds": round(first[way], 3),
            "seconds": round(statistics.median(seconds[way]), 5),
            "time_ratio": round(
                statistics.median(a / b for a, b in zip(seconds[way], seconds["none"], strict=True)), 4
            ),
            "graphs": graphs[way][0],
            "recompilations": graphs[way][1],
            "peak_bytes": peaks[way],
        }
        for way in ways
    ]


def prepared(speed: dict, options):
    """A function that runs one micro-batch forward and backward, through the repository's own model and loss."""
    import torch

    from pretraining.model.build import build_model
    from pretraining.model.loss import build_loss
    from pretraining.recipe import load_recipe
    from pretraining.recipe.sections import Speed

    layers = [f"model.{_layers_key(options.recipe)}={options.layers}"] if options.layers else []
    recipe = load_recipe(options.recipe, layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (options.micro_batch or recipe.micro_batch, recipe.sequence_length)
    ids = torch.randint(recipe.model.vocab_size, shape, device=device)
    born_sharded = stage_3(recipe, shape[0], device) if options.zero3 else None
    with TemporaryDirectory() as folder:
        arguments = _arguments(Path(folder), device, born_sharded)
        model = build_model(recipe.model, TOKENIZER, arguments, speed=Speed(**speed))
    if not options.zero3:
        model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    loss = build_loss(model.train(), recipe.loss)
    if options.zero3:
        model = under_zero3(model, born_sharded)

    def step() -> None:
        found = loss(model(input_ids=ids), ids)
        model.backward(found) if options.zero3 else found.backward()
        model.zero_grad()

    return step


def stage_3(recipe, micro_batch: int, device: str) -> dict:
    """A config of ZeRO-3 whose only rank is this process, for models built after it."""
    from model_states import free_port

    from pretraining.planning.memory.buffers import block_gathering
    from pretraining.planning.memory.tensors import layer_numel, parameter_tensors
    from pretraining.training.ranks import join_ranks

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=os.environ.get("MASTER_PORT", str(free_port())))
    join_ranks()
    ahead = block_gathering({}, layer_numel(parameter_tensors(recipe.model)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **ahead}
    bf16 = {"enabled": device == "cuda"}
    return {"train_micro_batch_size_per_gpu": micro_batch, "bf16": bf16, "zero_optimization": zero}


def under_zero3(model, config: dict):
    """DeepSpeed's engine around the model, its optimizer never stepped."""
    import deepspeed
    import torch

    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _layers_key(recipe: str) -> str:
    from pretraining.recipe import load_recipe

    return LAYERS.get(load_recipe(recipe).model.model_type, "num_hidden_layers")


def _arguments(folder: Path, device: str, ds_config: dict | None):
    from transformers import TrainingArguments

    keywords = {"use_cpu": device != "cuda", "bf16": device == "cuda", "seed": 42}
    return TrainingArguments(output_dir=str(folder), deepspeed=ds_config, **keywords)


def timed(step) -> tuple[float, int | None]:
    """Seconds of one call, and on a GPU the most bytes that it had allocated beyond what was there."""
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()
    began = time.perf_counter()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds, torch.cuda.max_memory_allocated() - there if on_gpu else None


if __name__ == "__main__":
    main()
