"""Name metrics by a group and a name, the same in metrics.jsonl and in every tracker."""

import math

GROUPS = ("train", "eval", "throughput", "memory", "hardware", "stability", "cost", "optimizer")

PLACE = ("step", "time")
"""Where and when a row of metrics.jsonl was written. These are no metrics and have no group; `time` is UNIX seconds."""

_UNGROUPED_ONCE = ("tokens_per_second", "step_seconds", "data_wait_share")  # in rows of older runs

_RENAMED = {"throughput/gpu_utilization": "hardware/gpu_utilization"}  # name in rows of older runs: now

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
"""How the names of losses of a validation end; every other metric is a score, which is better if it is higher."""

OF_AVERAGE = "average_"  # before the names of what a validation measures of the average of the weights


def grouped(name: str) -> str:
    """Add the group: `loss` -> `train/loss`, `eval_loss` -> `eval/loss`; a name that has its group keeps it."""
    if name in PLACE or name.partition("/")[0] in GROUPS:
        return _RENAMED.get(name, name)
    if name in _UNGROUPED_ONCE:
        return f"throughput/{name}"
    # the Trainer's own spelling
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"train/{name}"


def grouped_names(values: dict) -> dict:
    """Rename the keys of `values` to the names that files and trackers use, in the same order."""
    return {grouped(name): value for name, value in values.items()}


def perplexity(nats: float) -> float:
    """Return e to the loss in nats per token; an infinite loss or a NaN stays one."""
    return nats if nats == math.inf else math.exp(min(nats, 700.0))  # exp(710) overflows a float


def lower_is_better(metric: str) -> bool:
    """Return whether a lower value of a validation's metric is better, by its name."""
    return metric.endswith(LOWER_IS_BETTER)


def is_better(metric: str, value: float, than: float) -> bool:
    # A comparison with NaN is false: a NaN beats nothing.
    return value < than if lower_is_better(metric) else value > than


def worst_value(metric: str) -> float:
    """Return the value that every number is better than, to begin a search with."""
    return math.inf if lower_is_better(metric) else -math.inf
