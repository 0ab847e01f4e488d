"""A recipe over a base: the keys of one file over those of another, checked as one recipe."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pretraining.errors import UserError
from pretraining.recipe import RECIPES, load_recipe
from tests.gear.runs import LLAMA, execute


@pytest.fixture
def variant(tmp_path):
    """A file over `tiny` with these sections, as a path."""

    def write(name: str = "variant.json", base: str = "tiny", **sections) -> str:
        path = tmp_path / name
        path.write_text(json.dumps({"base": base, "description": "A variant.", **sections}))
        return str(path)

    return write


def failing(path: str, overrides=()) -> str:
    """The one line of the error that loading gives."""
    with pytest.raises(UserError) as error:
        load_recipe(path, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_only_what_the_file_says_differs_from_its_base(variant, tmp_path):
    """Lists and objects in a section are replaced whole. The resolved recipe names no base: training from the run's
    recipe.json alone repeats the run, whatever becomes of the base."""
    data = {"dedup": {"exact": False}}
    training = {"learning_rate": 0.001, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}}
    recipe = load_recipe(variant(training=training, optimizer={"name": "muon"}, data=data))
    base = load_recipe("tiny")
    assert recipe.name == "variant" and recipe.description == "A variant."
    assert recipe.training == {**base.training, **training}
    assert recipe.optimizer == replace(base.optimizer, name="muon")
    assert (recipe.model, recipe.budget, recipe.data.sources) == (base.model, base.budget, base.data.sources)
    assert recipe.data.dedup.minhash is None
    resolved = tmp_path / "recipe.json"
    resolved.write_text(json.dumps(recipe.to_dict()))
    assert "base" not in recipe.to_dict() and load_recipe(str(resolved)) == recipe


def test_a_model_with_a_type_is_another_model(variant):
    assert load_recipe(variant(model={"n_layer": 2})).model["n_embd"] == 128
    recipe = load_recipe(variant(model=LLAMA, data={"tokenizer": {"train_vocab_size": 512}}))
    assert "n_embd" not in recipe.model and recipe.model["hidden_size"] == 64


def test_a_base_is_a_name_or_a_path_from_the_file(variant, monkeypatch, tmp_path):
    (tmp_path / "own.json").write_text((RECIPES / "124m.json").read_text())
    monkeypatch.chdir("/")
    assert load_recipe(variant(base="own.json")).model["n_embd"] == 768
    assert load_recipe(variant(base=str(RECIPES / "124m.json"))).model["n_embd"] == 768


def test_set_changes_what_base_and_file_are_together(variant):
    path = variant(training={"learning_rate": 0.001})
    recipe = load_recipe(path, ["training.learning_rate=0.002", "model.n_layer=2"])
    assert (recipe.training.learning_rate, recipe.model["n_layer"]) == (0.002, 2)
    assert "--set base=124m: base: is named in a recipe's file alone" in failing(path, ["base=124m"])


def test_a_mistake_is_reported_with_the_file_that_holds_it(variant, tmp_path):
    """The two together are checked as one recipe."""
    path = variant(training={"learnin_rate": 1})
    assert failing(path).startswith(
        f"{path}: training.learnin_rate: unknown key; did you mean 'training.learning_"
    )
    # values that each file may have alone, and that do not fit each other
    path = variant(data={"sequence_length": 512})
    what = "data.sequence_length: is 512, but the model has 128 positions"
    assert failing(path) == f"{path}: {what}; shorten it, or --set model.n_positions=512"
    base = json.loads((RECIPES / "tiny.json").read_text())
    base["training"]["learnin_rate"] = 1
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(base))
    path = variant(base="broken.json", training={"seed": 1})
    assert failing(path).startswith(f"{broken}: training.learnin_rate: unknown key")


WRONG_BASES = {
    "unknown": ("tinny", "base: tinny: no such recipe; did you mean 'tiny'?"),
    "not there": ("nothing.json", "nothing.json: cannot be read"),
    "a number": (3, "base: is 3 where a string is wanted"),
    "empty": ("", "base: is empty"),
    "itself": ("variant.json", "has a base itself; name that one, or a recipe without"),
}


@pytest.mark.parametrize("base, message", WRONG_BASES.values(), ids=WRONG_BASES)
def test_what_is_no_base_is_refused_in_one_line(variant, base, message):
    assert message in failing(variant(base=base))


def test_plan_and_data_preparation_read_it_too(variant, tmp_path):
    path = variant(model={"n_layer": 2})
    planned = execute(["forked", "0", "train.py", "--recipe", path, "--plan", "--json"])
    assert planned.code == 0, planned.output
    assert json.loads(planned.stdout)["parameters"] < 600_000
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one two three four five " * 400)
    data = {"sources": [{"path": str(text)}], "tokenizer": {"train_vocab_size": 260}}
    path = variant(data=data)
    counted = execute(["python", "data_prep.py", "--recipe", path, "--count", "--json"])
    assert counted.code == 0, counted.output


def test_editors_find_the_schema_of_variants():
    """Every key of a recipe by reference, and none that a variant must repeat."""
    schema = json.loads((RECIPES / "features" / "schema.json").read_text())
    whole = json.loads((RECIPES / "schema.json").read_text())
    assert schema["properties"].keys() == whole["properties"].keys()
    assert schema["required"] == ["base", "description"]
    assert "required" not in schema["properties"]["training"]
    for reference in json.dumps(schema).split('"$ref": "')[1:]:
        path, _, pointer = reference.partition('"')[0].partition("#/")
        value = json.loads((Path(RECIPES, "features") / path).read_text())
        for part in pointer.split("/"):
            value = value[part]
