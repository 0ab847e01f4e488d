"""Check what must be the same on all ranks (versions, variables, GPUs, clocks) and what they share (folders, disk)."""

import contextlib
import hashlib
import math
import os
import shutil
import statistics
import time
from collections import Counter
from pathlib import Path

import torch

from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.roll_call import RollCall, named
from pretraining.errors import file_error
from pretraining.planning.quantities import duration, num_bytes, several
from pretraining.runtime.host import system_text
from pretraining.runtime.installation import as_typed
from pretraining.runtime.process_group import device_name
from pretraining.runtime.run_folder import describe_environment, git

LIBRARIES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "DS_")
LIBRARIES += ("PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX")
"""How the names of variables begin that change what a collective does."""
OF_THE_HOST = ("IFNAME", "_HCA", "_DEBUG", "_TOPO", "_NET_GDR", "_ADDR")
"""Parts of names of variables that may differ between hosts: they name interfaces or files there, or only log."""
CLOCK_SECONDS = 1.0
"""How far clocks may differ. Events, metrics and checkpoints have whole seconds: beyond that their order is wrong."""
RUN_FOLDER, DISK = "shared run folder", "disk of all ranks"
LOOK_SECONDS = 12.0
"""How long to look for a new file: NFS caches what it knows about a folder for some seconds."""
DISK_SECONDS = 15.0
"""No further piece is written after this; what was written until then counts."""
BYTES_ON_GPU_MACHINES, BYTES_ELSEWHERE = 512 << 20, 16 << 20
"""Bytes that each rank writes: on a machine for training enough to exceed a controller's cache."""
PIECE_BYTES = 4 << 20
SAVE_SECONDS = 600
"""A save that takes longer does not end between the signal of launch/slurm.sh, ten minutes early, and the end."""


def describe_rank(on_gpu: bool) -> dict[str, str]:
    """Describe this rank as {what: value}; all must be the same on every rank, or on every rank of a host."""
    here = describe_environment(device_name(), 0)
    commit = f"{here['git_commit']}"[:12]
    # Nodes may hold copies of the repository: the same commit with other changes is another program.
    if changes := git("diff", "HEAD"):
        commit += f", modified ({hashlib.blake2b(changes.encode(), digest_size=3).hexdigest()})"
    described = {
        "Python": here["python"],
        **{f"version of {name}": value or "not installed" for name, value in here["versions"].items()},
        "commit of this repository": commit,
        "GPU": here["device"],
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  ..."
        driver = system_text(Path("/proc/driver/nvidia/version")).partition("Module")[2].split()
        described |= {
            "GPU memory": num_bytes(properties.total_memory),
            "CUDA of torch": str(torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": driver[0] if driver else "unknown",
        }
    variables = {key: value for key, value in os.environ.items() if key.startswith(LIBRARIES)}
    return described | {f"variable {key}": value for key, value in variables.items()}


def compare_ranks(call: RollCall, described: list[dict[str, str]]) -> list[Finding]:
    """Find what differs between the ranks: one finding for each thing and value that most ranks do not have."""
    findings = []
    for key in sorted({key for each in described for key in each}):
        values = [each.get(key, "not set") for each in described]
        usual, _ = Counter(values).most_common(1)[0]  # of two values that are as frequent, rank 0's
        expected = [usual] * call.size
        if key.startswith("variable") and any(part in key for part in OF_THE_HOST):
            # Within a host all ranks must still agree with its first.
            expected = [values[node[0]] for node in call.nodes for _ in node]
        odd: dict[str, list[int]] = {}
        for rank, (value, wanted) in enumerate(zip(values, expected, strict=True)):
            if value != wanted:
                odd.setdefault(value, []).append(rank)
        for value, ranks in odd.items():
            wanted = expected[ranks[0]]
            verdict, remedy = _to_make_alike(key, wanted)
            message, where = f"{key} is {value}, elsewhere {wanted}", named(call.ranks, ranks)
            findings.append(Finding("ranks alike", verdict, message, remedy, where))
    counts = {call.hosts[node[0]]: len(node) for node in call.nodes}
    usual_count = statistics.mode(counts.values())
    for host, count in counts.items():
        if count != usual_count:
            message = f"{several(count, 'rank')} here, {usual_count} on other hosts"
            remedy = "start as many on every node: NCCL finds its fastest ways, and hpZ its groups, only among equals"
            findings.append(Finding("ranks alike", COSTS, message, remedy, host))
    if findings:
        return findings
    versions = ", ".join(f"{name} {described[0][f'version of {name}']}" for name in ("torch", "deepspeed"))
    same = "versions, commit, variables and devices are the same"
    message = f"{same} on {several(call.size, 'rank')}: {versions}, {described[0]['GPU']}"
    return [Finding("ranks alike", FINE, message)]


def _to_make_alike(key: str, usual: str) -> tuple[str, str]:
    """Return (verdict, remedy) if some ranks have another value than the usual one."""
    if key.startswith("variable"):
        name = key.removeprefix("variable ")
        export = "" if usual == "not set" else f"export {name}={usual} on every node, or "
        return BREAKS, f"{export}unset {name} everywhere: collectives would not match"
    if key.startswith("commit"):
        commit = usual.partition(",")[0]
        return BREAKS, f"git checkout {commit} on every node, and have the same changes, or none, on each"
    if key in ("GPU", "GPU memory", "driver"):
        return COSTS, "take nodes of one kind: the slowest GPU sets the pace, the smallest the memory"
    remedy = "install the same on every node (pip install -r requirements.txt), or share one folder"
    return BREAKS, as_typed(remedy)


def compare_clocks(call: RollCall) -> list[Finding]:
    """Read the clocks of all nodes between two moments of rank 0, so that their distance bounds the error."""
    began = time.perf_counter()
    # returns on every rank at about the same moment
    call.gather("clocks are read", None)
    times = call.gather("times", time.time())
    bound = time.perf_counter() - began
    firsts = {node[0] for node in call.nodes[1:]}
    apart = ({"ahead_seconds": each - times[0], "bound_seconds": bound} for each in times)
    return judge_clocks(call, [each if rank in firsts else None for rank, each in enumerate(apart)])


def judge_clocks(call: RollCall, found: list[dict | None]) -> list[Finding]:
    """Make one finding for each clock that is certainly wrong; one for all clocks if none is."""
    measured = {rank: each for rank, each in enumerate(found) if each is not None}
    findings = []
    for rank, each in measured.items():
        ahead, bound = each["ahead_seconds"], each["bound_seconds"]
        if abs(ahead) - bound > CLOCK_SECONDS:  # certain, whatever the way took
            message = f"{duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} rank 0 on "
            message += f"{call.hosts[0]} (known to {duration(bound)})"
            remedy = "set the clocks (chrony, ntpd): times of events, "
            remedy += "checkpoints and logs would not fit together"
            findings.append(Finding("clocks", COSTS, message, remedy, str(call.ranks[rank]), each))
    if findings or not measured:
        return findings
    most = max(measured.values(), key=lambda each: abs(each["ahead_seconds"]))
    apart, bound = abs(most["ahead_seconds"]), most["bound_seconds"]
    nodes = several(len(call.nodes), "node")
    message = f"{nodes} are at most {duration(apart)} apart (known to {duration(bound)})"
    return [Finding("clocks", FINE, message, values={"apart_seconds": apart, "bound_seconds": bound})]


class ProbedFolder:
    """A folder of the run, with the files that the doctor puts there for a moment; every rank makes one."""

    def __init__(self, folder: Path, rank: int, token: str):
        self.folder, self.rank = folder.absolute(), rank
        self.probe = self.folder / f".doctor-{token}"
        # Folders that only the doctor makes: they are removed at the end, the innermost first.
        self._absent = [path for path in (self.folder, *self.folder.parents) if not path.exists()]

    def leave_token(self) -> None:
        """Write this rank's token; `UserError` if the folder cannot be written."""
        try:
            self.probe.mkdir(parents=True, exist_ok=True)
            (self.probe / f"rank-{self.rank}").write_text("here")
        except OSError as error:
            raise file_error(error, self.folder) or error from error

    def look_for(self, ranks: int) -> list[int]:
        """Wait for the tokens of all ranks; list the ranks whose token is not here after LOOK_SECONDS."""
        until = time.monotonic() + LOOK_SECONDS
        while missing := [rank for rank in range(ranks) if not (self.probe / f"rank-{rank}").exists()]:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return missing

    def write_and_read(self, num_bytes: int) -> dict:
        """Write, flush to the disk and read again: {"bytes", "write_seconds", "read_seconds"}; `UserError` if it fails.

        The file stays until `clear`, so that the disk must hold those of all ranks at once.
        """
        try:
            data = self.probe / f"data-{self.rank}"
            # nothing that a filesystem could compress
            piece, began, written = os.urandom(PIECE_BYTES), time.perf_counter(), 0
            with data.open("wb") as file:
                while written < num_bytes and time.perf_counter() - began < DISK_SECONDS:
                    written += file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                write_seconds = time.perf_counter() - began
                if hasattr(os, "posix_fadvise"):  # else the file would be read from memory
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            with data.open("rb", buffering=0) as file:
                while time.perf_counter() - began < DISK_SECONDS and file.read(PIECE_BYTES):
                    continue
            read_seconds = time.perf_counter() - began
            return {"bytes": written, "write_seconds": write_seconds, "read_seconds": read_seconds}
        except OSError as error:
            raise file_error(error, self.folder) or error from error

    def clear(self) -> None:
        """Remove everything, also what stopped ranks have left; no step needs the probe any more."""
        shutil.rmtree(self.probe, ignore_errors=True)
        for path in self._absent:
            with contextlib.suppress(OSError):  # another rank was first, or somebody else has written there
                path.rmdir()


def judge_run_folder(
    folder: Path, upload: str | None, call: RollCall, missed: list[list[int]]
) -> list[Finding]:
    """Check whether all ranks write into one and the same folder, or each node into its own beside a store.

    missed: for each rank those whose tokens it did not see (`ProbedFolder.look_for`).
    """
    # Ranks that miss the same others see the same folder.
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, others in enumerate(missed):
        groups.setdefault(tuple(others), []).append(rank)
    ranks, nodes = several(call.size, "rank"), several(len(call.nodes), "node")
    if set(groups) == {()}:
        return [Finding(RUN_FOLDER, FINE, f"{folder} is one folder for {ranks} on {nodes}")]
    if upload is not None and all(sorted(group) in call.nodes for group in groups.values()):
        message = f"{folder} is a folder of its own on each of {nodes}; checkpoints meet in {upload}"
        return [Finding(RUN_FOLDER, FINE, message)]
    most = max(groups.values(), key=len)  # of groups of one size that of rank 0
    odd = [rank for rank in range(call.size) if rank not in most]
    one, other = named(call.ranks, odd), named(call.ranks, most)
    message = f"{folder} is not shared: {one} and {other} see different folders"
    remedy = "--output_dir FOLDER, on a disk that all nodes share, or one folder a node and checkpoints.upload=STORE"
    return [Finding(RUN_FOLDER, BREAKS, message, remedy, one)]


def manifest_of(data_dir: Path | str, name: str) -> str | None:
    """Return a digest of the prepared data that a rank finds; None if there is none."""
    if isinstance(data_dir, str) and "://" in data_dir:
        return data_dir  # an address is the same for every node
    folder = Path(data_dir) / name
    files = sorted(folder.glob("*.json"))
    digest = hashlib.blake2b(digest_size=8)
    # The manifests hold every shard's checksum: equal manifests are equal data.
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest() if files else None


def judge_data(where: tuple[Path | str, str], call: RollCall, digests: list[str | None]) -> list[Finding]:
    """Check whether every rank finds the same prepared data. where: (folder of data sets, name of this one)."""
    place, check = f"{str(where[0]).rstrip('/')}/{where[1]}", "shared data"
    if not any(digests):
        return []  # what each node finds of the data is a line of its own
    if len(set(digests)) == 1:
        message = f"{place} holds the same prepared data for {several(call.size, 'rank')}"
        return [Finding(check, FINE, message)]
    usual = max(filter(None, digests), key=digests.count)  # what most ranks have
    odd = [rank for rank, each in enumerate(digests) if each != usual]
    lacks = all(digests[rank] is None for rank in odd)
    message = f"{place}: {'no prepared data' if lacks else 'other prepared data'} here, other ranks have it"
    source = call.hosts[digests.index(usual)]
    remedy = "--data_dir FOLDER, on a disk that all nodes share; "
    remedy += f"or copy the data to the nodes that are named: rsync -a {source}:{place}/ {place}/"
    return [Finding(check, BREAKS, message, remedy, named(call.ranks, odd))]


def judge_disk(checkpoint_bytes: int | None, call: RollCall, found: list[dict]) -> list[Finding]:
    """Find the bytes per second of all ranks at once, and how long a checkpoint takes at that rate."""
    total = sum(each["bytes"] for each in found)
    # A save ends with its slowest rank.
    seconds = {key: max(each[key] for each in found) for key in ("write_seconds", "read_seconds")}
    writes, reads = (total / max(seconds[key], 1e-9) for key in ("write_seconds", "read_seconds"))
    values = {"all_ranks_write_bytes_per_second": writes, "all_ranks_read_bytes_per_second": reads}
    message = f"{several(call.size, 'rank')} at once write {num_bytes(writes)}/s and read "
    message += f"{num_bytes(reads)}/s"
    remedy = ""
    if checkpoint_bytes is not None:
        saving = values["checkpoint_seconds"] = checkpoint_bytes / writes
        message += f"; a checkpoint of {num_bytes(checkpoint_bytes)} takes {duration(saving)}"
        if saving > SAVE_SECONDS:
            remedy = "give --output_dir a faster disk; on SLURM ask for the stop so much earlier: "
            remedy += f"sbatch --signal=B:USR1@{math.ceil(1.5 * saving)}"
    return [Finding(DISK, COSTS if remedy else FINE, message, remedy, values=values)]
