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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gear import REPOSITORY, parser_of, record

from pretraining.checkpoints.fetch import fetch_newest
from pretraining.checkpoints.folders import committed_checkpoints, damage
from pretraining.checkpoints.format import MARKER, THREADS, file_entry, write_marker
from pretraining.checkpoints.identity import Start
from pretraining.checkpoints.remote import RemoteRun
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

STEP_TOKENS = 128
"""Of a step of `resume`, so that computing it takes no time worth counting."""


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, end)
    # a process of a run that was killed may still write
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as folder:
        work = {
            "damage": run_damage,
            "verify": run_verify,
            "fetch": run_fetch,
            "resume": run_resume,
            "full_disk": run_full_disk,
        }
        values = work[options.what](options, Path(folder))
    record(f"checkpoint_{options.what}", values, options.keep)


def end(number: int, _: object) -> None:
    """End as `timeout` asks, but without the run that was started and the gigabytes that were written."""
    signal.signal(number, signal.SIG_IGN)  # a second one would cut the removal short
    raise SystemExit(128 + number)


def start(output: Path, data_dir: Path, *more: str) -> subprocess.CompletedProcess:
    """One start of the small run."""
    return subprocess.run(command(output, data_dir, *more), cwd=REPOSITORY, capture_output=True, text=True)


def command(output: Path, data_dir: Path, *more: str) -> list[str]:
    """The command of the small run; what comes later counts."""
    words = [sys.executable, "train.py", "--recipe", "tiny", "--deepspeed", "null", *choices(SMALL)]
    return [*words, "--output_dir", str(output), "--data_dir", str(data_dir), *more]


def choices(settings: dict) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def finished(output: Path, data_dir: Path, *more: str) -> None:
    """A start that must succeed."""
    ended = start(output, data_dir, *more)
    if ended.returncode:
        raise SystemExit(ended.stderr[-3000:])


def run_damage(options: argparse.Namespace, folder: Path) -> dict:
    """Counts of the damages by kind, and of those judged wrongly."""
    from tests.gear.checkpoint_damage import damaged, judged_rightly

    run, chance = RunFolder(folder / "run"), random.Random(options.seed)
    finished(run.path, options.data_dir)
    shutil.rmtree(run.export)
    folders, kinds, wrong, starts = committed_checkpoints(run), collections.Counter(), 0, 0
    began = time.perf_counter()
    for trial in range(options.trials):
        with damaged(run, chance) as (kind, harmed):
            kinds[kind] += 1
            with contextlib.redirect_stdout(io.StringIO()):  # a line for each checkpoint passed over
                wrong += not judged_rightly(run, harmed, folders)
            if options.starts and trial % max(1, options.trials // options.starts) == 0:
                wrong += not continues_from_whole(run, harmed, folder / f"start-{trial}", options.data_dir)
                starts += 1
    return {
        "trials": options.trials,
        "seed": options.seed,
        "kinds": dict(sorted(kinds.items())),
        "checkpoints": len(folders),
        "loaded_damaged_or_wrong_choice": wrong,
        "real_starts": starts,
        "seconds": round(time.perf_counter() - began, 1),
    }


def continues_from_whole(run: RunFolder, harmed: list[Path], copy: Path, data_dir: Path) -> bool:
    """Whether the run, started on a copy of the damaged folder, goes on from the newest whole one to its end."""
    shutil.copytree(run.path, copy)
    whole = [folder.name for folder in committed_checkpoints(run) if folder not in harmed]
    finished(copy, data_dir)
    rows = read_rows(RunFolder(copy).events)
    begin = next(row for row in rows if row["event"] in ("start", "resume"))
    return begin["checkpoint"] == (whole[0] if whole else None) and rows[-1]["event"] == "end"


def run_verify(options: argparse.Namespace, folder: Path) -> dict:
    """Medians over pairs of reading and verifying in turn; the first pair warms up."""
    checkpoint = big_checkpoint(folder, options.gigabytes, options.files)
    values = {
        "gigabytes": options.gigabytes,
        "files": options.files,
        "pairs": options.pairs,
        "threads": THREADS,
    }
    for state in ("warm", "cold"):
        if state == "cold" and not hasattr(os, "posix_fadvise"):
            continue
        pairs = []
        for _ in range(options.pairs + 1):
            forget(checkpoint, state)
            reading = timed(lambda: read_all(checkpoint))
            forget(checkpoint, state)
            pairs.append((reading, timed(lambda: verified(checkpoint))))
        reading, verifying = (statistics.median(each) for each in zip(*pairs[1:], strict=True))
        values |= {
            f"{state}_read_gb_per_second": round(options.gigabytes / reading, 2),
            f"{state}_verify_gb_per_second": round(options.gigabytes / verifying, 2),
            f"{state}_share_of_reading": round(statistics.median(r / v for r, v in pairs[1:]), 3),
        }
    return values


def run_fetch(options: argparse.Namespace, folder: Path) -> dict:
    """Medians over rounds of reading, copying (with fsync) and fetching in turn; the first round warms up."""
    store = folder / "store" / "run"
    store.mkdir(parents=True)
    checkpoint = big_checkpoint(store, options.gigabytes, options.files)
    rounds = []
    for number in range(options.pairs + 1):
        copy, run = folder / f"copy-{number}", RunFolder(folder / f"empty-{number}" / "run")
        times = []
        for work in (
            lambda: read_all(checkpoint),
            lambda copy=copy: copy_all(checkpoint, copy),
            lambda run=run: fetch_newest(run, RemoteRun(str(store.parent), "run"), None),
        ):
            forget(checkpoint, "cold")
            times.append(timed(work))
        rounds.append(times)
        assert damage(run.checkpoint(1)) is None
        shutil.rmtree(copy)
        shutil.rmtree(run.path)
    reading, copying, fetching = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
    return {
        **{key: getattr(options, key) for key in ("gigabytes", "files", "pairs")},
        "read_seconds": round(reading, 3),
        "copy_seconds": round(copying, 3),
        "fetch_seconds": round(fetching, 3),
        "fetch_by_read": round(statistics.median(fetch / read for read, _, fetch in rounds[1:]), 2),
        "fetch_by_copy": round(statistics.median(fetch / copied for _, copied, fetch in rounds[1:]), 2),
    }


def run_resume(options: argparse.Namespace, folder: Path) -> dict:
    """Medians over rounds of reading a checkpoint, of a start beside it, and of a start on an empty machine."""
    run, store = RunFolder(folder / "run"), folder / "store"
    words = resumed_words(options.gigabytes, store)
    there = store / "run" / "checkpoint-1"
    seconds_until(lambda: (there / MARKER).exists(), run.path, options.data_dir, *words)
    # what the run did after its first step, until it was killed
    for place in (run.path, there.parent):
        for each in place.glob("checkpoint-*"):
            if each.name != there.name:
                shutil.rmtree(each)
        metrics = place / run.metrics.name
        rows = read_rows(metrics)
        metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows if row.get("step", 0) <= 1))
    rounds = []
    for number in range(options.pairs + 1):
        here, empty = folder / f"{number}" / "here" / "run", folder / f"{number}" / "empty" / "run"
        shutil.copytree(run.path, here)
        os.sync()
        forget(there, "cold")
        times = [timed(lambda: read_all(there))]
        for output in (here, empty):
            for place in filter(Path.is_dir, (there, output / "checkpoint-1")):
                forget(place, "cold")
            resumed = RunFolder(output)
            times.append(
                seconds_until(
                    lambda resumed=resumed: any(row.get("step") == 2 for row in read_rows(resumed.metrics)),
                    output,
                    options.data_dir,
                    *words,
                )
            )
        rounds.append(times)
        shutil.rmtree(folder / f"{number}", ignore_errors=True)  # a process of the run may still write
    reading, beside, alone = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
    added = [empty - here for _, here, empty in rounds[1:]]
    return {
        "gigabytes": round(sum(path.stat().st_size for path in there.iterdir()) / 1e9, 3),
        "pairs": options.pairs,
        "read_seconds": round(reading, 3),
        "to_first_step_beside_the_checkpoint_seconds": round(beside, 2),
        "to_first_step_on_an_empty_machine_seconds": round(alone, 2),
        "added_by_the_empty_disk_seconds": round(statistics.median(added), 2),
        "added_by_read": round(
            statistics.median(a / r[0] for a, r in zip(added, rounds[1:], strict=True)), 2
        ),
    }


def resumed_words(gigabytes: float, store: Path) -> list[str]:
    """Arguments of a run with a checkpoint of this size: 12 bytes for each parameter, in layers of 7.1 million."""
    settings = {
        "model.n_layer": round(gigabytes * 1e9 / 12 / (12 * 768**2)),
        "model.n_embd": 768,
        "model.n_head": 12,
        "data.sequence_length": 64,
        "budget.tokens_per_step": STEP_TOKENS,
        "training.per_device_train_batch_size": 1,
        "budget.tokens": 100 * STEP_TOKENS,
        "training.save_steps": 1,
        "checkpoints.upload": str(store),
    }
    return choices(settings)


def seconds_until(reached: Callable[[], bool], output: Path, data_dir: Path, *words: str) -> float:
    """Seconds from the command until something is reached; then the run is killed."""
    typed = command(output, data_dir, *words, "--force")
    began = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(typed, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True)
        try:
            while not reached():
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read().decode()[-3000:])
                time.sleep(0.02)
            return time.perf_counter() - began
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the processes that it started
            process.wait()


def copy_all(checkpoint: Path, target: Path) -> None:
    target.mkdir()

    def copy(path: Path) -> None:
        shutil.copyfile(path, target / path.name)
        sync_to_disk(target / path.name)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(copy, checkpoint.iterdir()))


def big_checkpoint(folder: Path, gigabytes: float, num_files: int) -> Path:
    """A committed checkpoint of random bytes in files of one size."""
    checkpoint, chunk = folder / "checkpoint-1", os.urandom(1 << 24)
    checkpoint.mkdir()
    entries = {}
    for number in range(num_files):
        path = checkpoint / f"rank-{number:05d}-of-{num_files:05d}.safetensors"
        with path.open("wb") as file:
            for _ in range(int(gigabytes * 1e9 / num_files / len(chunk))):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        entries[path.name] = file_entry(path)
    write_marker(checkpoint, {"step": Start().step + 1, "files": entries})
    return checkpoint


def forget(checkpoint: Path, state: str) -> None:
    """Cold: drop the files from the page cache."""
    for path in checkpoint.iterdir() if state == "cold" else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read_all(checkpoint: Path) -> None:
    """Read every file into a buffer of the size that verifying uses, by as many threads."""

    def read(path: Path) -> None:
        buffer = bytearray(4 << 20)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(read, checkpoint.iterdir()))


def verified(checkpoint: Path) -> None:
    assert damage(checkpoint) is None


def run_full_disk(options: argparse.Namespace, folder: Path) -> dict:
    """What the run says and does on a disk with room for one checkpoint, and whether that one still verifies."""
    finished(folder / "measured", options.data_dir)
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
            ended = start(disk / "run", options.data_dir, *words)
            left = committed_checkpoints(RunFolder(disk / "run"))
            values[policy] = {
                "exit_code": ended.returncode,
                "said": [line for line in ended.stderr.splitlines() if "No space left" in line][:2],
                "tracebacks": ended.stderr.count("Traceback"),
                "last_step_trained": max(
                    (row["step"] for row in read_rows(RunFolder(disk / "run").metrics)), default=0
                ),
                "committed": [each.name for each in left],
                "all_whole": all(damage(each) is None for each in left),
            }
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
    return values


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("damage", "verify", "fetch", "resume", "full_disk"))
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--starts", type=int, default=5, help="how many of the trials also start the run")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--data_dir", type=Path, default=REPOSITORY / "data", help="where tiny's data are prepared"
    )
    parser.add_argument("--folder", type=Path, help="where temporary files go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
