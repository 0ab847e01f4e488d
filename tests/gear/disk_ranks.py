"""What two ranks with a run folder each do and find.

No training: checkpoints are two small tensors, saved, uploaded and brought back by the parts that do it in a run.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pretraining.checkpoints.background import CheckpointWriter
from pretraining.checkpoints.choosing import choose_checkpoint
from pretraining.checkpoints.format import commit_checkpoint
from pretraining.checkpoints.remote import RemoteRun, fetch_absent
from pretraining.checkpoints.resume import bring_history, refuse_lone_disks
from pretraining.checkpoints.retention import Retention
from pretraining.checkpoints.shard_files import CheckpointReader, fetch_nothing
from pretraining.checkpoints.upload import Uploader
from pretraining.errors import UserError
from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Checkpoints
from pretraining.runtime.durable_files import append_row, read_rows
from pretraining.runtime.heartbeat import Heartbeat, read_place
from pretraining.runtime.process_group import gather_from_ranks
from pretraining.runtime.run_folder import RunFolder, step_in_name
from pretraining.training.hangs import ALARM, Relay

RANKS = 2
STATE = json.dumps({"format": 1, "parameters": {"weight": {"shape": [2000]}}}).encode()
LAYOUT = {"world_size": RANKS, "zero_stage": 2}


def place_of(folder: Path, rank: int) -> Path:
    """The run folder of one rank: the same name on a disk of its own."""
    return folder / f"disk-{rank}" / "run"


class Rank:
    """One of the ranks, with what it does in each scene; every method is called by both."""

    def __init__(self, folder: Path, run: RunFolder, rank: int):
        self.folder, self.run, self.rank = folder, run, rank
        self.store = str(folder / "store")
        self.remote = RemoteRun(self.store, "run")

    def save(self, *steps: int, keep_last: int = 2) -> None:
        retention = Retention(Checkpoints(keep_last=keep_last))
        writer = CheckpointWriter(self.run, commit_checkpoint, after_commit=lambda: retention.apply(self.run))
        for step in steps:
            marker = {"step": step, "ranks": RANKS, "zero_stage": 2, "rollbacks": 0, "metrics": {}}
            files = {"state.json": STATE, "trainer_state.json": b"{}"} if self.rank == 0 else {}
            tensor = torch.full((1000,), step + self.rank / 8)
            writer.save(step, {f"master/weight@{1000 * self.rank}": tensor}, files, marker=marker)
            writer.wait()

    def upload(self, step: int) -> None:
        uploader = Uploader(self.run, self.remote)
        uploader.offer(self.run.checkpoint(step))
        uploader.wait()

    def found(self, layout: dict | None = LAYOUT) -> dict:
        """What the ranks agree on, what each disk holds of it then, and what was fetched."""
        before = len(read_rows(self.run.events))
        checkpoint, source = choose_checkpoint(self.run, "auto", self.store, layout)
        events = read_rows(self.run.events)[before:]
        names = sorted(path.name for path in checkpoint.iterdir()) if checkpoint else []
        return {
            "checkpoint": checkpoint and checkpoint.name,
            "from_store": source is not None,
            "disks": gather_from_ranks(names),
            "events": [event["event"] for event in events],
            "fetched": next((event["nodes"] for event in events if event["event"] == "fetch"), None),
            "read": gather_from_ranks(checkpoint and self.slices(checkpoint, source)),
        }

    def slices(self, checkpoint: Path, source: RemoteRun | None) -> list[float]:
        """What a rank reads of its own slice, and of the other one's if that can be fetched, less the step."""
        fetch = fetch_nothing if source is None else partial(fetch_absent, source, checkpoint)
        reader = CheckpointReader(checkpoint, fetch)
        ranks = [self.rank] if source is None else [self.rank, 1 - self.rank]
        firsts = [reader.read("master", "weight", 1000 * rank, 1000)[0].item() for rank in ranks]
        return [first - step_in_name(checkpoint) for first in firsts]

    def on_disk(self, rank: int, act: Callable[[Path], object]) -> None:
        """Do something to one disk, by rank 0 while nobody looks."""
        if self.rank == 0:
            act(place_of(self.folder, rank))
        gather_from_ranks(None)


def scenes(rank: Rank) -> dict:
    """Save and lose, again and again; {scene: what the ranks found}."""
    found = {"disks": [*rank.run.disks.first_ranks]}
    rank.save(4)
    rank.upload(4)
    rank.save(8, 12)
    found["whole on the disks"] = rank.found()
    rank.on_disk(0, lambda path: (path / "checkpoint-12" / "committed.json").unlink())
    found["killed before the other marker"] = rank.found()
    rank.on_disk(1, _exchange_disks(rank.folder))
    found["nodes in another order"] = rank.found()
    rank.on_disk(1, lambda path: _spoil(path / "checkpoint-12" / "rank-00001-of-00002.safetensors"))
    rank.on_disk(0, lambda path: (path / "checkpoint-12" / "rank-00001-of-00002.safetensors").unlink())
    found["damaged on its disk"] = rank.found()
    rank.upload(8)
    rank.on_disk(1, lambda path: shutil.rmtree(path))
    found["an empty node"] = rank.found()
    rank.on_disk(1, lambda path: shutil.rmtree(path))
    found["another layout"] = rank.found({"world_size": RANKS, "zero_stage": 3})
    for number in range(RANKS):
        rank.on_disk(number, lambda path: shutil.rmtree(path))
    shard = Path(rank.store, "run", "checkpoint-8", "rank-00001-of-00002.safetensors")
    rank.on_disk(0, lambda path: shard.unlink())
    found["a shard is gone from the store"] = rank.found()
    reasons = [
        row["reason"] for row in read_rows(rank.run.events) if row["event"] == "remote_checkpoint_passed_over"
    ]
    found["why it is passed over"] = reasons[-1:]
    found["history"] = _histories(rank)
    found["refused"] = _refusals(rank)
    found["heartbeats"] = _heartbeats(rank)
    return found


def _exchange_disks(folder: Path) -> Callable[[Path], None]:
    def exchange(path: Path) -> None:
        for name in ("checkpoint-8", "checkpoint-12"):
            one, other = (place_of(folder, rank) / name for rank in (0, 1))
            one.rename(folder / "between")
            other.rename(one)
            (folder / "between").rename(other)

    return exchange


def _spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _histories(rank: Rank) -> list[int]:
    """How many starts rank 0 knows of: its own history, the store's newer one, and the still newer one of a disk."""

    def starts(path: Path, count: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        for _ in range(count):
            append_row(path, {"event": "start"})

    known = []
    for own, store, other in ((2, 1, 0), (2, 3, 1), (2, 3, 4), (4, 4, 4)):
        if rank.rank == 0:
            starts(rank.run.events, own)
            starts(Path(rank.store, "run", "events.jsonl"), store)
            starts(place_of(rank.folder, 1) / "events.jsonl", other)
        gather_from_ranks(None)
        bring_history(rank.run, rank.store)
        known.append(len(read_rows(rank.run.events)))
    return known


def _refusals(rank: Rank) -> list[str]:
    """Why runs without a shared disk and without a common store are refused."""
    apart = rank.folder / f"mounted-{rank.rank}"
    settings = ([], [f"checkpoints.upload={apart}"], ['training.save_strategy="no"'])
    settings += ([f"checkpoints.upload={rank.store}", "checkpoints.demote_to_weights=true"],)
    settings += ([f"checkpoints.upload={rank.store}"],)
    reasons = []
    for each in settings:
        try:
            refuse_lone_disks(rank.run, load_recipe("features/gpt2", each))
            reasons.append("")
        except UserError as error:
            reasons.append(str(error))
    return reasons


def _heartbeats(rank: Rank) -> dict:
    """Whether rank 0 sees where rank 1 is, and hears its alarm."""
    folder, look = rank.run.heartbeats, 0.05
    heartbeat, relay = Heartbeat(folder, rank.rank), Relay(rank.run, look)
    heartbeat.arrive("save", 10 + rank.rank)
    heartbeat.beat(1)
    relay.wanted = True
    until = time.monotonic() + 20
    while (place := read_place(folder, 1)) is None or place.step != 11:
        assert time.monotonic() < until
        time.sleep(look)
    if rank.rank == 1:
        (folder / ALARM).touch()
    while not (folder / ALARM).exists():
        assert time.monotonic() < until
        time.sleep(look)
    gather_from_ranks(None)
    relay.close()
    return {"phase": place.phase, "step": place.step}


def found_by_rank(folder: Path) -> dict:
    """Whether both see one folder, and what each scene comes to with a folder each."""
    number = int(os.environ["RANK"])
    together = RunFolder(folder / "shared")
    with together.locked():
        shared = together.disks.shared
    os.environ["LOCAL_RANK"] = "0"  # each is the first rank of its node
    run = RunFolder(place_of(folder, number))
    with run.locked():
        return {"shared": shared, **scenes(Rank(folder, run, number))}
