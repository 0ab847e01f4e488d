"""Names of metrics: a group and a name, the same in metrics.jsonl and in every tracker."""

import math

GROUPS = ("train", "eval", "throughput", "memory", "stability")

PLACE = ("step", "time")
"""Where and when a row of metrics.jsonl was taken: no metrics, so without a group. `time` is in UNIX seconds."""

_UNGROUPED_ONCE = ("tokens_per_second", "step_seconds", "data_wait_share")
"""Throughput, as rows of runs from before the groups spell it."""

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
"""Endings of metrics of a validation; every other one is a score."""


def grouped(name: str) -> str:
    """`loss` -> `train/loss`, `eval_loss` -> `eval/loss`; a name that has its group keeps it."""
    if name in PLACE or name.partition("/")[0] in GROUPS:
        return name
    if name in _UNGROUPED_ONCE:
        return f"throughput/{name}"
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"train/{name}"


def grouped_names(values: dict) -> dict:
    """`values` under the names that files and trackers use, in their order."""
    return {grouped(name): value for name, value in values.items()}


def lower_is_better(metric: str) -> bool:
    """Of a validation's metric, by its name."""
    return metric.endswith(LOWER_IS_BETTER)


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a validation's `value` beats another; a NaN beats nothing."""
    return value < than if lower_is_better(metric) else value > than


def worst_value(metric: str) -> float:
    """What every number is better than."""
    return math.inf if lower_is_better(metric) else -math.inf
