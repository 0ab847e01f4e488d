"""Committed checkpoints go to a real S3 server behind training, and come from there onto an empty machine."""

import errno
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pretraining.checkpoints import remote
from pretraining.checkpoints.__main__ import main
from pretraining.checkpoints.choosing import choose_checkpoint
from pretraining.checkpoints.format import (
    MARKER,
    commit_checkpoint,
    read_marker,
    receipt_name,
    write_bytes,
    write_marker,
    write_receipt,
)
from pretraining.checkpoints.live_files import fetch_records
from pretraining.checkpoints.remote import RemoteRun, fetching_bar
from pretraining.checkpoints.resume import changes_in
from pretraining.checkpoints.retention import Retention
from pretraining.checkpoints.shard_files import rank_file, write_rank_file
from pretraining.checkpoints.upload import Uploader, send_export
from pretraining.errors import UserError
from pretraining.outside.addresses import is_remote
from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Checkpoints, Notify
from pretraining.runtime.durable_files import read_rows, write_json
from pretraining.runtime.journal import Journal, Rollback
from pretraining.runtime.notices import notices
from pretraining.runtime.run_folder import RunFolder, step_in_name, utc_now
from tests.gear.finished_data import refusal
from tests.gear.object_store import (
    OTHER_CREDENTIALS,
    OtherServer,
    Proxy,
    newest_committed,
    one_in,
    s3_server,
    use_here,
)
from tests.gear.runs import bytes_of, completed

NAME = "tiny"
UPLOAD = "s3://bucket/runs"


@pytest.fixture(scope="module")
def s3(tmp_path_factory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as address:
        yield address


@pytest.fixture
def upload(request, connected) -> str:
    """An address of the bucket that no other test uses."""
    return f"s3://bucket/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture
def connected(monkeypatch, s3) -> str:
    use_here(monkeypatch, s3)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the patience that is tested is ours
    monkeypatch.setenv("PRETRAINING_DATA_PATIENCE_SECONDS", "30")
    return s3


def run_in(folder: Path) -> RunFolder:
    run = RunFolder(folder / NAME)
    write_json(run.recipe, {"name": NAME})
    return run


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return run_in(tmp_path)


def commit(run: RunFolder, step: int, ranks: int = 2, rollbacks: int = 0, **marker) -> Path:
    """A committed checkpoint of `ranks` ranks, its numbers those of its step."""
    folder = run.checkpoint(step)
    folder.mkdir()
    for rank in range(ranks):
        tensors = {f"master/w@{1000 * rank}": torch.full((1000,), step + rank / 8)}
        own = {rank_file(rank, ranks): write_rank_file(folder / rank_file(rank, ranks), tensors)}
        if rank == 0:
            own["state.json"] = write_bytes(folder / "state.json", b'{"format": 1}')
        write_receipt(folder, rank, ranks, own)
    commit_checkpoint(folder, {"step": step, "ranks": ranks, "rollbacks": rollbacks, **marker})
    return folder


def send(run: RunFolder, address: str, *folders: Path, **choices) -> None:
    uploader = Uploader(run, RemoteRun(address, NAME), **choices)
    for folder in folders:
        uploader.offer(folder)
        uploader.wait()


def events(run: RunFolder) -> list[str]:
    return [row["event"] for row in read_rows(run.events)]


def fetched(folder: Path, upload: str, newest_here: int | None = None) -> RunFolder:
    """The run as a machine gets it that had nothing, or this checkpoint alone."""
    run = RunFolder(folder / "empty" / NAME)
    if newest_here is not None:
        for each in run.committed():
            if step_in_name(each) != newest_here:
                shutil.rmtree(each)
        run.path.mkdir(parents=True, exist_ok=True)
        if not run.checkpoint(newest_here).exists():
            commit(run, newest_here)
    choose_checkpoint(run, "auto", upload)
    return run


def test_a_store_that_fails_one_request_in_five_gets_all_and_gives_all(
    run, tmp_path, connected, monkeypatch, upload
):
    """Two checkpoints up, the newest down again on an empty machine: the same bytes, the marker sent last."""
    with Proxy(connected, one_in(5, "error", "drop")) as proxy:
        use_here(monkeypatch, proxy.address)
        send(run, upload, commit(run, 4), commit(run, 8))
        sent = [line.split()[1] for line in proxy.changes if line.endswith("passed on")]
        got = fetched(tmp_path, upload)
        assert proxy.mistreated > 5
    names = [path.partition("?")[0].rpartition("/")[2] for path in sent if "checkpoint-8" in path]
    assert names[-1] == MARKER and names.index(receipt_name(1, 2)) > names.index(rank_file(1, 2))
    assert [path.name for path in got.path.glob("checkpoint-*")] == ["checkpoint-8"]
    assert bytes_of(got.checkpoint(8)) == bytes_of(run.checkpoint(8))
    assert json.loads(got.recipe.read_text()) == {"name": NAME}
    assert events(run) == ["upload", "upload"] and events(got)[-1] == "fetch"


@pytest.fixture(params=["moto", "s3rver", "mounted"])
def store(request, tmp_path, monkeypatch) -> Iterator[str]:
    """An address in a store: two S3 servers of different makes, and a folder."""
    if request.param == "mounted":
        yield str(tmp_path / "mounted")
    elif request.param == "moto":
        use_here(monkeypatch, request.getfixturevalue("s3"))
        yield "s3://bucket/alike"
    elif OtherServer.PROGRAM is None:
        pytest.skip("no other S3 server on the PATH: npm install -g s3rver")
    else:
        with OtherServer(tmp_path / "objects") as server:
            use_here(monkeypatch, server.address, **OTHER_CREDENTIALS)
            yield "s3://bucket/alike"


def test_stores_behave_alike(run, tmp_path, store):
    """Up, down, listed, replaced and removed; of a name that must be new the first content stays, if the store can."""
    remote = RemoteRun(store, NAME)
    send(run, store, commit(run, 4), commit(run, 8))
    assert {"checkpoint-4", "checkpoint-8"} <= set(remote.checkpoints())
    got = fetched(tmp_path, store)
    assert bytes_of(got.checkpoint(8)) == bytes_of(run.checkpoint(8))
    assert remote.create("one", b"first") and remote.create("one", b"first")
    # that one knows no conditions
    if os.environ.get("AWS_ACCESS_KEY_ID") != OTHER_CREDENTIALS["AWS_ACCESS_KEY_ID"]:
        assert not remote.create("one", b"second") and remote.read_if_there("one") == b"first"
    remote.remove_checkpoint("checkpoint-8")
    assert newest_committed(remote, -1) == "checkpoint-4"


def test_another_runs_marker_is_not_replaced(run, upload):
    """Two runs that were started by mistake commit one step at once: the second reports it, and does not commit."""
    remote = RemoteRun(upload, NAME)
    folder = commit(run, 4)

    class Late(RemoteRun):
        """Where the other run commits while this one sends its files."""

        def write(self, path, *more):
            super().write(path, *more)
            if path.endswith("safetensors"):
                remote.write_bytes(f"checkpoint-4/{MARKER}", b"of another run")

    uploader = Uploader(run, Late(upload, NAME))
    uploader.offer(folder)
    uploader.wait()
    (failed,) = (row for row in read_rows(run.events) if row["event"] == "upload_failed")
    assert "another run has committed it" in failed["reason"]
    assert remote.read_if_there(f"checkpoint-4/{MARKER}") == b"of another run"


def test_an_interrupted_upload_goes_on_where_it_stopped(run, connected, monkeypatch, upload):
    """No marker before all is there; what a rank has sent is not sent again; the failure is an event, no error."""
    folder = commit(run, 4)
    monkeypatch.setenv("PRETRAINING_DATA_PATIENCE_SECONDS", "0.5")
    with Proxy(connected, lambda number, path: "deny" if rank_file(1, 2) in path else None) as proxy:
        use_here(monkeypatch, proxy.address)
        send(run, upload, folder)
        assert events(run) == ["upload_failed"]
    use_here(monkeypatch, connected)
    assert newest_committed(RemoteRun(upload, NAME), -1) is None
    with Proxy(connected, lambda number, path: None) as proxy:
        use_here(monkeypatch, proxy.address)
        send(run, upload, folder)
        sent = [path.split()[1].rpartition("/")[2] for path in proxy.changes]
    assert rank_file(0, 2) not in sent and rank_file(1, 2) in sent and sent[-1] == MARKER
    use_here(monkeypatch, connected)
    assert newest_committed(RemoteRun(upload, NAME), -1) == "checkpoint-4"


def test_what_a_rollback_left_behind_is_not_fetched(run, tmp_path):
    """Steps 4 and 8 went up, then a rollback to step 4: the store alone, or the newer journal, knows it at once."""
    mounted = str(tmp_path / "mounted")
    folders = [commit(run, step) for step in (4, 8)]
    send(run, mounted, *folders)
    before = fetched(tmp_path / "before", mounted)
    assert [path.name for path in before.path.glob("checkpoint-*")] == ["checkpoint-8"]
    journal = Journal((Rollback(7, 4, (30, 60)),))
    journal.write(run.journal)
    send(run, mounted, folders[0])  # as the start after a rollback offers it
    got = fetched(tmp_path / "empty", mounted)
    assert [path.name for path in got.path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert Journal.read(got.journal) == journal
    # nor is it in the way of a start that goes on from a PATH
    assert choose_checkpoint(run, str(folders[0]), mounted).folder == folders[0]
    shutil.rmtree(folders[1])
    send(run, mounted, commit(run, 6, rollbacks=1))
    late = fetched(tmp_path / "before", mounted, newest_here=4)  # its own journal is older
    assert late.checkpoint(6).exists() and Journal.read(late.journal) == journal


def test_files_removed_here_still_go_up_and_removals_follow(run, tmp_path, upload):
    """Retention does not wait for the network: an open file outlives its removal. What it removed goes there too."""
    uploader = Uploader(run, RemoteRun(upload, NAME))
    for step in (1, 2, 3):
        folder = commit(run, step)
        uploader.offer(folder)
        for path in folder.iterdir():
            path.unlink()
        uploader.wait()
        uploader.remove(["checkpoint-1"] if step == 2 else [])
    assert RemoteRun(upload, NAME).checkpoints() == ["checkpoint-3", "checkpoint-2"]
    same = commit(run_in(tmp_path / "same"), 3)
    assert bytes_of(fetched(tmp_path, upload).checkpoint(3)) == bytes_of(same)


def test_the_store_keeps_what_the_rule_keeps_after_a_lost_disk(tmp_path, store):
    """The new disk has only the newest checkpoint; those that the lost one would have removed go too, the best stays.

    Of a step that is saved again with other files, the old files go.
    """
    lost = run_in(tmp_path / "lost")
    for step, loss in {1: 3.0, 2: 2.0, 3: 4.0, 4: 5.0, 5: 6.0}.items():
        send(lost, store, commit(lost, step, ranks=3, metrics={"eval_loss": loss}))
    run = fetched(tmp_path, store)
    shutil.rmtree(run.checkpoint(5))
    commit(run, 5, ranks=2, metrics={"eval_loss": 6.0})
    send(run, store, run.checkpoint(5), commit(run, 6), rule=Retention(Checkpoints(keep_last=2, keep_best=1)))
    assert "upload_failed" not in events(run)
    there = RemoteRun(store, NAME)
    assert there.checkpoints() == [
        "checkpoint-6",
        "checkpoint-5",
        "checkpoint-4",  # the rule was applied when 5 was the newest
        "checkpoint-2",  # the best
    ]
    assert set(there.sizes("checkpoint-5")) == {path.name for path in run.checkpoint(5).iterdir()}


def test_a_store_is_listed_and_verified_as_a_disk_is(tmp_path, store, capsys):
    """By the same verbs with the address in place of the folder; a byte that has changed there is found."""
    if not is_remote(store):
        store = f"file://{store}"
    store, run = f"{store}/listed", run_in(tmp_path)
    send(run, store, *(commit(run, step, metrics={"loss": 3.0, "eval_loss": 2.0}) for step in (4, 8)))

    def said(*words: str) -> dict:
        main([*words, "--json"])
        return json.loads(capsys.readouterr().out)

    here, there = (said("list", str(place))["checkpoints"] for place in (run.path, f"{store}/{NAME}"))
    assert [each | {"age_seconds": 0} for each in there] == [each | {"age_seconds": 0} for each in here]
    one = said("verify", f"{store}/{NAME}/checkpoint-4")["checkpoints"]
    assert [(each["checkpoint"], each["whole"]) for each in one] == [(f"{store}/{NAME}/checkpoint-4", True)]
    assert set(one[0]["files"]) == {path.name for path in run.checkpoint(4).iterdir()} - {MARKER}
    remote, bad = RemoteRun(store, NAME), f"checkpoint-8/{rank_file(1, 2)}"
    remote.write_bytes(bad, remote.read(bad)[:-1] + b"?")
    with pytest.raises(UserError, match=f"1 of 2 checkpoints damaged: .*{rank_file(1, 2)} has changed"):
        said("verify", f"{store}/{NAME}")
    capsys.readouterr()
    remote.remove(f"checkpoint-8/{MARKER}")
    states = [each["state"] for each in said("list", f"{store}/{NAME}")["checkpoints"]]
    assert states == ["uncommitted", "committed"]
    for words, complaint in {
        ("verify", f"{store}/{NAME}", "--step", "8"): "no committed checkpoint of step 8",
        ("verify", f"{store}/{NAME}/checkpoint-4", "--step", "8"): "step 8 is asked for, .* that of step 4",
        ("list", f"{store}/none"): "no checkpoint-\\* there",
    }.items():
        with pytest.raises(UserError, match=complaint):
            main([*words])


def test_the_bar_of_a_fetch_shows_the_whole_checkpoint_and_no_byte_twice(
    run, tmp_path, connected, upload, monkeypatch, capsys
):
    """One file arrives damaged at first and comes again; another rank brings some files, on the same disk."""
    folder, spoiled = commit(run, 4), []
    send(run, upload, folder)

    def once(number: int, path: str) -> str | None:
        if rank_file(0, 2) not in path or spoiled:
            return None
        spoiled.append(path)
        return "spoil"

    with Proxy(connected, once) as proxy:
        use_here(monkeypatch, proxy.address)
        got = fetched(tmp_path, upload)
    use_here(monkeypatch, connected)
    assert spoiled and bytes_of(got.checkpoint(4)) == bytes_of(folder)
    assert shown_last(capsys) == "100%"
    files, other = read_marker(folder)["files"], tmp_path / "other"
    other.mkdir()
    for name in (rank_file(0, 2), rank_file(1, 2)):
        with fetching_bar("what two ranks bring", other, files):
            shutil.copy(folder / name, other)
        arrived = [each.name for each in other.iterdir()]
        here, whole = (sum(files[name]["bytes"] for name in names) for names in (arrived, files))
        assert shown_last(capsys) == f"{100 * here / whole:.0f}%"


def shown_last(capsys) -> str:
    """The last percentage that a progress bar has shown; over 100 it shows none."""
    return capsys.readouterr().err.strip().rpartition("\r")[2].partition("|")[0].rpartition(" ")[2]


def test_no_listing_from_before_decides(upload):
    """Two clients, as two machines: what the other one has written, and removed, since the last look."""
    here = RemoteRun(upload, NAME)
    here.write_bytes("folder/first", b"1")
    assert here.sizes("folder") == {"first": 1} and list(here.sizes("")) == ["folder"]
    other = "import sys; from pretraining.checkpoints.remote import RemoteRun as Run; there = Run(*sys.argv[1:])\n"
    other += "there.write_bytes('folder/second', b'22'); there.write_bytes('new/file', b'')\n"
    other += "there.remove('folder/first')"
    completed([sys.executable, "-c", other, upload, NAME])
    assert here.sizes("folder") == {"second": 2} and list(here.sizes("")) == ["folder", "new"]
    assert here.read("folder/second") == b"22" and here.read_if_there("folder/first") is None
    here.remove_checkpoint("folder")
    assert list(here.sizes("")) == ["new"]


def test_one_damaged_on_disk_is_not_sent_as_whole(run, upload):
    """A bit that flipped since the commit is found while it is read."""
    folder = commit(run, 4)
    path = folder / rank_file(1, 2)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    send(run, upload, folder)
    (event,) = read_rows(run.events)
    assert event["event"] == "upload_failed" and "has changed since it was committed" in event["reason"]
    assert newest_committed(RemoteRun(upload, NAME), -1) is None


def marker_of_a_file_elsewhere() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_marker(Path(folder), {"files": {"../../evil": {"bytes": 1, "checksum": ""}}})
        return (Path(folder) / MARKER).read_bytes()


DAMAGES = {
    "bit": lambda remote: remote.write_bytes(f"checkpoint-8/{rank_file(1, 2)}", b"x" * 4096),
    "gone": lambda remote: remote.remove(f"checkpoint-8/{rank_file(1, 2)}"),
    "marker": lambda remote: remote.write_bytes(f"checkpoint-8/{MARKER}", b"{"),
    "outside": lambda remote: remote.write_bytes(f"checkpoint-8/{MARKER}", marker_of_a_file_elsewhere()),
    "edited": lambda remote: remote.write_bytes(
        f"checkpoint-8/{MARKER}", remote.read(f"checkpoint-8/{MARKER}").replace(b'"step": 8', b'"step": 9')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_one_in_the_store_is_passed_over(run, tmp_path, upload, damage):
    """The next older one is taken, with an event; the damaged one never gets a marker here."""
    send(run, upload, commit(run, 4), commit(run, 8))
    damage(RemoteRun(upload, NAME))
    got = fetched(tmp_path, upload)
    assert bytes_of(got.checkpoint(4)) == bytes_of(run.checkpoint(4))
    assert not (got.checkpoint(8) / MARKER).exists() and not (tmp_path / "evil").exists()
    assert "remote_checkpoint_passed_over" in events(got)


def test_the_newer_one_wins_and_what_is_here_is_not_fetched(run, tmp_path, upload):
    """`--resume auto`: remote newer than local is fetched; older is not; a fetch begun is not begun anew."""
    send(run, upload, commit(run, 8))
    got = fetched(tmp_path, upload, newest_here=8)
    assert "fetch" not in events(got)
    got = fetched(tmp_path, upload, newest_here=4)
    (got.checkpoint(8) / MARKER).unlink()
    (got.checkpoint(8) / rank_file(0, 2)).write_bytes(b"cut")
    whole = got.checkpoint(8) / rank_file(1, 2)
    before = whole.stat().st_mtime_ns
    got = fetched(tmp_path, upload, newest_here=4)
    assert bytes_of(got.checkpoint(8)) == bytes_of(run.checkpoint(8)) and whole.stat().st_mtime_ns == before
    assert "checkpoint-8 is newer" in refusal(choose_checkpoint, run, "never", upload)
    assert choose_checkpoint(run, str(run.checkpoint(8)), upload).folder == run.checkpoint(8)


def test_damaged_files_of_a_checkpoint_here_come_from_the_store(tmp_path, store, capsys):
    """A bad disk, or a power cut after a fetch: the newest checkpoint is mended, and no older one takes its place."""
    run, store = run_in(tmp_path), f"{store}/mended"
    send(run, store, commit(run, 4), commit(run, 8))
    before = bytes_of(run.checkpoint(8))
    newest, whole = run.checkpoint(8), run.checkpoint(8) / rank_file(1, 2)
    written = whole.stat().st_mtime_ns
    (newest / rank_file(0, 2)).write_bytes(b"")
    (newest / "state.json").unlink()
    assert choose_checkpoint(run, "auto", upload=store).folder == newest
    assert bytes_of(newest) == before and whole.stat().st_mtime_ns == written
    assert read_rows(run.events)[-1]["damaged_here"] and "mended with the files of" in capsys.readouterr().out
    # the store's checkpoint of that name is another one, is damaged too, or cannot be reached
    (newest / rank_file(0, 2)).write_bytes(b"")
    there = RemoteRun(store, NAME)
    marker = there.read_if_there(f"checkpoint-8/{MARKER}")
    there.write_bytes(f"checkpoint-8/{rank_file(0, 2)}", bytes(len(before[rank_file(0, 2)])))
    assert choose_checkpoint(run, "auto", upload=store).folder == run.checkpoint(4)
    there.write_bytes(f"checkpoint-8/{MARKER}", marker.replace(b'"step": 8', b'"step":  8'))
    assert choose_checkpoint(run, "auto", upload=store).folder == run.checkpoint(4)
    assert choose_checkpoint(run, "auto", upload=str(tmp_path / "gone")).folder == run.checkpoint(4)
    # what is in the store is no better: here it stays, for whoever looks at it
    assert newest.is_dir() and events(run).count("checkpoint_passed_over") == 3


@pytest.mark.parametrize("harm", ["marker", "not yet sent", "both"])
def test_what_cannot_be_mended_here_gives_way_to_the_newest_whole_one_of_the_store(
    run, tmp_path, upload, harm
):
    """A damaged marker, or a damaged file that the store lacks or has damaged too: no step is trained again for it."""
    there = RemoteRun(upload, NAME)
    send(run, upload, commit(run, 4), commit(run, 8))
    shutil.rmtree(run.checkpoint(4))
    damaged, of_rank_0 = run.checkpoint(8), rank_file(0, 2)
    if harm == "marker":
        (damaged / MARKER).write_bytes((damaged / MARKER).read_bytes().replace(b'"step": 8', b'"step": 9'))
    else:
        (damaged / of_rank_0).write_bytes(b"x" * (damaged / of_rank_0).stat().st_size)
    if harm == "both":
        there.write_bytes(f"checkpoint-8/{of_rank_0}", (damaged / of_rank_0).read_bytes())
    if harm == "not yet sent":
        there.remove_checkpoint("checkpoint-8")
    kept = bytes_of(damaged)
    chosen = choose_checkpoint(run, "auto", upload=upload).folder
    assert chosen == run.checkpoint(8 if harm == "marker" else 4)
    assert bytes_of(chosen) == bytes_of(fetched(tmp_path, upload).path / chosen.name)
    if harm != "both":  # what is here is not replaced by what is no better
        set_aside = next(run.aside.glob("checkpoint-8.*"), damaged)
        assert bytes_of(set_aside) == kept


def test_two_runs_of_one_name_do_not_overwrite_each_other(tmp_path, upload):
    """The second to commit a step is told; what the first has committed stays whole."""
    one, two = run_in(tmp_path / "one"), run_in(tmp_path / "two")
    uploaders = [Uploader(run, RemoteRun(upload, NAME)) for run in (one, two)]
    time.sleep(1.1)  # a marker says when it was saved to the second
    folders = [commit(one, 4, saved=utc_now()), commit(two, 4, ranks=3, saved=utc_now())]
    for uploader, folder in zip(uploaders, folders, strict=True):
        uploader.offer(folder)
        uploader.wait()
    assert events(one) == ["upload"] and "another run commits" in read_rows(two.events)[0]["reason"]
    assert bytes_of(fetched(tmp_path, upload).checkpoint(4)) == bytes_of(folders[0])
    # a later start of the run may save a step again
    send(two, upload, folders[1])
    assert bytes_of(fetched(tmp_path / "again", upload).checkpoint(4)) == bytes_of(folders[1])


def test_a_checkpoint_by_its_address_does_not_mix_with_newer_ones(run, tmp_path, upload):
    """As one by its path: a later start would go on from the store's newest, of another course."""
    send(run, upload, commit(run, 4), commit(run, 8))
    assert "checkpoint-8 is newer" in refusal(choose_checkpoint, run, f"{upload}/{NAME}/checkpoint-4", upload)
    again = RunFolder(tmp_path / "again" / NAME)
    assert choose_checkpoint(again, f"{upload}/{NAME}/checkpoint-4").folder == again.checkpoint(4)
    # a copy here that a bad disk has damaged is mended
    (again.checkpoint(4) / rank_file(0, 2)).write_bytes(b"bad")
    choose_checkpoint(again, f"{upload}/{NAME}/checkpoint-4")
    assert bytes_of(again.checkpoint(4)) == bytes_of(run.checkpoint(4))
    # what the other run left out meanwhile is not left out here
    rollback = {"step": 12, "to_step": 8, "samples": [1, 2], "lr_factor": 0.5, "lr_steps": 4}
    RemoteRun(f"{upload}/{NAME}").write_bytes("journal.jsonl", json.dumps(rollback).encode() + b"\n")
    choose_checkpoint(again, f"{upload}/{NAME}/checkpoint-4")
    assert not Journal.read(again.journal).rollbacks


def test_a_checkpoint_of_another_recipe_is_refused_before_it_is_fetched(run, tmp_path):
    """What the run in the store had accepted is known to the check, as it would be after the fetch."""
    seen = []
    write_json(run.changes, [{"key": "training.seed", "to": 8}])
    send(run, str(tmp_path / "there"), commit(run, 4, recipe={"name": NAME}))
    again = RunFolder(tmp_path / "again" / NAME)

    def check(place: str, marker: dict, accepted: bytes) -> None:
        seen.extend([place, marker["recipe"], changes_in(accepted, place)])
        raise UserError("another recipe")

    assert "another recipe" in refusal(choose_checkpoint, again, "auto", str(tmp_path / "there"), check=check)
    address = f"{tmp_path}/there/{NAME}/checkpoint-4"
    assert seen == [address, {"name": NAME}, [{"key": "training.seed", "to": 8}]]
    assert not again.checkpoint(4).exists()


def test_what_waiting_cannot_mend_is_answered_at_once(run, tmp_path):
    """A file in the place of a folder, and a file that a stored checkpoint lacks: no advice to wait for the store."""
    send(run, str(tmp_path / "there"), commit(run, 4))
    (tmp_path / "there" / NAME / "checkpoint-4" / "state.json").unlink()
    lacking = f"a file that its {MARKER} names is not there .*state.json"
    with pytest.raises(UserError, match=lacking) as refused:
        choose_checkpoint(RunFolder(tmp_path / "x" / NAME), f"file://{tmp_path}/there/{NAME}/checkpoint-4")
    assert "upload" not in str(refused.value)
    (tmp_path / "file").write_text("")
    assert "no such bucket or folder" in refusal(RemoteRun(f"{tmp_path}/file/runs", NAME).check_writable)
    with pytest.raises(UserError, match="memory://runs is lost when its process ends"):
        load_recipe("tiny", ["checkpoints.upload=memory://runs"])


def test_a_mounted_folder_that_loses_a_handle_is_read_on(tmp_path, monkeypatch):
    content = random.Random(1).randbytes(600_001)  # three pieces
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_bytes(content)
    opened = []

    class StaleOnce(io.FileIO):
        def readinto(self, buffer) -> int:
            if len(opened) == 1 and self.tell():
                raise OSError(errno.ESTALE, "Stale file handle")
            return super().readinto(buffer[: len(buffer) // 2 + 1])  # may read less than it is asked for

        def __init__(self, path, opener):
            super().__init__(path, opener=opener)
            opened.append(path)

    monkeypatch.setattr(remote.io, "FileIO", StaleOnce)
    pieces = RemoteRun(str(tmp_path), "run").pieces("file", len(content))
    assert b"".join(map(bytes, pieces)) == content
    assert len(opened) == 2
    cut = RemoteRun(str(tmp_path), "run")
    cut.seconds = 0.0
    assert "ends after 600,001" in refusal(list, cut.pieces("file", len(content) + 1))


def test_a_store_that_cannot_be_reached(tmp_path, monkeypatch):
    """Nothing here: one line. A checkpoint here: an event, and the run goes on from it."""
    use_here(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("PRETRAINING_DATA_PATIENCE_SECONDS", "0.2")
    assert "the store does not answer" in refusal(fetched, tmp_path, UPLOAD)
    assert not (tmp_path / "empty").exists()
    run = fetched(tmp_path, UPLOAD, newest_here=4)
    assert events(run) == ["upload_unreachable"]


def test_a_bucket_that_is_not_there_or_not_ours_is_told_at_once(connected, monkeypatch, tmp_path):
    """A mistake in the recipe shows at the start, not after the first save."""
    assert "no such bucket" in refusal(RemoteRun("s3://another/runs", NAME).check_writable)
    with Proxy(connected, lambda number, path: "deny") as proxy:
        use_here(monkeypatch, proxy.address)
        assert "no permission" in refusal(RemoteRun(UPLOAD, NAME).check_writable)
        with pytest.raises(UserError, match=r"no permission .* variables that hold its credentials"):
            fetch_records(f"{UPLOAD}/{NAME}", tmp_path)
    with pytest.raises(UserError, match="nothing can be written there"):
        RemoteRun("https://127.0.0.1:9/runs", NAME).check_writable()


def test_credentials_reach_no_file_no_event_no_message(run, tmp_path, monkeypatch, capsys):
    """A secret in the environment is never repeated; tests/house/test_secrets.py has those in addresses."""
    secret = "wJalrXUtnFEMI/K7MDENG"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_SESSION_TOKEN", secret[::-1])
    remote = RemoteRun(UPLOAD, NAME)

    def refuse() -> None:
        raise PermissionError(f"key {secret} refused")

    monkeypatch.setattr(remote, "_filesystem", refuse)
    uploader = Uploader(run, remote)
    uploader.offer(commit(run, 4))
    uploader.wait()
    assert events(run) == ["upload_failed"]
    said = "".join(capsys.readouterr())
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert secret not in said and secret.encode() not in written and secret[::-1].encode() not in written


def test_an_export_that_does_not_arrive_is_told(run, tmp_path, monkeypatch, capsys):
    """A line, an event, and an alert to whoever asked for them: the run itself goes to its end."""
    remote = RemoteRun(UPLOAD, NAME)

    def refuse(*_) -> None:
        raise UserError("the store is full")

    monkeypatch.setattr(remote, "write_file", refuse)
    run.export.mkdir()
    (run.export / "config.json").write_text("{}")
    with notices(run, NAME, Notify(on=["alert"], command=f"cat > {tmp_path / 'notice.json'}")):
        send_export(run, remote)
    assert capsys.readouterr().err == "checkpoints: the export's upload failed: the store is full\n"
    assert events(run)[0] == "export_upload_failed"
    assert json.loads((tmp_path / "notice.json").read_text())["details"]["reason"] == "the store is full"


@pytest.mark.parametrize("slip", ["s3//bucket/runs", "s3:/bucket", "gcs:bucket/x", "HTTPS//store/x"])
def test_an_address_with_a_slip_is_no_folder(slip):
    """Three days of checkpoints in a folder of the node that is lost would be none."""
    meant = re.sub("[:/]+", "://", slip, count=1)
    with pytest.raises(UserError, match=f"write {meant}, or ./{slip} for a folder"):
        load_recipe("tiny", [f"checkpoints.upload={slip}"])
    assert "names no place" in refusal(load_recipe, "tiny", ["checkpoints.upload=s3://"])
    for folder in ("s3/bucket", "runs", "/mnt/s3:/runs", f"./{slip}", "gs-backup", meant):
        load_recipe("tiny", [f"checkpoints.upload={folder}"])
