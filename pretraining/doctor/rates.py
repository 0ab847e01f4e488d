"""Measure what every step waits for, on all ranks at once, and compare with what the hardware should reach.

All-reduce and all-gather by size, as nccl-tests states them; products of the recipe's shapes on each rank's own device;
copies to and from the host.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from pretraining.doctor.findings import COSTS, FINE, Finding
from pretraining.doctor.roll_call import RollCall, named
from pretraining.planning.gpus import Gpu
from pretraining.planning.quantities import duration, num_bytes, several, three_digits
from pretraining.planning.shapes import widths_of
from pretraining.recipe import Recipe
from pretraining.training.throughput import GpuReadings

SIZES_ON_GPU = tuple(1 << power for power in range(10, 30, 2))
"""1 KiB to 256 MiB: from a grad norm to a bucket of gradients."""
SIZES_ELSEWHERE = tuple(1 << power for power in range(10, 24, 4))
SWEEP_SECONDS = 20.0
"""Limit of both kinds of messages together; a slow network is then measured at smaller sizes only."""
MOST_REPEATS = 200
HALF_OF_THE_LINK = 0.5
"""At the largest size NCCL reaches 0.7 to 0.9 of a healthy link (nccl-tests, PERFORMANCE.md); less than half is another
path than the plan counts on: PCIe for NVLink, TCP for InfiniBand, one network card for eight."""
SLOW_ANSWER_SECONDS = 1e-3
"""A small all-reduce takes 0.02 to 0.1 ms over NVLink or InfiniBand; a millisecond is TCP, or a busy processor."""
OTHER_PATH = "nvidia-smi topo -m shows what joins the GPUs; NCCL_DEBUG=INFO which way NCCL takes (P2P, "
OTHER_PATH += "SHM or NET)"
OTHER_NETWORK = (
    "NCCL_DEBUG=INFO says NET/IB or NET/Socket: for InfiniBand install its driver and leave NCCL_IB_DISABLE unset; "
    "name the cards by NCCL_IB_HCA; set the network's rate in pretraining/planning/tables/gpus.json to yours"
)
SLOW_RANK = 0.9
"""Share of the median. GPUs of one kind differ by a few percent; a rank 10 % below it delays all others by as much."""
SLOW_PROCESSOR = 0.5
"""Share of the median on a processor, whose cores the ranks share with other processes: rates there vary more."""
HALF_OF_THE_PEAK = 0.5
"""Share of the dense peak. Wide products reach 0.6 to 0.8.

Below half the GPU is throttled, shared, or in a slow mode."""
WIDE = 2048
"""Least width of a model whose products are compared with the peak: narrower ones do not fill a GPU."""
HALF_OF_THE_BUS = 0.5
"""Share of the bus. Pinned copies reach 0.8 of PCIe; half means fewer lanes or an older generation."""
LOADED_SECONDS, SAMPLE_SECONDS = 20.0, 0.3
"""Load before the samples of products, and each sample. Clocks fall for some tens of seconds, to what power and cooling
allow."""
SAMPLES = 5
FEWEST_TOKENS = 16
ROUND_FLOPS = 6
"""Of a round, for every token, input and output: three products, each of 2 FLOPs (multiply and add)."""
PROCESSOR_FLOPS = 2e8
"""FLOPs of one round on a processor, which takes some milliseconds."""
COPY_BYTES, COPY_BYTES_ELSEWHERE = 256 << 20, 32 << 20
DEVICE_SECONDS = 45.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}


def judge_all_messages(gpu: Gpu | None, on_gpu: bool, call: RollCall, measured: list[dict]) -> list[Finding]:
    """Compare each kind of message with the link's peak, if the GPU is known. measured: `messages_by_size`."""
    findings = []
    for kind in measured[0]:
        # A message is over when its slowest rank has it.
        slowest = {int(size): max(each[kind][size] for each in measured) for size in measured[0][kind]}
        findings.append(judge_messages(call, kind, slowest, gpu, on_gpu))
    return findings


def messages_by_size(on_gpu: bool) -> dict[str, dict[str, float]]:
    """Return {message: {bytes: seconds of one}}, up to the size for which there is time; every rank calls it.

    Needs the process group.
    """
    ranks, device = dist.get_world_size(), "cuda" if on_gpu else "cpu"
    sizes, began = SIZES_ON_GPU if on_gpu else SIZES_ELSEWHERE, time.monotonic()
    found: dict[str, dict[str, float]] = {"all-reduce": {}, "all-gather": {}}
    for number, (kind, seconds) in enumerate(found.items(), start=1):
        # time that the first kind leaves over goes to the second
        until, expected = began + number * SWEEP_SECONDS / 2, 0.0
        for size in sizes:
            expected, late = largest_of_ranks(expected, time.monotonic() + 2 * expected - until)
            if late > 0:
                break
            # expected from the size before: its time grows no faster than the size
            repeats = min(MOST_REPEATS, max(1, int(SAMPLE_SECONDS / max(expected, 1e-6))))
            # fp32: 4 bytes a number
            message = torch.zeros(max(1, size // 4 // (1 if kind == "all-reduce" else ranks)), device=device)
            if kind == "all-reduce":
                send = partial(dist.all_reduce, message)
            else:
                whole = torch.empty(len(message) * ranks, device=device)
                send = partial(dist.all_gather_into_tensor, whole, message)
            send()  # connections and buffers are made at the first message of a size
            sent = now_of_device()
            for _ in range(repeats):  # one after another without a wait, as gradients of a step
                send()
            seconds[str(size)] = (now_of_device() - sent) / repeats
            expected = seconds[str(size)] * sizes[1] / sizes[0]
    return found


def now_of_device() -> float:
    """Return the seconds of a clock when this rank's GPU, if it has one, has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def largest_of_ranks(*values: float) -> list[float]:
    """Return the largest of all ranks for each value, so that ranks decide the same although their clocks differ."""
    shared = torch.tensor(values, dtype=torch.float64, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.tolist()


def bus_bandwidth(kind: str, size: int, seconds: float, ranks: int) -> float:
    """Compute the bytes per second that each link carries, for any number of ranks (nccl-tests, PERFORMANCE.md).

    size: bytes of the whole message; for an all-gather, what every rank has at the end.
    """
    share = (ranks - 1) / ranks
    # an all-reduce passes each part around the ring twice, to sum it and to share it
    return size / seconds * (2 * share if kind == "all-reduce" else share)


def link_peak(gpu: Gpu, nodes: list[list[int]]) -> tuple[float, str]:
    """Return the most that the bus bandwidth can be, in bytes per second, and the name of the link.

    Between nodes a ring passes once through each node, so all its network cards together carry what one GPU's link
    carries.
    """
    if len(nodes) > 1:
        network = gpu.network_bytes_per_second * min(len(node) for node in nodes)
        if network < gpu.link_bytes_per_second:
            return network, "the network"
    return gpu.link_bytes_per_second, gpu.link


def judge_messages(
    call: RollCall, kind: str, slowest: dict[int, float], gpu: Gpu | None, on_gpu: bool
) -> Finding:
    """Judge one kind of message. slowest: {bytes: seconds on the slowest rank}."""
    largest, smallest = max(slowest), min(slowest)
    rates = {size: bus_bandwidth(kind, size, seconds, call.size) for size, seconds in slowest.items()}
    # The largest message shows the link, the smallest the way to it.
    rate, answer = rates[largest], slowest[smallest]
    name = kind.replace("-", "_")
    values = {f"{name}_bytes_per_second": rate, f"{name}_seconds_of_smallest": answer}
    values[f"{name}_bytes_per_second_by_size"] = {str(size): value for size, value in rates.items()}
    what = f"{several(call.size, 'rank')}: {num_bytes(rate)}/s of bus bandwidth at {num_bytes(largest)}"
    remedies = []
    if gpu is not None:
        peak, link = link_peak(gpu, call.nodes)
        values[f"{name}_share_of_peak"] = rate / peak
        what += f", {rate / peak:.0%} of {num_bytes(peak)}/s ({gpu.name}: {link})"
        if rate < HALF_OF_THE_LINK * peak:
            remedies.append(OTHER_PATH if len(call.nodes) == 1 else OTHER_NETWORK)
    what += f"; {num_bytes(smallest)} take {duration(answer)}"
    if on_gpu and answer > SLOW_ANSWER_SECONDS:
        remedies += ["small messages are slow: bind each rank to the cores near its GPU, look for other load"]
    return Finding(kind, COSTS if remedies else FINE, what, "; ".join(remedies), values=values)


class Products(NamedTuple):
    """Shape of the products to measure, which are those of a layer's feed-forward part."""

    tokens: int
    width: int
    inner: int
    precision: str


NO_RECIPE = Products(16_384, 4096, 14_336, "bf16")
"""The products of a model of 7 billion parameters (recipes/7b.json)."""


def products_of(recipe: Recipe | None, on_gpu: bool) -> Products:
    """Return the products of a recipe; without a GPU smaller ones, without a recipe those of a usual model."""
    products = NO_RECIPE
    if recipe is not None:
        tokens, precision = recipe.micro_batch * recipe.sequence_length, recipe.training.product_precision
        widths = widths_of(recipe.model)
        products = Products(tokens, widths.hidden, widths.expert_inner, precision)
    if not on_gpu:  # narrower ones of fewer tokens, in fp32
        width, inner = products.width, products.inner
        while ROUND_FLOPS * FEWEST_TOKENS * width * inner > PROCESSOR_FLOPS:
            width, inner = width // 2, inner // 2
        tokens = min(products.tokens, int(PROCESSOR_FLOPS / (ROUND_FLOPS * width * inner)))
        products = Products(tokens, width, inner, "fp32")
    return products


def judge_devices(
    products: Products, gpu: Gpu | None, on_gpu: bool, call: RollCall, found: list[dict]
) -> list[Finding]:
    """Judge rates of products, of copies on GPUs, and of the host's memory; name slow ranks."""
    findings = judge_products(call, products, gpu, on_gpu, found)
    if on_gpu:
        findings += _judge_copies(call, gpu, found)
    rates = [each["host_memory_bytes_per_second"] for each in found]
    slowest, together = min(rates), sum(rates)
    what = f"copies run at {num_bytes(together)}/s in all, {num_bytes(slowest)}/s on the slowest rank"
    values = {"host_memory_bytes_per_second": together, "slowest_host_memory_bytes_per_second": slowest}
    return [*findings, Finding("copies in host memory", FINE, what, values=values)]


def measure_rank(products: Products, on_gpu: bool) -> dict:
    """Return one rank's {"flops_per_second", "state" of the GPU under load, and rates of copies}."""
    flops, multiply = round_of_products(products, on_gpu)
    answer: dict = {"flops_per_second": flops * rounds_a_second(multiply, on_gpu)}
    multiply()  # so that the GPU is at work when it is asked
    answer["state"] = GpuReadings().under_load() if on_gpu else {}
    if on_gpu:
        here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        answer["to_device_bytes_per_second"] = _copy_rate(there, here)
        answer["from_device_bytes_per_second"] = _copy_rate(here, there)
    size = COPY_BYTES if on_gpu else COPY_BYTES_ELSEWHERE
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    # a copy reads every byte and writes it
    return answer | {"host_memory_bytes_per_second": 2 * _copy_rate(target, source)}


def round_of_products(products: Products, on_gpu: bool) -> tuple[int, Callable[[], None]]:
    """Return the FLOPs of one round, and the round itself.

    It goes into the feed-forward part of a layer and back, and computes the gradient of one of its weights, which
    is a slower shape. In a training pass a third of the products are such gradients too.
    """
    tokens, width, inner, precision = products
    make = {"dtype": DTYPES[precision], "device": "cuda" if on_gpu else "cpu"}
    shapes = (tokens, width), (width, inner), (inner, width)
    hidden, up, down = (torch.randn(*shape, **make) for shape in shapes)

    def multiply() -> None:
        inside = hidden @ up
        _ = inside @ down
        # summed over all tokens into a small output
        _ = hidden.T @ inside

    return ROUND_FLOPS * tokens * width * inner, multiply


def rounds_a_second(multiply: Callable[[], None], on_gpu: bool) -> float:
    """Return the median rate of some samples after a long load."""
    load, sample = (LOADED_SECONDS, SAMPLE_SECONDS) if on_gpu else (0.1, 0.05)
    rounds_within(load, multiply, on_gpu)
    # the median: neither a process that ran beside it for a moment counts, nor a clock that was raised for one
    found = [rounds_within(sample, multiply, on_gpu) for _ in range(SAMPLES)]
    return statistics.median(done / seconds for done, seconds in found)


def rounds_within(seconds: float, multiply: Callable[[], None], on_gpu: bool) -> tuple[int, float]:
    """Run as many rounds as fit into `seconds`; return (rounds, seconds that they took)."""
    done, began = 0, time.perf_counter()
    while (passed := now_of_device() - began) < seconds:
        # eight launches for one wait: waiting each time would leave the GPU idle in between
        for _ in range(8 if on_gpu else 1):
            multiply()
            done += 1
    return done, passed


def _copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    seconds = []
    for _ in range(4):
        began = now_of_device()
        # non_blocking has an effect with pinned memory only
        target.copy_(source, non_blocking=True)
        seconds.append(now_of_device() - began)
    return source.numel() / min(seconds)


def state_in_words(state: dict) -> str:
    """Write `1,410 MHz, 83 C, 690 W, held back by heat (driver)`, or an empty string."""
    units = {"clock_hz": (1e-6, "MHz"), "temperature_celsius": (1, "C"), "watts": (1, "W")}
    words = [f"{state[key] * scale:,.0f} {unit}" for key, (scale, unit) in units.items() if key in state]
    if state.get("held_back_by"):
        words.append(f"held back by {' and '.join(state['held_back_by'])}")
    return ", ".join(words)


def slow_ranks(rates: list[float], share: float) -> list[int]:
    """List the ranks below this share of the median."""
    # high: of two ranks the faster one is the median, so that the slower one can be found
    median = statistics.median_high(rates)
    return [rank for rank, rate in enumerate(rates) if rate < share * median]


def judge_products(
    call: RollCall, products: Products, gpu: Gpu | None, on_gpu: bool, found: list[dict]
) -> list[Finding]:
    rates = [each["flops_per_second"] for each in found]
    median, slowest = statistics.median_high(rates), min(rates)
    tokens, width, inner, precision = products
    # the name under which plans look for the rate (`planning.gpus.RATES`)
    kept = "product_flops" if on_gpu and precision in ("bf16", "fp16") else f"{precision}_product_flops"
    values = {kept: median, f"slowest_{kept}": slowest}
    what = f"{precision} products, {tokens:,} tokens from {width:,} to {inner:,} and back, and the gradient of a weight"
    what += f": {three_digits(median / 1e12)} TFLOP/s a rank (median)"
    remedy = ""
    if gpu is not None and precision in gpu.dense_peak_flops:
        share = median / gpu.peak_flops(precision)
        values["share_of_peak"] = share
        what += f", {share:.0%} of {gpu.name}'s dense peak"
        if share < HALF_OF_THE_PEAK and width >= WIDE:
            remedy = "look for other processes, the power limit and heat: nvidia-smi -q -d PERFORMANCE"
    findings = [Finding("products", COSTS if remedy else FINE, what, remedy, values=values)]
    for rank in slow_ranks(rates, SLOW_RANK if on_gpu else SLOW_PROCESSOR):
        rate, state = rates[rank], found[rank]["state"]
        what = f"{three_digits(rate / 1e12)} TFLOP/s, {1 - rate / median:.0%} below the median"
        what += f" ({words})" if (words := state_in_words(state)) else ""
        remedy = "all ranks wait for it: look for other processes there, heat, and a power limit; or leave the node out"
        values = {"flops_per_second": rate, **state}
        findings.append(Finding("slow rank", COSTS, what, remedy, str(call.ranks[rank]), values))
    return findings


def _judge_copies(call: RollCall, gpu: Gpu | None, found: list[dict]) -> list[Finding]:
    """Judge the copies both ways, which all ranks made at once, since they share the bus."""
    findings = []
    for way, words in (("to", "from host memory to the GPU"), ("from", "from the GPU to host memory")):
        key = f"{way}_device_bytes_per_second"
        rates = [each[key] for each in found]
        median, slowest = statistics.median_high(rates), min(rates)
        values = {key: median, f"slowest_{key}": slowest}
        what = f"{several(call.size, 'rank')} {words}: {num_bytes(median)}/s a rank, {num_bytes(slowest)}/s the slowest"
        where, remedy = "", ""
        if slow := slow_ranks(rates, HALF_OF_THE_BUS):
            where = named(call.ranks, slow)
            remedy = "bind the rank to its GPU's socket (numactl), and see lanes: nvidia-smi -q | grep -A8 'Link Width'"
        if gpu is not None:
            share = median / gpu.pcie_bytes_per_second
            what += f", {share:.0%} of {gpu.name}'s bus"
            if share < HALF_OF_THE_BUS and not remedy:
                remedy = "offloading and saving wait for it: "
                remedy += "nvidia-smi -q shows the link's width and generation"
        findings.append(Finding("copies", COSTS if remedy else FINE, what, remedy, where, values))
    return findings
