"""Rewrite a committed checkpoint into another number of files: fewer for a slow store, more for many readers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers.trainer import TRAINER_STATE_NAME

from pretraining.checkpoints.format import commit_checkpoint, file_entries, read_marker, write_receipt
from pretraining.checkpoints.shard_files import (
    BUFFER,
    STATE_FILE,
    CheckpointReader,
    fragment_key,
    rank_file,
    write_rank_file,
)

_OWN_KEYS = ("format", "checksum", "files", "ranks")
"""Keys of a marker that describe its own files and not the run."""


def reshard(folder: Path, target_folder: Path, num_files: int) -> None:
    """Write `folder`, whole and verified, as a checkpoint of `num_files` equal files to `target_folder`.

    No resume needs this, because any number of ranks reads any files. Takes memory for one slice of a parameter. The
    random states of the ranks that saved are left out, as if the run had continued with another number of ranks.
    """
    reader, marker = CheckpointReader(folder), read_marker(folder)
    target_folder.mkdir(parents=True)
    copied = [name for name in (STATE_FILE, TRAINER_STATE_NAME) if (folder / name).exists()]
    for name in copied:
        shutil.copyfile(folder / name, target_folder / name)
    for index in range(num_files):
        name = rank_file(index, num_files)
        files = {name: _write_share(reader, target_folder / name, index, num_files)}
        files |= file_entries(target_folder, copied) if index == 0 else {}
        write_receipt(target_folder, index, num_files, files)
    content = {key: value for key, value in marker.items() if key not in _OWN_KEYS}
    commit_checkpoint(target_folder, {**content, "ranks": num_files})


def _write_share(reader: CheckpointReader, path: Path, index: int, num_files: int) -> dict:
    slices, shapes = {}, {}
    for state, name, total in _states(reader):
        # Shares of every parameter, so that the files are of equal size; a small one may have none in this file.
        start, end = total * index // num_files, total * (index + 1) // num_files
        if end > start:
            key = fragment_key(state, name, start)
            slices[key] = (state, name, start, end - start)
            # `meta` takes no memory: each slice is read when it is written.
            shapes[key] = torch.empty(end - start, dtype=reader.dtype(state, name), device="meta")
    whole = _whole_states(reader) if index == 0 else {}  # small: factors of moments

    def read(key: str) -> torch.Tensor:
        return whole[key] if key in whole else reader.read(*slices[key])

    return write_rank_file(path, {**shapes, **whole}, read)


def _states(reader: CheckpointReader) -> Iterator[tuple[str, str, int]]:
    """Yield (state, name, number of elements) of every per-element state and persistent buffer."""
    for name in reader.parameters:
        for state in reader.states(name):
            if state != BUFFER:
                yield state, name, reader.numel(name)
    for name, entry in reader.state.get("buffers", {}).items():
        yield BUFFER, name, torch.Size(entry["shape"]).numel()


def _whole_states(reader: CheckpointReader) -> dict[str, torch.Tensor]:
    names = [(state, name) for name in reader.parameters for state in reader.whole_states(name)]
    return {fragment_key(state, name, None): reader.read_whole(state, name) for state, name in names}
