"""How near to a GPU's peak a recipe can come: its kernels counted, at the rates a GPU sustains. Needs no GPU.

    python benchmarks/roofline.py 124m
    python benchmarks/roofline.py 7b --deepspeed zero3 --gpu H200 --world_size 8 --top 20
    python benchmarks/roofline.py 1.5b --set model.activation_function=gelu_new --compile none

The recipe's own model, loss and blocks run forward and backward at full size on tensors without storage, eager or as
inductor would fuse them; the DeepSpeed engine runs on a small stack of layers, as one rank of --world_size, and its
bytes are taken for each parameter. Products and attention take their FLOPs' time, all others their bytes' time, at
the shares of the GPU's peaks that pretraining/planning/tables/rates.json assumes. There is no gap between two kernels
and no wait in it, which a run has; and some shapes reach more than these shares. `planned_mfu_ceiling` is the plan's,
which runs nothing; `waits_of_engine` how often DeepSpeed's engine lets the host wait for the device.
"""

import argparse
from dataclasses import replace

from gear import parser_of, record


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("recipe", nargs="?", default="124m", help="a name or a path (default: 124m)")
    parser.add_argument("--deepspeed", help="a file of ds_configs/ over the recipe's")
    parser.add_argument("--gpu", default="H200", help="of `pretraining.planning gpus` (default: H200)")
    parser.add_argument("--world_size", type=int, default=8, help="ranks (default: 8)")
    parser.add_argument("--set", action="append", default=[], help="SECTION.KEY=VALUE, changes the recipe")
    parser.add_argument("--compile", choices=("none", "blocks", "whole"), help="default: as on a GPU")
    parser.add_argument("--top", type=int, default=10, help="kernels to list")
    options = parser.parse_args()
    from pretraining.errors import one_line_errors

    with one_line_errors():
        record("roofline", ceiling_of(options), options.keep)


def ceiling_of(options: argparse.Namespace) -> dict:
    """The counted ceiling of a recipe, which kernels cost it, and what the plan says."""
    from pretraining.planning.gpus import find_gpu
    from pretraining.planning.setup import Setup
    from pretraining.planning.sizes import flops_per_token, model_size
    from pretraining.planning.step_time import ceiling, layer_mode, sustained_rates
    from pretraining.recipe import accumulation_steps
    from pretraining.recipe.refusals import load_recipe_and_ds_config
    from tests.gear.kernels import COMPILED, count_engine, count_waits

    changes = [*options.set, *([f"speed.compile={options.compile}"] if options.compile else [])]
    recipe, ds_config = load_recipe_and_ds_config(
        options.recipe, changes, options.deepspeed, options.world_size
    )
    gpu, precision = find_gpu(options.gpu), recipe.training.product_precision
    rates, size = sustained_rates(gpu, precision, options.world_size), model_size(recipe.model)
    setup = Setup(recipe, ds_config, options.world_size)
    planned = ceiling(setup, gpu, precision)
    kernels = count_pass(recipe, COMPILED[layer_mode(setup)], gpu)
    waits = count_waits(ds_config, options.world_size)
    engine = count_engine(ds_config, options.world_size)

    seconds = {kernel: seconds_of(kernel, work, rates) for kernel, work in kernels.work.items()}
    parts: dict[str, float] = {}
    for kernel, spent in seconds.items():
        part = f"{kernel.phase}: {kernel.kind}"
        parts[part] = parts.get(part, 0.0) + spent
    parts["gradients"] = engine["micro-batch"] * size.total / rates.bytes
    accumulation = accumulation_steps(recipe, options.world_size, ds_config)
    parts["optimizer"] = engine["step"] * size.total / rates.bytes / accumulation
    total = sum(parts.values())
    tokens = recipe.micro_batch * recipe.sequence_length
    at_peak = flops_per_token(size, recipe.sequence_length).training * tokens / gpu.peak_flops(precision)
    costliest = sorted(seconds, key=seconds.get, reverse=True)[: options.top]
    return {
        "recipe": recipe.name,
        "deepspeed": recipe.deepspeed,
        "gpu": gpu.name,
        "world_size": options.world_size,
        "mfu_ceiling": round(at_peak / total, 4),
        "planned_mfu_ceiling": round(planned.mfu, 4),
        "micro_batch_seconds": round(total, 5),
        "seconds": {part: round(spent, 5) for part, spent in parts.items()},
        "launches": kernels.sum().launches,
        "waits_of_engine": waits,
        "kernels": [
            {**vars(kernel), **vars(kernels.work[kernel]), "seconds": round(seconds[kernel], 6)}
            for kernel in costliest
        ],
    }


def seconds_of(kernel, work, rates) -> float:
    """Of all launches of a kernel: its FLOPs or its bytes, whichever take longer."""
    from tests.gear.kernels import ATTENTION, PRODUCT

    peaks = {PRODUCT: rates.product_flops, ATTENTION: rates.attention_flops}
    return max(work.flops / peaks.get(kernel.kind, rates.product_flops), work.bytes / rates.bytes)


def count_pass(recipe, compiles: str, gpu):
    """The kernels of one micro-batch of the recipe, by phase: forward, loss, backward."""
    import torch

    from pretraining.model.loss import build_loss
    from pretraining.planning.memory.activations import chunk_length, compiles_loss, logit_bytes
    from tests.gear.kernels import counted, counted_model

    tokens = recipe.micro_batch * recipe.sequence_length
    compiled = compiles_loss(recipe.loss.compile, on_gpu=True)
    vocab_size, own = recipe.model.vocab_size, recipe.loss.chunk_tokens
    chunk = chunk_length(tokens, vocab_size, logit_bytes(2, compiled), gpu.memory_bytes, own)
    with counted_model(recipe.model, compiles) as (model, kernels):
        if every_n_layers := recipe.training.recomputed_one_in:
            model.activation_checkpointing_enable(every_n_layers=every_n_layers)
        loss = build_loss(model, replace(recipe.loss, chunk_tokens=chunk, compile=compiled))
        ids = torch.zeros(recipe.micro_batch, recipe.sequence_length, dtype=torch.long)
        num_items = torch.ones(())

        def run() -> None:
            kernels.phase = "forward"
            outputs = model(input_ids=ids, num_items_in_batch=num_items)
            kernels.phase = "loss"
            found = loss(outputs, ids, num_items_in_batch=num_items)
            kernels.phase = "backward"
            found.backward()
            model.zero_grad()

        return counted(run, kernels)


if __name__ == "__main__":
    main()
