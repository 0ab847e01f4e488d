"""Model states predicted beside those DeepSpeed holds: real Trainer steps on CPU, every stage, one to four ranks.

    python benchmarks/model_states.py
    python benchmarks/model_states.py --ways zero2 zero3 --ranks 2 --precisions bf16 --keep
    python benchmarks/model_states.py --ways zero2:sequence=2 zero3:tensor=2,sequence=2 --ranks 2 4 --precisions bf16
    python benchmarks/model_states.py --ways split --ranks 2 4 --keep
    python benchmarks/model_states.py --optimizers muon --ways null zero0 zero1 zero2 zero3 --ranks 1 2
    python benchmarks/model_states.py --optimizers lion_32bit schedule_free_adamw adafactor adamw_8bit --ways zero0

Each case trains a small GPT-2 for three steps of two micro-batches by the repository's own arguments, Trainer and
ds_config, and walks the live tensors of every rank after the last but one micro-batch.
"""

import gc
import time
from itertools import product
from pathlib import Path

from gear import OFFLOADED, STAGES, on_forked_ranks, parser_of, record, short_recipe, short_trainer

DEGREES = ("tensor=2", "tensor=4", "sequence=2", "sequence=4", "tensor=2,sequence=2")
DEGREES += ("expert=2", "expert=4", "expert=2,sequence=2")
WAYS = ("null", *STAGES, *OFFLOADED, "zero3_hpz")
WAYS += tuple(f"{stage}:{degrees}" for degrees in DEGREES for stage in STAGES)
WAYS += tuple(f"{stage}:{degrees}" for degrees in DEGREES for stage in OFFLOADED)
MODEL = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 1024, "n_positions": 128}
SPLIT = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
SPLIT |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "use_cache": False}
SPLIT |= {"max_position_embeddings": 128, "tie_word_embeddings": False}
"""For tensor parallelism, which knows no GPT-2."""
MIXTURE = {**SPLIT, "model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 96}
MIXTURE |= {"num_experts": 8, "num_experts_per_tok": 2}
ACCUMULATION, STEPS = 2, 3
BUCKET = 100_000
"""Elements: small, so that gloo has little to send."""
RELEASE_SECONDS = 0.5
"""After a collective, gloo's own thread still holds the bucket that it reduced for a moment."""
SUMS = (
    "averaged_gradients",
    "all_grad_tensors",
    "grad_partitions_flat_buffer",
    "accumulated_grads_in_cpu",
    "fp32_groups_gradients_flat",
)
MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
)
BUCKETS = ("temp_grad_buffer_for_cpu_offload", "temp_grad_buffer_for_gpu_offload")
"""Offloading's staging buffers of one tensor."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=(*WAYS, "split"), help="split: degrees")
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2, 3, 4))
    parser.add_argument("--precisions", nargs="+", default=("bf16", "fp32"), choices=("bf16", "fp32", "wide"))
    parser.add_argument(
        "--optimizers", nargs="+", default=("adamw",), help="or muon, averaged, or a `training.optim`"
    )
    options = parser.parse_args()
    ways = [way for way in WAYS if ":" in way] if "split" in options.ways else options.ways
    for case in product(options.optimizers, ways, options.precisions, options.ranks):
        if case[-1] % least_ranks(case[1]) == 0:
            record("model_states", compare(*case), options.keep)


def least_ranks(way: str) -> int:
    """The fewest ranks of a ds_config."""
    from pretraining.ds_config import degrees_of, load_ds_config

    if way in ("null", "zero3_hpz"):
        return {"null": 1, "zero3_hpz": 4}[way]
    degrees = degrees_of(load_ds_config(way))
    return max(degrees.ranks_per_sample, degrees.expert)


def compare(optimizer: str, way: str, precision: str, ranks: int) -> dict:
    """One case: the fullest rank's bytes by owner, the prediction, and their ratio."""
    from pretraining.planning.memory.states import state_of
    from pretraining.planning.setup import Setup
    from pretraining.planning.sizes import model_size

    case = (optimizer, way, precision, ranks)
    recipe, config = case_of(*case)
    walked = on_forked_ranks(
        ranks, lambda folder: train_and_walk(recipe, config, folder), " ".join(map(str, case))
    )
    held = max(walked, key=states_of)
    state = state_of(Setup(recipe, config, ranks))
    predicted = state.gpu + state.host
    values = dict(zip(("optimizer", "way", "precision", "ranks"), case, strict=True))
    values |= {"parameters": model_size(recipe.model).total, "held": held}
    ratios = {"ratio": round(states_of(held) / predicted, 4)}
    if state.moments:
        ratios["moments_ratio"] = round(held["moments"] / state.moments, 4)
    return {**values, "predicted": state.to_dict(), **ratios}


def states_of(held: dict) -> int:
    """Everything but the buckets on the way to other ranks, which are no state; the small batch is in it."""
    return sum(size for name, size in held.items() if name != "buckets")


def case_of(optimizer: str, way: str, precision: str, ranks: int):
    """The recipe and ds_config of a case."""
    from pretraining.ds_config import degrees_of, load_ds_config

    # ranks that work on the same samples count once
    degrees = degrees_of(load_ds_config(way) if way != "null" else None)
    per_step = MODEL["n_positions"] * (ranks // degrees.ranks_per_sample) * ACCUMULATION
    values = {f"model.{key}": value for key, value in MODEL.items()}
    if degrees.tensor > 1 or degrees.expert > 1:
        values = {"model": MIXTURE if degrees.expert > 1 else SPLIT}
    values |= {"training.bf16": precision != "fp32", "training.per_device_train_batch_size": 1}
    values |= {"training.logging_steps": 100}
    if precision == "wide":  # bf16, but for embeddings and head
        values |= {"model.keep_in_fp32": ["embeddings", "head"]}
    if optimizer == "averaged":
        values |= {"optimizer.average_decay": 0.9}
    elif optimizer != "adamw":
        values |= {"optimizer.name": "muon"} if optimizer == "muon" else {"training.optim": optimizer}
    if optimizer.startswith("schedule_free"):
        values |= {"training.lr_scheduler_type": "constant_with_warmup", "training.lr_scheduler_kwargs": None}
    recipe, config = short_recipe("features/gpt2", values, way, per_step, STEPS)
    zero = (config or {}).get("zero_optimization", {})
    if isinstance(zero.get("reduce_bucket_size"), int):
        zero["reduce_bucket_size"] = BUCKET
    if "zero_hpz_partition_size" in zero:
        zero["zero_hpz_partition_size"] = 2
    return recipe, config


def train_and_walk(recipe, config: dict | None, folder: Path) -> dict[str, int]:
    """Bytes by owner before the last micro-batch of the last step."""
    from transformers import TrainerCallback

    held: dict[str, int] = {}

    class Walk(TrainerCallback):
        """After a micro-batch that does not end its step."""

        def on_substep_end(self, arguments, state, control, **kwargs):
            if state.global_step == STEPS - 1:
                engine = trainer.model_wrapped
                held.update(held_bytes(engine, getattr(engine, "optimizer", None) or trainer.optimizer))

    trainer = short_trainer(recipe, config, folder / "run", ACCUMULATION, STEPS, Walk())
    trainer.train()
    return held


def held_bytes(model, optimizer) -> dict[str, int]:
    """Return the bytes of every live tensor of this process, by owner; a storage that several share counts once.

    model: as DeepSpeed trains it; optimizer: DeepSpeed's, or torch's without it. `other` is what none of the
    owners explains: the buckets of DistributedDataParallel, the batch.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    def is_tensor(each) -> bool:
        try:
            return isinstance(each, torch.Tensor)
        except ReferenceError:
            return False

    def flat(values) -> list:
        """List the tensors in lists, tuples and dictionaries, however deep."""
        return [each for each in tree_leaves(values) if is_tensor(each)]

    def attributes(*names: str) -> list:
        return flat([getattr(optimizer, name, None) for name in names])

    time.sleep(RELEASE_SECONDS)
    gc.collect()  # what only a cycle still holds is gone at the next collection
    parameters, masters = list(model.parameters()), attributes(*MASTERS)
    weights = ("data", "ds_tensor", "ds_secondary_tensor")
    inner = getattr(optimizer, "optimizer", optimizer)
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    buckets = [list(vars(bucket).values()) for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    owners = {
        "weights": [getattr(p, name, None) for p in parameters for name in weights],
        "gradients": [p.grad for p in parameters],
        "gradient_sums": [
            *(getattr(p, "grad_accum", None) for p in parameters),
            *attributes(*SUMS),
            *(master.grad for master in masters),
        ],
        "masters": masters,
        "moments": flat(dict(inner.state)),
        "host_weights": attributes("param_buffer_of_bit16_for_cpu_offload_groups"),
        "buckets": [*attributes(*BUCKETS), *flat(buckets)],
        "other": (each for each in gc.get_objects() if is_tensor(each)),
    }
    seen: set[int] = set()
    held = dict.fromkeys(owners, 0)
    for owner, tensors in owners.items():
        for tensor in tensors:
            if tensor is None or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                held[owner] += storage.nbytes()
    return held


if __name__ == "__main__":
    main()
