"""What torchrun keeps private about how its nodes meet; torch 2.13.0.

- A rendezvous that is over stays closed (`closed_meetings`, `forget_meeting`): its state is a pickled object at
  `torch.rendezvous.ID` of the store, and the values of its rounds are at `torch.rendezvous.ID.ROUND/...`. A store that
  outlives the nodes would turn away everyone who comes again with that id. Held by tests/test_meeting_point.py; may go
  once a closed rendezvous can be opened again.
- The address of the ranks' store is kept over rounds by every node that is not the first: after the loss or the return
  of the first node the others would look for the old one. A public variable (`MEET_ANEW` of supervise.py) has it agreed
  on anew. Held by tests/test_elastic.py; may go once torchrun does so in each round.
"""

import pickletools
from base64 import b64decode

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

_PREFIX = "torch.rendezvous."


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
    """Say if a pickled state is that of a closed rendezvous; nothing is unpickled, because anybody may write there."""
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
