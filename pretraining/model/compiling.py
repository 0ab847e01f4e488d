"""torch.compile as the recipe's `speed` section asks: every block by itself, or the whole model."""

import shutil
from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pretraining.errors import UserError


def check_compiler(speed: dict) -> None:
    """Raise `UserError` if inductor has no compiler on this machine, before a model is built."""
    if speed["compile"] == "none":
        return
    if speed["compile_backend"] == "inductor" and (missing := _missing_compiler()):
        raise UserError(f"speed.compile: inductor needs {missing}; install it, or set speed.compile to none")


def _missing_compiler() -> str | None:
    if torch.cuda.is_available():
        from torch.utils._triton import has_triton

        return None if has_triton() else "the package triton, which this torch was built without"
    from torch._inductor import config

    names = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else (config.cpp.cxx,)
    found = any(name and shutil.which(name) for name in names)
    return None if found else "a C++ compiler (g++)"


def compile_model(model: nn.Module, speed: dict) -> None:
    """Let training passes run compiled code; parameters, names and modules stay what they are.

    Blocks of one class share their graph: layers differ in their weights alone, which are inputs of it. Validation
    and samples run as without: they come in other shapes, each of which would be compiled anew.
    """
    if speed["compile"] == "none":
        return
    options = {"backend": speed["compile_backend"]}
    if speed["compile_mode"]:
        options["mode"] = speed["compile_mode"]
    for module in [model] if speed["compile"] == "whole" else blocks_of(model):
        module._compiled_call_impl = _in_training(module, torch.compile(module._call_impl, **options))


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model's layers, in order."""
    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def _in_training(module: nn.Module, compiled: Callable) -> Callable:
    """What `nn.Module.compile` sets, for passes that a backward pass follows.

    torch leaves this attribute out of copies and pickles of the module.
    """

    def call(*args, **kwargs):
        trains = module.training and torch.is_grad_enabled()
        return (compiled if trains else module._call_impl)(*args, **kwargs)

    return call
