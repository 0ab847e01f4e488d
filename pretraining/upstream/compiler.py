"""torch's compiler and ZeRO-3's hooks, as far as compiled blocks need what neither library documents."""

import shutil
from collections.abc import Callable, Iterable

import torch
from torch import nn


def missing_compiler() -> str | None:
    """What inductor lacks on this machine to generate code for its device; None if nothing."""
    if torch.cuda.is_available():
        from torch.utils._triton import has_triton

        return None if has_triton() else "the package triton, which this torch was built without"
    from torch._inductor import config

    names = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else (config.cpp.cxx,)
    found = any(name and shutil.which(name) for name in names)
    return None if found else "a C++ compiler (g++)"


def compiled_both_ways(compiled: Callable) -> Callable:
    """Call compiled code so that its backward pass is compiled in the first call too, or that call fails.

    torch 2.13 would otherwise keep a failure for the backward pass, where nothing can be done about it.
    """
    from torch._functorch import config

    def call(*args, **kwargs):
        with config.patch(force_non_lazy_backward_lowering=True):
            return compiled(*args, **kwargs)

    return call


def gather_as_one(modules: Iterable[nn.Module]) -> None:
    """Let ZeRO-3 gather all weights of each module before its forward and backward pass, and none within.

    DeepSpeed 0.19.8 calls such a module a leaf (utils/z3_leaf_module.py): its hooks lie around the module alone. To be
    called before the engine is made.
    """
    from deepspeed.utils import set_z3_leaf_module

    for module in modules:
        set_z3_leaf_module(module, True)
