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


def test_the_six_sizes_are_shipped():
    assert set(RECIPES) >= {"tiny", "124m", "1.5b", "7b", "30b", "65b"}


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_loads_and_divides(name):
    """Steps are whole, and the step divides over the GPUs each recipe is meant for."""
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.num_steps * recipe.tokens_per_step == recipe.budget.tokens
    for world_size in (1, 2) if name == "tiny" else (1, 2, 4, 8, 16, 32):
        steps = accumulation_steps(recipe, world_size)
        assert steps * world_size * recipe.micro_batch * recipe.sequence_length == recipe.tokens_per_step


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_follows_the_common_practice(name):
    """Betas, decay, clipping, dropout 0 and a padded vocabulary, at every size; cosine to a tenth, or a fifth of the
    run for the decay after a stable rate."""
    recipe = load_recipe(name)
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
def test_a_recipe_written_and_read_again_is_the_same_run(name, tmp_path):
    """Training from runs/<name>/recipe.json alone repeats the run, its name included."""
    recipe = load_recipe(name)
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.to_dict()))
    assert load_recipe(str(path)) == recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_training_section_is_accepted_by_the_trainer(name, tmp_path):
    """Verbatim keyword arguments: TrainingArguments itself takes them, on a machine without a GPU too."""
    from transformers import TrainingArguments

    keywords = {**load_recipe(name).training, "report_to": "none"}
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
    assert "did you mean '124m'?" in message
    assert all(name in message for name in RECIPES)
    assert "no such recipe" in failing("schema")


WRONG_VALUES = {
    "unknown model key": ("model.n_emb=64", "model.n_emb: unknown key; did you mean 'model.n_embd'?"),
    "unknown training key": ("training.learnin_rate=1", "did you mean 'training.learning_rate'?"),
    "unknown nested key": ("data.tokenizer.train_vocab=9", "did you mean 'data.tokenizer.train_vocab_size'?"),
    "unknown source key": ("data.sources.0.builtins=1", "did you mean 'data.sources.0.builtin'?"),
    "a section's key at the top": (
        "learning_rate=0.1",
        "learning_rate: unknown key; did you mean 'training.learning_rate'?",
    ),
    "initials": ("training.lr=1", "training.lr: unknown key; did you mean 'training.learning_rate'?"),
    "initials alone": ("wd=1", "wd: unknown key; did you mean 'training.weight_decay'?"),
    "part of a name": ("prefetch_factor=4", "did you mean 'training.dataloader_prefetch_factor'?"),
    "another framework's name": ("training.grad_clip=1", "did you mean 'training.max_grad_norm'?"),
    "a name for two": ("betas=1", "did you mean 'training.adam_beta1' or 'training.adam_beta2'?"),
    "short words": ("seq_len=64", "seq_len: unknown key; did you mean 'data.sequence_length'?"),
    "another section's key": ("data.learning_rate=0.1", "did you mean 'training.learning_rate'?"),
    "the model's key": ("n_layer=3", "did you mean 'model.n_layer'?"),
    "a source's key": ("data.weight=1", "did you mean 'data.sources.0.weight'?"),
    "an index in brackets": ("data.sources[0].weight=1", "did you mean 'data.sources.0'?"),
    "a derived key at the top": (
        "max_steps=3",
        "max_steps: does not belong here: derived from budget.tokens",
    ),
    "unknown section": ("buget.tokens=5", "buget: unknown key; did you mean 'budget'?"),
    "removed training key": (
        "training.warmup_ratio=0.1",
        "training.warmup_ratio: does not belong here: its name is warmup_steps now, and below 1 it is a share",
    ),
    "another model's key": ("model.hidden_act=silu", "model.hidden_act: unknown key"),
    "unknown model type": ("model.model_type=gpt3", "did you mean 'gptj', 'gpt2' or 'gpt-sw3'?"),
    "number as string": ('model.n_embd="512"', 'model.n_embd: is the string "512" where an integer'),
    "float as string": ('training.learning_rate="6e-4"', "write 6e-4 without quotes"),
    "wrong type": ("training.bf16=1", "training.bf16: is 1 where true or false is wanted"),
    "wrong choice": ("training.lr_scheduler_type=cosin", "did you mean 'cosine'?"),
    "a name no folder can have": (f"data.name={'n' * 240}", "has 240 bytes; it must have at most 200"),
    "beyond any model": ("model.n_layer=1000000000", "model.n_layer: is 1000000000; it must be at most 2000"),
    "beyond any budget": ("budget.tokens=1e200", "it must be at most 1000000000000000000"),
    "negative": ("budget.tokens=-8192", "it must be at least 1"),
    "share above one": ("data.validation_share=1.5", "it must be less than 1"),
    "two kinds of source": ("data.sources.0.path=x.txt", "needs exactly one of builtin, path, dataset"),
    "index beyond the list": ("data.sources.3.path=x", "data.sources is a list of 1"),
    "below a number": ("budget.tokens.x=1", "budget.tokens is not an object"),
    "no value": ("model.n_embd", "write --set section.key=value"),
    "keep none": ("checkpoints.keep_last=0", "it must be at least 1"),
    "hang at once": (
        "monitors.hang_minutes=1e-8",
        "monitors.hang_minutes: is 1e-08; it must be at least 0.25",
    ),
    "hang beyond any clock": ("monitors.hang_minutes=1e300", "it must be at most 43200"),
    "report at every moment": ("report.every_seconds=1e-9", "it must be at least 0.1"),
    "every step a spike": ("monitors.spikes.score=1e-3", "it must be at least 1"),
    "window beyond memory": ("monitors.spikes.window=1000000000000", "it must be at most 65536"),
    "healing that explodes": ("monitors.spikes.lr_factor=1e3", "it must be at most 1"),
    "head count": ("model.n_head=5", "model.n_head: is 5, which does not divide model.n_embd 128"),
    "context too long": ("data.sequence_length=512", "is 512, but the model has 128 positions"),
    "less than a step": (
        "budget.tokens=1000",
        "1000 is not a multiple of budget.tokens_per_step 2048; the nearest is",
    ),
    "tokens per step": ("budget.tokens_per_step=1000", "the nearest are 896 and 1024"),
    "a special token twice": (
        'data.tokenizer={"train_vocab_size": 300, "special_tokens": ["<a>", "<a>"]}',
        "data.tokenizer.special_tokens.1: is '<a>', which is there already",
    ),
    "no room for special tokens": (
        'data.tokenizer={"train_vocab_size": 257, "special_tokens": ["<a>"]}',
        "256 bytes and 2 special tokens need 258",
    ),
    "tokenizer larger than the model": ("data.tokenizer.train_vocab_size=4096", "more than model.vocab_size"),
}


@pytest.mark.parametrize("override, message", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_each_wrong_value_is_one_line_with_the_remedy(override, message):
    """Strict recipe: file or option, dotted key, what is wrong, nearest valid."""
    text = failing(overrides=[override])
    assert message in text
    assert f"--set {override}" in text


def test_names_of_other_frameworks_lead_to_our_keys():
    """Every key of the table is one of ours, and every name in it is answered with the key."""
    schema = recipe_schema()
    for key, names in NAMES_ELSEWHERE.items():
        assert suggestion(key, schema) is None, key
        for name in names.split():
            assert f"'{key}'" in suggestion(name, schema), name


def test_a_mistake_in_the_file_names_file_and_key(edited):
    path = edited("model", n_emb=5)
    assert failing(path).startswith(f"{path}: model.n_emb: unknown key; did you mean 'model.n_embd'?")


def test_all_unknown_keys_are_named_at_once(edited):
    """Who pastes a section mends it once; of thousands the first few are named."""
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
    known = [
        AutoConfig.for_model(**json.loads(json.dumps(each))).to_dict() for each in (published, recipe.model)
    ]
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
    """Only what shapes no model goes without an answer."""
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


def test_a_missing_shape_key_is_named(tmp_path):
    recipe = load_recipe("tiny").to_dict()
    del recipe["model"]["vocab_size"]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(recipe))
    assert "model.vocab_size: is missing" in failing(str(path))


@pytest.mark.parametrize("key", TRAINING_KEYS)
def test_a_key_that_another_place_owns_is_refused_with_its_owner(key, edited):
    """No number in two places: the message says who owns it, from the file and from --set."""
    assert f"training.{key}: does not belong here: {TRAINING_KEYS[key]}" in failing(
        edited("training", **{key: 1})
    )
    assert f"does not belong here: {TRAINING_KEYS[key]}" in failing(overrides=[f"training.{key}=1"])


def test_owners_of_the_promises_are_all_refused():
    """A guard for the list itself: without these the curve or the checkpoints would not be the recipe's."""
    assert set(TRAINING_KEYS) >= {
        "max_steps",
        "num_train_epochs",
        "gradient_accumulation_steps",
        "output_dir",
        "deepspeed",
        "resume_from_checkpoint",
        "save_total_limit",
        "train_sampling_strategy",
        "accelerator_config",
        "average_tokens_across_devices",
        "ignore_data_skip",
        "logging_nan_inf_filter",
        "hub_token",
    }


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


def test_a_key_of_a_model_that_an_earlier_text_has_set():
    """`--set model={...}` names the type: later texts are judged by it, not by the type in the file."""
    recipe = load_recipe(
        "tiny", [f"model={json.dumps({**LLAMA, 'vocab_size': 1024})}", "model.hidden_size=32"]
    )
    assert recipe.model.hidden_size == 32


def test_deepspeed_of_the_command_line_wins():
    assert load_recipe("tiny", deepspeed="zero3").deepspeed == "zero3"
    assert load_recipe("tiny", deepspeed="null").deepspeed is None
    assert load_recipe("tiny").deepspeed == "zero2"


def test_one_ds_config_has_one_name(monkeypatch, tmp_path):
    """accelerate's config files give a path: of a file of ds_configs/ it is the name, wherever the process stands."""
    assert load_recipe("tiny", deepspeed=str(DS_CONFIGS / "zero3.json")).deepspeed == "zero3"
    monkeypatch.chdir(REPOSITORY)
    assert load_recipe("tiny", deepspeed="ds_configs/zero3.json").deepspeed == "zero3"
    (tmp_path / "zero3.json").write_bytes((DS_CONFIGS / "zero3.json").read_bytes())
    assert load_recipe("tiny", deepspeed=f"{tmp_path}/zero3.json").deepspeed == f"{tmp_path}/zero3.json"


def test_a_step_that_ranks_do_not_divide_names_the_nearest_that_they_do():
    """Tokens per step are constant at every world size, so a world size that does not divide is refused."""
    with pytest.raises(UserError) as error:
        larger_step = ["budget.tokens_per_step=8192", "budget.tokens=81920"]
        accumulation_steps(load_recipe("tiny", larger_step), 3)
    message = str(error.value)
    assert "recipes/tiny.json: budget.tokens_per_step: 8192 is not a multiple of 3072 = 3 ranks" in message
    assert "the nearest are 6144 and 9216" in message


def test_ranks_that_need_a_smaller_micro_batch_are_told_the_largest():
    """Eight ranks share the sixteen sequences of a step: two each, not eight."""
    with pytest.raises(UserError) as error:
        accumulation_steps(load_recipe("tiny"), 8)
    assert "training.per_device_train_batch_size: is 8" in str(error.value) and "; 2 does" in str(error.value)


FAIL_LATE = {
    "training.seed=-1": "training.seed: is -1; it must be at least 0",
    "training.data_seed=99999999999": "it must be at most 4294967295",
    "training.save_strategy=best": 'not one of "no", "steps", "epoch"',
    "training.learning_rate=1e400": "1e400 is too large for a number",
    f"budget.tokens={'9' * 5000}": "is too large for a number",
    "training.report_to=wandbb": "did you mean 'wandb'",
    "training.report_to=tensorboard,trackio": '; write it as a list: ["tensorboard", "trackio"]',
    "evaluation.tasks=arc_easy, piqa": '; write it as a list: ["arc_easy", "piqa"]',
    'training.report_to=["tensorboard", "wandbb"]': "training.report_to.1: is the string",
    "data.name=": 'data.name: is ""',
    "data.name=../other": 'data.name: is "../other"; it must be the name of one folder',
    "data.name=.hidden": "data.name",
    "data.name=a\\\\b": "data.name",
    "name=a/b": 'name: is "a/b"; it must be the name of one folder',
    "name=..": 'name: is ".."',
}


@pytest.mark.parametrize("override, message", FAIL_LATE.items(), ids=lambda text: text[:40])
def test_what_would_fail_later_is_refused_at_once(override, message):
    """Values that a library refuses only in training, and names that lead out of runs/ or data/."""
    assert message in failing(overrides=[override])


def shape(**keys) -> str:
    return f"model={json.dumps({**LLAMA, **keys})}"


NOT_TOGETHER = {
    ("evaluation.metric=los",): "did you mean 'loss'",
    ("evaluation.metric=python_stdlib_loss",): "with a single source that is 'loss'",
    ("evaluation.metric=train/loss",): "no validation of this recipe measures; there are loss, perplexity",
    ("evaluation.metric=arc/acc",): "evaluation.metric: is 'arc/acc', but nothing scores it",
    (
        "evaluation.patience=2",
        "training.eval_strategy=no",
    ): "evaluation.patience: is 2, but nothing is validated",
    ("evaluation.task_steps=300",): "evaluation.task_steps: is 300, no multiple of training.eval_steps 250",
    (
        'evaluation.tasks=["arc"]',
        "evaluation.metric=arc/acc",
        "evaluation.task_steps=500",
    ): "arc/acc is wanted at each validation",
    ("evaluation.prompt=3",): 'write "3" with quotes',
    ("training.bf16=true", "training.fp16=true"): "choose one",
    (
        shape(num_key_value_heads=3),
    ): "num_key_value_heads: is 3, which does not divide model.num_attention_heads 4",
    (shape(model_type="mixtral", num_local_experts=4, num_experts_per_tok=7),): "is 7, more than "
    "model.num_local_experts 4",
    (
        shape(model_type="deepseek_v3", n_routed_experts=10, n_group=4),
    ): "model.n_group: is 4, which does not divide model.n_routed_experts 10",
}


@pytest.mark.parametrize("overrides, message", NOT_TOGETHER.items(), ids=map(" ".join, NOT_TOGETHER))
def test_values_that_do_not_fit_each_other_are_refused(overrides, message):
    """Early stopping and the best checkpoints need their metric at every validation; sizes divide each other."""
    assert message in failing(overrides=list(overrides))


def test_a_limit_does_not_hide_a_step_of_less_than_a_sequence():
    """Bad input: smaller steps are looked for among the whole sequences of the full one."""
    message = failing(overrides=["budget.tokens_per_step=8"], limit_tokens=100000)
    assert "budget.tokens_per_step: 8 is not a multiple of the sequence length" in message


def test_names_of_any_language_are_names():
    assert load_recipe("tiny", ["name=essai déjà 2.1", "data.name=данные"]).name == "essai déjà 2.1"
