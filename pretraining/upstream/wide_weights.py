"""Keep embeddings, head or modules in fp32 beside a model's 16-bit weights, at every ZeRO stage; deepspeed 0.19.8.

DeepSpeed makes all weights of a bf16 model 16-bit ones. Yet its optimizers of stages 1, 2 and 3 keep each parameter
group in the type of its first weight, and step and send it so. So weights of two types can be trained if

- no group has both, and the first group has 16 bits: messages are of its type (`split_by_type`);
- the engine does not cast them (`_cast_all_but_wide`);
- stage 3 does not lay them end to end in one tensor (`_defragment_by_type`, `_set_flat_groups`).

Their gradients travel in 16 bits like all others, and are added up in fp32. Held by test_wide_weights.py. It may
go once DeepSpeed's `data_types.keep_in_fp32_modules` counts for weights, and not for buffers alone.
"""

from collections.abc import Callable, Collection
from functools import cache, wraps
from typing import Any

import torch
from accelerate.utils.operations import recursively_apply
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from pretraining.upstream.deepspeed import split_groups

_cast = DeepSpeedEngine._cast_module_mixed_precision
_defragment = stage3.defragment
_set_groups = DeepSpeedZeroOptimizer_Stage3._set_fp16_partitioned_groups_flat


class WideLinear(nn.Linear):
    """A linear layer that multiplies in fp32, whatever type its input has."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), self.weight, self.bias)


@cache
def _computing_in_fp32(kind: type[nn.Module], layers: torch.dtype) -> type[nn.Module]:
    """Derive a class of modules that compute all in fp32, and give back the type of the layers."""

    class InFp32(kind):
        @wraps(kind.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(next(self.parameters()).device.type, enabled=False):
                result = super().forward(*_cast_all(args, torch.float32), **_cast_all(kwargs, torch.float32))
            return _cast_all(result, layers)

    InFp32.__name__ = kind.__name__  # transformers finds the rule of initial weights by a part of it: RMSNorm
    return InFp32


def _cast_all(values: Any, dtype: torch.dtype) -> Any:
    return recursively_apply(
        lambda each: each.to(dtype),
        values,
        test_type=lambda each: isinstance(each, torch.Tensor) and each.is_floating_point(),
    )


def keep_in_fp32(
    model: PreTrainedModel, parts: Collection[str], is_named: Callable[[str], bool], layers: torch.dtype
) -> None:
    """Keep embeddings, head or modules of a model in fp32; a weight that is both embedding and head counts as either.

    Embeddings are looked up and added in fp32, then rounded once to the type of the layers. The head multiplies the
    last hidden state with weights that were not rounded, in fp32. Modules cast what they get and give.

    Args:
        model: it has no weights yet, or has those of fp32.
        parts: `embeddings`, `head`, both or none.
        is_named: whether a module of that name, or one around it, is to be kept.
        layers: the type of all other weights.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = bool(parts) and head.weight is table.weight
    if is_tied or "head" in parts:
        _widen(head.weight)
        head.__class__ = WideLinear  # in place: a new module would lose the tie to the embedding
    if is_tied or "embeddings" in parts:
        of_positions = getattr(model.base_model, "wpe", table)  # GPT-2 alone has such a table
        for each in {table, of_positions} if "embeddings" in parts else {table}:
            _widen(each.weight)
        if layers != torch.float32:
            # GPT-2 adds its two tables, and then drops out
            last = getattr(model.base_model, "drop", table)
            last.register_forward_hook(lambda module, inputs, output: output.to(layers))
    tables, chosen = {table, head, getattr(model.base_model, "wpe", table)}, []
    for name, module in model.named_modules():  # a module comes before those in it
        if not is_named(name) or any(name.startswith(f"{outer}.") for outer in chosen):
            continue
        # a list of modules computes nothing
        if isinstance(module, nn.ModuleList) or not tables.isdisjoint(module.modules()):
            continue
        if parameters := list(module.parameters()):
            chosen.append(name)
            for each in parameters:
                _widen(each)
            module.__class__ = _computing_in_fp32(type(module), layers)
    DeepSpeedEngine._cast_module_mixed_precision = _cast_all_but_wide
    stage3.defragment = _defragment_by_type
    DeepSpeedZeroOptimizer_Stage3._set_fp16_partitioned_groups_flat = _set_flat_groups


def is_wide(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "is_wide", False)


def _widen(parameter: nn.Parameter) -> None:
    parameter.is_wide = True
    parameter.data = parameter.data.float()
    if hasattr(parameter, "ds_tensor"):  # this rank's part under ZeRO-3
        parameter.ds_tensor.data = parameter.ds_tensor.data.float()


def split_by_type(groups: list[dict]) -> list[dict]:
    """Split each parameter group: first those with the layers' weights, then those with the weights kept in fp32.

    No group is empty. At stage 0, where all weights have one type, they are split too: every stage has the same groups.
    """
    plain, wide = split_groups(groups, is_wide)
    return plain + wide


def _cast_all_but_wide(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
    kept = [(each, each.data) for each in engine.module.parameters() if is_wide(each)]
    _cast(engine, *args, **kwargs)
    for parameter, data in kept:
        parameter.data = data


def _defragment_by_type(tensors: list[torch.Tensor]) -> torch.Tensor | dict[torch.dtype, torch.Tensor]:
    """Lay tensors end to end: in one flat tensor, or in one for each of their types."""
    types = list(dict.fromkeys(each.dtype for each in tensors))
    if len(types) == 1:
        return _defragment(tensors)
    return {dtype: _defragment([each for each in tensors if each.dtype == dtype]) for dtype in types}


def _set_flat_groups(optimizer: Any) -> None:
    """Set each sub-group's part of the flat tensor of its type."""
    if torch.is_tensor(optimizer.lp_param_buffer):
        return _set_groups(optimizer)
    ends = dict.fromkeys(optimizer.lp_param_buffer, 0)
    for parameters in optimizer.fp16_groups:
        dtype, numel = parameters[0].ds_tensor.dtype, sum(each.partition_numel() for each in parameters)
        flat = optimizer.lp_param_buffer[dtype].narrow(0, ends[dtype], numel)
        optimizer.fp16_partitioned_groups_flat.append(flat)
        ends[dtype] += numel
    return None
