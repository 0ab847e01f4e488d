"""What checkpoints cost training: how long a save keeps it standing still, and how an upload slows its steps.

    python benchmarks/checkpoint_cost.py save --pairs 5
    python benchmarks/checkpoint_cost.py save --recipe tiny --pairs 3
    python benchmarks/checkpoint_cost.py upload --to folder --pairs 5 --threads 1
    python benchmarks/checkpoint_cost.py upload --to s3 --pairs 3 --threads 1

Trains a recipe's model (124m: 124 million parameters, so 1.5 GB of fp32 weights and two moments) on short sequences on
one process.

save: in the background against `checkpoints.background: false`, in turn: the same tensors, files and fsync. One JSON
line: medians of the seconds blocked and their ratio (of neighbouring pairs), the memory a save takes beyond what was
resident before it, and a training step's seconds while a save is being written against those without one.

upload: a checkpoint of the same model again and again to an empty store: a folder (such as a mounted disk; with fsync),
or a real S3 server on the same machine, whose processor time training pays for here and nowhere else. One JSON line:
medians of the steps' seconds in turns without and with an upload, the median of the pairs' ratios, and the processor
seconds of this process for an upload while training rests. On a machine with few cores the ratio is noise below
`ratio_of_idle_halves`, which compares two turns without an upload.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gear import memory_line, middle, parser_of, record, timed

TOKENS = 64
IDLE_STEPS = 3
STEPS = 6
"""Of a turn without an upload; a turn with one is as long as the upload."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("save", "upload"))
    parser.add_argument("--recipe", default="124m")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to save (a disk of its own, say)")
    parser.add_argument("--to", choices=("folder", "s3"), default="folder", help="upload: the store")
    parser.add_argument("--threads", type=int, help="of training: fewer than cores, as beside GPUs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint_cost_", dir=options.folder) as folder:
        training = Training(options)
        if options.what == "save":
            values = {"recipe": options.recipe, "pairs": options.pairs}
            record("blocked_save", {**values, **measure_saves(options, training, Path(folder))}, options.keep)
        else:
            with store(options, Path(folder)) as address:
                record("upload", measure_uploads(options, training, Path(folder), address), options.keep)


class Training:
    """A model and its AdamW, one fused step at a time, on random tokens."""

    def __init__(self, options: argparse.Namespace):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from pretraining.recipe import load_recipe

        if options.threads:
            torch.set_num_threads(options.threads)
        shape = {**load_recipe(options.recipe).model, "use_cache": False}
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.float32)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(shape["vocab_size"], (1, TOKENS))
        self.num_threads = torch.get_num_threads()
        self.step()

    def step(self) -> None:
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def tensors(self) -> dict:
        """Return what a plain run of one rank saves: fp32 weights and both moments, live."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            tensors[f"master/{name}@0"] = parameter.detach().reshape(-1)
            tensors |= {f"{key}/{name}@0": state[key].reshape(-1) for key in ("exp_avg", "exp_avg_sq")}
        return tensors


def writer_in(folder: Path, background: bool):
    from pretraining.checkpoints.background import CheckpointWriter
    from pretraining.checkpoints.format import commit_checkpoint
    from pretraining.runtime.run_folder import RunFolder

    def commit(where: Path, content: dict) -> None:
        commit_checkpoint(where, {**content, "step": 1, "ranks": 1})

    return CheckpointWriter(RunFolder(folder), commit, background=background)


def measure_saves(options: argparse.Namespace, training: Training, folder: Path) -> dict:
    idle_seconds: list[float] = []
    busy_seconds: list[float] = []
    writers = {way: writer_in(folder / way, way == "background") for way in ("background", "synchronous")}

    def one_save(way: str, step: int) -> dict:
        """Save among training steps; the memory that it takes is counted from just before it."""
        writer = writers[way]
        for _ in range(IDLE_STEPS):
            idle_seconds.append(timed(training.step))
        # forget the process's highest memory use so far
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_line("VmRSS")
        writer.save(step, training.tensors(), {"state.json": b"{}"})
        while writer._flight is not None:
            busy_seconds.append(timed(training.step))
            writer.poll()
        shutil.rmtree(folder / way / f"checkpoint-{step}")
        values = {"blocked": writer.last["blocked_seconds"], "written": writer.last["write_seconds"]}
        return {**values, "extra_bytes": memory_line("VmHWM") - before}

    rounds = []
    for number in range(options.pairs + 1):
        ways = list(writers) if number % 2 else list(writers)[::-1]
        rounds.append({way: one_save(way, number) for way in ways})
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
        "step_seconds": middle(idle_seconds),
        "step_seconds_while_writing": middle(busy_seconds),
    }


@contextlib.contextmanager
def store(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yield the address of an empty store."""
    if options.to == "folder":
        yield str(folder / "store")
        return
    from tests.gear.object_store import BUCKET, connect_to, s3_server

    with s3_server(folder / "server.log") as address:
        os.environ |= connect_to(address)
        yield f"s3://{BUCKET}/runs"


def measure_uploads(options: argparse.Namespace, training: Training, folder: Path, address: str) -> dict:
    from pretraining.checkpoints.format import MARKER
    from pretraining.checkpoints.remote import RemoteRun
    from pretraining.checkpoints.upload import Uploader

    def turn(goes_on, at_least: int = STEPS) -> float:
        """Return the median step of a turn of at least so many steps, which lasts as long as `goes_on`."""
        seconds: list[float] = []
        while len(seconds) < at_least or goes_on():
            seconds.append(timed(training.step))
        return statistics.median(seconds)

    writer = writer_in(folder / "run", background=False)
    writer.save(1, training.tensors(), {"state.json": b"{}"})
    checkpoint = writer.run.checkpoint(1)
    assert (checkpoint / MARKER).exists()
    remote = RemoteRun(address, "run")
    uploader = Uploader(writer.run, remote)
    rounds, alone = [], []
    for _ in range(options.pairs + 1):
        turns = [turn(lambda: False), turn(lambda: False)]
        uploader.offer(checkpoint)
        turns.append(turn(lambda: uploader._thread.is_alive(), at_least=1))
        uploader.wait()
        assert remote.read_if_there(f"{checkpoint.name}/{MARKER}")
        rounds.append(turns)
        remote.remove_checkpoint(checkpoint.name)
        began, cpu = time.perf_counter(), time.process_time()
        uploader.offer(checkpoint)
        uploader._thread.join()
        alone.append((time.perf_counter() - began, time.process_time() - cpu))
        uploader.wait()
        remote.remove_checkpoint(checkpoint.name)
    rounds, alone = rounds[1:], alone[1:]
    gigabytes = sum(path.stat().st_size for path in checkpoint.iterdir()) / 1e9
    return {
        "to": options.to,
        "gigabytes": round(gigabytes, 3),
        "pairs": options.pairs,
        "num_threads": training.num_threads,
        "step_seconds": middle(turns[1] for turns in rounds),
        "step_seconds_beside_an_upload": middle(turns[2] for turns in rounds),
        "ratio": middle(turns[2] / turns[1] for turns in rounds),
        "ratio_of_idle_halves": middle(turns[1] / turns[0] for turns in rounds),
        "upload_seconds": middle(seconds for seconds, _ in alone),
        "upload_cpu_seconds": middle(cpu for _, cpu in alone),
        "upload_cpu_seconds_per_gigabyte": middle(cpu / gigabytes for _, cpu in alone),
    }


if __name__ == "__main__":
    main()
