"""What torch keeps private, as far as a run needs it; torch 2.15.0. Each function says for what, and until when."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import cpuinfo
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils import cpp_extension
from torch.utils.hooks import RemovableHandle

from pretraining.upstream.toolchain import missing_for_kernels


def rates_now(scheduler: LambdaLR) -> list[float]:
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    return [base * rate(scheduler.last_epoch) for base, rate in rates]


def set_rates(scheduler: LRScheduler, rates: Sequence[float]) -> None:
    """Give every parameter group its rate, as if the scheduler had just computed it.

    No function does: only `step` writes `_last_lr` and the groups' `lr`, and it goes on to the next step. Held by
    test_stability.py and test_optimizer_states.py; may go once a scheduler has a function for it.
    """
    scheduler._last_lr = list(rates)
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def hook_first(optimizer: torch.optim.Optimizer, hook: Callable, after_step: bool = False) -> RemovableHandle:
    """Register a hook that is called before each step, or after it, before all that are registered already.

    torch appends, and the norm of gradients must be measured before another hook clips them. Held by
    test_gradient_monitors.py; may go once torch can put it first, as `register_forward_pre_hook(prepend=True)` can.
    """
    if after_step:
        handle, hooks = optimizer.register_step_post_hook(hook), optimizer._optimizer_step_post_hooks
    else:
        handle, hooks = optimizer.register_step_pre_hook(hook), optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


class LoaderWorkers:
    """The processes that read for a loader, from now on, until `end`.

    torch ends them only when their iterator is collected: neither one whose workers are persistent, nor one that a
    traceback refers to, is collected before the exit. Held by test_stopping.py; may go once a DataLoader can be closed.

    loader: a `DataLoader` that has workers and has not been read yet.
    """

    def __init__(self, loader: Any) -> None:
        make, self._iterators = loader._get_iterator, []

        def make_and_keep() -> Any:
            self._iterators.append(make())
            return self._iterators[-1]

        loader._get_iterator = make_and_keep

    def end(self) -> None:
        """Ask the workers to leave, and wait some seconds for each. The loader cannot be read any more."""
        while self._iterators:
            self._iterators.pop()._shutdown_workers()


_DEAR = """mm addmm _scaled_mm _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu"""
DEAR_OPERATORS = {getattr(torch.ops.aten, name).default for name in _DEAR.split()}
"""Operators whose results a selectively recomputed layer keeps. Not those of eager attention, as large as all pairs.

Held by test_planning_sizes.py; may go once torch has a policy for products and attention."""

WORKERS = 4
"""Processes of each rank that compile kernels: a block has some twenty."""


def missing_compiler() -> str | None:
    """Return what inductor lacks on this machine to generate code for its device; None if nothing.

    torch itself finds a missing compiler only in the first pass. Held by test_compiling.py.
    """
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


# not traced itself, if graphs end before it
@torch.compiler.disable
def let_length_vary(tensor: torch.Tensor) -> None:
    """Ask for a graph that takes any length of the first dimension, not one for each; torch may still fix it.

    Held by test_compiling.py and test_loss.py; may go once torch.compiler has it in public.
    """
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def fix_no_length(tensor: torch.Tensor) -> None:
    """Demand a graph that takes any length of the first dimension; torch raises if it would fix it."""
    torch._dynamo.mark_dynamic(tensor, 0)


def compiled_both_ways(compiled: Callable) -> Callable:
    """Call compiled code so that its backward pass is compiled in the first call too, or that call fails.

    Otherwise torch reports a failure only in the backward pass, when nothing can be done about it any more. Held by
    test_compiling.py.
    """
    from torch._functorch import config

    def call(*args, **kwargs):
        # At each call, because a later one may compile for a new shape.
        with config.patch(force_non_lazy_backward_lowering=True):
            return compiled(*args, **kwargs)

    return call


def ask_the_processor_once() -> None:
    """Have py-cpuinfo find the processor's features, in a second, once in this process and not for every operator."""
    # A cached function has `cache_info`: a second call must not wrap it again.
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)


def replace_loader(wrap: Callable[[Callable], Callable]) -> None:
    """Compile operators by `wrap(cpp_extension.load)` from now on; done once in a process.

    DeepSpeed looks the function up at each call. Held by test_operators.py, as what follows; all may go once torch
    keeps builds of several environments apart.

    wrap: sets `__wrapped__`, as `functools.wraps` does.
    """
    if not hasattr(cpp_extension.load, "__wrapped__"):
        cpp_extension.load = wrap(cpp_extension.load)


def import_library(name: str, folder: Path) -> ModuleType:
    # True: it is a module of Python, and no plain library.
    return cpp_extension._import_module_from_library(name, str(folder), True)


def folder_of_operators() -> Path:
    """Return the folder in which torch compiles, with one folder for each operator."""
    # Without the name of an operator, torch returns the folder that holds all of them.
    return Path(cpp_extension._get_build_directory("", False))


def start_memory_history(most_allocations: int) -> None:
    """Record every allocation from now on, the last `most_allocations`, for https://pytorch.org/memory_viz.

    torch documents this under private names. test_upstream.py holds them; no test opens a snapshot.
    """
    # torch's default, "all", also walks through the frames of C++ at each allocation, which slows the traced steps.
    torch.cuda.memory._record_memory_history(max_entries=most_allocations, stacks="python")


def write_memory_history(path: Path) -> None:
    """Write what was recorded, and stop recording."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
