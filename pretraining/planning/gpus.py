"""The GPUs that plans know: peaks, memory, links, watts, prices; and what was measured on this machine."""

import argparse
import json
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from pretraining.errors import UserError
from pretraining.outside.files import TEXT, object_of
from pretraining.outside.schema import fits
from pretraining.planning.constants import table
from pretraining.planning.quantities import dollars, num_bytes, three_digits
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.run_folder import utc_now
from pretraining.runtime.table import Column, facts, write_table

FILE = "pretraining/planning/tables/gpus.json"
FOLDER_VARIABLE = "PRETRAINING_DOCTOR_FOLDER"
RATES = {
    "disk_bytes_per_second": "one process writes to the disk of the run, in bytes per second",
    "all_reduce_bytes_per_second": "each rank sends in an all-reduce of all ranks, in bytes per second",
    "product_flops": "a GPU reaches in large 16-bit products, in FLOPs per second",
}
"""Rates that may be kept: name -> meaning."""
# plans print all three; below 1 a second, and not finite, is no measurement
RATE = object_of({"value": {"type": "number", "minimum": 1, "maximum": 1e300}, "where": TEXT, "date": TEXT})
TABLE_NOTE = """
Peaks are dense TFLOPS; links are per GPU and direction. From pretraining/planning/tables/, which you may edit."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One entry of tables/gpus.json; all rates are per GPU and, for links, one direction."""

    name: str
    aliases: Sequence[str] = ()
    architecture: str = ""
    dense_peak_flops: dict[str, float]
    """FLOPs per second by precision (fp32, tf32, bf16, fp16, fp8), without sparsity."""
    memory_bytes: int
    memory_bandwidth_bytes_per_second: int
    link: str = "link"
    """Name of the link between the GPUs of a node."""
    link_bytes_per_second: int
    pcie_bytes_per_second: int
    network_bits_per_second: int
    watts: int
    gpus_per_node: int
    source: str = "no source given"
    assumed: Sequence[str] = ()
    """Fields that depend on the machine around the GPU; set them to the values of yours."""

    @property
    def network_bytes_per_second(self) -> float:
        # networks are sold in bits
        return self.network_bits_per_second / 8

    def peak_flops(self, precision: str) -> float:
        """Return dense peak in FLOPs per second; `UserError` if the GPU has no such precision."""
        if precision not in self.dense_peak_flops:
            known = ", ".join(self.dense_peak_flops)
            remedy = "choose another GPU, or another precision (training.bf16, training.fp16, training.tf32)"
            raise UserError(f"{self.name} has no {precision} peak in {FILE}; it has {known}; {remedy}")
        return self.dense_peak_flops[precision]

    @property
    def training_precision(self) -> str:
        return "bf16" if "bf16" in self.dense_peak_flops else "fp16"


@cache
def all_gpus() -> dict[str, Gpu]:
    """Return every GPU of the table, by name."""
    gpus, names = {}, {field.name for field in fields(Gpu)}
    for name, entry in table("gpus")["gpus"].items():
        # the table is in TFLOPS, as data sheets are
        peaks = {key: 1e12 * peak for key, peak in entry["dense_peak_tflops"].items()}
        values = {key: value for key, value in entry.items() if key in names}
        gpus[name] = Gpu(**{**values, "name": name, "dense_peak_flops": peaks})
    return gpus


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name or alias, or as torch reports it; `UserError` with the nearest if there is none."""
    # one spelling for all names, so that case, spaces and hyphens do not matter
    names = {_plain(word): gpu for gpu in all_gpus().values() for word in (gpu.name, *gpu.aliases)}
    if _plain(name) in names:
        return names[_plain(name)]
    # those of the same family first: "H100 80GB"; aliases of one GPU count once
    family = [word for word in names if word.startswith(_plain(name.split()[0]))] if name.split() else []
    close = family or get_close_matches(_plain(name), names, n=4, cutoff=0.5)
    near = {names[word].name for word in close}
    hint = f"the nearest are {', '.join(sorted(near))}" if near else f"known are {', '.join(all_gpus())}"
    raise UserError(f"--gpu {name}: no such GPU; {hint} (or add yours to {FILE})")


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU that torch or nvidia-smi calls by this name; None if the table does not have it."""
    try:
        return find_gpu(name)
    except UserError:
        return None


def prices_of(gpu: Gpu) -> list[dict]:
    entries = [entry for entry in table("prices")["prices"] if entry["gpu"] == gpu.name]
    return sorted(entries, key=lambda entry: entry["dollars_per_gpu_hour"])


def cuda_needs(version: str | None) -> dict | None:
    """Return what builds of torch for this version of CUDA need (tables/cuda.json); None if there is no entry."""
    return table("cuda").get((version or "").partition(".")[0])


def _plain(name: str) -> str:
    # torch says "NVIDIA H100 80GB HBM3", people write h100-80gb
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _rates_file() -> Path:
    """Return the file of this host, in $PRETRAINING_DOCTOR_FOLDER or ~/.cache/pretraining/doctor."""
    caches = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME') or Path.home()}/.cache"
    folder = os.environ.get(FOLDER_VARIABLE) or f"{caches}/pretraining/doctor"
    # a home on a network disk is shared between hosts, so each host has a file of its own
    return Path(folder, f"{socket.gethostname()}.json")


def keep_rates(rates: dict[str, float], where: str, gpu: str | None, num_gpus: int) -> Path:
    """Add what was measured to the kept rates, over older values; return the file. `OSError` if it cannot be written.

    Args:
        rates: values of names in RATES.
        where: folder or hosts of the measurement.
        gpu: name of the GPUs in tables/gpus.json; None if there are none, or the table does not know them.
        num_gpus: GPUs of the measured run, over all its machines.
    """
    path, machine = _rates_file(), _machine(gpu, num_gpus)
    # rates that only an earlier examination measured stay
    entries = {name: {"value": rates[name], "where": where, "date": utc_now()[:10]} for name in rates}
    write_json(path, {**_read_rates(path), machine: {**kept_rates(gpu, num_gpus), **entries}})
    return path


def kept_rates(gpu: str | None, num_gpus: int) -> dict[str, dict]:
    """Return {"value", "where", "date"} of each rate that was measured on this host beside these GPUs."""
    entries = _read_rates(_rates_file()).get(_machine(gpu, num_gpus))
    # the file may be damaged or edited: whatever is no rate is left out
    entries = entries if isinstance(entries, dict) else {}
    return {name: entries[name] for name in RATES if name in entries and fits(entries[name], RATE)}


def _machine(gpu: str | None, num_gpus: int) -> str:
    """Return the key of the measured machine; a plan must name the same GPUs to use its rates."""
    return f"{num_gpus} x {gpu}" if gpu else "processor"


def _read_rates(path: Path) -> dict:
    """Return the content of the file; empty if it is missing or damaged: measuring again takes a second."""
    try:
        state = path.stat()
        return _rates_in(path, state.st_ino, state.st_mtime_ns, state.st_size)
    except (OSError, ValueError):
        return {}


@cache  # of one state of the file, which a search asks for thousands of times
def _rates_in(path: Path, inode: int, changed_ns: int, size: int) -> dict:
    rates = json.loads(path.read_text(encoding="utf-8"))
    return rates if isinstance(rates, dict) else {}


class GpusVerb:
    """GPUs that plans know: dense peaks, memory, links, watts, prices."""

    EXAMPLES = """  python -m pretraining.planning gpus
  python -m pretraining.planning gpus --gpu "NVIDIA H100 80GB HBM3"
  python -m pretraining.planning gpus --json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gpu", metavar="NAME", help="one GPU in full, by any of its names")

    def answer(self, options: argparse.Namespace) -> dict:
        chosen = all_gpus().values() if options.gpu is None else [find_gpu(options.gpu)]
        return {"gpus": [{**vars(gpu), "prices": prices_of(gpu)} for gpu in chosen]}

    def as_text(self, answer: dict) -> str:
        if len(answer["gpus"]) != 1:
            return write_table(COLUMNS, answer["gpus"]) + "\n" + TABLE_NOTE
        (gpu,) = answer["gpus"]
        peaks = [f"{key} {three_digits(peak / 1e12)}" for key, peak in gpu["dense_peak_flops"].items()]
        memory, rate = gpu["memory_bytes"], gpu["memory_bandwidth_bytes_per_second"]
        in_node = f"{gpu['gpus_per_node']} by {gpu['link']}, {num_bytes(gpu['link_bytes_per_second'])}/s"
        rows = [
            ("GPU", f"{gpu['name']} ({gpu['architecture']}); also {', '.join(gpu['aliases'])}"),
            ("dense peak, TFLOPS", ", ".join(peaks)),
            ("memory", f"{num_bytes(memory)} at {num_bytes(rate)}/s"),
            ("in a node", in_node),
            ("to the host", f"{num_bytes(gpu['pcie_bytes_per_second'])}/s"),
            ("between nodes", f"{num_bytes(gpu['network_bits_per_second'] / 8)}/s"),
            ("power", f"{gpu['watts']} W"),
            ("source", gpu["source"]),
            ("assumed of its machine", ", ".join(gpu["assumed"]) or "nothing"),
        ]
        for entry in gpu["prices"]:
            where = f"{entry['provider']}, {entry['place']}, {entry['date']} ({entry['source']})"
            rows.append(("price", f"{dollars(entry['dollars_per_gpu_hour'])} an hour: {where}"))
        return facts(rows)


def _peak_column(name: str) -> Column:
    return Column(name, lambda gpu: gpu["dense_peak_flops"].get(name), lambda peak: three_digits(peak / 1e12))


COLUMNS = (
    Column("GPU", "name"),
    *map(_peak_column, ("bf16", "fp16", "fp8")),
    Column("memory", "memory_bytes", num_bytes),
    Column("bandwidth/s", "memory_bandwidth_bytes_per_second", num_bytes),
    Column("link", "link"),
    Column("per s", "link_bytes_per_second", num_bytes),
    Column("network/s", lambda gpu: gpu["network_bits_per_second"] / 8, num_bytes),
    Column("W", "watts"),
    # the cheapest price: they are sorted
    Column("$/hour", lambda gpu: next((p["dollars_per_gpu_hour"] for p in gpu["prices"]), None), ".2f"),
)
