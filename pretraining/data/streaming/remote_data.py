"""A data set at an fsspec address: manifest and tokenizer at once, shards when they are asked for."""

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from pretraining.data.manifest import MANIFEST_NAME, parse_manifest
from pretraining.data.streaming.cache import CachedShard, CacheFull, DamagedDownload, ShardBusy, ShardCache
from pretraining.data.streaming.retries import Patience, tell
from pretraining.data.streaming.store import Store
from pretraining.data.tokenizer import COMPANION_FILES, fingerprint_of
from pretraining.errors import UserError

FIRST_CONTACT_SECONDS = 60.0
"""A store that does not answer at the start is more likely misspelt than down."""

POLL_SECONDS = 0.02
TOLD_AFTER_SECONDS = 20.0
ROOM_PATIENCE_SECONDS = 2.0
"""So long a read waits for other processes to let go of a shard before it goes around the cache."""

FEWEST_READS, READS_PER_MAP = 256, 16
"""A shard not read in so many reads, of a random order over all that are open, is not needed (1 in e^16 is)."""

DOWNLOADS = 3
"""A shard that comes damaged so often is damaged in the store."""


class RemoteData:
    """One prepared data set at `address`, its shards kept in `cache`. Picklable."""

    def __init__(self, address: str, cache: ShardCache, store: Store | None = None):
        self.address, self.cache = address, cache
        self.store = store or Store(address)
        self.fingerprint, self._until_sweep = "", FEWEST_READS
        self.splits: weakref.WeakSet = weakref.WeakSet()
        """Open splits of this process, asked to let go of shards they do not read."""

    def __getstate__(self) -> dict:
        return {**self.__dict__, "splits": []}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, splits=weakref.WeakSet())

    def read_manifest(self) -> dict:
        """The manifest; UserError where there is none, it may not be read, or a shard is larger than the cache."""
        patience = Patience(min(FIRST_CONTACT_SECONDS, self.store.patience.seconds))
        content, where = Store(self.address, patience).read(MANIFEST_NAME), self.store.where(MANIFEST_NAME)
        again = "copy the data there again", "prepare the data again and copy it there"
        manifest = parse_manifest(content, where, *again)
        self.fingerprint = manifest["fingerprint"]
        sizes = [shard["size"] for split in manifest["splits"].values() for shard in split["shards"]]
        self.cache.check_fits(max(sizes, default=0))
        return manifest

    def local_folder(self, manifest: dict) -> Path:
        """A folder of this machine with the data set's `tokenizer/`, fetched unless it is there."""
        expected = manifest["tokenizer"]["fingerprint"]
        folder = self.cache.root / self.fingerprint / f"tokenizer-{expected}"
        if not (folder / "tokenizer" / "tokenizer.json").is_file():
            with self.cache.disk_faults():
                self._fetch_tokenizer(folder)
        if fingerprint_of(folder / "tokenizer") != expected:
            shutil.rmtree(folder)
            raise UserError(
                f"{self.store.where('tokenizer/tokenizer.json')}: not the one the shards were made with; copy the "
                "data there again"
            )
        return folder

    def _fetch_tokenizer(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=folder.parent))
        (building / "tokenizer").mkdir()
        try:
            for name in ("tokenizer.json", *COMPANION_FILES):
                content = self._companion(name)
                if content is not None:
                    (building / "tokenizer" / name).write_bytes(content)
            if not folder.exists():
                building.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _companion(self, name: str) -> bytes | None:
        try:
            return self.store.read(f"tokenizer/{name}")
        except UserError as error:
            if isinstance(error.__cause__, FileNotFoundError) and name != "tokenizer.json":
                return None
            raise

    def cached(self, entry: dict) -> CachedShard:
        """How the cache knows the shard of a manifest entry."""
        return CachedShard(self.fingerprint, entry["checksum"], entry["size"])

    def fetch(self, split: str, entry: dict, wanted: Callable[[], bool] = lambda: True) -> FileIO:
        """The shard's file, fetched if need be; it is in use until it and its maps are closed.

        Raises ShardBusy, CacheFull, and UserError where the store fails or its shard is damaged. `wanted` is asked
        between the requests: a fetch that nobody wants any more ends with ShardBusy.
        """
        path = f"{split}/{entry['file']}"
        for attempt in range(1, DOWNLOADS + 1):
            try:
                return self.cache.fetch(self.cached(entry), lambda: self._chunks(path, entry, wanted))
            except DamagedDownload as damage:
                if attempt == DOWNLOADS:
                    raise UserError(
                        f"{self.store.where(path)}: damaged shard: {damage}, fetched {attempt} times; copy it there "
                        "again (python -m pretraining.data verify finds all such shards)",
                        on_every_rank=False,
                    ) from damage
                tell(f"{self.store.where(path)}: came damaged ({damage}), fetching it again")
        raise AssertionError

    def _chunks(self, path: str, entry: dict, wanted: Callable[[], bool]):
        for chunk in self.store.chunks(path, entry["size"]):
            if not wanted():
                raise ShardBusy
            yield chunk

    def open(self, split: str, entry: dict) -> FileIO:
        """The shard's file, waiting for it; CacheFull where no room is made for it in time."""
        start, told, full_since = time.monotonic(), False, None
        while (file := self.cache.open(self.cached(entry))) is None:
            try:
                return self.fetch(split, entry)
            except CacheFull:
                full_since = full_since or time.monotonic()
                self.let_go()
                if time.monotonic() - full_since > ROOM_PATIENCE_SECONDS:
                    raise
            except ShardBusy:
                full_since = None
            waited = time.monotonic() - start
            if waited > TOLD_AFTER_SECONDS and not told:
                tell(f"waiting for {self.store.where(split)}/{entry['file']}, {waited:.0f} s now")
                told = True
            time.sleep(POLL_SECONDS)
        return file

    def count_reads(self, count: int) -> None:
        """So many blocks are about to be read in this process; from time to time what is no longer read is let go."""
        self._until_sweep -= count
        if self._until_sweep <= 0:
            self.let_go(idle_only=True)
            self._until_sweep = max(FEWEST_READS, READS_PER_MAP * self.num_maps())

    def let_go(self, idle_only: bool = False) -> None:
        """Close this process's maps of shards, or those not read since the last time."""
        for split in list(self.splits):
            split.let_go(idle_only)

    def num_maps(self) -> int:
        """Shards that this process has mapped."""
        return sum(split.num_maps() for split in self.splits)
