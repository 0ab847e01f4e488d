"""Activations, logits and peaks predicted beside those that torch's memory tracker reports on fake tensors.

    python benchmarks/memory.py --keep
    python benchmarks/memory.py --recipes 124m --attention eager --precisions bf16 fp32
    python benchmarks/memory.py --recipes 1.5b --micro_batch 16 --attention eager sdpa --losses plain chunked
    python benchmarks/memory.py --degrees --keep
    torchrun --nproc_per_node=8 benchmarks/memory.py --peak --recipes 7b --deepspeed zero3     (needs GPUs)

Without --peak no memory is used: forward, loss and backward of one micro-batch run on fake tensors. `kept` is what
lies there when the loss is computed, `peak` the most at any moment of both passes, both without weights. The tracker
follows a module's first call alone, and so no fused loss, which calls the head twice. With --peak,
three real steps of two micro-batches, and torch.cuda.max_memory_allocated of the fullest rank. With --degrees, a small
Llama whose layers and sequences real ranks split: what the tracker finds `kept` on the fullest of them.
"""

import argparse
import os
import tempfile
import warnings
from itertools import product
from pathlib import Path

from gear import on_forked_ranks, parser_of, record, short_recipe, short_trainer

RECIPES = ("124m", "1.5b", "7b")
STEPS, ACCUMULATION = 3, 2
DEGREES = ("tensor=1", "tensor=2", "tensor=4", "sequence=2", "sequence=4", "tensor=2,sequence=2")
SMALL = {"model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 1024}
SMALL |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SMALL |= {"max_position_embeddings": 512, "attn_implementation": "sdpa"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--attention", nargs="+", default=["sdpa"], choices=("sdpa", "eager"))
    parser.add_argument("--precisions", nargs="+", default=["bf16"], choices=("bf16", "fp32", "autocast"))
    parser.add_argument("--losses", nargs="+", default=["plain"], choices=("plain", "chunked"))
    parser.add_argument("--every_n_layers", nargs="+", type=int, default=(0, 1, 2), metavar="N")
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--degrees", nargs="*", metavar="DEGREE=N", help="a small Llama over real ranks")
    parser.add_argument("--peak", action="store_true", help="real steps on GPUs instead of fake tensors")
    parser.add_argument("--deepspeed", default="zero2", help="with --peak: the ds_config")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.degrees is not None:
        for degrees, every_n_layers in product(options.degrees or DEGREES, (0, 1)):
            record("memory", split_trace(degrees, every_n_layers), options.keep)
        return
    for name in options.recipes:
        for every_n_layers in options.every_n_layers:
            for values in (peaks if options.peak else traces)(options, name, every_n_layers):
                if os.environ.get("RANK", "0") == "0":
                    record("memory", values, options.keep)


def traces(options: argparse.Namespace, name: str, every_n_layers: int):
    """One line for each attention, precision and loss."""
    from pretraining.recipe import load_recipe
    from tests.gear.tracked_memory import predict, trace

    recipe = load_recipe(name)
    for attention, precision, loss in product(options.attention, options.precisions, options.losses):
        model = {**recipe.model, "attn_implementation": attention}
        case = (model, options.micro_batch, recipe.sequence_length, precision, every_n_layers, loss)
        traced, foreseen = trace(*case), predict(*case)
        words = {"recipe": name, "attention": attention, "precision": precision, "loss": loss}
        words |= {"every_n_layers": every_n_layers, "micro_batch": options.micro_batch}
        ratios = {f"{key}_ratio": round(foreseen[key] / traced[key], 4) for key in traced}
        yield {**words, "traced": traced, "predicted": foreseen, **ratios}


def split_trace(degrees: str, every_n_layers: int) -> dict:
    """What the fullest of real ranks keeps of one micro-batch when its loss is computed, and the prediction."""

    from pretraining.ds_config import degrees_of
    from pretraining.planning.memory.activations import activations
    from pretraining.planning.setup import Setup

    micro_batch, length = 2, SMALL["max_position_embeddings"]
    values = {"model": SMALL, "training.per_device_train_batch_size": micro_batch, "training.bf16": True}
    values |= {"loss.kind": "plain", "monitors.noise_scale_steps": None}
    values |= {"training.activation_checkpointing": every_n_layers > 0}
    recipe, config = short_recipe("features/gpt2", values, f"zero1:{degrees}", micro_batch * length, 1)
    split = degrees_of(config)
    ranks = on_forked_ranks(
        split.ranks_per_sample, lambda folder: {"kept": tracked(recipe, config, folder)}, degrees
    )
    case = Setup(recipe, config)
    held = activations(case, None)
    traced, foreseen = max(rank["kept"] for rank in ranks), held.kept + held.logits / 3
    words = {"model": "llama", "degrees": degrees, "precision": case.precision.name}
    ratio = round(foreseen / traced, 4)
    return {
        **words,
        "every_n_layers": every_n_layers,
        "traced": {"kept": traced},
        "predicted": {"kept": foreseen},
        "kept_ratio": ratio,
    }


def tracked(recipe, config: dict, folder: Path) -> int:
    """Bytes that one rank keeps in the first micro-batch, found by the tracker around the Trainer's own loss."""
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import TrainerCallback

    from tests.gear.tracked_memory import without_weights

    trainer, kept = short_trainer(recipe, config, folder / "run", 1, 1, TrainerCallback()), []
    compute_loss = trainer.compute_loss

    def tracked_loss(network, inputs, *args, **kwargs):
        tracker = MemTracker()
        tracker.track_external(
            network, *(each for each in inputs.values() if hasattr(each, "untyped_storage"))
        )
        with tracker:
            loss = compute_loss(network, inputs, *args, **kwargs)
            kept.append(without_weights(tracker.get_tracker_snapshot("current")))
        return loss

    trainer.compute_loss = tracked_loss
    trainer.train()
    return kept[0]


def peaks(options: argparse.Namespace, name: str, every_n_layers: int):
    """One line: three real steps on this machine's GPUs."""
    import torch
    from transformers import TrainerCallback

    from pretraining.planning.memory.need import memory_need
    from pretraining.planning.setup import Setup
    from pretraining.recipe import load_recipe

    if not torch.cuda.is_available():
        raise SystemExit("--peak needs a GPU; without it the benchmark runs on fake tensors")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    length = load_recipe(name).sequence_length
    per_step = options.micro_batch * length * world_size * ACCUMULATION
    values = {"training.per_device_train_batch_size": options.micro_batch}
    values |= {"training.activation_checkpointing": every_n_layers > 0}
    values |= {"training.activation_checkpointing_kwargs.every_n_layers": max(1, every_n_layers)}
    values |= {"training.dataloader_num_workers": 0}
    recipe, config = short_recipe(name, values, options.deepspeed, per_step, STEPS)
    there = torch.cuda.get_device_properties(0).total_memory
    need = memory_need(Setup(recipe, config, world_size), there)
    torch.cuda.reset_peak_memory_stats()
    folder = Path(tempfile.mkdtemp())
    trainer = short_trainer(recipe, config, folder, ACCUMULATION, STEPS, TrainerCallback())
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.tensor(torch.cuda.max_memory_allocated(), device="cuda")
    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    trainer.release()  # the next case begins with an empty GPU
    words = {
        "recipe": name,
        "deepspeed": recipe.deepspeed,
        "ranks": world_size,
        "every_n_layers": every_n_layers,
    }
    words |= {"micro_batch": options.micro_batch, "peak_bytes": int(peak), "predicted": need.to_dict()}
    yield {**words, "peak_ratio": round(need.allocated / int(peak), 4)}


if __name__ == "__main__":
    main()
