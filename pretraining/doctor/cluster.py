"""Check the ranks that a launcher started: do all come, meet and agree, and are messages and products fast enough?

Every rank makes the same steps in the same order. If a step does not end on some rank, the examination ends with that
rank's name, and what was found until then is reported.
"""

import os
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable

import torch

from pretraining.command_line import world_size_here
from pretraining.doctor.devices import measure_devices
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding, as_lines, of_all_nodes, worst
from pretraining.doctor.gpus import Gpus
from pretraining.doctor.launch import Launch, plan_launch
from pretraining.doctor.layers import examine_layers
from pretraining.doctor.messages import bound_address, measure_messages, meet_in_pairs
from pretraining.doctor.roll_call import FAILED, SILENT, WAITS, RollCall, Stuck, named, one_line
from pretraining.doctor.shared import (
    BYTES_ELSEWHERE,
    BYTES_ON_GPU_MACHINES,
    ClockQuestion,
    ProbedFolder,
    compare_ranks,
    describe_rank,
    judge_clocks,
    judge_data,
    look_at_run_folder,
    manifest_of,
    measure_disk,
)
from pretraining.planning.gpus import known_gpu
from pretraining.planning.quantities import several
from pretraining.runtime.process_group import device_name
from pretraining.training.ranks import join_ranks, leave_ranks, prepare_rank

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


def examine_cluster(options: Namespace, machine: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Examine the ranks that a launcher started, together; every rank calls it.

    Rank 0 reports its progress on stderr. What libraries print goes there too, from all ranks.

    Returns:
        The findings of all nodes about themselves, and those about the ranks together; complete on rank 0 only.

    Args:
        machine: what this rank has found about its node, if it is the node's first; else empty.

    Raises:
        UserError: rank 0 cannot be reached.
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
        together = examination.run()
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
    return examination.of_nodes, together


def end_rank(code: int) -> None:
    """End this process at once with this exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread may hang inside a library, and an orderly end would wait for it for ever.
    os._exit(code)


class Examination:
    """Make one rank's part of the examination."""

    def __init__(self, launch: Launch, machine: list[Finding]):
        self.launch, self.recipe = launch, launch.recipe
        self.of_nodes = machine
        """Findings of the nodes about themselves: only of this node until all nodes have sent theirs."""
        self.rank, self.size = int(os.environ["RANK"]), world_size_here()
        self.on_gpu, self.gpu = torch.cuda.is_available(), None
        self.findings: list[Finding] = []
        self.began = time.monotonic()

    def run(self) -> list[Finding]:
        """Make all steps; return the findings, which are complete on rank 0 only."""
        self._say(f"waiting for {several(self.size, 'rank')}")
        self.call = RollCall(self.rank, self.size, ARRIVAL_SECONDS)
        gone = self.call.missing
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
        return self.findings

    def _alike(self) -> None:
        """Compare versions, variables, devices and clocks, and merge what the first rank of each node has found."""

        def describe() -> dict:
            prepare_rank()
            self.gpu = known_gpu(device_name()) if self.on_gpu else None
            return describe_rank(self.on_gpu)

        described = self._gathered("versions, variables, devices", describe, DESCRIBE_SECONDS)
        if described is not None:
            self.findings += compare_ranks(self.call, described)
        # empty on ranks other than 0
        found = self.call.collect("the nodes", [each.to_dict() for each in self.of_nodes])
        first = [node[0] for node in self.call.nodes] if found else []
        of_nodes = [[Finding(**fields) for fields in found[rank]] for rank in first]
        self.of_nodes = of_all_nodes([self.call.hosts[rank] for rank in first], of_nodes)
        clocks = self._gathered("clocks", ClockQuestion(self.call).ask_or_answer)
        if clocks is not None:
            self.findings += judge_clocks(self.call, clocks)

    def _in_folders(self) -> None:
        # a name that all agree on: rank 0's
        token = self.call.gather("token", uuid.uuid4().hex[:8])[0]
        probed = ProbedFolder(self.launch.run_folder, self.rank, token)
        try:
            upload = self.recipe and self.recipe.checkpoints.upload
            looked = self._attempt("shared folders", lambda: look_at_run_folder(self.call, probed, upload))
            # a speed means nothing if the ranks write to different folders
            if worst(looked) == FINE:
                size = BYTES_ON_GPU_MACHINES if self.on_gpu else BYTES_ELSEWHERE
                saved = self.launch.plan and self.launch.plan.checkpoint_bytes
                self._attempt("disk of all ranks", lambda: measure_disk(self.call, probed, size, saved))
        finally:
            # also if a step raises: nothing of ours stays in the run folder
            probed.clear()
        if self.recipe is None:
            return
        place, name = self.launch.data_dir, self.recipe.data.name
        digests = self._gathered("shared data", lambda: manifest_of(place, name))
        if digests is not None:
            self.findings += judge_data(self.call, place, name, digests)

    def _between_ranks(self) -> None:
        """Check what needs ranks that meet, and then what needs a process group of all ranks."""
        address = bound_address()
        bound = self.call.gather("addresses", address)
        # gloo then listens where other hosts cannot reach it, although NCCL may work; on one node the loopback reaches
        # everyone
        for first, *_ in self.call.nodes if len(self.call.nodes) > 1 else ():
            if bound[first]["loopback"]:
                what = f"{self.call.hosts[first]} listens at {bound[first]['address']}, which only itself can reach: "
                what += "its own name means the loopback"
                remedy = (
                    f"export GLOO_SOCKET_IFNAME={bound[first]['interface'] or 'eth0'} on every node, or mend "
                )
                remedy += "/etc/hosts"
                self.findings.append(Finding("address", BREAKS, what, remedy, str(self.call.ranks[first])))
        met = self._attempt(
            "pairs of ranks", lambda: meet_in_pairs(self.call, address["address"], self.on_gpu)
        )
        if worst(met) == BREAKS:
            return self._say("the rest is left out: it needs ranks that meet")
        if self._gathered("process group of all ranks", lambda: join_ranks() and None, JOIN_SECONDS) is None:
            return
        self._attempt("messages", lambda: measure_messages(self.call, self.gpu, self.on_gpu))
        self._attempt("devices", lambda: measure_devices(self.call, self.recipe, self.gpu, self.on_gpu))
        if self.recipe is not None:
            self._attempt("the recipe's layers", self._layers)
        # a step too, because it may hang as any collective
        self._gathered("leaving the process group", leave_ranks)

    def _layers(self) -> list[Finding]:
        seconds = min(LAYERS_SECONDS, self._left())

        def work() -> list[dict]:
            found = examine_layers(self.recipe, self.launch.ds_config, self.size, seconds, self._say)
            return [finding.to_dict() for finding in found]

        found = self.call.values("the recipe's layers", work, max(1.0, self._left()))
        return [Finding(**fields) for fields in found[0]]

    def _attempt(self, name: str, examine: Callable[[], list[Finding]]) -> list[Finding]:
        """Make a step and add its findings to all findings; an error becomes a finding too."""
        self._say(name)
        if self._left() <= 0:
            remedy = "see what took so long in the lines above"
            found = [Finding(name, COSTS, "left out: the time was over", remedy)]
        else:
            try:
                found = examine()
            except (RuntimeError, OSError) as error:
                found = [Finding.of_error(name, one_line(error))]
        self.findings += found
        return found

    def _gathered(self, name: str, work: Callable[[], object], seconds: float = STEP_SECONDS) -> list | None:
        """Return what the work returned on every rank; None, and a finding for each failed rank, if one failed."""
        self._say(name)
        answers = self.call.step(name, work, seconds)
        failures = self.call.failures(name, answers)
        self.findings += failures
        return None if failures else [answer.value for answer in answers]

    def _left(self) -> float:
        """Return the seconds that are left, the same number on every rank: by the clock of rank 0."""
        # All ranks call it at the same places: a rank that left a step out would keep the others waiting.
        return self.call.gather("time that is left", self.began + ALL_SECONDS - time.monotonic())[0]

    def _add_missing(self, missing: list[int]) -> None:
        hosts = ", ".join(sorted({rank.host for rank in self.call.ranks if rank is not None}))
        # in short: `3, 8 to 15`
        rows: list[list[int]] = []
        for rank in missing:
            if rows and rank == rows[-1][-1] + 1:
                rows[-1].append(rank)
            else:
                rows.append([rank])
        numbers = ", ".join(f"{row[0]} to {row[-1]}" if len(row) > 1 else str(row[0]) for row in rows)
        message = (
            f"{several(len(missing), 'rank')} of {self.size} never came within {ARRIVAL_SECONDS:.0f} s: "
        )
        message += f"{numbers}; there are ranks on {hosts}"
        remedy = (
            "see that every node was started, with the same --master_addr and port, and what its log says"
        )
        where = f"rank{'s' * (len(missing) > 1)} {numbers}"
        self.findings.append(Finding("arrival", BREAKS, message, remedy, where))

    def _add_stuck(self, stuck: Stuck) -> None:
        """Report the likely cause: a rank that failed, else one that is gone, else ranks that wait for each other."""
        silent, failed, waits = (
            named(self.call.ranks, [rank for rank, each in enumerate(stuck.answers) if each.state == state])
            for state in (SILENT, FAILED, WAITS)
        )
        waiting = f"; {waits} waited {stuck.seconds:.0f} s for it" if waits else ""
        if failed:
            error = next(answer.error for answer in stuck.answers if answer.state == FAILED)
            message, where = f"{failed} failed ({error}){waiting}", failed
            remedy = "mend what the error says; the other ranks wait for this one"
        elif silent:
            message, where = f"{silent} stopped answering{waiting}", silent
            remedy = "look at that process and its host: stopped, out of memory, or its network is gone"
        else:
            message, where = f"hangs on {waits} (for {stuck.seconds:.0f} s)", waits
            remedy = (
                "NCCL_DEBUG=INFO says where; try NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1, NCCL_P2P_DISABLE=1"
            )
        self.findings.append(Finding(stuck.step, BREAKS, message, remedy, where))
        if self.rank == 1 and stuck.answers[0].state == SILENT:  # rank 0 reports everything else
            print(as_lines(self.findings[-1:]), file=sys.stderr, flush=True)

    def _say(self, what: str) -> None:
        if self.rank == 0:
            print(f"doctor: {time.monotonic() - self.began:5.1f} s: {what}", file=sys.stderr, flush=True)
