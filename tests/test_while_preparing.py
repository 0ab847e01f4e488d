"""train.py --while_preparing: the curve of preparing first, digit for digit, whatever waits, fails or is killed."""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pretraining.data.prepared import is_prepared
from pretraining.errors import UserError
from pretraining.recipe import load_recipe
from pretraining.refusals import check_while_preparing
from pretraining.runtime.durable_files import read_rows
from tests.quality_texts import PROSE
from tests.runs import Run, Started, Workshop, choices, execute, launcher

SOURCES = 4
GATE = """
import time
from pathlib import Path


def passes(text, folder):
    for gate in ("second", "last"):
        if text.startswith(gate):
            while not (Path(folder) / gate).exists():
                time.sleep(0.02)
            if (Path(folder) / gate).read_text() == "broken":
                raise ValueError("the text is broken")
    return True
"""
"""A filter that waits for a file before it lets the first text of a source through: a source that comes slowly."""


class SlowText:
    """Text in four sources, each a task of its own; two of them come when the test says so."""

    def __init__(self, folder: Path, workshop: Workshop):
        self.folder, self.gates = folder, folder / "gates"
        self.gates.mkdir(parents=True)
        (folder / "gate.py").write_text(GATE)
        draw, words = random.Random(5), PROSE.split()
        for number in range(SOURCES):
            texts = [" ".join(draw.choices(words, k=60)) for _ in range(18)]
            texts[0] = {1: "second ", 3: "last "}.get(number, "") + texts[0]
            _write(folder / f"source-{number}.jsonl", texts)
        _write(folder / "held-out.jsonl", [" ".join(draw.choices(words, k=60)) for _ in range(6)])
        values = json.loads(workshop.recipe.read_text())
        values["data"] = {
            "name": "slow",
            "sources": [{"path": str(folder / f"source-{number}.jsonl")} for number in range(SOURCES)],
            "validation": {"sources": [{"path": str(folder / "held-out.jsonl"), "name": "held-out"}]},
            "validation_share": 0,
            # one that is trained would read all of the text first
            "tokenizer": str(workshop.data / "corpus" / "tokenizer"),
            "filters": [
                {
                    "rule": "callable",
                    "import": f"{folder / 'gate.py'}:passes",
                    "arguments": {"folder": str(self.gates)},
                }
            ],
            "shuffle_blocks": 12,
        }
        values["training"] |= {"eval_steps": 5, "save_steps": 100, "per_device_eval_batch_size": 2}
        self.recipe = folder / "slow.json"
        self.recipe.write_text(json.dumps(values))

    def opens(self, gate: str, content: str = "") -> None:
        """Let the text of a source through, or break it."""
        (self.gates / gate).write_text(content)

    def command(self, data: Path, output: Path, *more: str, ranks: int = 2, stage: str = "zero2") -> list:
        words = ["--recipe", self.recipe, "--data_dir", data, "--output_dir", output]
        return [*launcher("forked", ranks), "train.py", *words, *choices(stage, ()), *more]


def _write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _until(reached: Callable[[], bool], started: Started) -> None:
    while not reached():
        assert started.process.poll() is None, started.finish().output
        time.sleep(0.02)
