"""Model states predicted beside those DeepSpeed holds: real Trainer steps on CPU, every stage, one to four ranks.

    python benchmarks/model_states.py
    python benchmarks/model_states.py --ways zero2 zero3 --ranks 2 --precisions bf16 --keep

Each case trains a small GPT-2 for three steps of two micro-batches by the repository's own arguments, Trainer and
ds_config, and walks the live tensors of every rank after the last but one micro-batch (`held_bytes.py`).
"""

import json
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path

from held_bytes import held_bytes
from record import parser_of, record

WAYS = ("null", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_hpz")
MODEL = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 1024, "n_positions": 128}
ACCUMULATION, STEPS = 2, 3
BUCKET = 100_000
"""Elements: small, so that gloo has little to send."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2, 3, 4))
    parser.add_argument("--precisions", nargs="+", default=("bf16", "fp32"), choices=("bf16", "fp32"))
    options = parser.parse_args()
    cases = [(w, p, r) for w in options.ways for p in options.precisions for r in options.ranks]
    for way, precision, ranks in cases:
        if way != "zero3_hpz" or ranks == 4:
            record("model_states", compare(way, precision, ranks), options.keep)


def compare(way: str, precision: str, ranks: int) -> dict:
    """One case: the fullest rank's bytes by owner, the prediction, and their ratio."""
    from pretraining.planning.memory import model_state

    recipe, config = case_of(way, precision, ranks)
    held = max(run_ranks(way, precision, ranks), key=states_of)
    tensors = parameter_tensors_of(recipe)
    sixteen = precision == "bf16" and config is not None and config["zero_optimization"]["stage"] > 0
    numel = sum(tensor.numel for tensor in tensors)
    state = model_state(numel, config, ranks, sixteen, ACCUMULATION, tensors)
    predicted = state.gpu + state.host
    values = {"way": way, "precision": precision, "ranks": ranks, "parameters": numel, "held": held}
    return {**values, "predicted": state.to_dict(), "ratio": round(states_of(held) / predicted, 4)}


def states_of(held: dict) -> int:
    """Everything but the buckets on the way to other ranks, which are no state; the small batch is in it."""
    return sum(size for name, size in held.items() if name != "buckets")


def parameter_tensors_of(recipe):
    from pretraining.planning.memory.tensors import parameter_tensors

    return parameter_tensors(recipe.model)


def case_of(way: str, precision: str, ranks: int):
    """The recipe and ds_config of a case."""
    from pretraining.ds_config import load_ds_config
    from pretraining.recipe import load_recipe

    length = MODEL["n_positions"]
    values = {f"model.{key}": value for key, value in MODEL.items()}
    values |= {"training.bf16": precision == "bf16", "training.per_device_train_batch_size": 1}
    values |= {"training.eval_strategy": "no", "training.save_strategy": "no", "training.logging_steps": 100}
    values |= {"budget.tokens_per_step": length * ranks * ACCUMULATION}
    values |= {"budget.tokens": length * ranks * ACCUMULATION * STEPS}
    recipe = load_recipe("tiny", [f"{key}={json.dumps(value)}" for key, value in values.items()], way)
    config = load_ds_config(recipe.deepspeed) if recipe.deepspeed else None
    zero = (config or {}).get("zero_optimization", {})
    if isinstance(zero.get("reduce_bucket_size"), int):
        zero["reduce_bucket_size"] = BUCKET
    if "zero_hpz_partition_size" in zero:
        zero["zero_hpz_partition_size"] = 2
    return recipe, config


def run_ranks(way: str, precision: str, ranks: int) -> list[dict]:
    """Fork the ranks of one case, after the imports, and collect what each holds."""
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    folder, port, children = Path(tempfile.mkdtemp()), free_port(), []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os._exit(run_rank(way, precision, ranks, rank, port, folder))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"{way} {precision} on {ranks} ranks failed:\n{(folder / 'log').read_text()[-3000:]}")
    return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


def run_rank(way: str, precision: str, ranks: int, rank: int, port: int, folder: Path) -> int:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sizes = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    os.environ.update(sizes, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        held = train_and_walk(*case_of(way, precision, ranks), folder)
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
