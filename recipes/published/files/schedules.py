"""Learning rates as the authors of published runs computed them, if no schedule of transformers does."""

import math

from pretraining import extend


@extend.schedule
def cosine_ahead(
    step: float,
    num_steps: int,
    warmup_steps: int,
    end: float = 0.0,
    warmup_ahead: float = 1.0,
    ahead: float = 0.0,
    planned: float = 1.0,
) -> float:
    """Rise linearly, then fall as half a cosine to `end`, each read some steps ahead of the finished ones.

    llm.c counts the step that it takes in the warm-up alone (1 and 0), OLMo in both (1 and 1). TinyLlama sets the rate
    at each of eight micro-batches, and steps with the last one's (7/8 and 7/8).

    planned: the length of the schedule, in lengths of the run: above 1 the run ends before its schedule.
    """
    if step < warmup_steps:
        return (step + warmup_ahead) / warmup_steps
    fallen = (step + ahead - warmup_steps) / (planned * num_steps - warmup_steps)
    return end + (1 - end) * (1 + math.cos(math.pi * min(1.0, fallen))) / 2


@extend.schedule
def cosine_on_floor(step: float, num_steps: int, warmup_steps: int, floor: float = 0.1) -> float:
    """Follow GPT-NeoX 1.0: half a cosine to zero over all steps, begun after the warm-up and never below `floor`.

    Nothing changes in the last `warmup_steps` steps, but by then the floor is reached.
    """
    counted = min(step, num_steps - warmup_steps)
    if step <= warmup_steps:
        return counted / warmup_steps
    return max(floor, (1 + math.cos(math.pi * (counted - warmup_steps) / num_steps)) / 2)


@extend.schedule
def linear_cooldown(step: float, num_steps: int, warmup_steps: int, share: float = 0.7) -> float:
    """Hold the rate and fall linearly to zero over the last `share` of the run; the warm-up counts its own step."""
    left = 1 - step / num_steps
    rising = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    return rising * min(1.0, left / share)
