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
    Cut,
    assemble,
    fragment_key,
    rank_file,
    read_state,
    write_rank_file,
)
from pretraining.data.checksums import checksum_of_file
from tests.gear.finished_data import refusal

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
    write_state(folder, SHAPES)


def write_state(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    table = {name: {"shape": list(shape), "dtype": "float32"} for name, shape in shapes.items()}
    (folder / "state.json").write_text(json.dumps({"format": 1, "parameters": table}))


@pytest.mark.parametrize("seed", range(20))
def test_any_slice_of_any_fragmentation_is_bit_exact(tmp_path, seed):
    """Random ranks, cuts and overlaps in; random slices and whole tensors out, NaN payloads included."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32)

    bits, values = ({"master": {}, "exp_avg": {}} for _ in range(2))
    for state, (name, shape) in itertools.product(bits, SHAPES.items()):
        bits[state][name] = drawn(shape)
        values[state][name] = bits[state][name].view(torch.float32)
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
    assert "exp_avg of scale is missing" in refusal(CheckpointReader(tmp_path).read, "exp_avg", "scale")
    write_rank_file(tmp_path / rank_file(0, 2), {"master/wte.weight@0": torch.ones(4)})
    write_rank_file(tmp_path / rank_file(1, 2), {"master/wte.weight@5": torch.ones(180)})
    assert "missing from element 4" in refusal(assemble, CheckpointReader(tmp_path), "wte.weight")
    (tmp_path / rank_file(0, 2)).unlink()
    assert "rank-00000-of-00002" in refusal(CheckpointReader, tmp_path)
    (tmp_path / "state.json").write_text('{"format": 2}')
    assert "format 2" in refusal(read_state, tmp_path)
    assert "no checkpoint of this version's format" in refusal(read_state, tmp_path / "nowhere")


# Parts of split layers are read back as any others.
CUT_SHAPE = (6, 8, 10)
COLUMNS = {1: [{2: (0, 10)}], 2: [{2: (0, 5)}, {2: (5, 5)}], 3: [{2: (0, 3)}, {2: (3, 3)}, {2: (6, 4)}]}
"""Degree -> the parts of its ranks."""
PARTS = {
    "rows": [{0: (2 * part, 2)} for part in range(3)],
    "two parts": COLUMNS[2],
    "three parts": COLUMNS[3],
    # experts on their ranks, of which each part is a half of packed matrices
    "experts": [{0: (3 * expert, 3), 1: (4 * half, 4)} for expert in range(2) for half in range(2)],
}
OTHERS = {name: [*COLUMNS[1], *COLUMNS[2], *COLUMNS[3]] for name in PARTS}
OTHERS["experts"] = [{0: (2, 2), 1: (4, 4)}, {1: (2, 3)}, {0: (1, 4)}]
"""What is read of the parts of the same name."""


def part_of(whole: torch.Tensor, parts: dict) -> torch.Tensor:
    """What a rank holds of a tensor."""
    for dimension, (start, length) in parts.items():
        whole = whole.narrow(dimension, start, length)
    return whole.contiguous().flatten()


def write_cuts(folder: Path, values: torch.Tensor, parts: list[dict], dice: random.Random) -> None:
    """A checkpoint of which each rank has one part, in random pieces."""
    for rank, each in enumerate(parts):
        own, cut = part_of(values, each), Cut.of(CUT_SHAPE, each)
        pieces = random_cuts(own.numel(), dice)
        tensors = {fragment_key("master", "w", start, cut): own[start:stop] for start, stop in pieces}
        write_rank_file(folder / rank_file(rank, len(parts)), tensors)
    write_state(folder, {"w": CUT_SHAPE})


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", PARTS)
def test_any_part_of_any_parts_is_bit_exact(tmp_path, name, seed):
    """Saved as parts along one dimension or two; the whole, slices of it, and other parts come back."""
    dice, values = random.Random(seed), torch.randn(CUT_SHAPE, generator=torch.Generator().manual_seed(seed))
    write_cuts(tmp_path, values, PARTS[name], dice)
    reader = CheckpointReader(tmp_path)
    assert reader.states("w") == ["master"] and torch.equal(assemble(reader, "w"), values)
    for wanted in OTHERS[name]:
        held, cut = part_of(values, wanted), Cut.of(CUT_SHAPE, wanted)
        start = dice.randrange(held.numel())
        numel = dice.randint(0, held.numel() - start)
        assert torch.equal(reader.read("master", "w", start, numel, cut), held[start : start + numel])
        assert torch.equal(reader.read("master", "w", cut=cut), held)
    start = dice.randrange(values.numel() - 7)
    assert torch.equal(reader.read("master", "w", start, 7), values.flatten()[start : start + 7])


def test_a_part_that_no_rank_saved_is_missed(tmp_path):
    """One line that names the parameter, at whatever degree it is read."""
    write_cuts(tmp_path, torch.randn(CUT_SHAPE), [{2: (0, 4)}, {2: (4, 3)}], random.Random(0))
    reader = CheckpointReader(tmp_path)
    for cut in (None, Cut.of(CUT_SHAPE, {2: (5, 5)})):
        assert "master of w is missing from element" in refusal(reader.read, "master", "w", cut=cut)
    assert reader.read("master", "w", cut=Cut.of(CUT_SHAPE, {2: (2, 5)})).numel() == 6 * 8 * 5


def test_a_cut_of_whole_rows_is_an_ordinary_slice():
    """So a checkpoint of such parts has the keys that every earlier version reads."""
    assert fragment_key("master", "w", 3, Cut.of(CUT_SHAPE, {0: (2, 4)})) == "master/w@163"
    assert fragment_key("master", "w", 3, Cut.of(CUT_SHAPE, {})) == "master/w@3"
    assert fragment_key("master", "w", 3, Cut.of(CUT_SHAPE, {2: (4, 2)})) == "master/w@0:48:4:2:10@3"
