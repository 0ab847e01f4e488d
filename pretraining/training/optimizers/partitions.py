"""What lies in the flat fp32 partitions that ZeRO gives to an optimizer in place of the model's parameters."""

from collections.abc import Iterator, Sequence

import torch
from transformers import TrainerCallback

from pretraining.training.optimizers.exchange import Fragment, rank_and_world_size
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
    """`Muon.bind` for a DeepSpeed optimizer of stage 1, 2 or 3 (deepspeed 0.19.8).

    Stages 1 and 2 lay a group's parameters end to end and cut them into a slice a rank (`_hp_mapping` of each
    parameter); stage 3 cuts every parameter by itself and lays this rank's slices end to end (`grad_position`).
    """
    if hasattr(zero, "grad_position"):
        tensors, places = zero.fp32_partitioned_groups_flat, _sliced_parameters(muon, zero)
    else:
        tensors = [tensor for group in muon.param_groups for tensor in group["params"]]
        places = _slices(muon, model)
    by_tensor: dict[int, list[Fragment]] = {}
    for tensor, fragment in places:
        by_tensor.setdefault(id(tensor), []).append(fragment)

    def locate(tensors: Sequence[torch.Tensor]) -> list[Fragment]:
        return [
            fragment._replace(tensor=number)
            for number, tensor in enumerate(tensors)
            for fragment in by_tensor.get(id(tensor), [])
        ]

    muon.bind(tensors, locate)


def _slices(muon: Muon, model) -> Iterator[tuple[torch.Tensor, Fragment]]:
    """Stages 1 and 2, the optimizer of bf16 weights included."""
    for parameter in model.parameters():
        number, mapping = muon.number_of(parameter), getattr(parameter, "_hp_mapping", None)
        if number is not None and mapping is not None:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            (tensor,) = muon.param_groups[mapping.param_group_index]["params"]
            yield tensor, Fragment(number, here.start, 0, there.start, here.numel)


def _sliced_parameters(muon: Muon, zero) -> Iterator[tuple[torch.Tensor, Fragment]]:
    """Stage 3; the last slices of a parameter are padded."""
    rank, _ = rank_and_world_size()
    for group, tensor in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        for parameter in group:
            number = muon.number_of(parameter)
            _, offset, slice_numel = zero.grad_position[zero.get_param_id(parameter)]
            start = rank * slice_numel
            numel = min(slice_numel, parameter.ds_numel - start)
            if number is not None and numel > 0:
                yield tensor, Fragment(number, start, 0, offset, numel)
