"""The batch-size ramp: which tokens a step holds is a function of the recipe, at any layout and across restarts."""

import json
import shutil
from itertools import accumulate

import pytest

from pretraining.checkpoints.format import Start, read_marker
from pretraining.recipe import accumulation_steps, load_recipe
from pretraining.recipe.budget import Ramp, StepSizes
from pretraining.recipe.fixed_keys import changed_parts
from tests.gear.finished_data import refusal
from tests.gear.runs import SMALL_RECIPE, STEPS, Run, completed
from tests.training.test_curve import column, largest_difference

FULL = SMALL_RECIPE["budget"]["tokens_per_step"]
SIZES = [128] * 4 + [256] * 2 + [384] * 2 + [FULL] * 2
"""By hand: three stairs of 512 tokens each, rounded up to whole steps."""
RAMPED = (
    'budget.ramp={"from_tokens_per_step": 128, "over_tokens": 1536, "lr_scaling": "sqrt"}',
    "budget.tokens=3072",
    "training.per_device_train_batch_size=1",
    "checkpoints.keep_last=5",
    "training.lr_scheduler_type=constant_with_warmup",
    "training.lr_scheduler_kwargs={}",
)


def sizes(first: int, full: int, over: int, **more) -> StepSizes:
    ramp = {"from_tokens_per_step": first, "over_tokens": over, "increment": None, "lr_scaling": "none"}
    return StepSizes.of(full, Ramp.of(ramp | more))


RAMPS = [sizes(128, 512, 1536), sizes(2**15, 2**22, 1_200_000_000), sizes(1, 9, 3)]
RAMPS.append(sizes(64, 640, 7000, increment=192))


@pytest.mark.parametrize("ramp", RAMPS)
def test_closed_formulas_count_what_the_steps_hold(ramp):
    """Against adding up step by step: tokens after n steps, and the steps that so many tokens pay for."""
    count = min(ramp.ramp_steps + 3, 2000)
    held = [ramp.at(step) for step in range(count)]
    assert held == sorted(held)
    totals = [0, *accumulate(held)]
    assert [ramp.tokens_at(step) for step in range(count + 1)] == totals
    for step in range(count):
        assert ramp.steps_within(totals[step]) == ramp.steps_within(totals[step + 1] - 1) == step


def test_stairs_have_equal_shares_of_the_tokens():
    """32k to 4M over 1.2 billion tokens: every stair begins less than a step after its share, and so does the last."""
    ramp, over = sizes(2**15, 2**22, 1_200_000_000), 1_200_000_000
    assert 0 <= ramp.tokens_at(ramp.ramp_steps) - over < 2**22
    assert len(ramp.all) == 128 and ramp.at(0) == 2**15 and ramp.at(ramp.ramp_steps) == ramp.full == 2**22
    for number, stair in enumerate(ramp.stairs):
        assert 0 <= stair.tokens_before - number * over / 127 < 2**22


def test_without_a_ramp_every_step_is_full():
    recipe = load_recipe("features/gpt2")
    assert recipe.step_sizes.all == [recipe.tokens_per_step] and recipe.step_sizes.ramp_steps == 0
    assert recipe.num_tokens == recipe.budget.tokens and recipe.num_samples == recipe.most_samples
    before = recipe.to_dict()
    del before["budget"]["ramp"]
    assert not changed_parts(recipe.to_dict(), before)


def test_the_rate_goes_with_the_size_as_asked():
    for scaling, factors in {"none": [1, 1], "sqrt": [0.5, 1], "linear": [0.25, 1]}.items():
        ramp = sizes(128, 512, 1536, lr_scaling=scaling)
        assert [ramp.lr_factor(0), ramp.lr_factor(8)] == factors


def test_every_size_must_divide_over_the_ranks():
    """The line names the micro-batch that does, or says what the sizes must be multiples of."""
    four, one = (
        load_recipe(
            "features/gpt2", [f'budget.ramp={{"from_tokens_per_step": {tokens}, "over_tokens": 20480}}']
        )
        for tokens in (512, 128)
    )
    said = refusal(accumulation_steps, four, 2)
    assert "budget.ramp: a step of 4 sequences " in said and "train_batch_size=2 divides every step" in said
    assert "multiples of 256, or take fewer ranks" in refusal(accumulation_steps, one, 2)


def test_a_ramp_given_up_on_the_way_trains_the_rest_of_the_budget():
    """--allow_change budget.ramp: what was consumed counts, full steps for what is left."""
    start = Start(None, step=8, tokens=sum(SIZES[:8]))
    recipe = load_recipe("features/gpt2", ["budget.tokens_per_step=1024", "budget.tokens=10240"])
    assert start.progress(recipe).last_step == 8 + (10240 - 1792) // 1024
    assert start.progress(recipe).tokens_at(9) == 1792 + 1024


LATER = shutil.ignore_patterns("checkpoint-8", "checkpoint-10", "export")
"""What a run that ended after its sixth step has not."""


@pytest.fixture(scope="module")
def ramped(workshop) -> Run:
    """Ten steps on two ranks."""
    return workshop.run("zero3", settings=RAMPED)


def test_each_step_holds_its_samples(ramped):
    """Tokens, learning rate and the markers' positions, by hand."""
    assert column(ramped, "train/tokens") == list(accumulate(SIZES))
    marker = read_marker(ramped.dir.checkpoint(4))
    assert (marker["tokens"], marker["samples"]) == (512, 8)
    warmed_up = [0, 0.005, *[0.01] * 8]
    rates = [rate * (size / FULL) ** 0.5 for rate, size in zip(warmed_up, SIZES, strict=True)]
    assert column(ramped, "train/learning_rate") == pytest.approx(rates)


def test_a_small_step_is_a_step_of_that_size(workshop, ramped):
    """The first stair is the beginning of a run whose steps all have its size, at its rate."""
    budget = ("budget.tokens_per_step=128", "budget.tokens=1280", "training.learning_rate=0.005")
    small = workshop.plain((*budget, *RAMPED[-2:]))
    for key in ("train/loss", "train/grad_norm"):
        assert largest_difference(column(ramped, key)[:4], column(small, key)[:4]) <= 1e-5


def test_resumed_in_mid_ramp_on_other_ranks_it_is_the_same_run(workshop, ramped, tmp_path):
    """From the checkpoint after four steps, on one plain process: the unbroken run's losses."""
    output = shutil.copytree(ramped.folder, tmp_path / "resumed", ignore=LATER)
    resumed = Run(output, completed(workshop.command(output, "null", 1, "plain", RAMPED)))
    assert resumed.events[-2]["event"] != "start" and len(resumed.losses) == STEPS
    assert largest_difference(resumed.losses, ramped.losses) <= 1e-5
    assert column(resumed, "train/tokens") == column(ramped, "train/tokens")


OWN_PARTS = """
import os
from pathlib import Path
import torch
from transformers import TrainerCallback
from pretraining import extend

spoils = False

@extend.callback
class Spoiler(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        global spoils
        flag = Path(__file__).with_name(f"spoilt-{os.environ.get('RANK', 0)}")
        spoils = state.global_step == 6 and not flag.exists()
        if spoils:
            flag.touch()

@extend.loss
def spoilt(logits, labels):
    nats = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return nats * float("nan") if spoils else nats

@extend.schedule
def falling(step, num_steps, warmup_steps, power):
    return (1 - step / num_steps) ** power
"""
"""A schedule, and what makes the loss of the seventh step a NaN, once on each rank."""


def test_a_schedule_of_ones_own_rolls_back_and_resumes_in_mid_ramp(workshop, tmp_path):
    """A NaN in step 7 leads back to step 4; a start from there repeats the rest of the run to the last digit."""
    own, healed = tmp_path / "own_parts.py", tmp_path / "healed"
    own.write_text(OWN_PARTS)
    settings = (
        *RAMPED[:-2],
        f"extensions={json.dumps([str(own)])}",
        "loss.function=spoilt",
        "training.lr_scheduler_type=falling",
        'training.lr_scheduler_kwargs={"power": 2}',
        'monitors.spikes={"policy": "rollback", "non_finite_streak": 1, "skip_steps": 1}',
    )
    run = Run(healed, completed(workshop.command(healed, settings=settings)))
    (rollback,) = (event for event in run.events if event["event"] == "rollback")
    assert (rollback["step"], rollback["to_step"]) == (7, 4)
    rates = [0.01 * (1 - step / STEPS) ** 2 * (size / FULL) ** 0.5 for step, size in enumerate(SIZES)]
    assert column(run, "train/learning_rate") == pytest.approx(rates)
    assert column(run, "train/tokens") == list(accumulate(SIZES))
    again = shutil.copytree(healed, tmp_path / "again", ignore=LATER)
    finished = completed(workshop.command(again, settings=settings))
    assert "continued from checkpoint-4" in finished.stdout
    for key in ("train/loss", "train/learning_rate", "train/tokens"):
        assert column(Run(again), key) == column(run, key), key
