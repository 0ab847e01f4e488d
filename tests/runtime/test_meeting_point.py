"""Nodes that come again meet again: a rendezvous which is over is forgotten, one that lives is left alone."""

import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from pretraining.errors import UserError
from pretraining.meeting_point import MeetingPoint, open_command
from pretraining.training.ranks import agree_on_name
from pretraining.upstream import torchrun
from pretraining.upstream.torchrun import Meeting
from tests.gear.runs import execute, free_port


@pytest.fixture
def point() -> MeetingPoint:
    return MeetingPoint(free_port(), forget_seconds=0)


def node(point: MeetingPoint, name: str) -> DynamicRendezvousHandler:
    """One node that comes to the point, as torchrun does."""
    store = TCPStore("127.0.0.1", point.store.port, timeout=timedelta(seconds=30))
    patience = RendezvousTimeout(join=timedelta(seconds=20), last_call=timedelta(milliseconds=1))
    meeting = C10dRendezvousBackend(store, name)
    return DynamicRendezvousHandler.from_backend(name, store, meeting, 1, 1, timeout=patience)


def test_a_run_that_is_over_does_not_turn_away_the_next(point):
    """torchrun by itself refuses the id for ever, as long as the store lives."""
    first, other = node(point, "run"), node(point, "other")
    first.next_rendezvous()
    other.next_rendezvous()
    assert point.look() == [] and point.look() == []
    first.shutdown()
    with pytest.raises(RendezvousClosedError):
        node(point, "run").next_rendezvous()
    assert point.look() == ["torch.rendezvous.run"] and point.look() == []
    keys = point.store.list_keys()
    assert not any(key.startswith("torch.rendezvous.run.") for key in keys), keys
    second = node(point, "run")
    assert second.next_rendezvous().rank == 0
    assert not other.is_closed()
    for each in (second, other):
        each.shutdown()


def test_a_meeting_that_stays_over_gets_the_same_new_id_on_all_nodes(point, monkeypatch):
    """In a store of another program, which forgets nothing: RUN, RUN-1, RUN-2. A store that is gone needs none."""
    place = f"--rdzv_endpoint=127.0.0.1:{point.store.port}"
    words = ["torchrun", "--rdzv_backend=c10d", place, "--rdzv-id", "run"]
    words += ["train.py", "--rdzv_id", "of-train.py"]
    assert open_command(words, 0.0) == words, "nobody has met yet"
    for chosen in ("run", "run-1"):
        first = node(point, chosen)
        first.next_rendezvous()
        first.shutdown()
    opened = [*words[:5], "--rdzv_id=run-2", *words[5:]]
    assert open_command(words, 0.0) == opened
    node(point, Meeting(opened).options.rdzv_id).next_rendezvous()
    assert open_command(words, 0.0) == opened, "a node that comes later"
    point.look()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(open_command, words, 30.0)
        while point.look():
            pass
        assert waiting.result() == words, "a meeting point forgets, and all nodes keep the id"
    elsewhere = ["torchrun", "--nproc_per_node=2", "train.py"]
    assert open_command(elsewhere) == elsewhere
    monkeypatch.setattr(torchrun, "_PATIENCE", timedelta(seconds=1))  # torch tries for twice that long
    gone = [word.replace(str(point.store.port), str(free_port())) for word in words]
    assert open_command(gone) == gone


def test_what_is_no_store_is_one_line_at_once():
    """Where torchrun is to meet, another program closes every connection: torch alone prints pages for 20 seconds."""

    def close_all() -> None:
        with suppress(OSError):  # until the listener is closed itself
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=close_all, daemon=True).start()
        place = f"--rdzv_endpoint=127.0.0.1:{listener.getsockname()[1]}"
        words = ["torchrun", "--rdzv_backend=c10d", place, "train.py"]
        asked = execute([sys.executable, "-m", "pretraining.meeting_point", "--open", *words])
        listener.shutdown(socket.SHUT_RDWR)
    assert json.loads(asked.stdout) == words
    assert asked.stderr.count("\n") == 1 and "is no store of a torchrun; the command starts" in asked.stderr


def test_a_port_that_is_taken_is_one_line(point):
    with pytest.raises(UserError, match="is taken on this machine; choose another by --port"):
        MeetingPoint(point.store.port)


RANKS, TIMEOUT = 4, timedelta(seconds=20)


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def names_of(server: TCPStore, first_to_come: int) -> set[str]:
    """What each rank of an attempt takes, of which one comes before all others."""

    def come(rank: int) -> str:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=TIMEOUT)
        time.sleep(0 if rank == first_to_come else 0.2)
        return agree_on_name(client, rank, RANKS, TIMEOUT)

    with ThreadPoolExecutor(RANKS) as threads:
        return set(threads.map(come, range(RANKS)))


def test_every_attempt_has_a_name_of_its_own_on_all_ranks(server):
    """Whoever comes first: what an earlier attempt left in the store is not taken for this one's."""
    attempts = [names_of(server, first) for first in range(RANKS)]
    assert [len(names) for names in attempts] == [1] * RANKS
    assert len(set.union(*attempts)) == RANKS


def test_a_rank_that_does_not_come_is_named(server):
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2, 3\] have not come"):
        agree_on_name(server, 0, RANKS, timedelta(seconds=0.2))
