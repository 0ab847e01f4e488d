"""torch.compile as the recipe's `speed` section asks: every block by itself, or the whole model."""

import sys
from collections.abc import Callable, Iterator
from functools import wraps

import torch
import torch.distributed as dist
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from pretraining.errors import UserError
from pretraining.runtime.process_group import rank_and_world_size
from pretraining.upstream.compiler import (
    compile_in_few_processes,
    compiled_both_ways,
    gather_as_one,
    missing_compiler,
)

BORDERS = {"cu_seq_lens_q", "cu_seq_lens_k"}
"""Of the documents of a batch (`data.document_masking`)."""


def check_compiler(speed: dict) -> None:
    """Raise `UserError` if the recipe names what to compile and this machine has no compiler for inductor."""
    if speed["compile"] in ("blocks", "whole") and (missing := _missing(speed)):
        raise UserError(f"speed.compile: inductor needs {missing}; install it, or --set speed.compile=none")


def _missing(speed: dict) -> str | None:
    return missing_compiler() if speed["compile_backend"] == "inductor" else None


def compile_model(model: nn.Module, speed: dict) -> None:
    """Let training passes run compiled code; parameters, names and modules stay what they are.

    Blocks of one class share their graph: layers differ in their weights alone, which are inputs of it. Validation
    and samples run as without: they come in other shapes, each of which would be compiled anew. Hooks of a block stay
    outside of its graph. Those of ZeRO-3 then gather a block's weights as one: within it a graph would end at each.

    `auto` compiles blocks too, and goes on without if that fails (`FirstPass`).
    """
    if speed["compile"] == "none":
        return
    options = {"backend": speed["compile_backend"]}
    if speed["compile_mode"]:
        options["mode"] = speed["compile_mode"]
    compile_in_few_processes()
    modules = [model] if speed["compile"] == "whole" else list(blocks_of(model))
    if is_deepspeed_zero3_enabled():
        gather_as_one(modules)
    first_pass = FirstPass(_missing(speed)) if speed["compile"] == "auto" else None
    for module in modules:
        compiled = torch.compile(module.forward, **options)
        if first_pass:
            compiled = first_pass.trying(compiled, module.forward)
        module.forward = _in_training(module, compiled)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model's layers, in order."""
    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def describe_compilation(speed: dict, why_none: str | None = None) -> str:
    """What the log says at the start. why_none: why `auto` became none."""
    if speed["compile"] == "none":
        return "compiled: nothing" + (f" ({why_none})" if why_none else "")
    what = "the whole model" if speed["compile"] == "whole" else "every block"
    return f"compiled: {what}, by {speed['compile_backend']}, in the first training pass"


def _in_training(module: nn.Module, compiled: Callable) -> Callable:
    """The module's forward: compiled in passes that a backward pass follows, as it is in all others."""
    plain = module.forward

    @wraps(plain)  # transformers reads the signature
    def forward(*args, **kwargs):
        if not (module.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        for borders in kwargs.keys() & BORDERS:  # no graph for each number of documents
            torch._dynamo.maybe_mark_dynamic(kwargs[borders], 0)
        return compiled(*args, **kwargs)

    return forward


class FirstPass:
    """The first training pass of every compiled block: if it fails on any rank, all ranks go on uncompiled.

    All or none: gradients leave a compiled block in another order, and ZeRO-1 and 2 put them into buckets as they
    come. Ranks of both kinds would add up gradients of different weights.
    """

    def __init__(self, missing: str | None):
        self.missing, self.has_failed = missing, False

    def trying(self, compiled: Callable, plain: Callable) -> Callable:
        """`compiled`, or `plain` once a first call has failed somewhere. All ranks make their first calls together."""
        first, is_known = compiled_both_ways(compiled), False

        def call(*args, **kwargs):
            nonlocal is_known
            if self.has_failed:
                return plain(*args, **kwargs)
            if is_known:
                return compiled(*args, **kwargs)
            result, failure = self._outcome(first, args, kwargs)
            failing = _first_failing(failure is not None, _device_of((*args, *kwargs.values())))
            if failing is None:
                is_known = True
                return result
            self.has_failed = True
            if failing == rank_and_world_size()[0]:
                _warn(
                    f"blocks run uncompiled on all ranks, as rank {failing} cannot compile them ({failure})"
                )
            del result  # before the block runs again: its graph holds activations
            return plain(*args, **kwargs)

        return call

    def _outcome(self, first: Callable, args: tuple, kwargs: dict) -> tuple[object, str | None]:
        """(what the block returned, why it failed): one of them is None."""
        if self.missing:
            return None, f"inductor needs {self.missing}"
        try:
            return first(*args, **kwargs), None
        except torch.OutOfMemoryError:
            raise  # another compiler's code would need as much
        except Exception as error:
            # Backends, Triton and the machine's C compiler raise what they like; below the first lines is how to
            # debug torch.
            said = " ".join(str(error).strip().partition("\n\n")[0].split())
            return None, f"{type(error).__name__}: {said[:300]}"


def _first_failing(fails_here: bool, device: torch.device) -> int | None:
    """The first rank whose block failed; None if no rank's did. All ranks call it together."""
    rank, ranks = rank_and_world_size()
    if not dist.is_initialized():
        return rank if fails_here else None
    first = torch.tensor(rank if fails_here else ranks, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    number = first.item()
    return number if number < ranks else None


def _device_of(values: tuple) -> torch.device:
    return next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))


def _warn(what: str) -> None:
    print(f"warning: {what}; mend that, or --set speed.compile=none", file=sys.stderr, flush=True)
