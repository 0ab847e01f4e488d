"""The most of a GPU's peak that a recipe can reach: what its kernels must compute and move, at the rates GPUs sustain.

A training pass is products and attention, bound by FLOPs, and all other kernels, bound by the bytes they read and
write. How many bytes a layer's kernels move for a token is linear in its widths; tables/kernels.json holds the
factors, counted by benchmarks/kernel_factors.py on the real model, eager and compiled. Nothing else is in it: no gap
between kernels, no message, no wait. So it is a ceiling, and a run stays below it.
"""

from dataclasses import dataclass

from pretraining.ds_config import zero_stage
from pretraining.planning.constants import table
from pretraining.planning.flops import BACKWARD, flops_per_token
from pretraining.planning.gpus import Gpu
from pretraining.planning.machine_rates import kept_rates
from pretraining.planning.memory.loss import chunk_length, compiles_loss, logit_bytes
from pretraining.planning.memory.need import recomputed_one_in, recomputed_share
from pretraining.planning.memory.precision import SIXTEEN_BIT, precision_of
from pretraining.planning.memory.tensors import num_experts
from pretraining.planning.sizes import model_size
from pretraining.planning.stand_in import shape_of
from pretraining.planning.throughput import Utilization, expected_utilization
from pretraining.recipe import Recipe, accumulation_steps
from pretraining.refusals import compiled_part

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass over its forward pass: five products for two, the scores are made again."""
SIXTEEN_BIT_NAMES = ("bf16", "fp16")
CAUSAL = 0.5
"""Share of the scores that a causal kernel computes."""


@dataclass(frozen=True)
class Rates:
    """What a GPU sustains in training."""

    product_flops: float
    """FLOPs a second of large matrix products."""
    attention_flops: float
    bytes: float
    """Read and written a second."""
    products_measured_on: str | None
    """The day on which the doctor measured products; None if their rate is assumed."""


@dataclass(frozen=True)
class Ceiling:
    """What one micro-batch takes on one GPU if nothing waits."""

    seconds: dict[str, float]
    """By what they are spent on; those of the optimizer are shared among the micro-batches of a step."""
    mfu: float
    """Model FLOPs over all these seconds and the dense peak."""
    mfu_without_recomputation: float
    """The same if no layer were recomputed."""
    products_measured_on: str | None
    """The day on which the doctor measured this machine's products; None if their rate is assumed."""


def ceiling(recipe: Recipe, ds_config: dict | None, world_size: int, gpu: Gpu, precision: str) -> Ceiling:
    """The most that a recipe's kernels reach on this GPU.

    Args:
        precision: of the products: bf16, fp16, tf32 or fp32.

    Raises:
        UserError: the GPU has no such precision, or the ranks do not divide the recipe's step.
    """
    rates, size = sustained_rates(gpu, precision, world_size), model_size(recipe.model)
    tokens = recipe.micro_batch * recipe.sequence_length
    width = precision_of(recipe, ds_config).compute / SIXTEEN_BIT  # the factors are those of 16-bit numbers
    mode = layer_mode(recipe, ds_config)
    scores = CAUSAL * 4 * size.num_layers * size.attention_width * recipe.sequence_length * tokens
    forward = width * size.num_layers * layer_bytes(recipe.model, mode, "forward", tokens)
    backward = width * size.num_layers * layer_bytes(recipe.model, mode, "backward", tokens)
    outside = width * outside_bytes(recipe.model, mode, tokens)
    skipped = size.num_layers * last_product(recipe.model) if skips_last_product(recipe, ds_config) else 0
    recomputed = 2 * (size.matmul - size.head - skipped) * tokens
    again = recomputed_share(recomputed_one_in(recipe))
    engine = table("kernels")["engines"][str(zero_stage(ds_config))]
    in_step = engine["step"] + engine["step of its share"] / world_size
    seconds = {
        "products": (1 + BACKWARD) * 2 * size.matmul * tokens / rates.product_flops,
        "attention": (1 + ATTENTION_BACKWARD) * scores / rates.attention_flops,
        "other kernels": (forward + backward + outside) / rates.bytes,
        "loss": width * loss_kernel_bytes(recipe, tokens, gpu) / rates.bytes,
        "recomputation": again
        * (recomputed / rates.product_flops + scores / rates.attention_flops + forward / rates.bytes),
        "gradients": engine["micro-batch"] * size.total / rates.bytes,
        "optimizer": in_step * size.total / rates.bytes / accumulation_steps(recipe, world_size),
    }
    at_peak = flops_per_token(size, recipe.sequence_length).training * tokens / gpu.peak_flops(precision)
    total = sum(seconds.values())
    without = at_peak / (total - seconds["recomputation"])
    return Ceiling(seconds, at_peak / total, without, rates.products_measured_on)


def recipe_utilization(recipe: Recipe, gpu: Gpu, at_best: Ceiling) -> Utilization:
    """What was measured here on this GPU at this size, else the ceiling of the recipe's own kernels."""
    size = model_size(recipe.model)
    flops = flops_per_token(size, recipe.sequence_length)
    measured = expected_utilization(gpu, size.total, recomputation=flops.hardware / flops.training)
    if not measured.assumed:
        return measured
    day = at_best.products_measured_on
    how = f", products as measured here on {day}" if day else ""
    source = f"the ceiling of its kernels, counted{how}; a run stays below it"
    return Utilization(at_best.mfu_without_recomputation, source, assumed=True)


def sustained_rates(gpu: Gpu, precision: str, num_gpus: int) -> Rates:
    """The shares of tables/rates.json for the GPU's architecture; of products what the doctor measured, if it did.

    num_gpus: of the run; what was measured on this machine counts for as many of these GPUs alone.

    Raises:
        UserError: the GPU has no such precision.
    """
    shares = table("rates")["sustained"]
    product, attention, bandwidth = (
        shares[name].get(gpu.architecture, shares[name]["*"])["value"]
        for name in ("products", "attention", "memory")
    )
    peak = gpu.peak_flops(precision)
    measured = kept_rates(gpu.name, num_gpus).get("product_flops") if precision in SIXTEEN_BIT_NAMES else None
    return Rates(
        product_flops=min(peak, measured["value"]) if measured else product * peak,
        attention_flops=attention * peak,
        bytes=bandwidth * gpu.memory_bandwidth_bytes_per_second,
        products_measured_on=measured["date"] if measured else None,
    )


def layer_mode(recipe: Recipe, ds_config: dict | None) -> str:
    """Which factors of tables/kernels.json hold for the recipe's layers: `eager` or `compiled`."""
    return "eager" if compiled_part(recipe, ds_config, on_gpu=True) == "none" else "compiled"


def layer_bytes(model: dict, mode: str, direction: str, tokens: int) -> float:
    """Bytes that the kernels of one layer move for a micro-batch in 16 bit, products and attention left out.

    direction: `forward` or `backward`.
    """
    shape, kernels = shape_of(model), table("kernels")
    factors, widths = kernels["layers"][shape["model_type"]][mode][direction], layer_widths(shape, tokens)
    written_out = kernels["activations"].get(_activation(shape), {}).get(mode, {}).get(direction, 0.0)
    moved = sum(factor * widths[name] for name, factor in factors.items())
    return tokens * (moved + written_out * inner_width(widths))


def inner_width(widths: dict[str, float]) -> float:
    """Of the feed-forward part, over all experts that a token is given to."""
    return widths["inner"] if "inner" in widths else widths["routed inner"]


def layer_widths(shape: dict, tokens: int) -> dict[str, float]:
    """What those bytes are linear in, for a token.

    `routed` counts a token once for every expert it is given to; the experts' weights are shared among the tokens.
    """
    if shape["model_type"] == "gpt2":
        return {"hidden": shape["n_embd"], "inner": shape["n_inner"] or 4 * shape["n_embd"]}
    heads, hidden = shape["num_attention_heads"], shape["hidden_size"]
    head_size = shape["head_dim"] or hidden // heads
    widths = {
        "hidden": hidden,
        "queries": heads * head_size,
        "keys": (shape["num_key_value_heads"] or heads) * head_size,
    }
    routed = shape.get("num_experts_per_tok")
    if not routed:
        return {**widths, "inner": shape["intermediate_size"]}
    inner = shape.get("moe_intermediate_size") or shape["intermediate_size"]
    weights = 3 * num_experts(shape) * hidden * inner / tokens
    return {
        **widths,
        "routed hidden": routed * hidden,
        "routed inner": routed * inner,
        "routed": routed,
        "expert weights": weights,
    }


def last_product(model: dict) -> int:
    """Entries of a layer's last matrix, which a recomputed layer need not multiply again: nothing keeps its result."""
    widths = layer_widths(shape_of(model), tokens=1)
    return round(widths["hidden"] * inner_width(widths))


def skips_last_product(recipe: Recipe, ds_config: dict | None) -> bool:
    """Whether a recomputed layer stops before its last product: torch stops once all that was kept is there again.

    Under ZeRO-3 DeepSpeed's linear function (runtime/zero/linear.py, `zero3_linear_wrap`) keeps its input only after it
    has multiplied, too late for that. GPT-2's layers are transformers' `Conv1D`, which it does not replace.
    """
    return zero_stage(ds_config) < 3 or recipe.model["model_type"] == "gpt2"


def outside_bytes(model: dict, mode: str, tokens: int) -> float:
    """Bytes that embeddings and the last norm move, forward and backward, for a micro-batch in 16 bit."""
    shape = shape_of(model)
    factor = table("kernels")["layers"][shape["model_type"]][mode]["outside"]
    return tokens * factor * layer_widths(shape, tokens)["hidden"]


def loss_kernel_bytes(recipe: Recipe, tokens: int, gpu: Gpu) -> float:
    """Bytes that the loss moves beside the head's products, in 16 bit."""
    vocab_size, hidden = recipe.model["vocab_size"], layer_widths(shape_of(recipe.model), tokens)["hidden"]
    kind = {"auto": "fused"}.get(recipe.loss["kind"], recipe.loss["kind"])
    compiled = compiles_loss(recipe.loss["compile"], on_gpu=True)
    factors = table("kernels")["loss"][kind]["compiled" if compiled else "eager"]
    chunk = chunk_length(
        tokens, vocab_size, logit_bytes(SIXTEEN_BIT, compiled), gpu.memory_bytes, recipe.loss["chunk_tokens"]
    )
    if kind != "fused":
        return tokens * factors["logit"] * vocab_size
    of_tokens = tokens * (factors["logit"] * vocab_size + factors["hidden"] * hidden)
    of_head = factors["head"] + factors["head a chunk"] * -(-tokens // chunk)
    return of_tokens + of_head * vocab_size * hidden


def _activation(shape: dict) -> str:
    return shape.get("activation_function") or shape.get("hidden_act") or ""
