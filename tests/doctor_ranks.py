"""What a rank does in a test of the doctor: `python -m tests.doctor_ranks FAULT OPTIONS`; rank 1 is the sick one."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from pretraining.doctor import __main__ as doctor
from pretraining.doctor import alike, cluster, devices
from pretraining.errors import one_line_errors

RUNS_SECONDS, STOPPED_SECONDS = 0.01, 0.06


def main(fault: str, folder: str, options: list[str]) -> None:
    rank = int(os.environ["RANK"])
    doctor.examine = lambda options: ([], SimpleNamespace())  # this machine by itself is tested elsewhere
    doctor._keep = lambda findings, launch: None
    doctor._answer = lambda findings, found, *_: {
        "findings": [each.to_dict() for each in findings],
        "summary": found,
    }
    FAULTS[fault](rank, Path(folder))
    with one_line_errors():
        doctor.main(["--output_dir", str(Path(folder, "run")), "--json", *options])


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
    fast = SimpleNamespace(time=lambda: time.time() + 90, perf_counter=time.perf_counter)
    alike.time = fast
    absolute = cluster.ProbedFolder
    cluster.ProbedFolder = lambda run, *more: absolute(run / "elsewhere", *more)
    measure = devices.Devices.measure

    def measured_in_pulses(self) -> dict:
        pulses = _pulses(os.getpid())
        try:
            return measure(self)
        finally:
            os.kill(pulses, signal.SIGKILL)
            os.waitpid(pulses, 0)

    devices.Devices.measure = measured_in_pulses


def _pulses(process: int) -> int:
    """A process that lets another one run for a seventh of the time."""
    child = os.fork()
    if child:
        return child
    while True:
        os.kill(process, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        os.kill(process, signal.SIGCONT)
        time.sleep(RUNS_SECONDS)


def absent(rank: int, folder: Path) -> None:
    """The launcher was to start a third rank."""
    os.environ["WORLD_SIZE"] = "3"
    cluster.ARRIVAL_SECONDS = 3.0


def stopped(rank: int, folder: Path) -> None:
    """Rank 1's process stops in the middle of a collective's step, and is killed much later."""
    devices.DEVICE_SECONDS = 1.0
    if rank == 1:
        devices.Devices.measure = lambda self: _stop()


def _stop() -> None:
    process = os.getpid()
    if os.fork() == 0:
        time.sleep(8)
        os.kill(process, signal.SIGKILL)
        os._exit(0)
    os.kill(process, signal.SIGSTOP)


def hanging(rank: int, folder: Path) -> None:
    """Rank 1 does not come to the collective that rank 0 waits in."""
    devices.DEVICE_SECONDS = 1.0
    import torch.distributed as dist

    devices.Devices.measure = lambda self: time.sleep(60) if rank else dist.barrier()


FAULTS = {each.__name__: each for each in (healthy, sick, absent, stopped, hanging)}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
