"""Check what ranks send each other: does every pair meet, and how fast are the messages that training waits for?

All pairs of nodes and all pairs of ranks inside each node meet as the run's ranks will. They connect by the address
that gloo binds to, then form a process group of two and make an all-reduce over gloo, and on GPUs another over NCCL.
Pairs of one round are disjoint, so that a round takes as long as its slowest pair. All-reduce and all-gather are then
measured by size, as nccl-tests states them.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.roll_call import FAILED, RollCall, one_line
from pretraining.planning.gpus import Gpu
from pretraining.planning.quantities import duration, num_bytes, several
from pretraining.runtime.host import GLOO_INTERFACE, loopback_name, own_address

PAIRS = "pairs of ranks"
CONNECT_SECONDS = 3.0
"""A host in the same data centre answers within milliseconds; a firewall that drops packets never does."""
GLOO_SECONDS = 3.0
"""Timeout of gloo, which tries for five times as long (torch 2.13)."""
PAIR_SECONDS = 25.0
"""Limit of one round, with both connections and both groups; NCCL needs about a second for its first group."""
ALL_PAIRS_SECONDS = 50.0
"""No further round begins later than this."""
SIZES_ON_GPU = tuple(1 << power for power in range(10, 30, 2))
"""1 KiB to 256 MiB: from a grad norm to a bucket of gradients."""
SIZES_ELSEWHERE = tuple(1 << power for power in range(10, 24, 4))
SWEEP_SECONDS = 20.0
"""Limit of both kinds of messages together; a slow network is then measured at smaller sizes only."""
SAMPLE_SECONDS = 0.3
MOST_REPEATS = 200
HALF_OF_THE_LINK = 0.5
"""At the largest size NCCL reaches 0.7 to 0.9 of a healthy link (nccl-tests, PERFORMANCE.md); less than half is another
path than the plan counts on: PCIe for NVLink, TCP for InfiniBand, one network card for eight."""
SLOW_ANSWER_SECONDS = 1e-3
"""A small all-reduce takes 0.02 to 0.1 ms over NVLink or InfiniBand; a millisecond is TCP, or a busy processor."""
OTHER_PATH = (
    "nvidia-smi topo -m shows what joins the GPUs; NCCL_DEBUG=INFO which way NCCL takes (P2P, SHM or NET)"
)
OTHER_NETWORK = (
    "NCCL_DEBUG=INFO says NET/IB or NET/Socket: for InfiniBand install its driver and leave NCCL_IB_DISABLE unset; "
    "name the cards by NCCL_IB_HCA; set the network's rate in pretraining/planning/tables/gpus.json to yours"
)
Pair = tuple[int, int]


def meet_in_pairs(call: RollCall, address: str, on_gpu: bool) -> list[Finding]:
    """Let all pairs meet; return one finding for those that met, and one for each two hosts that could not.

    Args:
        address: the one on which this rank listens, as `bound_address` says.

    Raises:
        Stuck: a pair hangs inside a library; the error holds the ranks that did not answer.
    """
    began, failed, met, slowest = time.monotonic(), {}, 0, 0.0
    # Rounds that meet between nodes come first: what is left out are pairs inside a node.
    rounds = rounds_of(call.nodes)
    left_out = len(rounds)
    for number, pairs in enumerate(rounds):
        # by the clock of rank 0: a rank that left out a round alone would keep its partner waiting
        if call.gather("time of pairs", time.monotonic() - began)[0] > ALL_PAIRS_SECONDS:
            break
        left_out -= 1
        # Names of the store are new in every round: nobody reads the address of the round before.
        meeting = _Meeting(PrefixStore(f"pairs/{number}", call.work_store), call.rank, address, on_gpu)
        ours = next((pair for pair in pairs if call.rank in pair), None)
        answers = call.step(
            f"pairs of ranks, round {number + 1}", lambda m=meeting, p=ours: p and m.of(p), PAIR_SECONDS
        )
        for pair in pairs:
            errors = [answers[rank].error for rank in pair if answers[rank].state == FAILED]
            if errors:
                failed[pair] = errors
            else:
                met += 1
                slowest = max(slowest, *(answers[rank].value["round_trip_seconds"] for rank in pair))
    findings = _not_met(call, failed)
    if met:
        nodes, values = several(len(call.nodes), "node"), {"pairs": met, "round_trip_seconds": slowest}
        message = f"{several(met, 'pair')} of ranks on {nodes} met; a byte there and back took at most "
        message += duration(slowest)
        verdict, remedy = FINE, ""
        if left_out:
            message += f"; {several(left_out, 'round')} of pairs left out, the time was over"
            verdict, remedy = COSTS, "meetings are slow here: see the remedies of other lines"
        findings.append(Finding(PAIRS, verdict, message, remedy, values=values))
    return findings


def rounds_of(nodes: list[list[int]]) -> list[list[Pair]]:
    """Plan rounds of disjoint pairs: ranks of the same local number of each two nodes, and each two ranks of a node."""
    by_round = [tournament(len(ranks)) for ranks in nodes]
    inside = [
        [
            (ranks[a], ranks[b])
            for ranks, pairs in zip(nodes, by_round, strict=True)
            if number < len(pairs)
            for a, b in pairs[number]
        ]
        for number in range(max(map(len, by_round), default=0))
    ]
    across = [
        [pair for a, b in pairs for pair in zip(nodes[a], nodes[b], strict=False)]
        for pairs in tournament(len(nodes))
    ]
    return across + inside


def tournament(players: int) -> list[list[Pair]]:
    """Plan rounds in which each player meets every other once: one stays, the others move by one place."""
    # The circle method of round-robin tournaments; who faces None has a pause.
    places: list[int | None] = [*range(players)]
    if players % 2:
        places.append(None)
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def bound_address() -> dict:
    """Find what gloo binds here, and how this host reaches rank 0: {"address", "interface", "loopback"}.

    gloo takes the interface of GLOO_SOCKET_IFNAME, else the host's own name, else the loopback (see `loopback_name`).
    """
    import psutil  # comes with DeepSpeed

    interfaces = {
        each.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
    chosen = os.environ.get(GLOO_INTERFACE, "").split(",")[0]
    address = next((address for address, name in interfaces.items() if name == chosen), None)
    address = address or own_address() or "127.0.0.1"
    outward = ""
    # To connect a UDP socket sends nothing; it only chooses the address on the way. 9 is the port "discard".
    with suppress(OSError, KeyError):
        family, kind, _, _, rank_0 = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(rank_0)
            outward = interfaces.get(probe.getsockname()[0], "")
    interface = "" if outward == "lo" else outward  # rank 0 is on this host: the way to others is not known
    return {"address": address, "interface": interface, "loopback": loopback_name() is not None}


class _Meeting:
    """Do one rank's part of one round."""

    def __init__(self, store: Store, rank: int, address: str, on_gpu: bool):
        self.store, self.rank, self.address, self.on_gpu = store, rank, address, on_gpu

    def of(self, pair: Pair) -> dict:
        """Meet the other rank of the pair; return {"round_trip_seconds": of one byte there and back}.

        Raises:
            ConnectionError: one way is closed; the message says which.
        """
        seconds = self._connect(pair[1] if self.rank == pair[0] else pair[0])
        self._reduce(pair, "gloo", "cpu")
        if self.on_gpu:
            self._reduce(pair, "nccl", "cuda")
        return {"round_trip_seconds": seconds}

    def _connect(self, other: int) -> float:
        """Listen, and connect to the other's address: both ways, because a firewall may be open in only one."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        # port 0: the system chooses a free one
        with closing(socket.create_server((self.address, 0), family=family)) as listener:
            listener.settimeout(CONNECT_SECONDS)
            self.store.set(f"listens/{self.rank}", f"{self.address} {listener.getsockname()[1]}")
            host, port = self._wait_for(f"listens/{other}", CONNECT_SECONDS).split()
            # Both report how it went before either leaves: else the other would blame its own way.
            error = ""
            try:
                outward = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
            except OSError as refused:
                error = f"cannot connect to {host} (TCP, port {port}): {refused}"
            self.store.set(f"tried/{self.rank}", error)
            if self._wait_for(f"tried/{other}", 2 * CONNECT_SECONDS) or error:
                raise ConnectionError(error or "reaches the other, which does not reach this one")
            with closing(outward), closing(listener.accept()[0]) as inward:
                for connection in (outward, inward):
                    connection.settimeout(CONNECT_SECONDS)
                # one byte there and back; each side asks on its own connection and answers on the other
                began = time.perf_counter()
                outward.sendall(b"?")
                inward.sendall(inward.recv(1))
                outward.recv(1)
                return time.perf_counter() - began

    def _wait_for(self, key: str, seconds: float) -> str:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except DistError as error:
            raise ConnectionError(f"the other does not answer within {seconds:g} s") from error
        return self.store.get(key).decode()

    def _reduce(self, pair: Pair, library: str, device: str) -> None:
        """Make a process group of the two, as the run makes one of all ranks, and sum over it."""
        # NCCL's watchdog would abort the process at its limit; the roll call ends the step long before.
        seconds = GLOO_SECONDS if library == "gloo" else 10 * PAIR_SECONDS
        store, rank = PrefixStore(library, self.store), pair.index(self.rank)
        try:
            dist.init_process_group(
                library, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=seconds)
            )
            summed = torch.tensor(self.rank, device=device)
            dist.all_reduce(summed)
            found = int(summed)
        except (RuntimeError, DistError) as error:
            raise ConnectionError(f"{library} does not work: {one_line(error)}") from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        if found != sum(pair):
            raise ConnectionError(f"{library} sums {sum(pair)} as {found}")


def _not_met(call: RollCall, failed: dict[Pair, list[str]]) -> list[Finding]:
    """Make one finding for each two hosts, with the first of their pairs."""
    # A firewall is one cause for all pairs of two hosts.
    by_hosts: dict[tuple[str, str], list[Pair]] = {}
    for pair in failed:
        by_hosts.setdefault((call.hosts[pair[0]], call.hosts[pair[1]]), []).append(pair)
    findings = []
    for pairs in by_hosts.values():
        one, other = (str(call.ranks[rank]) for rank in pairs[0])
        more = f" (and {several(len(pairs) - 1, 'more pair')} of these hosts)" if len(pairs) > 1 else ""
        message = f"{one} and {other} cannot meet{more}: {'; '.join(dict.fromkeys(failed[pairs[0]]))}"
        findings.append(Finding(PAIRS, BREAKS, message, _pair_remedy(failed[pairs[0]]), f"{one}, {other}"))
    return findings


def _pair_remedy(errors: list[str]) -> str:
    said, interface = " ".join(errors), bound_address()["interface"] or "eth0"
    if "nccl " in said:
        # By the commonest cause first: each is tried alone, and left out again if it does not help.
        return (
            f"export NCCL_DEBUG=INFO says why; try export NCCL_SOCKET_IFNAME={interface}, NCCL_IB_DISABLE=1 (without "
            "InfiniBand), and inside one node NCCL_P2P_DISABLE=1 or a larger /dev/shm"
        )
    names = f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"
    return f"open all TCP ports between the two (firewall, security group), or name the network's interface: {names}"


def measure_messages(call: RollCall, gpu: Gpu | None, on_gpu: bool) -> list[Finding]:
    """Measure each kind of message, and compare with the link's peak if the GPU is known. Needs the process group."""
    if call.size == 1:  # nobody to send to
        return []
    name = "all-reduce and all-gather by size"
    measured = call.values(name, lambda: _messages_by_size(on_gpu), 2 * SWEEP_SECONDS)
    findings = []
    for kind in measured[0]:
        # A message is over when its slowest rank has it.
        slowest = {int(size): max(each[kind][size] for each in measured) for size in measured[0][kind]}
        findings.append(_judge(call, kind, slowest, gpu, on_gpu))
    return findings


def _messages_by_size(on_gpu: bool) -> dict[str, dict[str, float]]:
    """Return {message: {bytes: seconds of one}}, up to the size for which there is time; every rank calls it."""
    ranks, device = dist.get_world_size(), "cuda" if on_gpu else "cpu"
    sizes, until = SIZES_ON_GPU if on_gpu else SIZES_ELSEWHERE, time.monotonic() + SWEEP_SECONDS

    def all_reduce(size: int) -> Callable[[], object]:
        # fp32: 4 bytes a number
        message = torch.zeros(size // 4, device=device)
        return lambda: dist.all_reduce(message)

    def all_gather(size: int) -> Callable[[], object]:
        part = torch.zeros(max(1, size // 4 // ranks), device=device)
        whole = torch.empty(len(part) * ranks, device=device)
        return lambda: dist.all_gather_into_tensor(whole, part)

    # time that the first kind leaves over goes to the second
    half = time.monotonic() + SWEEP_SECONDS / 2
    return {
        "all-reduce": _by_size(all_reduce, sizes, half),
        "all-gather": _by_size(all_gather, sizes, until),
    }


def _by_size(
    prepare: Callable[[int], Callable[[], object]], sizes: tuple[int, ...], until: float
) -> dict[str, float]:
    seconds: dict[str, float] = {}
    expected = 0.0
    for size in sizes:
        expected, late = largest_of_ranks(expected, time.monotonic() + 2 * expected - until)
        if late > 0:
            break
        # expected from the size before: its time grows no faster than the size
        repeats = min(MOST_REPEATS, max(1, int(SAMPLE_SECONDS / max(expected, 1e-6))))
        send = prepare(size)
        send()  # connections and buffers are made at the first message of a size
        began = now_of_device()
        for _ in range(repeats):  # one after another without a wait, as gradients of a step
            send()
        seconds[str(size)] = (now_of_device() - began) / repeats
        expected = seconds[str(size)] * sizes[1] / sizes[0]
    return seconds


def now_of_device() -> float:
    """Return the seconds of a clock when this rank's GPU, if it has one, has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def largest_of_ranks(*values: float) -> list[float]:
    """Return the largest of all ranks for each value, so that ranks decide the same although their clocks differ."""
    shared = torch.tensor(values, dtype=torch.float64, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.tolist()


def bus_bandwidth(kind: str, size: int, seconds: float, ranks: int) -> float:
    """Compute the bytes per second that each link carries, for any number of ranks (nccl-tests, PERFORMANCE.md).

    Args:
        size: bytes of the whole message; for an all-gather, what every rank has at the end.
    """
    share = (ranks - 1) / ranks
    # an all-reduce passes each part around the ring twice, to sum it and to share it
    return size / seconds * (2 * share if kind == "all-reduce" else share)


def link_peak(gpu: Gpu, nodes: list[list[int]]) -> tuple[float, str]:
    """Return the most that the bus bandwidth can be, in bytes per second, and the name of the link.

    Between nodes a ring passes once through each node, so all its network cards together carry what one GPU's link
    carries.
    """
    if len(nodes) == 1:
        return gpu.link_bytes_per_second, gpu.link
    network = gpu.network_bytes_per_second * min(len(node) for node in nodes)
    if network < gpu.link_bytes_per_second:
        return network, "the network"
    return gpu.link_bytes_per_second, gpu.link


def _judge(call: RollCall, kind: str, slowest: dict[int, float], gpu: Gpu | None, on_gpu: bool) -> Finding:
    """Judge one kind of message.

    slowest: {bytes: seconds on the slowest rank}.
    """
    largest, smallest = max(slowest), min(slowest)
    rates = {size: bus_bandwidth(kind, size, seconds, call.size) for size, seconds in slowest.items()}
    # The largest message shows the link, the smallest the way to it.
    rate, answer = rates[largest], slowest[smallest]
    name = kind.replace("-", "_")
    values = {
        f"{name}_bytes_per_second": rate,
        f"{name}_seconds_of_smallest": answer,
        f"{name}_bytes_per_second_by_size": {str(size): value for size, value in rates.items()},
    }
    message = f"{num_bytes(rate)}/s of bus bandwidth at {num_bytes(largest)}"
    verdict, remedies = FINE, []
    if gpu is not None:
        peak, link = link_peak(gpu, call.nodes)
        values[f"{name}_share_of_peak"] = rate / peak
        message += f", {rate / peak:.0%} of {num_bytes(peak)}/s ({gpu.name}: {link})"
        if rate < HALF_OF_THE_LINK * peak:
            verdict = COSTS
            remedies.append(OTHER_PATH if len(call.nodes) == 1 else OTHER_NETWORK)
    message += f"; {num_bytes(smallest)} take {duration(answer)}"
    if on_gpu and answer > SLOW_ANSWER_SECONDS:
        verdict = COSTS
        remedies.append(
            "small messages are slow: bind each rank to the cores near its GPU, look for other load"
        )
    message = f"{several(call.size, 'rank')}: {message}"
    return Finding(kind, verdict, message, "; ".join(remedies), values=values)
