"""A small run whose recipe reads two steps of noise in the middle: a spike that any launcher can start."""

import json
import random
import sys
from pathlib import Path

from tests.gear.runs import SMALL_RECIPE, Run, Workshop, completed

STEPS, FIRST_NOISY, CLEAN_AGAIN = 60, 53, 55
"""Steps of the run, and the first one whose samples are noise and the first that is clean again."""
TOKENS_PER_STEP, SAMPLES_PER_STEP = 512, 8
EVERY = {"eval_steps": STEPS, "save_steps": 20, "per_device_train_batch_size": 4}
"""Large micro-batches: sixty steps are many at stage 3, where every layer waits for the other rank."""


class PoisonedWorkshop(Workshop):
    """Its small recipe goes through three stages of data: text, noise, text."""

    def __init__(self, folder: Path, corpus: Path):
        self.folder, self.data, self.recipe = folder, folder / "data", folder / "poisoned.json"
        self._made: dict[tuple, Run] = {}
        _write_noise(folder / "noise")
        sources = [{"path": str(corpus), "name": "text"}, {"path": str(folder / "noise"), "name": "noise"}]
        stages = [
            {"until": (FIRST_NOISY - 1) * TOKENS_PER_STEP, "weights": {"text": 1}},
            {"until": (CLEAN_AGAIN - 1) * TOKENS_PER_STEP, "weights": {"noise": 1}},
            {"weights": {"text": 1}},
        ]
        values = {
            **SMALL_RECIPE,
            "data": {**SMALL_RECIPE["data"], "sources": sources, "mixture": {"stages": stages}},
            "budget": {"tokens": STEPS * TOKENS_PER_STEP, "tokens_per_step": TOKENS_PER_STEP},
            "training": {**SMALL_RECIPE["training"], **EVERY},
            "monitors": {"spikes": {"policy": "rollback", "skip_steps": 3}},
        }
        self.recipe.write_text(json.dumps(values))
        completed([sys.executable, "data_prep.py", *self.options()])


def _write_noise(folder: Path) -> None:
    """Characters that the text does not hold: each becomes two byte tokens that the model has learned not to expect."""
    folder.mkdir()
    draw = random.Random(0)
    for number in range(8):
        letters = [chr(draw.randrange(0x100, 0x800)) for _ in range(1000)]
        (folder / f"{number}.txt").write_text("".join(letters), encoding="utf-8")


def losses(run: Run) -> list[float]:
    """Training loss of every step of a poisoned run, once each and in order."""
    rows = run.training_rows
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["train/loss"] for row in rows]


def events(run: Run, kind: str) -> list[dict]:
    """The rows of one kind in events.jsonl."""
    return [event for event in run.events if event["event"] == kind]
