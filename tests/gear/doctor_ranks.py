"""What a rank of the doctor does: `python -m tests.gear.doctor_ranks FAULT OPTIONS`; rank 1 is the sick one."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from pretraining.doctor import __main__ as doctor
from pretraining.doctor import cluster, rates, shared
from pretraining.doctor.findings import BREAKS, FINE, Finding
from pretraining.errors import one_line_errors
from tests.gear.hosts import Hosts

NAMES = ["alpha", "beta", "gamma"]
SLOW_SECONDS = 0.1
"""Of a product that takes some milliseconds."""


def main(fault: str, folder: str, options: list[str]) -> None:
    rank = int(os.environ["RANK"])
    # This machine by itself is tested elsewhere: here its lines are those of a node.
    launch = SimpleNamespace(several_machines=True, world_size=2, gpus=SimpleNamespace(found=()))
    doctor.examine = lambda options: (lines_of_node(fault, rank), launch)
    doctor.keep = lambda findings, launch: None
    shared.LOOK_SECONDS = 2.0  # no network folder is late here
    FAULTS[fault](rank, Path(folder))
    with one_line_errors():
        doctor.main(["--output_dir", str(Path(folder, "run")), "--json", *options])


def lines_of_node(fault: str, rank: int) -> list[Finding]:
    """Two lines that are the same everywhere, but for a number, and one that a sick node has alone."""
    lines = [Finding("NUMA", FINE, "one socket"), Finding("disk", FINE, f"{rank + 1}.50 GB free")]
    if fault == "sick" and rank:
        lines.append(Finding("open files", BREAKS, "256", "ulimit -n 65536"))
    return lines


def healthy(rank: int, folder: Path) -> None:
    pass


def sick(rank: int, folder: Path) -> None:
    """Rank 1 is a host of its own: slow, with another DeepSpeed, variable, clock and folder."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if rank == 0:
        return
    other = folder / "other"
    (other / "deepspeed-9.9.9.dist-info").mkdir(parents=True)
    (other / "deepspeed-9.9.9.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 9.9.9\n")
    sys.path.insert(0, str(other))
    os.environ["NCCL_ALGO"] = "Ring"
    shared.time = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + 90})
    absolute = shared.ProbedFolder
    shared.ProbedFolder = lambda run, *more: absolute(run / "elsewhere", *more)
    whole = rates.round_of_products

    def slow_products(products: rates.Products, on_gpu: bool) -> tuple[int, Callable[[], None]]:
        flops, multiply = whole(products, on_gpu)
        return flops, lambda: (multiply(), time.sleep(SLOW_SECONDS))

    rates.round_of_products = slow_products


def apart(rank: int, folder: Path) -> None:
    """Each rank is a host with its own network (`hosts.py`); gamma has another disk in place of the run's."""
    made = Hosts(folder, NAMES)
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR=made.address(NAMES[0]))
    made.enter(NAMES[rank], {folder / "run": folder / "own"} if NAMES[rank] == "gamma" else {})


def absent(rank: int, folder: Path) -> None:
    """The launcher was to start a third rank."""
    os.environ["WORLD_SIZE"] = "3"
    cluster.ARRIVAL_SECONDS = 3.0


def stopped(rank: int, folder: Path) -> None:
    """Rank 1's process stops in the middle of a collective's step, and is killed much later."""
    rates.DEVICE_SECONDS = 1.0
    if rank == 1:
        rates.measure_rank = lambda *_: _stop()


def _stop() -> None:
    process = os.getpid()
    if os.fork() == 0:
        time.sleep(8)
        os.kill(process, signal.SIGKILL)
        os._exit(0)
    os.kill(process, signal.SIGSTOP)


def hanging(rank: int, folder: Path) -> None:
    """Rank 1 does not come to the collective that rank 0 waits in."""
    rates.DEVICE_SECONDS = 1.0
    import torch.distributed as dist

    rates.measure_rank = lambda *_: time.sleep(60) if rank else dist.barrier()


def failing(rank: int, folder: Path) -> None:
    """Rank 1 fails before the collective that rank 0 waits in."""
    hanging(rank, folder)
    if rank == 1:
        rates.measure_rank = lambda *_: 1 / 0


def broken(rank: int, folder: Path) -> None:
    """All ranks fail."""
    rates.measure_rank = lambda *_: 1 / 0


FAULTS = (healthy, sick, apart, absent, stopped, hanging, failing, broken)
FAULTS = {each.__name__: each for each in FAULTS}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
