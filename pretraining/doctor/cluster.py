"""The checks under a launcher: do all ranks come, meet, agree, and send and compute as fast as they should.

Every rank makes the same steps in the same order. A step that does not end on some rank ends the examination with that
rank's name: what was found until then is reported.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pretraining.command_line import world_size_here
from pretraining.doctor.alike import ClockQuestion, compare_ranks, describe_rank, judge_clocks
from pretraining.doctor.devices import measure_devices
from pretraining.doctor.findings import BREAKS, COSTS, Finding, worst
from pretraining.doctor.folders import (
    BYTES_ELSEWHERE,
    BYTES_ON_GPU_MACHINES,
    ProbedFolder,
    judge_data,
    look_at_run_folder,
    manifest_of,
    measure_disk,
    token_of_all,
)
from pretraining.doctor.layers import examine_layers
from pretraining.doctor.messages import measure_messages
from pretraining.doctor.pairs import bound_address, meet_in_pairs
from pretraining.doctor.roll_call import FAILED, SILENT, WAITS, RollCall, Stuck, one_line
from pretraining.errors import UserError
from pretraining.planning.gpus import Gpu, find_gpu
from pretraining.planning.quantities import several
from pretraining.planning.run_plan import build_run_plan
from pretraining.recipe import Recipe
from pretraining.refusals import load_run
from pretraining.run_dir import REPOSITORY
from pretraining.training.ranks import device_name, join_ranks, leave_ranks, prepare_rank

ARRIVAL_SECONDS = 60.0
"""From the first rank's imports to the last one's: a cold network folder takes that long to import torch from."""
ALL_SECONDS = 175.0
"""Of the whole examination; steps for which there is no time left are reported as left out."""
LAYERS_SECONDS = 60.0
STEP_SECONDS = 20.0
"""Of what takes a second on a healthy cluster."""
JOIN_SECONDS = 60.0
"""NCCL makes its first group of hundreds of ranks within this."""


def examine_cluster(options: Namespace) -> list[Finding]:
    """Examine the ranks that a launcher started, together; every rank calls it, rank 0 has all findings.

    Progress goes to stderr from rank 0, and what libraries print goes there from all ranks.

    Raises:
        UserError: the recipe is wrong, or rank 0 cannot be reached.
    """
    recipe, ds_config = None, None
    if getattr(options, "recipe", None):
        overrides, deepspeed = getattr(options, "set", None) or (), getattr(options, "deepspeed", None)
        recipe, ds_config = load_run(options.recipe, overrides, deepspeed, world_size_here())
    with _printed_to_stderr():
        return Examination(recipe, ds_config, options).run()


def end_rank(code: int) -> None:
    """End this process at once: a thread may hang inside a library, and would keep an orderly end waiting for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Examination:
    """One rank's part of it."""

    def __init__(self, recipe: Recipe | None, ds_config: dict | None, options: Namespace):
        self.recipe, self.ds_config = recipe, ds_config
        default = REPOSITORY / "runs" / (recipe.name if recipe else "")
        self.run_folder = Path(getattr(options, "output_dir", None) or default)
        self.data_dir = getattr(options, "data_dir", None) or REPOSITORY / "data"
        self.rank, self.size = int(os.environ["RANK"]), world_size_here()
        self.on_gpu, self.gpu = torch.cuda.is_available(), None
        self.findings: list[Finding] = []
        self.began = time.monotonic()

    def run(self) -> list[Finding]:
        """All steps; findings are complete on rank 0."""
        self._say(f"waiting for {several(self.size, 'rank')}")
        self.call = RollCall(self.rank, self.size, ARRIVAL_SECONDS)
        if self.call.missing:
            self.findings.append(self._never_came())
        else:
            try:
                self._examine()
            except Stuck as stuck:
                self._add_stuck(stuck)
        self.call.part()
        return self.findings

    def _examine(self) -> None:
        described = self._gathered("versions, variables, devices", self._describe)
        if described is not None:
            self.findings += compare_ranks(self.call, described)
        found = self._gathered("clocks", ClockQuestion(self.call).ask_or_answer)
        if found is not None:
            self.findings += judge_clocks(self.call, found)
        with self._probed_folder() as probed:
            self._in_folders(probed)
            self._between_ranks(probed)

    def _in_folders(self, probed: ProbedFolder) -> None:
        self._attempt("run folder and data folder", lambda: look_at_run_folder(self.call, probed))
        if self.recipe is None:
            return
        name = self.recipe.data["name"]
        digests = self._gathered("data folder", lambda: manifest_of(self.data_dir, name), silently=True)
        if digests is not None:
            self.findings += judge_data(self.call, self.data_dir, name, digests)

    def _between_ranks(self, probed: ProbedFolder) -> None:
        """What needs ranks that meet, and a process group of all of them."""
        address = bound_address()
        self._attempt("pairs of ranks", lambda: self._loopback(address))
        met = self._attempt(
            "pairs of ranks", lambda: meet_in_pairs(self.call, address["address"], self.on_gpu), silently=True
        )
        if worst(met) == BREAKS:
            self._say("the rest is left out: it needs ranks that meet")
        elif (
            self._gathered("process group of all ranks", lambda: join_ranks() and None, JOIN_SECONDS)
            is not None
        ):
            self._attempt("messages", lambda: measure_messages(self.call, self.gpu, self.on_gpu))
            self._attempt("devices", lambda: measure_devices(self.call, self.recipe, self.gpu, self.on_gpu))
            self._attempt("disk", lambda: self._disk(probed))
            if self.recipe is not None:
                self._attempt("the recipe's layers", self._layers)
            self._gathered("leaving the process group", leave_ranks)
            return
        self._attempt("disk", lambda: self._disk(probed))

    def _describe(self) -> dict:
        prepare_rank()
        self.gpu = _known_gpu() if self.on_gpu else None
        return describe_rank(self.on_gpu)

    def _loopback(self, address: dict) -> list[Finding]:
        """A host whose own name means the loopback cannot be reached by the others, though NCCL may work."""
        bound = self.call.gather("addresses", address, time.monotonic() + STEP_SECONDS)
        if len(self.call.nodes) == 1:
            return []
        return [
            Finding(
                "address",
                BREAKS,
                f"{self.call.hosts[node[0]]} listens at {bound[node[0]]['address']}, which only itself can reach: "
                "its own name means the loopback",
                f"set GLOO_SOCKET_IFNAME={bound[node[0]]['interface'] or 'eth0'} on every node, or mend /etc/hosts",
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

    def _attempt(
        self, name: str, examine: Callable[[], list[Finding]], silently: bool = False
    ) -> list[Finding]:
        """The findings of a step, added to all; an error is a finding too."""
        if not silently:
            self._say(name)
        if self._left() <= 0:
            found = [
                Finding(
                    name, COSTS, "left out: the time was over", "see what took so long in the lines above"
                )
            ]
        else:
            try:
                found = examine()
            except (RuntimeError, OSError) as error:
                found = [_failure(name, one_line(error))]
        self.findings += found
        return found

    def _gathered(
        self, name: str, work: Callable[[], object], seconds: float = STEP_SECONDS, silently: bool = False
    ) -> list | None:
        """What the work returned on every rank; None, and a finding for each rank that failed, if one did."""
        if not silently:
            self._say(name)
        answers = self.call.step(name, work, seconds)
        failed = [rank for rank, answer in enumerate(answers) if answer.state == FAILED]
        self.findings += [
            _failure(name, answers[rank].error, str(self.call.ranks[rank])) for rank in failed[:8]
        ]
        return None if failed else [answer.value for answer in answers]

    @contextmanager
    def _probed_folder(self) -> Iterator[ProbedFolder]:
        probed = ProbedFolder(self.run_folder, self.rank, token_of_all(self.call))
        try:
            yield probed
        finally:
            probed.clear()

    def _left(self) -> float:
        """Seconds; asked at the same places by all ranks, whose steps end together, so that they answer alike."""
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
        by_state = {
            state: [rank for rank, answer in enumerate(stuck.answers) if answer.state == state]
            for state in (SILENT, WAITS)
        }
        silent, waiting = (
            ", ".join(str(self.call.ranks[rank]) for rank in by_state[state][:8]) for state in (SILENT, WAITS)
        )
        if by_state[SILENT]:
            message = f"{silent} stopped answering" + (f"; {waiting} wait" if waiting else "")
            remedy = "look at that process and its host: stopped, out of memory, or its network is gone"
        else:
            message = f"hangs on {waiting}"
            remedy = (
                "NCCL_DEBUG=INFO says where; try NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1, NCCL_P2P_DISABLE=1"
            )
        self.findings.append(
            Finding(stuck.step, BREAKS, f"{message} (after {stuck.seconds:.0f} s)", remedy, silent or waiting)
        )

    def _say(self, what: str) -> None:
        if self.rank == 0:
            print(f"doctor: {time.monotonic() - self.began:5.1f} s: {what}", file=sys.stderr, flush=True)


def _failure(name: str, error: str, where: str = "") -> Finding:
    what, _, remedy = error.partition("; ")
    return Finding(name, BREAKS, what, remedy, where)


def _numbers(ranks: list[int]) -> str:
    """`3, 8 to 15`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _known_gpu() -> Gpu | None:
    try:
        return find_gpu(device_name())
    except UserError:
        return None


@contextmanager
def _printed_to_stderr() -> Iterator[None]:
    """Keep stdout for the answer: libraries print there, some from C++."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
