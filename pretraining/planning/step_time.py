"""The share of a GPU's peak that a recipe reaches: measured here, or estimated from assumed rates of its kernels.

A training pass consists of products and attention, which are bound by FLOPs, and of all other kernels, which are
bound by the bytes they read and write. How many bytes a layer's kernels move for a token is linear in its widths.
tables/kernels.json holds the factors, which benchmarks/kernel_factors.py counted on the real model, eager and
compiled. Gaps between kernels, messages of ZeRO and waits are not counted. Bytes and FLOPs are exact, their rates are
not. The estimate has one rate for all shapes, which wide products may exceed and narrow ones miss. What to expect is
the same count with rates by width, head and length (tables/rates.json). What ranks send each other: messages.py.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from pretraining.ds_config import NOT_SPLIT, Degrees, optimizer_device, parameter_device
from pretraining.errors import UserError
from pretraining.outside.schema import display_path
from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu, kept_rates, known_gpu
from pretraining.planning.memory.activations import chunk_length, compiles_loss, logit_bytes
from pretraining.planning.memory.need import skips_last_product
from pretraining.planning.messages import (
    GRADIENTS,
    LAYER_MESSAGES,
    Message,
    layer_messages,
    step_messages,
    stops_for_gradients,
)
from pretraining.planning.setup import FP32, SIXTEEN_BIT, Setup
from pretraining.planning.shapes import HIDDEN, ROUTER, family_of, ranks_met, rows_of_rank, widths_of_rank
from pretraining.planning.sizes import BACKWARD, fp8_tensors
from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.refusals import compiled_part
from pretraining.runtime.installation import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"
SAME_SIZE = 1.25
"""Models whose parameters differ by no more than this factor count as the same size."""
ESTIMATED = "estimated from assumed rates"
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass over its forward pass: five products to two, as the scores are computed again."""
SIXTEEN_BIT_NAMES = ("bf16", "fp16")
FP8_CAST_BYTES = {"compiled": 10, "eager": 66}
"""Bytes that move for a 16-bit input, weight or gradient which is cast to fp8 for each of its two products. Compiled,
it is read for the largest number, read again, and written; eager, six kernels read and write, four of them in fp32."""
CAUSAL = 0.5
"""Share of the scores that a causal kernel computes."""


@dataclass(frozen=True)
class Utilization:
    """A model FLOPs utilization (share of the dense peak) and where it comes from."""

    mfu: float
    """Its value if nothing is recomputed."""
    source: str
    assumed: bool
    """Whether it is neither given nor measured here, and so does not include this run's messages."""


@dataclass(frozen=True)
class Ceiling:
    """The time of one micro-batch on one GPU if nothing waits."""

    seconds: dict[str, float]
    """Seconds by what they are spent on; the optimizer's are divided by the micro-batches of a step."""
    mfu: float
    """Model FLOPs, divided by all these seconds and the dense peak."""
    mfu_without_recomputation: float
    """The same if no layer were recomputed."""
    products_measured_on: str | None
    """The day on which the doctor measured this machine's products; None if their rate is assumed."""


@dataclass(frozen=True)
class Rates:
    """Rates that a GPU sustains in training."""

    product_flops: float
    """FLOPs a second of large matrix products."""
    attention_flops: float
    bytes: float
    """Bytes read and written a second."""
    products_measured_on: str | None
    """The day on which the doctor measured products; None if their rate is assumed."""


def recipe_utilization(setup: Setup, gpu: Gpu, at_best: Ceiling) -> Utilization:
    """Return what was measured here on this GPU at this size, else the estimate for the recipe's own kernels."""
    flops = setup.flops
    measured = expected_utilization(gpu, setup.size.total, recomputation=flops.hardware / flops.training)
    # a measurement on this machine is worth more than any count
    if not measured.assumed:
        return measured
    day = at_best.products_measured_on
    how = f", products as measured here on {day}" if day else ""
    return Utilization(at_best.mfu_without_recomputation, f"{ESTIMATED}{how}", assumed=True)


def ceiling(setup: Setup, gpu: Gpu, precision: str, rates: Rates | None = None) -> Ceiling:
    """Return what a recipe's kernels take on this GPU; `UserError` as `step_time`.

    precision: that of the products: bf16, fp16, tf32 or fp32. rates: of its kernels; None for `sustained_rates`.
    """
    recipe, degrees, size = setup.recipe, setup.degrees, setup.size
    rates, behind = rates or sustained_rates(gpu, precision, setup.world_size), size.gradients
    tokens = setup.tokens_of_pass
    # products in fp32 are slower, by so many seconds for one FLOP on each weight that a token meets
    wide, wide_seconds = size.head * setup.head_is_wide, 0.0
    wide += sum(tensor.numel for tensor in setup.wide if tensor.kind in (HIDDEN, ROUTER))
    if wide:
        # in TF32 unless `training.tf32` is false (training/arguments.py), or the GPU has none
        tf32 = "tf32" in gpu.dense_peak_flops and recipe.training.get("tf32") is not False
        of_wide = sustained_rates(gpu, "tf32" if tf32 else "fp32", setup.world_size)
        wide_seconds = (1 + BACKWARD) * wide * (1 / of_wide.product_flops - 1 / rates.product_flops)
    in_layers = (size.matmul - size.head) / degrees.tensor
    # the table's factors are for 16-bit numbers
    width = setup.precision.compute / SIXTEEN_BIT
    mode = layer_mode(setup)
    in_fp8 = fp8_tensors(recipe) if "fp8" in gpu.dense_peak_flops else ()
    # until the decay, if that is in bf16
    until = recipe.decay_start(recipe.num_steps) / recipe.num_steps if recipe.speed.bf16_decay else 1.0
    faster = until * sum(tensor.numel for tensor in in_fp8)
    # others measured no gain of scales by row (docs/speed.md): their products are counted as those in bf16
    peak = gpu.peak_flops(precision)
    faster *= 1 - peak / (gpu.dense_peak_flops.get("fp8", peak) if recipe.speed.fp8 == "tensorwise" else peak)
    cast = until * FP8_CAST_BYTES[mode] * sum(tensor.factors * tokens + tensor.numel for tensor in in_fp8)
    # 2 products of 2 FLOPs each: queries with keys, probabilities with values
    scores = CAUSAL * 4 * size.num_layers * size.attention_width * recipe.sequence_length * tokens
    scores /= degrees.tensor
    forward, backward, redone = (
        width * size.num_layers * _layer_bytes(setup, mode, direction, tokens)
        for direction in ("forward", "backward", "again")
    )
    # embeddings and the last norm, forward and backward
    outside = table("kernels")["layers"][family_of(recipe.model)][mode]["outside"]
    outside *= width * tokens * setup.widths.hidden
    skipped = size.num_layers * last_product(recipe.model) if skips_last_product(setup) else 0
    # layers are recomputed, and the head belongs to none
    recomputed = 2 * (in_layers - faster - skipped / degrees.tensor) * tokens
    again = behind.layers * recipe.training.recomputed_share
    # products and attention may be kept
    products_again = 0 if recipe.speed.recompute == "operators" else again
    engine = table("kernels")["engines"][str(setup.stage)]
    trained = sum(family.trained_numel for family in setup.families)
    products = size.matmul + behind.weights + behind.inputs - (1 + BACKWARD) * faster
    products = products / rates.product_flops + wide_seconds
    of_loss = (FP32 / SIXTEEN_BIT if setup.head_is_wide else width) * _loss_kernel_bytes(setup, tokens, gpu)
    seconds = {
        "products": 2 * tokens * products / degrees.tensor,
        "attention": (1 + ATTENTION_BACKWARD * behind.layers) * scores / rates.attention_flops,
        "other kernels": (forward + behind.layers * backward + outside + cast) / rates.bytes,
        "loss": of_loss / rates.bytes,
        "recomputation": products_again * (recomputed / rates.product_flops + scores / rates.attention_flops)
        + again * redone / rates.bytes,
        "gradients": engine["micro-batch"] * trained / rates.bytes,
        # one step for all micro-batches of it
        "optimizer": _step_bytes(setup, engine) / rates.bytes / setup.accumulation,
    }
    # nothing of a layer is left to compute while it waits for these
    for message in layer_messages(setup, gpu):
        if message.total:
            seconds[message.name] = message.seconds / setup.accumulation
    # MFU counts model FLOPs alone, and the scores without the mask (PaLM, appendix B)
    at_peak = setup.flops.training * tokens / gpu.peak_flops(precision) / degrees.tensor
    total = sum(seconds.values())
    without = at_peak / (total - seconds["recomputation"])
    return Ceiling(seconds, at_peak / total, without, rates.products_measured_on)


def expected_utilization(
    gpu: Gpu, parameters: int, results: Path = RESULTS, recomputation: float = 1.0
) -> Utilization:
    """Return what this repository measured on this GPU at this size, else the assumption of tables/rates.json.

    A measurement is a line of benchmarks/results/*.jsonl with `mfu` and `parameters` beside the device's name.

    Args:
        recomputation: FLOPs with every layer recomputed, divided by those without. A measured MFU is raised by the
            part of it that the line's `recomputes` says, which is the share of recomputed layers.
    """
    rows = (row for row in _rows_of(gpu, "mfu", results) if row.get("parameters"))
    alike = [row for row in rows if 1 / SAME_SIZE <= row["parameters"] / parameters <= SAME_SIZE]
    if alike:
        # the newest line counts: drivers and libraries change
        row = max(alike, key=lambda row: row.get("when", ""))
        source = f"measured by benchmarks/{row['benchmark']}.py on {row['environment']['device']}"
        mfu = row["mfu"] * (1 + row.get("recomputes", 0) * (recomputation - 1))
        return Utilization(mfu, f"{source}, {row.get('when', 'undated')}", assumed=False)
    assumed = table("rates")["mfu"]
    entry = assumed.get(gpu.name, assumed["*"])
    return Utilization(entry["value"], entry["source"], assumed=True)


def _rows_of(gpu: Gpu, key: str, results: Path) -> list[dict]:
    """Return the kept results of this GPU that have a value under a key."""
    # a line without a device is like one with a device that the table does not know
    rows = _measured(key, results)
    devices = [known_gpu(row.get("environment", {}).get("device", "")) for row in rows]
    return [row for row, device in zip(rows, devices, strict=True) if device and device.name == gpu.name]


@cache
def _measured(key: str, results: Path) -> tuple[dict, ...]:
    """Return the kept results that have a value under a key; `UserError` if a line is not JSON."""
    rows = []
    for path in sorted(results.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            # most lines are from other benchmarks: only those that name the key are parsed
            if f'"{key}"' not in line:
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                what = f"line {number}: not JSON ({error}); remove it"
                raise UserError(f"{display_path(path)}: {what}") from None
            if row.get(key):
                rows.append(row)
    return tuple(rows)


def tokens_per_second(flops: float, num_gpus: int, peak_flops: float, mfu: float) -> float:
    """Return tokens per second of all GPUs, at `flops` FLOPs a token (the MFU's definition, PaLM appendix B)."""
    return num_gpus * peak_flops * mfu / flops


def model_flops_utilization(
    tokens_per_second: float, flops: float, num_gpus: int, peak_flops: float
) -> float:
    """Return the MFU: the share of the dense peak spent on `flops` FLOPs a token (PaLM, section 4.1, appendix B)."""
    return tokens_per_second * flops / (num_gpus * peak_flops)


def sustained_rates(gpu: Gpu, precision: str, num_gpus: int) -> Rates:
    """Return the rates of tables/rates.json for the GPU's architecture; for products, the rate measured by the doctor.

    `UserError` if the GPU has no such precision. num_gpus: GPUs of the run. A rate that was measured here counts only
    for the same number of the same GPUs.
    """
    shares = table("rates")["sustained"]
    product, attention, bandwidth = (
        shares[name].get(gpu.architecture, shares[name]["*"])["value"]
        for name in ("products", "attention", "memory")
    )
    peak = gpu.peak_flops(precision)
    # the doctor measures 16-bit products only (`gpus.RATES`)
    measured = kept_rates(gpu.name, num_gpus).get("product_flops") if precision in SIXTEEN_BIT_NAMES else None
    return Rates(
        # if the clock is raised for a moment, the measured rate can exceed the data sheet's peak
        product_flops=min(peak, measured["value"]) if measured else product * peak,
        attention_flops=attention * peak,
        bytes=bandwidth * gpu.memory_bandwidth_bytes_per_second,
        products_measured_on=measured["date"] if measured else None,
    )


def expected_rates(setup: Setup, gpu: Gpu, precision: str, results: Path = RESULTS) -> Rates:
    """Return the rates of this model's own shapes: narrow models, small heads and short texts have less.

    They are those that benchmarks/rates.py measured on this GPU. Else they are shares of the sustained rates, Hopper's
    (tables/rates.json, `expected`): other architectures are assumed to lose as much. Products that the doctor measured
    are of the recipe's shapes already.
    """
    at_best, shares = sustained_rates(gpu, precision, setup.world_size), table("rates")["expected"]
    rows = _rows_of(gpu, "products", results)
    rows = [row for row in rows if row["benchmark"] == "rates" and not row["small"]]
    measured = max(rows, key=lambda row: row["when"]) if rows and precision in SIXTEEN_BIT_NAMES else None
    products, attention = ((measured or shares)[name] for name in ("products", "attention"))
    # the widest heads of the table that are no wider than the model's
    by_head = sorted(attention["value"], key=lambda row: row["head_size"])
    row = next((row for row in reversed(by_head) if row["head_size"] <= setup.widths.head_size), by_head[0])
    of_products = _between(products["widths"], products["value"], setup.widths.hidden)
    of_attention = _between(attention["lengths"], row["value"], setup.recipe.sequence_length)
    if measured:
        return Rates(of_products, of_attention, measured["memory"], measured["when"])
    return replace(
        at_best,
        product_flops=(1.0 if at_best.products_measured_on else of_products) * at_best.product_flops,
        attention_flops=of_attention * at_best.attention_flops,
        bytes=shares["memory"]["value"] * at_best.bytes,
    )


def _between(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """Interpolate by the logarithm of a size; the ends of a table count for what lies outside."""
    after = bisect_left(sizes, size)
    if after in (0, len(sizes)):
        return values[min(after, len(sizes) - 1)]
    share = math.log(size / sizes[after - 1]) / math.log(sizes[after] / sizes[after - 1])
    return (1 - share) * values[after - 1] + share * values[after]


def layer_mode(setup: Setup) -> str:
    """Return which factors of tables/kernels.json hold for the recipe's layers: `eager` or `compiled`."""
    return "eager" if compiled_part(setup.recipe, setup.ds_config) == "none" else "compiled"


def _layer_bytes(setup: Setup, mode: str, direction: str, tokens: int) -> float:
    """Return the bytes that one layer's kernels move for a micro-batch in 16 bit, without products and attention.

    direction: `forward`, `backward`, or `again`, for a forward pass whose layers are recomputed.
    """
    model = setup.recipe.model
    kernels, widths = table("kernels"), layer_widths(model, tokens, setup.degrees)
    family = family_of(model) + (" split" if setup.degrees.expert > 1 else "")
    counted = kernels["layers"][family][mode]
    # the recomputation of split experts ends before their results are added up
    direction = direction if direction in counted else "forward"
    factors = counted[direction]
    # an activation function written in Python is several kernels, and each reads and writes all inner values
    values = model_with_defaults(model)
    activation = values.get("activation_function") or values.get("hidden_act") or ""
    written_out = kernels["activations"].get(activation, {}).get(mode, {}).get(direction, 0.0)
    moved = sum(factor * widths[name] for name, factor in factors.items())
    return tokens * (moved + written_out * _inner_width(widths))


def _inner_width(widths: dict[str, float]) -> float:
    return widths["inner"] if "inner" in widths else widths["routed inner"]


def layer_widths(model: dict, tokens: int, degrees: Degrees = NOT_SPLIT) -> dict[str, float]:
    """Return the widths in which a layer's bytes for a token are linear.

    `routed` counts a token once for every expert it is given to; the experts' weights are shared among the tokens.
    """
    of_layer = widths_of_rank(model, degrees)
    if not of_layer.gated:
        return {"hidden": of_layer.hidden, "inner": of_layer.inner}
    widths = {"hidden": of_layer.hidden, "queries": of_layer.queries, "keys": of_layer.keys}
    routed = of_layer.chosen_experts
    if not of_layer.experts:
        return {**widths, "inner": of_layer.inner}
    widths |= {"routed hidden": routed * of_layer.hidden, "routed inner": routed * of_layer.expert_inner}
    if degrees.expert > 1:
        # a token's row is sent once to each rank, with all its choices
        sent = ranks_met(of_layer.experts, routed, degrees.expert)
        return {**widths, "sent hidden": sent * of_layer.hidden, "sent choices": sent * routed}
    # three matrices an expert, read once for all tokens of the micro-batch
    weights = 3 * of_layer.experts * of_layer.hidden * of_layer.expert_inner / tokens
    return {**widths, "routed": routed, "expert weights": weights}


def last_product(model: dict) -> int:
    """Return the entries of a layer's last matrix, whose product nothing keeps."""
    widths = layer_widths(model, tokens=1)
    return round(widths["hidden"] * _inner_width(widths))


def _loss_kernel_bytes(setup: Setup, tokens: int, gpu: Gpu) -> float:
    """Return the bytes that the loss moves in 16 bit on one rank, without the head's products."""
    recipe, hidden = setup.recipe, setup.widths.hidden
    vocab_size, kind = recipe.model.vocab_size, recipe.resolved_loss.kind
    if kind != "plain":
        vocab_size = rows_of_rank(vocab_size, setup.degrees)
    compiled = compiles_loss(recipe.loss.compile, on_gpu=True)
    factors = table("kernels")["loss"][kind]["compiled" if compiled else "eager"]
    of_logit, asked = logit_bytes(SIXTEEN_BIT, compiled), recipe.loss.chunk_tokens
    chunk = chunk_length(tokens, vocab_size, of_logit, gpu.memory_bytes, asked)
    # only the fused loss also moves the head and its gradient
    if kind != "fused":
        return tokens * factors["logit"] * vocab_size
    of_tokens = tokens * (factors["logit"] * vocab_size + factors["hidden"] * hidden)
    # every chunk adds to the gradient of the whole head
    of_head = factors["head"] + factors["head a chunk"] * -(-tokens // chunk)
    return of_tokens + of_head * vocab_size * hidden


def _step_bytes(setup: Setup, engine: dict[str, float]) -> float:
    """Return what an optimizer step moves on a GPU, by the measured engine of the stage, with an average's bytes."""
    is_offloaded, moved = optimizer_device(setup.ds_config) != "gpu", 0.0
    for family in setup.families:
        # the part of the step that ranks share shrinks with their number
        of_each = engine["step"] + engine["step of its share"] / family.ranks
        average = 0.0 if is_offloaded else average_bytes(setup.recipe) / (family.ranks if setup.stage else 1)
        moved += family.trained_numel * (of_each + average)
    return moved


# read: gradient, master and two moments; written: master and moments
ADAM_BYTES = 28
"""Bytes that the CPU optimizer moves for one element: it reads four fp32 numbers and writes three of them."""


def average_bytes(recipe: Recipe) -> float:
    """Return what a step moves for one element of an average of the weights: both are read, the average is written."""
    settings = recipe.optimizer
    return 0.0 if settings.average_decay is None else 3 * FP32 / settings.average_steps


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and what decides them."""

    compute_seconds: float
    """The FLOPs of the step at the utilization, recomputed ones included."""
    communication_seconds: float
    """The step's bytes at the peak of the slowest link on their way: a lower bound."""
    offload_seconds: float = 0.0
    """Seconds of transfers to the host and NVMe, and of the host's optimizer; they come after the products."""
    waiting_seconds: float = 0.0
    """Part of `compute_seconds` in which passes wait for messages: of split layers, sequences and experts, and the
    gradients of ZeRO-2."""
    launch_seconds: float = 0.0
    """Seconds that Python needs to launch the step's kernels; the GPU waits for it if the model is small."""
    expected_compute_seconds: float | None = None
    """`compute_seconds` at the rates of `expected_rates`; None if the utilization was given or measured."""
    expected_measured_on: str | None = None
    """The day on which these rates were measured, some or all of them."""
    utilization: Utilization | None = None
    """What `compute_seconds` were derived from."""
    kernel_seconds: dict[str, float] = field(default_factory=dict)
    """Of one micro-batch (`Ceiling.seconds`)."""
    messages: tuple[Message, ...] = ()

    @property
    def seconds(self) -> float:
        # not their sum: a utilization already includes what could not be hidden
        at_once = max(self.compute_seconds, self.communication_seconds, self.launch_seconds)
        return at_once + self.offload_seconds

    @property
    def expected_seconds(self) -> float | None:
        if self.expected_compute_seconds is None:
            return None
        return replace(self, compute_seconds=self.expected_compute_seconds).seconds

    @property
    def bound_by(self) -> str:
        parts = {
            "compute": self.compute_seconds - self.waiting_seconds,
            "links": max(self.communication_seconds, self.waiting_seconds),
            "offload": self.offload_seconds,
            "kernel launches": self.launch_seconds,
        }
        return max(parts, key=parts.get)

    def to_dict(self) -> dict:
        names = ("compute_seconds", "communication_seconds", "offload_seconds", "waiting_seconds")
        return {name: getattr(self, name) for name in (*names, "launch_seconds", "bound_by")}


def step_time(setup: Setup, gpu: Gpu, mfu: float | None = None, precision: str | None = None) -> StepTime:
    """Return the step of a recipe on GPUs; `UserError` if they do not divide it, or lack the precision.

    mfu: share of the dense peak without recomputation; None for the expected one. precision: that of the products; None
    for the recipe's.
    """
    recipe, accumulation = setup.recipe, setup.accumulation
    precision = precision or recipe.training.product_precision
    at_best = ceiling(setup, gpu, precision)
    used = Utilization(mfu, "given", False) if mfu else recipe_utilization(setup, gpu, at_best)
    # the kernels of recomputed layers run as fast, on more FLOPs; only products and attention are FLOPs that count
    again = 0.0 if recipe.speed.recompute == "operators" else recipe.training.recomputed_share
    flops, peak = setup.flops.training + again * setup.flops.recomputed, gpu.peak_flops(precision)
    rate = tokens_per_second(flops, setup.world_size, peak, used.mfu)
    compute, waiting, expected, day = recipe.tokens_per_step / rate, 0.0, None, None
    launch = table("rates")["launch_seconds"]["value"][str(setup.stage)][layer_mode(setup)]
    launch_of_pass = launch["micro-batch"] + setup.size.num_layers * launch["layer"]
    sent = step_messages(setup, gpu)
    alone = {*LAYER_MESSAGES, *([GRADIENTS] if stops_for_gradients(setup.ds_config) else [])}
    if used.assumed:
        # the seconds of every kernel are counted: no need to derive them from FLOPs and an MFU
        waiting = sum(message.seconds for message in sent if message.name in alone)
        rates = expected_rates(setup, gpu, precision)
        at_shapes = ceiling(setup, gpu, precision, rates)
        kernels, slower = (
            sum(seconds for name, seconds in each.seconds.items() if name not in LAYER_MESSAGES)
            for each in (at_best, at_shapes)
        )
        compute = accumulation * kernels + waiting
        expected = accumulation * slower / (1 - table("rates")["expected"]["gaps"]["value"]) + waiting
        day = rates.products_measured_on
    return StepTime(
        compute_seconds=compute,
        communication_seconds=sum(message.seconds for message in sent if message.name not in LAYER_MESSAGES),
        offload_seconds=_offload_seconds(setup, gpu),
        waiting_seconds=waiting,
        launch_seconds=launch["step"] + accumulation * launch_of_pass,
        expected_compute_seconds=expected,
        expected_measured_on=day,
        utilization=used,
        kernel_seconds=at_best.seconds,
        messages=tuple(sent),
    )


def scaling_over_nodes(gpu: Gpu, num_gpus: int, utilization_is_assumed: bool = True) -> dict | None:
    """Return {"nodes", "assumption"} for GPUs in more than one node; None if one node holds all.

    The tables hold no measured loss between nodes. The links' peaks only give a lower bound of the time.
    """
    nodes = -(-num_gpus // gpu.gpus_per_node)
    if nodes == 1:
        return None
    words = "perfect scaling is assumed: each GPU is as fast as in one node"
    if utilization_is_assumed:
        rate = f"{gpu.network_bytes_per_second / 1e9:g} GB/s a GPU"
        words += f", unless a step's messages at the network's peak ({rate}) take longer than its products"
    return {"nodes": nodes, "assumption": f"{words}; latency, congestion and slow nodes are not counted"}


def _offload_seconds(setup: Setup, gpu: Gpu) -> float:
    """Return the seconds of transfers and of the CPU's optimizer, nothing overlapped.

    The rates are those of tables/memory.json and of the GPU's PCIe (ZeRO-Offload, Ren et al. 2021, section 4).
    """
    config, accumulation = setup.ds_config, setup.accumulation
    rates, share = table("memory"), setup.size.total / setup.world_size
    in_node = min(setup.world_size, gpu.gpus_per_node)
    seconds = 0.0
    if optimizer_device(config) != "gpu":
        # 16-bit gradients go to the host once a micro-batch, 16-bit weights return once a step
        seconds += 2 * share * (accumulation + 1) / gpu.pcie_bytes_per_second
        # ranks of a node share its memory's bandwidth
        moved = (ADAM_BYTES + average_bytes(setup.recipe)) * share * in_node
        seconds += moved / rates["host_bandwidth_bytes_per_second"]["value"]
    if optimizer_device(config) == "nvme":
        # fp32 masters and moments: 12 bytes an element, read and written
        seconds += 2 * 12 * share * in_node / rates["nvme_bytes_per_second"]["value"]
    if parameter_device(config) == "nvme":
        # 16-bit weights, read for the forward and again for the backward pass
        seconds += 2 * 2 * share * in_node * accumulation / rates["nvme_bytes_per_second"]["value"]
    elif parameter_device(config) == "cpu":
        # PCIe's rate is per GPU (`gpus.Gpu`), so that the ranks of a node do not share it
        seconds += 2 * 2 * share * accumulation / gpu.pcie_bytes_per_second
    return seconds
