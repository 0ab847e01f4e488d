"""How DeepSpeed's operators are compiled and found again; torch 2.13 and deepspeed 0.19.8.

- `torch.utils.cpp_extension.load` (`replace_loader`), by which DeepSpeed compiles every operator, is looked up in its
  module at each call. It is replaced by a function that keeps what is compiled.
- Loading what is compiled already (`import_library`) and the folder of all operators (`folder_of_operators`) have
  private functions in torch.
- `cpuinfo.get_cpu_info` (`ask_the_processor_once`), which DeepSpeed calls for every operator, takes a second each.

Held by tests/test_operators.py. The first three may go once torch keeps builds of several environments apart.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import cpuinfo
from torch.utils import cpp_extension


def ask_the_processor_once() -> None:
    """Have py-cpuinfo find the processor's features once in this process, and not for every operator."""
    # A cached function has `cache_info`: a second call must not wrap it again.
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)


def replace_loader(wrap: Callable[[Callable], Callable]) -> None:
    """Compile operators by `wrap(cpp_extension.load)` from now on; done once in a process.

    wrap: sets `__wrapped__`, as `functools.wraps` does.
    """
    if not hasattr(cpp_extension.load, "__wrapped__"):
        cpp_extension.load = wrap(cpp_extension.load)


def import_library(name: str, folder: Path) -> ModuleType:
    """Load an operator that is compiled already."""
    # True: it is a module of Python, and no plain library.
    return cpp_extension._import_module_from_library(name, str(folder), True)


def folder_of_operators() -> Path:
    """Return the folder in which torch compiles, with one folder for each operator."""
    # Without the name of an operator, torch returns the folder that holds all of them.
    return Path(cpp_extension._get_build_directory("", False))
