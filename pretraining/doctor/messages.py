"""Rates of the two messages that training waits for, by size: all-reduce and all-gather, as nccl-tests states them."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pretraining.doctor.findings import COSTS, FINE, Finding
from pretraining.doctor.roll_call import RollCall
from pretraining.planning.gpus import Gpu
from pretraining.planning.quantities import duration, num_bytes, several

SIZES_ON_GPU = tuple(1 << power for power in range(10, 30, 2))
"""1 KiB to 256 MiB: from a grad norm to a bucket of gradients."""
SIZES_ELSEWHERE = tuple(1 << power for power in range(10, 24, 4))
SWEEP_SECONDS = 20.0
"""Of both messages together; a slow network is measured at smaller sizes then."""
SAMPLE_SECONDS = 0.3
MOST_REPEATS = 200
HALF_OF_THE_LINK = 0.5
"""At the largest size NCCL reaches 0.7 to 0.9 of a healthy link (nccl-tests, PERFORMANCE.md); less than half is another
path than the plan counts on: PCIe for NVLink, TCP for InfiniBand, one network card for eight."""
SLOW_ANSWER_SECONDS = 1e-3
"""A small all-reduce takes 0.02 to 0.1 ms over NVLink or InfiniBand; a millisecond is TCP, or a busy processor."""


def measure_messages(call: RollCall, gpu: Gpu | None, on_gpu: bool) -> list[Finding]:
    """A finding for each kind of message; beside the link's peak if the GPU is known. Needs the process group."""
    if call.size == 1:
        return []
    sweep = Sweep("cuda" if on_gpu else "cpu", SIZES_ON_GPU if on_gpu else SIZES_ELSEWHERE)
    answers = call.step("all-reduce and all-gather by size", sweep.measure, 2 * SWEEP_SECONDS)
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        raise RuntimeError(errors[0])
    findings = []
    for kind in sweep.kinds:
        slowest = {
            int(size): max(answer.value[kind][size] for answer in answers) for size in answers[0].value[kind]
        }
        findings.append(_judge(call, kind, slowest, gpu, on_gpu))
    return findings


class Sweep:
    """One rank's part in it: the same calls on every rank."""

    def __init__(self, device: str, sizes: tuple[int, ...]):
        self.device, self.sizes = device, sizes
        self.kinds: dict[str, Callable[[int], Callable[[], object]]] = {
            "all-reduce": self._all_reduce,
            "all-gather": self._all_gather,
        }

    def measure(self) -> dict[str, dict[str, float]]:
        """{message: {bytes: seconds of one}}, up to the size for which there is time."""
        until = time.monotonic() + SWEEP_SECONDS
        found: dict[str, dict[str, float]] = {}
        for number, kind in enumerate(self.kinds, 1):
            kinds_left = len(self.kinds) - number + 1
            found[kind] = self._by_size(kind, time.monotonic() + (until - time.monotonic()) / kinds_left)
        return found

    def _by_size(self, kind: str, until: float) -> dict[str, float]:
        found: dict[str, float] = {}
        expected = 0.0
        for size in self.sizes:
            expected, late = self._agreed(expected, time.monotonic() + 2 * expected - until)
            if late > 0:
                break
            repeats = min(MOST_REPEATS, max(1, int(SAMPLE_SECONDS / max(expected, 1e-6))))
            send = self.kinds[kind](size)
            send()  # connections and buffers are made at the first message of a size
            found[str(size)] = self._seconds(send, repeats)
            expected = found[str(size)] * self.sizes[1] / self.sizes[0]
        return found

    def _agreed(self, *values: float) -> list[float]:
        """The largest of the ranks' values: all ranks go on alike."""
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.tolist()

    def _seconds(self, send: Callable[[], object], repeats: int) -> float:
        self._finish()
        began = time.perf_counter()
        for _ in range(repeats):
            send()
        self._finish()
        return (time.perf_counter() - began) / repeats

    def _finish(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _all_reduce(self, size: int) -> Callable[[], object]:
        message = torch.zeros(size // 4, device=self.device)
        return lambda: dist.all_reduce(message)

    def _all_gather(self, size: int) -> Callable[[], object]:
        ranks = dist.get_world_size()
        own = torch.zeros(max(1, size // 4 // ranks), device=self.device)
        whole = torch.empty(len(own) * ranks, device=self.device)
        return lambda: dist.all_gather_into_tensor(whole, own)


def bus_bandwidth(kind: str, size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that each link carries, whatever the number of ranks (nccl-tests, PERFORMANCE.md).

    Args:
        size: bytes of the whole message: of an all-gather, what every rank has in the end.
    """
    share = (ranks - 1) / ranks
    return size / seconds * (2 * share if kind == "all-reduce" else share)


def link_peak(gpu: Gpu, nodes: list[list[int]]) -> tuple[float, str]:
    """Bytes per second of the bus bandwidth at most, and the name of the link.

    Between nodes a ring passes once through each node: all its network cards together carry what one GPU's link does.
    """
    if len(nodes) == 1:
        return gpu.link_bytes_per_second, gpu.link
    network = gpu.network_bytes_per_second * min(len(node) for node in nodes)
    if network < gpu.link_bytes_per_second:
        return network, "the network"
    return gpu.link_bytes_per_second, gpu.link


def _judge(call: RollCall, kind: str, slowest: dict[int, float], gpu: Gpu | None, on_gpu: bool) -> Finding:
    """slowest: {bytes: seconds on the slowest rank}."""
    largest, smallest = max(slowest), min(slowest)
    rates = {size: bus_bandwidth(kind, size, seconds, call.size) for size, seconds in slowest.items()}
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
            remedies.append(_other_path(len(call.nodes)))
    message += f"; {num_bytes(smallest)} take {duration(answer)}"
    if on_gpu and answer > SLOW_ANSWER_SECONDS:
        verdict = COSTS
        remedies.append(
            "small messages are slow: bind each rank to the cores near its GPU, look for other load"
        )
    return Finding(
        kind, verdict, f"{several(call.size, 'rank')}: {message}", "; ".join(remedies), values=values
    )


def _other_path(nodes: int) -> str:
    if nodes == 1:
        return "nvidia-smi topo -m shows what joins the GPUs; NCCL_DEBUG=INFO which way NCCL takes (P2P, SHM or NET)"
    return (
        "NCCL_DEBUG=INFO says NET/IB or NET/Socket: for InfiniBand install its driver and leave NCCL_IB_DISABLE unset; "
        "name the cards by NCCL_IB_HCA; set the network's rate in pretraining/planning/tables/gpus.json to yours"
    )
