"""The training part of `make demo`: seconds, validation loss against the unigram entropy, tokens/s.

    python benchmarks/demo.py --keep

Prepares the data if need be, trains recipe tiny from its beginning with ZeRO-2 on two processes, and prints
one JSON line. `train_seconds` is the whole command, launcher, imports, validation and export included.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gear import REPOSITORY, parser_of, record


def main() -> None:
    options = parser_of(__doc__).parse_args()
    from pretraining.runtime.durable_files import read_rows
    from pretraining.runtime.run_folder import RunFolder

    subprocess.run([sys.executable, "data_prep.py", "--recipe", "tiny"], cwd=REPOSITORY, check=True)
    with tempfile.TemporaryDirectory(prefix="demo_") as folder:
        run = RunFolder(Path(folder) / "tiny")
        began = time.perf_counter()
        command = ["deepspeed", "--num_gpus=2", "train.py", "--recipe", "tiny", "--output_dir", str(run.path)]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=sys.stderr)
        seconds = time.perf_counter() - began
        end, rows = run.last_event("end"), read_rows(run.metrics)
        plan = json.loads(run.plan.read_text())
    logged = [row for row in rows if "train/loss" in row]
    wait = sum(row["throughput/data_wait_seconds"] for row in logged)
    values = {
        "train_seconds": round(seconds, 1),
        "parameters": plan["parameters"],
        "tokens": plan["tokens"],
        "validation_bits_per_byte": round(end["eval_bits_per_byte"], 4),
        "unigram_bits_per_byte": end["unigram_bits_per_byte"],
        "ratio": round(end["eval_bits_per_byte"] / end["unigram_bits_per_byte"], 4),
        "tokens_per_second": round(end["measured"]["tokens_per_second"]),
        "data_wait_share": round(wait / sum(row["throughput/step_seconds"] for row in logged), 5),
    }
    record("demo", values, options.keep)


if __name__ == "__main__":
    main()
