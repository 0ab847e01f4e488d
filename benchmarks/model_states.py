"""Model states predicted beside those DeepSpeed holds: real Trainer steps on CPU, every stage, one to four ranks.

    python benchmarks/model_states.py
    python benchmarks/model_states.py --ways zero2 zero3 --ranks 2 --precisions bf16 --keep
    python benchmarks/model_states.py --ways zero2:sequence=2 zero3:sequence=2 --ranks 2 4 --precisions bf16
    python benchmarks/model_states.py --optimizers muon --ways null zero0 zero1 zero2 zero3 --ranks 1 2
    python benchmarks/model_states.py --optimizers lion_32bit schedule_free_adamw adafactor adamw_8bit --ways zero0

Each case trains a small GPT-2 for three steps of two micro-batches by the repository's own arguments, Trainer and
ds_config, and walks the live tensors of every rank after the last but one micro-batch (`held_bytes.py`).
"""

import json
import os
import socket
import sys
import tempfile
import traceback
from itertools import product
from pathlib import Path

from held_bytes import held_bytes
from record import parser_of, record

WAYS = ("null", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_hpz")
WAYS += ("zero1:tensor=2", "zero2:tensor=2", "zero3:tensor=2")
WAYS += ("zero1:sequence=2", "zero2:sequence=2", "zero3:sequence=2")
MODEL = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 1024, "n_positions": 128}
SPLIT = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
SPLIT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "use_cache": False}
SPLIT |= {"max_position_embeddings": 128, "tie_word_embeddings": False}
"""For tensor parallelism, which knows no GPT-2."""
ACCUMULATION, STEPS = 2, 3
BUCKET = 100_000
"""Elements: small, so that gloo has little to send."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2, 3, 4))
    parser.add_argument("--precisions", nargs="+", default=("bf16", "fp32"), choices=("bf16", "fp32", "wide"))
    parser.add_argument(
        "--optimizers", nargs="+", default=("adamw",), help="adamw, muon, or a `training.optim`"
    )
    options = parser.parse_args()
    lists = options.optimizers, options.ways, options.precisions, options.ranks
    for optimizer, way, precision, ranks in product(*lists):
        least = {"zero3_hpz": 4}.get(way, 2 if "=" in way else 1)
        if ranks % least == 0:
            record("model_states", compare(optimizer, way, precision, ranks), options.keep)


def compare(optimizer: str, way: str, precision: str, ranks: int) -> dict:
    """One case: the fullest rank's bytes by owner, the prediction, and their ratio."""
    from pretraining.planning.memory.need import state_of_recipe
    from pretraining.planning.sizes import model_size

    case = (optimizer, way, precision, ranks)
    recipe, config = case_of(*case)
    held = max(run_ranks(*case), key=states_of)
    state = state_of_recipe(recipe, config, ranks)
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
    from pretraining.ds_config import load_ds_config
    from pretraining.recipe import load_recipe

    # ranks that work on the same samples count once
    _, _, together = way.partition("=")
    length, groups = MODEL["n_positions"], ranks // int(together or 1)
    values = {"model": SPLIT} if "tensor" in way else {f"model.{key}": value for key, value in MODEL.items()}
    values |= {"training.bf16": precision != "fp32", "training.per_device_train_batch_size": 1}
    values |= {"training.eval_strategy": "no", "training.save_strategy": "no", "training.logging_steps": 100}
    values |= {"budget.tokens_per_step": length * groups * ACCUMULATION}
    values |= {"budget.tokens": length * groups * ACCUMULATION * STEPS}
    if precision == "wide":  # bf16, but for embeddings and head
        values |= {"model.keep_in_fp32": ["embeddings", "head"]}
    if optimizer != "adamw":
        values |= {"optimizer.name": "muon"} if optimizer == "muon" else {"training.optim": optimizer}
    if optimizer.startswith("schedule_free"):
        values |= {"training.lr_scheduler_type": "constant_with_warmup", "training.lr_scheduler_kwargs": None}
    recipe = load_recipe("tiny", [f"{key}={json.dumps(value)}" for key, value in values.items()], way)
    config = load_ds_config(recipe.deepspeed) if recipe.deepspeed else None
    zero = (config or {}).get("zero_optimization", {})
    if isinstance(zero.get("reduce_bucket_size"), int):
        zero["reduce_bucket_size"] = BUCKET
    if "zero_hpz_partition_size" in zero:
        zero["zero_hpz_partition_size"] = 2
    return recipe, config


def run_ranks(optimizer: str, way: str, precision: str, ranks: int) -> list[dict]:
    """Fork the ranks of one case, after the imports, and collect what each holds."""
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    folder, port, children = Path(tempfile.mkdtemp()), free_port(), []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os._exit(run_rank((optimizer, way, precision, ranks), rank, port, folder))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(
            f"{optimizer} {way} {precision} on {ranks} ranks failed:\n{(folder / 'log').read_text()[-3000:]}"
        )
    return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


def run_rank(case: tuple, rank: int, port: int, folder: Path) -> int:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ranks = case[-1]
    sizes = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    os.environ.update(sizes, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        held = train_and_walk(*case_of(*case), folder)
        (folder / str(rank)).write_text(json.dumps(held))
        return 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1


def train_and_walk(recipe, config: dict | None, folder: Path) -> dict[str, int]:
    """Bytes by owner before the last micro-batch of the last step."""
    import torch
    from short_run import short_trainer
    from transformers import TrainerCallback

    held: dict[str, int] = {}

    class Walk(TrainerCallback):
        """After a micro-batch that does not end its step."""

        def on_substep_end(self, arguments, state, control, **kwargs):
            if state.global_step == STEPS - 1:
                engine = trainer.model_wrapped
                held.update(held_bytes(engine, getattr(engine, "optimizer", None) or trainer.optimizer))

    torch.set_num_threads(1)
    trainer = short_trainer(recipe, config, folder / "run", ACCUMULATION, STEPS, Walk())
    trainer.train()
    return held


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
