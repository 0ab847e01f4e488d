"""The schedules that recipes/README.md names, as the recipe's own keywords make them: the rate at every step."""

import math

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from pretraining.recipe import load_recipe

STEPS, WARMUP, DECAY = 100, 10, 20


def cosine_to_a_tenth(step: int) -> float:
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def stable_then(decay, floor: float = 0.0):
    """Constant until DECAY steps before the end, then `decay` of the share that is over."""

    def factor(step: int) -> float:
        over = (step - (STEPS - DECAY)) / DECAY
        return 1.0 if over < 0 else floor + (1 - floor) * decay(over)

    return factor


WSD = ("warmup_stable_decay", {"num_decay_steps": DECAY})
SCHEDULES = {
    "cosine to a floor": ("cosine_with_min_lr", {"min_lr_rate": 0.1}, cosine_to_a_tenth),
    "linear decay": (WSD[0], {**WSD[1], "decay_type": "linear"}, stable_then(lambda over: 1 - over)),
    "cosine decay": (
        WSD[0],
        {**WSD[1], "decay_type": "cosine"},
        stable_then(lambda over: 0.5 * (1 + math.cos(math.pi * over))),
    ),
    "1-sqrt decay": (
        WSD[0],
        {**WSD[1], "decay_type": "1-sqrt"},
        stable_then(lambda over: 1 - math.sqrt(over)),
    ),
    "decay to a floor": (
        WSD[0],
        {**WSD[1], "decay_type": "linear", "min_lr_ratio": 0.1},
        stable_then(lambda over: 1 - over, floor=0.1),
    ),
    "inverse square root": ("inverse_sqrt", {}, lambda step: math.sqrt(WARMUP / step)),
    "constant": ("constant_with_warmup", {}, lambda step: 1.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_at_every_step(name, tmp_path):
    """Linear warm-up from zero, then the formula; read from a recipe, strict keys and all."""
    kind, keywords, factor = SCHEDULES[name]
    settings = [
        f"training.{key}={value}" for key, value in (("lr_scheduler_type", kind), ("warmup_steps", WARMUP))
    ]
    settings += [f"training.lr_scheduler_kwargs={str(keywords).replace(chr(39), chr(34))}"]
    training = load_recipe("tiny", settings).training
    keys = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, **{key: training[key] for key in keys}
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=arguments.learning_rate)
    schedule = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.get_warmup_steps(STEPS),
        num_training_steps=STEPS,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )
    for step in range(STEPS):
        floor = keywords.get("min_lr_ratio", 0.0)  # of the warm-up too
        expected = floor + (1 - floor) * step / WARMUP if step < WARMUP else factor(step)
        assert schedule.get_last_lr()[0] == pytest.approx(arguments.learning_rate * expected, abs=1e-12), step
        optimizer.step()
        schedule.step()
