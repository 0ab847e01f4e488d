"""List and verify the checkpoints of a run where they are in its store, without fetching them to the disk."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import xxhash

from pretraining.addresses import refuse_credentials
from pretraining.checkpoints.fetch import Ranges
from pretraining.checkpoints.folders import Progress, entry_of, no_progress, step_in
from pretraining.checkpoints.format import MARKER, THREADS, parse_marker
from pretraining.checkpoints.remote import RemoteRun
from pretraining.errors import UserError


def stored_run(address: str) -> RemoteRun:
    """Return the run at an address; `UserError` if there is none."""
    refuse_credentials(address, "RUN")
    above, _, name = address.rstrip("/").rpartition("/")
    remote = RemoteRun(above, name).at_first_contact()
    if not any(step_in(each) >= 0 for each in remote.folders()):
        raise UserError(
            f"{address}: no checkpoint-* there; give the address of a run, as s3://bucket/runs/30b"
        )
    return remote


def chosen_in_store(address: str, step: int | None) -> tuple[RemoteRun, list[str]]:
    """Return the run of an address and its committed checkpoints meant: one by its address or `step`, else all."""
    above, _, name = address.rstrip("/").rpartition("/")
    if step_in(name) >= 0:
        address, step = above, step_in(name)
    remote = stored_run(address)
    committed = [each for each in stored_catalogue(remote) if each["state"] != "uncommitted"]
    found = [each["folder"] for each in committed if step in (None, each["step"])]
    if not found:
        which = "no committed checkpoint" + ("" if step is None else f" of step {step}")
        raise UserError(f"{address}: {which}; `list {address}` shows what is there")
    return remote, found


def stored_catalogue(remote: RemoteRun) -> list[dict]:
    """List every checkpoint of a run in its store, newest step first, as `folders.catalogue` does on a disk."""
    names = [name for name in remote.folders() if step_in(name) >= 0]
    return [_entry(remote, name) for name in sorted(names, key=step_in, reverse=True)]


def _entry(remote: RemoteRun, name: str) -> dict:
    sizes = remote.sizes(name) or {}
    make = partial(entry_of, name, step_in(name), num_bytes=sum(sizes.values()))
    if MARKER not in sizes:
        return make("uncommitted", None, {})
    try:
        reason, marker = _quick_damage(remote, name, sizes)
    except UserError as error:
        return make("other version", str(error), {})
    return make("damaged" if reason else "committed", reason, marker)


def _quick_damage(remote: RemoteRun, name: str, sizes: dict[str, int]) -> tuple[str | None, dict]:
    """Check the marker, and the sizes of the files that it names; returns what is wrong or None, and the marker."""
    try:
        marker = parse_marker(remote.read(f"{name}/{MARKER}"), remote.where(name))
    except ValueError as error:
        return str(error), {}
    for file, entry in marker["files"].items():
        if file not in sizes:
            return f"{file} is missing", marker
        if sizes[file] != entry["bytes"]:
            return f"{file} holds {sizes[file]} bytes, {entry['bytes']} were committed", marker
    return None, marker


def stored_files(remote: RemoteRun, name: str) -> tuple[str | None, dict[str, dict]]:
    """Return what sizes alone show to be wrong with a checkpoint, or None, and the files that its marker names."""
    reason, marker = _quick_damage(remote, name, remote.sizes(name) or {})
    return reason, marker.get("files", {})


def stored_verdicts(
    remote: RemoteRun, name: str, files: dict[str, dict], progress: Progress = no_progress
) -> dict[str, str | None]:
    """Return {file: what is wrong with it, or None}: every byte is read from the store, and none is kept."""
    sizes = remote.sizes(name) or {}

    def verdict(file: str) -> str | None:
        size = files[file]["bytes"]
        # a store would be asked again and again for bytes that it does not have
        if sizes.get(file) != size:
            return f"{file} is missing or has another size"
        digest = xxhash.xxh128()
        for content in ranges.in_order(f"{name}/{file}", size):
            digest.update(content)
            progress(len(content))
        same = f"xxh128:{digest.hexdigest()}" == files[file]["checksum"]
        return None if same else f"{file} has changed since it was committed"

    with Ranges(remote) as ranges, ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(files, threads.map(verdict, files), strict=True))
