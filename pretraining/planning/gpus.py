"""The GPUs that plans know: peaks, memory, links, watts, prices."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from pretraining.errors import UserError
from pretraining.planning.constants import table

FILE = "pretraining/planning/tables/gpus.json"
NUMBERS = (
    "memory_bytes",
    "memory_bandwidth_bytes_per_second",
    "link_bytes_per_second",
    "pcie_bytes_per_second",
    "network_bits_per_second",
    "watts",
    "gpus_per_node",
)


@dataclass(frozen=True)
class Gpu:
    """One entry of tables/gpus.json; all rates are per GPU and, for links, one direction."""

    name: str
    aliases: tuple[str, ...]
    architecture: str
    dense_peak_flops: dict[str, float]
    """FLOPs per second by precision (fp32, tf32, bf16, fp16, fp8), without sparsity."""
    memory_bytes: int
    memory_bandwidth_bytes_per_second: int
    link: str
    """What joins the GPUs of a node."""
    link_bytes_per_second: int
    pcie_bytes_per_second: int
    network_bits_per_second: int
    watts: int
    gpus_per_node: int
    source: str
    assumed: tuple[str, ...]
    """Fields that belong to the machine around it, and are to be set to yours."""

    @property
    def network_bytes_per_second(self) -> float:
        """Between nodes, one direction."""
        return self.network_bits_per_second / 8

    def peak_flops(self, precision: str) -> float:
        """Dense peak in FLOPs per second.

        Raises:
            UserError: the GPU has no such precision.
        """
        if precision not in self.dense_peak_flops:
            known = ", ".join(self.dense_peak_flops)
            raise UserError(
                f"{self.name} has no {precision} peak in {FILE}; it has {known}; choose another GPU, or another "
                "precision (training.bf16, training.fp16, training.tf32)"
            )
        return self.dense_peak_flops[precision]

    @property
    def training_precision(self) -> str:
        """bf16 where the GPU has it, else fp16."""
        return "bf16" if "bf16" in self.dense_peak_flops else "fp16"


@cache
def all_gpus() -> dict[str, Gpu]:
    """Every GPU of the table, by name.

    Raises:
        UserError: an entry lacks a key or holds a number that is not positive.
    """
    return {name: _gpu(name, entry) for name, entry in table("gpus")["gpus"].items()}


def find_gpu(name: str) -> Gpu:
    """The GPU of this name or alias; the names that torch reports are among the aliases.

    Raises:
        UserError: no such GPU; the nearest names.
    """
    names = {_plain(word): gpu for gpu in all_gpus().values() for word in (gpu.name, *gpu.aliases)}
    if _plain(name) in names:
        return names[_plain(name)]
    near = {names[word].name for word in get_close_matches(_plain(name), names, n=4, cutoff=0.5)}
    hint = f"the nearest are {', '.join(sorted(near))}" if near else f"known are {', '.join(all_gpus())}"
    raise UserError(f"--gpu {name}: no such GPU; {hint} (or add yours to {FILE})")


def known_gpu(name: str) -> Gpu | None:
    """The GPU that torch or nvidia-smi calls by this name; None if the table does not have it."""
    try:
        return find_gpu(name)
    except UserError:
        return None


def prices_of(gpu: Gpu) -> list[dict]:
    """Entries of tables/prices.json for this GPU, cheapest first."""
    found = [entry for entry in table("prices")["prices"] if entry["gpu"] == gpu.name]
    return sorted(found, key=lambda entry: entry["dollars_per_gpu_hour"])


def cuda_needs(version: str | None) -> dict | None:
    """What a build of torch for this version of CUDA needs: the entry of its major version in tables/cuda.json.

    None if the build has no CUDA, or the table does not know the version.
    """
    return table("cuda").get((version or "").partition(".")[0])


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _gpu(name: str, entry: dict) -> Gpu:
    return Gpu(
        name=name,
        aliases=tuple(entry.get("aliases", ())),
        architecture=entry.get("architecture", ""),
        dense_peak_flops={precision: 1e12 * peak for precision, peak in entry["dense_peak_tflops"].items()},
        link=entry.get("link", "link"),
        source=entry.get("source", "no source given"),
        assumed=tuple(entry.get("assumed", ())),
        **{key: entry[key] for key in NUMBERS},
    )
