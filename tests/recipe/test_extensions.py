"""Modules of a user's own: each kind works at every stage, is part of the run, and fails in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pretraining.checkpoints.__main__ import main as checkpoints_command
from pretraining.errors import UserError, fault_in_user_code
from pretraining.extend import (
    all_of,
    check_model_keys,
    copy_extensions,
    load_extensions,
    model_extension,
    read_extensions,
)
from pretraining.recipe import RECIPES, load_recipe
from pretraining.recipe.fixed_keys import changed_parts
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.metrics import logged_number
from tests.gear.finished_data import refusal
from tests.gear.runs import REPOSITORY, Run, Workshop, completed, execute
from tests.house.test_layers import HEAVY, modules_after_each

PARTS, MODEL = (RECIPES / "features" / "files" / f"own_{name}.py" for name in ("parts", "model"))
LOGGED_KEYS = REPOSITORY / "tests" / "gear" / "logged_keys.py"
SHAPE = {"model_type": "parallel", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
ALL_KINDS = (
    f"extensions={json.dumps([str(PARTS), str(MODEL), str(LOGGED_KEYS)])}",
    f"model={json.dumps(SHAPE)}",
    "loss.function=focal",
    "loss.arguments.gamma=1.5",
    "training.lr_scheduler_type=power",
    'training.lr_scheduler_kwargs={"exponent": 0.5}',
    "evaluation.metric=accuracy",
)


@pytest.fixture
def written(tmp_path):
    """A function that writes tiny with this module beside it as my_parts.py, and returns the recipe's path."""

    def write(source: str, **values: object) -> Path:
        (tmp_path / "my_parts.py").write_text(source)
        recipe = json.loads((RECIPES / "features" / "gpt2.json").read_text())
        path = tmp_path / "recipe.json"
        path.write_text(json.dumps({**recipe, "extensions": ["my_parts.py"], **values}))
        return path

    return write


@pytest.fixture(scope="module")
def runs(workshop: Workshop) -> tuple[Run, Run]:
    """All kinds in one run: a plain process, and two ranks under ZeRO-3."""
    return workshop.run("null", 1, settings=ALL_KINDS), workshop.run("zero3", 2, settings=ALL_KINDS)


def test_the_curve_is_the_same_at_every_stage_with_parts_of_ones_own(runs):
    plain, sharded = runs
    assert sharded.losses == pytest.approx(plain.losses, abs=5e-6)
    rates = [[row["train/learning_rate"] for row in run.training_rows] for run in runs]
    assert rates[0] == rates[1] and rates[0][3] == pytest.approx(0.01 * (2 / 3) ** 0.5)
    for name in ("eval/loss", "eval/accuracy"):
        there, here = ([row[name] for row in run.validation_rows] for run in runs)
        assert here == pytest.approx(there, abs=1e-5)
    averages = [row["train/loss_average"] for row in plain.training_rows]
    second = 0.9 * plain.losses[0] + 0.1 * plain.losses[1]
    assert averages[:2] == [plain.losses[0], pytest.approx(second)]


def test_the_run_folder_repeats_the_run_and_the_export_holds_the_model(runs, tmp_path, workshop):
    """recipe.json names the copies; the measurement command reads them too."""
    folder = runs[0].folder
    recipe = load_recipe(str(folder / "recipe.json"))
    assert [each.path.parent for each in recipe.extensions] == [folder / "extensions"] * 3
    assert not changed_parts(recipe.to_dict(), json.loads((folder / "recipe.json").read_text()))
    assert (folder / "export" / MODEL.name).read_bytes() == MODEL.read_bytes()
    command = ["forked", "0", "-m", "pretraining.evaluation", str(folder), "--json", "--no-sample"]
    refused = execute(command)
    assert refused.code == 2 and "own_parts.py: is Python code of the run" in refused.stderr
    command.append("--trust_extensions")
    measured = json.loads(completed([*command, "--data_dir", workshop.data]).stdout.splitlines()[-1])
    last = runs[0].validation_rows[-1]
    assert measured["accuracy"] == pytest.approx(last["eval/accuracy"], abs=1e-6)
    assert measured["loss"] == pytest.approx(last["eval/loss"], abs=1e-6)


def test_a_callback_finds_in_the_logs_what_the_page_says(runs):
    """docs/extending.md lists the keys; a name without a group is one of training."""
    lines = (runs[0].folder / "logged_keys.jsonl").read_text().splitlines()
    found = list(map(json.loads, lines))
    training = next(keys for keys in found if "loss" in keys)
    validation = next(keys for keys in found if "eval_loss" in keys)
    text = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
    own = {"train/loss_average", "eval_accuracy"}
    assert not [key for key in {*training, *validation} - own if f"`{key}`" not in text]
    assert "train_runtime" in found[-1] and "`train_runtime`" in text
    assert runs[0].training_rows[0]["train/without_a_group"] == 1.0


def test_the_plan_runs_no_module():
    """It reads the source alone: own_parts.py imports torch."""
    words = ("train.py", "--recipe", "features/extensions", "--plan", "--world_size", "2")
    ((code, modules),) = modules_after_each(words)
    assert code == 0 and not modules & HEAVY


def test_a_changed_file_is_a_changed_recipe(written):
    path = written("X = 1\n")
    before = load_recipe(str(path)).to_dict()
    written("X = 2\n")
    after = load_recipe(str(path)).to_dict()
    (change,) = changed_parts(after, before)
    assert change.key == "extensions" and str(change).startswith("extensions.my_parts.py: ")
    assert change.is_allowed(["extensions"])


def test_copies_are_whole_and_a_copied_recipe_is_the_same(written, tmp_path):
    """A package of several files too; and the copies may be copied onto themselves."""
    recipe = written("X = 1\n")
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("from . import inner\n")
    inner = "from pretraining import extend\n\n@extend.filter\ndef keep(text):\n    return True\n"
    (package / "inner.py").write_text(inner)
    first = read_extensions(["my_parts.py", "./mine"], recipe.parent, "here")
    copy_extensions(first, tmp_path / "run")
    second = read_extensions([each.to_dict() for each in first], tmp_path / "run", "there")
    assert [each.to_dict() for each in second] == [each.to_dict() for each in first]
    copy_extensions(second, tmp_path / "run")
    shutil.rmtree(package)
    third = read_extensions([each.to_dict() for each in second], tmp_path / "run", "there")
    assert all_of(third, "filter")["keep"]("text") is True
    (tmp_path / "run" / "extensions" / "my_parts.py").write_text("X = 3\n")
    with pytest.raises(UserError, match="has changed since its digest was written"):
        read_extensions([each.to_dict() for each in second], tmp_path / "run", "there")


def test_filters_are_found_in_every_worker(written, tmp_path):
    """By their name, in processes that have not read the recipe."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.txt").write_text(f"text {number}: " + f"words of number {number} " * 200)
    source = "from pretraining import extend\n\n@extend.filter\ndef even(text, by):\n"
    source += "    return int(text.split()[1][:-1]) % by == 0\n"
    data = {"name": "even", "sources": [{"path": str(corpus)}], "tokenizer": {"train_vocab_size": 280}}
    data |= {"filters": [{"rule": "callable", "import": "even", "arguments": {"by": 2}}]}
    recipe = written(source, data={**data, "validation_share": 0.2})
    command = ["python", "data_prep.py", "--recipe", recipe, "--data_dir", tmp_path / "data", "--json"]
    answer = json.loads(completed([*command, "--executor", "local", "--workers", "2"]).stdout)
    assert answer["train"]["documents"] + answer["validation"]["documents"] == 20


WRONG = {
    "def broken(:\n": "my_parts.py: line 1: ",
    "import extend\n": "my_parts.py: line 1: ModuleNotFoundError",
    "X = 1\nY = X + none\n": "my_parts.py: line 2: NameError",
    "import sys\n\nsys.exit(3)\n": "my_parts.py: line 3: SystemExit",
}


@pytest.mark.parametrize("source", WRONG)
def test_what_is_wrong_in_a_module_names_file_and_line(written, source):
    path = str(written(source))
    assert WRONG[source] in refusal(lambda: load_extensions(load_recipe(path).extensions))


def test_an_exception_while_training_names_file_and_line(written):
    """As `one_line_errors` reports it; an exception of ours keeps its traceback."""
    source = "from pretraining import extend\n\n@extend.loss\ndef mine(logits, labels):\n    return logits.nothing\n"
    extensions = load_recipe(str(written(source))).extensions
    try:
        all_of(extensions, "loss")["mine"](1, 2)
    except AttributeError as error:
        fault = fault_in_user_code(error)
    assert "my_parts.py: line 5: AttributeError" in str(fault)
    assert fault_in_user_code(ValueError("ours")) is None


METRIC = (
    "from pretraining import extend\n\n@extend.metric\ndef accuracy(logits, labels):\n    return labels\n"
)
CONFIG = "class Config:\n    model_type = 'llama'\n"
REFUSED = {
    "loss": (METRIC, {"loss": {"function": "acuracy"}}, "no extension defines with @extend.loss"),
    "loss.kind": (
        METRIC.replace("metric", "loss"),
        {"loss": {"function": "accuracy", "kind": "fused"}},
        "loss.kind: is fused, but loss.function needs all logits",
    ),
    "loss.arguments": (METRIC, {"loss": {"arguments": {"x": 1}}}, "loss.arguments: is set without function"),
    "metric": (METRIC, {"evaluation": {"metric": "acuracy"}}, "did you mean 'accuracy'?"),
    "type": (CONFIG, {}, "defines the model_type 'llama', which transformers has"),
    "missing": ("", {"extensions": ["other.py"]}, "other.py: cannot be read"),
    "module": ("", {"extensions": ["no.such"]}, "put its folder on PYTHONPATH"),
    "folder": ("", {"extensions": ["./"]}, "is a folder without __init__.py"),
    "twice": (METRIC, {"extensions": ["my_parts.py", "./my_parts.py"]}, "another extension has this name"),
    "key": ("", {"extensions": [{"module": "my_parts.py", "digst": ""}]}, "digst"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_recipe_that_does_not_fit_its_modules_is_refused(written, case):
    source, values, said = REFUSED[case]
    assert said in refusal(load_recipe, str(written(source, **values)))
    assert model_extension("llama") is None  # later recipes of this process do not find what was refused


def test_a_base_names_modules_from_its_own_folder(written, tmp_path):
    written("X = 1\n")
    below = tmp_path / "below"
    below.mkdir()
    (below / "own.json").write_text(json.dumps({"base": "../recipe.json", "description": "another"}))
    (extension,) = load_recipe(str(below / "own.json")).extensions
    assert extension.path.resolve() == (tmp_path / "my_parts.py").resolve()


def test_a_key_that_the_configuration_does_not_have_is_refused():
    """By the class itself, which would take any key without a word."""
    load_extensions(read_extensions([str(MODEL)], Path(), "here"))
    config = type(transformers.AutoConfig.for_model("parallel"))
    check_model_keys(SHAPE, config)
    with pytest.raises(UserError, match="ParallelConfig has no such attribute; did you mean 'hidden_size'"):
        check_model_keys({**SHAPE, "hidden_sise": 3}, config)


def test_a_callback_may_log_tensors_and_numbers_of_numpy():
    values = [torch.tensor(1.5), np.float32(2.5), np.int64(3), "text", None]
    assert [logged_number("train/own", value) for value in values] == [1.5, 2.5, 3, "text", None]
    for value in (torch.ones(2), object()):
        assert "'train/own' is no number" in refusal(logged_number, "train/own", value)


def test_an_export_of_a_strangers_run_runs_its_model_alone_and_only_if_it_is_trusted(
    runs, tmp_path, monkeypatch
):
    """A digest in the same folder is no proof of who wrote the file; a metric is no part of an export."""
    run = RunFolder(shutil.copytree(runs[0].folder, tmp_path / "run"))
    for name in ("own_parts", "own_model"):
        path = run.path / "extensions" / f"{name}.py"
        path.write_text(f"{path.read_text()}\nopen({str(tmp_path / name)!r}, 'w')\n")
    recipe = json.loads(run.recipe.read_text())
    entries = [entry["module"] for entry in recipe["extensions"]]
    run.recipe.write_text(json.dumps({**recipe, "extensions": entries}))
    for verb in ("export", "prune"):
        words = [verb, str(run.path), *(["--to", str(tmp_path / "export")] if verb == "export" else [])]
        words += ["--keep_last", "1", "--demote_to_weights", "--yes"] if verb == "prune" else []
        said = r"own_model.py: is Python code of the run.* add --trust_extensions"
        with pytest.raises(UserError, match=said):
            checkpoints_command(words)
        assert not (tmp_path / "own_model").exists() and (verb == "prune") == (tmp_path / "export").exists()
        checkpoints_command([*words, "--trust_extensions"])
        assert (tmp_path / "own_model").exists() and not (tmp_path / "own_parts").exists()
        (tmp_path / "own_model").unlink()
        monkeypatch.setattr("pretraining.extend._run", {})
    assert (tmp_path / "export" / "model.safetensors").is_file() and list(run.path.glob("weights-*"))
