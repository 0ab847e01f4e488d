"""The recipe: strict, stated once, and the same after being written and read again."""

import json

import pytest

from pretraining.data.prepared import note_repeats
from pretraining.ds_config import DS_CONFIGS
from pretraining.errors import UserError
from pretraining.recipe import accumulation_steps, load_recipe, recipe_names, recipe_schema
from pretraining.recipe.data import Dedup
from pretraining.recipe.loading import OTHER_NAMES as NAMES_ELSEWHERE
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.recipe.training import TRAINING_KEYS, Keyword, Training
from pretraining.schema import REPOSITORY, suggestion
from tests.gear.runs import LLAMA, SMALL_RECIPE

RECIPES = recipe_names()


def failing(name="tiny", overrides=(), **arguments):
    """The message of the error that loading gives."""
    with pytest.raises(UserError) as error:
        load_recipe(name, overrides, **arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def edited(tmp_path):
    """A copy of the tiny recipe with one section's keys changed, as a path."""

    def edit(section, **values):
        recipe = load_recipe("tiny").to_dict()
        recipe[section] = {**recipe[section], **values}
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(recipe))
        return str(path)

    return edit


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_divides_and_follows_the_common_practice(name):
    """Whole steps, over the GPUs each is meant for. Betas, decay, clipping, dropout 0 and a padded vocabulary, at every
    size; cosine to a tenth, or a fifth of the run for the decay after a stable rate."""
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.num_steps * recipe.tokens_per_step == recipe.budget.tokens
    for world_size in (1, 2) if name == "tiny" else (1, 2, 4, 8, 16, 32):
        steps = accumulation_steps(recipe, world_size)
        assert steps * world_size * recipe.micro_batch * recipe.sequence_length == recipe.tokens_per_step
    training, model = recipe.training, recipe.model
    assert (training.adam_beta1, training.adam_beta2) == (0.9, 0.95)
    assert (training.weight_decay, training.max_grad_norm) == (0.1, 1.0)
    schedule = training.lr_scheduler_kwargs
    if training.lr_scheduler_type == "warmup_stable_decay":
        assert schedule["num_decay_steps"] == round(recipe.num_steps / 5)
    else:
        assert schedule == {"min_lr_rate": 0.1}
    assert 0 < training.warmup_steps < recipe.num_steps / 5
    assert model["vocab_size"] % 128 == 0
    assert model["use_cache"] is False
    if model["model_type"] == "gpt2":
        assert [model[f"{part}_pdrop"] for part in ("resid", "embd", "attn")] == [0, 0, 0]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_written_and_read_again_is_the_same_run_and_the_trainer_takes_it(name, tmp_path):
    """Training from runs/<name>/recipe.json alone repeats the run, its name included. TrainingArguments itself
    takes the keyword arguments verbatim, on a machine without a GPU too."""
    from transformers import TrainingArguments

    recipe = load_recipe(name)
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.to_dict()))
    assert load_recipe(str(path)) == recipe
    keywords = {**recipe.training, "report_to": "none"}
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **keywords)
    assert arguments.learning_rate == keywords["learning_rate"]


def test_the_defaults_of_training_are_those_of_the_library():
    """A keyword that is left out reads as TrainingArguments takes it: recipes/schema.json holds its defaults."""
    properties = recipe_schema()["properties"]["training"]["properties"]
    keywords = {name: each for name, each in vars(Training).items() if isinstance(each, Keyword)}
    assert {name: each.default for name, each in keywords.items()} == {
        name: properties[name]["default"] for name in keywords
    }


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


SAVED = {
    "_name_or_path": "x",
    "architectures": ["X"],
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
}
PUBLISHED = {
    "smollm2": {**LLAMA, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 100000},
    "llama3.2": {
        **LLAMA,
        "rope_theta": 5e5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
    },
    "older than rope_type": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "olmo2": {**LLAMA, "model_type": "olmo2", "rope_theta": 5e5},
    "gpt2": {**SMALL_RECIPE["model"], "summary_use_proj": True, "num_labels": 2, "do_sample": True},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name, tmp_path, capsys):
    """Pasted into `model`: keys of today, the same configuration, and a note of what was left out or renamed."""
    from transformers import AutoConfig

    published, path = {**PUBLISHED[name], **SAVED}, tmp_path / "r.json"
    values = load_recipe("tiny", ["data.sequence_length=64", "data.tokenizer.train_vocab_size=512"]).to_dict()
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


def test_a_key_of_a_published_config_that_means_something_is_not_left_out(edited):
    """Only what shapes no model goes without an answer; and what shapes it must be there."""
    assert "model.vocab_size: is missing" in failing(overrides=['model={"model_type": "gpt2"}'])
    assert "model.pretraining_tp: unknown key" in failing(edited("model", pretraining_tp=2))
    assert "model.rope_theta: unknown key" in failing("7b", ["model.rope_theta=5e5"])


@pytest.mark.parametrize("value", ["x" * 100_000, "x " * 50_000])
def test_a_long_value_is_not_repeated_whole(value):
    """One line is read, the file and the key in it too."""
    text = failing(overrides=[f"evaluation.metric={value}"])
    assert len(text) < 4000 and text.startswith("recipes/tiny.json with --set evaluation.metric=x")
    assert ": evaluation.metric: is 'x" in text and "there are loss, perplexity" in text


OTHER_NAMES = {
    ("7b", "n_layer"): "num_hidden_layers",
    ("7b", "n_positions"): "max_position_embeddings",
    ("tiny", "num_hidden_layers"): "n_layer",
    ("tiny", "intermediate_size"): "n_inner",
}
"""(recipe, key of another family of models) -> what its own family calls the same."""


@pytest.mark.parametrize("recipe, key", OTHER_NAMES)
def test_a_key_of_another_family_suggests_this_one_s(recipe, key, tmp_path):
    """No spelling is near: `n_layer` of a Llama is `num_hidden_layers`; from --set and from a file."""
    said = f"model.{key}: unknown key; did you mean 'model.{OTHER_NAMES[recipe, key]}'?"
    assert said in failing(recipe, [f"model.{key}=8"])
    values = load_recipe(recipe).to_dict()
    values["model"][key] = 8
    (tmp_path / "r.json").write_text(json.dumps(values))
    assert said in failing(str(tmp_path / "r.json"))


@pytest.mark.parametrize("key", TRAINING_KEYS)
def test_a_key_that_another_place_owns_is_refused_with_its_owner(key, edited):
    """No number in two places: the message says who owns it, from the file and from --set."""
    assert f"training.{key}: does not belong here: {TRAINING_KEYS[key]}" in failing(
        edited("training", **{key: 1})
    )
    assert f"does not belong here: {TRAINING_KEYS[key]}" in failing(overrides=[f"training.{key}=1"])


def test_owners_of_the_promises_are_all_refused():
    """A guard for the list itself: without these the curve or the checkpoints would not be the recipe's."""
    owned = """max_steps num_train_epochs gradient_accumulation_steps output_dir deepspeed resume_from_checkpoint
        save_total_limit train_sampling_strategy accelerator_config average_tokens_across_devices ignore_data_skip
        logging_nan_inf_filter hub_token"""
    assert set(TRAINING_KEYS) >= set(owned.split())


def test_set_changes_numbers_strings_lists_and_whole_objects():
    overrides = [
        "training.learning_rate=2e-3",
        "evaluation.prompt=class ",
        "data.sources.0={'path': 'x'}".replace("'", '"'),
        "data.sources.1.path=more/*.txt",
        'training.lr_scheduler_kwargs={"min_lr_rate": 0.05}',
        "budget.tokens=2048e1",
        "name=tiny-2",
    ]
    recipe = load_recipe("tiny", overrides)
    assert recipe.training.learning_rate == 2e-3
    assert recipe.evaluation.prompt == "class "
    assert [source.path for source in recipe.data.sources] == ["x", "more/*.txt"]
    assert recipe.training.lr_scheduler_kwargs == {"min_lr_rate": 0.05}
    assert (recipe.num_steps, recipe.name) == (10, "tiny-2")
    # `--set model={...}` names the type: later texts are judged by it, not by the type in the file
    recipe = load_recipe(
        "tiny", [f"model={json.dumps({**LLAMA, 'vocab_size': 1024})}", "model.hidden_size=32"]
    )
    assert recipe.model.hidden_size == 32


def test_deepspeed_of_the_command_line_wins_and_one_ds_config_has_one_name(monkeypatch, tmp_path):
    """accelerate's config files give a path: of a file of ds_configs/ it is the name, wherever the process stands."""
    assert load_recipe("tiny", deepspeed="zero3").deepspeed == "zero3"
    assert load_recipe("tiny", deepspeed="null").deepspeed is None
    assert load_recipe("tiny").deepspeed == "zero2"
    assert load_recipe("tiny", deepspeed=str(DS_CONFIGS / "zero3.json")).deepspeed == "zero3"
    monkeypatch.chdir(REPOSITORY)
    assert load_recipe("tiny", deepspeed="ds_configs/zero3.json").deepspeed == "zero3"
    (tmp_path / "zero3.json").write_bytes((DS_CONFIGS / "zero3.json").read_bytes())
    assert load_recipe("tiny", deepspeed=f"{tmp_path}/zero3.json").deepspeed == f"{tmp_path}/zero3.json"


@pytest.mark.parametrize(
    "settings, ranks, said",
    [
        (
            ["budget.tokens_per_step=8192", "budget.tokens=81920"],
            3,
            [
                "tiny.json: budget.tokens_per_step: 8192 is not a multiple of 3072 = 3 ranks",
                "are 6144 and 9216",
            ],
        ),
        ([], 8, ["training.per_device_train_batch_size: is 8", "; 2 does"]),
    ],
)
def test_ranks_that_do_not_divide_a_step_are_refused_with_what_does(settings, ranks, said):
    """Tokens per step are constant at every world size: the nearest that divide, or the largest micro-batch."""
    with pytest.raises(UserError) as error:
        accumulation_steps(load_recipe("tiny", settings), ranks)
    assert all(words in str(error.value) for words in said)


def test_a_limit_does_not_hide_a_step_of_less_than_a_sequence():
    """Bad input: smaller steps are looked for among the whole sequences of the full one."""
    message = failing(overrides=["budget.tokens_per_step=8"], limit_tokens=100000)
    assert "budget.tokens_per_step: 8 is not a multiple of the sequence length" in message


def test_names_of_any_language_are_names():
    assert load_recipe("tiny", ["name=essai déjà 2.1", "data.name=данные"]).name == "essai déjà 2.1"
