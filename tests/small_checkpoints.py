"""Checkpoints of a few small files, committed as a run commits its own."""

from pathlib import Path
from types import SimpleNamespace

from pretraining.checkpoints.commit import CommitCallback
from pretraining.checkpoints.identity import Identity, Start
from pretraining.checkpoints.retention import Retention
from pretraining.planning import build_run_plan
from pretraining.recipe import load_recipe
from pretraining.run_dir import RunDir

SPLIT = {"documents": 1, "tokens": 1000}
MANIFEST = {"fingerprint": "xxh128:0", "splits": {"train": SPLIT, "validation": SPLIT}}


def identity_of(*settings: str, start: Start | None = None, manifest: dict = MANIFEST) -> Identity:
    """What a one-process start of recipe `tiny` writes into its markers."""
    recipe = load_recipe("tiny", settings)
    return Identity.of(recipe, build_run_plan(recipe, None, 1), manifest, {"versions": {}}, start or Start())


def save(
    run: RunDir,
    step: int,
    retention: Retention | None = None,
    identity: Identity | None = None,
    **metrics: float,
) -> Path:
    """What the Trainer and the callback do at a save, with small files; the checkpoint's folder."""
    folder = run.checkpoint(step)
    (folder / "state").mkdir(parents=True)
    for name in ("trainer_state.json", "state/rank_0.bin", "state/rank_1.bin"):
        (folder / name).write_text(f"{name} after {step} steps")
    state = SimpleNamespace(is_world_process_zero=True, global_step=step)
    state.log_history = [{"step": step, **metrics}]
    CommitCallback(run, identity or identity_of(), retention or Retention(None)).on_save(None, state, None)
    return folder
