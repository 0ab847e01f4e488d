"""Measure each rank's own device, all at once: products of the recipe's shapes, copies to and from the host."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pretraining.doctor.findings import COSTS, FINE, Finding
from pretraining.doctor.messages import now_of_device
from pretraining.doctor.roll_call import RollCall, named
from pretraining.planning.gpus import Gpu
from pretraining.planning.quantities import num_bytes, several, three_digits
from pretraining.planning.shapes import shape_of, widths_of
from pretraining.planning.throughput import precision_of_products
from pretraining.recipe import Recipe
from pretraining.training.throughput import GpuReadings

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
"""Load before the samples, and each sample. Clocks fall for some tens of seconds, to what power and cooling allow."""
SAMPLES = 5
FEWEST_TOKENS = 16
ROUND_FLOPS = 6
"""Of a round, for every token, input and output: three products, each of 2 FLOPs (multiply and add)."""
PROCESSOR_FLOPS = 2e8
"""FLOPs of one round on a processor, which takes some milliseconds."""
COPY_BYTES, COPY_BYTES_ELSEWHERE = 256 << 20, 32 << 20
DEVICE_SECONDS = 45.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}


@dataclass(frozen=True)
class Products:
    """Shape of the products to measure, which are those of a layer's feed-forward part."""

    tokens: int
    width: int
    inner: int
    precision: str


NO_RECIPE = Products(16_384, 4096, 14_336, "bf16")
"""The products of a model of 7 billion parameters (recipes/7b.json)."""


def products_of(recipe: Recipe | None, on_gpu: bool) -> Products:
    """Choose the products of a micro-batch of the recipe; on a processor narrower ones of fewer tokens, in fp32."""
    products = NO_RECIPE
    if recipe is not None:
        tokens, precision = recipe.micro_batch * recipe.sequence_length, precision_of_products(recipe)
        widths = widths_of(shape_of(recipe.model))
        products = Products(tokens, widths.hidden, widths.expert_inner, precision)
    if on_gpu:
        return products
    width, inner = products.width, products.inner
    while ROUND_FLOPS * FEWEST_TOKENS * width * inner > PROCESSOR_FLOPS:
        width, inner = width // 2, inner // 2
    tokens = min(products.tokens, int(PROCESSOR_FLOPS / (ROUND_FLOPS * width * inner)))
    return Products(tokens, width, inner, "fp32")


def measure_devices(call: RollCall, recipe: Recipe | None, gpu: Gpu | None, on_gpu: bool) -> list[Finding]:
    """Measure rates of products, of copies on GPUs, and of the host's memory; name slow ranks."""
    products = products_of(recipe, on_gpu)
    work = Devices(products, on_gpu)
    found = call.values("products and copies", work.measure, DEVICE_SECONDS)
    findings = _products(call, products, gpu, on_gpu, found)
    if on_gpu:
        findings += _copies(call, gpu, found)
    rates = [each["host_memory_bytes_per_second"] for each in found]
    slowest, together = min(rates), sum(rates)
    message = f"copies run at {num_bytes(together)}/s in all, {num_bytes(slowest)}/s on the slowest rank"
    values = {"host_memory_bytes_per_second": together, "slowest_host_memory_bytes_per_second": slowest}
    return [*findings, Finding("copies in host memory", FINE, message, values=values)]


class Devices:
    """Make one rank's measurements."""

    def __init__(self, products: Products, on_gpu: bool):
        self.products, self.on_gpu = products, on_gpu
        self.device = "cuda" if on_gpu else "cpu"

    def measure(self) -> dict:
        """Return {"flops_per_second", "state" of the GPU under load, and rates of copies}."""
        rate, state = self._rate(*self._products())
        answer = {"flops_per_second": rate, "state": state}
        if self.on_gpu:
            here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
            answer["to_device_bytes_per_second"] = self._copy_rate(there, here)
            answer["from_device_bytes_per_second"] = self._copy_rate(here, there)
        size = COPY_BYTES if self.on_gpu else COPY_BYTES_ELSEWHERE
        source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        # a copy reads every byte and writes it
        return answer | {"host_memory_bytes_per_second": 2 * self._copy_rate(target, source)}

    def _products(self) -> tuple[float, Callable[[], None]]:
        """Return the FLOPs of one round, and the round itself.

        It goes into the feed-forward part of a layer and back, and computes the gradient of one of its weights, which
        is a slower shape. In a training pass a third of the products are such gradients too.
        """
        tokens, width, inner = self.products.tokens, self.products.width, self.products.inner
        make = {"dtype": DTYPES[self.products.precision], "device": self.device}
        hidden, up, down = (
            torch.randn(*shape, **make) for shape in ((tokens, width), (width, inner), (inner, width))
        )

        def multiply() -> None:
            inside = hidden @ up
            _ = inside @ down
            # summed over all tokens into a small output
            _ = hidden.T @ inside

        return float(ROUND_FLOPS * tokens * width * inner), multiply

    def _rate(self, flops: float, multiply: Callable[[], None]) -> tuple[float, dict]:
        """Return the median rate of some samples after a long load, and the GPU's state under this load."""
        load, sample = (LOADED_SECONDS, SAMPLE_SECONDS) if self.on_gpu else (0.1, 0.05)
        self._rounds(multiply, load)
        # the median: neither a process that ran beside it for a moment counts, nor a clock that was raised for one
        found = [self._rounds(multiply, sample) for _ in range(SAMPLES)]
        rate = statistics.median(done / seconds for done, seconds in found)
        multiply()  # so that the GPU is at work when it is asked
        state = GpuReadings().under_load() if self.on_gpu else {}
        return flops * rate, state

    def _rounds(self, multiply: Callable[[], None], seconds: float) -> tuple[int, float]:
        """Run as many rounds as fit into `seconds`; return (rounds, seconds that they took)."""
        done, began = 0, time.perf_counter()
        while (passed := now_of_device() - began) < seconds:
            # eight launches for one wait: waiting each time would leave the GPU idle in between
            for _ in range(8 if self.on_gpu else 1):
                multiply()
                done += 1
        return done, passed

    def _copy_rate(self, target: torch.Tensor, source: torch.Tensor) -> float:
        best = float("inf")
        for _ in range(4):
            began = now_of_device()
            # non_blocking has an effect with pinned memory only
            target.copy_(source, non_blocking=True)
            best = min(best, now_of_device() - began)
        return source.numel() / best


def state_in_words(state: dict) -> str:
    """Write `1,410 MHz, 83 C, 690 W, held back by heat (driver)`, or an empty string."""
    words = []
    if "clock_hz" in state:
        words.append(f"{state['clock_hz'] / 1e6:,.0f} MHz")
    if "temperature_celsius" in state:
        words.append(f"{state['temperature_celsius']:.0f} C")
    if "watts" in state:
        words.append(f"{state['watts']:.0f} W")
    if state.get("held_back_by"):
        words.append(f"held back by {' and '.join(state['held_back_by'])}")
    return ", ".join(words)


def slow_ranks(rates: list[float], share: float) -> list[int]:
    """List the ranks below this share of the median."""
    # high: of two ranks the faster one is the median, so that the slower one can be found
    median = statistics.median_high(rates)
    return [rank for rank, rate in enumerate(rates) if rate < share * median]


def _products(
    call: RollCall, products: Products, gpu: Gpu | None, on_gpu: bool, found: list[dict]
) -> list[Finding]:
    rates = [each["flops_per_second"] for each in found]
    median, slowest = statistics.median_high(rates), min(rates)
    precision = products.precision
    # the name under which plans look for the rate (`planning.gpus.RATES`)
    kept = "product_flops" if on_gpu and precision in ("bf16", "fp16") else f"{precision}_product_flops"
    values = {kept: median, f"slowest_{kept}": slowest}
    shape = f"{products.tokens:,} tokens from {products.width:,} to {products.inner:,} and back"
    rate = f"{three_digits(median / 1e12)} TFLOP/s a rank (median)"
    message = f"{precision} products, {shape}, and the gradient of a weight: {rate}"
    verdict, remedy = FINE, ""
    if gpu is not None and precision in gpu.dense_peak_flops:
        share = median / gpu.peak_flops(precision)
        values["share_of_peak"] = share
        message += f", {share:.0%} of {gpu.name}'s dense peak"
        if share < HALF_OF_THE_PEAK and products.width >= WIDE:
            verdict = COSTS
            remedy = "look for other processes, the power limit and heat: nvidia-smi -q -d PERFORMANCE"
    findings = [Finding("products", verdict, message, remedy, values=values)]
    for rank in slow_ranks(rates, SLOW_RANK if on_gpu else SLOW_PROCESSOR):
        state = state_in_words(found[rank]["state"])
        message = (
            f"{three_digits(rates[rank] / 1e12)} TFLOP/s, {1 - rates[rank] / median:.0%} below the median"
        )
        message += f" ({state})" if state else ""
        remedy = "all ranks wait for it: look for other processes there, heat, and a power limit; or leave the node out"
        values = {"flops_per_second": rates[rank], **found[rank]["state"]}
        findings.append(Finding("slow rank", COSTS, message, remedy, str(call.ranks[rank]), values))
    return findings


def _copies(call: RollCall, gpu: Gpu | None, found: list[dict]) -> list[Finding]:
    """Judge the copies both ways, which all ranks made at once, since they share the bus."""
    findings = []
    for way, words in (("to", "from host memory to the GPU"), ("from", "from the GPU to host memory")):
        key = f"{way}_device_bytes_per_second"
        rates = [each[key] for each in found]
        median, slowest = statistics.median_high(rates), min(rates)
        values = {key: median, f"slowest_{key}": slowest}
        message = f"{words}: {num_bytes(median)}/s a rank, {num_bytes(slowest)}/s the slowest"
        where, verdict, remedy = "", FINE, ""
        slow = slow_ranks(rates, HALF_OF_THE_BUS)
        if slow:
            where, verdict = named(call.ranks, slow), COSTS
            remedy = "bind the rank to its GPU's socket (numactl), and see lanes: nvidia-smi -q | grep -A8 'Link Width'"
        if gpu is not None:
            message += f", {median / gpu.pcie_bytes_per_second:.0%} of {gpu.name}'s bus"
            if median < HALF_OF_THE_BUS * gpu.pcie_bytes_per_second:
                narrow = (
                    "offloading and saving wait for it: nvidia-smi -q shows the link's width and generation"
                )
                verdict, remedy = COSTS, remedy or narrow
        message = f"{several(call.size, 'rank')} {message}"
        findings.append(Finding("copies", verdict, message, remedy, where, values))
    return findings
