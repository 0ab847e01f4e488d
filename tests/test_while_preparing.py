"""train.py --while_preparing: the curve of preparing first, digit for digit, whatever waits, fails or is killed."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.quality_texts import PROSE
from tests.runs import Run, Started, Workshop, choices, execute, launcher

SOURCES = 4
TIMEOUT_SECONDS = 300
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
            texts = [" ".join(draw.choices(words, k=60)) for _ in range(6)]
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
    until = time.monotonic() + TIMEOUT_SECONDS
    while not reached():
        assert started.process.poll() is None, started.finish().output
        assert time.monotonic() < until, started.finish(0).output
        time.sleep(0.02)


@pytest.fixture(scope="module")
def slow(tmp_path_factory, workshop) -> SlowText:
    return SlowText(tmp_path_factory.mktemp("slow"), workshop)


@pytest.fixture(scope="module")
def prepared_first(slow) -> Run:
    """The run of finished data, before any gate is closed."""
    for gate in ("second", "last"):
        slow.opens(gate)
    data, output = slow.folder / "finished", slow.folder / "prepared-first"
    prepared = execute(["forked", "0", "data_prep.py", "--recipe", slow.recipe, "--data_dir", data])
    assert prepared.code == 0, prepared.output
    finished = execute(slow.command(data, output))
    assert finished.code == 0, finished.output
    for gate in ("second", "last"):
        (slow.gates / gate).unlink()
    return Run(output, finished)


def test_killed_failed_and_stopped_while_it_waits_ends_as_the_run_of_finished_data(slow, prepared_first):
    """Promises 1 and 3. It waits at a gate and is killed; its preparation fails; it is asked to stop; it ends.

    Nothing that was trained is lost but by the kill, and the data set is the one that data_prep.py makes.
    """
    data, run = slow.folder / "data", Run(slow.folder / "run")
    command = slow.command(data, run.folder, "--while_preparing")
    console = run.dir.console_log

    def waits() -> bool:
        return console.exists() and "waiting for data" in console.read_text()

    killed = Started(command)
    _until(waits, killed)
    assert run.training_rows and not run.checkpoints
    killed.kill()
    console.unlink()
    failing = Started(command)
    _until(waits, failing)
    slow.opens("second", "broken")
    failed = failing.finish()
    assert failed.code == 2 and failed.stderr.count("error:") == 1, failed.output
    assert "the preparation failed" in failed.stderr and "ValueError: the text is broken" in failed.stderr
    trained = len(run.training_rows)
    assert trained and run.checkpoints == [f"checkpoint-{trained}"]
    console.unlink()
    slow.opens("second")
    stopped = Started(command)
    _until(waits, stopped)
    run.dir.stop_file.touch()
    ended = stopped.finish()
    assert ended.code == 75 and not ended.strays, ended.output
    assert len(run.training_rows) > trained
    assert run.checkpoints[-1] == f"checkpoint-{len(run.training_rows)}"
    slow.opens("last")
    last = execute(command)
    assert last.code == 0 and not last.strays, last.output
    assert run.losses == prepared_first.losses
    assert [row["eval/loss"] for row in run.validation_rows] == [
        row["eval/loss"] for row in prepared_first.validation_rows
    ]
    assert [event["seconds"] > 0 for event in run.events if event["event"] == "waited_for_data"]
    folders = [slow.folder / name / "slow" / "manifest.json" for name in ("data", "finished")]
    assert json.loads(folders[0].read_text()) == json.loads(folders[1].read_text())


def test_a_run_of_the_flag_goes_on_without_it(slow, prepared_first):
    """Finished data is the data of the run: a later start needs no flag, and one with it changes nothing."""
    data = slow.folder / "finished"
    started = execute(slow.command(data, slow.folder / "again", "--while_preparing", "--resume", "never"))
    assert started.code == 0 and "is prepared: --while_preparing changes nothing" in started.stdout
    assert Run(slow.folder / "again").losses == prepared_first.losses
