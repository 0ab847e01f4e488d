"""Compile DeepSpeed's operators when they are first used, and keep them for later runs that need the same.

torch has one folder for each operator's name. If a user has two environments, each run in the other one compiles
again. If a compile is killed, it leaves a lock file, and torch waits for it for ever. Here the folder's name also has
a digest of everything that goes into the compile. The system releases the lock when its process ends.
"""

import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.utils.cpp_extension as cpp_extension

from pretraining.ds_config import optimizer_device, parameter_device
from pretraining.errors import UserError
from pretraining.runtime.durable_files import one_at_a_time, sync_to_disk
from pretraining.upstream.toolchain import missing_for_operators
from pretraining.upstream.torch import folder_of_operators, import_library, replace_loader

_HEADERS = Path(find_spec("deepspeed").origin).parent
"""Header files below this folder are DeepSpeed's own; others belong to the compilers."""

_NOT_DEEPSPEEDS = {"build_directory", "is_python_module", "is_standalone"}
"""A caller that passes one of these keeps the result elsewhere, or loads it in another way."""


def check_operators(ds_config: dict | None) -> None:
    """Raise `UserError`, before the model is built, if this machine cannot compile what ds_config's offload needs."""
    devices = {optimizer_device(ds_config), parameter_device(ds_config)}
    if devices == {"gpu"}:
        return
    torch_cuda = torch.version.cuda if torch.cuda.is_available() else None
    if missing := next(missing_for_operators("nvme" in devices, torch_cuda), None):
        where = " and ".join(sorted(devices - {"gpu"}))
        what = f"offloading to {where} compiles an operator of DeepSpeed"
        raise UserError(f"deepspeed: {what}, which needs {missing}")


def keep_compiled_operators() -> None:
    """From now on load an operator that is compiled already. Rank 0 prints a line when one has to be compiled."""
    replace_loader(_kept)


def _kept(load: Callable) -> Callable:
    @wraps(load)
    def load_kept(name: str, sources: list[str], verbose: bool = False, **keywords):
        if not _NOT_DEEPSPEEDS.isdisjoint(keywords):
            return load(name, sources, verbose=verbose, **keywords)
        # notes for debuggers are two fifths of a compile's time and nine tenths of what it keeps
        keywords["extra_cflags"] = [flag for flag in keywords.get("extra_cflags") or [] if flag != "-g"]
        folder = folder_of_operators() / f"{name}-{_fingerprint(sources, keywords)}"
        library = folder / f"{name}{cpp_extension.LIB_EXT}"
        if not library.exists():
            if os.environ.get("LOCAL_RANK", "0") == "0":  # a silent minute looks like a hang
                line = f"compiling DeepSpeed's operator {name}: about a minute, once on this machine"
                print(line, flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            # others wait until this process has compiled, and this one for them
            # a filesystem without locks: nobody waits, the work is done twice, and the last result counts
            with one_at_a_time(folder / "compiling"):
                # looked for again under the lock: another process may have compiled it meanwhile
                if not library.exists():
                    for abandoned in folder.glob("part-*"):
                        # left by a killed compile; a compiler that still runs there fails
                        shutil.rmtree(abandoned, ignore_errors=True)
                    part = Path(tempfile.mkdtemp(prefix="part-", dir=folder))
                    try:
                        module = load(name, sources, build_directory=str(part), verbose=verbose, **keywords)
                        # before the rename: a library that has its name must be whole
                        sync_to_disk(part / library.name)
                        (part / library.name).rename(library)
                    finally:
                        shutil.rmtree(part, ignore_errors=True)
                    return module
        return import_library(name, folder)

    return load_kept


def _fingerprint(sources: list[str], keywords: dict) -> str:
    """Return a digest of everything that the compiled operator depends on; DeepSpeed's own folder does not matter."""
    includes = [Path(path) for path in keywords.get("extra_include_paths") or []]
    own = [path for path in includes if path.is_relative_to(_HEADERS)]
    files = [Path(source) for source in sources]
    files += [file for folder in own for file in sorted(folder.rglob("*")) if file.is_file()]
    try:  # what `-march=native` depends on
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        kept = ("model name", "flags", "Features", "CPU part")
        processor = [each for each in lines if each.startswith(kept)]
    except OSError:
        processor = [platform.machine(), platform.processor()]
    said = [
        (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI")),
        [str(path) for path in includes if path not in own],
        sorted((key, value) for key, value in keywords.items() if key != "extra_include_paths"),
        [hashlib.blake2b(file.read_bytes()).hexdigest() for file in files],
        _identity(cpp_extension.get_cxx_compiler()),
        processor,
    ]
    if keywords.get("with_cuda"):
        said += [_identity(f"{cpp_extension.CUDA_HOME}/bin/nvcc"), os.environ.get("TORCH_CUDA_ARCH_LIST")]
    return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()


def _identity(compiler: str) -> tuple | None:
    """Return path, size and time of a compiler's file, which differ between versions."""
    found = shutil.which(compiler)
    if found is None:
        return None
    status = Path(found).stat()
    return str(Path(found).resolve()), status.st_size, status.st_mtime_ns
