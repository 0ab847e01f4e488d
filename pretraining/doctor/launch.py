"""Describe the run that is to start on this machine, and check whether its plan fits here."""

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

from pretraining.command_line import ranks_here, started_by_launcher, world_size_here
from pretraining.data.manifest import read_manifest
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.gpus import Gpus
from pretraining.ds_config import optimizer_device, parameter_device
from pretraining.errors import UserError
from pretraining.planning.costs import forecast
from pretraining.planning.gate import check_plan
from pretraining.planning.memory.need import MemoryNeed, memory_need
from pretraining.planning.quantities import num_bytes, several
from pretraining.planning.run_plan import Machine, RunPlan, build_run_plan
from pretraining.planning.sizes import workload_of_recipe
from pretraining.planning.throughput import precision_of_products
from pretraining.recipe import Recipe
from pretraining.recipe.curve import changes_of_run
from pretraining.recipe.refusals import compiled_part, load_recipe_and_ds_config
from pretraining.runtime.host import host_memory_bytes, is_seen
from pretraining.runtime.run_folder import RunFolder
from pretraining.schema import REPOSITORY


@dataclass(frozen=True)
class Launch:
    """What the checks of a machine must know about a run."""

    gpus: Gpus
    world_size: int
    """Ranks of the whole run."""
    ranks_here: int
    """Ranks on this machine."""
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
        """Return whether some of its ranks run on other machines."""
        return self.world_size > self.ranks_here

    @property
    def continues(self) -> bool:
        """Return whether the run has begun already."""
        return not self.starts_over and is_seen(RunFolder(self.run_folder).recipe)

    @property
    def workers(self) -> int:
        """Return the number of processes that read data for one rank."""
        return int(self.recipe.training.dataloader_num_workers) if self.recipe else 0

    @property
    def offloads(self) -> set[str]:
        """Return what holds offloaded states: "cpu", "nvme", both or neither."""
        return {optimizer_device(self.ds_config), parameter_device(self.ds_config)} - {"gpu"}

    @property
    def compiles(self) -> bool:
        """Return whether training passes are compiled."""
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

    @property
    def save_seconds(self) -> float | None:
        """Forecast the seconds of training between two checkpoints; None if this machine's speed is not known."""
        gpu = self.gpus.known
        if self.recipe is None or gpu is None:
            return None
        if precision_of_products(self.recipe) not in gpu.dense_peak_flops:
            return None
        step = forecast(workload_of_recipe(self.recipe, self.ds_config), gpu, self.world_size).step
        return step.checkpoints.every_seconds if step.checkpoints else None


def plan_launch(options: Namespace, gpus: Gpus) -> tuple[Launch, list[Finding]]:
    """Build the run that the options describe; return it with the finding of a recipe that is refused.

    Its ranks are those of --world_size, else of the launcher, else one for each GPU.
    """
    launched = started_by_launcher()
    world_size = options.world_size or (world_size_here() if launched else len(gpus.found) or 1)
    here = ranks_here() if launched else min(world_size, len(gpus.found) or world_size)
    run_folder = options.output_dir or REPOSITORY / "runs"
    kept = {"starts_over": options.resume == "never", "allowed": tuple(options.allow_change)}
    launch = Launch(gpus, world_size, here, run_folder, options.data_dir, **kept)
    if options.recipe is None:
        return launch, []
    try:
        recipe, ds_config = load_recipe_and_ds_config(
            options.recipe, options.set, options.deepspeed, world_size
        )
        plan = build_run_plan(recipe, ds_config, world_size)
        need = memory_need(recipe, ds_config, world_size)
    except UserError as error:
        # the machine can still be examined without the recipe
        return launch, [Finding.of_error("recipe", error)]
    # as train.py chooses it
    run_folder = options.output_dir or run_folder / recipe.name
    known = {"recipe": recipe, "ds_config": ds_config, "plan": plan, "need": need}
    return replace(launch, run_folder=run_folder, **known), []


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
    """Compare the plan of the run with the GPUs and the host memory found here.

    The disk is checked with its folder (`disks`).
    """
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
    verdict = check_plan(recipe, launch.ds_config, launch.world_size, machine)
    findings = [Finding("plan", BREAKS, each.what, each.remedy) for each in verdict.refusals]
    if not findings:  # one line says that it fits, unless it is refused
        ranks = several(launch.world_size, "GPU" if gpus.found else "rank")
        what = f"{recipe.name} with {recipe.deepspeed or 'plain data parallel'} fits {ranks}"
        if gpus.found:
            share = need.total / gpus.memory_bytes
            what += f": {num_bytes(need.total)} of {num_bytes(gpus.memory_bytes)} each ({share:.0%})"
        else:
            what += f": {num_bytes(need.on_processor)} of memory each, beyond its libraries"
        findings.append(Finding("plan", FINE, what))
    # GPUs that would be large enough if other processes did not hold a part of them
    crowded = [gpu for gpu in gpus.found if need.total <= gpu.memory_bytes < need.total + gpu.used_bytes]
    if crowded:
        left = min(gpu.memory_bytes - gpu.used_bytes for gpu in crowded)
        what = f"{num_bytes(left)} are left of a GPU's memory, {recipe.name} needs {num_bytes(need.total)}"
        remedy = "end the processes that hold the rest (nvidia-smi lists them)"
        findings.append(Finding("plan", BREAKS, what, remedy))
    return findings + [Finding("plan", COSTS, each.what, each.remedy) for each in verdict.warnings]
