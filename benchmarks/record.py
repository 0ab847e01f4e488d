"""One JSON line a measurement, with device, versions and commit; `--keep` adds it to benchmarks/results/."""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

RESULTS = REPOSITORY / "benchmarks" / "results"


def parser_of(description: str) -> argparse.ArgumentParser:
    """An argument parser with the module's docstring as help, and `--keep`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--keep", action="store_true", help="append the line to benchmarks/results/<device>.jsonl"
    )
    return parser


def record(benchmark: str, values: dict, keep: bool) -> None:
    """Print {"benchmark", values..., "device", "when", "environment"} as one line."""
    from pretraining.runtime.durable_files import append_row
    from pretraining.runtime.run_folder import describe_environment

    device = device_name()
    environment = describe_environment(device, int(os.environ.get("WORLD_SIZE", "1")))
    del environment["world_size"]
    row = {"benchmark": benchmark, **values, "when": time.strftime("%Y-%m-%d"), "environment": environment}
    print(json.dumps(row), flush=True)
    if keep:
        append_row(RESULTS / f"{device.lower().replace(' ', '-')}.jsonl", row)


def device_name() -> str:
    """The GPU's name, or `CPU <architecture> <cores> cores`."""
    gpus = Path("/proc/driver/nvidia/gpus")
    if gpus.exists():
        import torch

        return torch.cuda.get_device_name()
    return f"CPU {platform.machine()} {len(os.sched_getaffinity(0))} cores"
