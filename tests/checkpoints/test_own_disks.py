"""Promise: nothing committed is lost. Nodes that share nothing but a store keep, upload and read their own shards."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretraining.checkpoints.remote import RemoteRun
from pretraining.runtime.durable_files import read_rows
from tests.gear.disk_ranks import found_by_rank
from tests.gear.nodes import SLOW, Nodes, two_nodes, wait_until
from tests.gear.object_store import Proxy, connect_to, newest_committed, one_in, s3_server, use_here
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import Workshop, execute

OWN = [["rank-00000-of-00002.json", "rank-00000-of-00002.safetensors"]]
OWN += [["rank-00001-of-00002.json", "rank-00001-of-00002.safetensors"]]
COMMON = ["committed.json", "state.json", "trainer_state.json"]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What two ranks with a run folder each found, scene by scene (`tests/gear/disk_ranks.py`)."""
    told = on_ranks(2, found_by_rank, tmp_path_factory.mktemp("disks"))
    for scene, answer in told[0].items():
        if isinstance(answer, dict) and "checkpoint" in answer:
            for key in ("checkpoint", "from_store", "disks"):
                assert told[1][scene][key] == answer[key], "the ranks do not agree"
    return told[0]


def test_what_the_disks_hold_together_is_whole(found):
    """The newest, of which no store has anything: small files that all need go over, shards do not.

    Whether the ranks have one folder or two is found out.
    """
    assert found["shared"] is True and found["disks"] == [0, 1]
    whole = found["whole on the disks"]
    assert (whole["checkpoint"], whole["from_store"], whole["fetched"]) == ("checkpoint-12", False, None)
    assert whole["disks"] == [sorted([*COMMON, *OWN[0], OWN[1][0]]), sorted([*COMMON, *OWN[1]])]
    assert found["killed before the other marker"]["disks"] == whole["disks"]


def test_a_rank_reads_its_slices_from_what_its_node_holds(found):
    """And what else it needs from the store, a file at a time."""
    assert found["whole on the disks"]["read"] == [[0.0], [0.125]]
    assert found["nodes in another order"]["read"] == [[0.0], [0.125]]
    assert found["an empty node"]["read"] == [[0.0, 0.125], [0.125, 0.0]]


def test_nodes_may_come_back_in_another_order(found):
    """As torchrun numbers them anew: each gets the shards of its new rank from the other disk."""
    swapped = found["nodes in another order"]
    assert (swapped["checkpoint"], swapped["from_store"]) == ("checkpoint-12", False)
    assert all(set(names) >= {*COMMON, *own} for names, own in zip(swapped["disks"], OWN, strict=True))


def test_an_empty_node_fetches_what_its_ranks_need(found):
    """And the node that holds its shards fetches nothing. At another layout every node gets all files."""
    empty = found["an empty node"]
    assert (empty["checkpoint"], empty["from_store"]) == ("checkpoint-8", True)
    assert empty["disks"][1] == sorted([*COMMON, *OWN[1]])
    assert [each["files"] for each in empty["fetched"]] == [0, 4]
    assert found["another layout"]["disks"] == [sorted([*COMMON, *OWN[0], *OWN[1]])] * 2


def test_damage_makes_the_checkpoint_before_count(found):
    """Of a file on a disk; and on empty disks, of one that the marker names and the store lacks."""
    damaged = found["damaged on its disk"]
    assert damaged["checkpoint"] == "checkpoint-8" and damaged["events"][0] == "checkpoint_passed_over"
    gone = found["a shard is gone from the store"]
    assert (gone["checkpoint"], gone["from_store"]) == ("checkpoint-4", True)
    (why,) = found["why it is passed over"]
    assert "checkpoint-8/rank-00001-of-00002.safetensors" in why and "\n" not in why


def test_the_newest_history_and_the_signs_of_life_reach_rank_0(found):
    """The node that it was on may be gone: the journal, metrics and events of the last start count.

    Heartbeats and the alarm of other nodes arrive too.
    """
    assert found["history"] == [2, 3, 4, 4]
    assert found["heartbeats"] == {"phase": "save", "step": 11}


def test_nodes_apart_without_a_store_are_refused_in_one_line(found):
    nothing, apart, unsaved, demoted, fine = found["refused"]
    assert "set checkpoints.upload" in nothing and "\n" not in nothing
    assert "is another place on" in apart and "must reach the same store" in apart
    assert "demote_to_weights" in demoted
    assert (unsaved, fine) == ("", "")


@pytest.fixture
def nodes(workshop: Workshop, tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes with their own networks, host names and disks."""
    with two_nodes(workshop, tmp_path) as made:
        if made is None:
            pytest.skip("may not make networks here")
        yield made


class Gate:
    """Before a store that fails one request in ten: of new checkpoints one passes, so that the run cannot end yet."""

    def __init__(self) -> None:
        self.passed: set[str] | None = None
        """Names of checkpoints that may be written; None: all."""
        self.room = 0

    def close_behind(self, known: list[str]) -> None:
        self.passed, self.room = set(known), 1

    def __call__(self, number: int, path: str) -> str | None:
        found = re.search(r"(checkpoint-\d+)/", path)
        if self.passed is None or found is None or found[1] in self.passed:
            return one_in(10, "error", "drop", "cut")(number, path)
        if not self.room:
            return "drop"
        self.room -= 1
        self.passed.add(found[1])
        return None


def test_an_offloaded_optimizer_reaches_an_empty_node(nodes, tmp_path):
    """Its states are on the node's processor when they are saved, and come from a mounted store when it is replaced."""
    stage = "zero3_offload"
    reference = nodes.workshop.run(stage)
    settings = ("training.save_steps=2", f"checkpoints.upload={tmp_path / 'store'}")
    remote = RemoteRun(str(tmp_path / "store"), "run")
    started = nodes.start(stage=stage, settings=settings)
    wait_until(started, lambda: newest_committed(remote, 3) is not None)
    started["beta"].kill()
    nodes.replace("beta")
    assert started["alpha"].finish().code != 0
    for each in nodes.run(stage=stage, settings=settings).values():
        assert each.code == 0, each.output
    assert nodes.disk("alpha").losses == reference.losses


def test_each_node_is_lost_once_and_the_end_is_the_undisturbed_one(nodes, tmp_path, monkeypatch):
    """ZeRO-2, a real S3 server that fails one request in ten: beta is replaced by an empty node, then alpha.

    It takes six starts of two ranks, which must live until a checkpoint is in the store.
    """
    (tmp_path / "slow.py").write_text(SLOW)
    reference = nodes.workshop.run("zero2")
    # a rank that does not notice the other's end leaves its stacks before the limit of one command is over
    settings = ("training.save_steps=2", "monitors.hang_minutes=5", f'extensions=["{tmp_path / "slow.py"}"]')
    to_store = (*settings, "checkpoints.upload=s3://bucket/runs")
    gate = Gate()
    with s3_server(tmp_path / "log") as address, Proxy(address, gate, nodes.hosts.outside) as proxy:
        variables = connect_to(proxy.address)
        use_here(monkeypatch, address)
        remote, newest = RemoteRun("s3://bucket/runs", "run"), []
        refused = nodes.run(settings=settings)
        for name, each in refused.items():
            assert each.code == 2, each.output
            assert ("set checkpoints.upload" in each.stderr) == (name == "alpha"), "one rank says it"
            assert not list(nodes.disk(name).folder.iterdir())
        for lost in ("beta", "alpha"):
            last = int(newest[-1].partition("-")[2]) if newest else 0
            gate.close_behind(newest)
            started = nodes.start(settings=to_store, SECONDS_A_STEP="0.2", **variables)
            wait_until(started, lambda last=last: newest_committed(remote, last) is not None)
            started[lost].kill()  # with all its processes, as a machine that fails
            nodes.replace(lost)
            for each in started.values():
                assert each.finish().code != 0
            newest.append(newest_committed(remote, -1))
        gate.passed = None
        before = len(read_rows(nodes.disk("beta").dir.node_events))
        # stop files are looked for once a second
        started = nodes.start(settings=to_store, SECONDS_A_STEP="1.5", **variables)
        wait_until(started, lambda: len(read_rows(nodes.disk("beta").dir.node_events)) > before)
        nodes.disk("beta").dir.stop_file.touch()
        assert [each.finish().code for each in started.values()] == [75, 75]
        finished = nodes.run(settings=to_store, **variables)
        look_back = [sys.executable, "-m", "pretraining.postmortem", "--json"]
        from_store = execute([*look_back, "s3://bucket/runs/run"], **connect_to(address))
        from_node = execute([*look_back, nodes.disk("beta").folder], **connect_to(address))
        exported = RemoteRun("s3://bucket/runs", "run").read("export/model.safetensors")
        records = remote.sizes("nodes")
    for each in finished.values():
        assert each.code == 0, each.output
    run = nodes.disk("alpha")
    assert run.losses == reference.losses and run.samples == reference.samples
    models = [each.dir.export / "model.safetensors" for each in (run, reference)]
    assert models[0].read_bytes() == models[1].read_bytes()
    resumes = [event for event in run.events if event["event"] == "resume"]
    assert [event["checkpoint"] for event in resumes][:2] == newest
    fetches = [event["nodes"] for event in run.events if event["event"] == "fetch"]
    empty = [[node["host"] for node in fetched if node["files"]] for fetched in fetches]
    assert empty[0] == ["beta"] and "alpha" in empty[1]
    # what any node has written is in the store, and an empty disk has replaced nothing of what was there before
    assert exported == (run.dir.export / "model.safetensors").read_bytes()
    hosts = [name.rpartition("-")[0] for name in records]
    assert hosts.count("alpha") == 2 and "beta" in hosts
    assert from_store.code == 0 and from_node.code == 0, from_store.output + from_node.output
    found = json.loads(from_store.stdout)
    lost, ends = [attempt["end"] for attempt in found["attempts"][:2]], ("crash", "hang")
    # gloo seldom misses the end of the other rank: then the watch over hangs ends the survivor
    assert set(lost) <= {*ends} and [each["end"] for each in found["attempts"][2:]] == ["stopped", "finished"]
    # alpha was pulled last: its rank has no error of its own, and beta's has one
    assert found["first"]["rank"] == 0 and "ended without an error" in found["first"]["what"]
    assert json.loads(from_node.stdout) == found
