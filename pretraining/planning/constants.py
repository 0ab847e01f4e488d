"""The constants of planning: the JSON files of tables/, which a user may edit, each entry with its source."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from pretraining.errors import UserError, nearest
from pretraining.schema import display_path, read_json

TABLES = Path(__file__).parent / "tables"
NOTES = ("about", "source", "looked_up", "note")
"""Keys that any object of a table may have, for its readers; code reads one only if the table's shape names it."""
ANY = object()
"""Marks, in a table's shape, every key that the shape does not name."""


@dataclass(frozen=True)
class Kind:
    """The kind of value that a key must have."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Entries:
    """A list of objects of one shape, at least one of them."""

    row: dict


@dataclass(frozen=True)
class Optional:
    """A key that may be left out."""

    shape: Any


def _is_number(value: Any) -> bool:
    # bool is a subclass of int
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_positive(values: Any) -> bool:
    return isinstance(values, list) and all(_is_number(value) and value > 0 for value in values)


NUMBER = Kind("a number", _is_number)
POSITIVE = Kind("a positive number", lambda value: _is_number(value) and value > 0)
NOT_NEGATIVE = Kind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
SHARE = Kind("a number above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1)
FRACTION = Kind("a number above 0 and below 1", lambda value: _is_number(value) and 0 < value < 1)
TEXT = Kind("a text", lambda value: isinstance(value, str) and bool(value))
TEXTS = Kind(
    "a list of texts", lambda values: isinstance(values, list) and all(isinstance(v, str) for v in values)
)
RANGE = Kind(
    "two positive numbers, the smaller first",
    lambda values: _are_positive(values) and len(values) == 2 and values[0] <= values[1],
)
# different ones: a power law is fitted through them
CURVE = Kind(
    "a list of at least two different positive numbers",
    lambda values: _are_positive(values) and len(set(values)) > 1,
)


def _value(kind: Kind) -> dict:
    return {"value": kind}


def _layers(*widths: str) -> dict:
    """Return the shape of one model type's factors, by the widths that `throughput.layer_widths` gives it."""
    # fitted factors, which may be negative
    moved = dict.fromkeys(widths, NUMBER)
    mode = {"forward": moved, "backward": moved, "outside": POSITIVE}
    return {"eager": mode, "compiled": mode}


def _loss(*names: str) -> dict:
    mode = dict.fromkeys(names, NOT_NEGATIVE)
    return {"eager": mode, "compiled": mode}


# the names of `throughput.layer_widths`
_DENSE = ("hidden", "queries", "keys", "inner")
_MIXTURE = ("hidden", "queries", "keys", "routed hidden", "routed inner", "routed", "expert weights")
# a missing one counts as 0 (`throughput._layer_bytes`)
_PASSES = {"forward": Optional(NOT_NEGATIVE), "backward": Optional(NOT_NEGATIVE)}
_ENGINE = dict.fromkeys(("micro-batch", "step", "step of its share"), NOT_NEGATIVE)
_FIT = {"E": POSITIVE, "A": POSITIVE, "B": POSITIVE, "alpha": POSITIVE, "beta": POSITIVE, "source": TEXT}

SHAPES: dict[str, dict] = {
    "cuda": {ANY: {"least_driver": POSITIVE, "least_capability": POSITIVE}},
    "gpus": {
        "gpus": {
            ANY: {
                "dense_peak_tflops": {ANY: POSITIVE},
                "memory_bytes": POSITIVE,
                "memory_bandwidth_bytes_per_second": POSITIVE,
                "link_bytes_per_second": POSITIVE,
                "pcie_bytes_per_second": POSITIVE,
                "network_bits_per_second": POSITIVE,
                "watts": POSITIVE,
                "gpus_per_node": POSITIVE,
                "aliases": Optional(TEXTS),
                "architecture": Optional(TEXT),
                "link": Optional(TEXT),
                "assumed": Optional(TEXTS),
            }
        }
    },
    "kernels": {
        "layers": {
            "gpt2": _layers("hidden", "inner"),
            "llama": _layers(*_DENSE),
            "qwen3": _layers(*_DENSE),
            "mixtral": _layers(*_MIXTURE),
            "qwen3_moe": _layers(*_MIXTURE),
        },
        "activations": {ANY: {"eager": Optional(_PASSES), "compiled": Optional(_PASSES)}},
        "loss": {
            "fused": _loss("logit", "hidden", "head", "head a chunk"),
            "chunked": _loss("logit"),
            "plain": _loss("logit"),
        },
        # ZeRO stages, as JSON keys
        "engines": dict.fromkeys("0123", _ENGINE),
    },
    "memory": {
        "cuda_context_bytes": _value(NOT_NEGATIVE),
        "nccl_bytes": _value(NOT_NEGATIVE),
        "fragmentation": _value(NOT_NEGATIVE),
        "processor_bytes": _value(NOT_NEGATIVE),
        "host_process_bytes": _value(NOT_NEGATIVE),
        "host_bandwidth_bytes_per_second": _value(POSITIVE),
        "nvme_bytes_per_second": _value(POSITIVE),
    },
    "prices": {
        "prices": Entries(
            {
                "gpu": TEXT,
                "provider": TEXT,
                "place": TEXT,
                "dollars_per_gpu_hour": POSITIVE,
                "date": TEXT,
                "source": TEXT,
            }
        )
    },
    "rates": {
        "mfu": {"*": {"value": SHARE, "source": TEXT}, ANY: {"value": SHARE, "source": TEXT}},
        # by the kind of GPU; `*` is for those that have no entry
        "sustained": {
            name: {"*": _value(SHARE), ANY: _value(SHARE)} for name in ("products", "attention", "memory")
        },
        "kernel_efficiency": _value(SHARE),
        "launch_seconds_per_layer": _value(NOT_NEGATIVE),
        "power_usage_effectiveness": _value(POSITIVE),
        "gpu_hours_between_failures": _value(POSITIVE),
        "disk_bytes_per_second": _value(POSITIVE),
    },
    "scaling_laws": {
        "fitted_on": {"parameters": RANGE, "tokens": RANGE, "source": TEXT},
        # besiroglu is named because the default approach needs it
        "parametric": {"besiroglu": _FIT, ANY: _FIT},
        "frontiers": {ANY: {"source": TEXT, "parameters": CURVE, "flops": CURVE, "tokens": Optional(CURVE)}},
        "kaplan": {
            "parameters": {"scale": POSITIVE, "exponent": FRACTION},
            "critical_batch": {"scale_tokens": POSITIVE, "exponent": POSITIVE},
            "source": TEXT,
        },
        "step_law": {
            "learning_rate": {"scale": POSITIVE, "parameters": NUMBER, "tokens": NUMBER},
            "batch_tokens": {"scale": POSITIVE, "tokens": NUMBER},
            "source": TEXT,
        },
        "deepseek": {
            "learning_rate": {"scale": POSITIVE, "exponent": NUMBER},
            "batch_tokens": {"scale": POSITIVE, "exponent": NUMBER},
            "source": TEXT,
        },
        "zhang": {"exponent": NUMBER},
        "gpt3": {
            "rows": Entries({"parameters": POSITIVE, "learning_rate": POSITIVE, "batch_tokens": POSITIVE}),
            "source": TEXT,
        },
    },
}
"""Table -> the keys that plans read in it, and the values they must have."""


@cache
def table(name: str) -> dict:
    """Read the file tables/<name>.json and check it against its shape.

    Raises:
        UserError: the file is missing or is not one JSON object, a key is missing, or a value is of another kind.
    """
    path = TABLES / f"{name}.json"
    values = read_json(path)
    _check(values, SHAPES[name], display_path(path), "")
    # a shape describes one value at a time and cannot compare two lists
    for approach, rows in values["frontiers"].items() if name == "scaling_laws" else ():
        if len(rows["parameters"]) != len(rows["flops"]):
            what = "parameters and flops differ in length; pair them"
            raise UserError(f"{display_path(path)}: frontiers.{approach}: {what}")
    return values


def _check(value: Any, shape: Any, file: str, key: str) -> None:
    if isinstance(shape, Optional):
        shape = shape.shape
    if isinstance(shape, Kind):
        if not shape.holds(value):
            raise UserError(f"{file}: {key} is {shown(value)}; write {shape.words}")
    elif isinstance(shape, Entries):
        if not isinstance(value, list) or not value:
            raise UserError(f"{file}: {key} is {shown(value)}; write a list of objects")
        for place, row in enumerate(value):
            _check(row, shape.row, file, f"{key}.{place}")
    elif isinstance(value, dict):
        _check_object(value, shape, file, key)
    else:
        raise UserError(f"{file}: {key} is {shown(value)}; write an object")


def _check_object(value: dict, shape: dict, file: str, key: str) -> None:
    if not value and ANY in shape:
        raise UserError(
            f"{file}: {key or 'the table'} is empty; write at least one entry, or restore the file"
        )
    dotted = f"{key}." if key else ""
    for name, inner in shape.items():
        if name is not ANY and name not in value and not isinstance(inner, Optional):
            # only a plain value can be described in words
            words = inner.words if isinstance(inner, Kind) else "it as it was"
            raise UserError(f"{file}: {dotted}{name} is missing; write {words}, or restore the file")
    for name, inner in value.items():
        if name in shape:
            _check(inner, shape[name], file, f"{dotted}{name}")
        # at the top of a table a note is a note, even if the table takes any key
        elif ANY in shape and not (name in NOTES and not key):
            _check(inner, shape[ANY], file, f"{dotted}{name}")
        elif name not in NOTES:
            known = [word for word in shape if word is not ANY]
            raise UserError(f"{file}: {dotted}{name} is no key of this table{nearest(name, known)}")
