"""The memory that a run needs on each GPU, on the host and on NVMe, part by part at its peak."""

import argparse
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pretraining.ds_config import optimizer_device, parameter_device
from pretraining.errors import UserError
from pretraining.planning.constants import table
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.activations import Activations, activations, validation_bytes
from pretraining.planning.memory.states import (
    ADAM,
    Buffers,
    ModelState,
    buffers,
    checkpoint_bytes,
    optimizer_states,
    pinned_by_offload,
    state_of,
)
from pretraining.planning.quantities import gpu_count, num_bytes, several
from pretraining.planning.setup import FP32, BareSize, Setup, add_setup_arguments, setup_of
from pretraining.planning.shapes import layer_numel, parameter_tensors
from pretraining.runtime.imports import MOST_ROUNDED_MIB
from pretraining.runtime.table import aligned

ROOMY = 0.85
"""Share of a GPU's memory up to which there is room for what the prediction does not include."""
TIGHT = 0.95
"""Share of a GPU's memory above which fragmentation can end a run."""
PHASES = {
    "loss": "when the backward pass starts: all kept activations and the loss",
    "last layer": "when the last layer is computed again: every layer's input and that layer's activations",
    "backward": "when the backward pass ends: one layer's activations and all gradients",
    "step": "in the optimizer step: gradients and their flat copies",
    "validation": "in a validation, which keeps no activations",
}
SNAPSHOT_ALIGNMENT = 64
"""Bytes; a tensor of any type may begin at a multiple of it."""
PROCESS, BUILT, SNAPSHOT = "process", "model while it is built", "copy for a save"
FIXED = {
    "reduce buckets": "a smaller reduce_bucket_size in the ds_config",
    "gathered weights": "a smaller stage3_max_reuse_distance in the ds_config",
    "copies for the step": "more GPUs",
}
SHARDED_FROM = {"weights": 3, "gradients": 2, "gradient sums": 2, "fp32 masters": 1}
"""Part -> the ZeRO stage from which on the ranks share it; they share the optimizer's states from 1 on."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes at the peak of a step, on the fullest rank."""

    phases: dict[str, dict[str, float]]
    """Phase -> part -> bytes on the GPU."""
    num_gpus: int
    host: dict[str, float] = field(default_factory=dict)
    """Host memory of one rank, by use."""
    nvme: float = 0.0
    """NVMe of one rank."""
    pinned: float = 0.0
    """Part of one rank's host memory that offloading pins before the first step."""
    state: ModelState | None = None
    optimizer_states: str = ADAM.name
    """Name of the part that holds the optimizer's states."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def parts(self) -> dict[str, float]:
        return {name: size for name, size in self.phases[self.peak_phase].items() if size}

    @property
    def allocated(self) -> float:
        """Bytes that torch.cuda.max_memory_allocated will return."""
        return sum(self.parts.values())

    @property
    def reserve(self) -> float:
        """Bytes beside the tensors: context, NCCL, memory that the allocator cannot reuse."""
        entry = table("memory")
        # one GPU alone opens no communicator
        nccl = entry["nccl_bytes"]["value"] if self.num_gpus > 1 else 0
        return entry["cuda_context_bytes"]["value"] + nccl + entry["fragmentation"]["value"] * self.allocated

    @property
    def total(self) -> float:
        return self.allocated + self.reserve

    @property
    def on_processor(self) -> float:
        """Bytes that a rank takes if the processor trains, beyond what it had before the model was built."""
        # the pages of the buckets' flat buffers are never touched, so that they take no memory
        device = max(sum(parts.values()) - parts.get("reduce buckets", 0) for parts in self.phases.values())
        # a processor has no second memory: what is offloaded stays in the same one
        offloaded = sum(size for name, size in self.host.items() if name.startswith("offloaded"))
        return device + offloaded + table("memory")["processor_bytes"]["value"]

    @property
    def host_counted(self) -> float:
        """Host memory that one rank cannot do without: not what is assumed of a process, nor the copy for a save."""
        return sum(size for name, size in self.host.items() if name not in (PROCESS, SNAPSHOT))

    @property
    def snapshot(self) -> float:
        """Host memory into which one rank copies its state, so that training goes on while a checkpoint is written."""
        return self.host.get(SNAPSHOT, 0)

    @property
    def largest(self) -> str:
        return max(self.parts, key=self.parts.get)

    @property
    def host_bytes(self) -> float:
        # the model has moved to the GPU before the first save: only the larger of the two counts
        return sum(self.host.values()) - min(self.host.get(BUILT, 0), self.host.get(SNAPSHOT, 0))

    def to_dict(self) -> dict:
        derived = ("peak_phase", "parts", "allocated", "reserve", "total", "largest", "host", "host_bytes")
        derived += ("nvme", "on_processor")
        return {**{name: getattr(self, name) for name in derived}, "phases": self.phases}


def memory_need(setup: Setup, gpu_memory: float | None = None, alike: MemoryNeed | None = None) -> MemoryNeed:
    """Return the memory that a recipe needs on so many GPUs; `UserError` if they do not divide the step.

    Args:
        gpu_memory: bytes of one GPU; the loss takes more on a larger one. None: a processor trains, or it is not known.
        alike: the need if another number of layers is recomputed, which changes nothing of what a rank holds.
    """
    optimizer, extra = optimizer_states(setup.recipe), buffers(setup)
    state, host, pinned = (alike.state, alike.host, alike.pinned) if alike else _held_by_rank(setup)
    # the optimizer's own fp32 copies exist at the same moment as ZeRO's; without ZeRO, and at stage 0, each rank steps
    # all weights
    for family in setup.families:
        copied = sum(tensor.numel for tensor in family.trained if tensor.kind == optimizer.copied)
        extra = replace(extra, step=extra.step + FP32 * copied / (family.ranks if setup.stage else 1))
    phases = _phases(setup, state, activations(setup, gpu_memory), extra)
    # with whole sequences, and logits, which training may never have
    if setup.degrees.ranks_per_sample > 1 and setup.recipe.training.eval_strategy != "no":
        # no activations are kept
        phases["validation"] = {**phases["loss"], "validation": validation_bytes(setup)}
        for name in ("activations", "logits and loss"):
            del phases["validation"][name]
    return MemoryNeed(phases, setup.world_size, host, state.nvme, pinned, state, optimizer.name)


def _held_by_rank(setup: Setup) -> tuple[ModelState, dict[str, float], float]:
    """Return what the fullest rank holds between the passes of a step: its state, its host memory, what is pinned."""
    state = state_of(setup)
    pinned = pinned_by_offload(setup)
    host = _host_memory(setup, state)
    if rounding := sum(pinned_bytes(size) - size for size in pinned):
        host["rounding of pinned buffers"] = rounding
    return state, host, sum(map(pinned_bytes, pinned))


def skips_last_product(setup: Setup) -> bool:
    """Return whether a recomputed layer stops before its last product."""
    # torch stops as soon as all that the backward pass needs is there again. In a mixture, this includes what experts
    # give, unless they are split: then each choice is weighted before their last product (model/parallel.py).
    if setup.widths.experts:
        return setup.degrees.expert > 1
    # Under ZeRO-3, DeepSpeed's linear function (runtime/zero/linear.py, `zero3_linear_wrap`) keeps its input only after
    # it has multiplied, which is too late. GPT-2's layers are transformers' `Conv1D`, which DeepSpeed does not replace.
    return setup.stage < 3 or setup.recipe.model.model_type == "gpt2"


def _phases(
    setup: Setup, state: ModelState, held: Activations, extra: Buffers
) -> dict[str, dict[str, float]]:
    """Return the parts at the moments when a step's memory can peak."""
    # observed with deepspeed 0.19.8: benchmarks/model_states.py
    always = {"weights": state.parameters, "fp32 masters": state.masters}
    always[optimizer_states(setup.recipe).name] = state.moments
    sums, stage, accumulation = state.gradient_accumulation, setup.stage, setup.accumulation
    # at stage 2 the sums exist only after a first micro-batch, at stages 1 and 3 always
    sums_before = sums if accumulation > 1 or stage != 2 else 0
    passing = {**always, "reduce buckets": extra.buckets, "gathered weights": extra.gathered}
    # when a backward pass starts, only earlier micro-batches have left gradients
    earlier = {"gradients": state.gradients if accumulation > 1 else 0, "gradient sums": sums_before}
    phases = {
        "loss": {**passing, **earlier, "activations": held.kept, "logits and loss": held.logits},
        "backward": {
            **passing,
            "gradients": state.gradients + extra.in_flight,
            "gradient sums": sums_before if stage == 2 else sums,
            "activations": held.per_layer + held.backward,
        },
        "step": {
            **always,
            "reduce buckets": extra.buckets if stage == 3 else 0,
            "gradients": state.gradients,
            "gradient sums": sums,
            "copies for the step": extra.step,
        },
    }
    if held.recomputes_last:
        phases["last layer"] = {**passing, **earlier, "activations": held.at_last_layer}
    return phases


def pinned_bytes(num_bytes: int) -> int:
    """Return the host memory that a pinned buffer of this many bytes takes."""
    # torch 2.13 rounds up to a power of two (ATen/core/CachingHostAllocator.h); runtime/imports.py limits this to
    # buffers up to MOST_ROUNDED_MIB
    rounded = 1 << max(0, num_bytes - 1).bit_length()
    return rounded if num_bytes <= MOST_ROUNDED_MIB << 20 else num_bytes


def snapshot_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of one buffer for copies of tensors of these sizes in bytes."""
    return sum(size + -size % SNAPSHOT_ALIGNMENT for size in sizes)


def _host_memory(setup: Setup, state: ModelState) -> dict[str, float]:
    """Return the host memory of one rank in bytes, by use."""
    recipe, config, stage, precision = setup.recipe, setup.ds_config, setup.stage, setup.precision
    host = {PROCESS: table("memory")["host_process_bytes"]["value"]}
    if state.host:
        host["offloaded states"] = state.host
    staging, numels = 0.0, [tensor.numel for family in setup.families for tensor in family.trained]
    if optimizer_device(config) == "cpu" and stage < 3:
        # temp_grad_buffer_for_cpu_offload, in 16 bit
        staging += 2 * max(numels)
    # NVMe is read into pinned buffers (deepspeed 0.19.8, runtime/zero/offload_config.py)
    zero = (config or {}).get("zero_optimization", {})
    if parameter_device(config) == "nvme":
        settings = zero["offload_param"]
        staging += 2 * settings.get("buffer_count", 5) * settings.get("buffer_size", 100_000_000)
    if optimizer_device(config) == "nvme":
        settings, group = zero["offload_optimizer"], zero.get("sub_group_size", 1_000_000_000)
        staging += FP32 * settings.get("buffer_count", 4) * min(group, sum(numels))
    if staging:
        host["staging buffers"] = staging
    # stage 3 builds its weights sharded; the others build them whole on every rank and move them to the GPU
    # (model/build.py)
    if stage != 3:
        # bytes a parameter
        built = 2 if config and precision.name == "bf16" and not precision.is_autocast else 4
        host[BUILT] = built * sum(tensor.numel for tensor in parameter_tensors(recipe.model))
        if (size := setup.degrees.expert) > 1:
            # a rank keeps its own experts, but draws those of a whole layer at once in fp32
            split = setup.families[-1]
            layer = size * layer_numel(split.tensors)
            host[BUILT] += FP32 * layer - built * (size - 1) * split.numel
        host[BUILT] += (FP32 - built) * sum(tensor.numel for tensor in setup.wide)
    if recipe.checkpoints.background and recipe.training.save_strategy != "no":
        saved = checkpoint_bytes(recipe, precision.weights)
        host[SNAPSHOT] = pinned_bytes(snapshot_bytes([-(-saved // setup.world_size)]))
    return host


def shrink(need: MemoryNeed, setup: Setup) -> str:
    """Write what would shrink the largest part; do not offer what is on already."""
    part, stage, training = need.largest, setup.stage, setup.recipe.training
    if part in FIXED:
        return FIXED[part]
    if part in SHARDED_FROM or part == need.optimizer_states:
        shared_from = SHARDED_FROM.get(part, 1)
        if need.num_gpus > 1 and stage < shared_from:
            return f"the GPUs share it from --deepspeed zero{shared_from} on"
        more = "more GPUs" if stage >= shared_from else f"more GPUs and --deepspeed zero{shared_from}"
        # zero3_offload moves the optimizer, not the weights
        stays = optimizer_device(setup.ds_config) != "gpu" or part == "weights"
        return more if stays else f"{more}, or host memory takes it: --deepspeed zero3_offload"
    if part == "validation" and training.per_device_eval_batch_size > 1:
        return "--set training.per_device_eval_batch_size=1"
    if part == "activations" and not training.recomputed_one_in:
        return "--set training.activation_checkpointing=true, or a smaller micro-batch"
    if setup.recipe.micro_batch > 1:
        # activations, logits and the loss all grow with the micro-batch
        smaller = f"--set training.per_device_train_batch_size={setup.recipe.micro_batch // 2}"
        return f"a smaller micro-batch ({smaller})"
    smaller = "a smaller vocabulary or sequence length"
    return "a shorter data.sequence_length" if part == "activations" else smaller


class MemoryVerb:
    """Memory per GPU by part, on the host and on NVMe, of a recipe on so many GPUs."""

    EXAMPLES = """  python -m pretraining.planning memory --recipe 30b --world_size 8 --gpu H200
  python -m pretraining.planning memory --recipe 1.5b --world_size 8 --deepspeed zero1 --json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_setup_arguments(parser)
        parser.add_argument("--world_size", type=gpu_count, required=True, metavar="N", help="number of GPUs")
        what = "which kind (see the verb gpus), to say whether it fits"
        parser.add_argument("--gpu", metavar="NAME", help=what)

    def answer(self, options: argparse.Namespace) -> dict:
        """Return the need at the peak, by part, and the other phases."""
        setup = setup_of(options)
        if isinstance(setup, BareSize):
            raise UserError("memory needs the model's shape: give --recipe NAME (and --set to change it)")
        gpu = None if options.gpu is None else find_gpu(options.gpu)
        there = gpu.memory_bytes if gpu else None
        need = memory_need(setup, there)
        return {
            "name": setup.name,
            "deepspeed": setup.recipe.deepspeed,
            "world_size": setup.world_size,
            "micro_batch": setup.recipe.micro_batch,
            "gpu": gpu.name if gpu else None,
            "gpu_memory_bytes": there,
            "fits": need.total <= there if gpu else None,
            "shrink": shrink(need, setup),
            **need.to_dict(),
        }

    def as_text(self, answer: dict) -> str:
        phases = sorted(answer["phases"], key=lambda name: name != answer["peak_phase"])
        parts = dict.fromkeys(part for phase in phases for part in answer["phases"][phase])
        parts = [part for part in parts if any(answer["phases"][phase].get(part) for phase in phases)]
        rows = []
        for part in parts:
            sizes = [answer["phases"][phase].get(part) for phase in phases]
            rows.append([part, *(num_bytes(size) if size else "-" for size in sizes)])
        rows.append(["allocated", *(num_bytes(sum(answer["phases"][phase].values())) for phase in phases)])
        ranks, way = answer["world_size"], answer["deepspeed"] or "plain data parallel"
        title = f"{answer['name']} on {several(ranks, 'GPU')}, {way}, micro-batch {answer['micro_batch']}"
        title += f": {num_bytes(answer['total'])} on each"
        if answer["gpu"]:
            verdict = "fits" if answer["fits"] else "does not fit"
            title += f", {verdict} {answer['gpu']} ({num_bytes(answer['gpu_memory_bytes'])})"
        lines = [title, "", aligned([["", *phases], *rows]), ""]
        lines += [f"{phase}: {PHASES[phase]}" for phase in phases]
        lines += [f"largest: {answer['largest']}; less of it: {answer['shrink']}"]
        lines += [f"beside it: {num_bytes(answer['reserve'])} for CUDA, NCCL and the allocator (assumed)"]
        host = f"host memory per GPU: {num_bytes(answer['host_bytes'])} ({host_words(answer['host'])})"
        lines += textwrap.wrap(host, 118)
        return "\n".join(lines + ([f"NVMe per GPU: {num_bytes(answer['nvme'])}"] if answer["nvme"] else []))


def host_words(parts: dict) -> str:
    """Write what host memory is for; what the process itself takes is assumed, not counted."""
    names = {PROCESS: "assumed for the process"}
    words = {name: f"{num_bytes(size)} {names.get(name, name)}" for name, size in parts.items()}
    if BUILT in parts and SNAPSHOT in parts:
        # the two are never held at once (`MemoryNeed.host_bytes`)
        words[SNAPSHOT] = f"later {words[SNAPSHOT]}"
    return ", ".join(words.values())
