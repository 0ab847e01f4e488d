"""recipes/modern/: the demo's shape. Its tables look back only, into their own document; each size is planned."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pretraining.ds_config import load_ds_config
from pretraining.extend import load_extensions
from pretraining.model.attention import register_kernels
from pretraining.planning.gpus import find_gpu
from pretraining.planning.screen import full_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import RECIPES, load_recipe
from pretraining.recipe.model import why_not, why_not_apart

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
SMALL |= {"num_hidden_layers": 3, "max_position_embeddings": 24, "ngram_width": 8}
SIZES = ["tiny", *sorted(f"modern/{path.stem}" for path in (RECIPES / "modern").glob("*.json"))]


@pytest.fixture(scope="module")
def model():
    recipe = load_recipe("tiny")
    load_extensions(recipe.extensions)
    register_kernels()
    torch.manual_seed(0)
    config = AutoConfig.for_model("modern", **SMALL, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # many begin at zero, and would hide a leak
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_a_token_changes_nothing_before_it_and_all_of_its_ngrams_after_it(model):
    tokens = torch.arange(1, 21)[None]
    other = tokens.clone()
    other[0, 10] = 40
    with torch.no_grad():
        before, after = model(tokens).logits, model(other).logits
        places = torch.arange(20)[None]
        rows = [(table(tokens, places) != table(other, places)).any(-1)[0] for table in model.ngrams]
    assert torch.equal(before[:, :10], after[:, :10]) and not torch.equal(before[:, 10:], after[:, 10:])
    assert [row.nonzero().flatten().tolist() for row in rows] == [[10, 11], [10, 11, 12]]


def test_a_document_does_not_see_the_end_of_the_one_before_it(model):
    """Where positions begin again: neither the tables nor attention."""
    tokens = torch.arange(1, 21)[None]
    other = tokens.clone()
    other[0, :8] += 20
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.no_grad():
        here, there = (model(each, position_ids=positions).logits[:, 8:] for each in (tokens, other))
        alone = model(tokens[:, 8:]).logits
    assert torch.equal(here, there)
    torch.testing.assert_close(here, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SIZES)
def test_each_size_is_planned_with_the_number_of_parameters_it_states(name):
    recipe = load_recipe(name)
    plan = full_plan(
        Setup(recipe, load_ds_config(recipe.deepspeed), 2 if name == "tiny" else 8), find_gpu("H100")
    )
    stated = re.search(r"([\d,]+) parameters", recipe.description)[1]
    assert f"{plan['parameters']:,}" == stated


def test_its_class_has_what_its_recipes_ask_for():
    """Documents apart, a loss that never holds all logits in fp32, compiled blocks: measured in test_model_types.py."""
    model = load_recipe("modern/124m").model
    assert why_not_apart(model, "sdpa") is None and why_not_apart(model, "torch_varlen") is None
    assert not why_not(model, "chunked") and not why_not(model, "compiled")
