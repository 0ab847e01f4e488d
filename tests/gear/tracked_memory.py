"""What a model keeps in memory for its backward pass: by the plan's formulas, and by torch's own trackers."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from pretraining.ds_config import Degrees, load_ds_config
from pretraining.model.attention import SDPA_CAUSAL, register_kernels, split_attention
from pretraining.model.build import keep_products
from pretraining.model.loss import build_loss, next_token_loss
from pretraining.planning.memory.activations import activations
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import layer_numel, parameter_tensors
from pretraining.planning.sizes import model_size
from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Loss
from pretraining.runtime.process_group import RankGroups
from pretraining.upstream.saved_tensors import AsOnGpu


def setup_of(
    model: dict,
    micro_batch: int,
    length: int,
    precision: str = "bf16",
    every_n_layers: int = 0,
    loss: str = "plain",
    keeps_products: bool = False,
    split: str = "",
) -> Setup:
    """A recipe with such a micro-batch. split: what a rank has a part of, such as `tensor=2`."""
    recipe = load_recipe("features/gpt2")
    training = {**recipe.training, "per_device_train_batch_size": micro_batch, "bf16": precision != "fp32"}
    training["activation_checkpointing"] = every_n_layers > 0
    training["activation_checkpointing_kwargs"] = {"every_n_layers": every_n_layers}
    recipe = replace(
        recipe,
        model=model,
        training=training,
        loss=Loss(kind=loss),
        speed=replace(recipe.speed, recompute="operators" if keeps_products else "layers"),
        data=replace(recipe.data, sequence_length=length),
    )
    way = f"zero1:{split}" if split else "zero1"
    return Setup(recipe, None if precision == "autocast" else load_ds_config(way))


def predict(
    model: dict,
    micro_batch: int,
    length: int,
    precision: str,
    every_n_layers: int,
    loss: str = "plain",
    keeps_products: bool = False,
) -> dict[str, float]:
    """Bytes kept for the backward pass (a plain loss's log-probabilities included), and at the peak of both passes."""
    case = setup_of(model, micro_batch, length, precision, every_n_layers, loss, keeps_products)
    held, width = activations(case, None), case.precision.weights
    tensors, size = parameter_tensors(model), model_size(model)
    gradients = width * size.total
    # while the first layer's backward pass runs, its own gradients and a separate table's are still to come
    to_come = width * (layer_numel(tensors) + (0 if size.tied else size.embedding))
    backward = gradients - to_come + held.per_layer + held.backward
    peak = max(held.kept + held.logits, backward, gradients)
    return {"kept": held.kept + held.logits / 3, "peak": peak} if loss == "plain" else {"peak": peak}


def trace(
    model: dict,
    micro_batch: int,
    length: int,
    precision: str,
    every_n_layers: int,
    loss: str = "plain",
    keeps_products: bool = False,
    sequence: int = 1,
) -> dict[str, int]:
    """The same numbers from torch's MemTracker, over the model and the loss that training uses.

    sequence: over how many ranks each sequence is split; the other ranks do not exist, and send nothing.
    """
    if sequence > 1:
        dist.init_process_group("fake", rank=0, world_size=sequence, store=FakeStore())
    group = dist.group.WORLD if sequence > 1 else None
    groups = RankGroups(Degrees(sequence=sequence), 0, sequence, group)
    register_kernels()
    # sdpa without the mask that fake tensors alone would make it build
    attention = "eager" if model.get("attn_implementation") == "eager" else SDPA_CAUSAL
    if sequence > 1:
        attention = split_attention(attention, groups)
    config = AutoConfig.for_model(**{"use_cache": False, **model, "attn_implementation": attention})
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        network = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        if keeps_products:
            keep_products(network)
        if every_n_layers:
            network.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every_n_layers)
        loss_of = build_loss(network, Loss(kind=loss), groups)
        ids = torch.zeros(micro_batch, length // sequence, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(network, ids)
        with tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                nats = loss_of(network(input_ids=ids), ids, ids.numel())
            kept = without_weights(tracker.get_tracker_snapshot("current"))
            nats.backward()
        peak = without_weights(tracker.get_tracker_snapshot("peak"))
    if sequence > 1:
        dist.destroy_process_group()
    return {"kept": kept, "peak": peak} if loss == "plain" else {"peak": peak}


def without_weights(snapshot: dict) -> int:
    """All categories of the tracker but the parameters."""
    (categories,) = snapshot.values()
    return sum(
        size
        for name, size in categories.items()
        if str(name).rpartition(".")[2] not in ("PARAM", "BUFFER", "Total")
    )


def peak_bytes(step) -> int:
    """Return the most bytes that one call has allocated at any moment, without what it found there."""
    step()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as profiler:
        step()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def activation_error(model: dict, recomputes: bool, micro_batch: int = 2, length: int = 64) -> float:
    """Return the plan's bytes of one micro-batch in bf16 divided by those of the tracker, less 1.

    The model, of any type, is really built and goes forward on a processor, so that it must be small. Attention and
    dropout are those of a GPU; all else is as the type's own code has it.
    """
    config = AutoConfig.for_model(**{"use_cache": False, **model})
    network = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    if recomputes:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    ids, tracker = torch.randint(1, model["vocab_size"], (micro_batch, length)), MemTracker()
    tracker.track_external(network, ids)
    with tracker, AsOnGpu(False):
        nats = next_token_loss(network(input_ids=ids), ids, ids.numel())
        kept = without_weights(tracker.get_tracker_snapshot("current"))
        del nats
    return predict(model, micro_batch, length, "bf16", int(recomputes))["kept"] / kept - 1
