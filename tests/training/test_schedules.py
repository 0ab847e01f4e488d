"""The schedules that recipes/README.md names, as the recipe's own keywords make them: the rate at every step."""

import json
import math
import shutil
from itertools import pairwise

import pytest
import torch
from transformers import TrainerState, get_scheduler

from pretraining.recipe import load_recipe
from pretraining.recipe.budget import Budget
from pretraining.recipe.training import steps_of
from pretraining.training.arguments import build_arguments
from pretraining.training.schedule import follow_run
from tests.gear.runs import Run, completed
from tests.training.test_batch_ramp import RAMPED
from tests.training.test_curve import column

STEPS, WARMUP, DECAY = 100, 10, 20


def cosine_to_a_tenth(step: int) -> float:
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def stable_then(decay, floor: float = 0.0):
    """Constant until DECAY steps before the end, then `decay` of the share that is over."""

    def factor(step: int) -> float:
        over = (step - (STEPS - DECAY)) / DECAY
        return 1.0 if over < 0 else floor + (1 - floor) * decay(over)

    return factor


def wsd(decay, **keywords) -> tuple:
    """A schedule with such a decay at its end, to `min_lr_ratio`."""
    keywords = {"num_decay_steps": DECAY, **keywords}
    return "warmup_stable_decay", keywords, stable_then(decay, keywords.get("min_lr_ratio", 0.0))


SCHEDULES = {
    "cosine to a floor": ("cosine_with_min_lr", {"min_lr_rate": 0.1}, cosine_to_a_tenth),
    "linear decay": wsd(lambda over: 1 - over, decay_type="linear"),
    "cosine decay": wsd(lambda over: 0.5 * (1 + math.cos(math.pi * over)), decay_type="cosine"),
    "1-sqrt decay": wsd(lambda over: 1 - math.sqrt(over), decay_type="1-sqrt"),
    "decay to a floor": wsd(lambda over: 1 - over, decay_type="linear", min_lr_ratio=0.1),
    "inverse square root": ("inverse_sqrt", {}, lambda step: math.sqrt(WARMUP / step)),
    "constant": ("constant_with_warmup", {}, lambda step: 1.0),
}


def schedule_of(recipe, folder, num_steps: int):
    """The Trainer's schedule of a recipe, as a factor of its rate."""
    arguments = build_arguments(recipe, None, folder, 1)
    return get_scheduler(
        arguments.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=arguments.get_warmup_steps(STEPS),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_at_every_step(name, tmp_path):
    """Linear warm-up from zero, then the formula; read from a recipe, strict keys and all."""
    kind, keywords, factor = SCHEDULES[name]
    settings = [f"training.lr_scheduler_type={kind}", f"training.warmup_steps={WARMUP}"]
    settings += [f"training.lr_scheduler_kwargs={json.dumps(keywords)}"]
    schedule = schedule_of(load_recipe("features/gpt2", settings), tmp_path, STEPS)
    for step in range(STEPS):
        floor = keywords.get("min_lr_ratio", 0.0)  # of the warm-up too
        expected = floor + (1 - floor) * step / WARMUP if step < WARMUP else factor(step)
        assert schedule.get_last_lr()[0] == pytest.approx(expected, abs=1e-12), step
        schedule.optimizer.step()
        schedule.step()


STEP = 2048  # tokens of a full step of recipe `tiny`
RISING = f'budget.ramp={{"from_tokens_per_step": {STEP // 4}, "over_tokens": {36 * STEP}}}'
IN_TOKENS = {
    "decay": (
        ("warmup_stable_decay", {"decay_type": "linear"}, stable_then(lambda over: 1 - over)),
        [f"budget.warmup_tokens={WARMUP * STEP}", f"budget.decay_tokens={DECAY * STEP}"],
    ),
    "cosine": (SCHEDULES["cosine to a floor"], [f"budget.warmup_tokens={WARMUP * STEP}"]),
    "inverse square root": (SCHEDULES["inverse square root"], [f"budget.warmup_tokens={WARMUP * STEP}"]),
}


@pytest.mark.parametrize("given", [0, 7, 0.03, 0.0999, 0.25])
def test_the_trainer_warms_up_for_as_many_steps_as_the_recipe_says(given, tmp_path):
    """The plan, a branch and the ladder count by the recipe; the rate of most schedules, and saves, by the Trainer."""
    recipe = load_recipe(
        "features/gpt2", [f"training.warmup_steps={given}", f"training.save_steps={given or 1}"]
    )
    arguments, state = build_arguments(recipe, None, tmp_path, 1), TrainerState()
    for steps in (10, 333, 1000):
        assert arguments.get_warmup_steps(steps) == recipe.warmup_steps(steps)
        state.compute_steps(arguments, steps)
        assert state.save_steps == steps_of(recipe.training.save_steps, steps)


def recipe_in_tokens(name: str, *more: str):
    (kind, keywords, _), budget = IN_TOKENS[name]
    settings = [f"training.lr_scheduler_type={kind}", f"budget.tokens={STEPS * STEP}", RISING, *budget]
    settings += [f"training.lr_scheduler_kwargs={json.dumps(keywords)}"]
    return load_recipe("features/gpt2", [*settings, "training.warmup_steps=0", *more])


@pytest.mark.parametrize("name", IN_TOKENS)
def test_a_schedule_in_tokens_does_not_see_the_ramp(name, tmp_path):
    """The rate is that of the tokens consumed, however many steps they were."""
    recipe, (_, _, factor) = recipe_in_tokens(name), IN_TOKENS[name][0]
    progress = recipe.progress()
    schedule = schedule_of(recipe, tmp_path, progress.schedule_place(recipe.num_steps))
    follow_run(schedule, progress)
    (rate,) = schedule.lr_lambdas
    assert recipe.num_steps > STEPS + 20 and recipe.num_tokens == STEPS * STEP
    for step in range(recipe.num_steps):
        consumed = recipe.step_sizes.tokens_at(step) / STEP
        expected = consumed / WARMUP if consumed < WARMUP else factor(consumed)
        assert rate(step) == pytest.approx(expected, abs=1e-12), step


def test_a_run_follows_its_tokens_and_so_does_one_that_goes_on(workshop, tmp_path):
    """Warm-up over two full steps' tokens in a ramp, decay over the last two: by hand, and after a resume."""
    settings = (
        *RAMPED[:-2],
        "training.lr_scheduler_type=warmup_stable_decay",
        'training.lr_scheduler_kwargs={"decay_type": "linear"}',
        "training.warmup_steps=0",
        "budget.warmup_tokens=1024",
        "budget.decay_tokens=1024",
        "checkpoints.keep_last=1",
    )
    run = workshop.plain(settings)
    # the newest, and the last one before the rate fell
    assert sorted(each.name for each in run.folder.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-8"]
    consumed = [0, *column(run, "train/tokens")]
    scale = [(after - before) / 512 for before, after in pairwise(consumed)]
    tokens = zip(consumed, scale, strict=False)
    expected = [min(1, at / 1024, (consumed[-1] - at) / 1024) * size**0.5 * 0.01 for at, size in tokens]
    assert column(run, "train/learning_rate") == pytest.approx(expected)
    resumed = workshop.continued(run, tmp_path / "run", settings=settings)
    assert column(resumed, "train/learning_rate") == column(run, "train/learning_rate")
    assert resumed.losses == run.losses


STABLE_THEN_DECAY = ["training.lr_scheduler_type=warmup_stable_decay", "training.lr_scheduler_kwargs={}"]
ROUND, FIFTH = "budget.tokens=2e6", "budget.decay_tokens=0.2"
ROUNDED = {
    "a round budget": ([ROUND], (2_000_896, None, None), "2,000,000 is read as 2,000,896, 977 steps"),
    "the last fifth": ([FIFTH], (2_048_000, None, 409_600), "0.2 is read as 409,600, 200 steps"),
    "shares of a round budget": (
        [ROUND, FIFTH, "budget.warmup_tokens=0.01", "training.warmup_steps=0"],
        (2_000_896, 20_480, 399_360),
        "budget.warmup_tokens: 0.01 is read as 20,480, 10 steps",
    ),
}


def test_a_rate_that_rises_at_a_start_is_told(workshop, tmp_path):
    """A run whose rate has fallen and whose budget is longer now: the schedule is back where its rate was high."""
    output = tmp_path / "run"
    shutil.copytree(workshop.plain().folder, output, ignore=shutil.ignore_patterns("export"))
    longer, more = ("budget.tokens=10240",), ["--allow_change", "budget.tokens"]
    finished = completed(workshop.command(output, "null", 1, "plain", longer, more))
    assert "the learning rate rises from" in finished.stderr and "branch" in finished.stderr
    (event,) = [event for event in Run(output).events if event["event"] == "rate_rises"]
    assert event["step"] == 10 and event["now"] > 1.1 * event["earlier"]


IDLE = {
    # transformers' default is to validate at the end alone, whatever the cadence
    ("training.eval_strategy=no", "training.eval_steps=25"): ["training.eval_strategy is no"],
    ("training.eval_steps=25",): [],
    ("optimizer.momentum=0.9", "optimizer.per_head=true", "optimizer.nesterov=true"): [
        "optimizer.momentum: does nothing without optimizer.name=muon",
        "optimizer.per_head",
    ],
    ("optimizer.momentum=0.9", "optimizer.per_head=true", "optimizer.name=muon"): [],
    ("optimizer.average_steps=4",): ["optimizer.average_steps: does nothing without optimizer.average_decay"],
    ("evaluation.task_limit=8",): [
        "evaluation.task_limit: does nothing without evaluation.tasks or evaluation.hellaswag"
    ],
    ("evaluation.hellaswag=a.jsonl", "evaluation.task_limit=8"): [],
    ("evaluation.sample_tokens=0", "evaluation.sampling.temperature=0"): [
        "evaluation.sampling: does nothing without evaluation.sample_tokens"
    ],
    ("monitors.spikes.lr_factor=0.5", "monitors.spikes.policy=rollback"): [
        "monitors.spikes.lr_factor: does nothing without monitors.spikes.lr_steps"
    ],
    ("checkpoints.upload_mirror=false", "checkpoints.keep_last=null", "checkpoints.demote_to_weights=true"): [
        "checkpoints.demote_to_weights: does nothing without checkpoints.keep_last",
        "checkpoints.upload_mirror: does nothing without checkpoints.upload",
    ],
    ("loss.balance_weight=0.1",): ["loss.balance_weight: does nothing: the model has no experts"],
    ("monitors.prometheus.port=1",): ["monitors.prometheus: does nothing without training.report_to"],
    ("monitors.prometheus.port=1", "training.report_to=prometheus"): [],
    ('model.draw=[{"kind":"head","std":0}]', "model.initial_weights=a"): ["model.draw: does nothing"],
    ('data.validation={"sources":[{"path":"a.txt"}],"filters":true}',): [
        "data.validation.filters: does nothing without data.filters"
    ],
    (
        'data.validation={"sources":[{"path":"a.txt"}]}',
        'data.filters=[{"rule":"length","min_words":9,"sources":["a.txt"]}]',
    ): ["data.filters.0: is for sources of validation alone, and does nothing"],
    (
        'data.sources=[{"path":"a","weight":1},{"path":"b","weight":1}]',
        'data.mixture={"stages":[{"weights":{"a":1,"b":2}}]}',
    ): ["data.sources: their weights do nothing"],
}


@pytest.mark.parametrize(
    "name, said", {"eval": "validated", "save": "checkpoint", "logging": "logged"}.items()
)
def test_what_comes_once_an_epoch_is_said_to_come_at_the_end(name, said):
    """A run is one epoch, however often it reads its text."""
    (note,) = load_recipe("features/gpt2", [f"training.{name}_strategy=epoch"]).notes
    assert said in note and note.endswith(f"--set training.{name}_strategy=steps")


@pytest.mark.parametrize("settings", IDLE)
def test_keys_that_the_run_does_not_read_are_said_to_do_nothing(settings):
    """Nobody compares two settings of which the run reads neither."""
    notes = load_recipe("features/gpt2", settings).notes
    assert len(notes) == len(IDLE[settings])
    assert all(said in note for said, note in zip(IDLE[settings], notes, strict=True))


@pytest.mark.parametrize("settings, expected, said", ROUNDED.values(), ids=ROUNDED)
def test_budgets_are_written_as_people_say_them(settings, expected, said):
    """Tokens and shares are rounded to whole steps, and a note says to how many; a resolved recipe has none to say."""
    recipe = load_recipe(
        "features/gpt2", [*settings, *(STABLE_THEN_DECAY if "decay" in str(settings) else [])]
    )
    budget = recipe.budget
    assert (budget.tokens, budget.warmup_tokens, budget.decay_tokens) == expected
    assert any(said in note for note in recipe.notes)
    again = Budget.of(budget.to_dict())
    assert again == budget and not again.rounded(budget.to_dict())
