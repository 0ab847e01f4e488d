"""Learning rates as the authors of published runs computed them, if no schedule of transformers does."""

import math

from pretraining import extend


@extend.schedule
def cosine_on_floor(step: float, num_steps: int, warmup_steps: int, floor: float = 0.1) -> float:
    """Follow GPT-NeoX 1.0: half a cosine to zero over all steps, begun after the warm-up and never below `floor`.

    Nothing changes in the last `warmup_steps` steps, but by then the floor is reached.
    """
    counted = min(step, num_steps - warmup_steps)
    if step <= warmup_steps:
        return counted / warmup_steps
    return max(floor, (1 + math.cos(math.pi * (counted - warmup_steps) / num_steps)) / 2)
