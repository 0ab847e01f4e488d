"""How long the served page takes for many runs, and for a long one.

    python benchmarks/served_page.py --runs 1000 --rows 1000000

A server in a process of its own shows a folder with so many runs of 200 logged steps, and one run of so many rows that
has all that a GPU run logs. Measured over HTTP, with the processor time of the server: from the command to the printed
link (the first list is read by then), a list, one after a hundredth of the runs have logged a row, the first page of
the long run, and how long it takes until the page shows all of its rows, and how many of its planted spikes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from gear import REPOSITORY, parser_of, record
from monitoring import write_rows

STEPS = 200


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(
        prefix="served_", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as place:
        runs = Path(place) / "runs"
        write_runs(runs, options.runs)
        spikes = write_rows(runs / "long", options.rows)
        values = measured(runs, spikes)
    record("served_page", {"runs": options.runs, "rows": options.rows, **values}, options.keep)


def write_runs(folder: Path, count: int) -> None:
    """Write small runs that have the recipe of `tiny`; of three, one has ended."""
    recipe = json.loads((REPOSITORY / "recipes" / "tiny.json").read_text(encoding="utf-8"))
    names = ("tokens_per_second", "mfu", "goodput", "step_seconds", "data_wait_seconds", "optimizer_seconds")
    for number in range(count):
        run = folder / f"run-{number:04}"
        run.mkdir(parents=True)
        budget = {"tokens": 1000 * STEPS, "tokens_per_step": 1000}
        (run / "recipe.json").write_text(json.dumps({**recipe, "name": run.name, "budget": budget}))
        kinds = ["start", *["save"] * 20, *["end"] * (number % 3 == 0)]
        events = [
            {"time": "2026-01-01T00:00:00Z", "event": kind, "checkpoint": "checkpoint-10"} for kind in kinds
        ]
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        more = {f"throughput/{name}": 0.5 for name in names}
        rows = [
            {"step": step, "time": 1.8e9 + step, "train/loss": 9 / step, "train/tokens": 1000 * step, **more}
            for step in range(1, STEPS + 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measured(runs: Path, spikes: set[int]) -> dict:
    command = [sys.executable, "-m", "pretraining.reporting", "--serve", str(runs), "--port", "0"]
    began = time.perf_counter()
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=REPOSITORY
    )
    try:
        server.stdout.readline()
        link = server.stdout.readline().split()[-1]
        values = {"start_seconds": round(time.perf_counter() - began, 3)}

        def ask(path: str) -> bytes:
            with urllib.request.urlopen(f"{link}{path}", timeout=600) as answer:
                return answer.read()

        def timed(name: str, path: str) -> bytes:
            before, began = processor_seconds(server.pid), time.perf_counter()
            content = ask(path)
            values[f"{name}_seconds"] = round(time.perf_counter() - began, 3)
            values[f"{name}_processor_seconds"] = round(processor_seconds(server.pid) - before, 3)
            return content

        time.sleep(2)  # what was listed at the start is no longer shared
        assert len(json.loads(timed("list", "runs.json"))["rows"]) == len(list(runs.iterdir()))
        for run in sorted(runs.glob("run-*"))[::100]:
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": STEPS + 1, "time": time.time(), "train/loss": 1.0}) + "\n")
        time.sleep(2)
        timed("list_after_rows", "runs.json")
        timed("open", "show?run=long")
        run, seconds = wait_for_all(lambda: json.loads(ask("data.json?run=long"))["runs"][0])
        shown = spikes & set(run["series"]["train/loss"]["step"])
        return {**values, "whole_seconds": seconds, "spikes_shown": f"{len(shown)} of {len(spikes)}"}
    finally:
        server.terminate()
        server.wait()


def wait_for_all(ask: Callable[[], dict]) -> tuple[dict, float]:
    """Ask as a page does until all rows are shown; return what is shown then, and after how many seconds."""
    began = time.perf_counter()
    while "is_partial" in (run := ask()):
        time.sleep(1)
    return run, round(time.perf_counter() - began, 1)


def processor_seconds(process: int) -> float:
    """Return the processor time of a process so far, user and system (fields 14 and 15 of proc(5))."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
