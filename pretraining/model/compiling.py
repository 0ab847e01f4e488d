"""The recipe's `speed` section: compiled blocks or models, and products in fp8. Both are used only in training."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.errors import UserError, require
from pretraining.recipe.sections import Speed
from pretraining.runtime.process_group import rank_and_world_size
from pretraining.upstream.deepspeed import gather_as_one
from pretraining.upstream.torch import (
    compile_in_few_processes,
    compiled_both_ways,
    let_length_vary,
    missing_compiler,
)

BORDERS = {"cu_seq_lens_q", "cu_seq_lens_k"}
"""Keywords of a block that hold the documents' borders (`data.document_masking`)."""
# Compute capability
HOPPER = (9, 0)
MULTIPLE = 16
"""Both sides of a matrix must be a multiple of this for fp8 kernels."""


def check_compiler(speed: Speed) -> None:
    """Raise `UserError` if the recipe names what to compile and this machine has no compiler for inductor."""
    if speed.compile == "deepcompile" and not torch.cuda.is_available():
        what = "speed.compile: deepcompile needs a GPU, whose toolkit builds it"
        raise UserError(f"{what}, and there is none here; --set speed.compile=auto")
    if speed.compile in ("blocks", "whole") and (missing := _missing(speed)):
        raise UserError(f"speed.compile: inductor needs {missing}; install it, or --set speed.compile=none")


def _missing(speed: Speed) -> str | None:
    return missing_compiler() if speed.compile_backend == "inductor" else None


def compile_model(model: nn.Module, speed: Speed, degrees: Degrees = NOT_SPLIT) -> None:
    """Let training passes run compiled code; parameters, names and modules stay as they are.

    Blocks of one class share their graph: only their weights differ, and these are inputs of the graph. Validation and
    samples are not compiled: they come in other shapes, and each shape would be compiled again. Hooks of a block stay
    outside of its graph.

    `auto` compiles blocks too, and goes on uncompiled if that fails (`FirstPass`).

    Args:
        degrees: those of the layout. Ranks that split a layer, a sequence or experts exchange inside a block.
    """
    if speed.compile in ("none", "deepcompile"):  # DeepSpeed compiles the model once its engine is there
        return
    options = {"backend": speed.compile_backend}
    if speed.compile_mode:
        options["mode"] = speed.compile_mode
    compile_in_few_processes()
    modules = [model] if speed.compile == "whole" else list(blocks_of(model))
    if is_deepspeed_zero3_enabled():
        # ZeRO-3's hooks then gather a block's weights together, because a graph would end at each hook inside it.
        gather_as_one(modules)
    # All modules share it: if one of them fails, none stays compiled.
    trial = None
    if degrees != NOT_SPLIT:
        trial = torch.compile(lambda numbers: (numbers.sin() * 2).sum(), **options)
    first_pass = FirstPass(_missing(speed), trial) if speed.compile == "auto" else None
    for module in modules:
        compiled = torch.compile(module.forward, **options)
        if first_pass:
            compiled = first_pass.trying(compiled, module.forward)
        module.forward = _in_training(module, compiled)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model's layers, in order."""
    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def describe_compilation(speed: Speed, why_none: str | None = None) -> str:
    """Write what the log says at the start.

    Args:
        why_none: the reason if `auto` became none.
    """
    if speed.compile == "none":
        return "compiled: nothing" + (f" ({why_none})" if why_none else "")
    if speed.compile == "deepcompile":
        return (
            "compiled: the whole model, by DeepSpeed's DeepCompile, which was never tried with these recipes"
        )
    what = "the whole model" if speed.compile == "whole" else "every block"
    return f"compiled: {what}, by {speed.compile_backend}, in the first training pass"


def _in_training(module: nn.Module, compiled: Callable) -> Callable:
    """Wrap the module's forward: compiled in passes that a backward pass follows, plain in all others."""
    plain = module.forward

    @wraps(plain)  # transformers reads the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        for borders in kwargs.keys() & BORDERS:  # one graph for every number of documents
            let_length_vary(kwargs[borders])
        return compiled(*args, **kwargs)

    return forward


class FirstPass:
    """The first training pass of every compiled block: if it fails on any rank, all ranks go on uncompiled.

    Args:
        missing: what the compiler lacks on this machine; None if nothing.
        trial: a compiled function of one tensor, which is called before any block if ranks exchange inside blocks:
            a rank that cannot compile would leave the others waiting in an exchange.
    """

    def __init__(self, missing: str | None, trial: Callable | None = None) -> None:
        self.missing, self.trial, self.has_failed = missing, trial, False

    def trying(self, compiled: Callable, plain: Callable) -> Callable:
        """Call `compiled`, or `plain` after a first call has failed on any rank. Ranks make first calls together."""
        is_known = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_known
            if is_known and not self.has_failed:
                return compiled(*args, **kwargs)
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            device = next((tensor.device for tensor in tensors), torch.device("cpu"))
            if self.trial is not None:
                numbers = torch.ones(2, device=device, requires_grad=True)
                self._together(self.trial, device, numbers)
                self.trial = None
            if not self.has_failed:
                result = self._together(compiled, device, *args, **kwargs)
                is_known = not self.has_failed
                if is_known:
                    return result
                del result  # before the block runs again: its graph holds activations
            return plain(*args, **kwargs)

        return call

    def _together(self, compiled: Callable, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        """Return what the first call returns; has_failed if it fails on any rank."""
        first, result, failure = compiled_both_ways(compiled), None, None
        if self.missing:
            failure = f"inductor needs {self.missing}"
        else:
            try:
                result = first(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise  # another compiler's code would need as much
            except Exception as error:
                # Backends, Triton and the machine's C compiler may raise any exception. Its first lines say what
                # failed, the later ones how to debug torch.
                said = " ".join(str(error).strip().partition("\n\n")[0].split())
                failure = f"{type(error).__name__}: {said[:300]}"
        rank, ranks = rank_and_world_size()
        # The first rank whose block failed. The number of ranks means no failure: it is larger than every rank.
        failing = ranks if failure is None else rank
        if dist.is_initialized():  # else one process without a launcher
            first_failing = torch.tensor(failing, device=device)
            dist.all_reduce(first_failing, dist.ReduceOp.MIN)
            failing = first_failing.item()
        if failing < ranks:
            # All ranks or none: gradients leave a compiled block in another order, and ZeRO-1 and 2 put them into
            # buckets as they come. If only some ranks compiled, gradients of different weights would be added up.
            self.has_failed = True
            if failing == rank:
                what = f"blocks run uncompiled on all ranks, as rank {rank} cannot compile them ({failure})"
                print(f"warning: {what}; mend that, or --set speed.compile=none", file=sys.stderr, flush=True)
        return result


def check_fp8_hardware(speed: Speed) -> None:
    """Raise `UserError` if this machine has no kernels for fp8, before a model is built."""
    if speed.fp8 == "none":
        return
    key = f"speed.fp8: {speed.fp8}"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < HOPPER:
        has = "there is no GPU" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        raise UserError(
            f"{key} needs a GPU of compute capability 9.0 (Hopper) or later, and {has} here; --set speed.fp8=none"
        )


def convert_products(model: PreTrainedModel, recipe_name: str, emulate: bool = False) -> int:
    """Let the linear layers of the blocks multiply in fp8 while they are trained; return how many there are.

    Weights, optimizer and everything between the products stay as they are. Validations and samples do not use fp8,
    so that they measure the exported weights. The inputs of each product are scaled to fp8 when they are multiplied.
    torchao's recipes differ in which numbers share a scale. `tensorwise`: all of a tensor. `rowwise`: each row of it.
    `rowwise_with_gw_hp`: each row, with the weights' gradients in bf16. Only in the last one no scale depends on which
    samples share a micro-batch.

    Args:
        emulate: compute slowly what the kernels would, on a machine that has none.
    """
    float8 = require("torchao.float8", "speed.fp8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe_name)
    config = dataclasses.replace(config, emulate=emulate)
    in_blocks = {id(layer) for block in blocks_of(model) for layer in block.modules()}
    chosen = [
        name
        for name, layer in model.named_modules()
        # Not isinstance: a subclass may compute something else. The kernels take sides of such multiples.
        if id(layer) in in_blocks
        and type(layer) is nn.Linear
        and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
    ]
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)
    for layer in map(model.get_submodule, chosen):
        layer.__class__ = _fp8_in_training(type(layer))  # a wrapper would change the parameters' names
    return len(chosen)


@cache
def _fp8_in_training(fp8_linear: type[nn.Linear]) -> type[nn.Linear]:
    """Derive a class of layers that are torchao's while they are trained, and torch's otherwise."""

    class Fp8InTraining(fp8_linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            """Multiply [..., in_features] to [..., out_features]."""
            return (
                super().forward(rows) if self.training else nn.functional.linear(rows, self.weight, self.bias)
            )

    return Fp8InTraining
