"""The memory a run needs on each GPU, on the host and on NVMe, part by part at its peak."""

from dataclasses import dataclass, field, replace

from pretraining.ds_config import zero_stage
from pretraining.planning.constants import table
from pretraining.planning.memory.activations import Activations, activations
from pretraining.planning.memory.buffers import Buffers, buffers, optimizer_copies
from pretraining.planning.memory.host import BUILT, PROCESS, SNAPSHOT, host_memory, most_at_once
from pretraining.planning.memory.optimizers import ADAM, optimizer_states
from pretraining.planning.memory.precision import SIXTEEN_BIT, precision_of
from pretraining.planning.memory.states import ModelState, model_state
from pretraining.planning.memory.tensors import parameter_tensors
from pretraining.planning.sizes import model_size
from pretraining.recipe import Recipe, accumulation_steps
from pretraining.recipe.model import is_exact, value_of
from pretraining.refusals import gathers_blocks

ROOMY = 0.85
"""Share of a GPU's memory up to which a run leaves room for what the prediction does not see."""
TIGHT = 0.95
"""Share of a GPU's memory above which fragmentation can end a run."""
PHASES = {
    "loss": "when the backward pass starts: all kept activations and the loss",
    "backward": "when the backward pass ends: one layer's activations and all gradients",
    "step": "in the optimizer step: gradients and their flat copies",
}


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
    state: ModelState | None = None
    optimizer_states: str = ADAM.name
    """What the part of the optimizer's states is called."""

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the peak, without those that are 0."""
        return {name: size for name, size in self.phases[self.peak_phase].items() if size}

    @property
    def allocated(self) -> float:
        """What torch.cuda.max_memory_allocated will show."""
        return sum(self.parts.values())

    @property
    def reserve(self) -> float:
        """What the process takes beside its tensors: context, NCCL, what the allocator cannot reuse."""
        entry = table("memory")
        nccl = entry["nccl_bytes"]["value"] if self.num_gpus > 1 else 0
        return entry["cuda_context_bytes"]["value"] + nccl + entry["fragmentation"]["value"] * self.allocated

    @property
    def total(self) -> float:
        """What must fit into the GPU's memory."""
        return self.allocated + self.reserve

    @property
    def on_processor(self) -> float:
        """Bytes that a rank takes where the processor trains, beyond what it had before the model was built.

        Nobody touches the pages of the buckets' flat buffers.
        """
        device = max(sum(parts.values()) - parts.get("reduce buckets", 0) for parts in self.phases.values())
        offloaded = sum(size for name, size in self.host.items() if name.startswith("offloaded"))
        return device + offloaded + table("memory")["processor_bytes"]["value"]

    @property
    def host_counted(self) -> float:
        """Host memory that one rank cannot do without.

        Neither what a process is assumed to take nor the copy for a save: without room for that one, training waits
        until the save is written.
        """
        return sum(size for name, size in self.host.items() if name not in (PROCESS, SNAPSHOT))

    @property
    def host_running(self) -> float:
        """Host memory that one rank counts on while it trains: the model that was built there has moved on."""
        return self.host_counted - self.host.get(BUILT, 0)

    @property
    def snapshot(self) -> float:
        """Host memory that one rank copies its state into, so that it trains on while a checkpoint is written."""
        return self.host.get(SNAPSHOT, 0)

    @property
    def largest(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=self.parts.get)

    @property
    def host_bytes(self) -> float:
        """Host memory of one rank, at its peak."""
        return most_at_once(self.host)

    def to_dict(self) -> dict:
        """Plain JSON values, derived ones included."""
        derived = (
            "peak_phase",
            "parts",
            "allocated",
            "reserve",
            "total",
            "largest",
            "host",
            "host_bytes",
            "nvme",
            "on_processor",
        )
        return {**{name: getattr(self, name) for name in derived}, "phases": self.phases}


def memory_need(
    recipe: Recipe, ds_config: dict | None, world_size: int, gpu_memory: float | None = None
) -> MemoryNeed:
    """Memory of a recipe under a ds_config on `world_size` GPUs.

    Args:
        gpu_memory: bytes of one GPU: of a larger one the loss takes more; None: a processor trains, or it is not known.

    Raises:
        UserError: ranks x micro-batch x length does not divide the tokens per step.
    """
    precision, tensors = precision_of(recipe, ds_config), parameter_tensors(recipe.model)
    accumulation = accumulation_steps(recipe, world_size)
    optimizer, state = optimizer_states(recipe), state_of_recipe(recipe, ds_config, world_size)
    held = activations(
        recipe.model,
        recipe.micro_batch,
        recipe.sequence_length,
        precision,
        recomputed_one_in(recipe),
        loss=loss_of(recipe),
        gpu_memory=gpu_memory,
    )
    width = value_of(recipe.model, "hidden_size")
    as_one = gathers_blocks(recipe, ds_config)
    extra = buffers(ds_config, tensors, width, world_size, precision, accumulation, as_one)
    copies = optimizer_copies(ds_config, tensors, world_size, optimizer.copied)
    extra = replace(extra, step=extra.step + copies)
    return MemoryNeed(
        phases=_phases(state, held, extra, zero_stage(ds_config), accumulation, optimizer.name),
        num_gpus=world_size,
        host=host_memory(recipe, ds_config, world_size, state, precision, tensors, optimizer),
        nvme=state.nvme,
        state=state,
        optimizer_states=optimizer.name,
    )


def state_of_recipe(recipe: Recipe, ds_config: dict | None, world_size: int) -> ModelState:
    """Model state of the fullest of `world_size` ranks, with the optimizer that the recipe chooses."""
    return model_state(
        model_size(recipe.model).total,
        ds_config,
        world_size,
        precision_of(recipe, ds_config).weights == SIXTEEN_BIT,
        accumulation_steps(recipe, world_size),
        parameter_tensors(recipe.model),
        optimizer_states(recipe),
    )


def loss_of(recipe: Recipe) -> dict:
    """The recipe's section with what `kind: auto` becomes: fused where the head is known (`model/loss.py`)."""
    kind = recipe.loss["kind"]
    if kind != "auto":
        return recipe.loss
    return {**recipe.loss, "kind": "fused" if is_exact(recipe.model) else "chunked"}


def checkpointing_of(recipe: Recipe) -> tuple[bool, int]:
    """Whether layers are recomputed, and of how many layers one."""
    keywords = recipe.training.get("activation_checkpointing_kwargs") or {}
    return bool(recipe.training.get("activation_checkpointing")), int(keywords.get("every_n_layers") or 1)


def recomputed_one_in(recipe: Recipe) -> int:
    """Of so many layers one is recomputed; 0: none is."""
    recomputes, every_n_layers = checkpointing_of(recipe)
    return every_n_layers if recomputes else 0


def recomputed_share(every_n_layers: int) -> float:
    """Of the layers, those that are recomputed."""
    return 1 / every_n_layers if every_n_layers else 0.0


def _phases(
    state: ModelState, held: Activations, extra: Buffers, stage: int, accumulation: int, optimizer: str
) -> dict[str, dict[str, float]]:
    """The three moments at which a step's memory can peak.

    When a backward pass starts, gradients of earlier micro-batches lie there; the fp32 sums of stage 2 too, those
    of stages 1 and 3 always (observed with deepspeed 0.19.8: benchmarks/model_states.py).
    """
    always = {"weights": state.parameters, "fp32 masters": state.masters, optimizer: state.moments}
    sums = state.gradient_accumulation
    sums_before = sums if accumulation > 1 or stage != 2 else 0
    passing = {**always, "reduce buckets": extra.buckets, "gathered weights": extra.gathered}
    return {
        "loss": {
            **passing,
            "gradients": state.gradients if accumulation > 1 else 0,
            "gradient sums": sums_before,
            "activations": held.kept,
            "logits and loss": held.logits,
        },
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
