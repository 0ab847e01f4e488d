"""A few steps of a recipe through the repository's own arguments, Trainer and ds_config, on one block of zeros."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from pretraining.ds_config import degrees_of
from pretraining.model.attention import SDPA_CAUSAL, split_attention
from pretraining.model.loss import build_loss
from pretraining.model.vocabulary_parallel import split_vocabulary
from pretraining.recipe import Recipe
from pretraining.runtime.rank_groups import rank_groups
from pretraining.training.arguments import build_arguments
from pretraining.training.ranks import join_ranks
from pretraining.training.trainer import PretrainingTrainer
from pretraining.upstream.wide_weights import keep_in_fp32


def short_trainer(
    recipe: Recipe,
    config: dict | None,
    folder: Path,
    accumulation: int,
    steps: int,
    callback: TrainerCallback,
) -> PretrainingTrainer:
    """A Trainer ready to run `steps` steps; joins the process group. The weights are transformers' own draw."""
    join_ranks()
    arguments = build_arguments(recipe, config, folder, accumulation)
    dtype = torch.bfloat16 if config and arguments.bf16 else torch.float32
    groups = rank_groups(degrees_of(config))
    shape = {"use_cache": False, **recipe.model}
    if groups.degrees.sequence > 1:
        shape["attn_implementation"] = split_attention(SDPA_CAUSAL, groups)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)
    if recipe.weights.keep_in_fp32:
        keep_in_fp32(built, recipe.weights.keep_in_fp32, dtype)
    if groups.degrees.tensor > 1:
        split_vocabulary(built, groups.degrees.tensor)
    built.loss_type = None
    block = torch.zeros(recipe.sequence_length, dtype=torch.long)
    return PretrainingTrainer(
        recipe,
        built,
        arguments,
        loss=build_loss(built, recipe.loss, groups),
        train_dataset=[{"input_ids": block, "labels": block}] * (recipe.samples_per_step * steps),
        callbacks=[callback],
        groups=groups,
    )
