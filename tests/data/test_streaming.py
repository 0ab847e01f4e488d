"""Shards from a real S3 server: the same samples as from disk, a bounded cache, and a store that fails."""

import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from pretraining.data.order import GlobalOrder
from pretraining.data.packed_dataset import PackedDataset, prefetched
from pretraining.data.prepared import open_prepared
from pretraining.data.streaming import cache as cache_module
from pretraining.data.streaming.cache import CachedShard, CacheFull, ShardCache, exclusive_lock
from pretraining.data.streaming.remote_data import Prefetcher, RemoteData, ShardNeeds, StreamedSplit, Window
from pretraining.errors import UserError
from tests.gear.finished_data import make_texts, prepare, recipe_for, refusal, write_jsonl
from tests.gear.object_store import Proxy, connect_to, s3_server, shared_memory, upload, use_here
from tests.gear.runs import Started

LENGTH = 32
READER = """
import sys
from pathlib import Path
from pretraining.data.streaming.cache import ShardCache
from pretraining.data.streaming.remote_data import RemoteData, StreamedSplit
remote = RemoteData(sys.argv[1], ShardCache(Path(sys.argv[2]), int(sys.argv[3])))
split = StreamedSplit(remote, "train", remote.read_manifest()["splits"]["train"])
for start in range(0, split.num_tokens, 32):
    split.read(start, min(start + 32, split.num_tokens))
    print(start, flush=True)
"""


def open_split(address: str, cache: Path | str, max_bytes: int, name: str = "train") -> StreamedSplit:
    remote = RemoteData(address, ShardCache(Path(cache), max_bytes))
    return StreamedSplit(remote, name, remote.read_manifest()["splits"][name])


def stream_of(split) -> np.ndarray:
    return np.array(split.read(0, split.num_tokens))


def in_sequence(split) -> ShardNeeds:
    """The needs of a run that reads block after block."""

    def needs(samples: np.ndarray) -> np.ndarray:
        return np.array([(0, split.locate(sample * LENGTH)[0]) for sample in samples.tolist()])

    return needs


def held_bytes(cache: Path) -> int:
    """Of shards and parts, at one moment: nothing is evicted meanwhile, and a part that becomes a shard counts once."""
    files: dict[int, int] = {}
    with exclusive_lock(cache / ".lock") if cache.exists() else contextlib.nullcontext():
        for path in (*cache.glob("*/*.part"), *cache.glob("*/*.arrow")):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files[status.st_ino] = status.st_size
    return sum(files.values())


@pytest.fixture(scope="session")
def s3(tmp_path_factory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as address:
        yield address


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, s3) -> SimpleNamespace:
    """A data set of some twenty train shards, on disk and in the store."""
    folder = tmp_path_factory.mktemp("prepared")
    recipe = recipe_for(write_jsonl(folder / "corpus.jsonl", make_texts(120)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretraining.data.shards.SHARD_TOKENS", 1000)
        prepare(folder / "data", recipe)
    local = open_prepared(recipe, folder / "data")
    shards, address = local.train.shard_entries, upload(s3, folder / "data" / "corpus", "data/corpus")
    assert len(shards) > 10
    made = {"root": folder / "data", "recipe": recipe, "local": local, "address": address, "shards": shards}
    return SimpleNamespace(**made, largest=max(shard["size"] for shard in shards))


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def connected(monkeypatch, s3) -> str:
    """s3:// means the server here, and patience is short."""
    use_here(monkeypatch, s3)
    monkeypatch.setenv("PRETRAINING_DATA_PATIENCE_SECONDS", "20")
    return s3


def test_the_samples_are_those_of_the_disk(prepared, connected, cache):
    """Promise: the curve belongs to the recipe. Address or folder: same tokens, order, tokenizer, identity."""
    before, local = shared_memory(), prepared.local
    remote = open_prepared(prepared.recipe, "s3://bucket/data", ShardCache(cache, 10**9))
    assert remote.fingerprint == local.fingerprint
    here, there = ((data.tokenizer_path / "tokenizer.json").read_bytes() for data in (local, remote))
    assert here == there
    order = GlobalOrder(local.train.num_blocks(LENGTH), 3, local.fingerprint)
    datasets = (PackedDataset(data.train, LENGTH, order, 5, 2 * order.num_blocks) for data in (local, remote))
    theirs, ours = map(prefetched, datasets)
    assert theirs.prefetcher is None and ours.prefetcher is not None
    assert len(ours) == len(theirs)
    for start in range(0, len(ours), 16):
        indices = list(range(start, min(start + 16, len(ours))))
        for a, b in zip(ours.__getitems__(indices), theirs.__getitems__(indices), strict=True):
            assert (a["input_ids"] == b["input_ids"]).all() and (a["labels"] == b["labels"]).all()
    assert remote.validation.bytes_before(100) == local.validation.bytes_before(100)
    assert (remote.train.document_ends(0, 5000) == local.train.document_ends(0, 5000)).all()
    ours.prefetcher.close()
    assert shared_memory() <= before


def test_the_bound_is_kept_at_all_times(prepared, connected, cache):
    """Room for three shards, parts included, while all are read by several readers and fetched ahead."""
    bound, seen, done = 3 * prepared.largest, [], threading.Event()

    def watch():
        while not done.is_set():
            seen.append(held_bytes(cache))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        split = open_split(prepared.address, cache, bound)
        prefetcher = Prefetcher(in_sequence(split), [split], split.num_blocks(LENGTH))
        for block in range(split.num_blocks(LENGTH)):
            prefetcher.advance(block)
            wanted = prepared.local.train.read(block * LENGTH, block * LENGTH + LENGTH + 1)
            assert (split.read(block * LENGTH, block * LENGTH + LENGTH + 1) == wanted).all()
        prefetcher.close()
    finally:
        done.set()
        watcher.join()
    assert 0 < max(seen) <= bound


def test_a_part_that_becomes_a_shard_meanwhile_gives_no_room(tmp_path, monkeypatch):
    """Fetched by one thread while another makes room: renamed is not removed, and the bound is kept."""
    cache, size = ShardCache(tmp_path, 3000), 1000
    content = [bytes([number]) * size for number in range(4)]
    shards = [CachedShard("data", f"xxh128:{xxhash.xxh128(part).hexdigest()}", size) for part in content]
    held = [cache.fetch(shards[number], lambda part=content[number]: [part]) for number in (0, 1)]
    written, finish = threading.Event(), threading.Event()

    def slowly():
        yield content[2]
        written.set()
        finish.wait(30)

    fetching = threading.Thread(target=lambda: held.append(cache.fetch(shards[2], slowly)))
    fetching.start()
    assert written.wait(30)
    remove = cache_module._remove_unless_in_use

    def after_the_rename(path):  # what is to be removed has been listed
        finish.set()
        fetching.join()
        return remove(path)

    monkeypatch.setattr(cache_module, "_remove_unless_in_use", after_the_rename)
    with pytest.raises(CacheFull):
        cache.fetch(shards[3], lambda: [content[3]])
    assert held_bytes(tmp_path) == 3000 and len(held) == 3


FAILING = {"error": "best_fit", "drop": "in_sequence", "cut": "best_fit", "spoil": "in_sequence"}


@pytest.mark.parametrize("treatment, packing", FAILING.items())
def test_a_store_that_fails_loses_nothing(prepared, connected, cache, treatment, packing, monkeypatch):
    """One request in five: errors, closed connections, half answers and flipped bits: the same stream and order."""
    monkeypatch.setattr("pretraining.outside.store.FIRST_DELAY_SECONDS", 0.001)

    def one_in_five(number, path):
        return treatment if number % 5 == 4 and ".arrow" in path else None

    with Proxy(connected, one_in_five) as proxy, pytest.MonkeyPatch.context() as patch:
        use_here(patch, proxy.address)
        split = open_split(prepared.address, cache, 10**9)
        order = GlobalOrder(split.num_blocks(LENGTH), 1, "order")
        ways = {"masks_documents": True, "packing": packing}
        theirs, ours = (PackedDataset(part, LENGTH, order, **ways) for part in (prepared.local.train, split))
        for index in range(len(ours)):
            assert all((ours[index][key] == theirs[index][key]).all() for key in ("labels", "position_ids"))
    assert proxy.mistreated >= 2


def test_a_shard_damaged_in_the_store_is_named(prepared, connected, cache):
    """Fetched again a few times, then one line with the file and both checksums."""
    spoil = Proxy(connected, lambda number, path: "spoil" if ".arrow" in path else None)
    with spoil as proxy, pytest.MonkeyPatch.context() as patch:
        use_here(patch, proxy.address)
        split = open_split(prepared.address, cache, 10**9)
        with pytest.raises(UserError, match=r"train/data-00000.*damaged shard: checksum xxh128:.*3 times"):
            split.read(0, 10)
    assert not list(cache.glob("*/*.arrow")) and not list(cache.glob("*/*.part"))


def test_processes_share_the_cache(prepared, connected, cache):
    """Three processes that read all at once, and one after them: one fetch a shard, the store's bytes, no part left."""
    with Proxy(connected, lambda number, path: None) as proxy, pytest.MonkeyPatch.context() as patch:
        command = [sys.executable, "-c", READER, prepared.address, cache, 10**9]
        readers = [Started(command, **connect_to(proxy.address)) for _ in range(3)]
        finished = [reader.finish() for reader in readers]
        assert [each.code for each in finished] == [0, 0, 0], finished
        use_here(patch, proxy.address)
        again = stream_of(open_split(prepared.address, cache, 10**9))
        assert (again == stream_of(prepared.local.train)).all()
    assert len({each.stdout for each in finished}) == 1 and finished[0].stdout
    ranges = [f"bytes=0-{shard['size'] - 1}" for shard in prepared.shards]
    whole = [asked for asked in proxy.requests if any(each in asked for each in ranges)]
    assert len(whole) == len(set(whole)) == len(prepared.shards)
    originals = {(prepared.root / "corpus/train" / shard["file"]).read_bytes() for shard in prepared.shards}
    assert {path.read_bytes() for path in cache.glob("*/*.arrow")} == originals
    assert not list(cache.glob("*/*.part"))


def test_a_killed_fetch_leaves_a_cache_that_works(prepared, connected, cache):
    """SIGKILL in the middle of a fetch: its part gives way, with its room, and the next process reads on."""
    started = threading.Event()

    def hang_once(number, path):
        if ".arrow" in path and not started.is_set():
            started.set()
            time.sleep(3)

    bound = prepared.largest  # the stale part must be cleared: beside it nothing else has room
    with Proxy(connected, hang_once) as proxy:
        command = [sys.executable, "-c", READER, prepared.address, cache, bound]
        reader = Started(command, **connect_to(proxy.address))
        assert started.wait(60)
        reader.kill()
    parts = list(cache.glob("*/*.part"))
    assert len(parts) == 1 and parts[0].stat().st_size > 0
    split = open_split(prepared.address, cache, bound)
    last = split.num_tokens - 10  # of another shard
    assert (split.read(last, last + 10) == prepared.local.train.read(last, last + 10)).all()
    assert not list(cache.glob("*/*.part")) and held_bytes(cache) <= bound


def test_a_shard_in_use_is_never_evicted(prepared, connected, cache):
    """Another reader's shard stays; the block is read around the cache, and the cache is used once there is room."""
    split = open_split(prepared.address, cache, prepared.largest)
    holder = open_split(prepared.address, cache, prepared.largest)
    view = holder.read(0, 10)
    (path,) = cache.glob("*/*.arrow")
    with pytest.raises(CacheFull):
        split.remote.open("train", prepared.shards[3])
    start = sum(shard["tokens"] for shard in prepared.shards[:3])
    assert (split.read(start, start + 10) == prepared.local.train.read(start, start + 10)).all()
    assert path.exists()
    del view
    holder.unmap(idle_only=False)
    split.read(start, start + 10)
    assert not path.exists() and len(list(cache.glob("*/*.arrow"))) == 1


def test_a_block_over_a_border_fetches_no_second_shard(prepared, connected, cache):
    """The few tokens of the next shard come by a ranged request; the block is right."""
    split = open_split(prepared.address, cache, 10**9)
    border = prepared.shards[0]["tokens"]
    assert (split.read(border - 5, border + 9) == prepared.local.train.read(border - 5, border + 9)).all()
    assert len(list(cache.glob("*/*.arrow"))) == 1


def test_shards_that_are_not_read_any_more_are_unmap(prepared, connected, cache):
    """A reader that moves on holds what it reads, not all it ever read."""
    split = open_split(prepared.address, cache, 10**9)
    for number in range(8):
        start = sum(shard["tokens"] for shard in prepared.shards[:number])
        split.read(start, start + 5)
    assert len(split._open) == 8
    for _ in range(1000):
        split.remote.count_reads(1)
        split.read(0, 5)
    assert len(split._open) == 1


def read_sum(dataset, indices) -> int:
    return int(sum(sample["labels"].sum() for sample in dataset.__getitems__(indices)))


def test_a_fork_while_a_file_is_closed_leaves_no_lock(cache):
    """The child has the descriptor and does not know of it: all who want the shard waited for ever, the child too."""
    content, copies = b"x" * 1000, []
    shard = CachedShard("set", f"xxh128:{xxhash.xxh128(content).hexdigest()}", len(content))

    def copied(suffix: str) -> None:
        """Copy the descriptor of the open file, as a fork does."""
        for place in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(place.readlink()).startswith(str(cache)) and str(place.readlink()).endswith(suffix):
                    copies.append(os.dup(int(place.name)))

    def chunks() -> Iterator[bytes]:
        copied(".part")
        yield content

    def look() -> None:
        with exclusive_lock(cache / ".lock"):
            copied(".lock")

    with ThreadPoolExecutor(1) as other:
        try:
            other.submit(ShardCache(cache, 10**9).fetch, shard, chunks).result(timeout=60).close()
            for _ in range(2):
                other.submit(look).result(timeout=60)
            assert len(copies) >= 3
        finally:
            for each in copies:
                os.close(each)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same(prepared, connected, cache, method):
    """Forked or spawned from a process that has read already, each worker with its own connection and threads."""
    data = open_prepared(prepared.recipe, "s3://bucket/data", ShardCache(cache, 10**9))
    order = GlobalOrder(data.train.num_blocks(LENGTH), 3, data.fingerprint)
    ours = prefetched(PackedDataset(data.train, LENGTH, order))
    theirs = PackedDataset(prepared.local.train, LENGTH, order)
    ours[0]
    batches = [list(range(start, start + 8)) for start in range(0, 80, 8)]
    with multiprocessing.get_context(method).Pool(2) as pool:
        sums = pool.starmap(read_sum, [(ours, batch) for batch in batches])
    assert sums == [read_sum(theirs, batch) for batch in batches]
    ours.prefetcher.close()
    assert len(pickle.dumps(ours)) < 100_000


def test_the_prefetcher_runs_ahead_and_lets_go(prepared, connected, cache):
    """Without a single read: the shards of the coming samples arrive, as many as their room, and leave behind it."""
    bound = 8 * prepared.largest
    split = open_split(prepared.address, cache, bound)
    prefetcher = Prefetcher(in_sequence(split), [split], split.num_blocks(LENGTH))
    blocks = [int(shard) * 1000 // LENGTH for shard in (0, 5)]
    for block in blocks:
        prefetcher.advance(block)
        first = split.locate(block * LENGTH)[0]
        ahead = [split.remote.cached(entry) for entry in prepared.shards[first : first + 5]]
        wait_for(lambda wanted=ahead: all(split.remote.cache.holds(shard) for shard in wanted))
        # A listing is no snapshot: it may count a shard that goes and the one that takes its room.
        wait_for(lambda: held_bytes(cache) <= bound)
    prefetcher.close()
    assert prefetcher.running is None


def wait_for(condition) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise TimeoutError


def test_the_window_names_shards_in_order_of_need():
    """In order of first need, within the room, forgotten only after the last sample that needs them."""
    shards = np.array([0, 1, 0, 1, 2, 2, 3, 4, 4, 0, 5])
    keys = np.stack([0 * shards, shards], axis=1)
    window = Window(keys.__getitem__, [[10] * 6], len(shards), 30)
    window.move(0)
    assert list(window.last_needs.items()) == [((0, 0), 2), ((0, 1), 3), ((0, 2), 5)]
    window.move(3)
    assert list(window.last_needs) == [(0, 1), (0, 2), (0, 3)]
    window.move(6)
    assert list(window.last_needs.items()) == [((0, 3), 6), ((0, 4), 8), ((0, 0), 9)]
    window.move(10)
    assert list(window.last_needs) == [(0, 5)] and window.num_bytes == 10


def refused(address: str, cache: Path, recipe, max_bytes: int = 10**9) -> str:
    return refusal(open_prepared, recipe, address, ShardCache(cache, max_bytes))


def test_an_address_that_cannot_be_read_is_refused(prepared, connected, cache, monkeypatch):
    """No bucket, no data set, no such protocol, no permission, no answer in the time it is given: one line each."""
    assert "manifest.json: not there" in refused("s3://nobody/data", cache, prepared.recipe)
    assert "s3://bucket/other/corpus" in refused("s3://bucket/other", cache, prepared.recipe)
    assert "s9://" in refused("s9://bucket", cache, prepared.recipe)
    with Proxy(connected, lambda number, path: "deny") as proxy:
        use_here(monkeypatch, proxy.address)
        assert "no permission to read it" in refused("s3://bucket/data", cache, prepared.recipe)
    use_here(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("PRETRAINING_DATA_PATIENCE_SECONDS", "0.1")
    assert "does not answer" in refused("s3://bucket/data", cache, prepared.recipe)
    assert not cache.exists()


def test_a_cache_that_cannot_hold_the_run_is_refused(prepared, connected, cache, monkeypatch):
    """Smaller than a shard, smaller than what the order needs at once, a full disk, a file in its place."""
    assert "one shard has" in refused("s3://bucket/data", cache, prepared.recipe, prepared.largest - 1)
    data = open_prepared(prepared.recipe, "s3://bucket/data", ShardCache(cache, 4 * prepared.largest))
    order = GlobalOrder(data.train.num_blocks(LENGTH), 3, data.fingerprint)
    with pytest.raises(UserError, match=r"raise --data_cache_gb.*data\.shuffle_shards=3"):
        prefetched(PackedDataset(data.train, LENGTH, order))
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(full))
    assert "No space left on device" in refusal(data.train.read, 0, 5)
    cache.with_name("file").write_text("")
    assert "Not a directory" in refused("s3://bucket/data", cache.with_name("file"), prepared.recipe)
