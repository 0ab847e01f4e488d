"""The load of experts: counted as the routers chose, alike on any number of ranks, and told of where one starves."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pretraining.model.loss import PLAIN, build_loss
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.experts import FEWEST, PREFIX, WINDOWS, ExpertLoad, load_metrics
from tests.gear.runs import EXPERTS, section_of
from tests.training.test_muon import built

LOGGED = SimpleNamespace(global_step=10, is_world_process_zero=True, stateful_callbacks={})


@pytest.mark.parametrize("kind", ["plain", "chunked", "fused"])
def test_the_load_is_what_the_routers_chose(tmp_path, kind):
    """By hand: every choice of every router, seen by hooks, against the logged metrics, whatever computes the loss."""
    model, chosen = built("qwen3_moe", tie_word_embeddings=False).float().train(), {}
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


def test_the_load_is_the_same_on_two_ranks_at_stage_3(workshop):
    """Summed over ranks and micro-batches: a plain process with the plain loss counts the same; other models none."""
    experts = section_of(EXPERTS, tie_word_embeddings=False)
    plain = workshop.plain((experts, "loss.kind=plain")).training_rows
    sharded = workshop.run("zero3", settings=(experts,)).training_rows
    names = [name for name in plain[0] if name.startswith(PREFIX)]
    assert len(names) == 2 + 2 * EXPERTS["num_hidden_layers"]
    for ours, theirs in zip(sharded, plain, strict=True):
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], abs=0.02)
    assert not any(name.startswith(PREFIX) for name in workshop.plain().training_rows[0])
