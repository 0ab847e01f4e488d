"""The process group: the same start under `deepspeed`, `torchrun`, `accelerate launch` and plain `python`.

Below `join_ranks`: a store for the addresses of an attempt's ranks, without those of the attempt before; the launcher
that started the ranks, so that none outlives it unseen; and this machine, by which the plan is judged.
"""

import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.distributed import PrefixStore, Store, TCPStore

from pretraining.command_line import ranks_here, started_by_launcher
from pretraining.errors import UserError
from pretraining.planning.gate import Machine
from pretraining.planning.gpus import cuda_needs, known_gpu
from pretraining.runtime.exit_codes import HANG
from pretraining.runtime.heartbeat import process_fields
from pretraining.runtime.host import GLOO_INTERFACE, disk_room_bytes, host_memory_bytes, loopback_name
from pretraining.runtime.process_group import device_name, from_rank_0
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.operators import keep_compiled_operators
from pretraining.upstream.extensions import ask_the_processor_once
from pretraining.upstream.process_groups import leave_out_shared_memory, wait_in_every_group

# What a launcher sets; a plain `python train.py` is a world of one.
_SINGLE_PROCESS = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


# torch's own limit for a collective is half an hour: the watch over hangs, which can name the ranks, comes first.
_SHORTEST_TIMEOUT_MINUTES = 30
_AFTER_A_HANG_MINUTES = 10
# At the start ranks wait for each other as long as for a hang; a cold network folder takes minutes to import from.
_SHORTEST_MEETING_MINUTES = 5

# What ATen hands to MKL's vector functions (ATen/cpu/vml.h) and a model or its loss may call.
_VECTOR_FUNCTIONS = (
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.exp,
    torch.log,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tanh,
)

_at_leaving: list[Callable[[], None]] = []


@contextmanager
def joined_ranks(hang_minutes: float | None) -> Iterator[None]:
    """The process group from here to the end of the block; a stop that all ranks agreed on leaves it in order."""
    join_ranks(hang_minutes)
    try:
        yield
    except SystemExit:
        leave_ranks()
        raise
    leave_ranks()


def join_ranks(hang_minutes: float | None = None) -> tuple[int, int]:
    """Join the process group (NCCL on GPUs, gloo on CPU) and return (rank, world size).

    Must come before the model is built: `zero.Init` reads the world size when it shards parameters.
    hang_minutes: collectives wait longer than that, and the ranks for each other at the start as long.
    Raises `UserError` if a launcher started more processes on this machine than it has GPUs, or torch cannot use one,
    if ranks of other hosts could not reach this one, or if a rank does not come.
    """
    backend = prepare_rank()
    minutes = max(_SHORTEST_TIMEOUT_MINUTES, (hang_minutes or 0) + _AFTER_A_HANG_MINUTES)
    timeout = timedelta(minutes=minutes)
    wait_in_every_group(timeout)
    _check_own_name()
    if int(os.environ["WORLD_SIZE"]) > 1:
        patience = timedelta(minutes=max(_SHORTEST_MEETING_MINUTES, hang_minutes or minutes))
        _meet(backend, timeout, patience)
    with _meeting(timeout):
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout
        )
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def prepare_rank() -> str:
    """Do all of `join_ranks` that needs no other rank; returns the backend, "nccl" or "gloo".

    Raises `UserError` if a launcher started more processes on this machine than it has GPUs, or torch cannot use one.
    """
    launcher_is_gone()  # remembers who it is, before the variables of a plain process are set
    if not started_by_launcher():
        os.environ.update(_SINGLE_PROCESS, MASTER_PORT=str(_free_port()))
    # With these two set accelerate would configure DeepSpeed from its own file, too late for zero.Init.
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    os.environ.pop("ACCELERATE_DEEPSPEED_CONFIG_FILE", None)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    _share_cores(ranks_here())  # beside GPUs too: an offloaded Adam steps on them
    choose_vector_kernels()
    if backend == "nccl":
        _claim_gpu(int(os.environ["LOCAL_RANK"]))
    else:
        # Only its own launcher tells DeepSpeed; else ZeRO-3 starts `numactl` at every reduction to count devices.
        os.environ.setdefault("LOCAL_SIZE", str(ranks_here()))
        leave_out_shared_memory()
    ask_the_processor_once()
    keep_compiled_operators()
    return backend


class RanksMissing(UserError):
    """Some ranks never came: another start may find them."""

    exit_code = HANG


@contextmanager
def _meeting(patience: timedelta) -> Iterator[None]:
    """One line if ranks do not meet: another run listens on their port, or one of them does not come."""
    try:
        yield
    except (torch.distributed.DistError, TimeoutError) as error:
        said, place = str(error), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if "EADDRINUSE" in said:
            what = f"port {os.environ['MASTER_PORT']} is taken, perhaps by another run on this machine"
            other = (
                "deepspeed --master_port=N, torchrun --master_port=N, accelerate launch --main_process_port=N"
            )
            raise UserError(f"{what}; choose another: {other}") from error
        if not isinstance(error, TimeoutError) and not re.search("timed? ?out", said, re.I):
            raise
        no_rank_0 = "client socket" in said
        came = re.search(r"(\d+)/(\d+) clients joined", said)
        if no_rank_0:
            what = f"rank {os.environ['RANK']} did not reach rank 0 at {place}"
        else:
            what = (
                f"{came[1]} of {came[2]} ranks came to {place}" if came else f"not every rank came to {place}"
            )
        minutes = patience.total_seconds() / 60
        remedy = (
            "see in the logs of the others what ended them or holds them up, then type the same command again"
        )
        # Rank 0, if there is one, speaks for all.
        raise RanksMissing(f"{what} within {minutes:g} minutes; {remedy}", not no_rank_0) from error


def _check_own_name() -> None:
    """Raise `UserError`, on one rank of this host, if ranks of other hosts could not connect to its gloo groups.

    NCCL chooses an interface in its own way, and would connect.
    """
    meets_here = os.environ["MASTER_ADDR"].startswith(("127.", "localhost"))
    several_hosts = int(os.environ["WORLD_SIZE"]) > ranks_here() and not meets_here
    name = loopback_name() if several_hosts else None
    if name is None:
        return
    what = f"{name}, the name of this host, leads to a loopback address, on which no other host reaches it"
    remedy = f"export {GLOO_INTERFACE}=INTERFACE, the one between the hosts (`ip -brief address` lists them)"
    raise UserError(
        f"{what}; {remedy}, or mend /etc/hosts", on_every_rank=os.environ.get("LOCAL_RANK", "0") != "0"
    )


def _meet(backend: str, timeout: timedelta, patience: timedelta) -> None:
    """Make the process group as DeepSpeed would, which takes the one it finds.

    torch's own way would wait at the start as long as collectives may take: a rank that ended during its imports would
    keep the others for half an hour.

    Raises:
        RanksMissing: a rank did not come within `patience`.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with _meeting(patience):
        if shared_with_the_launcher():
            store = fresh_store(rank, ranks, patience)
        else:
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(*place, ranks, is_master=rank == 0, timeout=patience, multi_tenant=True)
    store.set_timeout(timeout)
    torch.distributed.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else None,
    )


def at_leaving(close: Callable[[], None]) -> None:
    """Have `close` called when this rank leaves the process group in order."""
    _at_leaving.append(close)


def leave_ranks() -> None:
    """Wait for every rank, then tear the process group down, so that no launcher reports a leak."""
    # torch warns if it has to guess the device, as for a single rank, whose group is bound to none
    on_gpu = torch.distributed.get_backend() == "nccl"
    torch.distributed.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)
    while _at_leaving:
        _at_leaving.pop()()
    torch.distributed.destroy_process_group()


def _claim_gpu(local_rank: int) -> None:
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise UserError(
            f"process {local_rank} of this machine has no GPU: {num_gpus} found; start at most {num_gpus} "
            f"processes (--num_gpus={num_gpus}, --nproc_per_node={num_gpus}, --num_processes={num_gpus})",
            on_every_rank=False,
        )
    try:
        torch.cuda.set_device(local_rank)
    except RuntimeError as error:  # such as a driver that is older than torch's CUDA: no rank can start
        reason = " ".join(str(error).split())
        what = f"GPU {local_rank} cannot be used by torch {torch.__version__} (CUDA {torch.version.cuda}): {reason}"
        needs = cuda_needs(torch.version.cuda)
        newer = f" to {needs['least_driver']} or newer" if needs else ""
        raise UserError(
            f"{what}; update the driver{newer}, or install a build of torch for the CUDA it has"
        ) from error


def _share_cores(local_world_size: int) -> None:
    """Give each rank of this machine its share of the cores; OMP_NUM_THREADS, which launchers set to 1, loses."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = max(1, cores // local_world_size)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    torch.set_num_threads(num_threads)


def choose_vector_kernels() -> None:
    """Let MKL choose the kernels of torch's vector functions now, in one thread; must come before the first pass.

    MKL (2024.2, in torch 2.13's builds for x86) looks at the processor when one of them is first called, and guards
    this against no second thread: a tensor large enough for several threads is then computed in part by another kernel
    than every later one. This was seen in one in twelve runs on two cores: the first `tanh` of the first layer differed
    in its last bits, thus all gradients of step 1 and, from step 6 on, the printed loss.
    """
    one = torch.ones(1)  # a single element never goes to a second thread
    for function in _VECTOR_FUNCTIONS:
        function(one)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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


# The inner process of the `deepspeed` command, which has no handler for SIGTERM: killed, it leaves this one behind.
_DEEPSPEED_INNER = b"deepspeed.launcher.launch"


def launcher_is_gone() -> bool:
    """Whether a launcher started this process and has ended since the first call. Always False for plain python."""
    return _ancestors() != _current_ancestors()


@cache
def _ancestors() -> tuple[int, ...]:
    """Processes that launched this one, nearest first."""
    return _current_ancestors()


@cache
def started_by_deepspeed() -> bool:
    """Whether the `deepspeed` command started this process; to be asked while it lives."""
    return _launched() and _DEEPSPEED_INNER in _command(os.getppid())


def sibling_is_gone() -> bool:
    """Whether the launcher has fewer processes left than it started here: then it is ending what is left of a crash."""
    if not _launched() or launcher_is_gone():
        return False
    return len(_living_children(os.getppid())) < ranks_here()


def _living_children(process: int) -> list[int]:
    """Of all its threads, without those that have ended: a zombie has no command."""
    children = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children += [int(child) for child in path.read_text().split()]
        except OSError:
            continue
    return [child for child in children if _command(child)]


def _current_ancestors() -> tuple[int, ...]:
    if not _launched():
        return ()
    parent = os.getppid()
    inner = _DEEPSPEED_INNER in _command(parent)
    return (parent, _parent_of(parent)) if inner else (parent,)


@cache
def _launched() -> bool:
    """Asked before `join_ranks` sets a launcher's variables for a plain process."""
    return "WORLD_SIZE" in os.environ


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent_of(process: int) -> int:
    fields = process_fields(process)
    return int(fields[1]) if fields else 0


def find_machine(run: RunFolder, start: Any, data_tokens: int) -> Machine:
    """Return what rank 0 finds, on every rank, so that all judge alike.

    start: where the run begins (checkpoints/identity.py). If it starts over, the checkpoints of the earlier run in this
    folder stay beside those to come; else they make room for them.
    """

    def look() -> Machine:
        on_gpu = torch.cuda.is_available()
        continues = not start.starts_over and (run.recipe.exists() or start.checkpoint is not None)
        return Machine(
            gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
            gpu=known_gpu(device_name()) if on_gpu else None,
            has_bf16=torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else None,
            disk_room_bytes=disk_room_bytes(run.path, continues),
            host_memory_bytes=host_memory_bytes(),
            ranks_per_host=ranks_here(),
            trains_on_processor=not on_gpu,
            data_tokens=data_tokens,
            continues=continues,
        )

    return from_rank_0(look)
