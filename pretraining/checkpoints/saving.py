"""Saving: every rank gives its own fragments, rank 0 also what is the same on every rank."""

import json
from collections.abc import Iterator
from dataclasses import asdict

import torch
import torch.distributed as dist
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from pretraining.checkpoints.fragments import LiveState, live_state
from pretraining.checkpoints.random_state import random_numbers, random_tensors
from pretraining.checkpoints.rank_share import RankShare
from pretraining.checkpoints.schedule import scaler_state, schedule_state
from pretraining.checkpoints.shard_files import FORMAT, STATE_FILE, fragment_key


def rank_share(trainer: Trainer) -> RankShare:
    """This rank's share of a checkpoint of the Trainer as it stands; all ranks call it together."""
    live = live_state(trainer.model, trainer.optimizer)
    files = {}
    if dist.get_rank() == 0:
        files[STATE_FILE] = _json(replicated_state(trainer, live))
        files[TRAINER_STATE_NAME] = _json(asdict(trainer.state), sort_keys=True)
    receipt = {"rng": random_numbers(), "running_loss": running_loss(trainer)}
    return RankShare(dict(rank_tensors(live)), files, receipt)


def running_loss(trainer: Trainer) -> dict:
    """The sum of this rank's losses since the last logged step, in nats per token, and how many steps that is."""
    steps = trainer.state.global_step - trainer._globalstep_last_logged
    return {"sum": trainer._tr_loss.item(), "steps": steps}


def rank_tensors(live: LiveState) -> Iterator[tuple[str, torch.Tensor]]:
    """(key, tensor) of all that this rank saves: live views, copies only of what lies on NVMe."""
    for block in live.blocks:
        with live.held(block):
            for key, tensor in _block_tensors(live, block):
                yield key, tensor.clone() if live.is_swapped(block) else tensor
    if dist.get_rank() == 0:
        for name, buffer in persistent_buffers(live.model).items():
            yield fragment_key("buffer", name, 0), buffer.detach().reshape(-1)
    yield from random_tensors().items()


def _block_tensors(live: LiveState, block) -> Iterator[tuple[str, torch.Tensor]]:
    for state, tensor in block.per_element().items():
        for piece in map(live.own, block.pieces):
            if piece.numel:
                yield fragment_key(state, piece.parameter, piece.start), piece.of(tensor)
    for state, tensor in block.whole().items():
        if len(block.parameters) == 1 and live.owns_whole():
            yield fragment_key(state, block.parameters[0], None), tensor.detach()


def replicated_state(trainer: Trainer, live: LiveState) -> dict:
    """What is the same on every rank, as JSON; the key `scalars` holds the optimizer's counts by parameter."""
    scalars = {}
    for block in live.blocks:
        with live.held(block):
            values = block.scalars()
            scalars |= {name: values for name in block.parameters if block.state}
    scaler = live.loss_scaler() or trainer.accelerator.scaler
    return {
        "format": FORMAT,
        "optimizer": type(live.torch_optimizer).__name__,
        "scalars": scalars,
        "schedule": schedule_state(trainer.lr_scheduler),
        "loss_scaler": scaler_state(scaler),
        "skipped_steps": getattr(trainer.model_wrapped, "skipped_steps", 0),
        "parameters": {name: _shape_and_type(p) for p, name in live.names.items()},
        "buffers": {name: _shape_and_type(b) for name, b in persistent_buffers(live.model).items()},
    }


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the model's state, by name."""
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                found[name] = buffer
    return found


def _shape_and_type(tensor: torch.Tensor) -> dict:
    """Of the whole tensor, also where ZeRO-3 has partitioned it."""
    shape = getattr(tensor, "ds_shape", tensor.shape)
    return {"shape": list(shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _json(value: dict, **keywords) -> bytes:
    return (json.dumps(value, indent=2, **keywords) + "\n").encode()
