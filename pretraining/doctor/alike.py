"""What must be the same on all ranks: versions, variables, GPUs, ranks of a host, and the time of day."""

import hashlib
import os
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Store

from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.roll_call import RollCall, named
from pretraining.planning.quantities import duration, num_bytes, several
from pretraining.runtime.run_folder import describe_environment
from pretraining.schema import REPOSITORY
from pretraining.training.ranks import device_name

LIBRARIES = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "DS_",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_DEVICE_MAX",
)
"""Beginnings of the variables that change what a collective does."""
OF_THE_HOST = ("IFNAME", "_HCA", "_DEBUG", "_TOPO", "_NET_GDR", "_ADDR")
"""Parts of names of variables that may differ between hosts: they name interfaces and files there, or only speak."""
CLOCK_ROUNDS = 8
"""Questions a node; the one with the shortest way gives the bound."""
CLOCK_SECONDS = 1.0
"""Events, metrics and checkpoints are written with whole seconds of the clock: beyond that their order is wrong."""
LOWER_MEMORY = 0.98
"""A GPU with less of the median's memory is another kind: drivers keep a few megabytes, not percent."""


def describe_rank(on_gpu: bool) -> dict[str, str]:
    """{what: value} of this rank, all of which must be the same on every rank, or on every rank of a host."""
    here = describe_environment(device_name(), 0)
    described = {
        "Python": here["python"],
        **{f"version of {name}": value or "not installed" for name, value in here["versions"].items()},
        "commit of this repository": f"{here['git_commit']}"[:12] + _modifications(),
        "GPU": here["device"],
    }
    if on_gpu:
        described |= {
            "GPU memory": num_bytes(
                torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            ),
            "CUDA of torch": str(torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _driver(),
        }
    variables = {key: value for key, value in os.environ.items() if key.startswith(LIBRARIES)}
    return described | {f"variable {key}": value for key, value in variables.items()}


def _modifications() -> str:
    """A digest of what was changed in the repository since its commit; empty if nothing was."""
    try:
        command = ["git", "-C", str(REPOSITORY), "diff", "HEAD"]
        changed = subprocess.run(command, capture_output=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return f", modified ({hashlib.blake2b(changed, digest_size=3).hexdigest()})" if changed else ""


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("Module")[1].split()[0]
    except (OSError, IndexError):
        return "unknown"


def compare_ranks(call: RollCall, described: list[dict[str, str]]) -> list[Finding]:
    """What differs between the ranks: one finding for each thing and value that is not most ranks' own."""
    everything = sorted({key for each in described for key in each})
    findings = [finding for key in everything for finding in _differences(call, key, described)]
    findings += _uneven_hosts(call)
    if findings:
        return findings
    versions = ", ".join(f"{name} {described[0][f'version of {name}']}" for name in ("torch", "deepspeed"))
    same = "versions, commit, variables and devices are the same"
    message = f"{same} on {several(call.size, 'rank')}: {versions}, {described[0]['GPU']}"
    return [Finding("ranks alike", FINE, message)]


def _differences(call: RollCall, key: str, described: list[dict[str, str]]) -> list[Finding]:
    values = [each.get(key, "not set") for each in described]
    usual, _ = Counter(values).most_common(1)[0]
    if key.startswith("variable") and any(part in key for part in OF_THE_HOST):
        first = {node[0]: values[node[0]] for node in call.nodes}
        expected = [first[node[0]] for node in call.nodes for _ in node]
    else:
        expected = [usual] * call.size
    odd: dict[str, list[int]] = {}
    for rank, (value, wanted) in enumerate(zip(values, expected, strict=True)):
        if value != wanted:
            odd.setdefault(value, []).append(rank)
    return [_difference(call, key, value, ranks, expected[ranks[0]]) for value, ranks in odd.items()]


def _difference(call: RollCall, key: str, value: str, ranks: list[int], usual: str) -> Finding:
    verdict, remedy = (
        BREAKS,
        "install the same on every node (pip install -r requirements.txt), or share one folder",
    )
    if key.startswith("variable"):
        name = key.removeprefix("variable ")
        export = "" if usual == "not set" else f"export {name}={usual} on every node, or "
        remedy = f"{export}unset {name} everywhere: collectives would not match"
    elif key.startswith("commit"):
        remedy = "check out the same commit of this repository on every node, without changes of its own"
    elif key in ("GPU", "GPU memory", "driver"):
        verdict, remedy = (
            COSTS,
            "take nodes of one kind: the slowest GPU sets the pace, the smallest the memory",
        )
    message = f"{key} is {value}, elsewhere {usual}"
    return Finding("ranks alike", verdict, message, remedy, named(call.ranks, ranks))


def _uneven_hosts(call: RollCall) -> list[Finding]:
    counts = {call.hosts[node[0]]: len(node) for node in call.nodes}
    usual = statistics.mode(counts.values())
    return [
        Finding(
            "ranks alike",
            COSTS,
            f"{several(count, 'rank')} here, {usual} on other hosts",
            "start as many on every node: NCCL finds its fastest ways, and hpZ its groups, only among equals",
            host,
        )
        for host, count in counts.items()
        if count != usual
    ]


class ClockQuestion:
    """The first rank of each node asks rank 0 for the time; half the way there and back bounds the error.

    Cristian's algorithm (1989), through the store.
    """

    def __init__(self, call: RollCall, now: Callable[[], float] | None = None):
        self.store: Store = call.work_store
        self.rank = call.rank
        self.asking = [node[0] for node in call.nodes[1:]]
        self.now = now or time.time

    def ask_or_answer(self) -> dict | None:
        """{"ahead_seconds", "bound_seconds"} of the first rank of a node; None on the others."""
        if self.rank == 0:
            for rank in self.asking:
                for number in range(CLOCK_ROUNDS):
                    self._hear(f"asked/{rank}/{number}")
                    self.store.set(f"clock/time/{rank}/{number}", repr(self.now()))
            return None
        if self.rank not in self.asking:
            return None
        rounds = [self._ask(number) for number in range(CLOCK_ROUNDS)]
        return min(rounds, key=lambda found: found["bound_seconds"])

    def _ask(self, number: int) -> dict:
        """Before the first answer rank 0 may be busy with other nodes: the way of that round is long."""
        began, sent = time.perf_counter(), self.now()
        self.store.set(f"clock/asked/{self.rank}/{number}", "?")
        there = float(self._hear(f"time/{self.rank}/{number}"))
        half = (time.perf_counter() - began) / 2
        return {"ahead_seconds": sent + half - there, "bound_seconds": half}

    def _hear(self, key: str) -> str:
        self.store.wait([f"clock/{key}"], timedelta(seconds=10))
        return self.store.get(f"clock/{key}").decode()


def judge_clocks(call: RollCall, found: list[dict | None]) -> list[Finding]:
    """One finding for each clock that is off for certain; one for all if none is."""
    measured = {rank: each for rank, each in enumerate(found) if each is not None}
    if not measured:
        return []
    wrong = {
        rank: each
        for rank, each in measured.items()
        if abs(each["ahead_seconds"]) - each["bound_seconds"] > CLOCK_SECONDS
    }
    if not wrong:
        most = max(measured.values(), key=lambda each: abs(each["ahead_seconds"]))
        apart, bound = abs(most["ahead_seconds"]), most["bound_seconds"]
        message = f"{several(len(call.nodes), 'node')} are at most {duration(apart)} apart (known to {duration(bound)})"
        return [Finding("clocks", FINE, message, values={"apart_seconds": apart, "bound_seconds": bound})]
    remedy = "set the clocks (chrony, ntpd): times of events, checkpoints and logs would not fit together"
    return [
        Finding(
            "clocks",
            COSTS,
            f"{duration(abs(each['ahead_seconds']))} {'ahead of' if each['ahead_seconds'] > 0 else 'behind'} rank 0 on "
            f"{call.hosts[0]} (known to {duration(each['bound_seconds'])})",
            remedy,
            str(call.ranks[rank]),
            each,
        )
        for rank, each in wrong.items()
    ]
