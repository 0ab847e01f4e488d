"""What a rank does in a test of refused steps: `python -m tests.gear.refusing_rank STORY`."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from pretraining.training.ranks import join_ranks, leave_ranks
from pretraining.training.stability import NonFiniteGuard

WAYS = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3_offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
FACTORS = (1.0, float("inf"), 1.0, float("nan"), 1.0)
"""Of the loss of each step."""


def refused_steps(zero: dict) -> list[bool]:
    """Which of the steps were refused, by bf16 weights with fp32 sums of two micro-batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    choose = DeepSpeedCPUAdam if "offload_optimizer" in zero else torch.optim.AdamW
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {**zero, "reduce_bucket_size": 1000},
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=choose(model.parameters(), lr=0.01), config=config
    )
    wrapped = SimpleNamespace(optimizer=optimizer, step_was_skipped=False)  # as accelerate wraps it
    guard, refused = NonFiniteGuard(wrapped), []
    for factor in FACTORS:
        for _ in range(2):
            loss = engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().mean() * factor
            engine.backward(loss)
            engine.step()
        wrapped.step_was_skipped = optimizer.overflow
        refused.append(guard.refused_last_step())
    return refused


def main(story: str) -> None:
    join_ranks()
    Path(story).write_text(json.dumps({name: refused_steps(zero) for name, zero in WAYS.items()}))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
