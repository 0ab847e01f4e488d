"""`model.from`: the shape of a published model from its config.json, on the hub or on this machine."""

import json
import os
from copy import deepcopy
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import UserError
from pretraining.model.given_weights import open_given
from pretraining.planning.sizes import model_size
from pretraining.recipe import Recipe, load_recipe
from pretraining.recipe.fixed_keys import changed_parts
from pretraining.training.ranks import agree_on_shape
from tests.gear.finished_data import refusal
from tests.gear.local_hub import LocalHub
from tests.gear.on_ranks import on_ranks
from tests.gear.quality_texts import PROSE
from tests.gear.runs import REPOSITORY, completed, execute, refused

CONFIGS = REPOSITORY / "tests" / "published"
"""The keys of config.json as these models' authors published them."""
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
PARAMETERS = {  # counted from the authors' own weights
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "olmo2-1b": 1_484_916_736,
    "gemma3-1b": 999_885_952,
    "mixtral-8x7b": 46_702_792_704,
}
NAME, FIRST, SECOND = "HuggingFaceTB/SmolLM2-135M", "1" * 40, "2" * 40
SMALL = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64}
SMALL |= {"num_hidden_layers": 2, "head_dim": 8}
PLAN = ["data.document_masking=false", "data.sequence_length=128"]


def recipe_from(source: object, *settings: str):
    return load_recipe("features/gpt2", [f"model.from={source}", *PLAN, *settings])


def published(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_shape_is_what_transformers_reads_from_the_file(name):
    """Every key of the class is equal, older names of keys included; kernels and special tokens are the run's own."""
    recipe, whole = recipe_from(CONFIGS / f"{name}.json"), published(name)
    theirs = AutoConfig.for_model(**deepcopy(whole))
    theirs = getattr(theirs, "text_config", theirs).to_dict()
    ours = AutoConfig.for_model(**deepcopy(dict(recipe.model))).to_dict()
    assert theirs["model_type"] == ours["model_type"]
    of_the_run = {"use_cache", "output_router_logits", "bos_token_id", "eos_token_id", "pad_token_id"}
    keys = (ours.keys() & theirs.keys()) - of_the_run - {"dtype", "architectures", "transformers_version"}
    assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
    assert not recipe.model.keys() & of_the_run


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_plan_counts_the_published_number_of_parameters(name):
    assert model_size(recipe_from(CONFIGS / f"{name}.json").model).total == PARAMETERS[name]


def test_a_mixture_is_balanced_though_its_config_says_false(tmp_path):
    """config.json has `output_router_logits` false for inference; a recipe that names the shape did not ask for it."""
    recipe = recipe_from(CONFIGS / "mixtral-8x7b.json")
    assert recipe.model.with_defaults()["output_router_logits"] is True


def test_what_was_read_is_kept_and_read_again_without_the_file(tmp_path):
    """The run's recipe.json is complete: a resume needs neither the file nor a network."""
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text((CONFIGS / "smollm2-135m.json").read_text())
    recipe = recipe_from(folder, "model.num_hidden_layers=4")
    kept = tmp_path / "recipe.json"
    kept.write_text(json.dumps(recipe.to_dict()))
    file.unlink()
    again = load_recipe(str(kept))
    assert again.to_dict() == recipe.to_dict() and not again.notes
    section = again.to_dict()["model"]
    assert section["from"] == str(folder) and section["digest"].startswith("sha256:")
    assert section["num_hidden_layers"] == 4 and "revision" not in section
    assert f"model: llama from {folder}, config.json sha256:" in recipe.notes[0]
    assert "is_llama_config, rope_interleaved left out" in recipe.notes[0]


def test_another_config_is_another_run(tmp_path):
    """The digest belongs to the curve, as the keys do; where the file was does not."""
    file, moved = tmp_path / "config.json", tmp_path / "moved.json"
    text = (CONFIGS / "smollm2-135m.json").read_text()
    file.write_text(text)
    moved.write_text(text)
    first = recipe_from(file).to_dict()
    assert not changed_parts(recipe_from(moved).to_dict(), first)
    file.write_text(text.replace("1e-05", "1e-06"))
    changes = [each.key for each in changed_parts(recipe_from(file).to_dict(), first)]
    assert changes == ["model.digest", "model.rms_norm_eps"]


def test_keys_beside_it_replace_those_that_are_read(tmp_path):
    """In the file and by --set, before or behind `model.from`; a variant inherits `from` and not the base's shape."""
    values = json.loads((REPOSITORY / "recipes" / "features" / "gpt2.json").read_text())
    values["model"] = {"from": str(CONFIGS / "smollm2-135m.json"), "num_hidden_layers": 5, "vocab_size": 2048}
    values["data"]["sequence_length"] = 128
    base, variant = tmp_path / "base.json", tmp_path / "variant.json"
    base.write_text(json.dumps(values))
    recipe = load_recipe(str(base), ["model.num_hidden_layers=3"])
    assert (recipe.model["num_hidden_layers"], recipe.model.vocab_size) == (3, 2048)
    other = f"model.from={CONFIGS / 'qwen3-0.6b.json'}"
    for settings in (["model.num_hidden_layers=2", other], [other, "model.num_hidden_layers=2"]):
        recipe = load_recipe(str(base), settings)
        assert recipe.model.model_type == "qwen3"
        assert (recipe.model["num_hidden_layers"], recipe.model.vocab_size) == (2, 2048)
        assert recipe.words[2:] == [word for text in settings for word in ("--set", text)]
    described = {"base": str(base), "description": "A variant."}
    variant.write_text(json.dumps({**described, "model": {"num_hidden_layers": 7}}))
    recipe = load_recipe(str(variant))
    assert (recipe.model.model_type, recipe.model["num_hidden_layers"]) == ("llama", 7)
    variant.write_text(json.dumps({**described, "model": {"from": str(CONFIGS / "qwen3-0.6b.json")}}))
    recipe = load_recipe(str(variant))
    assert (recipe.model["num_hidden_layers"], recipe.model.vocab_size) == (28, 151936)


def test_kernels_and_weights_of_a_strangers_config_are_not_taken(tmp_path):
    """A name with a slash as attention is code of the hub: a file that somebody else wrote cannot have it run."""
    own = {"attn_implementation": "someone/kernel", "initial_weights": "x", "frozen": ["*"], "digest": "y"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**published("smollm2-135m"), **own, "auto_map": {"AutoConfig": "a.B"}}))
    recipe = recipe_from(file)
    assert "attn_implementation" not in recipe.model and "auto_map" not in recipe.model
    assert recipe.weights.initial_weights is None and recipe.weights.frozen is None


def config(tmp_path: Path, **changes: object) -> Path:
    file = tmp_path / "config.json"
    values = {**published("smollm2-135m"), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return file


WIDE = 'hidden_size: is the string "wide" where an integer is wanted'
MISTAKES = {
    "no type": ({"model_type": ...}, [], "model_type: is missing; write it beside from"),
    "refused": ({"model_type": "mamba2"}, [], "is 'mamba2', which does not train here: "),
    "unknown": ({"model_type": "lama"}, [], "is 'lama', which is no model type; did you mean 'llama'"),
    "type of another kind": ({"model_type": ["llama"]}, [], "which is no model type"),
    "positions of another kind": ({"rope_scaling": "linear"}, [], "transformers cannot read it ("),
    "wrong value": ({"hidden_size": "wide"}, [], WIDE),
    "another type": ({}, ["model.model_type=gpt2"], "model.model_type"),
    "unknown key beside": ({}, ["model.hidden_sise=8"], "model.hidden_sise: unknown key; did you mean"),
    "another type's key": ({}, ["model.n_layer=8"], "did you mean 'model.num_hidden_layers'"),
    "revision of a file": ({}, ["model.revision=main"], "model.revision: is main, and "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_one_line_that_names_the_file(name, tmp_path):
    changes, settings, said = MISTAKES[name]
    text = refusal(recipe_from, config(tmp_path, **changes), *settings)
    assert said in text
    if changes:
        assert f"model.from: the config.json of {tmp_path}" in text


def test_a_path_without_a_config_and_a_name_that_is_none(tmp_path):
    for source, said in (
        (tmp_path, "no config.json there"),
        ("./nowhere", "no config.json there"),
        ("a name", "neither a name on the hub"),
        ("~no-such-user/model", "is no path"),
        ("a" * 5000, "is no path"),
    ):
        with pytest.raises(UserError, match=said):
            recipe_from(source)
    with pytest.raises(UserError, match=r"model\.revision: is set without from"):
        load_recipe("features/gpt2", ["model.revision=main"])
    with pytest.raises(UserError, match=r"cannot be read|not JSON|line 1"):
        (tmp_path / "config.json").write_text("{")
        recipe_from(tmp_path)


@pytest.fixture
def hub():
    """A hub with one model of two commits, which differ in the number of layers."""
    with LocalHub() as hub:
        first = {**published("smollm2-135m"), "num_hidden_layers": 3}
        second = {**first, "num_hidden_layers": 4}
        commits = {FIRST: first, SECOND: second}
        hub.models[NAME] = {
            key: {"config.json": json.dumps(each).encode(), "model.safetensors": b"x" * 100}
            for key, each in commits.items()
        }
        hub.models["someone/empty"] = {FIRST: {"README.md": b"nothing"}}
        hub.gated.add("someone/gated")
        yield hub


def planned(hub, cache: Path, *settings: str, **environment: str):
    words = ["train.py", "--recipe", "features/gpt2", "--plan", "--json", *(f"--set={each}" for each in PLAN)]
    words = [*words, *(f"--set={each}" for each in settings)]
    return execute(["python", *words], **{**hub.environment, "HF_HOME": str(cache), **environment})


def test_a_model_of_the_hub_is_planned_from_its_config_alone(hub, tmp_path):
    """main is asked for each time; a commit that is in the cache is not, nor is anything without a network."""
    cache = tmp_path / "cache"
    done = planned(hub, cache, f"model.from={NAME}")
    said = f"llama from {NAME} at {SECOND[:12]}, config.json sha256:"
    assert done.code == 0 and said in done.stderr, done.output
    assert {each.rpartition("/")[2] for each in hub.asked} == {"config.json"}
    size = json.loads(done.stdout)["parameters"]
    hub.asked.clear()
    older = planned(hub, cache, f"model.from={NAME}", f"model.revision={FIRST}")
    assert older.code == 0 and FIRST[:12] in older.stderr and hub.asked
    hub.asked.clear()
    again = planned(hub, cache, f"model.from={NAME}@{FIRST}")
    assert again.code == 0 and not hub.asked and again.stdout == older.stdout
    # no network: what was fetched serves, and what was not is one line
    offline = planned(hub, cache, f"model.from={NAME}", HF_HUB_OFFLINE="1")
    assert offline.code == 0 and json.loads(offline.stdout)["parameters"] == size
    hub.shutdown()
    hub.server_close()
    unreachable = planned(hub, cache, f"model.from={NAME}")
    assert unreachable.code == 0 and SECOND[:12] in unreachable.stderr
    gone = planned(hub, tmp_path / "none", f"model.from={NAME}", HF_HUB_OFFLINE="1")
    refused(gone, f"{NAME}: not fetched yet, and the hub does not answer")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.from=someone/nothing"], "the hub has no model someone/nothing that this account may see"),
        (["model.from=someone/gated"], "someone/gated is gated: accept its terms at http"),
        (["model.from=someone/empty"], "someone/empty has no config.json"),
        ([f"model.from={NAME}", "model.revision=v9"], f"model.revision: is v9, which {NAME} does not have"),
        ([f"model.from={NAME}@main", "model.revision=v9"], "model.from=HuggingFaceTB"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, tmp_path, settings, said):
    finished = planned(hub, tmp_path, *settings)
    assert refused(finished, said) and finished.stdout == ""


def agreed_on(recipes: list[Recipe]) -> str:
    try:
        agree_on_shape(recipes[int(os.environ["RANK"])])
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_read_another_file_stop_with_one_line(tmp_path):
    """A branch of the hub may move while ranks start: their weights would have other shapes, and they would wait."""
    first = recipe_from(CONFIGS / "smollm2-135m.json")
    other = recipe_from(config(tmp_path, rms_norm_eps=1e-6))
    assert on_ranks(2, agreed_on, [first, first]) == ["", ""]
    said = on_ranks(2, agreed_on, [first, other])
    assert said[0] == said[1] and "model.from: ranks have read sha256:" in said[0]


def _trained(folder: Path) -> Path:
    train_tokenizer([PROSE], 320, folder)
    return folder


def test_weights_may_come_from_where_the_shape_is(tmp_path):
    """A folder that holds both: its own config.json is that of its weights, exports of a run included."""
    tokenizer = AutoTokenizer.from_pretrained(_trained(tmp_path / "tokenizer"))
    shape = AutoConfig.for_model(**{**recipe_from(CONFIGS / "qwen3-0.6b.json").model, **SMALL})
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    recipe = recipe_from(tmp_path, f"model.initial_weights={tmp_path}")
    assert recipe.model.model_type == "qwen3" and recipe.weights.initial_weights == str(tmp_path)
    given = open_given(recipe, tokenizer)
    assert given is not None and given.facts["source"] == str(tmp_path)


def test_planning_takes_a_model_without_a_recipe(hub, tmp_path):
    """What it assumes is said beside the answer, and the command that it gives names the model."""
    planning = ["python", "-m", "pretraining.planning"]
    words = [*planning, "fit", "--model", NAME, "--world_size", "8", "--gpu", "H100"]
    environment = {**hub.environment, "HF_HOME": str(tmp_path)}
    done = completed([*words, "--json"], **environment)
    answer = json.loads(done.stdout)
    assert answer["name"] == "SmolLM2-135M"
    assert f"--recipe RECIPE --set model.from={NAME}" in answer["command"]
    said = "assumed are sequences of 2,048 tokens, 524,288 tokens a step, 20 tokens a parameter"
    assert said in done.stderr
    for verb, more in (
        ("flops", ["--tokens", "1e12", "--set", "data.sequence_length=4096"]),
        ("memory", ["--world_size", "8", "--deepspeed", "zero1"]),
        ("cost", ["--world_size", "7", "--gpu", "H100"]),
        ("parallelism", ["--world_size", "16", "--gpu", "H100"]),
        ("chinchilla", []),
    ):
        completed([*planning, verb, "--model", NAME, "--json", *more], **environment)
    both = execute([*planning, "flops", "--model", NAME, "--recipe", "features/gpt2"])
    refused(both, "give one of --recipe NAME, --model NAME")
