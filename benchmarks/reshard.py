"""Every ZeRO stage and number of ranks to every other: how far the next losses are from the unbroken run's.

    python benchmarks/reshard.py --keep
    python benchmarks/reshard.py --stages 2,3 --ranks 1,2

Each layout trains 15 steps and saves after 10; then each layout goes on from every saved checkpoint. Model,
arguments, Trainer and checkpoints are the repository's own; a group of ranks makes a new engine for every resume.
Prints one JSON line a pair and one for the whole matrix: max |difference| of the next five losses (nats, fp32).
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a forked rank runs this file without its folder
from record import parser_of, record

STAGES = {
    "0": "zero0",
    "1": "zero1",
    "2": "zero2",
    "3": "zero3",
    "2+offload": "zero2_offload",
    "3+offload": "zero3_offload",
}
SAVED_AFTER, STEPS, TOLERANCE = 10, 15, 1e-4


def main() -> None:
    options = parse_arguments()
    if options.worker:
        return run_group(options)
    began = time.perf_counter()
    stages, ranks = options.stages.split(","), [int(each) for each in options.ranks.split(",")]
    layouts = [(stage, each) for each in ranks for stage in stages]
    with tempfile.TemporaryDirectory(prefix="reshard_") as folder:
        write_recipe(Path(folder))
        whole = {layout: start_group(Path(folder), layout, [None])[0] for layout in layouts}
        pairs = [row for layout in layouts for row in compare(Path(folder), layout, whole)]
    worst = max(pairs, key=lambda pair: pair["max_abs_loss_difference"])
    values = {
        "stages": stages,
        "ranks": ranks,
        "pairs": len(pairs),
        "within_tolerance": sum(pair["max_abs_loss_difference"] <= TOLERANCE for pair in pairs),
        "tolerance": TOLERANCE,
        "max_abs_loss_difference": worst["max_abs_loss_difference"],
        "worst": worst,
        "same_layout_max_abs_loss_difference": max(
            (p["max_abs_loss_difference"] for p in pairs if p["saved"] == p["resumed"]), default=None
        ),
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }
    record("reshard", values, options.keep)


def compare(folder: Path, layout: tuple, whole: dict) -> list[dict]:
    """The resumes of one layout from every saved checkpoint."""
    resumed = start_group(folder, layout, list(whole))
    rows = []
    for saved, losses in zip(whole, resumed, strict=True):
        pairs = zip(losses, whole[saved][SAVED_AFTER:], strict=True)
        difference = max(abs(ours - theirs) for ours, theirs in pairs)
        rows.append({"saved": saved, "resumed": layout, "max_abs_loss_difference": difference})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def start_group(folder: Path, layout: tuple, starts: list) -> list[list[float]]:
    """Ranks of one layout that train once for each start, a saved layout or None; the losses of each."""
    from tests.gear.runs import execute, launcher

    stage, ranks = layout
    task = folder / "task.json"
    task.write_text(json.dumps([start and name_of(start) for start in starts]))
    words = ["benchmarks/reshard.py", "--worker", folder, "--stages", stage, "--ranks", str(ranks)]
    finished = execute([*launcher("forked", ranks), *words], timeout=3600)
    if finished.code:
        raise SystemExit(f"{layout}: {finished.output}")
    return json.loads((folder / "losses.json").read_text())


def name_of(layout) -> str:
    """A folder's name for the checkpoint of a layout."""
    return f"{layout[0]}-{layout[1]}"


def write_recipe(folder: Path) -> None:
    from tests.gear.runs import SMALL_RECIPE

    data = {**SMALL_RECIPE["data"], "sources": [{"path": str(folder)}]}
    budget = {"tokens": 512 * STEPS, "tokens_per_step": 512}
    training = {**SMALL_RECIPE["training"], "save_steps": SAVED_AFTER, "eval_strategy": "no"}
    recipe = {**SMALL_RECIPE, "data": data, "budget": budget, "training": training}
    (folder / "recipe.json").write_text(json.dumps(recipe))


def run_group(options: argparse.Namespace) -> None:
    """One rank: train from each start of the task, with an engine of its own each."""
    import torch.distributed as dist

    from pretraining.training.ranks import join_ranks, leave_ranks

    rank, _ = join_ranks()
    losses = []
    for start in json.loads((options.worker / "task.json").read_text()):
        losses.append(train(options, start))
        gc.collect()
        dist.barrier()
    if rank == 0:
        (options.worker / "losses.json").write_text(json.dumps(losses))
    leave_ranks()


def train(options: argparse.Namespace, start: str | None) -> list[float]:
    """Losses of the steps from a saved checkpoint, or from the first one on, to the end."""
    layout = name_of((options.stages, options.ranks))
    resume = options.worker / start / f"checkpoint-{SAVED_AFTER}" if start else None
    trainer = build_trainer(options, options.worker / (layout if start is None else "resumed"), resume)
    trainer.checkpoints = RankFiles()
    trainer.train(resume_from_checkpoint=resume)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    close(trainer)
    return losses[SAVED_AFTER:] if resume else losses


class RankFiles:
    """Saves before it returns and commits nothing; loads as a `CheckpointManager` does."""

    def save(self, trainer) -> None:
        from pretraining.checkpoints.background import write_share
        from pretraining.checkpoints.trainer_state import rank_share
        from pretraining.runtime.process_group import rank_and_world_size

        folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        write_share(folder, *rank_and_world_size(), *rank_share(trainer))

    def load_state(self, trainer, folder: Path) -> None:
        from pretraining.checkpoints.trainer_state import load_state

        load_state(trainer, folder)

    def load_position(self, trainer, folder: Path) -> None:
        from pretraining.checkpoints.trainer_state import load_position

        load_position(trainer, folder)


def build_trainer(options: argparse.Namespace, folder: Path, resume: Path | None):
    from types import SimpleNamespace

    from pretraining.ds_config import load_ds_config
    from pretraining.model.build import build_model
    from pretraining.model.loss import build_loss
    from pretraining.planning.run_plan import build_run_plan
    from pretraining.recipe import load_recipe
    from pretraining.training.arguments import build_arguments
    from pretraining.training.trainer import PretrainingTrainer

    recipe = load_recipe(str(options.worker / "recipe.json"))
    config = load_ds_config(STAGES[options.stages])
    plan = build_run_plan(recipe, config, int(options.ranks))
    if resume is not None:
        recipe.training["save_strategy"] = "no"
    arguments = build_arguments(recipe, config, folder, plan.accumulation_steps)
    tokens = SimpleNamespace(bos_token_id=0, eos_token_id=0)
    model = build_model(recipe.model, tokens, arguments, draw_weights=resume is None)
    first = SAVED_AFTER * recipe.samples_per_step if resume else 0
    return PretrainingTrainer(
        recipe, model, arguments, loss=build_loss(model, recipe.loss), train_dataset=blocks(recipe)[first:]
    )


def blocks(recipe) -> list[dict]:
    """Text of a small machine that is learnt in a few steps: each token depends on the one before."""
    import torch

    generator = torch.Generator().manual_seed(0)
    follows = torch.randint(recipe.model.vocab_size, (recipe.model.vocab_size, 4), generator=generator)
    rows = torch.randint(recipe.model.vocab_size, (recipe.num_samples,), generator=generator)
    columns = [rows]
    for _ in range(recipe.sequence_length):
        choice = torch.randint(4, (recipe.num_samples,), generator=generator)
        columns.append(follows[columns[-1], choice])
    samples = torch.stack(columns, 1).numpy()
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in samples]


def close(trainer) -> None:
    """Let go of the engine and of what accelerate and transformers remember of its ds_config."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    trainer.model_wrapped.destroy()
    trainer.accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--stages", default=",".join(STAGES), help="of " + ", ".join(STAGES))
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
