"""Join the process group in the same way under `deepspeed`, `torchrun`, `accelerate launch` and plain `python`.

The parts below `join_ranks` are: a store for the ranks' addresses, without those of an earlier attempt. Then the
launcher, so that no rank outlives it unnoticed. Last this machine, by which the plan is judged.
"""

import os
import re
import resource
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.distributed import PrefixStore, Store, TCPStore

from pretraining.command_line import ranks_here, started_by_launcher
from pretraining.errors import UserError
from pretraining.outside.schema import display_path, problem
from pretraining.planning.gpus import cuda_needs, known_gpu
from pretraining.planning.run_plan import Machine
from pretraining.recipe import Recipe
from pretraining.runtime.exit_codes import HANG
from pretraining.runtime.heartbeat import process_fields
from pretraining.runtime.host import GLOO_INTERFACE, disk_room_bytes, host_memory_bytes, loopback_name
from pretraining.runtime.process_group import (
    device_name,
    from_rank_0,
    gather_from_ranks,
    is_first_to_report,
    keep_store,
)
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.operators import keep_compiled_operators
from pretraining.upstream.deepspeed import leave_out_shared_memory, wait_in_every_group
from pretraining.upstream.torch import ask_the_processor_once

# torch's own limit for a collective is half an hour. The watch over hangs must come first: it can name the ranks.
_SHORTEST_TIMEOUT_MINUTES = 30
_AFTER_A_HANG_MINUTES = 10
# At the start ranks wait for each other as long as in a hang. Imports from a cold network folder take minutes.
_SHORTEST_MEETING_MINUTES = 5

# ATen passes these to MKL's vector functions (ATen/cpu/vml.h), and a model or its loss may call them.
_VECTOR_FUNCTIONS = ("cos", "erf", "erfc", "exp", "log", "log2", "sin", "sqrt", "tanh")

AT_LEAVING: list[Callable[[], None]] = []
"""Called when this rank leaves the process group in order, the last first."""


@contextmanager
def joined_ranks(hang_minutes: float | None) -> Iterator[None]:
    """Join the process group until the end of the block."""
    join_ranks(hang_minutes)
    try:
        yield
    # a stop that all ranks agreed on; after any other error the ranks could not meet in `leave_ranks`
    except SystemExit:
        leave_ranks()
        raise
    except UserError as error:
        error.on_every_rank = error.on_every_rank and not is_first_to_report()
        raise
    leave_ranks()


def join_ranks(hang_minutes: float | None = None) -> None:
    """Join the process group: NCCL on GPUs, gloo on CPU.

    Call it before the model is built: `zero.Init` reads the world size when it shards parameters.
    hang_minutes: collectives wait longer than this. At the start the ranks wait this long for each other.
    Raises `UserError` if a launcher started more processes on this machine than it has GPUs, or torch cannot use one,
    if ranks of other hosts could not reach this one, or if a rank does not come.
    """
    backend = prepare_rank()
    minutes = max(_SHORTEST_TIMEOUT_MINUTES, (hang_minutes or 0) + _AFTER_A_HANG_MINUTES)
    timeout = timedelta(minutes=minutes)
    # before the first group is made: DeepSpeed makes groups of its own
    wait_in_every_group(timeout)
    _check_own_name()
    # a single rank has nobody to wait for: DeepSpeed makes its group
    if int(os.environ["WORLD_SIZE"]) > 1:
        patience = timedelta(minutes=max(_SHORTEST_MEETING_MINUTES, hang_minutes or minutes))
        _meet(backend, timeout, patience)
    with _meeting(timeout):
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout
        )


def prepare_rank() -> str:
    """Do the part of `join_ranks` that needs no other rank. Return the backend, "nccl" or "gloo".

    Raises `UserError` if a launcher started more processes on this machine than it has GPUs, or torch cannot use one.
    """
    launcher_is_gone()  # remembers the launcher; below, a plain process gets a launcher's variables
    if not started_by_launcher():
        # what a launcher sets: a plain `python train.py` is a world of one rank
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        with socket.create_server(("127.0.0.1", 0)) as listener:  # port 0: the system chooses a free one
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.getsockname()[1]))
    # If these two are set, accelerate configures DeepSpeed from its own file, too late for zero.Init.
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    os.environ.pop("ACCELERATE_DEEPSPEED_CONFIG_FILE", None)
    # As many open files as this rank may have: its connections to hundreds of others count, and most shells allow 1,024
    # until a program asks for more.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # macOS says that there is no limit, and refuses that value
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # this rank's share of the cores, beside GPUs too: an offloaded Adam steps on them
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = max(1, cores // ranks_here())
    os.environ["OMP_NUM_THREADS"] = str(num_threads)  # overwritten on purpose: launchers set it to 1
    torch.set_num_threads(num_threads)
    # MKL (2024.2, in torch 2.15's builds for x86) detects the processor when one of its vector functions is first
    # called, but not safely with several threads: another kernel may then compute a part of the tensor. In one of
    # twelve runs on two cores, the first `tanh` of the first layer differed in its last bits, then all gradients of
    # step 1 and, from step 6 on, the printed loss. So MKL chooses now: one element never goes to a second thread.
    for function in _VECTOR_FUNCTIONS:
        getattr(torch, function)(torch.ones(1))
    if backend == "nccl":
        _claim_gpu(int(os.environ["LOCAL_RANK"]))
    else:
        # Only DeepSpeed's launcher sets this. Without it ZeRO-3 starts `numactl` at every reduction to count devices.
        os.environ.setdefault("LOCAL_SIZE", str(ranks_here()))
        leave_out_shared_memory()
    ask_the_processor_once()
    keep_compiled_operators()
    return backend


class RanksMissing(UserError):
    """Some ranks never came. They may come at the next start."""

    exit_code = HANG


@contextmanager
def _meeting(patience: timedelta) -> Iterator[None]:
    """Raise a `UserError` of one line if the ranks do not meet: their port is taken, or a rank does not come."""
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
        # torch raises a time limit as DistError too: only the message tells them apart
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
        if shared_with_the_launcher() and not no_rank_0:
            remedy += "; if a node has come or gone, start torchrun under pretraining.supervise"
        # If rank 0 is there, it alone reports this.
        raise RanksMissing(f"{what} within {minutes:g} minutes; {remedy}", not no_rank_0) from error


def _check_own_name() -> None:
    """Raise `UserError`, reported by one rank of this host, if other hosts could not connect to its gloo groups.

    NCCL chooses an interface in another way, and would connect.
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
    """Make the process group, which DeepSpeed then uses; `RanksMissing` if a rank does not come within `patience`."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torch by itself waits here as long as for a collective: if a rank ended during its imports, the others would wait
    # for half an hour
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with _meeting(patience):
        if shared_with_the_launcher():
            # it outlives an attempt: a prefix for this one
            shared = TCPStore(*place, world_size=ranks, is_master=False, timeout=patience)
            store = PrefixStore(agree_on_name(shared, rank, ranks, patience), shared)
        else:
            store = TCPStore(*place, ranks, is_master=rank == 0, timeout=patience, multi_tenant=True)
    # everybody is here: from now on the time limit of collectives holds
    store.set_timeout(timeout)
    keep_store(store)
    torch.distributed.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else None,
    )


def leave_ranks() -> None:
    """Wait for every rank, then destroy the process group, so that torch reports no leak."""
    # torch warns if it has to guess the device, as for a single rank: its group is not bound to a device
    on_gpu = torch.distributed.get_backend() == "nccl"
    torch.distributed.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)
    while AT_LEAVING:
        AT_LEAVING.pop()()  # while the group still exists
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
    except RuntimeError as error:  # for example, the driver is older than torch's CUDA
        what = f"GPU {local_rank} cannot be used by torch {torch.__version__} (CUDA {torch.version.cuda}): {error}"
        needs = cuda_needs(torch.version.cuda)
        newer = f" to {needs['least_driver']} or newer" if needs else ""
        raise UserError(
            f"{what}; update the driver{newer}, or install a build of torch for the CUDA it has"
        ) from error


_POLL_SECONDS = 0.05


def shared_with_the_launcher() -> bool:
    """Return whether the ranks would meet in the launcher's own store, which outlives an attempt."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_name(store: Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """Agree with all ranks on a name that no earlier attempt has had; `TimeoutError` on rank 0 if one does not come."""
    if rank > 0:
        # new in each attempt: the store still has the answers of earlier attempts
        question = uuid.uuid4().hex
        store.set(f"attempt/asks/{rank}", question)
        name = store.get(f"attempt/answers/{question}").decode()
        store.set(f"attempt/has/{name}/{rank}", "yes")
        return name
    # rank 0 answers the newest question of each rank, again and again, until all ranks have the name
    name, missing = uuid.uuid4().hex, set(range(1, ranks))
    until = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            # the question may be one of an earlier attempt: the rank's new one will be answered in a later turn
            if store.check([f"attempt/asks/{rank}"]):
                store.set(f"attempt/answers/{store.get(f'attempt/asks/{rank}').decode()}", name)
            if store.check([f"attempt/has/{name}/{rank}"]):
                missing.remove(rank)
        if missing and time.monotonic() > until:
            raise TimeoutError(f"ranks {sorted(missing)} have not come within {timeout}")
        time.sleep(_POLL_SECONDS if missing else 0)
    return name


# The inner process of the `deepspeed` command. That command does not handle SIGTERM: killed, it leaves this one.
_DEEPSPEED_INNER = b"deepspeed.launcher.launch"


def launcher_is_gone() -> bool:
    """Return whether a launcher started this process and has ended since the first call; never for plain python."""
    # when a parent ends, the system gives its children another one
    return _first_ancestors() != _ancestors()


@cache
def started_by_deepspeed() -> bool:
    """Return whether the `deepspeed` command started this process. Make the first call while that command runs."""
    return _launched() and _DEEPSPEED_INNER in _command(os.getppid())


def sibling_is_gone() -> bool:
    """Return whether fewer processes of the launcher are left here than it started. After a crash it ends them."""
    if not _launched() or launcher_is_gone():
        return False
    children: list[int] = []
    # each thread lists only the children that it started
    for path in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, path.read_text().split())
    # a zombie has ended, and has no command line
    return sum(bool(_command(child)) for child in children) < ranks_here()


def _ancestors() -> tuple[int, ...]:
    """Return the processes that launched this one, nearest first."""
    if not _launched():
        return ()
    parent = os.getppid()
    if _DEEPSPEED_INNER not in _command(parent):
        return (parent,)
    fields = process_fields(parent)
    return parent, int(fields[1]) if fields else 0


_first_ancestors = cache(_ancestors)


@cache
def _launched() -> bool:
    """Return whether a launcher started this process."""
    # cached from the first call, before `prepare_rank` sets the variables of a plain process
    return "WORLD_SIZE" in os.environ


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def agree_on_shape(recipe: Recipe) -> None:
    """Raise `UserError`, on every rank, if they have read other shapes: a branch of the hub moved, or files differ."""
    origins = gather_from_ranks(recipe.origin)
    if other := next((each for each in origins if each.get("digest") != origins[0].get("digest")), None):
        read = [f"{each.get('digest')} of {each.get('revision') or 'a file'}" for each in (origins[0], other)]
        what = (
            f"ranks have read {' and '.join(read)}; set model.revision to a commit, or name one file for all"
        )
        # not `where`: the files that the ranks name may differ, and all say the same
        raise problem(display_path(recipe.path), "model.from", what)


def find_machine(run: RunFolder, start: Any, data_tokens: int) -> Machine:
    """Return on every rank what rank 0 finds, so that all ranks decide the same.

    start: where the run begins (`Start`). If it starts over, the checkpoints of the earlier run in this
    folder stay beside the new ones. Else new ones replace them.
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
