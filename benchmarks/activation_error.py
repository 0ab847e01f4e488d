"""How far a plan's activations are from those that torch's memory tracker finds, for a model section of any type."""

import sys

from gear import REPOSITORY

sys.path.insert(0, str(REPOSITORY))


def activation_error(
    model: dict, precision: str = "bf16", recomputes: bool = False, rows: int = 2, length: int = 64
) -> float:
    """Return the plan's bytes of one micro-batch divided by those of the tracker, less 1.

    The model is really built and goes forward on a processor, so that it must be small. Attention, dropout and
    autocast are those of a GPU; all else is as the type's own code has it.

    Args:
        precision: bf16 (of the weights too, as under DeepSpeed), autocast or fp32.
    """
    from memory import predict

    traced = tracked(model, precision, recomputes, rows, length)
    return predict(model, rows, length, precision, int(recomputes))["kept"] / traced - 1


def tracked(model: dict, precision: str, recomputes: bool, rows: int, length: int) -> int:
    """Return the bytes that the tracker finds when a plain loss is computed, without weights and buffers."""
    import torch
    from memory import without_weights
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import AutoConfig, AutoModelForCausalLM

    from pretraining.model.loss import next_token_loss
    from pretraining.upstream.saved_tensors import AsOnGpu

    dtype, casts = torch.bfloat16 if precision == "bf16" else torch.float32, precision == "autocast"
    config = AutoConfig.for_model(**{"use_cache": False, **model})
    network = AutoModelForCausalLM.from_config(config).to(dtype).train()
    if recomputes:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    ids, tracker = torch.randint(1, model["vocab_size"], (rows, length)), MemTracker()
    tracker.track_external(network, ids)
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=casts), AsOnGpu(casts):
            nats = next_token_loss(network(input_ids=ids), ids, ids.numel())
        kept = without_weights(tracker.get_tracker_snapshot("current"))
        del nats
    return kept
