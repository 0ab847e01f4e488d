"""The experts of every mixture are used alike: by a loss, or by a bias that follows their load."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pretraining.checkpoints.shard_files import BUFFER, CheckpointReader
from pretraining.errors import UserError
from pretraining.model.build import build_config
from pretraining.model.loss import PLAIN, balance_of, build_loss, watch_routing
from pretraining.recipe.model import has_experts, other_model_types
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.experts import PREFIX, ExpertLoad
from tests.gear.runs import LLAMA, STEPS, TOKENIZER, Run, completed, section_of, start_and_kill
from tests.gear.small_models import measurable


def section(name: str) -> dict:
    """Return a small model section of this type, with experts in its last layers."""
    return measurable(name, other_model_types()["types"][name])


UNSEEN = ("llama4_text",)
"""Its class has the coefficient and computes no loss, and its experts take the tokens in a way of their own."""
TYPES = other_model_types()["types"]
MIXTURES = [name for name in TYPES if name not in UNSEEN and has_experts(section(name))]


def built(name: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(build_config(section(name), TOKENIZER)).train()


@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_is_balanced_and_its_load_is_seen(name):
    """Promise: no mixture trains unbalanced unasked. A loss that reaches every router, or a bias that can move."""
    model = built(name)
    loss = build_loss(model, PLAIN)
    tokens = torch.randint(1, 96, (2, 16))
    outputs = model(input_ids=tokens)
    weight, balance = balance_of(model)
    assert weight > 0 and loss(outputs, tokens).isfinite()
    value = balance(outputs)
    value.backward()
    routing = watch_routing(model)
    routers = [logits.grad_fn for logits in outputs.router_logits]
    assert len(routers) == len(routing.sizes) and all(routers)
    for each, size in zip(routing.choices, routing.sizes, strict=True):
        assert each.min() >= 0 and each.max() < size
    assert balance_of(model, replace(PLAIN, balance="none")) is None


@pytest.mark.parametrize("name", UNSEEN)
def test_a_mixture_that_nothing_balances_is_refused_unless_it_is_asked_for(name):
    model, tokens = built(name), torch.randint(1, 96, (2, 16))
    with pytest.raises(UserError, match=r"loss\.balance to none"):
        build_loss(model, PLAIN)(model(input_ids=tokens), tokens)
    assert build_loss(model, replace(PLAIN, balance="none"))(model(input_ids=tokens), tokens).isfinite()


def test_a_bias_follows_the_load_of_the_whole_step(tmp_path):
    """By hand: more than an even share takes a rate, less adds one; two micro-batches are one step."""
    model, state = built("deepseek_v3"), SimpleNamespace(stateful_callbacks={})
    loss, load = build_loss(model, PLAIN), ExpertLoad(RunFolder(tmp_path), bias_rate=0.25)
    load.on_train_begin(None, state, None, model=model)
    counted, routing, total = load.around(loss), watch_routing(model), 0
    for _ in range(2):
        tokens = torch.randint(1, 96, (2, 16))
        counted(model(input_ids=tokens), tokens)
        total += torch.stack([torch.bincount(each.flatten(), minlength=4) for each in routing.choices])
    load.on_step_end(None, None, None)
    even = total.sum(1, keepdim=True) // 4
    for moved, expected in zip(routing.biases, 0.25 * torch.sign(even - total), strict=True):
        assert torch.equal(moved, expected)
    before = [each.clone() for each in routing.biases]
    load.on_step_end(None, None, None)  # nothing was counted since
    assert all(torch.equal(a, b) for a, b in zip(before, routing.biases, strict=True))


def test_the_loss_over_each_sequence_is_deepseek_s():
    """By hand, DeepSeek-V3 equations 17 to 20, in loops over sequences, layers and experts."""
    model, tokens = built("deepseek_v3"), torch.randint(1, 96, (2, 16))
    weight, balance = balance_of(model)
    outputs = model(input_ids=tokens)
    expected = 0.0
    for logits in outputs.router_logits:
        for scores in logits.view(2, 16, 4).sigmoid():
            for expert in range(4):
                chosen = sum(expert in token.topk(2).indices.tolist() for token in scores)
                share = (scores / scores.sum(-1, keepdim=True))[:, expert].mean()
                expected += 4 / (2 * 16) * chosen * share / 2
    assert weight == 1e-4
    torch.testing.assert_close(balance(outputs), expected)


LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK = {**LLAMA, **LATENT, "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 8}
DEEPSEEK |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48}
DEEPSEEK = section_of(DEEPSEEK, first_k_dense_replace=1)


def biases(run, step: int) -> dict[str, torch.Tensor]:
    """Return the correction biases in a checkpoint of the run."""
    reader = CheckpointReader(run.dir.checkpoint(step))
    names = [name for name in reader.state["buffers"] if name.endswith("correction_bias")]
    return {name: reader.read(BUFFER, name, 0, 8) for name in names}


def test_the_biases_are_the_same_at_every_stage_and_after_a_kill(workshop, tmp_path):
    """Promise: the curve belongs to the recipe. Bit for bit, and in the checkpoint, the export and a resumed run."""
    plain = workshop.plain((DEEPSEEK,))
    expected = biases(plain, STEPS)
    assert expected and {each.dtype for each in expected.values()} == {torch.float32}
    assert min(each.abs().max() for each in expected.values()) >= 1e-3
    for stage in ("zero1", "zero2", "zero3"):
        run = workshop.run(stage, settings=(DEEPSEEK,))
        for name, bias in biases(run, STEPS).items():
            assert torch.equal(bias, expected[name]), (stage, name)
    exported = load_file(run.dir.export / "model.safetensors")
    assert all(torch.equal(exported[name], bias) for name, bias in expected.items())
    assert all(f"{PREFIX}max_over_mean" in row for row in run.training_rows)
    killed = Run(tmp_path / "killed")
    command = workshop.command(killed.folder, "zero2", settings=(DEEPSEEK,))
    start_and_kill(command, lambda: any(row["step"] >= 5 for row in killed.rows))
    completed(command)
    for name, bias in biases(killed, STEPS).items():
        assert torch.equal(bias, expected[name])
