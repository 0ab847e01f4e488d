"""What this machine allows a run: memory, shared memory, limits of a process, cores, network."""

import ipaddress
import os
import resource
import socket
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.launch import Launch
from pretraining.planning.quantities import num_bytes, several
from pretraining.runtime.host import (
    GLOO_INTERFACE,
    container_memory_bytes,
    cores,
    free_memory_bytes,
    host_memory_bytes,
    kernel_bytes,
    loopback_name,
    own_address,
    system_text,
)

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
"""Batches that a data worker holds ready at least (`training.arguments.prefetch_factor`)."""
FILES_OF_A_RANK = 256
"""Open at once without its messages: libraries, token shards, logs, data workers."""
FILES_FOR_A_RANK_ELSEWHERE = 4
"""Connections that gloo's groups and the store of the ranks open to each other rank."""
THREADS_OF_A_RANK = 128
"""Of Python's libraries, NCCL and torch's pools, without data workers."""
SWAPPED_BYTES = 1_000_000_000
SLOWING = {
    "NCCL_P2P_DISABLE": ("1", "GPUs copy through the processor"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one machine talk through the network"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand is left out"),
    "NCCL_DEBUG": ("TRACE", "every call is logged"),
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the processor waits for every message"),
    "NCCL_BLOCKING_WAIT": ("1", "the processor waits for every message"),
}
"""Variable -> the value that slows a run down, and how."""


def check_machine(launch: Launch) -> list[Finding]:
    """Everything about the machine but its GPUs, its disks and what is installed."""
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
        _own_name(launch),
        *_network_variables(),
        _proxies(),
    ]
    return [finding for finding in findings if finding]


def _memory(launch: Launch) -> Finding:
    """Memory that is free now against what the ranks of this machine take together; its size is judged by the plan."""
    total, container = host_memory_bytes() or 0, container_memory_bytes()
    free = free_memory_bytes() or total
    what = f"{num_bytes(total)}, {num_bytes(free)} free"
    what += ", as much as the container allows" if container == total else ""
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
    """Batches of data workers and NCCL's buffers lie in /dev/shm."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        remedy = f"mount a tmpfs there: mount -t tmpfs none {SHARED_MEMORY} (as root)"
        return Finding("shared memory", BREAKS, f"{SHARED_MEMORY}: {os.strerror(error.errno)}", remedy)
    free, ranks = status.f_frsize * status.f_bavail, launch.ranks_here
    with_nccl = launch.trains_on_gpus and ranks > 1
    needed = _batches_ahead(launch) + (ranks * NCCL_BYTES_A_RANK if with_nccl else 0)
    what = f"{num_bytes(free)} free in {SHARED_MEMORY}"
    values = {"free_bytes": free, "needed_bytes": needed}
    remedy = (
        "start the container with --shm-size=1g or more, or with --ipc=host; else mount -o remount,size=1G "
    )
    remedy += f"{SHARED_MEMORY} (as root)"
    if free < needed:
        what += f", {num_bytes(needed)} needed by data workers{' and NCCL' * with_nccl}"
        return Finding("shared memory", BREAKS, what, remedy, values=values)
    if with_nccl and free < SHARED_MEMORY_FOR_NCCL:
        what += ", which NCCL may fill if GPUs cannot reach each other directly"
        return Finding("shared memory", COSTS, what, remedy, values=values)
    return Finding("shared memory", FINE, what, values=values)


def _batches_ahead(launch: Launch) -> int:
    """Bytes that the data workers of this machine hold ready."""
    if launch.recipe is None or not launch.workers:
        return 0
    ahead = int(launch.recipe.training.get("dataloader_prefetch_factor") or PREFETCHED)
    batch = launch.recipe.micro_batch * launch.recipe.sequence_length * TOKEN_BYTES
    return launch.ranks_here * launch.workers * ahead * batch


def _open_files(launch: Launch) -> Finding:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_RANK + FILES_FOR_A_RANK_ELSEWHERE * launch.world_size
    what = f"a process may open {allowed:,}"
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raised = f"ulimit -n {max(needed, 65536):,}".replace(",", "")
        remedy = raised if most == resource.RLIM_INFINITY or most >= needed else f"{raised} (as root)"
        return Finding("open files", BREAKS, f"{what}, a rank needs about {needed:,}", remedy)
    return Finding("open files", FINE, what if allowed != resource.RLIM_INFINITY else "no limit")


def _processes(launch: Launch) -> Finding | None:
    """Threads count; root has no limit."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    needed = launch.ranks_here * (1 + launch.workers) * THREADS_OF_A_RANK
    if allowed == resource.RLIM_INFINITY or allowed >= needed or os.geteuid() == 0:
        return None
    what = f"this user may have {allowed:,} processes and threads, the ranks here need about {needed:,}"
    return Finding("processes", BREAKS, what, f"ulimit -u {max(needed, 65536)}, or have the limit raised")


def _locked_memory(launch: Launch) -> Finding:
    """InfiniBand registers memory, and DeepSpeed locks the buffers through which it swaps to NVMe."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if allowed == resource.RLIM_INFINITY:
        return Finding("locked memory", FINE, "no limit")
    what, devices = f"a process may lock {num_bytes(allowed)}", _adapters()
    remedy = "ulimit -l unlimited (as root), or start the container with --ulimit memlock=-1"
    staging = (launch.need.host.get("staging buffers", 0) if launch.need else 0) * ("nvme" in launch.offloads)
    if staging > allowed:
        what += f", and buffers of {num_bytes(staging)} for NVMe must be locked"
        return Finding("locked memory", BREAKS, what, remedy)
    if devices and launch.trains_on_gpus:
        what += f", and InfiniBand ({', '.join(devices)}) registers whole buffers of messages"
        return Finding("locked memory", BREAKS if launch.several_machines else COSTS, what, remedy)
    return Finding("locked memory", FINE, f"{what}; nothing of this run locks more")


def _cores(launch: Launch) -> Finding:
    """A rank computes and has its data workers beside it."""
    each, workers = cores() / launch.ranks_here, launch.workers
    what = f"{cores():g} for {several(launch.ranks_here, 'rank')} here"
    what += f" of {several(workers, 'data worker')} each" if workers else ""
    if each >= 1 + workers or (not launch.trains_on_gpus and each >= 1):
        return Finding("cores", FINE, what)
    remedy = "give the job more cores (SLURM: --cpus-per-task, or --exclusive; a container: --cpus)"
    remedy += f", or --set training.dataloader_num_workers={max(0, int(each) - 1)}" if workers else ""
    wait = ", and GPUs wait for launches and batches" if launch.trains_on_gpus else ""
    return Finding("cores", COSTS, f"{what}: they take turns{wait}", remedy)


def _numa(launch: Launch) -> Finding | None:
    """Memory nodes of which this process is kept out, though GPUs hang there."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    own = os.sched_getaffinity(0)
    apart = []
    for gpu in launch.gpus.found:
        device = PCI_DEVICES / gpu.fields.get("pci.bus_id", "")[-12:].lower() / "numa_node"
        local = _cores_of_node(system_text(device))
        if local and not local & own:
            apart.append(gpu.index)
    if not apart:
        return None
    what = f"this process may not run on the cores beside GPUs {', '.join(apart)}: copies cross the sockets"
    return Finding("NUMA", COSTS, what, "give the job cores of every socket that its GPUs hang on")


def _cores_of_node(node: str) -> set[int]:
    """`0-3,8` as a set; empty for a device that belongs to no node."""
    ranges = (
        part.partition("-") for part in system_text(NODES / f"node{node}" / "cpulist").split(",") if part
    )
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def _adapters() -> list[str]:
    return sorted(path.name for path in INFINIBAND.glob("*"))


def _infiniband() -> Finding | None:
    """Adapters, and whether their links are up."""
    if not _adapters():
        return None
    states = {path.parts[-4]: system_text(path) for path in INFINIBAND.glob("*/ports/*/state")}
    down = sorted(name for name, state in states.items() if "ACTIVE" not in state)
    if not down:
        return Finding("InfiniBand", FINE, f"{', '.join(_adapters())}: active")
    what = f"{', '.join(down)} of {', '.join(_adapters())} are not active"
    return Finding("InfiniBand", COSTS, what, "have the links brought up, or name the others in NCCL_IB_HCA")


def _own_name(launch: Launch) -> Finding:
    """gloo listens on the address that the machine's own name has."""
    name, address, chosen = socket.gethostname(), own_address(), os.environ.get(GLOO_INTERFACE)
    what = (
        f"{name} leads to no address of this machine" if address is None else f"{name} resolves to {address}"
    )
    if loopback_name() is None:
        what = f"{what}; GLOO_SOCKET_IFNAME is {chosen}" if chosen else f"{name} is {address}"
        return Finding("host name", FINE, what, values={"address": address})
    what += "" if address is None else ", this machine itself"
    if not launch.several_machines:
        return Finding("host name", FINE, f"{what}: enough for a run on one machine")
    what += (
        f", and {several(launch.world_size - launch.ranks_here, 'rank')} elsewhere could not reach gloo there"
    )
    interface = _outward_interface() or "INTERFACE"
    remedy = (
        f"export GLOO_SOCKET_IFNAME={interface} on every machine, or give {name} its address in /etc/hosts"
    )
    return Finding("host name", BREAKS, what, remedy)


def _outward_interface() -> str | None:
    """The one that the default route takes."""
    routes = [line.split() for line in system_text(Path("/proc/net/route")).splitlines()[1:]]
    return next((route[0] for route in routes if len(route) > 1 and route[1] == "00000000"), None)


def _network_variables() -> Iterator[Finding]:
    """Variables that name what is not there, or that slow messages down."""
    present = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = os.environ.get(variable, "")
        if chosen and not chosen.startswith("^") and not any(_matches(name, chosen) for name in present):
            choice = _outward_interface() or next((name for name in present if name != "lo"), "lo")
            remedy = f"export {variable}={choice} (there are {', '.join(present)}), or unset {variable}"
            yield Finding(
                "network", BREAKS, f"{variable} is {chosen}, and there is no such interface", remedy
            )
    for variable, (value, why) in SLOWING.items():
        if os.environ.get(variable, "").upper() == value:
            yield Finding("network", COSTS, f"{variable}={os.environ[variable]}: {why}", f"unset {variable}")
    meeting = os.environ.get("MASTER_ADDR")
    if meeting:
        try:
            socket.gethostbyname(meeting)
        except OSError:
            what = f"MASTER_ADDR is {meeting}, a name that has no address here"
            yield Finding("network", BREAKS, what, "give it in /etc/hosts, or set MASTER_ADDR to an address")


def _matches(name: str, chosen: str) -> bool:
    """`eth`, a beginning, or `=eth0`, a whole name; several with commas."""
    parts = [part.partition(":")[0] for part in chosen.split(",") if part]
    return any(name == part[1:] if part.startswith("=") else name.startswith(part) for part in parts)


def _proxies() -> Finding | None:
    """Stores of this machine or network that would be asked through a proxy of the outside."""
    proxy = next(
        (os.environ[v] for v in ("https_proxy", "HTTPS_PROXY", "http_proxy") if os.environ.get(v)), None
    )
    without = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    for variable in ("HF_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3") if proxy else ():
        host = urlsplit(os.environ.get(variable, "")).hostname
        spared = host and any(
            entry and (entry == "*" or fnmatch(host, f"*{entry.strip()}")) for entry in without
        )
        if host and _is_local(host) and not spared:
            what = f"{variable} is {host}, a local address, and a proxy is set for all addresses"
            return Finding(
                "proxy", COSTS, what, f"export no_proxy={','.join(filter(None, [*without, host]))}"
            )
    return None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host
