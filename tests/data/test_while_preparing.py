"""train.py --while_preparing: the curve of preparing first, digit for digit, whatever waits, fails or is killed."""

import json
import pickle
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretraining.data.arriving import read_arrived
from pretraining.data.packed_dataset import build_training_dataset
from pretraining.data.preparation import finish
from pretraining.data.preparation.execution import Execution
from pretraining.data.preparation.prepare import prepare_data
from pretraining.data.prepared import ArrivingData, is_prepared, open_prepared
from pretraining.recipe import load_recipe
from pretraining.recipe.data import Data
from pretraining.recipe.refusals import check_while_preparing
from tests.gear.finished_data import make_texts, recipe_for, refusal, write_jsonl
from tests.gear.nodes import wait_until
from tests.gear.quality_texts import PROSE
from tests.gear.runs import REPOSITORY, Run, Started, Workshop, completed, execute, launcher

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
        names = [f"source-{number}" for number in range(SOURCES)]
        for number, name in enumerate((*names, "held-out")):
            texts = [" ".join(draw.choices(words, k=60)) for _ in range(6)]
            texts[0] = {1: "second ", 3: "last "}.get(number, "") + texts[0]
            write_jsonl(folder / f"{name}.jsonl", texts)
        rule = {"rule": "callable", "import": f"{folder / 'gate.py'}:passes"}
        values = json.loads(workshop.recipe.read_text())
        values["data"] = {
            "name": "slow",
            "sources": [{"path": str(folder / f"{name}.jsonl")} for name in names],
            "validation": {"sources": [{"path": str(folder / "held-out.jsonl"), "name": "held-out"}]},
            "validation_share": 0,
            # one that is trained would read all of the text first
            "tokenizer": str(workshop.data / "corpus" / "tokenizer"),
            "filters": [{**rule, "arguments": {"folder": str(self.gates)}}],
            "shuffle_blocks": 12,
        }
        values["training"] |= {"eval_steps": 5, "save_steps": 100, "per_device_eval_batch_size": 2}
        self.recipe = folder / "slow.json"
        self.recipe.write_text(json.dumps(values))

    def opens(self, gate: str, content: str = "") -> None:
        """Let the text of a source through, or break it. The filter never sees a part of the file."""
        aside = self.folder / gate
        aside.write_text(content)
        aside.replace(self.gates / gate)

    def command(self, data: Path, output: Path, *more: str) -> list:
        words = ["--recipe", self.recipe, "--data_dir", data, "--output_dir", output]
        return [*launcher("forked", 2), "train.py", *words, *more]


@pytest.fixture(scope="module")
def slow(tmp_path_factory, workshop) -> SlowText:
    return SlowText(tmp_path_factory.mktemp("slow"), workshop)


@pytest.fixture(scope="module")
def prepared_first(slow) -> Run:
    """The run of finished data, before any gate is closed."""
    for gate in ("second", "last"):
        slow.opens(gate)
    data, output = slow.folder / "finished", slow.folder / "prepared-first"
    completed(["forked", "0", "data_prep.py", "--recipe", slow.recipe, "--data_dir", data])
    finished = completed(slow.command(data, output))
    for gate in ("second", "last"):
        (slow.gates / gate).unlink()
    return Run(output, finished)


def test_killed_failed_and_stopped_while_it_waits_ends_as_the_run_of_finished_data(slow, prepared_first):
    """Promises 1 and 3. It waits at a gate and is killed; its preparation fails; it is asked to stop; it ends.

    Nothing that was trained is lost but by the kill, and the data set is the one that data_prep.py makes. The run may
    go on with finished data too.
    """
    data, run = slow.folder / "data", Run(slow.folder / "run")
    command = slow.command(data, run.folder, "--while_preparing")
    console = run.dir.console_log

    def waits() -> bool:
        return console.exists() and "waiting for data" in console.read_text()

    killed = Started(command)
    wait_until({"run": killed}, waits)
    assert run.training_rows and not run.checkpoints
    killed.kill()
    console.unlink()
    failing = Started(command)
    wait_until({"run": failing}, waits)
    slow.opens("second", "broken")
    failed = failing.finish()
    assert failed.code == 2 and failed.stderr.count("error:") == 1, failed.output
    assert "the preparation failed" in failed.stderr and "ValueError: the text is broken" in failed.stderr
    trained = len(run.training_rows)
    assert trained and run.checkpoints == [f"checkpoint-{trained}"]
    console.unlink()
    slow.opens("second")
    stopped = Started(command)
    wait_until({"run": stopped}, waits)
    run.dir.stop_file.touch()
    ended = stopped.finish()
    assert ended.code == 75 and not ended.strays, ended.output
    assert len(run.training_rows) > trained
    assert run.checkpoints[-1] == f"checkpoint-{len(run.training_rows)}"
    branch = shutil.copytree(run.folder, slow.folder / "branch")
    slow.opens("last")
    assert not completed(command).strays
    assert run.losses == prepared_first.losses
    validated = [[row["eval/loss"] for row in each.validation_rows] for each in (run, prepared_first)]
    assert validated[0] == validated[1]
    waited = [event["seconds"] for event in run.events if event["event"] == "waited_for_data"]
    assert len(waited) >= 2 and min(waited) > 0
    other = completed(slow.command(slow.folder / "finished", branch, "--while_preparing"))
    assert "is prepared: --while_preparing changes nothing" in other.stdout
    assert Run(branch).losses == prepared_first.losses
    folders = [slow.folder / name / "slow" / "manifest.json" for name in ("data", "finished")]
    assert json.loads(folders[0].read_text()) == json.loads(folders[1].read_text())


LENGTH = 16


def streamed(folder: Path, count: int = 30, **data) -> SimpleNamespace:
    """A stand-in for a recipe with two sources, of many tasks each, and validation of its own."""
    specs = [write_jsonl(folder / f"{name}.jsonl", make_texts(count, seed)) for seed, name in enumerate("ab")]
    own = write_jsonl(folder / "own.jsonl", make_texts(20, 9))
    values = {"validation": {"sources": [{"path": str(own), "name": "own"}]}, "validation_share": 0}
    recipe = recipe_for(*specs, **values, **{"shuffle_blocks": 8, **data})
    recipe.sequence_length, recipe.data_seed, recipe.num_samples = LENGTH, 3, 10**6
    return recipe


def arriving(monkeypatch, look: Callable[[], None]) -> None:
    """Call `look` whenever a preparation has said what can be read."""
    keep = finish.keep_arrived
    monkeypatch.setattr(finish, "keep_arrived", lambda preparation: (keep(preparation), look()))


PACKED = {"packing": "best_fit", "filters": [{"rule": "length", "min_words": 53}]}


@pytest.mark.parametrize("data", [{}, PACKED], ids=["raw", "filtered and packed"])
def test_what_has_arrived_is_what_the_whole_begins_with(tmp_path, monkeypatch, small_tasks, data):
    """Read after every task, in windows, and by readers that were opened before the rest and the publishing came."""
    recipe = streamed(tmp_path, **data)
    opened, counts, read = [], [], {}

    def look() -> None:
        manifest = read_arrived(tmp_path / "data" / "corpus")
        if manifest["splits"]["train"]["tokens"] <= LENGTH:
            return
        if len(opened) < 2:
            opened.append(ArrivingData.of(recipe, tmp_path / "data", manifest))
        dataset = build_training_dataset(opened[-1], recipe, 0, 10**6)
        counts.append(dataset.order.ready_until())
        for sample in range(len(read), counts[-1]):
            read[sample] = dataset[sample]["input_ids"].tolist()

    arriving(monkeypatch, look)
    prepare_data(recipe, tmp_path / "data", False, Execution("inline"))
    assert len(set(counts)) > 5 and counts == sorted(counts) and len(opened) == 2
    whole = open_prepared(recipe, tmp_path / "data")
    finished = build_training_dataset(whole, recipe, 0, 10**6)
    assert all(finished[sample]["input_ids"].tolist() == tokens for sample, tokens in read.items())
    samples, size = list(range(2 * finished.num_blocks)), whole.validation.num_tokens
    for data in opened:
        dataset = pickle.loads(pickle.dumps(build_training_dataset(data, recipe, 0, 10**6)))
        pairs = zip(*(each.__getitems__(samples) for each in (dataset, finished)), strict=True)
        assert all((one["input_ids"] == other["input_ids"]).all() for one, other in pairs)
        assert dataset.tokens_per_epoch == finished.tokens_per_epoch
        assert (data.validation.read(0, size) == whole.validation.read(0, size)).all()
        assert data.latest().manifest["fingerprint"] == whole.fingerprint
        assert data.latest().tokenizer_path.is_dir() and data.known_tokens == whole.train.num_tokens
    # published between the look where it is and the reading
    places = iter([tmp_path / "gone", whole.tokenizer_path])
    monkeypatch.setattr(ArrivingData, "tokenizer_path", property(lambda _: next(places)))
    assert opened[0].tokenizer.vocab_size == whole.tokenizer.vocab_size


def test_a_portion_that_goes_on_arrives_behind_what_was_there(tmp_path, monkeypatch, small_tasks):
    """`max_tokens` raised: the data set that is there counts as arrived, and the end is that of the larger portion."""
    small, large = (streamed(tmp_path, count=60) for _ in range(2))
    for recipe, tokens in ((small, 4000), (large, 6000)):
        sources = [{"path": str(tmp_path / "a.jsonl"), "max_tokens": tokens}]
        recipe.data = Data.of({**recipe.data.to_dict(), "sources": sources})
    prepare_data(small, tmp_path / "data", False, Execution("inline"))
    before, trains = open_prepared(small, tmp_path / "data"), []

    def look() -> None:
        manifest = read_arrived(tmp_path / "data" / "corpus")
        trains.append(ArrivingData.of(large, tmp_path / "data", manifest).train)

    arriving(monkeypatch, look)
    assert not is_prepared(large, tmp_path / "data")
    prepare_data(large, tmp_path / "data", False, Execution("inline"))
    whole = open_prepared(large, tmp_path / "data").train
    first, size = trains[0], trains[0].num_tokens
    assert 0 < size <= before.train.num_tokens < whole.num_tokens
    assert (first.read(0, size) == whole.read(0, size)).all()
    first.refresh()
    assert first.is_whole and first.num_tokens == whole.num_tokens


def test_the_preparation_ends_with_its_run(slow):
    """However the run ends: its end of a pipe is gone. What is finished is kept."""
    (slow.gates / "last").unlink(missing_ok=True)
    words = ["--recipe", slow.recipe, "--data_dir", slow.folder / "left", "--executor", "inline"]
    words, pipe = [sys.executable, "data_prep.py", *words, "--beside_training"], subprocess.PIPE
    process = subprocess.Popen(words, cwd=REPOSITORY, stdin=pipe, stderr=pipe, text=True)
    arrived = slow.folder / "left" / ".slow.work" / "arrived.json"
    while process.poll() is None and not arrived.exists():
        time.sleep(0.01)
    _, said = process.communicate()
    assert process.returncode == 130 and "interrupted; what is finished is kept" in said
    assert arrived.exists()


def test_a_preparation_that_refuses_ends_the_run_before_it_begins(slow):
    """Its line, exit code 2, and no folder of a run."""
    data, run = slow.folder / "none", slow.folder / "unmade"
    missing = ("--set", f"data.sources.0.path={slow.folder / 'nothing.jsonl'}")
    refused = execute(slow.command(data, run, "--while_preparing", *missing))
    assert refused.code == 2 and refused.stderr.count("error:") == 1, refused.output
    assert "the preparation failed: " in refused.stderr and "data.sources.0.path" in refused.stderr
    assert not run.exists() and not data.exists()


REFUSED = {
    "data.shuffle_blocks: is missing": {"shuffle_blocks": None},
    "data.dedup: compares all documents": {"dedup": {"exact": True}},
    "data.validation_share: is 0.1": {"validation_share": 0.1},
    "data.mixture: mixes sources": {"mixture": {"temperature": 2}},
}


def test_what_needs_the_whole_first_is_refused():
    """And an address; the shipped recipe is not."""
    shipped = load_recipe("features/while-preparing")
    check_while_preparing(shipped, Path("data"))
    assert "is an address" in refusal(check_while_preparing, shipped, "s3://bucket/data")
    for said, data in REFUSED.items():
        settings = [f"data.{key}={json.dumps(value)}" for key, value in data.items()]
        recipe = load_recipe("features/while-preparing", settings)
        message = refusal(check_while_preparing, recipe, Path("data"))
        assert said in message and "run data_prep.py before train.py" in message


def test_a_plan_refuses_it_too(tmp_path):
    """Exit code 2, one line, nothing written, from the recipe alone."""
    words = ["--recipe", "features/gpt2", "--while_preparing", "--output_dir", tmp_path / "run"]
    for more in (["--plan"], ["--data_dir", tmp_path / "data"]):
        refused = execute([sys.executable, "train.py", *words, *more])
        assert "data.shuffle_blocks: is missing" in refused.refusal and not list(tmp_path.iterdir())
