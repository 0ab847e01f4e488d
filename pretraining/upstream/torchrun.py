"""What torchrun keeps private about how its nodes meet; torch 2.15.0.

- A rendezvous that is over stays closed (`closed_meetings`, `forget_meeting`): its state is a pickled object at
  `torch.rendezvous.ID` of the store, and the values of its rounds are at `torch.rendezvous.ID.ROUND/...`. A store that
  outlives the nodes would turn away everyone who comes again with that id. Held by test_meeting_point.py; may go
  once a closed rendezvous can be opened again.
  A command may take another id instead (`Meeting`), which all nodes find alike: the first that is not over.
- The address of the ranks' store is kept over rounds by every node that is not the first: after the loss or the return
  of the first node the others would look for the old one. A public variable (`MEET_ANEW` of supervise/) has it agreed
  on anew. Held by test_fleet.py; may go once torchrun does so in each round.
"""

import itertools
import pickletools
import socket
from base64 import b64decode
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import get_args_parser

_PREFIX = "torch.rendezvous."
_PORT = 29400
"""Of `--rdzv_backend=c10d`, if none is given."""
_PATIENCE = timedelta(seconds=10)
_SILENCE_SECONDS = 0.5


class Meeting:
    """Where and by which id a torchrun command meets, in a store that a program keeps at that place."""

    def __init__(self, words: list[str]) -> None:
        """words: of the command, as typed."""
        self.words, self.options = words, get_args_parser().parse_args(words[1:])
        self.is_in_a_store = self.options.rdzv_backend == "c10d" and bool(self.options.rdzv_endpoint)

    def over(self) -> dict[str, bytes]:
        """Return {id: state} of those that are over: the command's own, and those that took its place.

        Raises `RuntimeError`: no store answers there; the first line of the message says why.
        """
        place = parse_rendezvous_endpoint(self.options.rdzv_endpoint, _PORT)
        # torch asks again and again for about twice the patience, also a program that is no store
        if _is_no_store(place):
            raise RuntimeError(f"what listens at {place[0]}:{place[1]} is no store of a torchrun")
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        closed, name = closed_meetings(store), self.options.rdzv_id
        # not ".": the values of rounds are at ID.ROUND
        names = (f"{name}-{number}" if number else name for number in itertools.count())
        found = itertools.takewhile(lambda each: f"{_PREFIX}{each}" in closed, names)
        return {each: closed[f"{_PREFIX}{each}"] for each in found}

    def with_open_id(self, over: int) -> list[str]:
        """Return the command with the id that comes after so many which are over."""
        # the last of two equal options counts; the words after the script are not the launcher's
        script = len(self.words) - len(self.options.training_script_args) - 1
        chosen = f"--rdzv_id={self.options.rdzv_id}-{over}"
        return [*self.words[:script], chosen, *self.words[script:]]


def _is_no_store(place: tuple[str, int]) -> bool:
    """Return whether a new connection is closed there, or gets a word: a store waits for its client to begin."""
    with suppress(OSError), socket.create_connection(place, _PATIENCE.total_seconds()) as peer:
        peer.settimeout(_SILENCE_SECONDS)
        try:
            peer.recv(1)
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True
    return False


def closed_meetings(store: TCPStore) -> dict[str, bytes]:
    """Return {key: state} of every rendezvous in the store that is over."""
    # without "/": the others are values of its rounds
    keys = [key for key in store.list_keys() if key.startswith(_PREFIX) and "/" not in key]
    states = {key: store.get(key) for key in keys}
    return {key: state for key, state in states.items() if _is_closed(state)}


def forget_meeting(store: TCPStore, key: str, state: bytes) -> None:
    """Make a rendezvous new, if it still has this state."""
    fresh = C10dRendezvousBackend._NULL_SENTINEL
    # the values of its rounds first: a new round 0 must not find those of the old one
    for each in store.list_keys():
        if each.startswith(f"{key}."):
            store.delete_key(each)
    store.compare_set(key, state.decode(), fresh)


def _is_closed(state: bytes) -> bool:
    """Return whether a pickled state is that of a closed rendezvous. Anybody may write there: nothing is unpickled."""
    if state == C10dRendezvousBackend._NULL_SENTINEL.encode():
        return False
    asked = False
    try:
        for operation, value, _ in pickletools.genops(b64decode(state)):
            if value == "closed":
                asked = True
            elif asked and operation.name in ("NEWTRUE", "NEWFALSE"):
                return operation.name == "NEWTRUE"
    except ValueError:  # no pickle
        return False
    return False
