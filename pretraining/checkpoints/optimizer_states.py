"""What an optimizer keeps for each tensor it steps, asked of the optimizer itself, and set from a checkpoint."""

from collections import defaultdict

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from pretraining.checkpoints.fragments import Block, is_per_element
from pretraining.checkpoints.shard_files import MASTER, CheckpointReader
from pretraining.errors import UserError


def set_block(block: Block, reader: CheckpointReader) -> None:
    """Fill a block's master weights and optimizer states, a piece of one parameter in memory at a time.

    Raises:
        UserError: the checkpoint does not keep what this optimizer needs.
    """
    for piece in block.pieces:
        piece.of(block.tensor).copy_(reader.read(MASTER, piece.parameter, piece.start, piece.numel))
    saved = _saved_scalars(block, reader)
    if saved is None:  # no gradient has reached these parameters yet
        return
    probe, kept = states_after_a_step(block, int(saved.get("step", 1)))
    live = block.optimizer.state[block.tensor]
    for key, example in kept.items():
        if is_per_element(key, example, probe):
            _set_per_element(block, key, example, reader)
        elif torch.is_tensor(example) and example.numel() > 1:
            live[key] = _whole(block, key, reader).to(example.device, example.dtype)
        elif key in saved:
            live[key] = _as(saved[key], example)
        else:
            live[key] = example


def _set_per_element(block: Block, key: str, example: torch.Tensor, reader: CheckpointReader) -> None:
    live = block.optimizer.state[block.tensor]
    if key not in live:
        live[key] = torch.zeros_like(block.tensor, dtype=example.dtype, device=example.device)
    for piece in block.pieces:
        if key in reader.states(piece.parameter):
            piece.of(live[key]).copy_(reader.read(key, piece.parameter, piece.start, piece.numel))
        elif piece.parameter in reader.state["scalars"]:
            raise _other_states(block, key, piece.parameter, reader)


def _whole(block: Block, key: str, reader: CheckpointReader) -> torch.Tensor:
    if key not in reader.whole_states(block.parameters[0]):
        raise _other_states(block, key, block.parameters[0], reader)
    return reader.read_whole(key, block.parameters[0])


def _other_states(block: Block, key: str, parameter: str, reader: CheckpointReader) -> UserError:
    found = [*reader.states(parameter), *(f"{state} (factored)" for state in reader.whole_states(parameter))]
    return UserError(
        f"{reader.folder} has {', '.join(found)} of {parameter}, and {type(block.optimizer).__name__} at this ZeRO "
        f"stage needs {key}: resume with the optimizer and the kind of sharding that saved it"
    )


def _saved_scalars(block: Block, reader: CheckpointReader) -> dict | None:
    """The numbers all parameters of the block agree on; None where the optimizer had stepped none of them."""
    table = reader.state["scalars"]
    found = [table[name] for name in block.parameters if name in table]
    if any(values != found[0] for values in found):
        raise UserError(
            f"{reader.folder}: the optimizer's counts differ between {block.parameters[0]} and others of its "
            "group, which ZeRO keeps as one: resume without ZeRO"
        )
    return found[0] if found else None


def _as(value: float, example: object) -> object:
    """A saved number in the type in which this optimizer keeps it."""
    if torch.is_tensor(example):
        return torch.full_like(example, value)
    return type(example)(value)


def states_after_a_step(block: Block, step: int) -> tuple[torch.Tensor, dict]:
    """A tensor of two elements a dimension, and what the block's optimizer keeps for it after stepping it.

    Which states, of which types and devices, differs between optimizers and their versions; a step shows it. One
    that quantises does so to large tensors only: for it the tensor has the block's own size.
    DeepSpeed's CPU Adam multiplies its bias corrections up from step to step: it is taken through all `step` of
    them, so that the next one finds the value it would have had.
    """
    optimizer, like = block.optimizer, block.tensor
    shape = like.shape if _quantises(optimizer) else (2,) * like.dim()
    probe = torch.nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
    probe.grad = torch.zeros_like(probe)
    own = optimizer.state, optimizer.param_groups
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = [{**own[1][block.group], "params": [probe]}]
    try:
        for _ in range(step if isinstance(optimizer, DeepSpeedCPUAdam) else 1):
            type(optimizer).step(optimizer)  # the class's: the instance's counts for the schedule
        return probe, dict(optimizer.state[probe])
    finally:
        optimizer.state, optimizer.param_groups = own


def _quantises(optimizer: torch.optim.Optimizer) -> bool:
    """bitsandbytes' 8-bit optimizers, whose states are bytes, scales of blocks, and a table of the bytes' values."""
    return getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8
