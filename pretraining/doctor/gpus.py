"""Read the GPUs of this machine from nvidia-smi, and check whether the installed torch can use them."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.planning.gpus import Gpu, cuda_needs, known_gpu
from pretraining.planning.quantities import num_bytes, several
from pretraining.runtime.failures import failing_gpus

FIELDS = """
    index uuid name driver_version pci.bus_id memory.total memory.used compute_cap mig.mode.current
    ecc.errors.uncorrected.volatile.total retired_pages.pending power.limit power.default_limit
    clocks_event_reasons.active persistence_mode"""
"""Fields to ask nvidia-smi for; an older one that does not know a field is asked again without it."""
SECONDS = 10
"""Limit of one call of nvidia-smi, which may have to wake eight GPUs first."""
NOT_EXAMINED = (
    "their driver, memory in use, memory errors, power, clocks and links are not checked here, nor whether the plan "
    "fits them; the lines about plan, cores and packages are those of a machine without GPUs"
)
ON_AMD = (
    "look at them by rocm-smi; give --world_size N, and under the launcher (deepspeed --num_gpus=N --module "
    "pretraining.doctor) messages, products and layers are measured on them"
)
IDLE_SHARE = 0.02
"""Share of a GPU's memory up to which only the driver uses it."""
SLOWED = {0x2: "its clocks are set lower", 0x8: "hardware slowdown", 0x40: "heat", 0x80: "power brake"}
"""Bits of `clocks_event_reasons.active` that are not set on an idle, healthy GPU (NVML, nvmlClocksEventReasons)."""


@dataclass(frozen=True)
class GpuFound:
    index: str
    name: str
    memory_bytes: int
    used_bytes: int
    """Memory in use by other processes and the driver."""
    fields: dict[str, str] = field(default_factory=dict)
    """Everything that nvidia-smi answered, as text."""

    def number(self, name: str) -> float | None:
        return _number(self.fields.get(name))

    @property
    def capability(self) -> float | None:
        """Return the compute capability; None if the driver is too old to say."""
        return self.number("compute_cap")

    @property
    def is_sliced(self) -> bool:
        return self.fields.get("mig.mode.current") == "Enabled"


@dataclass(frozen=True)
class Gpus:
    """All GPUs that a process of this machine would see."""

    found: tuple[GpuFound, ...] = ()
    driver: str | None = None
    problem: str = ""
    """Why nvidia-smi cannot be asked; empty if it answered, or if there are no GPUs."""

    @property
    def known(self) -> Gpu | None:
        """Return their entry in tables/gpus.json; None without GPUs, or for a kind that is not in the table."""
        return known_gpu(self.found[0].name) if self.found else None

    @property
    def memory_bytes(self) -> int | None:
        """Return the memory of the smallest GPU; None without GPUs."""
        return min((gpu.memory_bytes for gpu in self.found), default=None)


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch, read from its version.py without importing it."""

    version: str | None
    """None if it is not installed."""
    cuda: str | None
    """None for a build for processors."""

    @property
    def for_amd(self) -> bool:
        return "rocm" in (self.version or "")


def torch_build() -> TorchBuild:
    """Read the version and the CUDA of the torch that this Python would import."""
    spec = find_spec("torch")
    # find_spec does not import torch, which takes seconds
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if path is None or not path.is_file():
        return TorchBuild(None, None)
    text = path.read_text(encoding="utf-8")
    # lines such as `__version__ = '2.13.0+cu130'` and `cuda: Optional[str] = '13.0'`
    said = {key: re.search(rf"^{key}\b[^=]*= *'([^']+)'", text, re.M) for key in ("__version__", "cuda")}
    return TorchBuild(*(match and match[1] for match in said.values()))


def read_gpus() -> Gpus:
    """Read the GPUs that CUDA_VISIBLE_DEVICES leaves to a process that starts here, in its order."""
    if shutil.which("nvidia-smi") is None:
        devices = list(Path("/dev").glob("nvidia[0-9]*"))
        what = f"{several(len(devices), 'GPU')} in /dev, but no nvidia-smi on the PATH"
        return Gpus(problem=what if devices else "")
    try:
        rows = _ask(FIELDS.split())
    except (OSError, subprocess.SubprocessError) as error:
        return Gpus(problem=f"nvidia-smi cannot be used ({' '.join(str(error).split())})")
    found = []
    for row in rows:
        # in MiB
        total, used = (int(_number(row.get(f"memory.{key}")) or 0) << 20 for key in ("total", "used"))
        found.append(GpuFound(row["index"], row.get("name", "GPU"), total, used, row))
    visible, chosen = found, os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        visible = []
        for name in map(str.strip, chosen.split(",")):
            # Its number, the beginning of its UUID, or a slice (MIG-...). nvidia-smi's table does not say to which GPU
            # a slice belongs: the first that is cut into slices counts.
            if name.startswith("MIG-"):
                match = [gpu for gpu in found if gpu.is_sliced]
            elif name.startswith("GPU-"):
                match = [gpu for gpu in found if gpu.fields["uuid"].startswith(name)]
            else:
                match = [gpu for gpu in found if gpu.index == name]
            if not match:  # CUDA ignores all that follows a name it does not know
                break
            visible += match[:1]
    # one driver serves all GPUs of a machine
    return Gpus(tuple(visible), rows[0]["driver_version"] if rows else None)


def _ask(fields: list[str]) -> list[dict[str, str]]:
    """Ask nvidia-smi for these fields; return one row for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    unknown = re.search(r'Field "([^"]+)" is not a valid field', answer.stdout + answer.stderr)
    # it names one unknown field at a time
    if unknown and unknown[1] in fields:
        return _ask([name for name in fields if name != unknown[1]])
    if answer.returncode:
        said = (answer.stdout + answer.stderr).strip() or f"exit code {answer.returncode}"
        if "No devices were found" in said:
            return []
        raise subprocess.SubprocessError(said[:200])
    lines = [line for line in answer.stdout.splitlines() if line.strip()]
    # not strict: a line that is cut short leaves fields out
    return [dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in lines]


def _number(text: str | None) -> float | None:
    """Read a number; None for what nvidia-smi writes as [N/A] or [Not Supported]."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def check_gpus(gpus: Gpus, torch: TorchBuild) -> Iterator[Finding]:
    """Find what does not fit together in GPUs, driver and torch's build, and what slows the GPUs."""
    if gpus.problem:
        remedy = "start the container with the driver's tools (NVIDIA_DRIVER_CAPABILITIES=compute,utility), "
        remedy += "or restart the machine after an update of the driver"
        yield Finding("GPUs", BREAKS if torch.cuda else COSTS, gpus.problem, remedy)
    elif gpus.found:
        yield from _with_torch(gpus, torch)
        yield from _of_each(gpus.found)
    elif torch.for_amd:
        yield Finding("GPUs", COSTS, f"torch {torch.version} is for AMD's: {NOT_EXAMINED}", ON_AMD)
    else:
        hidden = "CUDA_VISIBLE_DEVICES leaves none" if gpus.driver else "none from NVIDIA"
        yield Finding("GPUs", FINE, f"{hidden}: the processor trains (torch {torch.version})")


def _with_torch(gpus: Gpus, torch: TorchBuild) -> Iterator[Finding]:
    """List the GPUs, and check whether they, their driver and torch's build fit together."""
    unknown = "not in tables/gpus.json: plans know neither its speed nor its price"
    known = gpus.known.name if gpus.known else unknown
    what = f"{len(gpus.found)} x {gpus.found[0].name} of {num_bytes(gpus.memory_bytes)} ({known})"
    yield Finding("GPUs", FINE, f"{what}, driver {gpus.driver}, torch {torch.version}")
    if not torch.cuda and not torch.for_amd:
        what = f"torch {torch.version} is built without CUDA, beside {several(len(gpus.found), 'GPU')}"
        # without the mark of the build: 2.13.0 of 2.13.0+cpu
        public = (torch.version or "").partition("+")[0]
        remedy = f"pip install --force-reinstall torch=={public}, without an index of builds for processors"
        yield Finding("torch build", BREAKS, f"{what}: the processor would train", remedy)
    if (needs := cuda_needs(torch.cuda)) is None:
        return
    least, wanted = needs["least_driver"], int(torch.cuda.partition(".")[0])
    branch = _number((gpus.driver or "").partition(".")[0])
    if branch is not None and branch >= least:
        yield Finding("driver", FINE, f"{gpus.driver}; torch's CUDA {torch.cuda} needs {least} or newer")
    elif branch is not None and (driver_cuda() or 0) >= wanted:
        what = f"{gpus.driver}, with a compatibility package for CUDA {driver_cuda():g}"
        yield Finding("driver", FINE, f"{what}; else torch's CUDA {torch.cuda} needs {least} or newer")
    elif branch is not None:
        what = f"{gpus.driver} is older than the {least} that torch {torch.version} (CUDA {torch.cuda}) needs"
        remedy = f"update the driver to {least} or newer, "
        remedy += "or install a build of torch for the CUDA that it has"
        yield Finding("driver", BREAKS, what, remedy)
    # 99: a capability that is not known counts as new enough
    if old := [gpu for gpu in gpus.found if (gpu.capability or 99) < needs["least_capability"]]:
        what = f"{_which(old)}: compute capability {old[0].capability}, but CUDA {torch.cuda} begins at "
        remedy = f"install a build of torch for CUDA {wanted - 1}, or take newer GPUs"
        yield Finding("compute capability", BREAKS, f"{what}{needs['least_capability']}", remedy)


def driver_cuda() -> float | None:
    """Return the CUDA version of the driver's library that a process loads, such as 13.0; None if there is none.

    Containers may add a compatibility package, whose library is newer than the driver. torch asks the same library.
    """
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    # the driver writes 13.0 as 13000
    return None if failed else version.value // 10 / 100


def _of_each(found: tuple[GpuFound, ...]) -> Iterator[Finding]:
    """Find what slows GPUs down, or what is broken in them; a line names those that it concerns."""
    names = sorted({gpu.name for gpu in found})
    if len(names) > 1:
        most = max(names, key=[gpu.name for gpu in found].count)
        of_one_kind = _indices(gpu for gpu in found if gpu.name == most)
        remedy = f"export CUDA_VISIBLE_DEVICES={of_one_kind}, of one kind: "
        remedy += "every step waits for the slowest GPU"
        yield Finding("GPU kinds", COSTS, f"several kinds together: {', '.join(names)}", remedy)
    if taken := [gpu for gpu in found if gpu.used_bytes > IDLE_SHARE * gpu.memory_bytes]:
        most_bytes = max(gpu.used_bytes for gpu in taken)
        what = f"{_which(taken)}: other processes hold up to {num_bytes(most_bytes)} of memory"
        remedy = "end them (nvidia-smi lists them)"
        if free := _indices(gpu for gpu in found if gpu not in taken):
            remedy += f", or leave these GPUs out: export CUDA_VISIBLE_DEVICES={free}"
        yield Finding("GPU memory", COSTS, what, remedy, values={"used_bytes": most_bytes})
    if sliced := [gpu for gpu in found if gpu.is_sliced]:
        what = "cut into MIG slices, of which a process sees one: the plan counts on whole GPUs"
        remedy = f"turn MIG off: nvidia-smi -i {_indices(sliced)} -mig 0 (as root, "
        remedy += "with nothing running there)"
        yield Finding("MIG", COSTS, f"{_which(sliced)}: {what}", remedy)
    lost, retired = "ecc.errors.uncorrected.volatile.total", "retired_pages.pending"
    if broken := [gpu for gpu in found if gpu.number(lost) or gpu.fields.get(retired) == "Yes"]:
        what = "memory errors that ECC could not correct, or pages that wait to be retired"
        remedy = "restart the machine, which retires the pages; have the GPU replaced if they come again"
        yield Finding("GPU memory errors", COSTS, f"{_which(broken)}: {what}", remedy)
    limits = [(gpu.number("power.limit") or 0, gpu.number("power.default_limit") or 0) for gpu in found]
    if limited := [gpu for gpu, (given, usual) in zip(found, limits, strict=True) if 0 < given < usual]:
        given, usual = min(each for each in limits if 0 < each[0] < each[1])
        what = f"{_which(limited)}: limited to {given:.0f} W of {usual:.0f} W"
        yield Finding("power limit", COSTS, what, f"nvidia-smi -pl {usual:.0f} (as root)")
    # hexadecimal, or a text such as [N/A]
    texts = [gpu.fields.get("clocks_event_reasons.active", "") for gpu in found]
    bits = [int(text, 16) if text.startswith("0x") else 0 for text in texts]
    if slow := [gpu for gpu, each in zip(found, bits, strict=True) if any(each & bit for bit in SLOWED)]:
        why = ", ".join(words for bit, words in SLOWED.items() if any(each & bit for each in bits))
        remedy = "nvidia-smi -rgc and -rac give the clocks back (as root); "
        remedy += "for heat and power ask whoever runs the machine"
        yield Finding("GPU clocks", COSTS, f"{_which(slow)}: slowed down ({why})", remedy)
    if asleep := [gpu for gpu in found if gpu.fields.get("persistence_mode") == "Disabled"]:
        what = "put to sleep whenever nothing uses them: each start waits for the driver again"
        yield Finding("persistence", COSTS, f"{_which(asleep)}: {what}", "nvidia-smi -pm 1 (as root)")
    if failing := failing_gpus():
        xids = ", ".join(f"Xid {number} of {place}" for place, number in failing)
        remedy = "restart the machine; have the GPU replaced if they come again"
        yield Finding("Xid", COSTS, f"the driver has logged {xids} since the machine started", remedy)


def _indices(gpus: Iterable[GpuFound]) -> str:
    return ",".join(gpu.index for gpu in gpus)


def _which(gpus: list[GpuFound]) -> str:
    """Write `GPU 3`, `GPUs 0, 2` or `GPUs 0-7`."""
    indices = [gpu.index for gpu in gpus]
    if len(indices) == 1:
        return f"GPU {indices[0]}"
    in_a_row = indices == [str(index) for index in range(int(indices[0]), int(indices[-1]) + 1)]
    return f"GPUs {f'{indices[0]}-{indices[-1]}' if in_a_row else ', '.join(indices)}"
