"""Layouts of data x tensor x pipeline x context parallelism that fit a cluster, fastest first.

Pipeline stages cannot be trained here: neither the Trainer nor DeepSpeed cuts a model of Transformers into them. Who
needs them can take the prepared data along (`python -m pretraining.data convert --to megatron`), and train the same
shape, batch and schedule with Megatron-LM (`--megatron ROW`). Initial weights and the order of samples are Megatron's
own, so that the curve is another one.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product
from operator import itemgetter

from pretraining.ds_config import load_ds_config
from pretraining.errors import UserError
from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu, find_gpu
from pretraining.planning.memory.states import optimizer_states
from pretraining.planning.quantities import duration, gpu_count, num_bytes, share
from pretraining.planning.setup import BareSize, add_setup_arguments, setup_of
from pretraining.planning.shapes import parameter_tensors, widths_of
from pretraining.planning.sizes import flops_per_token, model_size
from pretraining.planning.step_time import model_flops_utilization
from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.model import is_exact, value_of
from pretraining.recipe.refusals import check_run
from pretraining.runtime.table import Column, write_table

# bytes an element
BF16, FP32 = 2, 4
SHORTEST_CONTEXT_SHARD = 4096
"""Tokens below which splitting a sequence over GPUs is not considered."""
# sequences per pipeline and pass
MICRO_BATCHES = (1, 2, 4, 8, 16)
NOTE = """
Time is of kernels at {efficiency} of the dense peak plus every message at its link's peak, nothing overlapped:
good for an order, not for a promise. `ac` recomputes every layer (activation checkpointing). `here`: what --deepspeed
takes for such a row. Pipeline stages cannot be trained here: neither the Trainer nor DeepSpeed cuts a model of
Transformers into them. --megatron ROW prints a row as arguments of Megatron-LM."""
COLUMNS = (
    Column("row", "row"),
    Column("data", "data"),
    Column("tensor", "tensor"),
    Column("pipeline", "pipeline"),
    Column("context", "context"),
    Column("micro-batch", "micro_batch"),
    Column("layers/stage", "layers_per_stage"),
    Column("bubble", "bubble", ".0%"),
    Column("memory", lambda layout: layout["memory"]["total"], num_bytes),
    Column("step", "step_seconds", duration),
    Column("MFU", "mfu", ".0%"),
    Column("ac", lambda layout: "yes" if layout["recompute"] else "no"),
    Column("here", lambda layout: layout["here"] or "no"),
)


@dataclass(frozen=True)
class Division:
    """How many GPUs each part of the work is divided over."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    micro_batch: int = 1
    """Sequences per pipeline and pass."""


@dataclass(frozen=True)
class Cluster:
    """The model, the step and the GPUs that all layouts of one question share."""

    model: dict
    """The recipe's section."""
    sequence_length: int
    sequences: int
    """Per optimizer step."""
    num_gpus: int
    gpu: Gpu
    kernel_efficiency: float
    """Share of the dense peak that a layer's kernels reach, before messages and bubbles."""
    optimizer_width: float = 3 * FP32
    """Bytes of master weights and optimizer states per parameter."""


def layouts(cluster: Cluster) -> list[dict]:
    """Return every layout that divides the model, the step and the GPUs, and fits their memory; fastest first.

    A layout recomputes only if it does not fit otherwise. `UserError` if no layout divides what is given, or none fits
    (with the nearest one's memory).
    """
    gpu = cluster.gpu
    tried = []
    for division in _divisions(cluster):
        layout = layout_of(cluster, division, recompute=False)
        if layout["memory"]["total"] > gpu.memory_bytes:
            layout = layout_of(cluster, division, recompute=True)
        tried.append(layout)
    if not tried:
        widths, sequences = widths_of(cluster.model), cluster.sequences
        what = f"{widths.layers} layers, {widths.heads} heads and {sequences:,} sequences a step"
        what += f" have no common split with them; take a number of GPUs that divides {sequences:,}"
        raise UserError(f"no layout divides {cluster.num_gpus:,} GPUs: {what}")
    fitting = [layout for layout in tried if layout["memory"]["total"] <= gpu.memory_bytes]
    if not fitting:
        best = min(tried, key=lambda layout: layout["memory"]["total"])
        needed = best["memory"]["total"]
        split = ", ".join(f"{name} {best[name]}" for name in ("tensor", "pipeline", "context", "data"))
        raise UserError(
            f"no layout fits: the smallest ({split}) needs {needed / 1e9:,.1f} GB on each {gpu.name} of "
            f"{gpu.memory_bytes / 1e9:,.0f} GB; take about {needed / gpu.memory_bytes:.1f} times as many "
            "GPUs, or larger ones"
        )
    # of equally fast layouts, the one that splits the model least comes first
    return sorted(fitting, key=itemgetter("step_seconds", "tensor", "pipeline"))


def _divisions(cluster: Cluster) -> Iterator[Division]:
    widths, length = widths_of(cluster.model), cluster.sequence_length
    # tensor ranks stay in one node: each layer's all-reduces must not cross the network
    # (Narayanan et al. 2021, takeaway 1)
    node = min(cluster.gpu.gpus_per_node, cluster.num_gpus)
    tensors = [n for n in range(1, node + 1) if node % n == 0]
    # each rank holds whole heads, of the queries and of the keys
    tensors = [n for n in tensors if widths.heads % n == 0 and widths.key_value_heads % n == 0]
    pipelines = [n for n in range(1, widths.layers + 1) if widths.layers % n == 0]
    # ring attention gives each GPU two pieces of a sequence, so that all have the same work under the causal mask
    longest = max(1, length // SHORTEST_CONTEXT_SHARD)
    contexts = [2**n for n in range(longest.bit_length()) if length % (2 * 2**n) == 0 or n == 0]
    for tensor, pipeline, context in product(tensors, pipelines, contexts):
        data, rest = divmod(cluster.num_gpus, tensor * pipeline * context)
        # every GPU has work, and every pipeline gets the same number of sequences
        if data == 0 or rest or cluster.sequences % data:
            continue
        of_pipeline = cluster.sequences // data
        for micro_batch in (n for n in MICRO_BATCHES if of_pipeline % n == 0):
            yield Division(data, tensor, pipeline, context, micro_batch)


def layout_of(cluster: Cluster, division: Division, recompute: bool) -> dict:
    """Return the layout of a division that divides the model, the step and the GPUs."""
    data, tensor, pipeline, context, micro_batch = astuple(division)
    size, gpu, widths = model_size(cluster.model), cluster.gpu, widths_of(cluster.model)
    microbatches, layers = cluster.sequences // (data * micro_batch), widths.layers // pipeline
    # per GPU and pass: context parallelism splits each sequence
    tokens = micro_batch * cluster.sequence_length / context
    # (p - 1) / m (Narayanan et al. 2021, section 2.2)
    bubble = (pipeline - 1) / microbatches
    counted = flops_per_token(size, cluster.sequence_length)
    # seconds without bubbles and messages
    ideal = counted.hardware if recompute else counted.training
    ideal *= cluster.sequences * cluster.sequence_length
    ideal /= cluster.num_gpus * (gpu.peak_flops(gpu.training_precision) * cluster.kernel_efficiency)
    # the bubble counts as extra passes, in messages as in products
    passes = microbatches * (1 + bubble)
    memory = layout_memory(cluster, division, recompute)
    # all-reduces of a layer (Megatron-LM, Shoeybi et al. 2019, figure 4): two forward, two backward, two more if the
    # forward pass is repeated; a ring sends 2 (t - 1) / t of each
    tensor_bytes = (6 if recompute else 4) * BF16 * widths.hidden * tokens * 2 * (tensor - 1) / tensor
    # a layer's keys and values go round the ring once forward, and twice as much backward (Liu et al. 2023)
    context_bytes = 3 * (BF16 * 2 * widths.keys / tensor * tokens) * (context - 1)
    # a micro-batch's activations to the next stage and its gradients back, shared by a stage's tensor ranks
    pipeline_bytes = 2 * BF16 * widths.hidden * tokens / tensor if pipeline > 1 else 0.0
    # once a step: reduce-scatter of the fp32 gradients, all-gather of the bf16 weights (ZeRO, section 7); context ranks
    # hold the same weights as data ranks
    shards = data * context
    data_bytes = memory["weights_and_gradients"] * (shards - 1) / shards

    def link(group: int) -> float:
        inside = gpu.link_bytes_per_second
        return inside if group <= gpu.gpus_per_node else min(inside, gpu.network_bytes_per_second)

    seconds = {
        # of one step
        "compute_seconds": ideal * (1 + bubble),
        # tensor ranks are neighbours inside a node (`_divisions`)
        "tensor_seconds": passes * layers * tensor_bytes / gpu.link_bytes_per_second,
        "context_seconds": passes * layers * context_bytes / link(tensor * context),
        # stages are the outermost dimension: with several nodes, some neighbours are in different ones
        "pipeline_seconds": passes * pipeline_bytes / link(cluster.num_gpus),
        "data_seconds": data_bytes / link(shards * tensor),
    }
    return {
        **asdict(division),
        # per pipeline and optimizer step
        "microbatches": microbatches,
        # activation checkpointing of every layer
        "recompute": recompute,
        "layers_per_stage": layers,
        # the pipeline's idle time over its ideal time
        "bubble": bubble,
        "memory": memory,
        **seconds,
        # nothing overlapped
        "step_seconds": sum(seconds.values()),
    }


def layout_memory(cluster: Cluster, division: Division, recompute: bool) -> dict[str, float]:
    """Return memory of the fullest GPU in bytes, by use; `total` has the allocator's and the framework's reserve."""
    data, tensor, pipeline, context, micro_batch = astuple(division)
    size, widths = model_size(cluster.model), widths_of(cluster.model)
    tokens = micro_batch * cluster.sequence_length / context
    # the first stage holds the embedding, the last one the head: of the fuller end, its layers and a table
    of_layers = size.total - size.embedding - size.parts["head"]
    of_end = of_layers / pipeline + max(size.embedding, size.parts["head"])
    held = (size.total if pipeline == 1 else of_end) / tensor
    # a layer keeps for its backward pass, in bf16 with fused attention: the inputs of its two norms, the input of the
    # attention, queries, keys, values and their result, the input of the feed-forward layer, and that layer's inner
    # values before and after the activation function, of which a gated layer has four (Korthikanti et al. 2022, section
    # 4.1, without dropout masks: 32 h a token for GPT). A mixture keeps those of all experts that a token is routed to;
    # a dense model counts as one expert.
    attention = widths.hidden + 2 * widths.queries + 2 * widths.keys
    inner = (4 if widths.gated else 2) * widths.expert_inner * widths.chosen_experts
    a_token = BF16 * (2 * widths.hidden + attention + (widths.hidden + inner))
    # with sequence parallelism, tensor ranks divide all activations (Korthikanti et al. 2022, table 2)
    one_layer = a_token * tokens / tensor
    # with recomputation only each layer's input stays
    kept = BF16 * widths.hidden * tokens / tensor if recompute else one_layer
    # 1F1B: the first stage begins as many micro-batches as there are stages before the first returns (Narayanan et al.
    # 2021, section 2.2); the recomputed activations exist for one layer at a time
    in_flight = min(pipeline, cluster.sequences // (data * micro_batch))
    activations = in_flight * (widths.layers / pipeline) * kept + (one_layer if recompute else 0)
    parts = {
        # bf16 weights, fp32 gradients
        "weights_and_gradients": held * (BF16 + FP32),
        # shared as by Megatron-LM's distributed optimizer (ZeRO stage 1), over context ranks too
        "optimizer": held * cluster.optimizer_width / (data * context),
        "activations": activations,
        # as a plain loss in memory/activations.py: fp32 log-probabilities, their gradient, the logits' gradient
        "logits": 3 * FP32 * tokens * cluster.model["vocab_size"] / tensor,
    }
    # fragmentation grows with what is held; the context and NCCL take the same for every layout
    reserve = table("memory")
    total = sum(parts.values()) * (1 + reserve["fragmentation"]["value"])
    return {**parts, "total": total + reserve["cuda_context_bytes"]["value"] + reserve["nccl_bytes"]["value"]}


class ParallelismVerb:
    """Layouts of data x tensor x pipeline x context parallelism that fit, fastest first.

    A row without pipeline stages can be trained here, if the ds_config beside it is given (docs/layouts.md).
    """

    EXAMPLES = """  python -m pretraining.planning parallelism --recipe 65b --world_size 512 --gpu H100
  python -m pretraining.planning parallelism --recipe 30b --world_size 64 --gpu A100 --top 3 --json
  python -m pretraining.planning parallelism --recipe 65b --world_size 512 --gpu H100 --megatron 1"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_setup_arguments(parser, on_cluster=True)
        add = parser.add_argument
        add("--top", type=gpu_count, default=5, metavar="K", help="layouts to show (default 5)")
        add("--kernel_efficiency", type=share, metavar="SHARE", help="instead of the table's")
        what = "one row as arguments of Megatron-LM, 1 the first"
        add("--megatron", type=gpu_count, metavar="ROW", help=what)

    def answer(self, options: argparse.Namespace) -> dict:
        """Return the best layouts, one of each division of the GPUs."""
        setup, gpu = setup_of(options), find_gpu(options.gpu)
        # --parameters gives a size alone: no heads, widths or layers
        if isinstance(setup, BareSize):
            remedy = "give --recipe NAME or --model NAME (and --set to change it)"
            raise UserError(f"layouts need the model's shape: {remedy}")
        recipe, num_gpus = setup.recipe, setup.world_size
        efficiency = options.kernel_efficiency or table("rates")["kernel_efficiency"]["value"]
        states, tensors = optimizer_states(recipe), parameter_tensors(recipe.model)
        width = sum(FP32 * each.numel + states.bytes_of(each) for each in tensors) / setup.parameters
        length = recipe.sequence_length
        sequences = recipe.tokens_per_step // length
        fitting = layouts(Cluster(recipe.model, length, sequences, num_gpus, gpu, efficiency, width))
        best: dict[tuple, dict] = {}
        for layout in fitting:
            # the layouts are sorted: the first of each division is its fastest
            best.setdefault((layout["tensor"], layout["pipeline"], layout["context"]), layout)
        rows, row = list(best.values()), options.megatron
        if row and row > len(rows):
            raise UserError(f"--megatron {row}: there are {len(rows)} rows; give one of them")
        flops, peak = setup.flops.training, gpu.peak_flops(gpu.training_precision)
        shown = []
        for layout in rows[: options.top]:
            rate = recipe.tokens_per_step / layout["step_seconds"]
            mfu = model_flops_utilization(rate, flops, num_gpus, peak)
            shown.append({**layout, "mfu": mfu, "here": _way_here(layout, recipe)})
        return {
            "name": setup.name,
            "gpu": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "world_size": num_gpus,
            "kernel_efficiency": efficiency,
            "fitting": len(fitting),
            "layouts": shown,
            "megatron": megatron_arguments(recipe, rows[row - 1], gpu.gpus_per_node) if row else None,
        }

    def as_text(self, answer: dict) -> str:
        if answer["megatron"]:
            return " \\\n    ".join(answer["megatron"])
        rows = [{"row": number, **layout} for number, layout in enumerate(answer["layouts"], 1)]
        cluster = f"{answer['world_size']:,} x {answer['gpu']}"
        title = f"{answer['name']} on {cluster}: {answer['fitting']} layouts fit"
        note = NOTE.format(efficiency=f"{answer['kernel_efficiency']:.0%}")
        return f"{title}\n\n{write_table(COLUMNS, rows, left=0)}\n{note}"


def _way_here(layout: dict, recipe: Recipe) -> str | None:
    """Return the ds_config, with its degrees, that trains such a layout here; None if none does."""
    if layout["pipeline"] > 1:
        return None
    degrees = {"tensor": layout["tensor"], "sequence": layout["context"]}
    split = ",".join(f"{name}={size}" for name, size in degrees.items() if size > 1)
    # the optimizer's states are shared over the data ranks, as the table counts
    way = f"zero1:{split}" if split else "zero1"
    try:
        check_run(replace(recipe, deepspeed=way), load_ds_config(way))
    except UserError:
        return None
    return way


STYLES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
    "warmup_stable_decay": "WSD",
}
"""`training.lr_scheduler_type` -> Megatron's `--lr-decay-style`."""
DECAYS = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
"""`decay_type` of a warmup_stable_decay -> Megatron's `--lr-wsd-decay-style`."""
PLACE = "DATA"
"""Folder that the data is converted to, and that the arguments name."""


def megatron_arguments(recipe: Recipe, layout: dict, gpus_per_node: int) -> list[str]:
    """Return the launcher and the arguments of pretrain_gpt.py for a recipe at a layout, one of them in each entry.

    `UserError` if the recipe asks for what Megatron-LM has no argument for.
    """
    model, training, length = recipe.model, recipe.training, recipe.sequence_length
    # what would silently train something else
    reasons = {
        f"model.model_type {model.model_type}": not is_exact(model),
        f"optimizer.name {recipe.optimizer.name}": recipe.optimizer.name != "adamw",
        f"training.optim {training.optim}": not training.optim.startswith("adamw_torch"),
        f"training.lr_scheduler_type {training.lr_scheduler_type}": training.lr_scheduler_type not in STYLES,
        "mup": recipe.mup.base_width is not None,
        **dict.fromkeys(recipe.own_groups, True),
        "model.mlp_only_layers": bool(model.get("mlp_only_layers")),
        "model.decoder_sparse_step": model.get("decoder_sparse_step", 1) != 1,
        "budget.ramp": recipe.budget.ramp is not None,
        "loss.function": recipe.loss.function is not None,
        "model.frozen": bool(recipe.weights.frozen),
        "model.initial_weights": recipe.weights.initial_weights is not None,
        "model.keep_in_fp32": bool(recipe.weights.keep_in_fp32),
        f"speed.fp8 {recipe.speed.fp8}, with scales as torchao's": recipe.speed.fp8 != "none",
    }
    if reason := next((name for name, is_so in reasons.items() if is_so), None):
        raise UserError(f"--megatron: {reason}: Megatron-LM has no arguments for it; leave it out")
    num_gpus = math.prod(layout[name] for name in ("data", "tensor", "pipeline", "context"))
    here = min(num_gpus, gpus_per_node)
    words = [
        f"torchrun --nnodes={num_gpus // here} --nproc_per_node={here} pretrain_gpt.py",
        *_shape(recipe),
        f"--tensor-model-parallel-size {layout['tensor']}",
        f"--pipeline-model-parallel-size {layout['pipeline']}",
        f"--context-parallel-size {layout['context']}",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ]
    # the plan counts the residual stream as split over the tensor ranks
    words += ["--sequence-parallel"] if layout["tensor"] > 1 else []
    if layout["recompute"]:
        words += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    words += [
        f"--seq-length {length}",
        f"--max-position-embeddings {max(length, value_of(recipe.model, 'max_position_embeddings'))}",
        f"--micro-batch-size {layout['micro_batch']}",
        f"--global-batch-size {recipe.samples_per_step}",
        f"--train-samples {recipe.num_samples}",
        f"--seed {training.seed}",
        *[f"--{name}" for name in ("bf16", "fp16") if training.get(name)],
        f"--lr {training.learning_rate:g}",
        f"--weight-decay {training.weight_decay:g}",
        f"--adam-beta1 {training.adam_beta1:g}",
        f"--adam-beta2 {training.adam_beta2:g}",
        f"--adam-eps {training.adam_epsilon:g}",
        f"--clip-grad {training.max_grad_norm:g}",
        *_schedule(recipe),
        f"--train-data-path {PLACE}/train",
        f"--valid-data-path {PLACE}/validation",
        "--tokenizer-type HuggingFaceTokenizer",
        f"--tokenizer-model {PLACE}/tokenizer",
        f"--vocab-size {recipe.model.vocab_size}",
    ]
    masked = ["--reset-position-ids", "--reset-attention-mask"] if recipe.data.document_masking else []
    return words + masked


def _shape(recipe: Recipe) -> list[str]:
    shape = model_with_defaults(recipe.model)
    widths = widths_of(shape)
    words = [
        f"--num-layers {widths.layers}",
        f"--hidden-size {widths.hidden}",
        f"--ffn-hidden-size {widths.inner}",
        f"--num-attention-heads {widths.heads}",
        f"--kv-channels {widths.head_size}",
        f"--init-method-std {shape['initializer_range']:g}",
    ]
    if widths.key_value_heads != widths.heads:
        words += ["--group-query-attention", f"--num-query-groups {widths.key_value_heads}"]
    if not shape["tie_word_embeddings"]:
        words.append("--untie-embeddings-and-output-weights")
    if shape["model_type"] == "gpt2":
        return [
            *words,
            "--position-embedding-type learned_absolute",
            f"--norm-epsilon {shape['layer_norm_epsilon']:g}",
            f"--attention-dropout {shape['attn_pdrop']:g}",
            f"--hidden-dropout {shape['resid_pdrop']:g}",
        ]
    rope = shape.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        what = "Megatron-LM's own scaling differs by version; set it by hand beside these arguments"
        raise UserError(f"--megatron: model.rope_parameters.rope_type {rope['rope_type']}: {what}")
    base = rope.get("rope_theta") or shape.get("rope_theta") or 10000
    words += ["--normalization RMSNorm", f"--norm-epsilon {shape['rms_norm_eps']:g}", "--swiglu"]
    words += ["--position-embedding-type rope", f"--rotary-base {base:.0f}"]
    words += [] if shape.get("attention_bias") or shape.get("mlp_bias") else ["--disable-bias-linear"]
    words += [f"--attention-dropout {shape['attention_dropout']:g}", "--hidden-dropout 0"]
    words += ["--qk-layernorm"] if shape["model_type"].startswith("qwen3") else []
    if not widths.experts:
        return words
    words += [
        f"--num-experts {widths.experts}",
        f"--moe-router-topk {widths.chosen_experts}",
        f"--moe-ffn-hidden-size {widths.expert_inner}",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type alltoall",
    ]
    if recipe.loss.balance == "auto" and shape.get("output_router_logits"):
        coefficient = f"--moe-aux-loss-coeff {shape['router_aux_loss_coef']:g}"
        words += ["--moe-router-load-balancing-type aux_loss", coefficient]
    else:
        words.append("--moe-router-load-balancing-type none")
    z_loss = recipe.loss.router_z_loss
    return words + ([f"--moe-z-loss-coeff {z_loss:g}"] if z_loss else [])


def _schedule(recipe: Recipe) -> list[str]:
    """Return the schedule in samples, which Megatron counts as `--train-samples` does."""
    training, unit = recipe.training, recipe.samples_per_step
    keywords, kind = training.lr_scheduler_kwargs or {}, training.lr_scheduler_type
    of_peak = keywords.get("min_lr_rate") or keywords.get("min_lr_ratio") or 0.0
    lowest = keywords.get("min_lr") or training.learning_rate * of_peak
    words = [
        f"--lr-decay-style {STYLES[kind]}",
        f"--min-lr {lowest:g}",
        f"--lr-warmup-samples {recipe.warmup_steps(recipe.num_steps) * unit}",
        f"--lr-decay-samples {recipe.num_samples}",
    ]
    if kind == "warmup_stable_decay":
        tokens = recipe.budget.decay_tokens
        samples = tokens // recipe.sequence_length if tokens else keywords["num_decay_steps"] * unit
        words += [f"--lr-wsd-decay-style {DECAYS[keywords.get('decay_type', 'linear')]}"]
        words += [f"--lr-wsd-decay-samples {samples}"]
    return words
