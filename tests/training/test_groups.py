"""Parameters with values of their own: the table's, at any stage; schedules by points are the published formulas."""

import json
import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from pretraining.planning.shapes import parameter_tensors
from pretraining.planning.sizes import check_rows
from pretraining.recipe import load_recipe
from pretraining.recipe.optimizer import HEAD, HIDDEN, VECTOR, Optimizer
from pretraining.recipe.piecewise import value_at
from pretraining.training.optimizers import build_optimizer, describe_groups, kinds_of
from pretraining.training.schedule import follow_run, own_schedule
from pretraining.upstream.torch import rates_now
from tests.gear.finished_data import refusal
from tests.training.test_curve import NO_NOISE_SCALE, SHORT, column
from tests.training.test_muon import OF_TYPE, TABLE, TRAINING, built, draw_gradients, table


def test_every_parameter_has_the_table_s_values():
    """Three steps in fp64 beside one AdamW of torch for each parameter, its decay written out; later rows win."""
    ours, theirs = built("gpt2"), built("gpt2")
    optimizer = build_optimizer(ours, Optimizer.of({"groups": TABLE}), TRAINING)
    kinds, adams = kinds_of(theirs), {}
    for name, parameter in theirs.named_parameters():
        rate = 0.02 if kinds[name] == "embedding" else 0.004 if "attn" in name and "weight" in name else 0.01
        beta1 = 0.7 if kinds[name] == "embedding" else 0.9
        beta2, eps = (0.9, 1e-4) if "attn" in name and "weight" in name else (0.95, 1e-8)
        adam = torch.optim.Adam([parameter], rate, (beta1, beta2), eps)
        decay = rate * {"embedding": 0.3, "hidden": 0.1, "vector": 0.2}[kinds[name]]
        if kinds[name] == "vector":
            # a share of the peak's schedule, which is at its peak here
            decay = 0.2
        adams[name] = adam, 0.02 if "c_proj" in name else decay
    for step in range(3):
        draw_gradients(step, ours, theirs)
        optimizer.step()
        for name, (adam, decay) in adams.items():
            with torch.no_grad():
                # the last row's decay, times nothing, is a vector's too
                theirs.get_parameter(name).mul_(1 - decay)
            adam.step()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=name)


def test_a_polynomial_schedule_finds_its_peak():
    optimizer = build_optimizer(built("gpt2"), Optimizer.of({"groups": TABLE}), TRAINING)
    ends = {"lr_end": TRAINING.learning_rate / 10, "power": 1.0}
    shares = get_scheduler("polynomial", optimizer, 10, 110, scheduler_specific_kwargs=ends).lr_lambdas[0]
    assert [shares(step) for step in (0, 10, 60, 110)] == pytest.approx([0, 1, 0.55, 0.1])


def test_the_lines_at_the_start_name_rules_rates_decays_and_momenta():
    """Every parameter is in one group."""
    model = built("gpt2")
    muon = describe_groups(build_optimizer(model, Optimizer(name="muon"), TRAINING))
    assert muon[2] == (
        "hidden matrices: muon, 8 tensors, 98,304 parameters, learning rate 0.01, weight decay 0.1, momentum 0.95"
    )
    lines = describe_groups(build_optimizer(model, Optimizer.of({"groups": TABLE}), TRAINING))
    for each in (muon, lines):
        counts = [int(line.split("tensors, ")[1].split(" ")[0].replace(",", "")) for line in each]
        assert sum(counts) == sum(parameter.numel() for parameter in model.parameters())
    assert lines[0].startswith("embedding: adamw, 2 tensors, ")
    assert lines[0].endswith("learning rate 0.02, weight decay 0.3, momentum 0.7 to 0.9")
    assert any(line.startswith("*c_proj*") and "weight decay 0.02 to 0, " in line for line in lines)
    labels = [line.partition(":")[0] for line in lines]
    assert len(set(labels)) == len(labels) == 7


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", OF_TYPE)
def test_the_plan_and_the_model_agree_on_kinds(name, tied):
    """What the plan checks a row by is what training looks a parameter up by.

    Hidden matrices are the layers' projections: not the token table, GPT-2's positions, the head or a router (deepspeed
    tags wte and wpe). Biases of experts are vectors, though they are in one tensor of two dimensions.
    """
    model = built(name, tie_word_embeddings=tied)
    kinds = kinds_of(model)
    tensors = parameter_tensors({**OF_TYPE[name], "tie_word_embeddings": tied})
    assert kinds == {each.name: each.kind for each in tensors}
    assert (HEAD in kinds.values()) is not tied
    tables = [key for key, kind in kinds.items() if kind not in (HIDDEN, VECTOR)]
    assert len(tables) == {"gpt2": 2, "llama": 1, "qwen3_moe": 3, "gpt_oss": 3}[name] + (not tied), tables
    for key, parameter in model.named_parameters():
        assert kinds[key] != HIDDEN or ".h." in key or ".layers." in key
        assert (kinds[key] == VECTOR) == (parameter.ndim < 2 or key.endswith("_bias")), key


def llm_c(step: int, steps: int) -> float:
    """GPT-2 124M in llm.c: warm-up over 700 steps from 1/700, then a cosine to 0."""
    if step < 700:
        return (step + 1) / 700
    return 0.5 * (1 + math.cos(math.pi * (step - 700) / (steps - 700)))


def track_3(step: int, steps: int) -> float:
    """modded-nanogpt's optimizer track: constant, then linear to 0 over the last 70 %."""
    return min(1.0, (1 - step / steps) / 0.7)


def nanochat_d24(step: int, steps: int) -> float:
    """Warm-up over 40 steps, constant, then linear to 5 % over the last 65 %."""
    if step < 40:
        return (step + 1) / 40
    left = (steps - step) / (0.65 * steps)
    return 1.0 if left >= 1 else left + (1 - left) * 0.05


PUBLISHED = {
    "llm.c 124M": (19_560, llm_c, [[0, 1 / 700], [699, 1], [700, 1], ["end", 0, "cosine"]]),
    "modded-nanogpt track 3, result 6": (3_375, track_3, [[0.3, 1], ["end", 0]]),
    "nanochat d24": (5_568, nanochat_d24, [[0, 1 / 40], [39, 1], [0.35, 1], ["end", 0.05]]),
}
PEAKS = {"embedding": 0.3, "head": 1 / 320, "vector": 0.01, "hidden": 0.02}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_group_has_the_published_rate(name):
    """Twenty steps from first to last: peak times the reference formula, within 1e-9."""
    steps, formula, points = PUBLISHED[name]
    rows = [{"kind": kind, "learning_rate": peak} for kind, peak in PEAKS.items()]
    schedule = {"training.lr_scheduler_type": "piecewise", "training.warmup_steps": 0}
    schedule["training.lr_scheduler_kwargs"] = json.dumps({"points": points})
    settings = [f"{key}={value}" for key, value in schedule.items()]
    recipe = load_recipe("features/gpt2", [*settings, f"budget.tokens={2048 * steps}", table(rows)])
    optimizer = build_optimizer(built("gpt2", tie_word_embeddings=False), recipe.optimizer, recipe.training)
    scheduler = LambdaLR(optimizer, own_schedule(recipe, recipe.num_steps))
    follow_run(scheduler, recipe.progress())
    labels = [group["label"] for group in optimizer.param_groups]
    assert labels == [*PEAKS]
    for step in sorted({*range(3), 698, 699, 700, *range(3, steps, steps // 13), steps - 1}):
        scheduler.last_epoch = step
        expected = [peak * formula(step, steps) for peak in PEAKS.values()]
        assert rates_now(scheduler) == pytest.approx(expected, abs=1e-9), step


def test_values_by_points_are_nanochat_s():
    """Muon's momentum of d20 and d24, and the decay of d24."""
    for step in range(0, 5_568, 29):
        rising = min(step / 300, 1)
        assert value_at([[0, 0.85], [300, 0.95]], step, 21_400) == pytest.approx(
            0.85 + 0.1 * rising, abs=1e-12
        )
        falling = max(0.0, (step - 0.35 * 5_568) / (0.65 * 5_568))
        expected = 0.85 + 0.12 * step / 400 if step < 400 else 0.97 - 0.07 * falling
        points = [[0, 0.85], [400, 0.97], [0.35, 0.97], ["end", 0.9]]
        assert value_at(points, step, 5_568) == pytest.approx(expected, abs=1e-12)
        wave = 0.0597 * 0.5 * (1 + math.cos(math.pi * step / 5_568))
        assert value_at([[0, 0.0597], ["end", 0, "cosine"]], step, 5_568) == pytest.approx(wave, abs=1e-12)
    assert value_at([[4, 1.0], [4, 2.0]], 3, 9) == 1.0 and value_at([[4, 1.0], [4, 2.0]], 4, 9) == 2.0


OF_GPT2 = table(TABLE)
OF_LLAMA = table(
    [
        *TABLE[:2],
        {"names": "*.self_attn.*", "learning_rate": 0.004},
        {"kind": "head", "weight_decay": 0},
    ]
)


def test_the_rows_of_a_run_have_the_values_of_every_group(workshop):
    """As its table says, beside the rate of all others."""
    run = workshop.plain((*SHORT, OF_GPT2, NO_NOISE_SCALE))
    momenta = column(run, "optimizer/embedding/momentum")
    assert momenta == pytest.approx([min(0.9, 0.7 + 0.04 * step) for step in range(5)])
    rates, first = (column(run, f"optimizer/{name}/learning_rate") for name in ("embedding", "vector"))
    assert rates == pytest.approx(column(run, "train/learning_rate")) and rates != first


@pytest.mark.parametrize("key, value", [("names", "*.q_proj.*"), ("kind", "head")])
def test_a_row_that_matches_nothing_is_refused(key, value):
    """A head that is tied is none."""
    recipe = load_recipe("features/gpt2", [table([{key: value, "learning_rate": 1}])])
    assert f'groups.0.{key}: is "{value}", which matches none' in refusal(check_rows, recipe)
