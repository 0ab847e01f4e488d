"""Checkpoints under damage, and the speed of verifying them. One JSON line each.

    python benchmarks/checkpoint.py damage --trials 500 --seed 1
    python benchmarks/checkpoint.py verify --gigabytes 4 --pairs 7
    python benchmarks/checkpoint.py fetch --gigabytes 1.5 --pairs 5
    python benchmarks/checkpoint.py resume --gigabytes 1.5 --pairs 5
    python benchmarks/checkpoint.py full_disk

damage: a small run leaves four committed checkpoints; each trial flips a bit, cuts, deletes or swaps files of them at
random, and asks what the next start would load: the newest checkpoint that is whole, or nothing. Every so many trials
the run itself is started on the damaged folder. verify: `verify` against plain reading of the same files by as many
threads, warm, and cold (page cache dropped for these files) where the system lets us. fetch: an empty machine gets a
checkpoint from a store that is a folder, verified and on its disk, against plain reading and copying of the same files,
cold. resume: seconds from the command until the first resumed step is logged, with the checkpoint on the machine's
disk and with nothing there but the store, against plain reading of the checkpoint, all cold. full_disk: the run on a
file system of its own that holds one checkpoint, under both policies (needs to be root).
"""

import argparse
import collections
import contextlib
import io
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from gear import REPOSITORY, choices, middle, parser_of, record, run_command, timed

from pretraining.checkpoints.choosing import choose_checkpoint
from pretraining.checkpoints.folders import damage
from pretraining.checkpoints.format import MARKER, THREADS, Start, file_entry, write_marker
from pretraining.runtime.durable_files import read_rows, sync_to_disk
from pretraining.runtime.run_folder import RunFolder

SMALL = {
    "model.n_layer": 1,
    "model.n_embd": 32,
    "budget.tokens": 2048 * 8,
    "training.save_steps": 2,
    "training.logging_steps": 1,
    "training.eval_strategy": "no",
    "checkpoints.keep_last": None,
    "evaluation.max_validation_tokens": 4096,
}

SIZES = ("gigabytes", "files", "pairs")
STEP_TOKENS = 128
"""Of a step of `resume`, so that computing it takes no time worth counting."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=list(MEASURED))
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--starts", type=int, default=5, help="how many of the trials also start the run")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--data_dir", type=Path, default=REPOSITORY / "data", help="of tiny's data")
    parser.add_argument("--folder", type=Path, help="where temporary files go")
    options = parser.parse_args()

    def end(number: int, _: object) -> None:
        """End as `timeout` asks, but without the run that was started and the gigabytes that were written."""
        signal.signal(number, signal.SIG_IGN)  # a second one would cut the removal short
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    # a process of a run that was killed may still write
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as folder:
        values = MEASURED[options.what](options, Path(folder))
    record(f"checkpoint_{options.what}", values, options.keep)


def command(output: Path, data_dir: Path, *more: str) -> list[str]:
    """Return the command of the small run; what comes later counts."""
    words = [sys.executable, "train.py", "--recipe", "features/gpt2", "--deepspeed", "null", *choices(SMALL)]
    return [*words, "--output_dir", str(output), "--data_dir", str(data_dir), *more]


def run_damage(options: argparse.Namespace, folder: Path) -> dict:
    """Counts of the damages by kind, and of those judged wrongly."""
    from tests.gear.checkpoint_damage import damaged, judged_rightly

    run, chance = RunFolder(folder / "run"), random.Random(options.seed)
    run_command(*command(run.path, options.data_dir))
    shutil.rmtree(run.export)
    folders, kinds, wrong, starts = run.committed(), collections.Counter(), 0, 0
    began = time.perf_counter()
    for trial in range(options.trials):
        with damaged(run, chance) as (kind, harmed):
            kinds[kind] += 1
            with contextlib.redirect_stdout(io.StringIO()):  # a line for each checkpoint passed over
                wrong += not judged_rightly(run, harmed, folders)
            if not options.starts or trial % max(1, options.trials // options.starts):
                continue
            # the run, started on a copy of the damaged folder, goes on from the newest whole one to its end
            starts, copy = starts + 1, RunFolder(folder / f"start-{trial}")
            shutil.copytree(run.path, copy.path)
            run_command(*command(copy.path, options.data_dir))
            rows = read_rows(copy.events)
            begin = next(row for row in rows if row["event"] in ("start", "resume"))
            whole = next((each.name for each in folders if each not in harmed), None)
            wrong += begin["checkpoint"] != whole or rows[-1]["event"] != "end"
    return {
        "trials": options.trials,
        "seed": options.seed,
        "kinds": dict(sorted(kinds.items())),
        "checkpoints": len(folders),
        "loaded_damaged_or_wrong_choice": wrong,
        "real_starts": starts,
        "seconds": round(time.perf_counter() - began, 1),
    }


def run_verify(options: argparse.Namespace, folder: Path) -> dict:
    """Return medians over pairs of reading and verifying in turn; the first pair warms up."""
    checkpoint = big_checkpoint(folder, options)
    assert damage(checkpoint) is None
    values = {key: getattr(options, key) for key in SIZES} | {"threads": THREADS}
    for state in ("warm", "cold"):
        pairs = []
        for _ in range(options.pairs + 1):
            seconds_of = partial(cold, checkpoint) if state == "cold" else timed
            read = seconds_of(lambda: each_file(checkpoint, read_whole))
            pairs.append((read, seconds_of(lambda: damage(checkpoint))))
        reading, verifying = (statistics.median(each) for each in zip(*pairs[1:], strict=True))
        values |= {
            f"{state}_read_gb_per_second": round(options.gigabytes / reading, 2),
            f"{state}_verify_gb_per_second": round(options.gigabytes / verifying, 2),
            f"{state}_share_of_reading": middle((r / v for r, v in pairs[1:]), 3),
        }
    return values


def run_fetch(options: argparse.Namespace, folder: Path) -> dict:
    """Medians over rounds of reading, copying (with fsync) and fetching in turn; the first round warms up."""
    store = folder / "store" / "run"
    store.mkdir(parents=True)
    checkpoint = big_checkpoint(store, options)
    rounds = []
    for number in range(options.pairs + 1):
        copy, run = folder / f"copy-{number}", RunFolder(folder / f"empty-{number}" / "run")
        copy.mkdir()
        read = cold(checkpoint, lambda: each_file(checkpoint, read_whole))

        def copy_durably(path: Path, copy: Path = copy) -> None:
            sync_to_disk(shutil.copyfile(path, copy / path.name))

        copied = cold(checkpoint, lambda copied=copy_durably: each_file(checkpoint, copied))
        fetched = cold(checkpoint, lambda run=run: choose_checkpoint(run, "auto", str(store.parent)))
        rounds.append((read, copied, fetched))
        assert damage(run.checkpoint(1)) is None
        shutil.rmtree(copy)
        shutil.rmtree(run.path)
    rounds = rounds[1:]
    names = ("read_seconds", "copy_seconds", "fetch_seconds")
    return {
        **{key: getattr(options, key) for key in SIZES},
        **{name: middle(each, 3) for name, each in zip(names, zip(*rounds, strict=True), strict=True)},
        "fetch_by_read": middle((fetch / read for read, _, fetch in rounds), 2),
        "fetch_by_copy": middle((fetch / copied for _, copied, fetch in rounds), 2),
    }


def run_resume(options: argparse.Namespace, folder: Path) -> dict:
    """Return medians over rounds of reading a checkpoint, of a start beside it, and of one on an empty machine."""
    store, started = RunFolder(folder / "store" / "run"), RunFolder(folder / "run")
    settings = {
        # 12 bytes for each parameter, in layers of 7.1 million
        "model.n_layer": round(options.gigabytes * 1e9 / 12 / (12 * 768**2)),
        "model.n_embd": 768,
        "model.n_head": 12,
        "data.sequence_length": 64,
        "budget.tokens_per_step": STEP_TOKENS,
        "training.per_device_train_batch_size": 1,
        "budget.tokens": 100 * STEP_TOKENS,
        "training.save_steps": 1,
        "checkpoints.upload": str(store.path.parent),
    }
    words = (options.data_dir, *choices(settings), "--force")
    there = store.checkpoint(1)
    seconds_until(command(started.path, *words), lambda: (there / MARKER).exists())
    # what the run did after its first step, until it was killed
    for place in (started, store):
        for each in place.path.glob("checkpoint-*"):
            if each.name != there.name:
                shutil.rmtree(each)
        rows = read_rows(place.metrics)
        place.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows if row.get("step", 0) <= 1))
    rounds = []
    for number in range(options.pairs + 1):
        here, empty = (RunFolder(folder / str(number) / name / "run") for name in ("here", "empty"))
        shutil.copytree(started.path, here.path)
        os.sync()
        times = [cold(there, lambda: each_file(there, read_whole))]
        for run in (here, empty):
            for place in filter(Path.is_dir, (there, run.checkpoint(1))):
                forget(place)
            times.append(seconds_until(command(run.path, *words), lambda run=run: 2 in steps_of(run)))
        rounds.append(times)
        shutil.rmtree(folder / str(number), ignore_errors=True)  # a process of the run may still write
    rounds = rounds[1:]
    reading, beside, alone = zip(*rounds, strict=True)
    added = [empty - here for _, here, empty in rounds]
    return {
        "gigabytes": round(sum(path.stat().st_size for path in there.iterdir()) / 1e9, 3),
        "pairs": options.pairs,
        "read_seconds": middle(reading, 3),
        "to_first_step_beside_the_checkpoint_seconds": middle(beside, 2),
        "to_first_step_on_an_empty_machine_seconds": middle(alone, 2),
        "added_by_the_empty_disk_seconds": middle(added, 2),
        "added_by_read": middle((a / read for a, read in zip(added, reading, strict=True)), 2),
    }


def steps_of(run: RunFolder) -> list[int]:
    return [row["step"] for row in read_rows(run.metrics)]


def seconds_until(words: list[str], reached) -> float:
    """Run a command until something is reached; then kill it and the processes that it started. Its seconds."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True)
        try:
            while not reached():
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read().decode()[-3000:])
                time.sleep(0.02)
            return time.perf_counter() - began
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def big_checkpoint(folder: Path, options: argparse.Namespace) -> Path:
    """A committed checkpoint of random bytes in files of one size."""
    checkpoint, chunk = folder / "checkpoint-1", os.urandom(1 << 24)
    checkpoint.mkdir()
    entries = {}
    for number in range(options.files):
        path = checkpoint / f"rank-{number:05d}-of-{options.files:05d}.safetensors"
        with path.open("wb") as file:
            for _ in range(int(options.gigabytes * 1e9 / options.files / len(chunk))):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        entries[path.name] = file_entry(path)
    write_marker(checkpoint, {"step": Start().step + 1, "files": entries})
    return checkpoint


def forget(checkpoint: Path) -> None:
    """Drop the files from the page cache."""
    for path in checkpoint.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold(checkpoint: Path, work) -> float:
    """Return the seconds of a work that finds nothing of the checkpoint in the page cache."""
    forget(checkpoint)
    return timed(work)


def each_file(checkpoint: Path, work) -> None:
    """Do a work on every file, by as many threads as verifying uses."""
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, checkpoint.iterdir()))


def read_whole(path: Path) -> None:
    """Read a file into a buffer of the size that verifying uses."""
    buffer = bytearray(4 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def run_full_disk(options: argparse.Namespace, folder: Path) -> dict:
    """What the run says and does on a disk with room for one checkpoint, and whether that one still verifies."""
    run_command(*command(folder / "measured", options.data_dir))
    one = sum(path.stat().st_size for path in (folder / "measured" / "checkpoint-8").rglob("*"))
    values = {"checkpoint_bytes": one}
    for policy in ("stop", "continue"):
        disk = folder / policy
        disk.mkdir()
        size = f"size={int(one * 1.7 + (1 << 18))}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", disk], check=True)
        try:
            # --force: the plan would refuse this disk before the first step.
            words = ["--force", "--set", f"checkpoints.on_full_disk={policy}"]
            typed = command(disk / "run", options.data_dir, *words)
            ended = subprocess.run(typed, cwd=REPOSITORY, capture_output=True, text=True)
            left = RunFolder(disk / "run").committed()
            values[policy] = {
                "exit_code": ended.returncode,
                "said": [line for line in ended.stderr.splitlines() if "No space left" in line][:2],
                "tracebacks": ended.stderr.count("Traceback"),
                "last_step_trained": max(steps_of(RunFolder(disk / "run")), default=0),
                "committed": [each.name for each in left],
                "all_whole": all(damage(each) is None for each in left),
            }
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
    return values


MEASURED = {
    "damage": run_damage,
    "verify": run_verify,
    "fetch": run_fetch,
    "resume": run_resume,
    "full_disk": run_full_disk,
}

if __name__ == "__main__":
    main()
