"""Which model types a recipe may name, what their keys are called, and the keys of those that no formula counts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from pretraining.errors import did_you_mean, nearest_names
from pretraining.schema import check, problem

EXACT = ("gpt2", "llama", "mixtral", "qwen3", "qwen3_moe")
"""Counted by formula in planning/sizes.py; what holds for them is tested for each."""
FILE = Path(__file__).with_suffix(".json")
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}


def is_exact(model: dict) -> bool:
    """Whether the model section is of a type that planning counts by formula."""
    return model["model_type"] in EXACT


@cache
def other_model_types(path: Path = FILE) -> dict:
    """pretraining/model_types.json, generated from the installed transformers: {"types": ..., "refused": ...}."""
    return json.loads(path.read_text(encoding="utf-8"))


def own_key(model: dict, name: str) -> str:
    """What the model's type calls `hidden_size`, `num_hidden_layers` and so on."""
    if model["model_type"] == "gpt2":
        return GPT2_NAMES.get(name, name)
    if is_exact(model):
        return name
    return other_model_types()["types"][model["model_type"]]["names"].get(name, name)


def value_of(model: dict, name: str) -> Any:
    """The section's value for a common name; None where it has none."""
    return model.get(own_key(model, name))


def refuse_names_of_others(model: object, where: str) -> None:
    """Raise `UserError` for a key that another type of model has, with this type's own name for the same.

    `n_layer` of a Llama is `num_hidden_layers`. A section without a known type is left to the checks that follow.
    """
    if not isinstance(model, dict) or model.get("model_type") not in (*EXACT, *other_model_types()["types"]):
        return
    common = {name: key for key, name in GPT2_NAMES.items()}
    for key in model if is_exact(model) else model.keys() - other_properties(model).keys():
        if (own := own_key(model, common.get(key, key))) != key:
            raise problem(where, f"model.{key}", f"unknown key{did_you_mean([own])}")


def other_properties(model: dict) -> dict:
    """Key -> schema of a section whose type is not among the exact ones."""
    return other_model_types()["types"][model["model_type"]]["properties"]


def checked_model(recipe: dict, where: str, root: dict) -> dict:
    """The recipe's model section, its type known and every key one of its class's.

    Raises:
        UserError: an unknown type or key, with the nearest; a type that does not train here, with the reason; a
            type that documents cannot be kept apart in.
    """
    model = recipe["model"]
    if is_exact(model):
        return model  # the recipe's own schema has checked it
    _check_type(model["model_type"], where)
    _refuse_masking(model, recipe["data"], where)
    # Its configuration class would take any key without a word.
    entry = other_model_types()["types"][model["model_type"]]
    schema = {"type": "object", "properties": entry["properties"], "required": entry["required"]}
    return check(model, {**schema, "additionalProperties": False}, where, "model", root)


def _check_type(model_type: str, where: str) -> None:
    found = other_model_types()
    if model_type in found["refused"]:
        reason = found["refused"][model_type]
        raise problem(where, "model.model_type", f"is {model_type!r}, which does not train here: {reason}")
    known = [*EXACT, *found["types"]]
    if model_type not in known:
        near = (
            nearest_names(model_type, known) or f"; known are {', '.join(EXACT)} and others of transformers"
        )
        raise problem(where, "model.model_type", f"is {model_type!r}, which is no model type{near}")


def _refuse_masking(model: dict, data: dict, where: str) -> None:
    """Documents are kept apart only where that is known to be exact."""
    if data["document_masking"]:
        raise problem(
            where,
            "data.document_masking",
            f"is tested for {', '.join(EXACT)} alone, not for {model['model_type']}; set it to false",
        )
