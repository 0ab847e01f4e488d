"""Saving without standing still: training stops for the copy alone, and the marker still tells the truth."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pretraining.checkpoints.background import (
    CheckpointWriter,
    HostSnapshot,
    SaveAbandoned,
    wait_for_receipts,
)
from pretraining.checkpoints.format import MARKER, receipt_name, write_receipt
from pretraining.checkpoints.shard_files import rank_file
from pretraining.errors import UserError
from pretraining.planning.memory.need import snapshot_bytes
from pretraining.runtime.durable_files import read_rows, write_json
from pretraining.runtime.run_folder import RunFolder
from tests.gear.on_ranks import on_ranks

FILE = rank_file(0, 1)


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "rng/torch": torch.randint(0, 255, (13,), dtype=torch.uint8, generator=generator),
        "master/b@0": torch.randn(5, generator=generator),
        "exp_avg/a@7": torch.randn(1000, generator=generator),
        "factor/a@whole": torch.randn(6, 4, generator=generator).bfloat16().t(),
        "master/empty@0": torch.empty(0),
    }


def write_marker(folder: Path, content: dict) -> None:
    """The least a commit does: what the marker holds is tested elsewhere."""
    receipts = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    write_json(folder / MARKER, {**content, "receipts": receipts})


def writer_in(folder: Path, commit=write_marker, **choices) -> CheckpointWriter:
    return CheckpointWriter(RunFolder(folder), commit, **choices)


def test_what_training_does_after_the_copy_does_not_reach_the_file(tmp_path):
    """The checkpoint of a step holds that step's numbers, for as many saves as there are, in the same memory."""
    writer = writer_in(tmp_path)
    for step in (1, 2, 3):
        tensors = tensors_of(step)
        writer.save(step, tensors, {"state.json": b"{}"}, marker={"tokens": 10 * step})
        for tensor in tensors.values():
            tensor.zero_()
        writer.wait()
        found = load_file(tmp_path / f"checkpoint-{step}" / FILE)
        expected = tensors_of(step)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert json.loads((tmp_path / f"checkpoint-{step}" / MARKER).read_text())["tokens"] == 10 * step
    assert writer.snapshot.num_bytes == writer.last["snapshot_bytes"] < 5000


def test_the_synchronous_way_writes_the_same_bytes(tmp_path):
    """`checkpoints.background: false` is another time, not another file."""
    for name, background in (("behind", True), ("standing", False)):
        writer = writer_in(tmp_path / name, background=background)
        writer.save(4, tensors_of(0), {"state.json": b'{"lr": 1}'}, {"rng": {"python": [1]}})
        assert background or (tmp_path / name / "checkpoint-4" / MARKER).exists()
        writer.wait()
        (event,) = read_rows(RunFolder(tmp_path / name).events)
        assert event["event"] == "save" and event["background"] == background
        assert event["bytes"] == 13 + 4 * 1005 + 48 and event["blocked_seconds"] > 0
        assert (event["snapshot_bytes"] > 0) == background
    behind, standing = (
        {p.name: p for p in (tmp_path / n / "checkpoint-4").iterdir()} for n in ("behind", "standing")
    )
    assert behind.keys() == standing.keys() == {FILE, "state.json", receipt_name(0, 1), MARKER}
    assert all(behind[name].read_bytes() == standing[name].read_bytes() for name in (FILE, "state.json"))
    receipts = [json.loads(files[receipt_name(0, 1)].read_text()) for files in (behind, standing)]
    assert receipts[0]["files"] == receipts[1]["files"] and receipts[0]["rng"] == {"python": [1]}


def test_a_second_save_waits_for_the_first(tmp_path):
    """Bounded memory: one snapshot. The time it waits is blocked time, and said to be."""
    release = threading.Event()

    def slow_commit(*arguments) -> None:
        release.wait(30)
        write_marker(*arguments)

    writer = writer_in(tmp_path, slow_commit)
    writer.save(1, tensors_of(1))
    writer.poll()
    assert not (tmp_path / "checkpoint-1" / MARKER).exists(), "training went on before the commit"
    threading.Timer(0.2, release.set).start()
    writer.save(2, tensors_of(2))
    assert (tmp_path / "checkpoint-1" / MARKER).exists()
    writer.wait()
    assert writer.last["checkpoint"] == "checkpoint-2"
    assert writer.last["blocked_seconds"] >= writer.last["waited_seconds"] > 0.1


def test_a_step_saved_again_replaces_its_checkpoint(tmp_path):
    """After a return to an earlier step the old files of a later one must not mix with the new ones."""
    writer = writer_in(tmp_path)
    writer.save(5, tensors_of(1), {"left.json": b"1"})
    writer.save(5, tensors_of(2))
    writer.wait()
    assert torch.equal(load_file(tmp_path / "checkpoint-5" / FILE)["master/b@0"], tensors_of(2)["master/b@0"])
    assert not (tmp_path / "checkpoint-5" / "left.json").exists()


def full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_fills_up_is_told_at_the_step_boundary(tmp_path, monkeypatch, background):
    """By policy: the run ends in one line, or goes on; either way nothing half-written is left."""
    before = writer_in(tmp_path, background=background)
    before.save(1, tensors_of(1))
    before.wait()
    choices = [{"on_full_disk": policy, "background": background} for policy in ("stop", "continue")]
    stopping, going_on = (writer_in(tmp_path, **each) for each in choices)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(UserError, match="No space left on device; free some space"):
            stopping.save(2, tensors_of(2))
            stopping.wait()
        going_on.save(3, tensors_of(3))
        going_on.wait()
    going_on.save(4, tensors_of(4))
    going_on.wait()
    assert [p.name for p in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-1", "checkpoint-4"]
    events = [f"{row['event']} {row['checkpoint'][-1]}" for row in read_rows(RunFolder(tmp_path).events)]
    assert events == ["save 1", "save_failed 2", "save_failed 3", "save 4"]


def test_a_bug_in_the_thread_ends_the_run_with_its_traceback(tmp_path):
    """An error of ours must not be lost in a thread while training believes it saves."""
    writer = writer_in(tmp_path, lambda folder, content: content["no such key"], on_full_disk="continue")
    writer.save(1, tensors_of(1))
    with pytest.raises(RuntimeError, match="no such key"):
        writer.wait()


def test_without_room_for_a_copy_training_stands_still_instead(tmp_path, monkeypatch):
    """The snapshot never drives the machine out of memory: the same files, written in training's time."""
    monkeypatch.setattr("pretraining.checkpoints.background.free_memory_bytes", lambda: 100)
    writer = writer_in(tmp_path)
    writer.save(1, tensors_of(1))
    assert (tmp_path / "checkpoint-1" / MARKER).exists() and writer.snapshot.num_bytes == 0
    assert [row["event"] for row in read_rows(RunFolder(tmp_path).events)] == ["no_room_for_snapshot", "save"]


@pytest.mark.parametrize("free", [1 << 40, None])
def test_host_memory_that_is_refused_costs_the_copy_and_not_the_run(tmp_path, monkeypatch, capsys, free):
    """Promise: nothing is lost. What seemed free cannot be pinned: written in training's time, and said once."""

    def as_cuda_does(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("pretraining.checkpoints.background.free_memory_bytes", lambda: free)
    with monkeypatch.context() as patch:
        patch.setattr("pretraining.checkpoints.background.torch.empty", as_cuda_does)
        writer = writer_in(tmp_path)
        for step in (1, 2):
            tensors = {"master/w@0": torch.arange(5.0)}
            writer.save(step, tensors)
            assert (tmp_path / f"checkpoint-{step}" / MARKER).exists()
    assert capsys.readouterr().err.count("no host memory for a copy of 20 B a rank") == 1
    writer.save(3, {"master/w@0": torch.arange(5.0)})
    writer.wait()
    events = [row["event"] for row in read_rows(RunFolder(tmp_path).events)]
    assert events == ["no_room_for_snapshot", "save"] * 2 + ["save"]


def test_the_copy_takes_what_the_plan_says(monkeypatch):
    """One buffer of the bytes that are checked and planned, kept for later saves, given back before a larger one."""
    asked, empty, held = [], torch.empty, []

    def recorded(size, **keywords):
        held.append(snapshot.num_bytes)
        asked.append((size, keywords.pop("pin_memory")))
        return empty(size, **keywords)

    snapshot = HostSnapshot()
    monkeypatch.setattr("pretraining.checkpoints.background.torch.empty", recorded)
    for numbers in ((3, 70_000), (3, 70_000), (3, 80_000)):
        tensors = {f"{number}": torch.full((number,), 1.5) for number in numbers}
        planned = snapshot_bytes([4 * number for number in numbers])
        assert snapshot.make_room(tensors) and snapshot.num_bytes == planned
        copies = snapshot.take(tensors)
        assert all(torch.equal(copies[name], tensors[name]) for name in tensors)
    assert asked == [(64 + 280_000, False), (64 + 320_000, False)] and held == [0, 0]


def test_receipts_of_an_earlier_attempt_do_not_count(tmp_path):
    """A commit over a dead rank's stale receipt would name files of two saves."""
    write_receipt(tmp_path, 0, 2, {}, save="now.1")
    write_receipt(tmp_path, 1, 2, {}, save="earlier.1")
    abandoned = threading.Event()
    threading.Timer(0.05, abandoned.set).start()
    with pytest.raises(SaveAbandoned):
        wait_for_receipts(tmp_path, 2, "now.1", abandoned)
    write_receipt(tmp_path, 1, 2, {}, save="now.1", rng=1)
    wait_for_receipts(tmp_path, 2, "now.1", abandoned)


def saved_on_a_failing_disk(folder: Path, policy: str) -> list[str]:
    """What came of three saves on this rank; in the second one the disk of rank 1 is full."""
    rank = int(os.environ["RANK"])
    writer, flushed, story = writer_in(folder, on_full_disk=policy), os.fsync, []
    for step in (1, 2, 3):
        os.fsync = full_disk if rank == 1 and step == 2 else flushed
        tensors = {f"master/weight@{rank * 4}": torch.full((4,), float(step))}
        try:
            writer.save(step, tensors, marker={"rank": rank})
            while writer._flight is not None:
                writer.poll()
            story.append("saved" if writer.last["checkpoint"] == f"checkpoint-{step}" else "not saved")
        except UserError as error:
            story.append(str(error))
            break
        finally:
            os.fsync = flushed
    return story


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_failure_of_one_rank_meets_all_ranks_alike(tmp_path, policy):
    """Two ranks, the second one's disk full in the second save: same answer, same step, no marker over half a save."""
    stories = on_ranks(2, saved_on_a_failing_disk, tmp_path, policy)
    assert stories[0] == stories[1]
    if policy == "stop":
        assert stories[0][0] == "saved" and "No space left" in stories[0][1]
    else:
        assert stories[0] == ["saved", "not saved", "saved"]
    committed = sorted(path.parent.name for path in tmp_path.glob("*/committed.json"))
    assert committed == (["checkpoint-1"] if policy == "stop" else ["checkpoint-1", "checkpoint-3"])
    marker = json.loads((tmp_path / "checkpoint-1" / MARKER).read_text())
    assert marker["rank"] == 0 and [len(receipt["files"]) for receipt in marker["receipts"]] == [1, 1]
