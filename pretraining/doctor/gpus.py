"""Read the GPUs of this machine from nvidia-smi, and check whether the installed torch can use them."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.planning.gpus import Gpu, cuda_needs, known_gpu
from pretraining.planning.quantities import num_bytes, several

FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "pci.bus_id",
    "memory.total",
    "memory.used",
    "compute_cap",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "power.limit",
    "power.default_limit",
    "clocks_event_reasons.active",
    "persistence_mode",
)
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
MEBIBYTE = 1 << 20
IDLE_SHARE = 0.02
"""Share of a GPU's memory up to which only the driver uses it."""
SLOWED = {0x2: "its clocks are set lower", 0x8: "hardware slowdown", 0x40: "heat", 0x80: "power brake"}
"""Bits of `clocks_event_reasons.active` that are not set on an idle, healthy GPU (NVML, nvmlClocksEventReasons)."""
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
FAILING_XIDS = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
"""Errors of the device, not of a program: memory, links, firmware, a lost GPU (NVIDIA, Xid Errors)."""


@dataclass(frozen=True)
class GpuFound:
    """One GPU."""

    index: str
    name: str
    memory_bytes: int
    used_bytes: int
    """Memory in use by other processes and the driver."""
    fields: dict[str, str] = field(default_factory=dict)
    """Everything that nvidia-smi answered, as text."""

    @property
    def capability(self) -> float | None:
        """Return the compute capability; None if the driver is too old to say."""
        return _number(self.fields.get("compute_cap"))


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
        """Say if it is a build for GPUs of AMD."""
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
    """Read the GPUs that CUDA_VISIBLE_DEVICES leaves to a process that starts here."""
    if shutil.which("nvidia-smi") is None:
        return _without_nvidia_smi()
    try:
        rows = _ask(list(FIELDS))
    except (OSError, subprocess.SubprocessError) as error:
        return Gpus(problem=f"nvidia-smi cannot be used ({' '.join(str(error).split())})")
    found = [_gpu(row) for row in rows]
    # one driver serves all GPUs of a machine
    return Gpus(tuple(_visible(found)), rows[0]["driver_version"] if rows else None)


def _without_nvidia_smi() -> Gpus:
    devices = list(Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        return Gpus()
    return Gpus(problem=f"{several(len(devices), 'GPU')} in /dev, but no nvidia-smi on the PATH")


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


def _gpu(row: dict[str, str]) -> GpuFound:
    total, used = (int((_number(row.get(key)) or 0) * MEBIBYTE) for key in ("memory.total", "memory.used"))
    return GpuFound(row["index"], row.get("name", "GPU"), total, used, row)


def _visible(found: list[GpuFound]) -> list[GpuFound]:
    """Choose the GPUs that CUDA_VISIBLE_DEVICES names, in its order."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return found
    visible = []
    for name in map(str.strip, chosen.split(",")):
        match = [gpu for gpu in found if _has_name(gpu, name)]
        if not match:  # CUDA ignores all that follows a name it does not know
            break
        visible += match[:1]
    return visible


def _has_name(gpu: GpuFound, name: str) -> bool:
    """Say if `name` means this GPU: its number, the beginning of its UUID, or a slice (MIG-...)."""
    # nvidia-smi's table does not say to which GPU a slice belongs: the first that is cut into slices counts
    if name.startswith("MIG-"):
        return _is_sliced(gpu)
    return name == gpu.index or (name.startswith("GPU-") and gpu.fields["uuid"].startswith(name))


def _number(text: str | None) -> float | None:
    """Read a number; None for what nvidia-smi writes as [N/A] or [Not Supported]."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def check_gpus(gpus: Gpus, torch: TorchBuild) -> list[Finding]:
    """Find what does not fit together in GPUs, driver and torch's build, and what slows the GPUs."""
    if gpus.problem:
        remedy = (
            "start the container with the driver's tools (NVIDIA_DRIVER_CAPABILITIES=compute,utility), or "
        )
        remedy += "restart the machine after an update of the driver"
        return [Finding("GPUs", BREAKS if torch.cuda else COSTS, gpus.problem, remedy)]
    if not gpus.found:
        if torch.for_amd:
            return [Finding("GPUs", COSTS, f"torch {torch.version} is for AMD's: {NOT_EXAMINED}", ON_AMD)]
        hidden = "CUDA_VISIBLE_DEVICES leaves none" if gpus.driver else "none from NVIDIA"
        return [Finding("GPUs", FINE, f"{hidden}: the processor trains (torch {torch.version})")]
    rules = (_kinds, _memory_in_use, _mig, _memory_errors, _power, _slowed, _persistence)
    findings = [_listed(gpus, torch), _torch(gpus, torch), _driver(gpus, torch), _capability(gpus, torch)]
    findings += [rule(gpus.found) for rule in rules]
    return [finding for finding in (*findings, check_xids(kernel_messages())) if finding]


def _listed(gpus: Gpus, torch: TorchBuild) -> Finding:
    first = gpus.found[0]
    known = (
        gpus.known.name
        if gpus.known
        else "not in tables/gpus.json: plans know neither its speed nor its price"
    )
    what = f"{len(gpus.found)} x {first.name} of {num_bytes(gpus.memory_bytes)} ({known})"
    return Finding("GPUs", FINE, f"{what}, driver {gpus.driver}, torch {torch.version}")


def _torch(gpus: Gpus, torch: TorchBuild) -> Finding | None:
    if torch.cuda or torch.for_amd:
        return None
    # without the mark of the build: 2.13.0 of 2.13.0+cpu
    public = (torch.version or "").partition("+")[0]
    what = f"torch {torch.version} is built without CUDA, beside {several(len(gpus.found), 'GPU')}"
    remedy = f"pip install --force-reinstall torch=={public}, without an index of builds for processors"
    return Finding("torch build", BREAKS, f"{what}: the processor would train", remedy)


def _driver(gpus: Gpus, torch: TorchBuild) -> Finding | None:
    needs, branch = cuda_needs(torch.cuda), _number((gpus.driver or "").partition(".")[0])
    if needs is None or branch is None:
        return None
    least, wanted = needs["least_driver"], float(torch.cuda.partition(".")[0])
    if branch >= least:
        return Finding("driver", FINE, f"{gpus.driver}; torch's CUDA {torch.cuda} needs {least} or newer")
    if (driver_cuda() or 0) >= wanted:
        what = f"{gpus.driver}, with a compatibility package for CUDA {driver_cuda():g}"
        return Finding("driver", FINE, f"{what}; else torch's CUDA {torch.cuda} needs {least} or newer")
    what = f"{gpus.driver} is older than the {least} that torch {torch.version} (CUDA {torch.cuda}) needs"
    older = f"update the driver to {least} or newer, or install a build of torch for the CUDA that it has"
    return Finding("driver", BREAKS, what, older)


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


def _capability(gpus: Gpus, torch: TorchBuild) -> Finding | None:
    needs = cuda_needs(torch.cuda)
    # 99: a capability that is not known counts as new enough
    old = [gpu for gpu in gpus.found if needs and (gpu.capability or 99) < needs["least_capability"]]
    if not old:
        return None
    what = f"{_which(old)}: compute capability {old[0].capability}, but CUDA {torch.cuda} begins at "
    remedy = f"install a build of torch for CUDA {int(torch.cuda.partition('.')[0]) - 1}, or take newer GPUs"
    return Finding("compute capability", BREAKS, f"{what}{needs['least_capability']}", remedy)


def _which(gpus: Iterable[GpuFound]) -> str:
    """Write `GPU 3`, `GPUs 0, 2` or `GPUs 0-7`."""
    indices = [gpu.index for gpu in gpus]
    if len(indices) == 1:
        return f"GPU {indices[0]}"
    first, last = int(indices[0]), int(indices[-1])
    in_a_row = indices == [str(index) for index in range(first, last + 1)]
    return f"GPUs {f'{first}-{last}' if in_a_row else ', '.join(indices)}"


def _kinds(found: tuple[GpuFound, ...]) -> Finding | None:
    names = sorted({gpu.name for gpu in found})
    if len(names) == 1:
        return None
    most = max(names, key=[gpu.name for gpu in found].count)
    chosen = ",".join(gpu.index for gpu in found if gpu.name == most)
    remedy = f"export CUDA_VISIBLE_DEVICES={chosen}, of one kind: every step waits for the slowest GPU"
    return Finding("GPU kinds", COSTS, f"several kinds together: {', '.join(names)}", remedy)


def _memory_in_use(found: tuple[GpuFound, ...]) -> Finding | None:
    taken = [gpu for gpu in found if gpu.used_bytes > IDLE_SHARE * gpu.memory_bytes]
    if not taken:
        return None
    most = max(gpu.used_bytes for gpu in taken)
    what = f"{_which(taken)}: other processes hold up to {num_bytes(most)} of memory"
    free = ",".join(gpu.index for gpu in found if gpu not in taken)
    remedy = "end them (nvidia-smi lists them)"
    remedy += f", or leave these GPUs out: export CUDA_VISIBLE_DEVICES={free}" if free else ""
    return Finding("GPU memory", COSTS, what, remedy, values={"used_bytes": most})


def _is_sliced(gpu: GpuFound) -> bool:
    return gpu.fields.get("mig.mode.current") == "Enabled"


def _mig(found: tuple[GpuFound, ...]) -> Finding | None:
    indices = ",".join(gpu.index for gpu in found if _is_sliced(gpu))
    return _if_any(
        found,
        _is_sliced,
        "MIG",
        "cut into MIG slices, of which a process sees one: the plan counts on whole GPUs",
        f"turn MIG off: nvidia-smi -i {indices} -mig 0 (as root, with nothing running there)",
    )


def _memory_errors(found: tuple[GpuFound, ...]) -> Finding | None:
    return _if_any(
        found,
        lambda gpu: (
            (_number(gpu.fields.get("ecc.errors.uncorrected.volatile.total")) or 0) > 0
            or gpu.fields.get("retired_pages.pending") == "Yes"
        ),
        "GPU memory errors",
        "memory errors that ECC could not correct, or pages that wait to be retired",
        "restart the machine, which retires the pages; have the GPU replaced if they come again",
    )


def _power(found: tuple[GpuFound, ...]) -> Finding | None:
    def limits(gpu: GpuFound) -> tuple[float, float]:
        given, usual = (_number(gpu.fields.get(key)) for key in ("power.limit", "power.default_limit"))
        # 0 for a limit that is not known: such a GPU is not reported
        return given or 0, usual or 0

    low = [gpu for gpu in found if 0 < limits(gpu)[0] < limits(gpu)[1]]
    if not low:
        return None
    given, usual = min(map(limits, low))
    what = f"{_which(low)}: limited to {given:.0f} W of {usual:.0f} W"
    return Finding("power limit", COSTS, what, f"nvidia-smi -pl {usual:.0f} (as root)")


def _slowed(found: tuple[GpuFound, ...]) -> Finding | None:
    def reasons(gpu: GpuFound) -> list[str]:
        text = gpu.fields.get("clocks_event_reasons.active", "")
        # hexadecimal, or a text such as [N/A]
        bits = int(text, 16) if text.startswith("0x") else 0
        return [words for bit, words in SLOWED.items() if bits & bit]

    slow = [gpu for gpu in found if reasons(gpu)]
    if not slow:
        return None
    why = ", ".join(dict.fromkeys(reason for gpu in slow for reason in reasons(gpu)))
    remedy = "nvidia-smi -rgc and -rac give the clocks back (as root); for heat and power ask whoever runs the machine"
    return Finding("GPU clocks", COSTS, f"{_which(slow)}: slowed down ({why})", remedy)


def _persistence(found: tuple[GpuFound, ...]) -> Finding | None:
    return _if_any(
        found,
        lambda gpu: gpu.fields.get("persistence_mode") == "Disabled",
        "persistence",
        "put to sleep whenever nothing uses them: each start waits for the driver again",
        "nvidia-smi -pm 1 (as root)",
    )


def _if_any(
    found: tuple[GpuFound, ...], applies: Callable[[GpuFound], bool], check: str, what: str, remedy: str
) -> Finding | None:
    """Make a finding that costs, about the GPUs to which it applies; None if there are none."""
    concerned = [gpu for gpu in found if applies(gpu)]
    return Finding(check, COSTS, f"{_which(concerned)}: {what}", remedy) if concerned else None


def kernel_messages() -> str:
    """Read the kernel's log; empty if it cannot be read, as often only root may."""
    try:
        # not blocking: at its end the log would wait for the next message
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    records = []
    try:
        while True:
            try:
                # one record each; a buffer that is too small would be an error
                records.append(os.read(descriptor, 8192).decode(errors="replace"))
            except BrokenPipeError:  # this record was overwritten meanwhile
                continue
            except OSError:
                return "".join(records)
    finally:
        os.close(descriptor)


def check_xids(messages: str) -> Finding | None:
    """Report errors of the devices themselves that the driver has logged since the machine started."""
    failing = sorted({(place, int(number)) for place, number in XID.findall(messages)})
    failing = [f"Xid {number} of {place}" for place, number in failing if number in FAILING_XIDS]
    if not failing:
        return None
    what = f"the driver has logged {', '.join(failing)} since the machine started"
    return Finding("Xid", COSTS, what, "restart the machine; have the GPU replaced if they come again")
