"""Write a checkpoint of all ranks from what one rank holds, without the bytes of its tensors.

Names, headers, sizes, receipts and the marker are those of a real checkpoint, except that the marker does not list a
file of too many zeros to read them all. The tensors are holes in the files, which take no room on the disk and are read
as zeros. The other ranks' files hold what this rank's does not, so that a run can continue from it.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from pretraining.checkpoints.format import commit_checkpoint, file_entry, receipt_name, write_bytes
from pretraining.checkpoints.manager import RankShare
from pretraining.checkpoints.shard_files import (
    BUFFER,
    MASTER,
    STATE_FILE,
    file_header,
    fragment_key,
    rank_file,
)

Tensors = Mapping[str, torch.Tensor]
MOST_READ_BYTES = 1 << 30
"""Of a file that the marker lists: the next start compares all its bytes."""


def write_stand_in(folder: Path, rank: int, ranks: int, share: RankShare, marker: dict, shared: bool) -> None:
    """Write and commit it as rank `rank` of `ranks`; all other ranks are made up.

    shared: whether every rank needs all parameters, of which each saves a share.
    """
    tensors, files, receipt = share
    folder.mkdir(parents=True)
    entries = {name: write_bytes(folder / name, content) for name, content in files.items()}
    held = _missing_fragments(tensors, json.loads(files[STATE_FILE]), shared)
    # the first of the others holds what is missing
    content: dict[int, Tensors] = {rank: tensors, 0 if rank else 1: held}
    for each in range(ranks):
        entry = _write_with_holes(folder / rank_file(each, ranks), content.get(each, {}))
        of_rank = {**(entries if each == rank else {}), **entry}
        # not through the disk's cache and back, as a real one: a rehearsal has nothing to lose
        receipt_text = json.dumps({"files": of_rank, **receipt})
        (folder / receipt_name(each, ranks)).write_text(receipt_text, encoding="utf-8")
    commit_checkpoint(folder, marker)


def _write_with_holes(path: Path, tensors: Tensors) -> dict[str, dict]:
    """Write the header, and make the file as long as if the tensors followed; returns {name: `file_entry`}, or {}.

    The rank's own tensors, the states of its random generators, are written: nobody could go on from zeros.
    """
    header, num_bytes = file_header(tensors)
    places = json.loads(header[8:])
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + num_bytes)
        for name in (name for name in tensors if "@" not in name):
            file.seek(len(header) + places[name]["data_offsets"][0])
            file.write(tensors[name].numpy().tobytes())
    return {} if len(header) + num_bytes > MOST_READ_BYTES else {path.name: file_entry(path)}


def _missing_fragments(tensors: Tensors, state: dict, shared: bool) -> dict[str, torch.Tensor]:
    """Return what other ranks must hold: the elements of each state that this one reads and `tensors` do not have."""
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    states: dict[str, torch.dtype] = {MASTER: torch.float32}
    cut = set()
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        name, at, start = rest.rpartition("@")
        if not at or start == "whole":
            continue
        if name not in state["parameters"] and kind != BUFFER:
            cut.add(name.partition("@")[0])  # a part of a split layer: this rank reads no other
            continue
        spans[kind, name].append((int(start), int(start) + tensor.numel()))
        if kind != BUFFER:
            states[kind] = tensor.dtype
    wanted = [
        (kind, name, prod(entry["shape"]), dtype)
        for name, entry in state["parameters"].items()
        if name not in cut
        # no optimizer steps a frozen parameter: every rank reads all of it
        if shared or name not in state["scalars"]
        for kind, dtype in states.items()
        if kind == MASTER or name in state["scalars"]
    ]
    wanted += [
        (BUFFER, name, prod(entry["shape"]), getattr(torch, entry["dtype"]))
        for name, entry in state["buffers"].items()
    ]
    missing: dict[str, torch.Tensor] = {}
    for kind, name, numel, dtype in wanted:
        at = 0
        # what no span covers
        for start, stop in [*sorted(spans[kind, name]), (numel, numel)]:
            if start > at:
                missing[fragment_key(kind, name, at)] = torch.empty(start - at, dtype=dtype, device="meta")
            at = max(at, stop)
    return missing
