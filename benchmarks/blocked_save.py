"""How long a save keeps training standing still: in the background against `checkpoints.background: false`.

    python benchmarks/blocked_save.py --pairs 5
    python benchmarks/blocked_save.py --recipe tiny --pairs 3

Trains a recipe's model (124m: 124 million parameters, so 1.5 GB of fp32 weights and two moments) on short sequences on
one process, and saves in both ways in turn: the same tensors, files and fsync. Prints one JSON line: medians of the
seconds blocked and their ratio (of neighbouring pairs), the memory a save takes beyond what was resident before it, and
a training step's seconds while a save is being written against those without one.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from record import parser_of, record

TOKENS = 64
IDLE_STEPS = 3


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="124m")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to save (a disk of its own, say)")
    parser.add_argument("--rest", action="store_true", help="sleep where the model would train")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="blocked_save_", dir=options.folder))
    try:
        values = measure(options.recipe, options.pairs, options.rest, folder)
    finally:
        shutil.rmtree(folder)
    record(
        "blocked_save",
        {"recipe": options.recipe, "pairs": options.pairs, "trained": not options.rest, **values},
        options.keep,
    )


def measure(recipe: str, num_pairs: int, rest: bool, folder: Path) -> dict:
    training = Training(recipe, rest)
    writers = {way: writer_in(folder / way, way == "background") for way in ("background", "synchronous")}
    rounds = []
    for number in range(num_pairs + 1):
        ways = list(writers) if number % 2 else list(writers)[::-1]
        rounds.append({way: one_save(writers[way], training, number, folder / way) for way in ways})
    first, rounds = rounds[0], rounds[1:]
    background, synchronous = ([each[way] for each in rounds] for way in writers)
    blocked = [pair["background"]["blocked"] / pair["synchronous"]["blocked"] for pair in rounds]
    return {
        "parameters": training.num_parameters,
        "bytes": writers["background"].last["bytes"],
        "ratio": middle(blocked),
        "ratios": [round(each, 4) for each in blocked],
        "background_blocked_seconds": middle(each["blocked"] for each in background),
        "first_background_blocked_seconds": first["background"]["blocked"],
        "synchronous_blocked_seconds": middle(each["blocked"] for each in synchronous),
        "background_write_seconds": middle(each["written"] for each in background),
        "background_peak_extra_bytes": first["background"]["extra_bytes"],
        "synchronous_peak_extra_bytes": max(each["extra_bytes"] for each in synchronous),
        "step_seconds": middle(training.idle_seconds),
        "step_seconds_while_writing": middle(training.busy_seconds),
    }


def middle(values: Iterable[float]) -> float | None:
    """The median; None of nothing."""
    found = list(values)
    return round(statistics.median(found), 4) if found else None


def one_save(writer, training: "Training", step: int, folder: Path) -> dict:
    """A save among training steps; the memory it takes is counted from just before it."""
    for _ in range(IDLE_STEPS):
        training.step_or_rest(training.idle_seconds)
    before = reset_peak()
    writer.save(step, training.tensors(), {"state.json": b"{}"})
    while writer.in_flight:
        training.step_or_rest(training.busy_seconds)
        writer.poll()
    values = {"blocked": writer.last["blocked_seconds"], "written": writer.last["write_seconds"]}
    shutil.rmtree(folder / f"checkpoint-{step}")
    return {**values, "extra_bytes": peak_bytes() - before}


class Training:
    """A model and its AdamW, one fused step at a time, on random tokens."""

    def __init__(self, recipe: str, rest: bool):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from pretraining.recipe import load_recipe

        shape = {**load_recipe(recipe).model, "use_cache": False}
        self.torch = torch
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.float32)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(shape["vocab_size"], (1, TOKENS))
        self.rest, self.idle_seconds, self.busy_seconds = rest, [], []
        self.step()

    def step_or_rest(self, seconds: list[float]) -> None:
        if self.rest:
            return time.sleep(0.1)
        seconds.append(self.step())

    def step(self) -> float:
        """One optimizer step; its seconds."""
        began = time.perf_counter()
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return time.perf_counter() - began

    def tensors(self) -> dict:
        """What a plain run of one rank saves: fp32 weights and both moments, live."""
        found = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            found[f"master/{name}@0"] = parameter.detach().reshape(-1)
            found |= {f"{key}/{name}@0": state[key].reshape(-1) for key in ("exp_avg", "exp_avg_sq")}
        return found


def writer_in(folder: Path, background: bool):
    from pretraining.checkpoints.background import CheckpointWriter
    from pretraining.runtime.durable_files import write_json
    from pretraining.runtime.run_folder import RunFolder

    return CheckpointWriter(
        RunFolder(folder),
        lambda where, content: write_json(where / "committed.json", content),
        background=background,
    )


def reset_peak() -> int:
    """Forget the process's highest memory use so far; what it holds now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak_bytes() -> int:
    return status("VmHWM")


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
