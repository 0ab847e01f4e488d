"""The plan against what was found: refused with the nearest change that fits, or warned with a reason and a remedy.

A vocabulary larger than the model's, and data that is read more often than `max_epochs` allows, are refused by
`data/` when it is opened.
"""

from dataclasses import replace

from pretraining.planning.comparison import predicted
from pretraining.planning.findings import Case, Finding, Found, Verdict
from pretraining.planning.memory.buffers import unprotected_gradient
from pretraining.planning.memory.tensors import parameter_tensors
from pretraining.planning.mistakes import larger_buckets, mistakes, without_kernels
from pretraining.planning.quantities import num_bytes
from pretraining.planning.run_plan import RunPlan, build_run_plan
from pretraining.planning.search import nearest_fit
from pretraining.planning.step_time import precision_of_products
from pretraining.recipe import Recipe
from pretraining.recipe.model import value_of


def judge_plan(
    plan: RunPlan, recipe: Recipe, ds_config: dict | None, found: Found, force: bool
) -> tuple[RunPlan, Verdict]:
    """The plan with what it predicts for the machine found, and the verdict; warnings are printed by rank 0.

    Raises:
        UserError: the run does not fit, and `force` is not set.
    """
    verdict = check_plan(recipe, ds_config, plan.world_size, found).enforce(force)
    on_processor, gpu_memory = found.trains_on_processor, found.gpu_memory_bytes
    values = predicted(recipe, ds_config, plan.world_size, found.gpu, on_processor, gpu_memory)
    return replace(plan, predicted=values), verdict


def check_plan(recipe: Recipe, ds_config: dict | None, world_size: int, found: Found) -> Verdict:
    """Judge a recipe on `world_size` ranks of what was found. Pure: reads no device and no file but tables.

    Raises:
        UserError: the ranks do not divide the recipe's step.
    """
    kernels = without_kernels(found.gpu)
    if found.gpu and precision_of_products(recipe) not in found.gpu.dense_peak_flops:
        found = replace(found, gpu=None)  # its speed in that precision is not known
    case = Case(recipe, ds_config, world_size, found)
    refusals = [_memory(case), _host(case), _disk(case), _gradients(case)]
    return Verdict([each for each in refusals if each], [*kernels, *mistakes(case)])


def _memory(case: Case) -> Finding | None:
    if case.found.trains_on_processor:
        return _processor_memory(case)
    if case.limit is None or case.need.total <= case.limit:
        return None
    part, ranks = case.need.largest, case.world_size
    what = (
        f"{case.recipe.name} needs {num_bytes(case.need.total)} on {'each of ' if ranks > 1 else ''}{ranks} "
        f"GPU{'s' if ranks > 1 else ''} of {num_bytes(case.limit)}: {part} alone {num_bytes(case.need.parts[part])}"
    )
    fit = nearest_fit(case.recipe, ranks, lambda need: need.total <= case.limit, case.found.gpu, case.limit)
    if fit is None:
        return Finding(what, "no stage, offload or micro-batch fits: take more or larger GPUs")
    return Finding(what, f"this fits ({num_bytes(fit.need.total)}): {fit.arguments}")


def _processor_memory(case: Case) -> Finding | None:
    """Where the processor trains, its memory holds what a GPU's would, once for every rank."""
    ranks, there = case.found.ranks_per_host, case.found.host_memory_bytes
    if there is None or ranks * case.need.on_processor <= there:
        return None
    what = (
        f"{case.recipe.name} needs {num_bytes(case.need.on_processor)} for each of {ranks} processes here, "
        f"this machine has {num_bytes(there)} of memory"
    )
    fit = nearest_fit(case.recipe, case.world_size, lambda need: ranks * need.on_processor <= there)
    if fit is None:
        return Finding(
            what, "no stage or micro-batch fits: take a smaller model, or a machine with more memory"
        )
    return Finding(what, f"this fits ({num_bytes(fit.need.on_processor)} each): {fit.arguments}")


def _host(case: Case) -> Finding | None:
    """Beside GPUs: what is offloaded or built in host memory, without what a process is assumed to take."""
    ranks, there = case.found.ranks_per_host, case.found.host_memory_bytes
    needed = ranks * case.need.host_counted
    if there is None or case.found.trains_on_processor or needed <= there:
        return None
    what = f"{ranks} ranks keep {num_bytes(needed)} in host memory, the machine has {num_bytes(there)}"
    if case.need.state and case.need.state.host:
        return Finding(what, "more GPUs share the offloaded states, or use --deepspeed zero3_nvme")
    return Finding(what, "build the weights sharded: --deepspeed zero3")


def _disk(case: Case) -> Finding | None:
    plan, room = build_run_plan(case.recipe, case.ds_config, case.world_size), case.found.disk_room_bytes
    if room is None or plan.checkpoint_disk_bytes <= room:
        return None
    kept = f"{plan.checkpoints_kept} checkpoint" + ("s" if plan.checkpoints_kept > 1 else "")
    what = (
        f"{kept} and one being written need {num_bytes(plan.checkpoint_disk_bytes)} of disk, "
        f"there is room for {num_bytes(room)}"
    )
    fewer = _fewer_checkpoints(case, plan.checkpoints_kept, room)
    if fewer:
        return Finding(what, f"keep fewer: --set checkpoints.keep_last={fewer}")
    return Finding(what, "fewer do not fit either: give --output_dir on a larger disk")


def _gradients(case: Case) -> Finding | None:
    """A gradient that GPUs may overwrite before it is reduced."""
    if case.found.trains_on_processor:
        return None
    tensors, width = parameter_tensors(case.recipe.model), value_of(case.recipe.model, "hidden_size")
    tensor = unprotected_gradient(case.ds_config, tensors, width, case.world_size)
    if tensor is None:
        return None
    place = "" if tensor.layer is None else f" of layer {tensor.layer}"
    what = (
        f"the {tensor.kind}{place} has {tensor.numel:,} elements, more than reduce_bucket_size: with overlap_comm "
        "ZeRO-2 frees its gradient while it is still being reduced, and nothing would say that it is wrong"
    )
    return Finding(what, f"{larger_buckets(case, tensor.numel)}, or --deepspeed zero1")


def _fewer_checkpoints(case: Case, kept: int, room: float) -> int | None:
    """The largest `checkpoints.keep_last` below `kept` for which there is room."""
    for keep in range(kept - 1, 0, -1):
        recipe = replace(case.recipe, checkpoints={**case.recipe.checkpoints, "keep_last": keep})
        if build_run_plan(recipe, case.ds_config, case.world_size).checkpoint_disk_bytes <= room:
            return keep
    return None
