"""How long a run takes and what it costs on so many GPUs of a kind: what follows from its tokens per second."""

from dataclasses import asdict, dataclass, replace

from pretraining.ds_config import zero_stage
from pretraining.planning.costs import CheckpointCost, Cost, checkpoint_cost, gpu_hours, run_cost
from pretraining.planning.gpus import Gpu
from pretraining.planning.machine_rates import kept_rates
from pretraining.planning.memory.precision import precision_of
from pretraining.planning.roofline import Ceiling, ceiling, recipe_utilization
from pretraining.planning.run_plan import (
    RunPlan,
    build_run_plan,
    checkpoints_written,
    save_every,
    token_bytes,
)
from pretraining.planning.step_time import precision_of_products, step_time
from pretraining.planning.throughput import (
    StepTime,
    Utilization,
    communication,
    expected_utilization,
    scaling_over_nodes,
    tokens_per_second,
)
from pretraining.planning.workload import Workload
from pretraining.recipe import Recipe


@dataclass(frozen=True)
class StepForecast:
    """What a recipe and its ds_config add: the step, its messages, its data and its checkpoints."""

    seconds: float
    """Of one optimizer step, as the run's tokens per second have it."""
    time: StepTime
    """What the products and the messages need by themselves."""
    kernel_seconds: dict[str, float]
    """Of one micro-batch at the ceiling, by what they are spent on (`roofline.Ceiling`)."""
    sent_bytes_per_gpu: float
    loader_bytes_per_second: float
    """Over all ranks."""
    checkpoints: CheckpointCost | None
    """None where the recipe saves none."""
    disk: dict[str, int]
    """Bytes by what they are for (`RunPlan.disk`)."""

    def to_dict(self) -> dict:
        """Plain JSON values."""
        time = {**asdict(self.time), "bound_by": self.time.bound_by}
        saved = self.checkpoints.to_dict() if self.checkpoints else None
        return {**asdict(self), "time": time, "checkpoints": saved, "disk_bytes": sum(self.disk.values())}


@dataclass(frozen=True)
class Forecast:
    """A run on some GPUs."""

    name: str
    parameters: float
    tokens: float
    flops: float
    """Training FLOPs, recomputation not counted."""
    gpu: str
    num_gpus: int
    precision: str
    utilization: Utilization
    mfu: float
    """What the run reaches: the utilization less what is recomputed, sent or offloaded."""
    tokens_per_second: float
    cost: Cost
    scaling: dict | None
    """What is assumed where the GPUs lie in more than one node; None in one."""
    step: StepForecast | None
    """None where no recipe says what a step is."""

    @property
    def seconds(self) -> float:
        """Training time, without validation, checkpoints and failures."""
        return self.tokens / self.tokens_per_second

    def to_dict(self) -> dict:
        """Plain JSON values, derived ones included."""
        derived = {
            "seconds": self.seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second / self.num_gpus,
            "cost": self.cost.to_dict(),
            "scaling": self.scaling,
            "step": self.step.to_dict() if self.step else None,
        }
        return {**asdict(self), **derived}


def forecast(
    workload: Workload,
    gpu: Gpu,
    num_gpus: int,
    mfu: float | None = None,
    precision: str | None = None,
    price: float | None = None,
) -> Forecast:
    """Time and money of a workload.

    An assumed utilization knows nothing of the run: recomputed layers, messages that need longer than the products,
    and offload come on top of it. A given one is taken as it is; of a measured one recomputation alone is taken off.

    Args:
        mfu: share of the dense peak; None for what was measured here, else for the assumption of the tables.
        precision: of the products; None for the recipe's, or the GPU's training precision.
        price: dollars per GPU-hour instead of the table's.

    Raises:
        UserError: the GPU lacks the precision, or the ranks do not divide the recipe's step.
    """
    precision = precision or _precision(workload.recipe, gpu)
    recipe, ds_config = workload.recipe, workload.ds_config
    at_best = ceiling(recipe, ds_config, num_gpus, gpu, precision) if recipe else None
    used = _utilization(workload, gpu, at_best, mfu)
    at_peak = tokens_per_second(workload.training_flops_per_token, num_gpus, gpu.peak_flops(precision), 1.0)
    time = _time(workload, gpu, num_gpus, used, precision) if recipe else None
    rate = at_peak * used.mfu
    if time:
        rate = recipe.tokens_per_step / (time.seconds if used.assumed else time.compute_seconds)
    return Forecast(
        name=workload.name,
        parameters=workload.parameters,
        tokens=workload.tokens,
        flops=workload.training_flops_per_token * workload.tokens,
        gpu=gpu.name,
        num_gpus=num_gpus,
        precision=precision,
        utilization=used,
        mfu=rate / at_peak,
        tokens_per_second=rate,
        cost=run_cost(gpu, gpu_hours(num_gpus, workload.tokens / rate), price),
        scaling=scaling_over_nodes(gpu, num_gpus, used.assumed),
        step=_step(workload, gpu, num_gpus, at_best, rate, time) if time else None,
    )


def _utilization(workload: Workload, gpu: Gpu, at_best: Ceiling | None, mfu: float | None) -> Utilization:
    if mfu:
        return Utilization(mfu, "given", assumed=False)
    if at_best:
        return recipe_utilization(workload.recipe, gpu, at_best)
    recomputation = workload.hardware_flops_per_token / workload.training_flops_per_token
    return expected_utilization(gpu, int(workload.parameters), recomputation=recomputation)


def _time(workload: Workload, gpu: Gpu, num_gpus: int, used: Utilization, precision: str) -> StepTime:
    """What products, messages and offload need by themselves; a given utilization is that of whole steps."""
    mfu = None if used.assumed else used.mfu
    time = step_time(workload.recipe, workload.ds_config, num_gpus, gpu, mfu, precision)
    if used.source != "given":
        return time
    flops = workload.training_flops_per_token * workload.recipe.tokens_per_step
    return replace(time, compute_seconds=flops / (num_gpus * gpu.peak_flops(precision) * used.mfu))


def _precision(recipe: Recipe | None, gpu: Gpu) -> str:
    return gpu.training_precision if recipe is None else precision_of_products(recipe)


def _step(
    workload: Workload, gpu: Gpu, num_gpus: int, at_best: Ceiling, rate: float, time: StepTime
) -> StepForecast:
    recipe, ds_config = workload.recipe, workload.ds_config
    plan = build_run_plan(recipe, ds_config, num_gpus)
    volume = communication(
        plan.parameters,
        zero_stage(ds_config),
        num_gpus,
        plan.accumulation_steps,
        width=precision_of(recipe, ds_config).weights,
        hpz=(ds_config or {}).get("zero_optimization", {}).get("zero_hpz_partition_size", 1),
    )
    seconds = recipe.tokens_per_step / rate
    return StepForecast(
        seconds=seconds,
        time=time,
        kernel_seconds=at_best.seconds,
        sent_bytes_per_gpu=volume.total,
        loader_bytes_per_second=rate * token_bytes(recipe.model.vocab_size),
        checkpoints=_checkpoints(plan, recipe, seconds, gpu, num_gpus),
        disk=plan.disk,
    )


def _checkpoints(
    plan: RunPlan, recipe: Recipe, step_seconds: float, gpu: Gpu, num_gpus: int
) -> CheckpointCost | None:
    every = save_every(recipe)
    if every is None:
        return None
    written, kept = checkpoints_written(recipe), plan.checkpoints_kept
    disk = kept_rates(gpu.name, num_gpus).get("disk_bytes_per_second")
    return checkpoint_cost(plan.checkpoint_bytes, every, step_seconds, written, kept, num_gpus, disk)
