"""A store for the addresses of an attempt's ranks, without those of the attempt before.

torchrun restarts its workers on one and the same TCPStore (torch 2.13, `DynamicRendezvousHandler.next_rendezvous`;
github.com/pytorch/pytorch/issues/167288): a rank that comes early reads where another listened before it died, and
the restart ends with "connection refused". Restart counts are each agent's own, so that no prefix of them would be
the same everywhere: the ranks agree on one that nobody has used.
"""

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

_POLL_SECONDS = 0.05


def shared_with_the_launcher() -> bool:
    """Whether the launcher's own store, which outlives an attempt, is what the ranks would meet in."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(rank: int, ranks: int, timeout: timedelta) -> Store:
    """The launcher's store below a name of this attempt; every rank must call it."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*place, world_size=ranks, is_master=False, timeout=timeout)
    return PrefixStore(agree_on_name(store, rank, ranks, timeout), store)


def agree_on_name(store: Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """A name that no attempt before has had, the same on every rank.

    Each rank asks under a number of its own, so that no answer to an earlier one is taken for its own.
    Raises `TimeoutError` on rank 0 where a rank does not come.
    """
    if rank == 0:
        return _give_name(store, ranks, timeout)
    question = uuid.uuid4().hex
    store.set(f"attempt/asks/{rank}", question)
    name = store.get(f"attempt/answers/{question}").decode()
    store.set(f"attempt/has/{name}/{rank}", "yes")
    return name


def _give_name(store: Store, ranks: int, timeout: timedelta) -> str:
    """Answer the newest question of each rank, again and again, until all of them have the name."""
    name, missing = uuid.uuid4().hex, set(range(1, ranks))
    until = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([f"attempt/asks/{rank}"]):
                store.set(f"attempt/answers/{store.get(f'attempt/asks/{rank}').decode()}", name)
            if store.check([f"attempt/has/{name}/{rank}"]):
                missing.remove(rank)
        if missing and time.monotonic() > until:
            raise TimeoutError(f"ranks {sorted(missing)} have not come within {timeout}")
        time.sleep(_POLL_SECONDS if missing else 0)
    return name
