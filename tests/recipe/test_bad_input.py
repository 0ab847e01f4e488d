"""Bad input through the real commands: exit code 2, one line that says what, where and what to do, nothing written."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import fsspec
import pytest

from pretraining.command_line import parse_train_arguments, started_by_launcher
from pretraining.data.prepared import open_prepared
from pretraining.data.streaming.cache import ShardCache
from pretraining.errors import UserError
from pretraining.ladder import __main__ as ladder
from pretraining.recipe import load_recipe
from tests.gear.finished_data import refusal
from tests.gear.runs import LAUNCHED, REPOSITORY, Finished, Started, completed, contents, execute, refused


@pytest.fixture
def output(tmp_path) -> Path:
    """A run folder that a refused command must not make."""
    return tmp_path / "run"


@pytest.fixture
def train(workshop, output):
    """`train(options, **environment)`: run train.py on the small recipe, expecting nothing to be written."""

    def run(*options, **environment) -> Finished:
        command = ["forked", "0", "train.py", *workshop.options("--output_dir", output, *options)]
        finished = execute(command, **environment)
        assert not output.exists()
        return finished

    return run


@pytest.fixture
def changed(workshop, tmp_path):
    """`changed(section, key=value)`: a copy of the small recipe with keys of one section set."""

    def write(section: str, **values) -> Path:
        recipe = json.loads(workshop.recipe.read_text())
        recipe[section] = {**recipe[section], **values}
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(recipe))
        return path

    return write


def test_a_mistake_in_the_recipe(train, changed):
    """In the file, which the line names; and the same with --set. All mistakes: test_refusals.py."""
    message = "training.learnin_rate: unknown key; did you mean 'training.learning_rate'"
    path = changed("training", learnin_rate=1)
    assert str(path) in refused(train("--recipe", path), message)
    refused(train("--set", "training.learnin_rate=1"), message)
    refused(train("--set", "training.optim=adam"), "did you mean 'adamw_torch'?")  # no adalomo


def test_a_recipe_that_is_not_there_or_not_json(train, tmp_path):
    (tmp_path / "broken.json").write_text('{"model": {,}}')
    refused(train("--recipe", tmp_path / "nowhere.json"), "nowhere.json: cannot be read")
    refused(train("--recipe", tmp_path / "broken.json"), "broken.json: line 1 column 12")
    refused(train("--recipe", "tinny"), "did you mean 'tiny'", "124m", "1.5b", "7b", "30b", "65b")
    finished = train("--stage", "3")  # argparse's own answer
    assert finished.code == 2 and "unrecognized arguments: --stage 3" in finished.stderr
    with pytest.raises(UserError, match="unrecognized arguments: --worldsize 4; did you mean '--world_size'"):
        parse_train_arguments(["--recipe", "tiny", "--worldsize", "4"])
    assert "unrecognized arguments: --recipe (see" in refusal(ladder.parse, ["--recipe", "tiny"])


def test_ranks_that_do_not_divide_the_step(train):
    """Asked for with --plan, or started: the nearest tokens per step that would."""
    message = "budget.tokens_per_step: 512 is not a multiple of 384 = 3 ranks"
    refused(train("--plan", "--world_size", "3"), message, "the nearest are 384 and 768")
    refused(train(WORLD_SIZE="3", RANK="0", LOCAL_RANK="0"), message)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}, "WORLD_SIZE is set without MASTER_ADDR"),
        ({**LAUNCHED, "WORLD_SIZE": "two"}, "WORLD_SIZE=two: is not a whole number of at least 1"),
        ({**LAUNCHED, "WORLD_SIZE": "0"}, "WORLD_SIZE=0: is not a whole number"),
        ({**LAUNCHED, "RANK": "-1"}, "RANK=-1: is not a whole number of at least 0"),
        ({**LAUNCHED, "RANK": "2"}, "RANK=2 is no rank of WORLD_SIZE=2"),
    ],
)
def test_variables_of_a_launcher_that_are_left_over(variables, message, monkeypatch):
    """One line instead of a KeyError out of a library."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(message)):
        started_by_launcher()


def test_a_task_that_there_is_not(train):
    """Before the model is built, and before anything is written."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (requirements-eval.txt)")
    refused(train("--set", 'evaluation.tasks=["nowhere.yaml"]'), "evaluation.tasks", "'nowhere.yaml'")


def test_two_ranks_under_a_launcher_tell_it_once(workshop, output):
    """torchrun adds its own report of the failed ranks; ours is one line among it."""
    finished = execute(workshop.command(output, settings=["model.n_head=5"]))
    errors = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert finished.code != 0 and len(errors) == 1 and "model.n_head" in errors[0]
    assert not output.exists() and 'Traceback (most recent call last):\n  File "/' not in finished.stdout


def test_a_rank_that_says_nothing_leaves_after_the_one_that_tells():
    """A launcher ends all others when the first one leaves: that must not be one of the silent."""
    program = "from pretraining.errors import *\nwith one_line_errors(): raise UserError('wrong')"
    command = [sys.executable, "-c", program]
    silent, telling = (Started(command, RANK=rank, WORLD_SIZE="2") for rank in ("1", "0"))
    finished = telling.finish()
    assert finished.code == 2 and finished.stderr == "error: wrong\n"
    assert silent.process.poll() is None
    finished = silent.finish()
    assert finished.code == 2 and not finished.stderr


def test_data_that_is_not_prepared_names_the_command_that_prepares_it(workshop, train, tmp_path):
    """The command in the message, typed as it stands, prepares the data."""
    line = refused(train("--data_dir", tmp_path / "data"), "the data is not prepared; run: ")
    command = shlex.split(line.partition("run: ")[2])
    assert command[:2] == ["python", "data_prep.py"]
    completed([sys.executable, *command[1:]])
    assert (tmp_path / "data" / "corpus" / "manifest.json").exists()
    said = "data.tokenizer.train_vocab_size: 512 there, 400 here", "data_prep.py"
    refused(train("--set", "data.tokenizer.train_vocab_size=400"), *said)  # data of another tokenizer


@pytest.fixture
def copied_data(workshop, tmp_path) -> Path:
    """A copy of the prepared data, for a test to damage."""
    shutil.copytree(workshop.data, tmp_path / "data")
    return tmp_path / "data"


def test_a_damaged_shard_is_one_line(train, copied_data):
    """One bit of one token, a shard that is cut: which file it is."""
    shard = next(copied_data.glob("corpus/train/*.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    refused(train("--data_dir", copied_data), shard.name)
    os.truncate(shard, shard.stat().st_size - 8)
    refused(train("--data_dir", copied_data), shard.name)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["changed", "empty", "missing"])
def test_a_damaged_tokenizer(workshop, copied_data, tmp_path, name, damage):
    """A file that names another end of text would give exports whose config names the wrong id; at an address too."""
    path = copied_data / "corpus" / "tokenizer" / name
    path.write_text(path.read_text().replace("<|endoftext|>", "a") if damage == "changed" else "")
    if damage == "missing":
        path.unlink()
    store, recipe = fsspec.filesystem("memory"), load_recipe(str(workshop.recipe))
    store.put(str(copied_data), "/damaged", recursive=True)
    for place in (copied_data, "memory://damaged"):
        with pytest.raises(UserError, match=rf"corpus/tokenizer/{name}") as caught:
            open_prepared(recipe, place, ShardCache(tmp_path / "cache", 10**9))
    store.rm("/damaged", recursive=True)
    if damage != "missing" or name != "tokenizer.json":  # without that file the store says what is not there
        said = "missing" if damage == "missing" else "not the one the data was made with"
        assert said in str(caught.value)


def test_a_mistake_in_the_ds_config(train, tmp_path):
    """All mistakes: test_ds_config.py."""
    path = tmp_path / "zero2_mine.json"
    config = json.loads((REPOSITORY / "ds_configs" / "zero2.json").read_text())
    path.write_text(json.dumps({**config, "gradient_cliping": 1.0}))
    message = "gradient_cliping: unknown key; did you mean 'gradient_clipping'"
    refused(train("--deepspeed", path), str(path), message)
    refused(train("--deepspeed", "zero4"), "no such ds_config; did you mean", "zero3_hpz")


def test_output_folder_of_another_recipe(workshop):
    """What differs, and the two ways out; the run in the folder stays as it was."""
    run = workshop.plain()
    before = contents(run.folder)
    command = workshop.command(run.folder, "null", 1, "plain", ("training.learning_rate=0.5",))
    said = "holds a run of another recipe: training.learning_rate: 0.01 there, 0.5 here"
    refused(execute(command), said, "--output_dir", "--resume never")
    assert contents(run.folder) == before


TEXTS = {
    "no file": (None, "data.sources.0.path: {folder}/text.txt: no such file or folder"),
    "not UTF-8": (b"first line\ncaf\xe9\n", "line 2: not UTF-8"),
    "empty corpus": (b"", "the corpus is empty"),
    "too small for one block of validation": (b"one short document", "add text: two blocks need 130 tokens"),
}


@pytest.mark.parametrize("text, message", TEXTS.values(), ids=TEXTS)
def test_text_that_cannot_be_prepared(changed, tmp_path, text, message):
    """data_prep.py: which file and line, or how much text is missing."""
    if text is not None:
        (tmp_path / "text.txt").write_bytes(text)
    sources, tokenizer = [{"path": str(tmp_path / "text.txt")}], {"train_vocab_size": 260}
    recipe, data = changed("data", sources=sources, tokenizer=tokenizer), tmp_path / "data"
    command = [sys.executable, "data_prep.py", "--recipe", recipe, "--data_dir", data, "--json"]
    line = refused(execute(command), message.format(folder=tmp_path))
    assert not data.exists() and (text is not None or line.startswith(f"error: {recipe}: "))
