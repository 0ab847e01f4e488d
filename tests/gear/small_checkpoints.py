"""Checkpoints of a few small files, committed as a run commits its own."""

from pathlib import Path

from pretraining.checkpoints.format import (
    Identity,
    Start,
    commit_checkpoint,
    file_entry,
    write_receipt,
)
from pretraining.checkpoints.retention import Retention
from pretraining.planning.run_plan import build_run_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Checkpoints
from pretraining.runtime.run_folder import RunFolder

SPLIT = {"documents": 1, "tokens": 1000}
MANIFEST = {"fingerprint": "xxh128:0", "splits": {"train": SPLIT, "validation": SPLIT}}


def identity_of(*settings: str, start: Start | None = None, base: str = "features/gpt2") -> Identity:
    """What a one-process start of a recipe writes into its markers."""
    recipe = load_recipe(base, settings)
    layout = build_run_plan(Setup(recipe, None)).layout
    return Identity(recipe, MANIFEST, layout, {"versions": {}}, start or Start())


def save(
    run: RunFolder,
    step: int,
    retention: Retention | None = None,
    identity: Identity | None = None,
    **metrics: float,
) -> Path:
    """What a rank, the marker's writer and retention do at a save, with small files; the checkpoint's folder."""
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    names = ["trainer_state.json", "state_0.bin", "state_1.bin"]
    for name in names:
        (folder / name).write_text(f"{name} after {step} steps")
    write_receipt(folder, 0, 1, {name: file_entry(folder / name) for name in names})
    commit_checkpoint(folder, (identity or identity_of()).marker_at(step, [{"step": step, **metrics}]))
    (retention or Retention(Checkpoints(keep_last=None))).apply(run)
    return folder
