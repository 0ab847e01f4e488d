"""SIGKILLs at random moments of a preparation, then left to finish: is a byte different, is a task done twice?

    python benchmarks/data_kills.py --kills 50 --seed 1 --keep

Modules of the standard library as JSON lines, some of them copies, with filters, exact and near deduplication,
decontamination and a tokenizer trained on them, in tasks of 100 KB; the real command. First one process, two workers
and three must give identical bytes. Then kills, in one process and with two workers in turn, of the command and its
workers together, each at a moment drawn from the time that an undisturbed preparation takes; a preparation that gets
through is compared and begun anew. Last, single workers are killed, and the command must get through by itself. Stops
with an error where a byte differs or a finished task is written again. Prints one JSON line.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from gear import children, digests, library_modules, parser_of, record, tiny_recipe, write_corpus

# Small pieces, so that there are many tasks; everything else is the command itself.
PROGRAM = """
import runpy, sys
from pretraining.data import corpus
corpus.PIECE_BYTES, corpus.TASK_PIECES = 100_000, 4
sys.argv = ["data_prep.py", *sys.argv[1:]]
runpy.run_path("data_prep.py", run_name="__main__")
"""
EXECUTORS = {
    "one process": ["--executor", "inline"],
    "two workers": ["--executor", "local", "--workers", "2"],
    "three workers": ["--executor", "local", "--workers", "3"],
}


class Preparation:
    """One recipe, and the folder it is prepared into."""

    def __init__(self, folder: Path):
        self.root, self.recipe = folder / "data", write_recipe(folder)
        self.prepared = self.root / "corpus"

    def start(self, executor: str):
        """The command, begun."""
        from tests.gear.runs import Started

        words = ["--recipe", self.recipe, "--data_dir", self.root, "--json", *EXECUTORS[executor]]
        return Started([sys.executable, "-c", PROGRAM, *words])

    def finish(self, executor: str) -> tuple[dict, float]:
        """Run to the end: the bytes of the data set, and seconds."""
        began = time.perf_counter()
        finished = self.start(executor).finish()
        check(finished.code == 0, finished.output)
        return digests(self.prepared), time.perf_counter() - began

    def tasks(self) -> dict[str, int]:
        """{finished task: when it was written, in ns}, the newest last."""
        found = (self.root / ".corpus.work").glob("*/[0-9]*-*")
        written = {f"{path.parent.name}/{path.name}": path.stat().st_mtime_ns for path in found}
        return dict(sorted(written.items(), key=lambda task: task[1]))

    def clear(self) -> None:
        """Nothing is prepared."""
        shutil.rmtree(self.root, ignore_errors=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--worker_kills", type=int, default=5, help="preparations that lose one worker")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="data_kills_") as folder:
        preparation, found, seconds = Preparation(Path(folder)), {}, {}
        for executor in EXECUTORS:
            found[executor], seconds[executor] = preparation.finish(executor)
            preparation.clear()
        expected = found["one process"]
        check(len(expected) > 5 and all(each == expected for each in found.values()), "workers change bytes")
        chance = random.Random(options.seed)
        killed = endure(preparation, options.kills, chance, expected, seconds)
        deaths = lose_workers(preparation, options.worker_kills, chance, expected, seconds["two workers"])
    values = {"seed": options.seed, "worker_counts_with_identical_bytes": [1, 2, 3], **killed, **deaths}
    record("data_kills", {**values, "seconds": round(time.monotonic() - began)}, options.keep)


def write_recipe(folder: Path) -> Path:
    """A corpus of about 3 MB, an evaluation set, and recipe `tiny` on them."""
    texts = [text for text in library_modules() if 2000 < len(text) < 60000][:160]
    texts += [text.replace("self", "this", 2) for text in texts[::5]] + texts[::7]
    write_corpus(folder / "texts", sum(len(text.encode()) for text in texts), len(texts) // 8, texts)
    (folder / "sets").mkdir()
    (folder / "sets" / "quiz.txt").write_text(texts[5][200:500])
    data = {
        "sources": [{"path": str(folder / "texts")}],
        "tokenizer": {"train_vocab_size": 512},
        "validation_share": 0.1,
        "filters": [{"rule": "length", "min_words": 5}, {"rule": "pii"}],
        "dedup": {"exact": True, "minhash": {}},
        "decontaminate": {"folder": str(folder / "sets")},
    }
    return tiny_recipe(folder, data)


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"FAILED: {what}")


def endure(
    preparation: Preparation, kills: int, chance: random.Random, expected: dict, seconds: dict
) -> dict:
    """Kill until `kills` have landed, then finish; behind a task of which stage they landed."""
    landed, runs, finished = Counter(), 0, {}
    while landed.total() < kills:
        executor = chance.choice(["one process", "two workers"])
        started = preparation.start(executor)
        time.sleep(chance.uniform(0, seconds[executor]))
        through = started.process.poll() is not None
        started.kill()
        now = preparation.tasks()
        again = any(now.get(task, when) != when for task, when in finished.items())
        check(not again, "a finished task ran again")
        if preparation.prepared.exists():
            check(digests(preparation.prepared) == expected, "bytes differ")
        else:
            check(finished.keys() <= now.keys(), f"a finished task is gone after {landed}")
        if not through:
            landed[list(now)[-1].partition("/")[0] if now else "no task"] += 1
        finished = now
        if through:
            runs, finished = runs + 1, {}
            preparation.clear()
    check(preparation.finish("two workers")[0] == expected, "bytes differ")
    return {"kills": landed.total(), "behind": dict(landed), "identical_runs": runs + 1, "tasks_redone": 0}


def lose_workers(
    preparation: Preparation, count: int, chance: random.Random, expected: dict, seconds: float
) -> dict:
    """Kill one worker, `count` times; the command gets through by itself."""
    killed = 0
    for _ in range(count):
        preparation.clear()
        started = preparation.start("two workers")
        time.sleep(chance.uniform(0.2, 0.8) * seconds)
        # the command's child forks them
        workers = [worker for child in children(started.process.pid) for worker in children(child)]
        for worker in workers[-1:]:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
                killed += 1
        finished = started.finish()
        check(finished.code == 0 and digests(preparation.prepared) == expected, finished.output)
    return {"workers_killed": killed, "commands_that_got_through": count}


if __name__ == "__main__":
    main()
