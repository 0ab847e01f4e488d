"""Read data while it is prepared: the shards of the tasks that are finished, in the order of the finished data set.

A preparation whose recipe has `data.shuffle_blocks` keeps `arrived.json` in its work folder: a manifest of what can be
read so far. The shards stay where the tasks wrote them until the data set is published, and are then found there.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from pretraining.data.manifest import read_manifest, read_positions
from pretraining.data.order import ALL_SAMPLES, WindowedOrder
from pretraining.data.portions import Portion, excerpt_of, lacking
from pretraining.data.publishing import work_folder
from pretraining.data.shards import Shard, TokenSplit, map_shard
from pretraining.errors import UserError
from pretraining.outside.files import read_json_value

ARRIVED_NAME = "arrived.json"
"""In the work folder of a preparation."""

POLL_SECONDS = 0.5
"""How often a reader that waits looks again."""

PAUSE_SECONDS = 0.05
MOST_TRIES = 200
"""A shard that is being published may be gone from one place and not yet in the other."""


def arrived_path(folder: Path) -> Path:
    """Name the file in which the preparation of `folder` says what can be read."""
    return work_folder(folder) / ARRIVED_NAME


def read_arrived(folder: Path) -> dict | None:
    """Read the manifest of what the preparation of `folder` has finished; None if there is none."""
    try:
        return read_json_value(arrived_path(folder))
    except (FileNotFoundError, NotADirectoryError):
        return None


class ScatteredSplit(TokenSplit):
    """A split whose shards are in several folders: their entries hold a `path` of their own."""

    def _check_shards(self) -> None:
        """Leave it to the reading of each: they were written a moment ago."""

    def map_anew(self, number: int) -> Shard:
        """Map the shard; FileNotFoundError if it has been published since."""
        entry = self._entry["shards"][number]
        path = Path(entry.get("path") or self.folder / entry["file"])
        with path.open("rb") as file:
            return map_shard(file, str(path), entry, self.dtype)

    def part(self, first: int, stop: int) -> TokenSplit:
        """Open the stream of the shards [first, stop) alone, with what is mapped of them."""
        part = super().part(first, stop)
        part._open = {number - first: s for number, s in self._open.items() if first <= number < stop}
        return part


class ArrivingSplit(ScatteredSplit):
    """The training tokens of a data set that is being prepared: those at the beginning of the stream, ever more.

    place: of the finished data set. portions: what the run reads of each source. manifest: what can be read so far.
    """

    def __init__(self, place: Path, portions: Sequence[Portion | None], manifest: dict):
        self.place, self.portions, self.origin = place, list(portions), manifest["origin"]
        self.is_whole = False
        super().__init__(place / "train", manifest["splits"]["train"])

    def look(self) -> tuple[dict, bool] | None:
        """Read the manifest of what can be read now, and whether that is all; None while no place has it."""
        manifest = read_manifest(self.place)
        # With a larger budget, the data set that the preparation goes on from is there before.
        is_whole = manifest is not None and manifest.get("origin") == self.origin
        is_whole = is_whole and not lacking(manifest, self.portions)
        if not is_whole:
            manifest = read_arrived(self.place)
        if manifest is None or manifest["origin"] != self.origin:
            return None
        kind = TokenSplit if is_whole else ScatteredSplit
        try:
            splits = {name: kind(self.place / name, entry) for name, entry in manifest["splits"].items()}
            of_validation = partial(read_positions, self.place, manifest)
            return excerpt_of(manifest, splits, self.portions, of_validation), is_whole
        except FileNotFoundError:
            if is_whole:
                raise
            return None  # published in this moment

    def refresh(self) -> None:
        if not self.is_whole and (seen := self.look()) is not None:
            manifest, self.is_whole = seen
            self._take(manifest["splits"]["train"])

    def open_validation(self, manifest: dict) -> TokenSplit:
        """Open the validation split of a manifest, wherever its shards are by now."""
        folder = self.place / "validation"
        for _ in range(MOST_TRIES):
            # Mapped now, so that it can be read after it has moved.
            with suppress(FileNotFoundError):
                split = ScatteredSplit(folder, manifest["splits"]["validation"])
                for number in range(len(split.shard_entries)):
                    split._shard(number)
                return split
            # Published: the same stream, cut into other shards.
            if (seen := self.look()) is not None and seen[1]:
                return TokenSplit(folder, seen[0]["splits"]["validation"])
            time.sleep(PAUSE_SECONDS)
        raise _gone(self.place)

    def map_anew(self, number: int) -> Shard:
        """Map the shard, wherever it is now; UserError if it is nowhere."""
        for _ in range(MOST_TRIES):
            try:
                return super().map_anew(number)
            except FileNotFoundError:
                self.refresh()
                time.sleep(PAUSE_SECONDS)
        raise _gone(self.folder)


def _gone(folder: Path) -> UserError:
    what = "what was prepared of it is gone; type the same command again, which prepares what is missing"
    return UserError(f"{folder}: {what}", on_every_rank=False)


class ArrivingOrder(WindowedOrder):
    """The order of a data set that is being prepared: it waits for the window that a sample is in.

    stop: position at which the run ends. Readers look some samples ahead; those behind the end are not worth a wait,
    and each is the first block.
    """

    def __init__(
        self, split: ArrivingSplit, sequence_length: int, window: int, seed: int, label: str, stop: int
    ):
        super().__init__(ALL_SAMPLES, window, seed, label)
        self.split, self.sequence_length, self.stop = split, sequence_length, stop
        self._count()

    def ready_until(self) -> int:
        """Look how many samples from the beginning on can be read now; ALL_SAMPLES if any can."""
        self.split.refresh()
        self._count()
        return self._ready

    def _count(self) -> None:
        split, length = self.split, self.sequence_length
        if split.is_whole:
            self.num_blocks, self._ready = split.num_blocks(length), ALL_SAMPLES
            return
        tokens = split.num_tokens
        if tokens % length == 0 and split.shard_entries:
            # Whether the block that ends with the last shard has a target, and so counts when documents are packed
            # into the shard's blocks, is known with the next shard.
            tokens -= split.shard_entries[-1]["tokens"]
        # Blocks that are as they will be in the whole data set, in whole windows.
        self._ready = max(0, (tokens - 1) // length) // self.window * self.window

    def blocks(self, sample_indices: np.ndarray) -> np.ndarray:
        samples = np.asarray(sample_indices, np.int64)
        read = samples < self.stop
        blocks = np.zeros_like(samples)
        if read.any():
            last = int(samples[read].max())
            # The ranks have waited together before; here a data worker waits, or a disk that shows new files late.
            while last >= self._ready and last >= self.ready_until():
                time.sleep(POLL_SECONDS)
            blocks[read] = super().blocks(samples[read])
        return blocks
