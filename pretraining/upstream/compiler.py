"""torch's compiler and ZeRO-3's hooks, as far as compiled blocks need what neither library documents."""

import os
from collections.abc import Callable, Iterable

import torch
from torch import nn

from pretraining.upstream.toolchain import missing_for_kernels

WORKERS = 4
"""Processes of each rank that compile kernels: a block has some twenty."""


def missing_compiler() -> str | None:
    """What inductor lacks on this machine to generate code for its device; None if nothing."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        from torch.utils._triton import has_triton

        if not has_triton():
            return "the package triton, which this torch was built without"
    missing = next(missing_for_kernels(on_gpu), None)
    return missing and missing.what


def compile_in_few_processes() -> None:
    """Keep inductor from starting as many processes as there are cores, up to 32, on every rank of the machine."""
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config

        config.compile_threads = min(WORKERS, config.compile_threads or WORKERS)


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
