"""One rank that steps DeepSpeed's optimizers with the gradient norm as they read it, and as we have it read."""

import contextlib
import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3

from pretraining.training.ranks import joined_ranks
from pretraining.upstream.deepspeed import read_norm_once

THEIRS = (bf16_optimizer.get_global_norm_of_tensors, stage3.combine_grad_norm_groups)
STAGES = (1, 2, 3)
STEPS, NOT_FINITE = 4, 2


def stepped(stage: int, in_bf16: bool, reads_once: bool) -> list:
    """[norms, whether each step was refused, weights after the last] of a model with clipping, one step not finite."""
    bf16_optimizer.get_global_norm_of_tensors, stage3.combine_grad_norm_groups = THEIRS
    torch.manual_seed(1)
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(dtype)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrices]} for matrices in (True, False)
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.05,
        "bf16": {"enabled": in_bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000},
    }
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups), config=config
    )
    if reads_once:
        read_norm_once(engine.optimizer)
    norms, refused = [], []
    for step in range(STEPS):
        inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        inputs[0, 0] += float("nan") if step == NOT_FINITE else 0.0
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        refused.append(bool(optimizer.overflow))
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters) if stage == 3 else contextlib.nullcontext():
        weights = [parameter.tolist() for parameter in parameters]
    engine.destroy()
    return [norms, refused, weights]


if __name__ == "__main__":
    with joined_ranks(None):
        found = {
            f"zero{stage}{' in bf16' * in_bf16}": [stepped(stage, in_bf16, once) for once in (False, True)]
            for stage in STAGES
            for in_bf16 in (True, False)
        }
    Path(sys.argv[1]).write_text(json.dumps(found))
