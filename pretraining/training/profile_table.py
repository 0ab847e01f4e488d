"""What the operations of a trace cost, in plain words."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

MOST_OPERATIONS = 15

KINDS = {
    "messages between ranks": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier",
    "attention": r"attention|flash|fmha|sdpa",
    "optimizer": r"optimizer|adam|lamb|lion|multi_tensor_apply",
    "matrix products": r"\bmm\b|addmm|bmm|matmul|linear|gemm|cutlass|grouped_mm|wgmma",
    "softmax and loss": r"softmax|nll_loss|cross_entropy|logsumexp|token_?nats|FusedNats|ChunkedNats",
    "normalization": r"(layer|rms|group)_?norm",
    "norms of gradients": r"norm",
    "look-ups": r"embedding|index|gather|scatter|topk|sort",
    "copies and casts": r"copy|memcpy|memset|\bto\b|\bcat\b|clone|contiguous|zero_|fill_|zeros|empty",
    "waiting": r"synchronize|\bitem\b|_local_scalar_dense|wait|dataloader",
    "views (nothing is copied)": r"view|slice|narrow|as_strided|detach|select|expand|reshape|transpose|\bt\b|split",
    "autograd itself": r"autograd",
    "arithmetic on elements": (
        r"aten::_?(foreach_)?(add|sub|mul|div|pow|sqrt|rsqrt|exp|log|tanh|sigmoid|gelu|silu|relu|neg|abs|clamp|where|"
        r"sum|mean|square|lerp)|elementwise|reduce_kernel"
    ),
}
"""Kind of work -> what names of operations and kernels hold; the first that fits counts."""


class Operation(NamedTuple):
    """One kind of operation or kernel over all traced steps; the time of what it calls is not in its own."""

    name: str
    calls: int
    host_seconds: float
    device_seconds: float


def operations_of(averages: Iterable) -> list[Operation]:
    """From torch's `key_averages()`, whose times are microseconds.

    A kernel's time is in its own row, in that of the operation that launched it, and in those of the annotations
    around it (torch 2.13, autograd/profiler_util.py): the device's time is taken from the kernels alone.
    """
    rows = [each for each in averages if not (_on_device(each) and each.is_user_annotation)]
    counts_device = _on_device if any(map(_on_device, rows)) else lambda each: True
    return [
        Operation(
            each.key,
            each.count,
            each.self_cpu_time_total / 1e6,
            each.self_device_time_total / 1e6 if counts_device(each) else 0.0,
        )
        for each in rows
    ]


def _on_device(average) -> bool:
    """Whether a row is of what ran on the device, not of what the host did."""
    return average.device_type.name == "CUDA"


def kind_of(name: str) -> str:
    """The kind of work behind an operation's or kernel's name."""
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "everything else")


def cost_table(operations: list[Operation], title: str, num_steps: int, seconds: float) -> str:
    """Costs by kind and the costliest operations, a step's mean; of the device where the trace holds any of it.

    seconds: the traced steps' wall time.
    """
    on_device = any(each.device_seconds for each in operations)
    cost = {each: each.device_seconds if on_device else each.host_seconds for each in operations}
    total = sum(cost.values()) or 1.0
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for each in operations:
        if cost[each]:
            by_kind[kind_of(each.name)][0] += cost[each]
            by_kind[kind_of(each.name)][1] += each.calls
    costliest = sorted((each for each in operations if cost[each]), key=cost.get, reverse=True)
    kinds = sorted(by_kind.items(), key=lambda item: item[1][0], reverse=True)
    lines = [
        f"profile of {title}: {1e3 * seconds / num_steps:,.1f} ms a step",
        _summary(on_device, total / seconds),
        "",
        _header("by kind of work"),
        *(_line(kind, spent, calls, num_steps, total) for kind, (spent, calls) in kinds),
        "",
        _header("the costliest operations"),
        *(
            _line(f"{each.name[:60]} ({kind_of(each.name)})", cost[each], each.calls, num_steps, total)
            for each in costliest[:MOST_OPERATIONS]
        ),
    ]
    return "\n".join(lines) + "\n"


def _summary(on_device: bool, share: float) -> str:
    if not on_device:
        return f"the processor spent {share:.0%} of that in the operations below, the rest in Python and in waiting"
    if share < 0.7:
        return f"the GPU computed {share:.0%} of that: it waits for the host, for data or for other ranks"
    return f"the GPU's kernels add up to {share:.0%} of that (more than 100% where they overlap)"


def _header(words: str) -> str:
    return f"{words:<90} {'ms a step':>12} {'share':>6} {'calls a step':>13}"


def _line(words: str, spent: float, calls: int, num_steps: int, total: float) -> str:
    milliseconds = 1e3 * spent / num_steps
    return f"  {words:<88} {milliseconds:>12,.3f} {spent / total:>6.1%} {calls / num_steps:>13,.1f}"
