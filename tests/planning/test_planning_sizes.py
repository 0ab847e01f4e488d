"""You know before you pay: published models, counted part by part, are the built ones to the last parameter."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pretraining.model.build import keep_products
from pretraining.planning.shapes import PARTS as PART_NAMES
from pretraining.planning.shapes import parameter_tensors
from pretraining.planning.sizes import flops_per_token, model_size, size_of_recipe
from pretraining.recipe.sections import Weights
from tests.planning.test_planning import DENSE_MODELS, GPT2, MODELS, SHIPPED, build


def gpt2(layers: int, width: int, heads: int) -> dict:
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, **shape}


def llama(layers: int, width: int, inner: int, heads: int, key_value_heads: int, vocab_size: int) -> dict:
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    return {"model_type": "llama", "vocab_size": vocab_size, "tie_word_embeddings": False, **shape}


MIXTRAL = {**llama(32, 4096, 14336, 32, 8, 32000), "model_type": "mixtral"}
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {**llama(48, 2048, 6144, 32, 4, 151936), "model_type": "qwen3_moe", "head_dim": 128}
QWEN3_MOE |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN3_MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": []}

# {name: (model, published total, published active or None)}
PUBLISHED = {
    "GPT-2 124M": (gpt2(12, 768, 12), 124_439_808, None),
    "GPT-2 355M": (gpt2(24, 1024, 16), 354_823_168, None),
    "GPT-2 774M": (gpt2(36, 1280, 20), 774_030_080, None),
    "GPT-2 1558M": (gpt2(48, 1600, 25), 1_557_611_200, None),
    "Llama-2-7B": (llama(32, 4096, 11008, 32, 32, 32000), 6_738_415_616, None),
    "Llama-2-13B": (llama(40, 5120, 13824, 40, 40, 32000), 13_015_864_320, None),
    "Llama-2-70B": (llama(80, 8192, 28672, 64, 8, 32000), 68_976_648_192, None),
    "Llama-3-8B": (llama(32, 4096, 14336, 32, 8, 128256), 8_030_261_248, None),
    "Mixtral-8x7B": (MIXTRAL, 46_702_792_704, 12.9e9),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30_532_122_624, 3.3e9),
}
PARTS = {  # the last name in a parameter's path that tells its part, first match
    "norm": "norms",
    "ln_": "norms",
    "wte": "embedding",
    "wpe": "embedding",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "experts": "experts",
    "mlp.gate.": "router",
    "block_sparse_moe.gate.": "router",
    "attn": "attention",
    "mlp": "mlp",
}


def part_of(name: str) -> str:
    return next(part for word, part in PARTS.items() if word in name)


COUNTED = {name: model for name, (model, _, _) in PUBLISHED.items()} | MODELS | SHIPPED


@pytest.mark.parametrize("name", COUNTED)
def test_models_are_counted_to_the_last_parameter(name):
    """Difference 0 to the model that transformers builds, in total and in every part; of a mixture, what a token skips.

    Published models have the sizes of their papers: Mixtral (Jiang et al. 2024), Qwen3-30B-A3B (Yang et al. 2025).
    """
    model = COUNTED[name]
    size, counted, idle = model_size(model), dict.fromkeys(PART_NAMES, 0), 0
    parameters = dict(build(model).named_parameters())
    # padding and what straddles two ranks depend on every single tensor
    tensors = sorted(tensor.numel for tensor in parameter_tensors(model))
    assert tensors == sorted(parameter.numel() for parameter in parameters.values())
    for key, parameter in parameters.items():
        counted[part_of(key)] += parameter.numel()
        if ".experts." in key:
            experts = parameter.shape[0]
            idle += parameter.numel() * (experts - model["num_experts_per_tok"]) // experts
    assert size.parts == counted
    assert size.total == sum(counted.values()) == PUBLISHED.get(name, (model, size.total))[1]
    assert size.active == size.total - idle and (idle > 0) == (counted["experts"] > 0)
    assert size.tied == (counted["head"] == 0)
    if published_active := PUBLISHED.get(name, (model, 0, None))[2]:
        assert size.active == pytest.approx(published_active, rel=0.02)


SMALL = {"gpt2": GPT2, **DENSE_MODELS}
TOKENS = torch.arange(128).reshape(2, 64)


def flops_of(built) -> int:
    """What torch counts in a forward and a backward pass."""
    with FlopCounterMode(display=False) as counter:
        built(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", SMALL)
def test_flops_are_those_torch_counts(name):
    """Every product of a forward and backward pass, none twice: 0.1 % leaves room for the rotary angles alone."""
    built = build({**SMALL[name], "attn_implementation": "eager"}, "cpu")
    counted = flops_per_token(model_size(SMALL[name]), 64)
    with FlopCounterMode(display=False) as forward:
        built(input_ids=TOKENS, labels=TOKENS, use_cache=False)
    assert forward.get_total_flops() == pytest.approx(counted.forward * TOKENS.numel(), rel=1e-3)
    assert flops_of(built) == pytest.approx(counted.training * TOKENS.numel(), rel=1e-3)


FROZEN = {
    "first layers": ("llama", ["model.embed_tokens.*", "model.layers.[01].*"]),
    "one kind": ("llama", ["*.mlp.*"]),
    "all but the head": ("llama", ["model.*"]),
    "tied head": ("gpt2", ["transformer.wte.*", "transformer.wpe.*", "transformer.h.0.*"]),
}


@pytest.mark.parametrize("case", FROZEN)
def test_frozen_parameters_cost_what_torch_counts(case):
    """No gradients of frozen matrices, and nothing backward in front of the first that is trained."""
    name, patterns = FROZEN[case]
    recipe = SimpleNamespace(model=SMALL[name], weights=Weights(frozen=patterns), where="r.json")
    built = build({**SMALL[name], "attn_implementation": "eager"}, "cpu")
    for parameter_name, parameter in built.named_parameters():
        parameter.requires_grad_(not recipe.weights.freezes(parameter_name))
    counted = flops_per_token(size_of_recipe(recipe), 64)
    assert flops_of(built) == pytest.approx(counted.training * TOKENS.numel(), rel=1e-3)
    assert counted.training < flops_per_token(model_size(SMALL[name]), 64).training


def test_recomputation_is_one_more_forward_pass_of_the_layers():
    """Activation checkpointing as it runs: torch counts exactly the FLOPs that HFU credits."""
    model = SMALL["llama"]
    built = build({**model, "attn_implementation": "eager"}, "cpu").train()
    built.activation_checkpointing_enable()
    counted = flops_per_token(model_size(model), 64)
    # The last product of a layer feeds nothing that backward needs again: torch stops recomputing before it.
    last = 2 * model["hidden_size"] * model["intermediate_size"] * model["num_hidden_layers"]
    assert flops_of(built) == pytest.approx((counted.hardware - last) * TOKENS.numel(), rel=1e-3)


def test_layers_that_keep_their_products_multiply_nothing_again():
    """`speed.recompute` operators: the FLOPs of a run that recomputes nothing, and the same gradients."""
    built = build({**SMALL["llama"], "attn_implementation": "sdpa"}, "cpu").train()
    flops, gradients = {}, {}
    for way in ("nothing", "layers", "operators"):
        if way == "operators":
            keep_products(built)
        if way != "nothing":
            built.activation_checkpointing_enable()
        flops[way] = flops_of(built)
        gradients[way] = [parameter.grad.clone() for parameter in built.parameters()]
        built.zero_grad()
    assert flops["operators"] == flops["nothing"] < flops["layers"]
    assert all(map(torch.equal, gradients["operators"], gradients["nothing"]))


def test_the_conventions_differ_as_they_say():
    """6 N leaves attention out, the causal count takes half of it, HFU adds a forward pass of the layers."""
    model, _, _ = PUBLISHED["Llama-2-7B"]
    size, length = model_size(model), 4096
    counted = flops_per_token(size, length)
    attention = 12 * 32 * 4096 * length
    assert counted.training == counted.parameters + attention
    assert counted.training_causal == counted.parameters + attention // 2
    assert counted.hardware == counted.training + counted.forward - 2 * 32000 * 4096
    assert counted.six_n_total == 6 * size.total
