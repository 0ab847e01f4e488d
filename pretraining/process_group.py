"""Which of the ranks this process is, and whether those of other hosts can reach it."""

import ipaddress
import os
import socket

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The network interface that gloo listens on; without it, the one to which the host's own name leads."""


def rank_and_world_size() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) for a process without a group."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def loopback_name() -> str | None:
    """This host's own name if gloo would listen under it where no other host can reach it; None if all is well.

    Gloo takes the first address of the name that this host can listen on, and the loopback address if there is none
    (torch 2.13, `ProcessGroupGloo::createDefaultDevice`). On Debian and Ubuntu, /etc/hosts gives the name to 127.0.1.1.
    """
    if os.environ.get(GLOO_INTERFACE):
        return None
    usable = own_address()
    outside = usable is not None and not ipaddress.ip_address(usable.partition("%")[0]).is_loopback
    return None if outside else socket.gethostname()


def own_address() -> str | None:
    """The first address of this host's own name on which it can listen; None if it has none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return next((address[0] for family, *_, address in found if _can_listen(family, address)), None)


def _can_listen(family: int, address: tuple) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
    except OSError:
        return False
    return True
