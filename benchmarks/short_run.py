"""A few steps of a recipe through the repository's own arguments, Trainer and ds_config, on one block of zeros."""

import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from pretraining.ds_config import degrees_of
from pretraining.model.attention import SDPA_CAUSAL, split_attention
from pretraining.model.expert_parallel import split_experts
from pretraining.model.loss import build_loss
from pretraining.model.vocabulary_parallel import split_vocabulary
from pretraining.recipe import Recipe
from pretraining.runtime.rank_groups import rank_groups
from pretraining.training.arguments import build_arguments
from pretraining.training.ranks import join_ranks
from pretraining.training.trainer import PretrainingTrainer
from pretraining.upstream.deepspeed import share_of
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
    if groups.degrees.expert > 1:
        split_experts(built, groups.degrees.expert)
        # their memory is not filled; with stage 3 a rank has its shard
        for parameter in filter(share_of, built.parameters()):
            getattr(parameter, "ds_tensor", parameter).data.normal_(std=0.02)
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


def on_ranks(ranks: int, measure: Callable[[Path], dict], name: str) -> list[dict]:
    """Fork the ranks, after the imports, and collect what `measure` returns in each; it gets a folder of them all.

    name: of the case, for the message if it fails.
    """
    import deepspeed  # noqa: F401

    with tempfile.TemporaryDirectory() as made:
        folder, port, children = Path(made), _free_port(), []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os._exit(_measure_on(rank, ranks, port, folder, measure))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{name} failed:\n{(folder / 'log').read_text()[-3000:]}")
        return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


def _measure_on(rank: int, ranks: int, port: int, folder: Path, measure: Callable[[Path], dict]) -> int:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    places = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(number) for name, number in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        (folder / str(rank)).write_text(json.dumps(measure(folder)))
        return 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
