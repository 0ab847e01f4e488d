"""The disks as all ranks see them at once: is a shared folder shared, and how fast is a save of all ranks together."""

import contextlib
import hashlib
import math
import os
import shutil
import time
import uuid
from pathlib import Path

from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.roll_call import FAILED, RollCall, named
from pretraining.errors import file_error
from pretraining.planning.quantities import duration, num_bytes, several

CHECK = "shared run folder"
LOOK_SECONDS = 12.0
"""A network folder may show a new file late: NFS keeps what it knows of a folder for some seconds."""
DISK_SECONDS = 15.0
"""No further piece is written after this; what was written until then counts."""
BYTES_ON_GPU_MACHINES, BYTES_ELSEWHERE = 512 << 20, 16 << 20
"""That each rank writes: enough to leave a controller's cache behind on a machine that is meant for training."""
PIECE_BYTES = 4 << 20
SAVE_SECONDS = 600
"""A save that takes longer does not end between the signal of launch/slurm.sh, ten minutes early, and the end."""


class ProbedFolder:
    """One folder of the run, and what the doctor leaves there for a moment; every rank makes one."""

    def __init__(self, folder: Path, rank: int, token: str):
        self.folder, self.rank = folder.absolute(), rank
        self.probe = self.folder / f".doctor-{token}"
        self._absent = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self._data = self.probe / f"data-{rank}"

    def leave_token(self) -> None:
        """Write this rank's token.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self.probe.mkdir(parents=True, exist_ok=True)
            self._token(self.rank).write_text("here")
        except OSError as error:
            raise file_error(error, self.folder) or error from error

    def look_for(self, ranks: int) -> list[int]:
        """Ranks whose token is not here, after some patience."""
        missing, until = list(range(ranks)), time.monotonic() + LOOK_SECONDS
        while missing:
            missing = [rank for rank in missing if not self._token(rank).exists()]
            if time.monotonic() > until:
                break
            time.sleep(0.05 if missing else 0)
        return missing

    def write_and_read(self, num_bytes: int) -> dict:
        """{"bytes", "write_seconds", "read_seconds"}: written and flushed to the disk, then read from it.

        Raises:
            UserError: the disk is full, or refuses otherwise.
        """
        try:
            written, write_seconds = self._write(num_bytes)
            return {"bytes": written, "write_seconds": write_seconds, "read_seconds": self._read()}
        except OSError as error:
            raise file_error(error, self.folder) or error from error
        finally:
            self._data.unlink(missing_ok=True)

    def _write(self, num_bytes: int) -> tuple[int, float]:
        piece, began, written = os.urandom(PIECE_BYTES), time.perf_counter(), 0
        with self._data.open("wb") as file:
            while written < num_bytes and time.perf_counter() - began < DISK_SECONDS:
                written += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            if hasattr(os, "posix_fadvise"):  # else the file would be read from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return written, seconds

    def _read(self) -> float:
        began = time.perf_counter()
        with self._data.open("rb", buffering=0) as file:
            while time.perf_counter() - began < DISK_SECONDS and file.read(PIECE_BYTES):
                continue
        return time.perf_counter() - began

    def clear(self) -> None:
        """Leave no trace, not of ranks that stopped either; no step needs the probe any more."""
        shutil.rmtree(self.probe, ignore_errors=True)
        for path in self._absent:
            with contextlib.suppress(OSError):
                path.rmdir()

    def _token(self, rank: int) -> Path:
        return self.probe / f"rank-{rank}"


def token_of_all(call: RollCall) -> str:
    """A name for the probes, the same on every rank."""
    return call.gather("token", uuid.uuid4().hex[:8])[0]


def look_at_run_folder(call: RollCall, probed: ProbedFolder) -> list[Finding]:
    """Whether all ranks write into one and the same folder."""
    answers = call.step("run folder: tokens", probed.leave_token, LOOK_SECONDS + 5)
    refused = [rank for rank, answer in enumerate(answers) if answer.state == FAILED]
    if refused:
        return [_refused(call, rank, answers[rank].error) for rank in refused[:8]]
    answers = call.step("run folder: tokens of others", lambda: probed.look_for(call.size), LOOK_SECONDS + 5)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, answer in enumerate(answers):
        groups.setdefault(tuple(answer.value), []).append(rank)
    ranks, nodes = several(call.size, "rank"), several(len(call.nodes), "node")
    if set(groups) == {()}:
        return [Finding(CHECK, FINE, f"{probed.folder} is one folder for {ranks} on {nodes}")]
    most = max(groups.values(), key=len)  # of groups of one size that of rank 0
    odd = [rank for rank in range(call.size) if rank not in most]
    one, other = named(call.ranks, odd), named(call.ranks, most)
    message = f"{probed.folder} is not shared: {one} and {other} see different folders"
    remedy = "--output_dir FOLDER, on a disk that all nodes share: else checkpoints would be in pieces"
    return [Finding(CHECK, BREAKS, message, remedy, one)]


def _refused(call: RollCall, rank: int, error: str) -> Finding:
    what, _, remedy = error.partition("; ")
    return Finding(CHECK, BREAKS, what, remedy or "choose another: --output_dir", str(call.ranks[rank]))


def manifest_of(data_dir, name: str) -> str | None:
    """A digest of what prepared data a rank finds; None if there is none. An address is every node's alike."""
    if isinstance(data_dir, str) and "://" in data_dir:
        return data_dir
    folder = Path(data_dir) / name
    files = sorted(folder.glob("*.json"))
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def judge_data(call: RollCall, data_dir, name: str, digests: list[str | None]) -> list[Finding]:
    """Whether every rank finds the same prepared data, in one folder or in copies of it."""
    place, check = f"{str(data_dir).rstrip('/')}/{name}", "shared data"
    if not any(digests):
        return []  # what each node finds of the data is a line of its own
    if len(set(digests)) == 1:
        return [
            Finding(check, FINE, f"{place} holds the same prepared data for {several(call.size, 'rank')}")
        ]
    usual = max((each for each in digests if each), key=digests.count)
    odd = [rank for rank, each in enumerate(digests) if each != usual]
    lacks = all(digests[rank] is None for rank in odd)
    message = f"{place}: {'no prepared data' if lacks else 'other prepared data'} here, other ranks have it"
    source = call.hosts[digests.index(usual)]
    remedy = (
        "--data_dir FOLDER, on a disk that all nodes share; or copy the data to the nodes that are named: "
    )
    remedy += f"rsync -a {source}:{place}/ {place}/"
    return [Finding(check, BREAKS, message, remedy, named(call.ranks, odd))]


def measure_disk(
    call: RollCall, probed: ProbedFolder, size: int, checkpoint_bytes: int | None
) -> list[Finding]:
    """Bytes per second of all ranks at once, and how long a checkpoint takes at that rate."""
    answers = call.step("disk of all ranks", lambda: probed.write_and_read(size), 3 * DISK_SECONDS)
    failed = [rank for rank, answer in enumerate(answers) if answer.state == FAILED]
    if failed:
        findings = [_refused(call, rank, answers[rank].error) for rank in failed[:8]]
        return [
            Finding("disk of all ranks", each.verdict, each.message, each.remedy, each.where)
            for each in findings
        ]
    total = sum(answer.value["bytes"] for answer in answers)
    seconds = {key: max(answer.value[key] for answer in answers) for key in ("write_seconds", "read_seconds")}
    writes, reads = (total / max(seconds[key], 1e-9) for key in ("write_seconds", "read_seconds"))
    values = {"all_ranks_write_bytes_per_second": writes, "all_ranks_read_bytes_per_second": reads}
    message = (
        f"{several(call.size, 'rank')} at once write {num_bytes(writes)}/s and read {num_bytes(reads)}/s"
    )
    if checkpoint_bytes is None:
        return [Finding("disk of all ranks", FINE, message, values=values)]
    saving = values["checkpoint_seconds"] = checkpoint_bytes / writes
    message += f"; a checkpoint of {num_bytes(checkpoint_bytes)} takes {duration(saving)}"
    if saving > SAVE_SECONDS:
        remedy = "give --output_dir a faster disk; on SLURM ask for the stop so much earlier: "
        remedy += f"sbatch --signal=B:USR1@{math.ceil(1.5 * saving)}"
        return [Finding("disk of all ranks", COSTS, message, remedy, values=values)]
    return [Finding("disk of all ranks", FINE, message, values=values)]
