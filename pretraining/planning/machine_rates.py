"""What the doctor measured on this machine and kept, for the plans of runs on this machine.

A plan for another machine must not use these rates: they count for as many GPUs of the kind that were found here.
"""

import json
import math
import os
import socket
from pathlib import Path

from pretraining.runtime.durable_files import write_json
from pretraining.runtime.run_folder import utc_now

FOLDER_VARIABLE = "PRETRAINING_DOCTOR_FOLDER"
RATES = {
    "disk_bytes_per_second": "one process writes to the disk of the run, in bytes per second",
    "all_reduce_bytes_per_second": "each rank sends in an all-reduce of all ranks, in bytes per second",
    "product_flops": "a GPU reaches in large 16-bit products, in FLOPs per second",
}
"""Names of what may be kept, and what each says."""


def rates_file() -> Path:
    """The file of this host: in $PRETRAINING_DOCTOR_FOLDER or ~/.cache/pretraining/doctor."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(FOLDER_VARIABLE) or cache / "pretraining" / "doctor")
    return folder / f"{socket.gethostname()}.json"


def keep_rates(rates: dict[str, float], where: str, gpu: str | None, num_gpus: int) -> Path:
    """Write what was measured over what is kept already; returns the file.

    Args:
        rates: values of names in RATES.
        where: the folder, or the hosts, of the measurement.
        gpu: name of the GPUs in tables/gpus.json; None if there are none, or the table does not know them.
        num_gpus: of the run that was measured, over all its machines.

    Raises:
        OSError: the folder cannot be written.
    """
    path, machine = rates_file(), _machine(gpu, num_gpus)
    entries = {name: {"value": rates[name], "where": where, "date": utc_now()[:10]} for name in rates}
    write_json(path, {**_read(path), machine: {**kept_rates(gpu, num_gpus), **entries}})
    return path


def kept_rates(gpu: str | None, num_gpus: int) -> dict[str, dict]:
    """Of each rate that was measured on this host beside these GPUs {"value", "where", "date"}; empty if none was."""
    entries = _read(rates_file()).get(_machine(gpu, num_gpus))
    entries = entries if isinstance(entries, dict) else {}
    return {name: entries[name] for name in RATES if _is_entry(entries.get(name))}


def _machine(gpu: str | None, num_gpus: int) -> str:
    """What a plan must name to be a plan of this machine."""
    return f"{num_gpus} x {gpu}" if gpu else "processor"


def _read(path: Path) -> dict:
    """A file that is missing or damaged says nothing: it is measured again in a second."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_entry(entry) -> bool:
    if not isinstance(entry, dict) or type(entry.get("value")) not in (int, float):
        return False
    words = all(isinstance(entry.get(name), str) for name in ("where", "date"))
    return words and 1 <= entry["value"] < math.inf
