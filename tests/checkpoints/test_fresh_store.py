"""Promise: a run that is started again goes on. torchrun's restarts meet in the store that the dead ranks used."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from pretraining.training.ranks import agree_on_name

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
