"""List and verify the checkpoints of a run where they are in its store, without fetching them to the disk."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import xxhash

from pretraining.checkpoints.fetch import Ranges
from pretraining.checkpoints.folders import Progress, entry_of, no_progress, size_fault, step_in
from pretraining.checkpoints.format import MARKER, THREADS, parse_marker
from pretraining.checkpoints.remote import RemoteRun
from pretraining.errors import UserError


def stored_checkpoints(address: str) -> list["StoredCheckpoint"]:
    """Return every checkpoint of the run at an address, newest step first; `UserError` if there is none."""
    above, _, name = address.rstrip("/").rpartition("/")
    remote = RemoteRun(above, name).at_first_contact()
    names = sorted((each for each in remote.folders() if step_in(each) >= 0), key=step_in, reverse=True)
    if not names:
        raise UserError(
            f"{address}: no checkpoint-* there; give the address of a run, as s3://bucket/runs/30b"
        )
    return [StoredCheckpoint(remote, each) for each in names]


def chosen_in_store(address: str, step: int | None) -> list["StoredCheckpoint"]:
    """Return the committed checkpoints meant: one by its address or `step`, else all of the run."""
    above, _, name = address.rstrip("/").rpartition("/")
    if step_in(name) >= 0:
        address, step = above, step_in(name)
    found = [each for each in stored_checkpoints(address) if each.is_committed and step in (None, each.step)]
    if not found:
        which = "no committed checkpoint" + ("" if step is None else f" of step {step}")
        raise UserError(f"{address}: {which}; `list {address}` shows what is there")
    return found


class StoredCheckpoint:
    """A checkpoint in a store, which is asked once for the sizes of its files."""

    def __init__(self, remote: RemoteRun, name: str):
        self.remote, self.name, self.step = remote, name, step_in(name)
        self.sizes = remote.sizes(name) or {}
        self.is_committed = MARKER in self.sizes

    @property
    def address(self) -> str:
        """Its own address."""
        return self.remote.where(self.name)

    def entry(self) -> dict:
        """Describe it as `folders.catalogue` does a checkpoint on a disk."""
        make = partial(entry_of, self.name, self.step, num_bytes=sum(self.sizes.values()))
        if not self.is_committed:
            return make("uncommitted", None, {})
        try:
            reason, marker = self.quick_damage()
        except UserError as error:
            return make("other version", str(error), {})
        return make("damaged" if reason else "committed", reason, marker)

    def quick_damage(self) -> tuple[str | None, dict]:
        """Check marker and sizes alone; returns what is wrong or None, and the marker, {} if it is damaged."""
        try:
            marker = parse_marker(self.remote.read(f"{self.name}/{MARKER}"), self.address)
        except ValueError as error:
            return str(error), {}
        faults = (size_fault(name, self.sizes.get(name), entry) for name, entry in marker["files"].items())
        return next(filter(None, faults), None), marker

    def verdicts(self, files: dict[str, dict], progress: Progress = no_progress) -> dict[str, str | None]:
        """Return {file: what is wrong with it, or None}: every byte is read from the store, and none is kept."""

        def verdict(name: str) -> str | None:
            # a store would be asked again and again for bytes that it does not have
            if reason := size_fault(name, self.sizes.get(name), files[name]):
                return reason
            digest = xxhash.xxh128()
            for content in ranges.in_order(f"{self.name}/{name}", files[name]["bytes"]):
                digest.update(content)
                progress(len(content))
            same = f"xxh128:{digest.hexdigest()}" == files[name]["checksum"]
            return None if same else f"{name} has changed since it was committed"

        with Ranges(self.remote) as ranges, ThreadPoolExecutor(THREADS) as threads:
            return dict(zip(files, threads.map(verdict, files), strict=True))
