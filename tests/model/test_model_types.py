"""What a recipe may ask of a model type is what was measured, with these versions, for every type there is."""

import json
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from pretraining.errors import UserError
from pretraining.evaluation.sampling import continued, has_cache
from pretraining.extend import load_extensions, model_extension
from pretraining.model.abilities import ABILITIES, built, compare, keeps_apart, measured, trains_alike
from pretraining.model.build import build_config
from pretraining.recipe import load_recipe
from pretraining.recipe import model as model_types
from pretraining.recipe.model import MEASURED, known_types, measured_by_itself, why_not, why_not_apart
from pretraining.recipe.refusals import load_recipe_and_ds_config
from tests.gear.finished_data import refusal
from tests.gear.runs import MODELS
from tests.gear.small_models import measurable
from tests.gear.split_models import measured_on_two


def test_every_type_was_measured_with_what_is_installed():
    """Promise: after an upgrade nothing is allowed, or refused, by what another version did."""
    kept = json.loads(MEASURED.read_text())
    assert kept["versions"] == {name: version(name).partition("+")[0] for name in kept["versions"]}
    assert set(kept["types"]) == set(known_types())
    assert all(set(ABILITIES) <= set(found) for found in kept["types"].values())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "falcon", "olmo3", "granite", "qwen3_next"])
def test_the_file_says_what_is_measured_here(name):
    """Promise: the table is of this code. Plain, soft caps, sinks, own positions, windows, scales, recurrence."""
    kept = json.loads(MEASURED.read_text())["types"][name]
    found = measured(measurable(name))
    assert {key: why is None for key, why in found.items()} == {key: kept[key] is None for key in found}


@pytest.mark.parametrize("name", ["modern/124m", "modded-nanogpt-adamw"])
def test_the_file_says_what_the_classes_of_recipes_do(name):
    """Promise: what a recipe here brings with it need not be measured at its first use. The first has capped logits."""
    model = load_recipe(name).model
    assert model_extension(model["model_type"]).digest in json.loads(MEASURED.read_text())["own"]
    found = measured_by_itself(model)
    assert {key: why is None for key, why in found.items()} == {
        key: why_not(model, key) is None for key in found
    }


@pytest.mark.parametrize("name", ["gemma", "qwen2_moe"])
def test_the_file_says_what_two_ranks_measure_here(name):
    """Promise: split layers, sequences and experts, and ZeRO-3, are of this code too."""
    kept = json.loads(MEASURED.read_text())["types"][name]
    found = measured_on_two(measurable(name) | ({"router_aux_loss_coef": 0.1} if name == "qwen2_moe" else {}))
    assert {key: why is None for key, why in found.items() if key in kept} == {
        key: kept[key] is None for key in found if key in kept
    }
    assert len(kept.keys() & found.keys()) >= 3


def test_what_differs_is_seen():
    """Promise: a yes is worth something. A leak between documents, another gradient and a NaN are no yes."""
    import torch

    with pytest.raises(UserError, match=r"a document's text behind \d+ others differs"):
        keeps_apart(measurable("llama"), "sdpa_causal")

    def tilt(network):
        network.model.layers[0].mlp.down_proj.weight.register_hook(lambda gradient: gradient * 1.001)

    with pytest.raises(UserError, match=r"the gradient of model\.layers\.0\.mlp\.down_proj\.weight differs"):
        trains_alike(measurable("llama"), tilt)
    with pytest.raises(UserError, match="differs by nan"):
        compare("it", torch.tensor(float("nan")), torch.tensor(0.0))


REFUSED = {
    "falcon_h1": ("data.document_masking=true", "data.document_masking: does not hold for falcon_h1"),
    "gemma2": ('loss={"kind": "fused"}', "loss.kind: is fused: final_logit_softcapping is 30"),
    "llama4_text": ("training.logging_steps=1", "loss.balance: does not hold for llama4_text"),
    "ctrl": ("training.activation_checkpointing=true", "does not hold for ctrl"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_type_cannot_do_is_one_line(name, tmp_path):
    """Bad input: it names the type, what differs, and what to set."""
    setting, message = REFUSED[name]
    values = load_recipe("features/gpt2").to_dict()
    model = measurable(name) | {"vocab_size": 1024}
    model |= {"final_logit_softcapping": 30.0} if name == "gemma2" else {}
    values |= {"model": model, "name": "other"}
    values["data"]["sequence_length"] = 32
    (path := tmp_path / "other.json").write_text(json.dumps(values))
    assert message in refusal(load_recipe_and_ds_config, str(path), [setting], "zero1")


def test_a_class_of_the_user_s_own_is_measured_at_its_first_use(monkeypatch, tmp_path):
    """Promise: what it can do is known before it trains, by one measurement for all processes of a machine."""
    asked = []

    def ask(module: str, section: str) -> dict:
        """In this process, without the program's imports; plans of features/own-model start it."""
        asked.append(module)
        load_extensions([model_extension("parallel")])
        return {"abilities": measured(json.loads(section))}

    monkeypatch.setattr(model_types, "ask_of_model", ask)
    monkeypatch.setenv("PRETRAINING_MODEL_CACHE", str(tmp_path))
    model_types._measured_section.cache_clear()
    settings = ["model.hidden_size=64", "training.activation_checkpointing=true"]
    recipe, _ = load_recipe_and_ds_config("features/own-model", settings, "zero1")
    assert recipe.resolved_loss.kind == "fused" and why_not(recipe.model, "compiled") is None
    model_types._measured_section.cache_clear()  # as another process has it
    masked = [*settings, "data.document_masking=true"]
    said = refusal(load_recipe_and_ds_config, "features/own-model", masked, "zero1")
    assert "data.document_masking: does not hold for parallel" in said and len(asked) == 1
    said = refusal(load_recipe_and_ds_config, "features/own-model", settings, "zero1:sequence=2")
    assert "sequence 2: was not measured for parallel" in said


def test_a_capped_model_is_not_fused_and_a_kernel_that_crosses_documents_is_not_chosen():
    """Promise: `auto` never takes what does not hold."""
    assert why_not(measurable("gemma3_text"), "fused") is None
    assert "softcapping" in why_not({**measurable("gemma3_text"), "final_logit_softcapping": 30.0}, "fused")
    gemma2 = measurable("gemma2")
    assert why_not_apart(gemma2, "torch_varlen") and why_not_apart(gemma2, None) is None
    assert "was not measured" in why_not({"model_type": "unheard_of"}, "fused")


def test_no_type_has_a_padding_token_of_its_own():
    """That of its class is of the published tokenizer: here it is another token, whose row would stay at zero."""
    ours = SimpleNamespace(bos_token_id=0, eos_token_id=0)
    insists, plain = [], {name: {**measurable(name), "vocab_size": 8} for name in known_types()}
    for name, model in plain.items():
        model.pop("pad_token_id", None)
        if build_config(model, ours).get_text_config().pad_token_id is not None:
            insists.append(name)
    assert insists == ["modernbert-decoder"]
    model = built(plain["olmo2"])
    model(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
    assert (model.get_input_embeddings().weight.grad.abs().sum(1) > 0).all()
    recipe = load_recipe("features/other-model-type", ["model.pad_token_id=1"])
    assert "the input row of token 1 learns nothing" in " ".join(recipe.notes)
    assert not [note for note in load_recipe("features/other-model-type").notes if "pad_token_id" in note]


def test_the_loss_is_of_as_many_ids_as_the_vocabulary_has():
    """A class may cut its logits to other ids than the loss, or a sample, goes over."""
    for name in ("inkling_text", "inkling2_text"):
        model = {**measurable(name), "unpadded_vocab_size": 64}
        assert "set it to that number" in " ".join(why for _, why in model_types.Model(model).check())


@pytest.mark.parametrize("name", ["granitemoehybrid", "llama"])
def test_a_model_without_a_layer_of_attention_is_sampled_too(name):
    """transformers asks its cache for a length that it does not know."""
    model = built(measurable(name) if name in known_types() else MODELS[name])
    found = continued(model, SimpleNamespace(eos_token_id=0), [1, 2, 3], 4)
    assert len(found) <= 4 and has_cache(model) == (name == "llama")


def test_what_a_key_changes_is_no_answer_of_the_type():
    """Each type was measured with its default: what the key changes is refused, or has another way."""
    biased = {**measurable("phimoe"), "lm_head_bias": True}
    assert why_not(measurable("phimoe"), "fused") is None and "lm_head_bias" in why_not(biased, "fused")
    windowed = {**measurable("qwen2_moe"), "use_sliding_window": True}
    assert "use_sliding_window" in why_not_apart(windowed, "torch_varlen")
    assert why_not_apart(windowed, "sdpa") is None is why_not_apart(measurable("qwen2_moe"), "torch_varlen")
    both_ways = model_types.Model({**measurable("gemma3_text"), "use_bidirectional_attention": True})
    assert [key for key, _ in both_ways.check()] == ["model.use_bidirectional_attention"]
