"""Read and set in place the parameters and optimizer states that one rank holds, at any ZeRO stage.

An optimizer steps tensors. Without ZeRO each tensor is a parameter. With ZeRO each is a flat fp32 partition, which
holds pieces of many parameters and padding. Here both are a `Block` with its `Piece`s.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

from pretraining.checkpoints.shard_files import MASTER, CheckpointReader, Cut
from pretraining.errors import UserError
from pretraining.recipe.optimizer import AVERAGE
from pretraining.upstream import deepspeed


class Piece(NamedTuple):
    """Elements [start, start + numel) of a flattened parameter, or of its cut, at `offset` in the block's tensor."""

    parameter: str
    start: int
    numel: int
    offset: int
    cut: Cut | None = None  # the part in which `start` counts, if a layer is split over ranks

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the piece's elements in the block's tensor, or in a state of its size, as a view."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.numel]


@dataclass
class Block:
    """A tensor that the optimizer steps."""

    number: int
    tensor: torch.Tensor
    group: int  # index of the optimizer's parameter group
    optimizer: torch.optim.Optimizer
    pieces: list[Piece]
    # all that step with this block, even without a piece on this rank: the block's scalars are theirs too
    parameters: list[str]
    is_swapped: bool  # whether it is on NVMe, and in memory only while it is `held`

    @property
    def state(self) -> dict:
        """The optimizer's states of this tensor; {} before its first step."""
        return self.optimizer.state.get(self.tensor, {})

    def per_element(self) -> dict[str, torch.Tensor]:
        """Return {state: tensor} of the block's size; the master weights are one of them."""
        kept = {k: v for k, v in self.state.items() if _is_per_element(k, v, self.tensor)}
        return {MASTER: self.tensor, **kept}

    def scalars(self) -> dict[str, int | float]:
        """Return the numbers that the optimizer keeps for the block, such as Adam's `step`."""
        values = {k: v for k, v in self.state.items() if not _is_per_element(k, v, self.tensor)}
        # Some optimizers keep `step` as a tensor of one element, others as a number.
        values = {k: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for k, v in values.items()}
        return {k: v for k, v in values.items() if isinstance(v, int | float)}

    def whole(self) -> dict[str, torch.Tensor]:
        """Return the states with a shape of their own, such as the row and column factors of a factored moment."""
        values = {k: v for k, v in self.state.items() if torch.is_tensor(v) and v.numel() > 1}
        return {k: v for k, v in values.items() if not _is_per_element(k, v, self.tensor)}


def _is_per_element(key: str, value: Any, tensor: torch.Tensor) -> bool:
    """Return whether a state has one value for each element of the tensor it belongs to."""
    # For a parameter of one element, `step` may have the same shape as the parameter.
    return key != "step" and torch.is_tensor(value) and value.shape == tensor.shape


def _share_of(piece: Piece, rank: int, ranks: int) -> Piece:
    """Cut a piece into equal parts for the ranks that have the same elements, so that they share the writing."""
    first, end = piece.numel * rank // ranks, piece.numel * (rank + 1) // ranks
    return piece._replace(start=piece.start + first, numel=end - first, offset=piece.offset + first)


class LiveState:
    """The blocks of this rank, of an unwrapped model and an optimizer that accelerate and DeepSpeed may have wrapped.

    Plain PyTorch, DDP and stage 0: each parameter is a block. ZeRO-1 and 2: each parameter group is one flat vector, of
    which each rank optimizes a partition. ZeRO-3: each rank has an equal part, perhaps padded, of every parameter, in
    sub-groups that may be on NVMe.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        # accelerate wraps every optimizer, DeepSpeed's too.
        while type(optimizer).__module__.startswith("accelerate."):
            optimizer = optimizer.optimizer
        self.is_stage_3 = deepspeed.is_stage_3(optimizer)
        self.is_partitioned = self.is_stage_3 or deepspeed.is_stage_1_or_2(optimizer)
        if not self.is_partitioned and not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise UserError(f"checkpoints cannot read DeepSpeed's {kind}: choose another ds_config")
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.model, self.optimizer = model, optimizer
        self.torch_optimizer = optimizer.optimizer if self.is_partitioned else optimizer
        """The one that keeps the states, without what DeepSpeed wraps around it."""
        self.loss_scaler = getattr(optimizer, "loss_scaler", None) if self.is_partitioned else None
        """DeepSpeed's own (fp16), or None."""
        # Without a partition, states that have a shape of their own are the same on every rank.
        self.owns_whole = self.is_partitioned or dist.get_rank() == 0  # whether this rank saves those states
        # what this rank holds of a parameter whose layer is split over ranks; None: all of it
        self.cuts = {
            name: Cut.of(deepspeed.whole_shape(parameter), parts) if parts else None
            for parameter, name in self.names.items()
            for parts in [deepspeed.split_part(parameter)]
        }
        self.holders = {name: deepspeed.holders(p, optimizer) for p, name in self.names.items()}
        self.blocks = list(self._blocks())
        trained = {name for block in self.blocks for name in block.parameters}
        self.frozen = {name: parameter for parameter, name in self.names.items() if name not in trained}

    def _blocks(self) -> Iterator[Block]:
        for number, partition in enumerate(deepspeed.partitions(self.optimizer)):
            tensor, group, optimizer, parameters, slices = partition
            pieces = []
            for each in slices:
                name = self.names[each.parameter]
                pieces.append(Piece(name, each.start, each.numel, each.offset, self.cuts[name]))
            is_swapped = self.is_stage_3 and deepspeed.is_on_nvme(self.optimizer, number)
            names = [self.names[parameter] for parameter in parameters]
            yield Block(number, tensor, group, optimizer, pieces, names, is_swapped)

    @property
    def kept_whole(self) -> dict[tuple[str, str], torch.Tensor]:
        """{(state, parameter): tensor} that the optimizer keeps on every rank, however parameters are cut (NorMuon)."""
        return getattr(self.torch_optimizer, "whole_states", dict)()

    def own_frozen(self, name: str) -> tuple[Piece, torch.Tensor]:
        """Return what this rank saves of a frozen parameter, and the flat tensor that has it."""
        parameter = self.frozen[name]
        start, held = deepspeed.own_partition(parameter)
        # no optimizer steps it: at any stage below 3 the ranks have the same
        holders = self.holders[name] if self.is_stage_3 else deepspeed.holders(parameter, None)
        return _share_of(Piece(name, start, held.numel(), 0, self.cuts[name]), *holders), held

    def set_frozen(self, reader: CheckpointReader) -> None:
        """Set the frozen parameters; `set_weights` has the trained ones."""
        with deepspeed.weights_set_anew(self.optimizer) if self.is_stage_3 else nullcontext():
            for name, parameter in self.frozen.items():
                start, held = deepspeed.own_partition(parameter)
                held.copy_(reader.read(MASTER, name, start, held.numel(), self.cuts[name]))

    def own(self, piece: Piece) -> Piece:
        return _share_of(piece, *self.holders[piece.parameter])

    def held(self, block: Block, changed: bool = False) -> AbstractContextManager:
        """Bring the block into memory for the `with` block; if `changed`, write it back afterwards."""
        if not block.is_swapped:
            return nullcontext()
        return deepspeed.swapped_in(self.optimizer, block.number, changed)

    def set_weights(self) -> None:
        """Set the weights that the model computes with from the masters; without ZeRO they are the same tensors."""
        if self.is_stage_3:
            with deepspeed.weights_set_anew(self.optimizer):
                for block in self.blocks:
                    with self.held(block):
                        deepspeed.set_weights_of(self.optimizer, block.number)
        elif self.is_partitioned:
            deepspeed.set_weights(self.optimizer)


def set_block(block: Block, reader: CheckpointReader) -> None:
    """Set a block's masters and states, one piece of a parameter in memory at a time; `UserError` if one is missing."""
    for piece in block.pieces:
        elements = reader.read(MASTER, piece.parameter, piece.start, piece.numel, piece.cut)
        piece.of(block.tensor).copy_(elements)
    # Without ZeRO each parameter has its own counts; a ZeRO block can hold only one of each.
    table = reader.state["scalars"]
    counts = [table[name] for name in block.parameters if name in table]
    if not counts:  # no gradient has reached these parameters yet
        return
    saved = counts[0]
    if any(values != saved for values in counts):
        what = f"the optimizer's counts differ between {block.parameters[0]} and others of its group"
        raise UserError(f"{reader.folder}: {what}, which ZeRO keeps as one: resume without ZeRO")
    probe, kept = _states_after_a_step(block, int(saved.get("step", 1)))
    live = block.optimizer.state[block.tensor]
    for key, example in kept.items():
        if _is_per_element(key, example, probe):
            if key not in live:
                live[key] = torch.zeros_like(block.tensor, dtype=example.dtype, device=example.device)
            for piece in block.pieces:
                # An average that the checkpoint does not hold begins as the weights.
                averages = key == AVERAGE and not reader.has(key, piece.parameter)
                saved_as = MASTER if averages else key
                # A parameter that no gradient had reached has no states in the checkpoint, and gets zeros here.
                if reader.has(saved_as, piece.parameter):
                    elements = reader.read(saved_as, piece.parameter, piece.start, piece.numel, piece.cut)
                    # the codes of an optimizer in 8 bits are no values for one in 32
                    if elements.is_floating_point() != example.is_floating_point():
                        needed = f"{key} in {str(example.dtype).removeprefix('torch.')}"
                        raise _other_states(block, needed, piece.parameter, reader)
                    piece.of(live[key]).copy_(elements)
                elif piece.parameter in table:
                    raise _other_states(block, key, piece.parameter, reader)
        elif torch.is_tensor(example) and example.numel() > 1:
            if key not in reader.whole_states(block.parameters[0]):
                raise _other_states(block, key, block.parameters[0], reader)
            whole = reader.read_whole(key, block.parameters[0])
            if live.get(key) is example:
                example.copy_(whole)  # in place: it may be in paged memory
            else:
                live[key] = whole.to(example.device, example.dtype)
        elif key in saved:  # a number, in the type in which this optimizer keeps it
            is_tensor = torch.is_tensor(example)
            live[key] = torch.full_like(example, saved[key]) if is_tensor else type(example)(saved[key])
        else:
            live[key] = example  # neither a number nor a tensor: it is the same after every step


def _other_states(block: Block, key: str, parameter: str, reader: CheckpointReader) -> UserError:
    found = [*reader.states(parameter), *(f"{state} (factored)" for state in reader.whole_states(parameter))]
    what = f"has {', '.join(found)} of {parameter}, and {type(block.optimizer).__name__} at this ZeRO stage"
    remedy = "resume with the optimizer and the kind of sharding that saved it"
    return UserError(f"{reader.folder} {what} needs {key}: {remedy}")


def _states_after_a_step(block: Block, step: int) -> tuple[torch.Tensor, dict]:
    """Step a small tensor with the block's optimizer; returns it and the states that the optimizer keeps for it.

    This shows names, types and devices of the states, which differ between optimizers and their versions.
    """
    optimizer, like = block.optimizer, block.tensor
    if getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8:
        return like, _states_in_8_bits(block)
    probe = torch.nn.Parameter(torch.zeros((2,) * like.dim(), dtype=like.dtype, device=like.device))
    probe.grad = torch.zeros_like(probe)
    own = optimizer.state, optimizer.param_groups
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = [{**own[1][block.group], "params": [probe]}]
    try:
        # DeepSpeed's CPU Adam multiplies its bias corrections up from step to step. Here it takes all these steps, so
        # that the run's next step finds the same corrections as without a break.
        for _ in range(step if isinstance(optimizer, DeepSpeedCPUAdam) else 1):
            type(optimizer).step(optimizer)  # not the instance's, whose calls the schedule counts
        return probe, dict(optimizer.state[probe])
    finally:
        optimizer.state, optimizer.param_groups = own


def _states_in_8_bits(block: Block) -> dict:
    """Return the states of a block that bitsandbytes steps: bytes, block scales and a value table, or plain ones.

    It decides by the tensor's size and its place among the parameters (the Trainer asks for 32 bits in embeddings): no
    other tensor can show it. A tensor that has no states yet gets those of its first step, perhaps in paged memory.
    """
    optimizer, group = block.optimizer, block.optimizer.param_groups[block.group]
    if not block.state:
        optimizer.check_overrides()  # the first step's work, which finds the places
        place = next(i for i, parameter in enumerate(group["params"]) if parameter is block.tensor)
        optimizer.init_state(group, block.tensor, block.group, place)
    return dict(block.state)
