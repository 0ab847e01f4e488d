"""Check the ranks that a launcher started: do all come, meet and agree, and are messages and products fast enough?

Every rank makes the same steps in the same order. If a step does not end on some rank, the examination ends with that
rank's name, and what was found until then is reported.

All pairs of nodes and all pairs of ranks inside each node meet as the run's ranks will. They connect by the address
that gloo binds to, then form a process group of two and make an all-reduce over gloo, and on GPUs another over NCCL.
Pairs of one round are disjoint, so that a round takes as long as its slowest pair.
"""

import os
import socket
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from itertools import chain, zip_longest

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from pretraining.command_line import world_size_here
from pretraining.doctor import rates, shared
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding, as_lines, of_all_nodes, worst
from pretraining.doctor.gpus import Gpus
from pretraining.doctor.launch import Launch, plan_launch
from pretraining.doctor.layers import examine_layers
from pretraining.doctor.roll_call import FAILED, SILENT, WAITS, RollCall, Stuck, named, one_line
from pretraining.planning.gpus import known_gpu
from pretraining.planning.quantities import duration, several
from pretraining.runtime.exit_codes import tell_exit_code
from pretraining.runtime.host import GLOO_INTERFACE, own_address
from pretraining.training.ranks import device_name, join_ranks, leave_ranks, prepare_rank

ARRIVAL_SECONDS = 60.0
"""Time between the imports of the first and of the last rank: importing torch from a cold network folder takes long."""
ALL_SECONDS = 175.0
"""Limit of the whole examination; a step for which no time is left is reported as left out."""
LAYERS_SECONDS = 60.0
STEP_SECONDS = 20.0
"""Limit of a step that takes a second on a healthy cluster."""
DESCRIBE_SECONDS = 60.0
"""Limit of the step in which eight ranks start CUDA at once, and call git on a network folder."""
JOIN_SECONDS = 60.0
"""Limit of the step in which NCCL makes its first group, of hundreds of ranks."""
PAIRS = "pairs of ranks"
CONNECT_SECONDS = 3.0
"""A host in the same data centre answers within milliseconds; a firewall that drops packets never does."""
GLOO_SECONDS = 3.0
"""Timeout of gloo, which tries for five times as long (torch 2.13)."""
PAIR_SECONDS = 25.0
"""Limit of one round, with both connections and both groups; NCCL needs about a second for its first group."""
ALL_PAIRS_SECONDS = 50.0
"""No further round begins later than this."""
Pair = tuple[int, int]


def examine_cluster(options: Namespace, machine: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Examine the ranks that a launcher started, together; every rank calls it; `UserError` if rank 0 is not reached.

    Rank 0 reports its progress on stderr. What libraries print goes there too, from all ranks.
    machine: what this rank has found about its node, if it is the node's first; else empty.

    Returns:
        The findings of all nodes about themselves, and those about the ranks together; complete on rank 0 only.
    """
    # its GPUs, and a recipe that is refused, are lines of the machine: the ranks can be examined without
    launch, _ = plan_launch(options, Gpus())
    # What libraries print goes to stderr, and stdout is kept for the answer. By the descriptor, since some of them
    # print from C++, past sys.stdout.
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        examination = Examination(launch, machine)
        examination.run()
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
    return examination.of_nodes, examination.findings


def end_rank(code: int) -> None:
    """End this process at once with this exit code, which a supervisor learns whatever the launcher returns."""
    if code:
        tell_exit_code(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread may hang inside a library, and an orderly end would wait for it for ever.
    os._exit(code)


class Examination:
    """Make one rank's part of the examination; its findings are complete on rank 0 only."""

    def __init__(self, launch: Launch, machine: list[Finding]):
        self.launch, self.recipe = launch, launch.recipe
        self.of_nodes = machine
        """Findings of the nodes about themselves: only of this node until all nodes have sent theirs."""
        self.rank, self.size = int(os.environ["RANK"]), world_size_here()
        self.on_gpu, self.gpu = torch.cuda.is_available(), None
        self.findings: list[Finding] = []
        self.began = time.monotonic()

    def run(self) -> None:
        self._say(f"waiting for {several(self.size, 'rank')}")
        self.call = RollCall(self.rank, self.size, ARRIVAL_SECONDS)
        gone = [rank for rank, came in enumerate(self.call.ranks) if came is None]
        if gone:
            self._add_missing(gone)
        else:
            try:
                self._alike()
                # Folders first: their checks need no connection between the ranks.
                self._in_folders()
                self._between_ranks()
            except Stuck as stuck:
                self._add_stuck(stuck)
                # rank 0 must not wait for these when it leaves
                gone = [rank for rank, answer in enumerate(stuck.answers) if answer.state == SILENT]
        self.call.part(gone)

    def _alike(self) -> None:
        """Compare versions, variables, devices and clocks, and merge what the first rank of each node has found."""

        def describe() -> dict:
            prepare_rank()
            self.gpu = known_gpu(device_name()) if self.on_gpu else None
            return shared.describe_rank(self.on_gpu)

        self._step("versions, variables, devices", describe, shared.compare_ranks, DESCRIBE_SECONDS)
        # empty on ranks other than 0
        found = self.call.collect("the nodes", [asdict(each) for each in self.of_nodes])
        first = [node[0] for node in self.call.nodes] if found else []
        of_nodes = [[Finding(**fields) for fields in found[rank]] for rank in first]
        self.of_nodes = of_all_nodes([self.call.hosts[rank] for rank in first], of_nodes)
        self._add("clocks", partial(shared.compare_clocks, self.call))

    def _in_folders(self) -> None:
        # a name that all agree on: rank 0's
        token = self.call.gather("token", uuid.uuid4().hex[:8])[0]
        probed = shared.ProbedFolder(self.launch.run_folder, self.rank, token)
        upload, plan = self.recipe and self.recipe.checkpoints.upload, self.launch.plan
        size = shared.BYTES_ON_GPU_MACHINES if self.on_gpu else shared.BYTES_ELSEWHERE
        in_folder = partial(self._step, remedy="--output_dir FOLDER, another one")
        look = partial(in_folder, shared.RUN_FOLDER, seconds=shared.LOOK_SECONDS + 5)
        judge_looks = partial(shared.judge_run_folder, probed.folder, upload)
        judge_speed = partial(shared.judge_disk, plan and plan.checkpoint_bytes)
        try:
            fine = look(probed.leave_token) == FINE
            fine = fine and look(lambda: probed.look_for(self.size), judge_looks) == FINE
            # a speed means nothing if the ranks write to different folders
            if fine:
                write = partial(probed.write_and_read, size)
                in_folder(shared.DISK, write, judge_speed, 3 * shared.DISK_SECONDS)
        finally:
            # also if a step raises: nothing of ours stays in the run folder
            probed.clear()
        if self.recipe is not None:
            place = self.launch.data_dir, self.recipe.data.name
            judge = partial(shared.judge_data, place)
            self._step("shared data", lambda: shared.manifest_of(*place), judge)

    def _between_ranks(self) -> None:
        """Check what needs ranks that meet, and then what needs a process group of all ranks."""
        meet = partial(meet_in_pairs, self.call, bound_address()["address"], self.on_gpu)
        if self._add(PAIRS, meet) == BREAKS:
            return self._say("the rest is left out: it needs ranks that meet")
        if self._step("process group of all ranks", join_ranks, seconds=JOIN_SECONDS) != FINE:
            return
        gpu, products = (self.gpu, self.on_gpu), rates.products_of(self.recipe, self.on_gpu)
        if self.size > 1:  # else there is nobody to send to
            name, send = "all-reduce and all-gather by size", partial(rates.messages_by_size, self.on_gpu)
            self._step(name, send, partial(rates.judge_all_messages, *gpu), 2 * rates.SWEEP_SECONDS)
        measure = partial(rates.measure_rank, products, self.on_gpu)
        judge = partial(rates.judge_devices, products, *gpu)
        self._step("products and copies", measure, judge, rates.DEVICE_SECONDS)
        if self.recipe is not None:
            left, found = max(1.0, self._left()), []
            of_run = self.recipe, self.launch.ds_config, self.size, min(LAYERS_SECONDS, left)
            # every rank finds the same
            train, judge = lambda: found.extend(examine_layers(*of_run, self._say)), lambda *_: found
            self._step("the recipe's layers", train, judge, left)
        # a step too, because it may hang as any collective
        name = "leaving the process group"
        self.findings += self.call.failures(name, self.call.step(name, leave_ranks, STEP_SECONDS))

    def _step(
        self,
        name: str,
        work: Callable[[], object],
        judge: Callable[[RollCall, list], list[Finding]] = lambda call, values: [],
        seconds: float = STEP_SECONDS,
        remedy: str = "",
    ) -> str:
        """Do `work` on every rank, and add what is found of its results, or a finding for each rank that failed.

        Return the worst verdict. remedy: for errors that name none.
        """

        def examine() -> list[Finding]:
            answers = self.call.step(name, work, seconds)
            failures = self.call.failures(name, answers, remedy)
            return failures or judge(self.call, [answer.value for answer in answers])

        return self._add(name, examine)

    def _add(self, name: str, examine: Callable[[], list[Finding]]) -> str:
        """Add what is found to all findings, unless the time is over; return the worst verdict."""
        self._say(name)
        if self._left() > 0:
            found = examine()
        else:
            remedy = "see what took so long in the lines above"
            found = [Finding(name, COSTS, "left out: the time was over", remedy)]
        self.findings += found
        return worst(found)

    def _left(self) -> float:
        """Return the seconds that are left, the same number on every rank: by the clock of rank 0."""
        # All ranks call it at the same places: a rank that left a step out would keep the others waiting.
        return self.call.gather("time that is left", self.began + ALL_SECONDS - time.monotonic())[0]

    def _add_missing(self, missing: list[int]) -> None:
        hosts = ", ".join(sorted({rank.host for rank in self.call.ranks if rank is not None}))
        # in short: `3, 8 to 15`
        firsts = [rank for rank in missing if rank - 1 not in missing]
        lasts = [rank for rank in missing if rank + 1 not in missing]
        ends = zip(firsts, lasts, strict=True)
        numbers = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ends)
        what = f"{several(len(missing), 'rank')} of {self.size} never came within {ARRIVAL_SECONDS:.0f} s: "
        what += f"{numbers}; there are ranks on {hosts}"
        remedy = "see that every node was started, with the same --master_addr and port, "
        remedy += "and what its log says"
        where = f"rank{'s' * (len(missing) > 1)} {numbers}"
        self.findings.append(Finding("arrival", BREAKS, what, remedy, where))

    def _add_stuck(self, stuck: Stuck) -> None:
        """Report the likely cause: a rank that failed, else one that is gone, else ranks that wait for each other."""
        silent, failed, waits = (
            named(self.call.ranks, [rank for rank, each in enumerate(stuck.answers) if each.state == state])
            for state in (SILENT, FAILED, WAITS)
        )
        waiting = f"; {waits} waited {stuck.seconds:.0f} s for it" if waits else ""
        if failed:
            error = next(answer.error for answer in stuck.answers if answer.state == FAILED)
            what, where = f"{failed} failed ({error}){waiting}", failed
            remedy = "mend what the error says; the other ranks wait for this one"
        elif silent:
            what, where = f"{silent} stopped answering{waiting}", silent
            remedy = "look at that process and its host: stopped, out of memory, or its network is gone"
        else:
            what, where = f"hangs on {waits} (for {stuck.seconds:.0f} s)", waits
            remedy = "NCCL_DEBUG=INFO says where; try NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1, "
            remedy += "NCCL_P2P_DISABLE=1"
        self.findings.append(Finding(stuck.step, BREAKS, what, remedy, where))
        if self.rank == 1 and stuck.answers[0].state == SILENT:  # rank 0 reports everything else
            print(as_lines(self.findings[-1:]), file=sys.stderr, flush=True)

    def _say(self, what: str) -> None:
        if self.rank == 0:
            print(f"doctor: {time.monotonic() - self.began:5.1f} s: {what}", file=sys.stderr, flush=True)


def bound_address() -> dict:
    """Find what gloo binds here, and how this host reaches rank 0: {"address", "interface"}.

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
        family, kind, *_, rank_0 = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(rank_0)
            outward = interfaces.get(probe.getsockname()[0], "")
    interface = "" if outward == "lo" else outward  # rank 0 is on this host: the way to others is not known
    return {"address": address, "interface": interface}


def meet_in_pairs(call: RollCall, address: str, on_gpu: bool) -> list[Finding]:
    """Let all pairs meet; return one finding for those that met, and one for each two hosts that could not.

    address: the one on which this rank listens, as `bound_address` says.
    """
    began, failed, met = time.monotonic(), {}, []
    # Rounds that meet between nodes come first: what is left out are pairs inside a node.
    rounds = rounds_of(call.nodes)
    left_out = len(rounds)
    for number, pairs in enumerate(rounds):
        # by the clock of rank 0: a rank that left out a round alone would keep its partner waiting
        if call.gather("time of pairs", time.monotonic() - began)[0] > ALL_PAIRS_SECONDS:
            break
        left_out -= 1
        # Names of the store are new in every round: nobody reads the address of the round before.
        store = PrefixStore(f"pairs/{number}", call.work_store)
        ours = next((pair for pair in pairs if call.rank in pair), None)
        name = f"{PAIRS}, round {number + 1}"
        work = partial(_meet, store, call.rank, ours, address, on_gpu) if ours else lambda: None
        answers = call.step(name, work, PAIR_SECONDS)
        for pair in pairs:
            if errors := [answers[rank].error for rank in pair if answers[rank].state == FAILED]:
                failed[pair] = errors
            else:
                met.append(max(answers[rank].value for rank in pair))
    # a firewall is one cause for all pairs of two hosts: one finding, with the first of their pairs
    by_hosts: dict[tuple[str, str], list[Pair]] = {}
    for pair in failed:
        by_hosts.setdefault((call.hosts[pair[0]], call.hosts[pair[1]]), []).append(pair)
    findings = []
    for pairs in by_hosts.values():
        one, other = (str(call.ranks[rank]) for rank in pairs[0])
        more = f" (and {several(len(pairs) - 1, 'more pair')} of these hosts)" if len(pairs) > 1 else ""
        what = f"{one} and {other} cannot meet{more}: {'; '.join(dict.fromkeys(failed[pairs[0]]))}"
        findings.append(Finding(PAIRS, BREAKS, what, pair_remedy(failed[pairs[0]]), f"{one}, {other}"))
    if met:
        values = {"pairs": len(met), "round_trip_seconds": max(met)}
        what = f"{several(len(met), 'pair')} of ranks on {several(len(call.nodes), 'node')} met; "
        what += f"a byte there and back took at most {duration(max(met))}"
        remedy = "meetings are slow here: see the remedies of other lines" if left_out else ""
        what += f"; {several(left_out, 'round')} of pairs left out, the time was over" if left_out else ""
        findings.append(Finding(PAIRS, COSTS if left_out else FINE, what, remedy, values=values))
    return findings


def pair_remedy(errors: list[str]) -> str:
    said, interface = " ".join(errors), bound_address()["interface"] or "eth0"
    if "nccl " in said:
        # By the commonest cause first: each is tried alone, and left out again if it does not help.
        ways = f"NCCL_SOCKET_IFNAME={interface}, NCCL_IB_DISABLE=1 (without InfiniBand)"
        ways += ", and inside one node NCCL_P2P_DISABLE=1 or a larger /dev/shm"
        return f"export NCCL_DEBUG=INFO says why; try export {ways}"
    names = f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"
    return f"open all TCP ports between the two (firewall, security group), or name the network's interface: {names}"


def rounds_of(nodes: list[list[int]]) -> list[list[Pair]]:
    """Plan rounds of disjoint pairs: ranks of the same local number of each two nodes, and each two ranks of a node."""
    rounds = tournament(len(nodes))
    across = [[pair for a, b in pairs for pair in zip(nodes[a], nodes[b], strict=False)] for pairs in rounds]
    of_nodes = ([[(node[a], node[b]) for a, b in pairs] for pairs in tournament(len(node))] for node in nodes)
    return across + [list(chain.from_iterable(pairs)) for pairs in zip_longest(*of_nodes, fillvalue=())]


def tournament(players: int) -> list[list[Pair]]:
    """Plan rounds in which every two of so many players meet once, and nobody twice in a round."""
    # of an odd number those meet whose numbers add up to that of the round; who would face itself pauses, or meets the
    # last of an even number
    odd = players - 1 if players % 2 == 0 else players
    rounds = []
    for number in range(odd):
        facing = [(player, (number - player) % odd) for player in range(odd)]
        alone = [(one, odd) for one, other in facing if one == other and odd < players]
        rounds.append([(one, other) for one, other in facing if one < other] + alone)
    return rounds


def _meet(store: Store, rank: int, pair: Pair, address: str, on_gpu: bool) -> float:
    """Do one rank's part of one round: meet the other of the pair; return the seconds of one byte there and back.

    `ConnectionError` says which way is closed.
    """
    seconds = _connect(store, rank, pair[1] if rank == pair[0] else pair[0], address)
    # process groups of the two, as the run makes one of all ranks, and a sum over each; NCCL's watchdog would abort the
    # process at its limit: the roll call ends the step long before
    nccl = [("nccl", "cuda", 10 * PAIR_SECONDS)] if on_gpu else []
    for library, device, limit in [("gloo", "cpu", GLOO_SECONDS), *nccl]:
        place = {"store": PrefixStore(library, store), "rank": pair.index(rank), "world_size": 2}
        try:
            dist.init_process_group(library, **place, timeout=timedelta(seconds=limit))
            summed = torch.tensor(rank, device=device)
            dist.all_reduce(summed)
            found = int(summed)
        except (RuntimeError, DistError) as error:
            raise ConnectionError(f"{library} does not work: {one_line(error)}") from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        if found != sum(pair):
            raise ConnectionError(f"{library} sums {sum(pair)} as {found}")
    return seconds


def _connect(store: Store, rank: int, other: int, address: str) -> float:
    """Listen, and connect to the other's address: both ways, because a firewall may be open in only one."""

    def wait_for(key: str, seconds: float) -> str:
        try:
            store.wait([key], timedelta(seconds=seconds))
        except DistError as error:
            raise ConnectionError(f"the other does not answer within {seconds:g} s") from error
        return store.get(key).decode()

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # port 0: the system chooses a free one
    with closing(socket.create_server((address, 0), family=family)) as listener:
        listener.settimeout(CONNECT_SECONDS)
        store.set(f"listens/{rank}", f"{address} {listener.getsockname()[1]}")
        host, port = wait_for(f"listens/{other}", CONNECT_SECONDS).split()
        # Both report how it went before either leaves: else the other would blame its own way.
        error = ""
        try:
            outward = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
        except OSError as refused:
            error = f"cannot connect to {host} (TCP, port {port}): {refused}"
        store.set(f"tried/{rank}", error)
        if wait_for(f"tried/{other}", 2 * CONNECT_SECONDS) or error:
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
