"""Promise: nothing committed is lost. Whatever ranks cut a parameter into, any slice of it comes back bit for bit."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pretraining.checkpoints.shard_files import (
    CheckpointReader,
    assemble,
    fragment_key,
    rank_file,
    read_state,
    write_rank_file,
)
from pretraining.data.checksums import checksum_of_file
from pretraining.errors import UserError

SHAPES = {"wte.weight": (37, 5), "h.0.bias": (11,), "scale": (), "h.0.weight": (3, 4, 7)}


def random_cuts(numel: int, dice: random.Random) -> list[tuple[int, int]]:
    """(start, stop) of random pieces that cover [0, numel), some of them twice."""
    inner = sorted(dice.sample(range(1, numel), dice.randrange(min(6, numel)))) if numel > 1 else []
    ends = [0, *inner, numel]
    pieces = list(itertools.pairwise(ends))
    for _ in range(dice.randrange(3)):
        start = dice.randrange(numel)
        pieces.append((start, dice.randint(start + 1, numel)))
    return pieces


def write_checkpoint(folder: Path, values: dict, ranks: int, dice: random.Random) -> None:
    """Files of `ranks` ranks that hold {state: {parameter: tensor}} in random pieces."""
    files = [{} for _ in range(ranks)]
    for state, parameters in values.items():
        for name, tensor in parameters.items():
            for start, stop in random_cuts(tensor.numel(), dice):
                key = fragment_key(state, name, start)
                files[dice.randrange(ranks)][key] = tensor.flatten()[start:stop]
    for rank, tensors in enumerate(files):
        write_rank_file(folder / rank_file(rank, ranks), {**tensors, "rng/torch": torch.tensor([rank])})
    table = {name: {"shape": list(shape), "dtype": "float32"} for name, shape in SHAPES.items()}
    (folder / "state.json").write_text(json.dumps({"format": 1, "parameters": table}))


@pytest.mark.parametrize("seed", range(20))
def test_any_slice_of_any_fragmentation_is_bit_exact(tmp_path, seed):
    """Random ranks, cuts and overlaps in; random slices and whole tensors out, NaN payloads included."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    bits = {
        state: {
            n: torch.randint(-(2**31), 2**31, s, generator=generator, dtype=torch.int32)
            for n, s in SHAPES.items()
        }
        for state in ("master", "exp_avg")
    }
    values = {
        state: {name: tensor.view(torch.float32) for name, tensor in each.items()}
        for state, each in bits.items()
    }
    ranks = dice.randint(1, 4)
    write_checkpoint(tmp_path, values, ranks, dice)
    reader = CheckpointReader(tmp_path)
    assert reader.ranks == ranks and reader.parameters == SHAPES
    for name in SHAPES:
        assert reader.states(name) == ["exp_avg", "master"]
        assert torch.equal(assemble(reader, name).view(torch.int32), bits["master"][name])
        for _ in range(5):
            start = dice.randrange(reader.numel(name))
            numel = dice.randint(0, reader.numel(name) - start)
            part = reader.read("exp_avg", name, start, numel).view(torch.int32)
            assert torch.equal(part, bits["exp_avg"][name].flatten()[start : start + numel])
    assert [reader.own_tensors(rank)["rng/torch"].item() for rank in range(ranks)] == list(range(ranks))
    assert reader.own_tensors(ranks) == {}


def test_the_file_is_the_librarys_byte_for_byte(tmp_path):
    """What is written in one pass is what safetensors writes: type, order, padding; its checksum is the file's."""
    tensors = {
        "master/w@0": torch.arange(7.0),
        "master/Größe@7": torch.tensor(3.5),
        "rng/torch": torch.arange(5, dtype=torch.uint8),
        "step": torch.tensor([1, 2]),
        "buffer/b@0": torch.ones(3, 2, dtype=torch.bfloat16).T,
        "empty@0": torch.empty(0),
        "mask": torch.tensor([True, False, True]),
    }
    receipt = write_rank_file(tmp_path / "ours", tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert receipt["bytes"] == (tmp_path / "ours").stat().st_size
    assert receipt["checksum"] == checksum_of_file(tmp_path / "ours")
    loaded = load_file(tmp_path / "ours")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_what_the_files_do_not_hold_is_said(tmp_path):
    """A gap, a missing rank and a folder of another format: one line each, never wrong numbers."""
    dice = random.Random(0)
    values = {"master": {name: torch.ones(shape) for name, shape in SHAPES.items()}}
    write_checkpoint(tmp_path, values, 2, dice)
    with pytest.raises(UserError, match=r"exp_avg of scale is missing"):
        CheckpointReader(tmp_path).read("exp_avg", "scale")
    write_rank_file(tmp_path / rank_file(0, 2), {"master/wte.weight@0": torch.ones(4)})
    write_rank_file(tmp_path / rank_file(1, 2), {"master/wte.weight@5": torch.ones(180)})
    with pytest.raises(UserError, match=r"missing from element 4"):
        assemble(CheckpointReader(tmp_path), "wte.weight")
    (tmp_path / rank_file(0, 2)).unlink()
    with pytest.raises(UserError, match=r"rank-00000-of-00002"):
        CheckpointReader(tmp_path)
    (tmp_path / "state.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match="format 2"):
        read_state(tmp_path)
    with pytest.raises(UserError, match="no checkpoint of this version's format"):
        read_state(tmp_path / "nowhere")
