"""What agreeing on a stop costs a step, how a hang ends, and how every launcher ends a run that is asked to stop.

    python benchmarks/stopping.py --keep

agreement: two ranks over gloo, microseconds of one `largest_over_ranks` (median of the rounds' means). hang: a rank of
the small recipe under `torchrun --max-restarts=1` gets a SIGSTOP; seconds until it is named, against the limit, and
whether the run then finishes by itself with the losses of the undisturbed one. request: for each real launcher and way
of asking, the exit code that is left, the step it stopped at, whether that step was committed, and the processes left.
"""

import os
import signal
import tempfile
import time
from itertools import product
from pathlib import Path

from gear import middle, parser_of, record

ROUNDS, CALLS = 10, 200
LIMIT_SECONDS = 20.0
WAYS = ("stop file", "SIGTERM", "Ctrl-C")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=("agreement", "hang", "request"))
    parser.add_argument("--as_rank", action="store_true", help="used by the benchmark itself")
    options = parser.parse_args()
    if options.as_rank:
        return measure_agreement()
    from tests.gear.runs import execute

    if options.only in (None, "agreement"):
        finished = execute(["forked", "2", __file__, "--as_rank"])
        values = {"microseconds": float(finished.stdout.split()[-1]), "code": finished.code}
        record("agreement", {"ranks": 2, "calls": ROUNDS * CALLS, **values}, options.keep)
    with tempfile.TemporaryDirectory(prefix="stopping_") as folder:
        if options.only in (None, "hang"):
            record("hang", {"ranks": 2, "limit_seconds": LIMIT_SECONDS, **hang(Path(folder))}, options.keep)
        if options.only in (None, "request"):
            record("request", {"ranks": 2, "stage": "zero2", **requests(Path(folder))}, options.keep)


def measure_agreement() -> None:
    import torch.distributed as dist

    from pretraining.runtime.process_group import largest_over_ranks

    dist.init_process_group("gloo")
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            largest_over_ranks(0)
        rounds.append((time.perf_counter() - began) / CALLS * 1e6)
    if dist.get_rank() == 0:
        print(middle(rounds, 1))
    dist.destroy_process_group()


def hang(folder: Path) -> dict:
    """Stop one rank of two, and leave everything else to the launcher."""
    from tests.gear.chaos import ranks_of
    from tests.gear.runs import Run, Started, Workshop

    workshop = Workshop(folder)
    reference = workshop.run("zero2")
    output = folder / "stopped"
    settings = (f"monitors.hang_minutes={LIMIT_SECONDS / 60}",)
    words = workshop.command(output, "zero2", 2, "torchrun", settings)
    words.insert(words.index("train.py"), "--max-restarts=1")
    started, run = Started(words), Run(output)
    while not run.training_rows and started.process.poll() is None:
        time.sleep(0.01)
    stopped = ranks_of(started)[1]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    while not run.dir.last_event("hang") and started.process.poll() is None:
        time.sleep(0.01)
    named_after = round(time.monotonic() - began, 1)
    finished = started.finish(600)
    assert finished.code == 0, finished.output
    return {
        "named_after_seconds": named_after,
        "stopped_process": stopped,
        "named": run.dir.last_event("hang")["who"],
        "finished_after_seconds": round(time.monotonic() - began, 1),
        "same_losses": run.losses == reference.losses,
    }


def requests(folder: Path) -> dict:
    """{launcher: {way of asking: what was left}}; `supervise` is around the deepspeed launcher."""
    from tests.gear.runs import Workshop, launcher

    workshop, found = Workshop(folder / "requests"), {}
    accelerate = ["accelerate", "launch", "--config_file", "accelerate_configs/zero2.yaml"]
    launchers = {name: launcher(name, 2) for name in ("python", "deepspeed", "torchrun")}
    launchers |= {"accelerate": accelerate, "supervise": launcher("deepspeed", 2)}
    for (name, words), way in product(launchers.items(), WAYS):
        output = folder / f"{name}-{way}"
        stage = ["--deepspeed", "null"] if name == "python" else []
        command = workshop.typed(words, [*stage, "--set", "budget.tokens=512000"], output)
        if name == "supervise":
            command = ["python", "-m", "pretraining.supervise", "--", *command]
        found.setdefault(name, {})[way] = asked(command, output, way)
    return found


def asked(command: list, output: Path, way: str) -> dict:
    """Ask a run that trains to stop, and wait for the end of everything it started."""
    from tests.gear.runs import Run, Started, committed

    started, run = Started(command), Run(output)
    while len(run.training_rows) < 3 and started.process.poll() is None:
        time.sleep(0.05)
    began = time.monotonic()
    if way == "stop file":
        run.dir.stop_file.touch()
    elif way == "SIGTERM":
        os.kill(started.process.pid, signal.SIGTERM)
    else:
        started.interrupt()
    finished = started.finish()
    seconds = time.monotonic() - began
    stopped = run.dir.last_event("stopped") or {}
    return {
        "code": finished.code,
        "reason": stopped.get("reason"),
        "committed": committed(output)[:1] == [f"checkpoint-{stopped.get('step')}"],
        "seconds": round(seconds, 1),
        "strays": len(finished.strays),
    }


if __name__ == "__main__":
    main()
