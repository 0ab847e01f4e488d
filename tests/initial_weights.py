"""Build models as a run does, in a run's process group, and save their initial weights: a program for tests."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from transformers import integrations

from pretraining.ds_config import load_ds_config
from pretraining.model.build import build_model
from pretraining.recipe.sections import Speed
from pretraining.recipe.training import Training
from pretraining.training.arguments import build_arguments
from pretraining.training.ranks import join_ranks, leave_ranks
from tests.runs import MODELS, OTHER_MODELS, SMALL_RECIPE

STAGES = ("null", "zero2", "zero3")
TOKENIZER = SimpleNamespace(bos_token_id=0, eos_token_id=0)


def initial_weights(model: dict, stage: str, bf16: bool) -> dict[str, torch.Tensor]:
    """{parameter name: full tensor} of a freshly built model."""
    training = Training({**SMALL_RECIPE["training"], "bf16": bf16})
    recipe = SimpleNamespace(training=training, training_keywords=training, num_steps=10, path="small.json")
    recipe.speed = Speed(compile="none")
    ds_config = None if stage == "null" else load_ds_config(stage)
    arguments = build_arguments(recipe, ds_config, Path("unused"), 1)
    built = build_model(model, TOKENIZER, arguments)
    assert any(hasattr(p, "ds_id") for p in built.parameters()) == (stage == "zero3")
    with deepspeed.zero.GatheredParameters(list(built.parameters()), enabled=stage == "zero3"):
        return {name: parameter.detach().clone() for name, parameter in built.named_parameters()}


def refuse_to_draw(model) -> None:
    """Transformers' own draw under ZeRO-3 gathers every module once more, for weights that ours replace."""
    raise AssertionError("transformers drew the weights too")


def main() -> None:
    """Save {(model, stage, bf16): weights} at the path in the first argument."""
    integrations.deepspeed.initialize_weights_zero3 = refuse_to_draw
    join_ranks()
    found = {
        (name, stage, bf16): initial_weights(model, stage, bf16)
        for name, model in (MODELS | OTHER_MODELS).items()
        for stage in STAGES
        for bf16 in (False, True)
    }
    if dist.get_rank() == 0:
        torch.save(found, sys.argv[1])
    leave_ranks()
    # Once in some thirty times a C++ thread aborted the interpreter's exit here; the weights are saved by now.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
