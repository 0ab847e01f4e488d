"""Check the folders of a run: can they be written and relied on, is there room, how fast is their disk?"""

import fcntl
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.launch import Launch
from pretraining.planning.gate import check_plan
from pretraining.planning.quantities import duration, num_bytes
from pretraining.planning.run_plan import Machine
from pretraining.runtime.durable_files import sync_to_disk
from pretraining.runtime.host import disk_room_bytes, existing_folder

NETWORK = ("nfs", "cifs", "smb", "fuse", "9p", "sshfs", "davfs")
"""How the names of filesystems begin that another machine serves, and that may guarantee less."""
VANISHING = {
    "tmpfs": "the memory of this machine, and is gone when it restarts",
    "ramfs": "the memory of this machine, and is gone when it restarts",
    "overlay": "the container's own layer, and is gone with the container",
}
FEWEST_FILES = 10_000
"""Files that must still fit: a checkpoint has some for each rank, a data set has one for each shard."""
FIRST_WRITE_BYTES = 4 << 20
MOST_WRITTEN_BYTES = 256 << 20
LONGEST_WRITE_SECONDS = 1.0
SLOW_SAVE_SHARE = 0.1
"""Share of the time between two checkpoints that a save may take. The next save waits for the one before."""
SLOW_SAVE_SECONDS = 600.0
"""The most that a save may take if the run's speed is not known: a stop, too, waits for its checkpoint."""


def check_disks(launch: Launch) -> list[Finding]:
    """Check the run's folder, that of data still to be prepared, and those that states are offloaded to."""
    return [*_run_folder(launch), *_data_folder(launch), *_nvme_folders(launch)]


def _run_folder(launch: Launch) -> Iterator[Finding]:
    folder = existing_folder(launch.run_folder)
    broken = unwritable(folder)
    if broken:
        what = f"{launch.run_folder} cannot be written ({broken})"
        yield Finding("run folder", BREAKS, what, "give --output_dir a folder that can be written")
        return
    yield check_filesystem(folder)
    yield _room(launch, folder)
    status = os.statvfs(folder)
    if status.f_files and status.f_favail < FEWEST_FILES:  # some filesystems count none
        what = f"{status.f_favail:,} more files fit at {folder}, whatever the free bytes"
        verdict = BREAKS if status.f_favail < FEWEST_FILES / 100 else COSTS
        yield Finding("inodes", verdict, what, "remove small files there, or give --output_dir another disk")
    if speed := write_speed(folder):
        yield _speed(launch, folder, speed)


def unwritable(folder: Path) -> str:
    """Say why nothing can be written there; empty if it can."""
    # by writing: permission bits say nothing of read-only mounts and quotas
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""


def check_filesystem(folder: Path) -> Finding:
    """Report its kind, and whether it has the operations that a committed checkpoint relies on."""
    mount, kind = filesystem_of(folder)
    missing = missing_operations(folder)
    if missing:
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
    with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as inside:
        one, other = Path(inside, "one"), Path(inside, "other")
        one.write_bytes(b"1")

        def lock() -> None:
            with one.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        # in this order: the last one moves the first file away
        attempts: dict[str, Callable[[], object]] = {
            "file locks": lock,
            "sync of files": lambda: sync_to_disk(one),
            "sync of folders": lambda: sync_to_disk(Path(inside)),
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


def _room(launch: Launch, folder: Path) -> Finding:
    """Compare the free bytes with the checkpoints that are to be kept."""
    free = shutil.disk_usage(folder).free
    if launch.plan is None:
        return Finding("disk", FINE, f"{num_bytes(free)} free at {folder}")
    found = Machine(disk_room_bytes=disk_room_bytes(launch.run_folder, launch.continues))
    refusals = check_plan(launch.recipe, launch.ds_config, launch.world_size, found).refusals
    if refusals:
        return Finding("disk", BREAKS, refusals[0].what, refusals[0].remedy, where=str(folder))
    needed = launch.plan.checkpoint_disk_bytes + launch.plan.export_bytes
    return Finding("disk", FINE, f"{num_bytes(free)} free, {num_bytes(needed)} for checkpoints and export")


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


def _speed(launch: Launch, folder: Path, speed: float) -> Finding:
    """Report the disk's rate, and how long a checkpoint takes at it."""
    measured = f"one process writes {num_bytes(speed)}/s to {folder}"
    values = {"disk_bytes_per_second": speed}
    if launch.plan is None or not launch.plan.checkpoint_bytes:
        return Finding("disk speed", FINE, measured, values=values)
    seconds, every = launch.plan.checkpoint_bytes / speed, launch.save_seconds
    what = f"{measured}: {duration(seconds)} for a checkpoint of {num_bytes(launch.plan.checkpoint_bytes)}"
    if every is not None:
        what += f" every {duration(every)}"
    if seconds <= (SLOW_SAVE_SECONDS if every is None else SLOW_SAVE_SHARE * every):
        return Finding("disk speed", FINE, what, values=values)
    steps, rarer = launch.recipe.training.save_steps, "N"
    if every and steps >= 1:  # below 1 it is a share of the run
        rarer = f"{math.ceil(steps * seconds / (SLOW_SAVE_SHARE * every))}"
    remedy = f"give --output_dir a faster disk, or save less often: --set training.save_steps={rarer}"
    return Finding("disk speed", COSTS, what, remedy, values=values)


def _data_folder(launch: Launch) -> Iterator[Finding]:
    """Check the room for token shards that are still to be prepared."""
    if launch.data_folder is None or launch.data_is_prepared:
        return
    folder = existing_folder(launch.data_folder)
    if broken := unwritable(folder):
        what = f"{launch.data_folder} cannot be written ({broken}), and the data is still to be prepared"
        yield Finding("data folder", BREAKS, what, "give --data_dir a folder that can be written")
        return
    free, needed = shutil.disk_usage(folder).free, launch.plan.data_bytes
    if not any(source.path or source.dataset for source in launch.recipe.data.sources):
        return  # the interpreter's own library is small, whatever the budget
    what = (
        f"{num_bytes(needed)} of token shards if each token is read once, {num_bytes(free)} free at {folder}"
    )
    remedy = "give --data_dir a larger disk, or stream the shards from a store (--data_dir s3://...)"
    verdict = FINE if needed <= free else COSTS
    yield Finding("data folder", verdict, what, remedy if verdict == COSTS else "")


def _nvme_folders(launch: Launch) -> Iterator[Finding]:
    """Check the folders that DeepSpeed swaps states to."""
    zero = (launch.ds_config or {}).get("zero_optimization", {})
    blocks = [zero.get(name) or {} for name in ("offload_param", "offload_optimizer")]
    for place in sorted({block["nvme_path"] for block in blocks if block.get("device") == "nvme"}):
        folder = existing_folder(Path(place))
        broken, needed = unwritable(folder), launch.ranks_here * launch.need.nvme
        free = shutil.disk_usage(folder).free
        if broken or needed > free:
            why = broken or f"{num_bytes(needed)} of states, {num_bytes(free)} free"
            remedy = "set nvme_path, in a copy of the ds_config, to a folder of a local NVMe disk with room; or take "
            remedy += "--deepspeed zero3_offload"
            yield Finding("NVMe folder", BREAKS, f"{place}: {why}", remedy)
        elif folder != Path(place):
            what = f"{place} is not there: states would go to the disk of {folder}"
            remedy = "mount it, or set nvme_path, in a copy of the ds_config, to yours"
            yield Finding("NVMe folder", COSTS, what, remedy)
        else:
            yield Finding("NVMe folder", FINE, f"{place}: {num_bytes(needed)} of {num_bytes(free)} free")
