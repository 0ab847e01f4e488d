"""Promise: nothing committed is lost. Parts of split layers are read back as any others."""

import json
import random

import pytest
import torch

from pretraining.checkpoints.shard_files import (
    CheckpointReader,
    Cut,
    assemble,
    fragment_key,
    rank_file,
    write_rank_file,
)
from pretraining.errors import UserError
from tests.checkpoints.test_shard_files import random_cuts

SHAPE = (6, 8, 10)
WAYS = {
    "rows": lambda degree, part: {0: (6 * part // degree, 6 // degree)},
    "columns": lambda degree, part: {
        2: (10 * part // degree, 10 * (part + 1) // degree - 10 * part // degree)
    },
    "both": lambda degree, part: {0: (6 * part // degree, 6 // degree), 1: (4 * (part % 2), 4)},
}


def part_of(whole: torch.Tensor, parts: dict) -> torch.Tensor:
    """What a rank holds of a tensor."""
    for dimension, (start, length) in parts.items():
        whole = whole.narrow(dimension, start, length)
    return whole.contiguous().flatten()


def write_cuts(folder, values: torch.Tensor, parts: list[dict], dice: random.Random) -> None:
    """A checkpoint of which each rank has one part, in random pieces."""
    for rank, each in enumerate(parts):
        own, cut = part_of(values, each), Cut.of(SHAPE, each)
        pieces = random_cuts(own.numel(), dice)
        tensors = {fragment_key("master", "w", start, cut): own[start:stop] for start, stop in pieces}
        write_rank_file(folder / rank_file(rank, len(parts)), tensors)
    table = {"w": {"shape": list(SHAPE), "dtype": "float32"}}
    (folder / "state.json").write_text(json.dumps({"format": 1, "parameters": table}))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("way", "degree"), [("rows", 3), ("columns", 2), ("columns", 3)])
def test_any_part_of_any_parts_is_bit_exact(tmp_path, way, degree, seed):
    """Saved as parts along one dimension; the whole, slices of it, and parts at another degree come back."""
    dice, values = random.Random(seed), torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    write_cuts(tmp_path, values, [WAYS[way](degree, part) for part in range(degree)], dice)
    reader = CheckpointReader(tmp_path)
    assert reader.states("w") == ["master"] and torch.equal(assemble(reader, "w"), values)
    for other in (1, 2, 3):
        for part in range(other):
            wanted = WAYS["columns"](other, part)
            held, cut = part_of(values, wanted), Cut.of(SHAPE, wanted)
            start = dice.randrange(held.numel())
            numel = dice.randint(0, held.numel() - start)
            assert torch.equal(reader.read("master", "w", start, numel, cut), held[start : start + numel])
    start = dice.randrange(values.numel())
    assert torch.equal(
        reader.read("master", "w", start, 7 if start < 470 else 0),
        values.flatten()[start:][: 7 if start < 470 else 0],
    )


def test_parts_along_two_dimensions_are_one_cut(tmp_path):
    """Experts on their ranks, of which each part is a half of packed matrices."""
    values = torch.randn(SHAPE)
    parts = [{0: (3 * expert, 3), 1: (4 * half, 4)} for expert in range(2) for half in range(2)]
    write_cuts(tmp_path, values, parts, random.Random(0))
    reader = CheckpointReader(tmp_path)
    assert torch.equal(assemble(reader, "w"), values)
    for each in ({0: (2, 2), 1: (4, 4)}, {1: (2, 3)}, {0: (1, 4)}):
        assert torch.equal(reader.read("master", "w", cut=Cut.of(SHAPE, each)), part_of(values, each))


def test_a_part_that_no_rank_saved_is_missed(tmp_path):
    """One line that names the parameter, at whatever degree it is read."""
    write_cuts(tmp_path, torch.randn(SHAPE), [{2: (0, 4)}, {2: (4, 3)}], random.Random(0))
    reader = CheckpointReader(tmp_path)
    for cut in (None, Cut.of(SHAPE, {2: (5, 5)})):
        with pytest.raises(UserError, match="master of w is missing from element"):
            reader.read("master", "w", cut=cut)
    assert reader.read("master", "w", cut=Cut.of(SHAPE, {2: (2, 5)})).numel() == 6 * 8 * 5


def test_a_cut_of_whole_rows_is_an_ordinary_slice():
    """So a checkpoint of such parts has the keys that every earlier version reads."""
    assert fragment_key("master", "w", 3, Cut.of(SHAPE, {0: (2, 4)})) == "master/w@163"
    assert fragment_key("master", "w", 3, Cut.of(SHAPE, {})) == "master/w@3"
    assert fragment_key("master", "w", 3, Cut.of(SHAPE, {2: (4, 2)})) == "master/w@0:48:4:2:10@3"
