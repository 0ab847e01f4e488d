"""How far the loss of every layout is from that of one plain process, over ten steps.

    python benchmarks/layouts.py --keep
    python benchmarks/layouts.py --models mixtral qwen3_moe --layouts expert --keep

Each run is a real launch of train.py on a small corpus that is prepared first, on four ranks. Prints one JSON line a
model type and precision: for each layout the largest difference of the training loss (nats), of the gradient norm
(relative) and of the validation loss, and whether its export has the names of the plain one.
"""

import json
import tempfile
from pathlib import Path

from record import parser_of, record

STAGES = ("zero0", "zero1", "zero2", "zero3")
SPLIT = {
    "sequence": ("sequence=2", "sequence=4"),
    "tensor": ("tensor=2", "tensor=4", "tensor=2,sequence=2"),
    "expert": ("expert=2", "expert=4"),
    "hpz": ("hpz=2",),
}
RANKS = 4
PRECISIONS = {"fp32": (), "bf16": ("training.bf16=true",)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(models()), default=list(models()))
    parser.add_argument("--layouts", nargs="+", choices=list(SPLIT), default=list(SPLIT))
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    options = parser.parse_args()
    from tests.runs import Workshop

    with tempfile.TemporaryDirectory(prefix="layouts_") as folder:
        workshop = Workshop(Path(folder))
        for model in options.models:
            for precision in options.precisions:
                found = by_layout(workshop, model, options.layouts, PRECISIONS[precision])
                values = {"model": model, "precision": precision, "ranks": RANKS, "steps": 10}
                record("layouts", {**values, "differences": found}, options.keep)


def models() -> dict[str, dict]:
    """Small shapes, with heads and experts that four ranks can split."""
    from tests.runs import EXPERTS, LLAMA

    llama = {**LLAMA, "num_key_value_heads": 4}
    qwen3_moe = {**EXPERTS, "num_key_value_heads": 4}
    own = ("moe_intermediate_size", "head_dim", "num_experts")
    mixtral = {key: value for key, value in qwen3_moe.items() if key not in own}
    mixtral |= {"model_type": "mixtral", "num_local_experts": EXPERTS["num_experts"]}
    qwen3 = {**llama, "model_type": "qwen3", "head_dim": 16}
    return {"llama": llama, "qwen3": qwen3, "mixtral": mixtral, "qwen3_moe": qwen3_moe}


def by_layout(workshop, model: str, kinds: list[str], precision: tuple[str, ...]) -> dict[str, dict | str]:
    """Compare each layout that is not refused with one plain process: {layout: differences, or why it is refused}."""
    from pretraining.errors import UserError
    from pretraining.refusals import load_recipe_and_ds_config

    settings = (f"model={json.dumps(models()[model])}", "monitors.noise_scale_steps=null", *precision)
    plain, found = workshop.plain(settings), {}
    for layout in (f"{stage}:{degrees}" for kind in kinds for degrees in SPLIT[kind] for stage in STAGES):
        try:
            load_recipe_and_ds_config(str(workshop.recipe), settings, layout, RANKS)
        except UserError as error:
            found[layout] = str(error)
        else:
            found[layout] = differences(workshop.run(layout, RANKS, settings=settings), plain)
    return found


def differences(run, reference) -> dict[str, float | bool]:
    """Return the largest differences of a run from another, row by row."""
    rows = list(zip(run.training_rows, reference.training_rows, strict=True))
    norms = [(ours["train/grad_norm"], theirs["train/grad_norm"]) for ours, theirs in rows]
    validations = zip(run.validation_rows, reference.validation_rows, strict=True)
    return {
        "loss": max(abs(ours["train/loss"] - theirs["train/loss"]) for ours, theirs in rows),
        "norm": max(abs(ours - theirs) / theirs for ours, theirs in norms),
        "validation": max(abs(ours["eval/loss"] - theirs["eval/loss"]) for ours, theirs in validations),
        "same_export": names_of_export(run) == names_of_export(reference),
    }


def names_of_export(run) -> dict[str, tuple]:
    """Return {name: shape} of what a run exported."""
    from safetensors import safe_open

    with safe_open(run.folder / "export" / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


if __name__ == "__main__":
    main()
