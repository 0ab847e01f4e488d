"""Seconds and memory of `train.py --rehearse` of 30b on 1,024 ranks of 128 nodes, whose data is elsewhere.

python benchmarks/rehearsal.py --keep
"""

import json
import sys
import tempfile

from gear import parser_of, record, run_command

RECIPE = ("--recipe", "30b", "--set", "training.per_device_train_batch_size=2", "--gpu", "H100")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--world_size", type=int, default=1024, metavar="N")
    parser.add_argument("--nodes", type=int, default=128, metavar="N")
    options = parser.parse_args()
    size = ("--world_size", str(options.world_size), "--nodes", str(options.nodes))
    with tempfile.TemporaryDirectory() as folder:
        words = [*RECIPE, "--rehearse", "elsewhere", "--json", *size, "--output_dir", f"{folder}/run"]
        ended = run_command(sys.executable, "train.py", *words)
    answer = json.loads(ended.stdout)
    values = {
        "recipe": "30b",
        "world_size": options.world_size,
        "nodes": options.nodes,
        "seconds": round(ended.seconds, 1),
        "processor_seconds": round(ended.cpu_seconds, 1),
        # two ranks at a time, and the process that has started them
        "peak_bytes": 3 * max(each["peak_host_bytes"] for each in answer["ranks"]),
        "rank_seconds": {
            each["rank"]: round(sum(sum(start["seconds"].values()) for start in each["starts"]), 1)
            for each in answer["ranks"]
        },
    }
    record("rehearsal", values, options.keep)


if __name__ == "__main__":
    main()
