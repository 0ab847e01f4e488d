"""The experts of every mixture are used alike: by a loss, or by a bias that follows their load, which is told."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pretraining.checkpoints.shard_files import BUFFER, CheckpointReader
from pretraining.errors import UserError
from pretraining.model.build import build_config
from pretraining.model.loss import PLAIN, balance_of, build_loss, layers_balance, watch_routing
from pretraining.recipe.fixed_keys import curve_parts
from pretraining.recipe.model import has_experts, other_model_types
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.experts import FEWEST, PREFIX, WINDOWS, ExpertLoad, load_metrics
from tests.gear.runs import EXPERTS, LLAMA, STEPS, TOKENIZER, Run, completed, section_of, start_and_kill
from tests.gear.small_models import measurable
from tests.training.test_curve import beginning
from tests.training.test_muon import built as small_model

UNSEEN = ("llama4_text",)
"""Its class has the coefficient and computes no loss, and its experts take the tokens in a way of their own."""
TYPES = other_model_types()["types"]
MIXTURES = [name for name in TYPES if name not in UNSEEN and has_experts(measurable(name))]


def built(name: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(build_config(measurable(name), TOKENIZER)).train()


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
    # a resume is told of another micro-batch if the loss is over its tokens, and not if it is over each sequence
    recipe = {"model": measurable(name), "data": {}, "budget": {}, "training": {}}
    is_told = "training.per_device_train_batch_size" in curve_parts(recipe)
    assert is_told == (balance.func is layers_balance)


@pytest.mark.parametrize("name", UNSEEN)
def test_a_mixture_that_nothing_balances_is_refused_unless_it_is_asked_for(name):
    model, tokens = built(name), torch.randint(1, 96, (2, 16))
    with pytest.raises(UserError, match=r"loss\.balance to none"):
        build_loss(model, PLAIN)(model(input_ids=tokens), tokens)
    assert build_loss(model, replace(PLAIN, balance="none"))(model(input_ids=tokens), tokens).isfinite()


def test_a_bias_follows_the_load_of_the_whole_step(tmp_path):
    """By hand: more than an even share takes a rate, less adds one; two micro-batches are one step.

    A step that was refused moves nothing, and neither does what it counted later.
    """
    model, state = built("deepseek_v3"), SimpleNamespace(stateful_callbacks={})
    loss, refused = build_loss(model, PLAIN), []
    load = ExpertLoad(RunFolder(tmp_path), bias_rate=0.25, refused_last_step=lambda: bool(refused))
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
    refused.append(True)
    counted(model(input_ids=tokens), tokens)
    load.on_step_end(None, None, None)
    refused.clear()
    load.on_step_end(None, None, None)
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
    assert not beginning(workshop.plain().training_rows[0], (PREFIX,)), "no experts, no load"
    killed = Run(tmp_path / "killed")
    command = workshop.command(killed.folder, "zero2", settings=(DEEPSEEK,))
    start_and_kill(command, lambda: any(row["step"] >= 5 for row in killed.rows))
    completed(command)
    for name, bias in biases(killed, STEPS).items():
        assert torch.equal(bias, expected[name])


LOGGED = SimpleNamespace(global_step=10, is_world_process_zero=True, stateful_callbacks={})


@pytest.mark.parametrize("kind", ["plain", "chunked", "fused"])
def test_the_load_is_what_the_routers_chose(tmp_path, kind):
    """By hand: every choice of every router, seen by hooks, against the logged metrics, whatever computes the loss."""
    model, chosen = small_model("qwen3_moe", tie_word_embeddings=False).float().train(), {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router"):
            seen = chosen.setdefault(name, [0] * EXPERTS["num_experts"])

            def see(module, inputs, outputs, seen=seen):
                for expert in outputs[2].flatten().tolist():
                    seen[expert] += 1

            module.register_forward_hook(see)
    load, state = ExpertLoad(RunFolder(tmp_path)), SimpleNamespace(stateful_callbacks={})
    loss = load.around(build_loss(model, replace(PLAIN, kind=kind)))
    load.on_train_begin(None, state, None, model=model)
    for _ in range(2):
        tokens = torch.randint(512, (3, 64))
        loss(model(input_ids=tokens), tokens).backward()
    load.on_step_end(None, None, None)
    logs = {"loss": 0.0}
    load.on_log(None, LOGGED, None, logs=logs)
    assert sum(map(sum, chosen.values())) == 2 * 3 * 64 * EXPERTS["num_experts_per_tok"] * len(chosen)
    for layer, counts in enumerate(chosen.values()):
        expected = max(counts) / (sum(counts) / len(counts))
        assert logs[f"{PREFIX}max_over_mean/{layer}"] == pytest.approx(expected, abs=1e-4)
    assert logs[f"{PREFIX}max_over_mean"] == max(
        logs[f"{PREFIX}max_over_mean/{layer}"] for layer in range(len(chosen))
    )


def test_entropy_and_extremes():
    """Even: 1 and 1. Two of four experts: half the bits. One of four: none."""
    metrics = load_metrics([[5.0] * 4, [8.0, 8.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    assert [metrics[f"entropy/{layer}"] for layer in range(3)] == [1.0, 0.5, 0.0]
    assert [metrics[f"max_over_mean/{layer}"] for layer in range(3)] == [1.0, 2.0, 4.0]
    assert (metrics["entropy"], metrics["max_over_mean"]) == (0.0, 4.0)
    assert load_metrics([[7.0]])["entropy"] == 1.0


def logged_windows(load: ExpertLoad, tokens_of_expert_1: list[int]) -> None:
    """Windows of three experts, the second of which gets so many tokens."""
    for tokens in tokens_of_expert_1:
        choices = torch.tensor([0, 2] * 3 * FEWEST + [1] * tokens)
        load.count([choices], [3])
        load.on_step_end(None, None, None)
        load.on_log(None, LOGGED, None, logs={"loss": 0.0})


def test_a_starving_expert_is_told_of_once_until_it_recovers(tmp_path, capsys):
    """After some windows in a row, over a restart too; the terminal has a line with what to try."""
    run, state = RunFolder(tmp_path), SimpleNamespace(stateful_callbacks={})
    load, resumed = ExpertLoad(run), ExpertLoad(run)
    logged_windows(load, [3 * FEWEST, 2, 3 * FEWEST] + [2] * (WINDOWS - 1))
    assert not read_rows(run.events)
    state.stateful_callbacks["ExpertLoad"] = json.loads(json.dumps(load.state()))
    resumed.on_train_begin(None, state, None)
    logged_windows(resumed, [2, 2])
    (event,) = read_rows(run.events)
    assert event["event"] == "starved_experts" and event["try"]
    told = "step 10: 1 expert starved, the first: expert 1 of layer 0, 0.3% of its choices; try a higher model.router"
    assert capsys.readouterr().err.count(told) == 1
    assert [(found["layer"], found["expert"]) for found in event["experts"]] == [(0, 1)]
    logged_windows(resumed, [3 * FEWEST] + [2] * WINDOWS)
    assert len(read_rows(run.events)) == 2
