"""The constants of planning: the JSON files of tables/, which a user may edit, each entry with its source."""

from functools import cache
from pathlib import Path
from typing import Any

from pretraining.errors import UserError
from pretraining.outside.schema import check, display_path, problem, read_json

TABLES = Path(__file__).parent / "tables"
NOTES = "about|source|looked_up|note"
"""Keys that any object of a table may have, for its readers; code reads one only if the table's shape names it."""
ANY = "..."
"""Marks, in a table's shape, every key that the shape does not name."""
NUMBER = {"type": "number"}
POSITIVE = {"type": "number", "exclusiveMinimum": 0}
NOT_NEGATIVE = {"type": "number", "minimum": 0}
SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
FRACTION = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "array", "items": {"type": "string"}}
NUMBERS = {"type": "array", "items": POSITIVE, "minItems": 2}


def _value(kind: dict) -> dict:
    return {"value": kind}


def _layers(*widths: str) -> dict:
    """Return the shape of one model type's factors, by the widths that `throughput.layer_widths` gives it."""
    # fitted factors, which may be negative
    moved = dict.fromkeys(widths, NUMBER)
    # what is recomputed of a layer whose experts are split; what is outside of layers is the same
    more = {"again": moved} if "sent hidden" in widths else {"outside": POSITIVE}
    mode = {"forward": moved, "backward": moved, **more}
    return {"eager": mode, "compiled": mode}


def _loss(*names: str) -> dict:
    return dict.fromkeys(("eager", "compiled"), dict.fromkeys(names, NOT_NEGATIVE))


# the names of `throughput.layer_widths`
_DENSE = ("hidden", "queries", "keys", "inner")
_MIXTURE = ("hidden", "queries", "keys", "routed hidden", "routed inner", "routed", "expert weights")
_SPLIT = (*_MIXTURE[:5], "sent hidden", "sent choices")
# a missing one counts as 0 (`throughput._layer_bytes`)
_PASSES = {"forward?": NOT_NEGATIVE, "backward?": NOT_NEGATIVE}
_ENGINE = dict.fromkeys(("micro-batch", "step", "step of its share"), NOT_NEGATIVE)
_OF_PASS = dict.fromkeys(("step", "micro-batch", "layer"), NOT_NEGATIVE)
_LAUNCH = {"eager": _OF_PASS, "compiled": _OF_PASS}
_FIT = {"E": POSITIVE, "A": POSITIVE, "B": POSITIVE, "alpha": POSITIVE, "beta": POSITIVE, "source": TEXT}

_OFFER = dict.fromkeys(("gpu", "provider", "place", "date", "source"), TEXT)
# fields of `gpus.Gpu`
_NUMBERS = "memory_bytes memory_bandwidth_bytes_per_second link_bytes_per_second pcie_bytes_per_second"
_GPU: dict[str, Any] = dict.fromkeys(_NUMBERS.split(), POSITIVE)
_GPU |= dict.fromkeys(("network_bits_per_second", "watts", "gpus_per_node"), POSITIVE)
_GPU |= {"dense_peak_tflops": {ANY: POSITIVE}, **dict.fromkeys(("architecture?", "link?"), TEXT)}
_GPU |= dict.fromkeys(("aliases?", "assumed?"), TEXTS)
# by the kind of GPU; `*` is for those that have no entry
_SHARES = {"*": _value(SHARE), ANY: _value(SHARE)}
_ASSUMED = ("cuda_context_bytes", "nccl_bytes", "fragmentation", "processor_bytes", "host_process_bytes")

SHAPES: dict[str, Any] = {
    "cuda": {ANY: {"least_driver": POSITIVE, "least_capability": POSITIVE}},
    "gpus": {"gpus": {ANY: _GPU}},
    "kernels": {
        "layers": {
            "gpt2": _layers("hidden", "inner"),
            **dict.fromkeys(("llama", "qwen3"), _layers(*_DENSE)),
            **dict.fromkeys(("mixtral", "qwen3_moe"), _layers(*_MIXTURE)),
            **dict.fromkeys(("mixtral split", "qwen3_moe split"), _layers(*_SPLIT)),
        },
        "activations": {ANY: {"eager?": _PASSES, "compiled?": _PASSES}},
        "loss": {
            "fused": _loss("logit", "hidden", "head", "head a chunk"),
            **dict.fromkeys(("chunked", "plain"), _loss("logit")),
        },
        # ZeRO stages, as JSON keys
        "engines": dict.fromkeys("0123", _ENGINE),
    },
    "memory": {
        **dict.fromkeys(_ASSUMED, _value(NOT_NEGATIVE)),
        **dict.fromkeys(("host_bandwidth_bytes_per_second", "nvme_bytes_per_second"), _value(POSITIVE)),
    },
    "prices": {"prices": [{**_OFFER, "dollars_per_gpu_hour": POSITIVE}]},
    "rates": {
        "mfu": {"*": {"value": SHARE, "source": TEXT}, ANY: {"value": SHARE, "source": TEXT}},
        "sustained": dict.fromkeys(("products", "attention", "memory"), _SHARES),
        "expected": {
            "products": {"widths": NUMBERS, "value": NUMBERS},
            "attention": {"lengths": NUMBERS, "value": [{"head_size": POSITIVE, "value": NUMBERS}]},
            "memory": _value(SHARE),
            "gaps": _value(FRACTION),
        },
        "kernel_efficiency": _value(SHARE),
        "launch_seconds": _value(dict.fromkeys("0123", _LAUNCH)),
        **dict.fromkeys(("power_usage_effectiveness", "gpu_hours_between_failures"), _value(POSITIVE)),
        "disk_bytes_per_second": _value(POSITIVE),
    },
    "scaling_laws": {
        "fitted_on": {"parameters": NUMBERS, "tokens": NUMBERS, "source": TEXT},
        # besiroglu is named because the default approach needs it
        "parametric": {"besiroglu": _FIT, ANY: _FIT},
        "frontiers": {ANY: {"source": TEXT, "parameters": NUMBERS, "flops": NUMBERS, "tokens?": NUMBERS}},
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
            "rows": [{"parameters": POSITIVE, "learning_rate": POSITIVE, "batch_tokens": POSITIVE}],
            "source": TEXT,
        },
    },
}
"""Table -> the keys that plans read in it (one that ends in ? may be left out), and the values they must have."""


@cache
def table(name: str) -> dict:
    """Read the file tables/<name>.json and check it against its shape; `UserError` if it is missing or does not fit."""
    path = TABLES / f"{name}.json"
    values, where = read_json(path), display_path(path)
    try:
        check(values, _schema(SHAPES[name]), where)
    except UserError as error:
        raise UserError(f"{error}; mend it, or restore the file") from None
    if name == "scaling_laws":
        # a shape describes one value at a time and cannot compare two
        for key in ("parameters", "tokens"):
            low, high = values["fitted_on"][key][:2]
            if low > high:
                what = f"{low:g} is above {high:g}; write the smaller first"
                raise problem(where, f"fitted_on.{key}", what)
        for approach, rows in values["frontiers"].items():
            if len(rows["parameters"]) != len(rows["flops"]):
                what = "parameters and flops differ in length; pair them"
                raise problem(where, f"frontiers.{approach}", what)
            for key in ("parameters", "flops"):
                # a power law is fitted through them
                if len(set(rows[key])) < 2:
                    what = "are all the same; write different ones"
                    raise problem(where, f"frontiers.{approach}.{key}", what)
    return values


def _schema(shape: Any) -> dict:
    """Write a table's shape as the JSON Schema that `schema.check` takes."""
    if isinstance(shape, list):
        return {"type": "array", "items": _schema(shape[0]), "minItems": 1}
    if "type" in shape:
        return shape
    properties = {name.removesuffix("?"): _schema(inner) for name, inner in shape.items() if name != ANY}
    required = [name for name in properties if name in shape]
    others = _schema(shape[ANY]) if ANY in shape else False
    schema = {"type": "object", "required": required, "properties": properties}
    return {**schema, "patternProperties": {NOTES: {}}, "additionalProperties": others}
