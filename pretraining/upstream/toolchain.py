"""Find what the libraries compile with (compilers, headers and tools) in the way torch and DeepSpeed find it.

The doctor, the check before a model is offloaded, and inductor all use this list. It does not import torch.
"""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LINK_SECONDS = 20
"""Seconds for linking a C program of one line; nvcc's answer gets as many."""


class Missing(NamedTuple):
    """A tool that is not here."""

    what: str
    """With its article, such as "a C++ compiler (c++)"."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def missing_for_operators(nvme: bool, torch_cuda: str | None) -> Iterator[Missing]:
    """Yield what DeepSpeed's operators for offloading lack (deepspeed 0.19.8, torch 2.15 utils/cpp_extension.py).

    CPU Adam needs a C++ compiler and ninja; `async_io`, for NVMe, libaio, and beside a GPU the toolkit of torch's CUDA
    (ops/op_builder/async_io.py, `CUDAOpBuilder.nvcc_args`).

    Args:
        nvme: whether states go to NVMe.
        torch_cuda: the CUDA of a torch that trains on GPUs; None if the processor trains.
    """
    cxx = os.environ.get("CXX", "c++")
    if shutil.which(cxx) is None:
        yield Missing(f"a C++ compiler ({cxx})", "apt-get install g++, or export CXX=YOURS")
    if shutil.which("ninja") is None:
        yield Missing("ninja", "pip install ninja, and activate the environment that holds it")
    if not nvme:
        return  # what follows is for `async_io` alone
    if not _links_libaio():
        yield Missing("libaio", "apt-get install libaio-dev, or take --deepspeed zero3_offload")
    # DeepSpeed accepts pairs of minor versions too (`cuda_minor_mismatch_ok` of ops/op_builder/builder.py).
    found = nvcc_release() if torch_cuda else None
    if torch_cuda and (found is None or found.split(".")[0] != torch_cuda.split(".")[0]):
        there = "there is no nvcc here" if found is None else f"the nvcc here is of CUDA {found}"
        what = f"the toolkit of CUDA {torch_cuda}, and {there}"
        yield Missing(what, "install it and export CUDA_HOME=FOLDER, or take --deepspeed zero3_offload")


def missing_for_kernels(on_gpu: bool) -> Iterator[Missing]:
    """Yield what inductor lacks to generate code for its device, except the package triton.

    triton 3.9 builds a small C extension of Python at its first kernel (backends/nvidia/driver.py); on the processor
    inductor (torch 2.15, config.cpp.cxx) generates C++.
    """
    if not on_gpu:
        cxx = os.environ.get("CXX", "g++")
        if shutil.which(cxx) is None:
            yield Missing(f"a C++ compiler ({cxx})", "apt-get install g++, or export CXX=YOURS")
        return
    # Any of these serves triton.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        yield Missing("a C compiler (gcc) for triton", "apt-get install gcc, or export CC=YOURS")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        yield Missing("Python's headers (Python.h) for triton", "apt-get install python3-dev")


def nvcc_release() -> str | None:
    """Return the CUDA of the toolkit that torch would take, such as "13.0"; None if it holds no nvcc."""
    # In torch's order: the variables, the nvcc on the PATH, the usual folder.
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or (nvcc and Path(nvcc).parent.parent)
    command = [str(Path(home or "/usr/local/cuda", "bin", "nvcc")), "-V"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=LINK_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+)", said)
    return release[1] if release else None


def _links_libaio() -> bool:
    """Return whether a C program links with libaio; CFLAGS and LDFLAGS count.

    DeepSpeed tries the same (`OpBuilder.has_function`). True without a C compiler, because then libaio is not what is
    missing.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return True
    c_flags, link_flags = (shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "calls.c")
        source.write_text("void io_submit(void); int main(void) { io_submit(); return 0; }\n")
        words = [*compiler, *c_flags, str(source), *link_flags, "-laio", "-o", str(source.with_suffix(""))]
        try:
            return subprocess.run(words, capture_output=True, timeout=LINK_SECONDS).returncode == 0
        except (OSError, subprocess.SubprocessError):
            return False
