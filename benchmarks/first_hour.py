"""The first hour on GPUs: what only they can show, the most valuable first, each kept with device, versions and commit.

    python benchmarks/first_hour.py                          # on the machine that will train
    python benchmarks/first_hour.py --recipe mine.json       # with your own recipe at every ZeRO stage
    python benchmarks/first_hour.py --small                  # the same path on two CPU cores, some minutes
    python benchmarks/first_hour.py --list

The pieces run one after another, each at most ten minutes. What a piece said is in --folder; a second call goes on with
the first piece that has not ended, or begins a piece anew that was killed. Lines of benchmarks are appended to
benchmarks/results/<device>.jsonl, which plans for this GPU read from then on. At the end it prints what plans said,
beside what was measured.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from gear import REPOSITORY, RESULTS, STAGES

LIMIT_SECONDS = 600


class Piece(NamedTuple):
    """A command of the hour."""

    name: str
    shows: str
    words: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=45, help="begin no piece after so many (default: 45)"
    )
    parser.add_argument("--recipe", default="124m", help="trained at every stage (default: 124m)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPOSITORY / "runs" / "first_hour",
        help="for logs and what became of each piece (default: runs/first_hour)",
    )
    parser.add_argument("--small", action="store_true", help="small shapes, on a CPU")
    parser.add_argument("--list", action="store_true", help="show the pieces and what became of them")
    options = parser.parse_args()
    gpus = 0 if options.small else num_gpus()
    if not (gpus or options.small or options.list):
        print("error: no GPU here; --small tries the path on a CPU", file=sys.stderr)
        return 2
    pieces = pieces_of(options, gpus)
    began, failed = time.monotonic(), False
    if not options.list:
        options.folder.mkdir(parents=True, exist_ok=True)
    for number, piece in enumerate(pieces, 1):
        kept = options.folder / f"{piece.name}.json"
        state = json.loads(kept.read_text()) if kept.exists() else None
        head = f"[{number}/{len(pieces)}] {piece.name}: {piece.shows}"
        if options.list or state is not None:
            failed |= state is not None and state["code"] != 0
            print(f"{head}: {words_of(state)}", flush=True)
            continue
        if time.monotonic() - began > 60 * options.minutes:
            print(
                f"{head}: not begun, {options.minutes:g} minutes are over; the same command goes on here",
                flush=True,
            )
            return 75
        print(head, flush=True)
        state = run(piece, options.folder)
        failed |= state["code"] != 0
        # written when it has ended: a piece that was killed begins again
        kept.with_suffix(".tmp").write_text(json.dumps(state, indent=2))
        kept.with_suffix(".tmp").replace(kept)
        print(f"    {words_of(state)}", flush=True)
    if not options.list:
        print_comparison(options.folder)
    return 1 if failed and not options.list else 0


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def pieces_of(options: argparse.Namespace, gpus: int) -> list[Piece]:
    """Return the pieces for this machine, the most valuable first."""
    python, ranks = sys.executable, str(2 if options.small else max(gpus, 1))
    launched = (python, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}")
    keep = () if options.small else ("--keep",)
    tests = ("tests/training/test_gpu.py", *(() if options.small else ("-m", "gpu")))
    if options.small:
        steps = {"small": ("--shape", "small", "--pairs", "2", "--block_steps", "2")}
        peaks = ("benchmarks/memory.py", "--recipes", "124m", "--every_n_layers", "0")
        recipe, limit = "features/gpt2", ("--limit_tokens", "4e4")
    else:
        deepspeed = ("--deepspeed", "zero1", "--processes", ranks)
        steps = {
            "124m": ("--shape", "124m", "--micro_batch", "16", *deepspeed),
            "1.5b": ("--shape", "1.5b", "--micro_batch", "8", *deepspeed),
        }
        peaks = ("benchmarks/memory.py", "--peak", "--recipes", "124m", "1.5b", "--deepspeed", "zero2")
        recipe, limit = options.recipe, ("--limit_tokens", "2e6")
    pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    not_logged = "test_steps_that_are_not_logged_compute_with_the_weights_of_their_step"
    found = [
        Piece(
            "not_logged",
            "ZeRO-3, steps that are not logged, against CUDA_LAUNCH_BLOCKING=1",
            (*pytest, *tests, "-k", not_logged),
        ),
        Piece("tests", "kernels, precisions, offload, resume", (*pytest, *tests, "-k", f"not {not_logged}")),
        Piece(
            "rates",
            "products by width, attention by head and length, norms, copies, links",
            (*launched, "benchmarks/rates.py", *keep, *(("--small",) if options.small else ())),
        ),
    ]
    text = "the text of the steps below"
    found.append(Piece("text", text, (python, "data_prep.py", "--recipe", "features/gpt2")))
    for shape, words in steps.items():
        what = f"a step of {shape} beside a plain loop of PyTorch on the same tokens"
        found.append(Piece(f"step_{shape}", what, (python, "benchmarks/train_step.py", *words, *keep)))
    peak_words = (python, *peaks, *keep) if options.small else (*launched, *peaks, *keep)
    found.append(Piece("memory", "peak memory beside the plan", peak_words))
    data = ("--data_dir", str(options.folder / "data"))
    prepare = (python, "data_prep.py", "--recipe", recipe, *data, *limit)
    found.append(Piece("data", f"the text of {recipe}, as far as its short runs need it", prepare))
    for stage in STAGES:
        run_folder = ("--output_dir", str(options.folder / stage))
        given = ("--recipe", recipe, "--deepspeed", stage, *data, *run_folder, *limit)
        words = (*launched, "train.py", *given)
        found.append(Piece(stage, f"{recipe} at {stage}: its curve, speed and memory", words))
    return found


def run(piece: Piece, folder: Path) -> dict:
    """Run a piece; return {"code", "seconds", "lines": what it printed as JSON, "last": its last words}."""
    began = time.monotonic()
    log = folder / f"{piece.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            piece.words, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
    text = log.read_text(errors="replace").splitlines()
    lines = [json.loads(line) for line in text if line.startswith('{"benchmark"')]
    seconds = round(time.monotonic() - began, 1)
    return {"code": code, "seconds": seconds, "lines": lines, "last": text[-1][-300:] if text else ""}


def words_of(state: dict | None) -> str:
    if state is None:
        return "not done"
    how = "done" if state["code"] == 0 else f"ended with code {state['code']}: {state['last']}"
    return f"{how}, {state['seconds']:g} s"


def print_comparison(folder: Path) -> None:
    """Print what each stage's plan said beside what its run measured, and how far its losses are from stage 0's."""
    from pretraining.runtime.durable_files import read_rows
    from pretraining.runtime.run_folder import RunFolder

    runs = [folder / stage for stage in STAGES if RunFolder(folder / stage).last_event("end")]
    if not runs:
        return
    subprocess.run([sys.executable, "-m", "pretraining.planning", "compare", *map(str, runs)], cwd=REPOSITORY)
    curves = {
        run.name: [row["train/loss"] for row in read_rows(RunFolder(run).metrics) if "train/loss" in row]
        for run in runs
    }
    first = next(iter(curves))
    for name, losses in curves.items():
        most = max(abs(a - b) for a, b in zip(losses, curves[first], strict=False))
        print(f"{name}: losses differ from {first}'s by at most {most:.2g} nats", flush=True)
    print(f"kept: {RESULTS.relative_to(REPOSITORY)}/", flush=True)


if __name__ == "__main__":
    sys.exit(main())
