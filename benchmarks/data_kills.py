"""SIGKILLs at random moments of a preparation, then left to finish: is a byte different, is a task done twice?

    python benchmarks/data_kills.py --kills 50 --seed 1 --keep

Modules of the standard library as JSON lines, some of them copies, with filters, exact and near deduplication,
decontamination and a tokenizer trained on them, in tasks of 100 KB; the real command. First one process, two workers
and three must give identical bytes. Then kills, in one process and with two workers in turn, of the command and its
workers together, each at a moment drawn from the time that an undisturbed preparation takes; a preparation that gets
through is compared and begun anew. Last, single workers are killed, and the command must get through by itself. Stops
with an error where a byte differs or a task that had finished begins again. Prints one JSON line.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from gear import digests, library_modules, parser_of, record, tiny_recipe, write_corpus

# Found by every process of the command: small pieces, so that there are many tasks, each written down as it begins.
CUSTOMISED = """
import importlib.util, os, sys

def small_pieces(module):
    module.PIECE_BYTES, module.TASK_PIECES = 100_000, 4

def noted_tasks(module):
    run_task = module.run_task
    def noted(stage, number, progress=None):
        with open(os.environ["TASK_LOG"], "a") as file:
            file.write(f"{os.getpid()} {stage.name}/{stage.folder(number).name}\\n")
        run_task(stage, number, progress)
    module.run_task = noted

CHANGES = {"pretraining.data.corpus": small_pieces, "pretraining.data.preparation.stage": noted_tasks}

class Changed:
    def find_spec(self, name, path, target=None):
        if name not in CHANGES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), CHANGES[name](module))
        return spec

sys.meta_path.insert(0, Changed())
"""
EXECUTORS = {
    "one process": ["--executor", "inline"],
    "two workers": ["--executor", "local", "--workers", "2"],
    "three workers": ["--executor", "local", "--workers", "3"],
}


class Preparation:
    """One recipe, the folder it is prepared into, and the log of its tasks."""

    def __init__(self, folder: Path):
        self.folder, self.root, self.log = folder, folder / "data", folder / "tasks"
        (folder / "changes").mkdir()
        (folder / "changes" / "sitecustomize.py").write_text(CUSTOMISED)
        self.prepared, self.recipe = self.root / "corpus", write_recipe(folder)
        self.variables = {"PYTHONPATH": str(folder / "changes"), "TASK_LOG": str(self.log)}

    def start(self, executor: str):
        """The real command, begun."""
        from tests.gear.runs import Started

        words = ["--recipe", str(self.recipe), "--data_dir", str(self.root), "--json"]
        return Started([sys.executable, "data_prep.py", *words, *EXECUTORS[executor]], **self.variables)

    def finish(self, executor: str) -> tuple[dict, float]:
        """Run to the end: the bytes of the data set, and seconds."""
        began = time.perf_counter()
        finished = self.start(executor).finish()
        if finished.code:
            sys.exit(f"a preparation failed: {finished.output}")
        return digests(self.prepared), time.perf_counter() - began

    def finished_tasks(self) -> set[str]:
        """Those whose output is there."""
        found = (self.root / ".corpus.work").glob("*/[0-9]*-*")
        return {f"{path.parent.name}/{path.name}" for path in found}

    def begun_tasks(self) -> list[str]:
        """Those begun since the log was cleared."""
        return [line.split()[1] for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def clear(self) -> None:
        """Nothing is prepared."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.log.unlink(missing_ok=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--worker_kills", type=int, default=5, help="preparations of which one worker is killed"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="data_kills_") as folder:
        preparation = Preparation(Path(folder))
        expected, seconds = undisturbed(preparation)
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


def undisturbed(preparation: Preparation) -> tuple[dict, dict]:
    """The bytes that every number of workers gives, and the seconds of each."""
    found, seconds = {}, {}
    for executor in EXECUTORS:
        found[executor], seconds[executor] = preparation.finish(executor)
        preparation.clear()
    expected = found["one process"]
    check(len(expected) > 5 and all(each == expected for each in found.values()), "workers change bytes")
    return expected, seconds


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"FAILED: {what}")


def endure(
    preparation: Preparation, kills: int, chance: random.Random, expected: dict, seconds: dict
) -> dict:
    """Kill until `kills` have landed, then finish; where they landed."""
    landed, runs, finished = Counter(), 0, set()
    while landed.total() < kills:
        executor = chance.choice(["one process", "two workers"])
        preparation.log.unlink(missing_ok=True)
        started = preparation.start(executor)
        time.sleep(chance.uniform(0, seconds[executor]))
        through = started.process.poll() is not None
        started.kill()
        check(not finished & set(preparation.begun_tasks()), f"a finished task began again after {landed}")
        finished = preparation.finished_tasks()
        if through:
            check(digests(preparation.prepared) == expected, "bytes differ")
            runs, finished = runs + 1, set()
            preparation.clear()
        else:
            landed[stage_of(preparation, finished)] += 1
    preparation.log.unlink(missing_ok=True)
    check(preparation.finish("two workers")[0] == expected, "bytes differ")
    check(not finished & set(preparation.begun_tasks()), "a finished task began again")
    return {"kills": landed.total(), "during": dict(landed), "identical_runs": runs + 1, "tasks_redone": 0}


def stage_of(preparation: Preparation, finished: set[str]) -> str:
    """What was under way: the stage of the last task begun, or what lies around them."""
    begun = preparation.begun_tasks()
    if not begun:
        return "before the first task" if not finished else "between the tasks"
    return begun[-1].partition("/")[0] if begun[-1] not in finished else "between the tasks"


def lose_workers(
    preparation: Preparation, count: int, chance: random.Random, expected: dict, seconds: float
) -> dict:
    """Kill one worker in the middle of a task, `count` times; the command gets through by itself."""
    killed = 0
    for _ in range(count):
        preparation.clear()
        started = preparation.start("two workers")
        time.sleep(chance.uniform(0.2, 0.8) * seconds)
        while started.process.poll() is None and not kill_newest_worker(preparation):
            time.sleep(0.001)
        killed += started.process.poll() is None
        finished = started.finish()
        check(
            finished.code == 0 and digests(preparation.prepared) == expected,
            f"after a worker's death: {finished.output}",
        )
    return {"workers_killed": killed, "commands_that_got_through": count}


def kill_newest_worker(preparation: Preparation) -> bool:
    """SIGKILL the process that began the last task; False where that task is done."""
    lines = preparation.log.read_text().splitlines() if preparation.log.exists() else []
    worker, task = lines[-1].split() if lines else ("", "")
    if not lines or task in preparation.finished_tasks():
        return False
    try:
        os.kill(int(worker), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
