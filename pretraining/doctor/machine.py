"""Check this machine: its memory, limits, cores and adapters, and the folders and disks of a run."""

import fcntl
import math
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.launch import Launch
from pretraining.planning.costs import forecast
from pretraining.planning.gate import check_plan
from pretraining.planning.quantities import duration, num_bytes, several
from pretraining.planning.run_plan import Machine
from pretraining.runtime import host
from pretraining.runtime.durable_files import sync_to_disk

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
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
NETWORK = ("nfs", "cifs", "smb", "fuse", "9p", "sshfs", "davfs")
"""How the names of filesystems begin that another machine serves, and that may guarantee less."""
VANISHING = dict.fromkeys(("tmpfs", "ramfs"), "the memory of this machine, and is gone when it restarts")
VANISHING["overlay"] = "the container's own layer, and is gone with the container"
FEWEST_FILES = 10_000
"""Files that must still fit: a checkpoint has some for each rank, a data set has one for each shard."""
FIRST_WRITE_BYTES = 4 << 20
MOST_WRITTEN_BYTES = 256 << 20
LONGEST_WRITE_SECONDS = 1.0
SLOW_SAVE_SHARE = 0.1
"""Share of the time between two checkpoints that a save may take. The next save waits for the one before."""
SLOW_SAVE_SECONDS = 600.0
"""The most that a save may take if the run's speed is not known: a stop, too, waits for its checkpoint."""


def check_machine(launch: Launch) -> list[Finding]:
    return [*_memory(launch), _shared_memory(launch), *_limits(launch), *_processors(launch)]


def _memory(launch: Launch) -> Iterator[Finding]:
    """Check the memory that is free now, of which the plan judges the whole size, and swap."""
    total, container = host.host_memory_bytes() or 0, host.container_memory_bytes()
    free = host.free_memory_bytes() or total
    what = f"{num_bytes(total)}, {num_bytes(free)} free"
    what += ", as much as the container allows" if container == total else ""
    # More than there is at all is refused by the plan; here it would fit if others did not hold a part of it.
    need, on_gpus = launch.need, launch.trains_on_gpus
    needed = launch.ranks_here * (need.host_counted if on_gpus else need.on_processor) if need else 0
    remedy = ""
    if free < needed <= total:
        what += f": {several(launch.ranks_here, 'rank')} here need {num_bytes(needed)}"
        remedy = "end other processes: the kernel would end one of the ranks"
    yield Finding("host memory", COSTS if remedy else FINE, what, remedy)
    swapped = (host.kernel_bytes("SwapTotal") or 0) - (host.kernel_bytes("SwapFree") or 0)
    if swapped >= SWAPPED_BYTES:
        what = f"{num_bytes(swapped)} of memory are swapped out: what a rank has there, all ranks wait for"
        yield Finding("swap", COSTS, what, "end other processes, or swapoff -a (as root)")


def _shared_memory(launch: Launch) -> Finding:
    """Check /dev/shm, through which data workers pass batches and where NCCL keeps buffers."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        remedy = f"mount a tmpfs there: mount -t tmpfs none {SHARED_MEMORY} (as root)"
        return Finding("shared memory", BREAKS, f"{SHARED_MEMORY}: {os.strerror(error.errno)}", remedy)
    free, ranks = status.f_frsize * status.f_bavail, launch.ranks_here
    with_nccl = launch.trains_on_gpus and ranks > 1  # one GPU sends no messages
    needed = ranks * NCCL_BYTES_A_RANK if with_nccl else 0
    if launch.recipe and launch.workers:  # they keep batches ready
        ahead = int(launch.recipe.training.dataloader_prefetch_factor or PREFETCHED)
        batch = launch.recipe.micro_batch * launch.recipe.sequence_length * TOKEN_BYTES
        needed += ranks * launch.workers * ahead * batch
    what = f"{num_bytes(free)} free in {SHARED_MEMORY}"
    values = {"free_bytes": free, "needed_bytes": needed}
    size = max(1, math.ceil(needed / 1e9))  # docker's own default is 64 MB
    remedy = f"start the container with --shm-size={size}g or with --ipc=host; "
    remedy += f"else mount -o remount,size={size}G {SHARED_MEMORY} (as root)"
    verdict = FINE
    if free < needed:
        verdict = BREAKS
        what += f", {num_bytes(needed)} needed by data workers{' and NCCL' * with_nccl}"
    elif with_nccl and free < SHARED_MEMORY_FOR_NCCL:
        verdict = COSTS
        what += ", which NCCL may fill if GPUs cannot reach each other directly"
    return Finding("shared memory", verdict, what, "" if verdict == FINE else remedy, values=values)


def _limits(launch: Launch) -> Iterator[Finding]:
    """Check the limits of this user's processes: open files, processes, locked memory."""
    # The soft limit does not matter: each rank raises its own up to the hard one (`prepare_rank`).
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_RANK + FILES_FOR_A_RANK_ELSEWHERE * launch.world_size
    what = "no limit" if files == resource.RLIM_INFINITY else f"a process may open {files:,}"
    if files == resource.RLIM_INFINITY or files >= needed:
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
    each, workers = host.cores() / launch.ranks_here, launch.workers
    what = f"{host.cores():g} for {several(launch.ranks_here, 'rank')} here"
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
        device = PCI_DEVICES / gpu.fields.get("pci.bus_id", "")[-12:].lower()
        # `0-3,8`; all cores for a device that belongs to no node
        ranges = host.system_text(device / "local_cpulist").split(",")
        ends = [part.partition("-") for part in ranges if part]
        beside = {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}
        if beside and not beside & allowed:
            apart.append(gpu.index)
    if apart:
        what = f"this process may not run on the cores beside GPUs {', '.join(apart)}: "
        what += "copies cross the sockets"
        yield Finding("NUMA", COSTS, what, "give the job cores of every socket that its GPUs hang on")
    if adapters := _adapters():
        # .../mlx5_0/ports/1/state reads "4: ACTIVE"
        states = {path.parts[-4]: host.system_text(path) for path in INFINIBAND.glob("*/ports/*/state")}
        if down := sorted(name for name, state in states.items() if "ACTIVE" not in state):
            what = f"{', '.join(down)} of {', '.join(adapters)} are not active"
            remedy = "have the links brought up, or name the others in NCCL_IB_HCA"
            yield Finding("InfiniBand", COSTS, what, remedy)
        else:
            yield Finding("InfiniBand", FINE, f"{', '.join(adapters)}: active")


def check_disks(launch: Launch) -> Iterator[Finding]:
    """Check the run's folder, that of data still to be prepared, and those that states are offloaded to."""
    yield from _run_folder(launch)
    yield from _data_folder(launch)
    # the folders that DeepSpeed swaps states to
    zero = (launch.ds_config or {}).get("zero_optimization", {})
    blocks = [zero.get(name) or {} for name in ("offload_param", "offload_optimizer")]
    for place in sorted({block["nvme_path"] for block in blocks if block.get("device") == "nvme"}):
        folder = host.existing_folder(Path(place))
        broken, needed = host.unwritable(folder), launch.ranks_here * launch.need.nvme
        free = shutil.disk_usage(folder).free
        if broken or needed > free:
            why = broken or f"{num_bytes(needed)} of states, {num_bytes(free)} free"
            remedy = "set nvme_path, in a copy of the ds_config, to a folder of a local NVMe disk with room"
            remedy += "; or take --deepspeed zero3_offload"
            yield Finding("NVMe folder", BREAKS, f"{place}: {why}", remedy)
        elif folder != Path(place):
            what = f"{place} is not there: states would go to the disk of {folder}"
            remedy = "mount it, or set nvme_path, in a copy of the ds_config, to yours"
            yield Finding("NVMe folder", COSTS, what, remedy)
        else:
            yield Finding("NVMe folder", FINE, f"{place}: {num_bytes(needed)} of {num_bytes(free)} free")


def _run_folder(launch: Launch) -> Iterator[Finding]:
    folder = host.existing_folder(launch.run_folder)
    if broken := host.unwritable(folder):
        what = f"{launch.run_folder} cannot be written ({broken})"
        yield Finding("run folder", BREAKS, what, "give --output_dir a folder that can be written")
        return
    yield check_filesystem(folder)
    # the free bytes beside the checkpoints that are to be kept
    free = num_bytes(shutil.disk_usage(folder).free)
    disk = Finding("disk", FINE, f"{free} free at {folder}")
    if launch.plan is not None:
        needed = num_bytes(launch.plan.saved_bytes + launch.plan.export_bytes)
        disk = Finding("disk", FINE, f"{free} free, {needed} for checkpoints and export")
        found = Machine(disk_room_bytes=host.disk_room_bytes(launch.run_folder, launch.continues))
        for refusal in check_plan(launch.plan.setup, found).refusals[:1]:
            disk = Finding("disk", BREAKS, refusal.what, refusal.remedy, where=str(folder))
    yield disk
    status = os.statvfs(folder)
    if status.f_files and status.f_favail < FEWEST_FILES:  # some filesystems count none
        what = f"{status.f_favail:,} more files fit at {folder}, whatever the free bytes"
        verdict = BREAKS if status.f_favail < FEWEST_FILES / 100 else COSTS
        yield Finding("inodes", verdict, what, "remove small files there, or give --output_dir another disk")
    if not (speed := write_speed(folder)):
        return
    what, remedy = f"one process writes {num_bytes(speed)}/s to {folder}", ""
    if launch.plan is not None and launch.plan.checkpoint_bytes:
        seconds, every, gpu = launch.plan.checkpoint_bytes / speed, None, launch.gpus.known
        # training between two checkpoints; None if this machine's speed is not known
        if gpu and launch.recipe.training.product_precision in gpu.dense_peak_flops:
            saved = forecast(launch.plan.setup, gpu)["step"]["checkpoints"]
            every = saved and saved["every_seconds"]
        what += f": {duration(seconds)} for a checkpoint of {num_bytes(launch.plan.checkpoint_bytes)}"
        what += "" if every is None else f" every {duration(every)}"
        if seconds > (SLOW_SAVE_SECONDS if every is None else SLOW_SAVE_SHARE * every):
            steps, rarer = launch.recipe.training.save_steps, "N"
            if every and steps >= 1:  # below 1 it is a share of the run
                rarer = f"{math.ceil(steps * seconds / (SLOW_SAVE_SHARE * every))}"
            remedy = f"give --output_dir a faster disk, or save less often: --set training.save_steps={rarer}"
    values = {"disk_bytes_per_second": speed}
    yield Finding("disk speed", COSTS if remedy else FINE, what, remedy, values=values)


def check_filesystem(folder: Path) -> Finding:
    """Report its kind, and whether it has the operations that a committed checkpoint relies on."""
    mount, kind = filesystem_of(folder)
    if missing := missing_operations(folder):
        remedy = "give --output_dir another disk: a checkpoint could be lost or loaded by halves here"
        return Finding("filesystem", BREAKS, f"{kind} at {mount} has no {', '.join(missing)}", remedy)
    if kind in VANISHING:
        remedy = "give --output_dir a disk that stays, or --set checkpoints.upload=s3://BUCKET/runs"
        return Finding("filesystem", COSTS, f"{folder} is {VANISHING[kind]} ({kind})", remedy)
    served = ", served over the network" if kind.startswith(NETWORK) else ""
    return Finding("filesystem", FINE, f"{kind} at {mount}{served}; it renames, links, locks and syncs")


def filesystem_of(folder: Path) -> tuple[str, str]:
    """Find (mount point, kind) of the filesystem that holds a folder, from /proc/self/mountinfo."""
    place, best = folder.resolve(), ("/", "unknown filesystem")
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return best
    for line in lines:
        # fields before the dash: number, parent, device, root, mount point, ...; after it: kind, source, ...
        before, _, after = line.partition(" - ")
        # the kernel writes a space as \040
        mount = before.split()[4].replace("\\040", " ")
        if place.is_relative_to(mount) and len(mount) >= len(best[0]):  # the last one covers those before
            best = mount, after.split()[0]
    return best


def missing_operations(folder: Path) -> list[str]:
    """List the operations that commits and locks rely on and that the filesystem refuses."""
    inside = tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-")
    with inside, Path(inside.name, "one").open("w") as file:
        one, other = Path(inside.name, "one"), Path(inside.name, "other")
        # in this order: the last one moves the first file away
        attempts: dict[str, Callable[[], object]] = {
            "file locks": lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
            "sync of files": lambda: sync_to_disk(one),
            "sync of folders": lambda: sync_to_disk(one.parent),
            "hard links": lambda: os.link(one, other),
            "renames over a file": lambda: one.replace(other),
        }
        missing = []
        for name, attempt in attempts.items():
            try:
                attempt()
            except OSError:
                missing.append(name)
        return missing


def write_speed(folder: Path) -> float | None:
    """Measure for a second or two how many bytes per second one process writes and syncs; None without room for it."""
    room = shutil.disk_usage(folder).free // 4
    block, written, size = os.urandom(FIRST_WRITE_BYTES), 0, FIRST_WRITE_BYTES  # nothing that compresses
    if room < 4 * FIRST_WRITE_BYTES:
        return None
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        while True:  # pieces that double: a slow disk is known after the first, a fast one is kept busy
            for _ in range(size // FIRST_WRITE_BYTES):
                file.write(block)
            file.flush()
            # without it only the copy into memory would be measured
            os.fsync(file.fileno())
            written, size = written + size, 2 * size
            seconds = time.perf_counter() - began
            if seconds > LONGEST_WRITE_SECONDS or written + size > min(room, MOST_WRITTEN_BYTES):
                return written / seconds


def _data_folder(launch: Launch) -> Iterator[Finding]:
    """Check the room for token shards that are still to be prepared."""
    if launch.data_folder is None or launch.data_is_prepared:
        return
    folder = host.existing_folder(launch.data_folder)
    if broken := host.unwritable(folder):
        what = f"{launch.data_folder} cannot be written ({broken}), and the data is still to be prepared"
        yield Finding("data folder", BREAKS, what, "give --data_dir a folder that can be written")
        return
    free, needed = shutil.disk_usage(folder).free, launch.plan.data_bytes
    if not any(source.path or source.dataset for source in launch.recipe.data.sources):
        return  # the interpreter's own library is small, whatever the budget
    what = f"{num_bytes(needed)} of token shards if each token is read once, "
    what += f"{num_bytes(free)} free at {folder}"
    if needed <= free:
        yield Finding("data folder", FINE, what)
    else:
        remedy = "give --data_dir a larger disk, or stream the shards from a store (--data_dir s3://...)"
        yield Finding("data folder", COSTS, what, remedy)
