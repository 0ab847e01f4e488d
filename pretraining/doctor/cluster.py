"""Check the ranks that a launcher started: do all come, meet and agree, and are messages and products fast enough?

Every rank makes the same steps in the same order. If a step does not end on some rank, the examination ends with that
rank's name, and what was found until then is reported.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from pretraining.command_line import world_size_here
from pretraining.doctor.devices import measure_devices
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding, as_lines, of_all_nodes, worst
from pretraining.doctor.layers import examine_layers
from pretraining.doctor.messages import bound_address, measure_messages, meet_in_pairs
from pretraining.doctor.roll_call import FAILED, MOST_REFUSED, SILENT, WAITS, RollCall, Stuck, named, one_line
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
    token_of_all,
)
from pretraining.errors import UserError
from pretraining.planning.gpus import known_gpu
from pretraining.planning.quantities import several
from pretraining.planning.run_plan import build_run_plan
from pretraining.recipe import Recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.schema import REPOSITORY
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
    recipe, ds_config = None, None
    if getattr(options, "recipe", None):
        overrides, deepspeed = getattr(options, "set", None) or (), getattr(options, "deepspeed", None)
        with suppress(UserError):  # rank 0 has found that already; the ranks can be examined without
            recipe, ds_config = load_recipe_and_ds_config(
                options.recipe, overrides, deepspeed, world_size_here()
            )
    with _printed_to_stderr():
        examination = Examination(recipe, ds_config, options, machine)
        together = examination.run()
    return examination.of_nodes, together


def end_rank(code: int) -> None:
    """End this process at once with this exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread may hang inside a library, and an orderly end would wait for it for ever.
    os._exit(code)


class Examination:
    """Make one rank's part of the examination."""

    def __init__(
        self, recipe: Recipe | None, ds_config: dict | None, options: Namespace, machine: list[Finding]
    ):
        self.recipe, self.ds_config = recipe, ds_config
        self.of_nodes = machine
        """Findings of the nodes about themselves: only of this node until all nodes have sent theirs."""
        # as train.py chooses it
        default = REPOSITORY / "runs" / (recipe.name if recipe else "")
        self.run_folder = Path(getattr(options, "output_dir", None) or default)
        self.data_dir = getattr(options, "data_dir", None) or REPOSITORY / "data"
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
            self.findings.append(self._never_came())
        else:
            try:
                self._examine()
            except Stuck as stuck:
                self._add_stuck(stuck)
                # rank 0 must not wait for these when it leaves
                gone = [rank for rank, answer in enumerate(stuck.answers) if answer.state == SILENT]
        self.call.part(gone)
        return self.findings

    def _examine(self) -> None:
        described = self._gathered("versions, variables, devices", self._describe, DESCRIBE_SECONDS)
        if described is not None:
            self.findings += compare_ranks(self.call, described)
        self.of_nodes = self._lines_of_nodes()
        found = self._gathered("clocks", ClockQuestion(self.call).ask_or_answer)
        if found is not None:
            self.findings += judge_clocks(self.call, found)
        # Folders first: their checks need no connection between the ranks.
        self._in_folders()
        self._between_ranks()

    def _in_folders(self) -> None:
        with self._probed_folder() as probed:
            upload = self.recipe and self.recipe.checkpoints.upload
            looked = self._attempt("shared folders", lambda: look_at_run_folder(self.call, probed, upload))
            # a speed means nothing if the ranks write to different folders
            if worst(looked) == FINE:
                self._attempt("disk of all ranks", lambda: self._disk(probed))
        if self.recipe is None:
            return
        name = self.recipe.data.name
        digests = self._gathered("shared data", lambda: manifest_of(self.data_dir, name))
        if digests is not None:
            self.findings += judge_data(self.call, self.data_dir, name, digests)

    def _between_ranks(self) -> None:
        """Check what needs ranks that meet, and then what needs a process group of all ranks."""
        address = bound_address()
        self.findings += self._loopback(address)
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

    def _describe(self) -> dict:
        prepare_rank()
        self.gpu = known_gpu(device_name()) if self.on_gpu else None
        return describe_rank(self.on_gpu)

    def _lines_of_nodes(self) -> list[Finding]:
        """Merge what the first rank of every node has found about it; empty on ranks other than 0."""
        found = self.call.collect("the nodes", [each.to_dict() for each in self.of_nodes])
        first = [node[0] for node in self.call.nodes] if found else []
        of_nodes = [[Finding(**fields) for fields in found[rank]] for rank in first]
        return of_all_nodes([self.call.hosts[rank] for rank in first], of_nodes)

    def _loopback(self, address: dict) -> list[Finding]:
        """Find hosts whose own name means the loopback."""
        # gloo then listens where other hosts cannot reach it, although NCCL may work.
        bound = self.call.gather("addresses", address)
        # on one node the loopback reaches everyone
        if len(self.call.nodes) == 1:
            return []
        return [
            Finding(
                "address",
                BREAKS,
                f"{self.call.hosts[node[0]]} listens at {bound[node[0]]['address']}, which only itself can reach: "
                "its own name means the loopback",
                f"export GLOO_SOCKET_IFNAME={bound[node[0]]['interface'] or 'eth0'} on every node, or mend /etc/hosts",
                str(self.call.ranks[node[0]]),
            )
            for node in self.call.nodes
            if bound[node[0]]["loopback"]
        ]

    def _disk(self, probed: ProbedFolder) -> list[Finding]:
        size = BYTES_ON_GPU_MACHINES if self.on_gpu else BYTES_ELSEWHERE
        plan = build_run_plan(self.recipe, self.ds_config, self.size) if self.recipe else None
        return measure_disk(self.call, probed, size, plan and plan.checkpoint_bytes)

    def _layers(self) -> list[Finding]:
        seconds = min(LAYERS_SECONDS, self._left())

        def work() -> list[dict]:
            found = examine_layers(self.recipe, self.ds_config, self.size, seconds, self._say)
            return [finding.to_dict() for finding in found]

        answers = self.call.step("the recipe's layers", work, max(1.0, self._left()))
        errors = [f"{self.call.ranks[rank]}: {each.error}" for rank, each in enumerate(answers) if each.error]
        if errors:
            raise RuntimeError(errors[0])
        return [Finding(**fields) for fields in answers[0].value]

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
        failed = [rank for rank, answer in enumerate(answers) if answer.state == FAILED]
        self.findings += [
            Finding.of_error(name, answers[rank].error, where=str(self.call.ranks[rank]))
            for rank in failed[:MOST_REFUSED]
        ]
        return None if failed else [answer.value for answer in answers]

    @contextmanager
    def _probed_folder(self) -> Iterator[ProbedFolder]:
        probed = ProbedFolder(self.run_folder, self.rank, token_of_all(self.call))
        try:
            yield probed
        finally:
            # also if a step raises: nothing of ours stays in the run folder
            probed.clear()

    def _left(self) -> float:
        """Return the seconds that are left, the same number on every rank."""
        # All ranks call it at the same places: a rank that left a step out would keep the others waiting.
        return self.call.agreed_seconds_left(self.began + ALL_SECONDS)

    def _never_came(self) -> Finding:
        missing, came = self.call.missing, [rank for rank in self.call.ranks if rank is not None]
        hosts = ", ".join(sorted({rank.host for rank in came}))
        message = (
            f"{several(len(missing), 'rank')} of {self.size} never came within {ARRIVAL_SECONDS:.0f} s: "
            f"{_numbers(missing)}; there are ranks on {hosts}"
        )
        remedy = (
            "see that every node was started, with the same --master_addr and port, and what its log says"
        )
        return Finding(
            "arrival", BREAKS, message, remedy, f"rank{'s' * (len(missing) > 1)} {_numbers(missing)}"
        )

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


def _numbers(ranks: list[int]) -> str:
    """Write rank numbers in short: `3, 8 to 15`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


@contextmanager
def _printed_to_stderr() -> Iterator[None]:
    """Send stdout to stderr inside the block, and keep stdout for the answer."""
    # By the descriptor, since some libraries print from C++, past sys.stdout.
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
