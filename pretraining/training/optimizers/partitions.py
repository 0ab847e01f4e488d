"""What lies in the flat fp32 partitions that ZeRO gives to an optimizer in place of the model's parameters."""

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import TrainerCallback

from pretraining.runtime.process_group import rank_and_world_size
from pretraining.training.optimizers.exchange import Fragment
from pretraining.training.optimizers.muon import Muon


class BindPartitions(TrainerCallback):
    """Tells Muon, once DeepSpeed has cut the parameters up, where each of them lies."""

    def __init__(self, muon: Muon):
        self.muon = muon

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        zero = getattr(optimizer, "optimizer", optimizer)
        if args.deepspeed and zero is not self.muon:
            bind_partitions(self.muon, model, zero)


def bind_partitions(muon: Muon, model: torch.nn.Module, zero) -> None:
    """`Muon.bind` for a DeepSpeed optimizer of stage 1, 2 or 3."""
    by_tensor: dict[int, list[Fragment]] = {}
    for tensor, fragment in partition_fragments(model, zero, muon.number_of):
        by_tensor.setdefault(id(tensor), []).append(fragment)

    def locate(tensors: Sequence[torch.Tensor]) -> list[Fragment]:
        return [
            fragment._replace(tensor=number)
            for number, tensor in enumerate(tensors)
            for fragment in by_tensor.get(id(tensor), [])
        ]

    muon.bind(partition_tensors(zero), locate)


def partition_tensors(zero) -> list[torch.Tensor]:
    """The flat fp32 tensors that a DeepSpeed optimizer steps on this rank."""
    if _is_stage_3(zero):
        return list(zero.fp32_partitioned_groups_flat)
    return [tensor for group in zero.optimizer.param_groups for tensor in group["params"]]


def partition_fragments(
    model: torch.nn.Module, zero, number_of: Callable[[torch.Tensor], int | None]
) -> Iterator[tuple[torch.Tensor, Fragment]]:
    """(flat tensor, what lies there) of this rank's share of the parameters that have a number (deepspeed 0.19.8).

    Stages 1 and 2 lay a group's parameters end to end and cut them into a slice a rank (`_hp_mapping` of each
    parameter); stage 3 cuts every parameter by itself and lays this rank's slices end to end (`grad_position`).
    """
    return (_sliced_parameters if _is_stage_3(zero) else _slices)(model, zero, number_of)


def _is_stage_3(zero) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _slices(model, zero, number_of) -> Iterator[tuple[torch.Tensor, Fragment]]:
    """Stages 1 and 2, the optimizer of bf16 weights included."""
    for parameter in model.parameters():
        number, mapping = number_of(parameter), getattr(parameter, "_hp_mapping", None)
        if number is not None and mapping is not None:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            (tensor,) = zero.optimizer.param_groups[mapping.param_group_index]["params"]
            yield tensor, Fragment(number, here.start, 0, there.start, here.numel)


def _sliced_parameters(model, zero, number_of) -> Iterator[tuple[torch.Tensor, Fragment]]:
    """Stage 3; the last slices of a parameter are padded."""
    rank, _ = rank_and_world_size()
    for group, tensor in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        for parameter in group:
            number = number_of(parameter)
            _, offset, slice_numel = zero.grad_position[zero.get_param_id(parameter)]
            start = rank * slice_numel
            numel = min(slice_numel, parameter.ds_numel - start)
            if number is not None and numel > 0:
                yield tensor, Fragment(number, start, 0, offset, numel)
