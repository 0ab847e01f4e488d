"""torch's compiler and ZeRO-3's hooks, as far as compiled code needs what neither library documents; torch 2.13.0.

- What inductor lacks (`missing_compiler`): `torch.utils._triton.has_triton` and `torch._inductor.config`, because torch
  finds a missing compiler only in the first pass. Held by tests/test_compiling.py.
- Its processes (`compile_in_few_processes`): `torch._inductor.config.compile_threads`, up to 32 on every rank.
- The backward pass (`compiled_both_ways`): `force_non_lazy_backward_lowering` of `torch._functorch.config`, so that it
  fails in the first call, if it fails. Held by tests/test_compiling.py.
- Lengths that vary (`let_length_vary`, `fix_no_length`): `torch._dynamo.maybe_mark_dynamic` and `mark_dynamic`, which
  torch documents in its private module alone. Otherwise each number of documents or tokens would be a graph. Held by
  tests/test_compiling.py and tests/test_loss.py; may go once torch.compiler has them.
- Leaves of ZeRO-3 (`gather_as_one`): public, but explained nowhere; deepspeed 0.19.8. Held by tests/test_compiling.py.
"""

import os
from collections.abc import Callable, Iterable

import torch
from torch import nn

from pretraining.upstream.toolchain import missing_for_kernels

WORKERS = 4
"""Processes of each rank that compile kernels: a block has some twenty."""


def missing_compiler() -> str | None:
    """Return what inductor lacks on this machine to generate code for its device; None if nothing."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        from torch.utils._triton import has_triton

        if not has_triton():
            return "the package triton, which this torch was built without"
    missing = next(missing_for_kernels(on_gpu), None)
    return missing and missing.what


def compile_in_few_processes() -> None:
    """Keep inductor from starting as many processes as there are cores, up to 32, on every rank of the machine."""
    # A number that the user has set in the environment counts.
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config

        config.compile_threads = min(WORKERS, config.compile_threads or WORKERS)


def let_length_vary(tensor: torch.Tensor) -> None:
    """Ask for a graph that takes any length of the first dimension; torch may still fix it."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def fix_no_length(tensor: torch.Tensor) -> None:
    """Demand a graph that takes any length of the first dimension; torch raises if it would fix it."""
    torch._dynamo.mark_dynamic(tensor, 0)


def compiled_both_ways(compiled: Callable) -> Callable:
    """Call compiled code so that its backward pass is compiled in the first call too, or that call fails.

    Otherwise torch 2.13 reports a failure only in the backward pass, when nothing can be done about it any more.
    """
    from torch._functorch import config

    def call(*args, **kwargs):
        # At each call, because a later one may compile for a new shape.
        with config.patch(force_non_lazy_backward_lowering=True):
            return compiled(*args, **kwargs)

    return call


def gather_as_one(modules: Iterable[nn.Module]) -> None:
    """Let ZeRO-3 gather all weights of each module before its forward and backward pass, and none within.

    DeepSpeed 0.19.8 calls such a module a leaf (utils/z3_leaf_module.py): only the module itself gets hooks, and the
    modules inside it get none. Call this before the engine is made.
    """
    from deepspeed.utils import set_z3_leaf_module

    for module in modules:
        set_z3_leaf_module(module, True)
