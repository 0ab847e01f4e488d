"""The recipe: strict, stated once, over a base or whole, and the same after being written and read again."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from pretraining.data.prepared import note_repeats
from pretraining.ds_config import DS_CONFIGS
from pretraining.errors import UserError
from pretraining.extend import copy_extensions
from pretraining.outside.schema import suggestion
from pretraining.planning.sizes import model_size
from pretraining.recipe import RECIPES as FOLDER
from pretraining.recipe import accumulation_steps, load_recipe, recipe_names, recipe_schema
from pretraining.recipe.data import Dedup
from pretraining.recipe.loading import OTHER_NAMES as NAMES_ELSEWHERE
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.recipe.training import TRAINING_KEYS, Training
from tests.gear.finished_data import refusal
from tests.gear.runs import LLAMA, REPOSITORY, SMALL_RECIPE

RECIPES = recipe_names()


def failing(name="features/gpt2", overrides=(), **arguments):
    """The message of the error that loading gives."""
    return refusal(load_recipe, name, overrides, **arguments)


@pytest.fixture
def edited(tmp_path):
    """`edited(section, key=value)`: a copy of the tiny recipe with keys of one section changed, as a path."""

    def edit(section: str, **values) -> str:
        recipe, path = load_recipe("features/gpt2").to_dict(), tmp_path / "edited.json"
        path.write_text(json.dumps({**recipe, section: {**recipe[section], **values}}))
        return str(path)

    return edit


@pytest.fixture
def variant(tmp_path):
    """A file over `tiny` with these sections, as a path."""

    def write(base: str = "features/gpt2", **sections) -> str:
        path = tmp_path / "variant.json"
        path.write_text(json.dumps({"base": base, "description": "A variant.", **sections}))
        return str(path)

    return write


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "tiny"])
def test_every_shipped_recipe_divides_and_follows_the_common_practice(name):
    """Whole steps, over the GPUs each is meant for. Betas, decay, clipping, dropout 0 and a padded vocabulary, at every
    size; cosine to a tenth, or a fifth of the run for the decay after a stable rate; about 20 tokens a parameter, but
    for the one named. The description states the true number of parameters. `tiny` has what a search found best."""
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.num_steps * recipe.tokens_per_step == recipe.budget.tokens
    for world_size in (1, 2, 4, 8, 16, 32):
        steps = accumulation_steps(recipe, world_size)
        assert steps * world_size * recipe.micro_batch * recipe.sequence_length == recipe.tokens_per_step
    training, model = recipe.training, recipe.model
    assert (training.adam_beta1, training.adam_beta2) == (0.9, 0.95)
    assert (training.weight_decay, training.max_grad_norm) == (0.1, 1.0)
    schedule = training.lr_scheduler_kwargs
    if name == "qk-norm":
        assert training.lr_scheduler_type == "warmup_stable_decay"
        assert schedule["num_decay_steps"] == round(recipe.num_steps / 5)
    else:
        assert (training.lr_scheduler_type, schedule) == ("cosine_with_min_lr", {"min_lr_rate": 0.1})
    assert 0 < training.warmup_steps < recipe.num_steps / 5
    assert model["vocab_size"] % 128 == 0
    assert model["use_cache"] is False
    chances = {key for key in model.with_defaults() if key.endswith(("dropout", "pdrop"))}
    assert not any(model.with_defaults()[key] for key in chances)
    parameters = model_size(model).total
    assert (19.5 < recipe.num_tokens / parameters < 20.5) == (name != "124m")
    assert f"{parameters:,}" in recipe.description


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_written_and_read_again_is_the_same_run_and_the_trainer_takes_it(name, tmp_path):
    """Training from runs/<name>/recipe.json alone repeats the run, its name included. TrainingArguments itself
    takes the keyword arguments verbatim, on a machine without a GPU too."""
    from transformers import TrainingArguments

    recipe = load_recipe(name)
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.to_dict()))
    copy_extensions(recipe.extensions, tmp_path)
    again = load_recipe(str(path))
    assert again.to_dict() == recipe.to_dict() and (recipe.extensions or again == recipe)
    keywords = {**recipe.training, "report_to": "none"}
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **keywords)
    assert arguments.learning_rate == keywords["learning_rate"]


def test_the_defaults_of_training_are_those_of_the_library():
    """A keyword that is left out reads as TrainingArguments takes it, type and value."""
    from transformers import TrainingArguments

    own = {each.name: each.default for each in fields(TrainingArguments)}
    found = {name: getattr(Training(), name) for name in Training.__annotations__}
    assert len(found) > 20 and [repr(own[name]) for name in found] == [repr(each) for each in found.values()]
    assert Training(seed=7).seed == 7 and not hasattr(Training(), "sead")


def test_a_section_written_and_read_again_is_the_same():
    """What the recipe leaves out stays out if it was never filled in: identities of earlier runs go by it."""
    section = Dedup.of({"minhash": {"threshold": 0.9}})
    assert section.to_dict() == {"exact": True, "remove": True, "minhash": {"threshold": 0.9}}
    assert section.minhash.ngram == 5 and Dedup.of(section.to_dict()) == section


def test_an_unknown_recipe_lists_those_there_are():
    message = failing("124")
    assert set(RECIPES) >= {"tiny", "124m", "1.5b", "7b", "30b", "65b"}
    assert "did you mean '124m'?" in message and all(name in message for name in RECIPES)
    assert "no such recipe" in failing("schema")
    assert "did you mean 'modern/1.5b'?" in failing("modern-1.5b")
    assert "did you mean 'features/muon'?" in failing("features/muo")


def test_names_of_other_frameworks_lead_to_our_keys():
    """Every key of the table is one of ours, and every name in it is answered with the key."""
    schema = recipe_schema()
    for key, names in NAMES_ELSEWHERE.items():
        assert suggestion(key, schema) is None, key
        for name in names.split():
            assert f"'{key}'" in suggestion(name, schema), name


def test_unknown_keys_in_a_file_are_named_with_it_and_all_at_once(edited):
    """Who pastes a section mends it once; of thousands the first few are named."""
    path = edited("model", n_emb=5)
    assert failing(path).startswith(f"{path}: model.n_emb: unknown key; did you mean 'model.n_embd'?")
    text = failing(edited("model", n_emb=5, is_llama_config=True))
    assert "model: 2 unknown keys: 'n_emb' (did you mean 'model.n_embd'?), 'is_llama_config'" in text
    text = failing(edited("data", **{f"k{number}": 1 for number in range(20_000)}))
    assert "data: 20000 unknown keys: 'k0', " in text and text.endswith("'k9', and 19990 more")


SAVED = {"_name_or_path": "x", "architectures": ["X"], "torch_dtype": "bfloat16"}
SAVED["transformers_version"] = "4.40.1"
ROPE = {"rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
ROPE["original_max_position_embeddings"] = 32
PUBLISHED = {
    "smollm2": {**LLAMA, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 100000},
    "llama3.2": {**LLAMA, "rope_theta": 5e5, "rope_scaling": ROPE},
    "older than rope_type": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "olmo2": {**LLAMA, "model_type": "olmo2", "rope_theta": 5e5},
    "gpt2": {**SMALL_RECIPE["model"], "summary_use_proj": True, "num_labels": 2, "do_sample": True},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name, tmp_path, capsys):
    """Pasted into `model`: keys of today, the same configuration, and a note of what was left out or renamed."""
    from transformers import AutoConfig

    published, path = {**PUBLISHED[name], **SAVED}, tmp_path / "r.json"
    settings = ["data.sequence_length=64", "data.tokenizer.train_vocab_size=512"]
    values = load_recipe("features/gpt2", settings).to_dict()
    path.write_text(json.dumps({**values, "model": published}))
    recipe, _ = load_recipe_and_ds_config(str(path))
    assert "note: " in capsys.readouterr().err
    copies = (json.loads(json.dumps(each)) for each in (published, recipe.model))
    known = [AutoConfig.for_model(**each).to_dict() for each in copies]
    for config in known:
        for key in (*SAVED, "dtype"):
            config.pop(key, None)
        (config.get("rope_parameters") or {}).pop("type", None)
    assert known[0] == known[1]
    # written and read again, nothing is left to say
    path.write_text(json.dumps(recipe.to_dict()))
    assert not load_recipe(str(path)).notes


def test_the_plan_says_how_often_prepared_data_is_read(workshop, capsys):
    """A budget of more tokens than there are is no surprise after weeks."""
    for tokens, said in ((5120, False), (512 * 10**6, True)):
        recipe = load_recipe(str(workshop.recipe), [f"budget.tokens={tokens}"])
        note_repeats(recipe, workshop.data)
        there = workshop.summary["train"]["tokens"]
        note = f"has {there:,} training tokens, which the budget of 512,000,000 reads"
        assert (note in capsys.readouterr().err) == said
    capped = load_recipe(str(workshop.recipe), ["budget.tokens=51200", "data.sources.0.max_tokens=5000"])
    note_repeats(capped, workshop.data)  # of what the run reads, not of what is there
    told = r"gives this run \d,\d{3} training tokens, which the budget of 51,200 reads \d"
    assert re.search(told, capsys.readouterr().err) and there > 51200


def test_a_key_of_a_published_config_that_means_something_is_not_left_out(edited):
    """Only what shapes no model goes without an answer; and what shapes it must be there."""
    assert "model.vocab_size: is missing" in failing(overrides=['model={"model_type": "gpt2"}'])
    assert "model.pretraining_tp: unknown key" in failing(edited("model", pretraining_tp=2))
    assert "model.rope_theta: unknown key" in failing("7b", ["model.rope_theta=5e5"])


@pytest.mark.parametrize("value", ["x" * 100_000, "x " * 50_000])
def test_a_long_value_is_not_repeated_whole(value):
    """One line is read, the file and the key in it too."""
    text = failing(overrides=[f"evaluation.metric={value}"])
    assert len(text) < 4000 and text.startswith("recipes/features/gpt2.json with --set evaluation.metric=x")
    assert ": evaluation.metric: is 'x" in text and "there are loss, perplexity" in text


OTHER_NAMES = {
    ("7b", "n_layer"): "num_hidden_layers",
    ("7b", "n_positions"): "max_position_embeddings",
    ("features/gpt2", "num_hidden_layers"): "n_layer",
    ("features/gpt2", "intermediate_size"): "n_inner",
}
"""(recipe, key of another family of models) -> what its own family calls the same."""


@pytest.mark.parametrize("recipe, key", OTHER_NAMES)
def test_a_key_of_another_family_suggests_this_one_s(recipe, key, variant):
    """No spelling is near: `n_layer` of a Llama is `num_hidden_layers`; from --set and from a file."""
    said = f"model.{key}: unknown key; did you mean 'model.{OTHER_NAMES[recipe, key]}'?"
    assert said in failing(recipe, [f"model.{key}=8"]) and said in failing(variant(recipe, model={key: 8}))


@pytest.mark.parametrize("key", TRAINING_KEYS)
def test_a_key_that_another_place_owns_is_refused_with_its_owner(key, edited):
    """No number in two places: the message says who owns it, from the file and from --set."""
    said = f"training.{key}: does not belong here: {TRAINING_KEYS[key]}"
    assert said in failing(edited("training", **{key: 1}))
    assert said in failing(overrides=[f"training.{key}=1"])


def test_owners_of_the_promises_are_all_refused():
    """A guard for the list itself: without these the curve or the checkpoints would not be the recipe's."""
    owned = """max_steps num_train_epochs gradient_accumulation_steps output_dir deepspeed resume_from_checkpoint
        save_total_limit train_sampling_strategy accelerator_config average_tokens_across_devices ignore_data_skip
        logging_nan_inf_filter hub_token"""
    assert set(TRAINING_KEYS) >= set(owned.split())


def test_set_changes_numbers_strings_lists_and_whole_objects():
    """Names of any language are names."""
    overrides = [
        "training.learning_rate=2e-3",
        "evaluation.prompt=class ",
        "data.sources.0={'path': 'x'}".replace("'", '"'),
        "data.sources.1.path=more/*.txt",
        'training.lr_scheduler_kwargs={"min_lr_rate": 0.05}',
        "budget.tokens=2048e1",
        "name=essai déjà 2.1",
        "data.name=данные",
    ]
    recipe = load_recipe("features/gpt2", overrides)
    assert recipe.training.learning_rate == 2e-3
    assert recipe.evaluation.prompt == "class "
    assert [source.path for source in recipe.data.sources] == ["x", "more/*.txt"]
    assert recipe.training.lr_scheduler_kwargs == {"min_lr_rate": 0.05}
    assert (recipe.num_steps, recipe.name, recipe.data.name) == (10, "essai déjà 2.1", "данные")
    # `--set model={...}` names the type: later texts are judged by it, not by the type in the file
    model = json.dumps({**LLAMA, "vocab_size": 1024})
    assert load_recipe("features/gpt2", [f"model={model}", "model.hidden_size=32"]).model.hidden_size == 32


def test_deepspeed_of_the_command_line_wins_and_one_ds_config_has_one_name(monkeypatch, tmp_path):
    """accelerate's config files give a path: of a file of ds_configs/ it is the name, wherever the process stands."""
    monkeypatch.chdir(REPOSITORY)
    (own := tmp_path / "zero3.json").write_bytes((DS_CONFIGS / "zero3.json").read_bytes())
    names = {"zero3": "zero3", "null": None, None: "zero2", str(own): str(own)}
    names |= dict.fromkeys((f"{DS_CONFIGS}/zero3.json", "ds_configs/zero3.json"), "zero3")
    for given, name in names.items():
        assert load_recipe("features/gpt2", deepspeed=given).deepspeed == name


def test_ranks_that_do_not_divide_a_step_are_refused_with_what_does():
    """Tokens per step are constant at every world size: the nearest that divide, or the largest micro-batch.

    The message names the options over the file, which may have given the value.
    """
    larger = load_recipe("features/gpt2", ["budget.tokens_per_step=8192", "budget.tokens=81920"])
    over = "gpt2.json with --set budget.tokens_per_step=8192 budget.tokens=81920"
    said = f"{over}: budget.tokens_per_step: 8192 is not a multiple of 3072 = 3 ranks.*are 6144 and 9216"
    with pytest.raises(UserError, match=said):
        accumulation_steps(larger, 3)
    with pytest.raises(UserError, match=r"training.per_device_train_batch_size: is 8.*; 2 does"):
        accumulation_steps(load_recipe("features/gpt2"), 8)


def test_a_limit_does_not_hide_a_step_of_less_than_a_sequence():
    """Bad input: smaller steps are looked for among the whole sequences of the full one."""
    message = failing(overrides=["budget.tokens_per_step=8"], limit_tokens=100000)
    assert "budget.tokens_per_step: 8 is not a multiple of the sequence length" in message


def test_only_what_the_file_says_differs_from_its_base(variant, tmp_path):
    """Lists and objects in a section are replaced whole. The resolved recipe names no base: training from the run's
    recipe.json alone repeats the run, whatever becomes of the base."""
    data = {"dedup": {"exact": False}}
    training = {"learning_rate": 0.001, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}}
    recipe = load_recipe(variant(training=training, optimizer={"name": "muon"}, data=data))
    base = load_recipe("features/gpt2")
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
    (tmp_path / "own.json").write_text((FOLDER / "124m.json").read_text())
    monkeypatch.chdir("/")
    assert load_recipe(variant(base="own.json")).model["n_embd"] == 768
    assert load_recipe(variant(base=str(FOLDER / "124m.json"))).model["n_embd"] == 768


def test_set_changes_what_base_and_file_are_together(variant):
    path = variant(training={"learning_rate": 0.001})
    recipe = load_recipe(path, ["training.learning_rate=0.002", "model.n_layer=2"])
    assert (recipe.training.learning_rate, recipe.model["n_layer"]) == (0.002, 2)
    assert "--set base=124m: base: is named in a recipe's file alone" in failing(path, ["base=124m"])


def test_a_mistake_is_reported_with_the_file_that_holds_it(variant, tmp_path):
    """The two together are checked as one recipe."""
    path = variant(training={"learnin_rate": 1})
    said = "training.learnin_rate: unknown key; did you mean 'training.learning_"
    assert failing(path).startswith(f"{path}: {said}")
    # values that each file may have alone, and that do not fit each other
    path = variant(data={"sequence_length": 512})
    what = "data.sequence_length: is 512, but the model has 128 positions"
    assert failing(path) == f"{path}: {what}; shorten it, or --set model.n_positions=512"
    base = json.loads((FOLDER / "features" / "gpt2.json").read_text())
    base["training"]["learnin_rate"] = 1
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(base))
    path = variant(base="broken.json", training={"seed": 1})
    assert failing(path).startswith(f"{broken}: training.learnin_rate: unknown key")


WRONG_BASES = {
    "unknown": ("tinny", "base: tinny: no such recipe; did you mean 'tiny'?"),
    "not there": ("nothing.json", "variant.json: base: {folder}/nothing.json: cannot be read"),
    "a number": (3, "base: is 3 where a string is wanted"),
    "empty": ("", "base: is empty"),
    "itself": ("variant.json", "has a base itself; name that one, or a recipe without"),
}


@pytest.mark.parametrize("base, message", WRONG_BASES.values(), ids=WRONG_BASES)
def test_what_is_no_base_is_refused_in_one_line(variant, base, message):
    path = variant(base=base)
    assert message.format(folder=Path(path).parent) in failing(path)


def test_editors_find_the_schema_of_variants():
    """Every key of a recipe by reference, and none that a variant must repeat."""
    schema = json.loads((FOLDER / "features" / "schema.json").read_text())
    whole = json.loads((FOLDER / "schema.json").read_text())
    assert schema["properties"].keys() == whole["properties"].keys()
    assert schema["required"] == ["base", "description"]
    assert "required" not in schema["properties"]["training"]
    for reference in json.dumps(schema).split('"$ref": "')[1:]:
        path, _, pointer = reference.partition('"')[0].partition("#/")
        value = json.loads((Path(FOLDER, "features") / path).read_text())
        for part in pointer.split("/"):
            value = value[part]
