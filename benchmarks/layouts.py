"""How far the loss of every layout is from that of one plain process, over ten steps.

    python benchmarks/layouts.py --keep
    python benchmarks/layouts.py --models mixtral qwen3_moe --layouts expert --keep

Each run is a real launch of train.py on a small corpus that is prepared first, on four ranks. Prints one JSON line a
model type and precision: for each layout the largest difference of the training loss (nats), of the gradient norm
(relative), of the validation loss and of the export's logits, how far these are from those of its last checkpoint's
weights, whether the initial weights are the same bit for bit, and whether the export has the same files, names and
shapes. The first step has learning rate 0, so the weights after it are
the initial ones.
"""

import json
import sys
from pathlib import Path

from gear import COMPARED, SPLIT, STAGES, largest_difference, models, parser_of, record, refusal, small_runs

RANKS = 4
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(models()), default=list(models()))
    parser.add_argument("--layouts", nargs="+", choices=list(SPLIT), default=list(SPLIT))
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    options = parser.parse_args()
    with small_runs() as workshop:
        for model in options.models:
            for precision in options.precisions:
                found = by_layout(workshop, model, options.layouts, precision)
                values = {"model": model, "precision": precision, "ranks": RANKS, "steps": 10}
                record("layouts", {**values, "differences": found}, options.keep)


def by_layout(workshop, model: str, kinds: list[str], precision: str) -> dict[str, dict | str]:
    """Compare each layout that is not refused with one plain process: {layout: differences, or why it is refused}."""
    settings = (f"model={json.dumps(models()[model])}", *COMPARED)
    settings += (f"training.bf16={json.dumps(precision == 'bf16')}",)
    plain, found = workshop.plain(settings), {}
    for layout in (f"{stage}:{degrees}" for kind in kinds for degrees in SPLIT[kind] for stage in STAGES):
        found[layout] = refusal(workshop.recipe, settings, layout, RANKS)
        if found[layout] is None:
            run = workshop.run(layout, RANKS, settings=settings)
            found[layout] = differences(run, plain, PRECISIONS[precision])
            print(f"{model} {layout}: {found[layout]}", file=sys.stderr, flush=True)
    return found


def differences(run, reference, dtype: str) -> dict[str, float | bool]:
    """Return the largest differences of a run from another, row by row, and of what they saved and exported."""
    rows = list(zip(run.training_rows, reference.training_rows, strict=True))
    norms = [(ours["train/grad_norm"], theirs["train/grad_norm"]) for ours, theirs in rows]
    logits = logits_of(run)
    validations = ([row["eval/loss"] for row in each.validation_rows] for each in (run, reference))
    return {
        "loss": max(abs(ours["train/loss"] - theirs["train/loss"]) for ours, theirs in rows),
        "norm": max(abs(ours - theirs) / theirs for ours, theirs in norms),
        "validation": largest_difference(*validations),
        "logits": float((logits - logits_of(reference)).abs().max()),
        "logits_to_checkpoint": float((logits - logits_of(run, run.folder / "checkpoint-10")).abs().max()),
        # without ZeRO the masters are as drawn, with it they begin as what the 16-bit weights hold
        "same_start": same_weights(*(each.folder / "checkpoint-1" for each in (run, reference)), dtype),
        "same_export": files_of_export(run) == files_of_export(reference),
    }


def same_weights(saved: Path, other: Path, dtype: str) -> bool:
    """Return whether two checkpoints hold the same bits of every weight, as `dtype` has them."""
    import torch

    from pretraining.checkpoints.shard_files import CheckpointReader, assemble

    ours, theirs = CheckpointReader(saved), CheckpointReader(other)
    return ours.parameters == theirs.parameters and all(
        torch.equal(*(assemble(each, name).to(getattr(torch, dtype)) for each in (ours, theirs)))
        for name in theirs.parameters
    )


def logits_of(run, checkpoint: Path | None = None):
    """Return the logits of an export for some drawn tokens, as transformers loads it.

    checkpoint: whose weights are put in place of the export's, rounded as an export does.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from pretraining.checkpoints.shard_files import CheckpointReader, assemble

    model = AutoModelForCausalLM.from_pretrained(run.folder / "export", dtype="auto").eval()
    if checkpoint is not None:
        reader = CheckpointReader(checkpoint)
        model.load_state_dict({name: assemble(reader, name) for name in reader.parameters})
    tokens = torch.randint(model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.float()(input_ids=tokens).logits


def files_of_export(run) -> tuple[list[str], dict[str, tuple]]:
    """Return the files of an export, and {name: shape} of its weights."""
    from safetensors import safe_open

    folder = run.folder / "export"
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return sorted(path.name for path in folder.iterdir()), shapes


if __name__ == "__main__":
    main()
