"""Write the schemas of recipes/ and ds_configs/, the table of model types, and what docs/ generates from them.

Editors complete and check a recipe by them ("$schema": "schema.json" is its first line); load_recipe and
load_ds_config check by the same files, without importing either library. The page shows the same keys to readers.

    python recipes/generate_schema.py            write the files
    python recipes/generate_schema.py --check    exit 1 if a file on disk is stale
"""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "recipes")]

from schema_generator.ds_config import ds_config_schema  # noqa: E402
from schema_generator.from_types import described, first_sentence, object_schema, type_schema  # noqa: E402
from schema_generator.keys_page import keys_page  # noqa: E402
from schema_generator.layouts_page import with_tables  # noqa: E402
from schema_generator.model_types import other_model_types, properties_of_type  # noqa: E402
from schema_generator.types_page import types_page  # noqa: E402

from pretraining.data.quality.chain import filters_schema  # noqa: E402
from pretraining.recipe.loading import sections_schema  # noqa: E402
from pretraining.recipe.recipe import TOP_LEVEL  # noqa: E402
from pretraining.recipe.sections import Weights  # noqa: E402
from pretraining.recipe.training import PIECEWISE, TRAINING_KEYS  # noqa: E402

DRAFT = "https://json-schema.org/draft/2020-12/schema"

# Configuration keys without which a shape is not stated, per model type.
SHAPE_KEYS = {
    "gpt2": ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head"],
    "llama": ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
}
SHAPE_KEYS["llama"].append("max_position_embeddings")
SHAPE_KEYS["qwen3"] = SHAPE_KEYS["llama"]
SHAPE_KEYS["mixtral"] = [*SHAPE_KEYS["llama"], "num_local_experts", "num_experts_per_tok"]
SHAPE_KEYS["qwen3_moe"] = [
    *SHAPE_KEYS["llama"],
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
]

# Values outside these bounds fail late or train nothing.
POSITIVE, NOT_NEGATIVE = {"exclusiveMinimum": 0}, {"minimum": 0}
SEED = {"minimum": 0, "maximum": 2**32 - 1}  # what numpy takes
TRAINING_BOUNDS = {
    "seed": SEED,
    "data_seed": SEED,
    "per_device_train_batch_size": {"minimum": 1, "maximum": 2**20},
    "per_device_eval_batch_size": {"minimum": 1, "maximum": 2**20},
    "learning_rate": POSITIVE,
    "logging_steps": POSITIVE,
    "save_steps": POSITIVE,
    "eval_steps": POSITIVE,
    "warmup_steps": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "dataloader_num_workers": {"minimum": 0, "maximum": 1024},
    # torch takes no int beside a float
    "adam_beta1": {"format": "float", "minimum": 0, "exclusiveMaximum": 1},
    "adam_beta2": {"format": "float", "minimum": 0, "exclusiveMaximum": 1},
    "adam_epsilon": POSITIVE,
    "eval_delay": NOT_NEGATIVE,
    "torch_empty_cache_steps": {"minimum": 1},
    "dataloader_prefetch_factor": {"minimum": 1, "maximum": 1024},
    "ddp_bucket_cap_mb": {"minimum": 1},
    "neftune_noise_alpha": POSITIVE,
}


def training_schema() -> dict:
    """Every TrainingArguments field but those that TRAINING_KEYS gives to another owner."""
    from transformers import TrainingArguments
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from pretraining.training.trackers import OPERATIONS

    fields = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    gone = set(TRAINING_KEYS) - set(fields) - {"warmup_ratio"}  # which every older script has
    if gone:
        raise SystemExit(f"TRAINING_KEYS names fields that TrainingArguments lacks: {sorted(gone)}")
    properties = {}
    for name, field in fields.items():
        if name not in TRAINING_KEYS:
            choices = field.metadata.get("choices")
            schema = {"enum": list(choices)} if choices else type_schema(field.type)
            if choices and field.default is None:
                schema["enum"].append(None)
            properties[name] = described(schema, first_sentence(field.metadata.get("help")), field.default)
    for name, bounds in TRAINING_BOUNDS.items():
        properties[name] |= bounds
    properties["save_strategy"]["enum"].remove("best")  # it needs a key which a recipe may not hold
    # an extension may define another one; `check_schedule` says what is wrong with any other name
    schedules = properties["lr_scheduler_type"].pop("enum")
    properties["lr_scheduler_type"]["anyOf"] = [{"enum": [*schedules, PIECEWISE]}, {"type": "string"}]
    # `debug` and `report_to` take one name, or a list of them
    debug = properties["debug"]
    events = debug.pop("items")["enum"]
    del debug["type"]
    debug["anyOf"] = [{"type": "array", "items": {"enum": events}}, {"enum": ["", *events]}]
    trackers, report = sorted([*INTEGRATION_TO_CALLBACK, *OPERATIONS]), properties["report_to"]
    report["anyOf"] = [{"type": "array", "items": {"enum": trackers}}, {"enum": ["none", *trackers]}]
    del report["type"], report["items"]
    # one project for all trackers: `pretraining.training.trackers` gives it to those that do not read this key
    project = {"description": "The project of every tracker of `report_to`.", "default": "pretraining"}
    properties["project"] |= project
    what = "TrainingArguments' keyword arguments, verbatim."
    return object_schema(properties, ["per_device_train_batch_size", "learning_rate"], description=what)


def model_schema(model_type: str) -> dict:
    """Every keyword of one model type's configuration class that shapes a causal language model."""
    from transformers import AutoConfig

    # in the layout of transformers' docstrings
    layout = re.compile(r"^ {4}(\w+) \(.*?\):\n((?: {8}.*\n?)+)", re.MULTILINE)
    described_keys = layout.findall(AutoConfig.for_model(model_type).__doc__ or "")
    documented = {name: first_sentence(text) for name, text in described_keys}
    properties = properties_of_type(model_type, SHAPE_KEYS[model_type], documented)
    properties.update(implementation_keys(properties))
    properties.update(Weights.model_keys())
    return object_schema(properties, ["model_type", *SHAPE_KEYS[model_type]])


def implementation_keys(properties: dict) -> dict:
    """Keywords that the classes read without declaring them as fields."""
    text = {"type": ["string", "null"], "default": None}
    keys = {"attn_implementation": {**text, "description": "Attention: sdpa, eager, flash_attention_2, ..."}}
    if "num_experts_per_tok" in properties:
        keys["experts_implementation"] = {
            "enum": [None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe"],
            "default": None,
            "description": "How experts are computed; null: grouped_mm.",
        }
        # qwen3_moe's class reads it without declaring it, and takes no null
        head = properties.get("head_dim", {"type": "integer", "minimum": 1, "default": None})
        keys["head_dim"] = {**head, "description": "Size of one head; left out: an equal share."}
    return keys


def recipe_schema() -> dict:
    """The recipe's schema: our sections from their classes, the libraries' from theirs."""
    ours = sections_schema(described=True)
    ours["data"]["properties"]["filters"] = filters_schema(described=True)
    model_types, others = list(SHAPE_KEYS), other_model_types(list(SHAPE_KEYS))["types"]
    model = {
        "type": "object",
        "description": "model_type, then that configuration class's keyword arguments, verbatim, or from, where they "
        "are; revision, initial_weights, frozen and keep_in_fp32 are ours too.",
        # Any other string is told by model_types.py what is wrong with it.
        "properties": {
            "model_type": {"anyOf": [{"enum": [*model_types, *others]}, {"type": "string"}]},
            **Weights.model_keys(),
        },
        "allOf": [
            # a shape that is read elsewhere has its type from there
            {"if": {"properties": {"from": {"const": None}}}, "then": {"required": ["model_type"]}},
            *(
                {
                    "if": {"properties": {"model_type": {"const": name}}, "required": ["model_type"]},
                    "then": {"$ref": f"#/$defs/{name}"},
                }
                for name in model_types
            ),
        ],
    }
    sections = {**TOP_LEVEL, "model": model, "training": training_schema(), **ours}
    return {
        "title": "What to train: a pretraining recipe",
        **object_schema(sections, ["description", "model", "data", "budget", "training"]),
        "$defs": {name: model_schema(name) for name in model_types},
    }


def variant_schema(recipe: dict) -> dict:
    """The schema of a file that names a base: the recipe's keys by reference, none of which it must hold itself.

    Only for editors: `load_recipe` checks what such a file and its base are together.
    """
    properties = {}
    for name, section in recipe["properties"].items():
        reference = f"../schema.json#/properties/{name}"
        properties[name] = {"$ref": reference}
        if name == "model":  # one that names its type is complete, as in any recipe
            properties[name] = {"if": {"required": ["model_type"]}, "then": {"$ref": reference}}
        elif "required" in section:
            inner = {key: {"$ref": f"{reference}/properties/{key}"} for key in section["properties"]}
            properties[name] = object_schema(inner)
    return {"title": "A variant of a recipe", **object_schema(properties, ["base", "description"])}


def one_line_each(sections: dict[str, dict]) -> str:
    """JSON of two levels, an entry a line: what changes with an upgrade of transformers shows type by type."""
    blocks = []
    for name, entries in sections.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
        blocks.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is stale")
    check = parser.parse_args().check
    schemas = {"recipes/schema.json": recipe_schema(), "ds_configs/schema.json": ds_config_schema()}
    schemas["recipes/features/schema.json"] = variant_schema(schemas["recipes/schema.json"])
    texts = {name: json.dumps({"$schema": DRAFT, **schema}, indent=1) for name, schema in schemas.items()}
    texts["pretraining/recipe/model_types.json"] = one_line_each(other_model_types(list(SHAPE_KEYS)))
    texts["docs/model_types.md"] = types_page()
    texts["docs/recipe_keys.md"] = keys_page(schemas["recipes/schema.json"], REPOSITORY / "recipes")
    layouts = REPOSITORY / "docs" / "layouts.md"
    texts["docs/layouts.md"] = with_tables(layouts.read_text(encoding="utf-8")).rstrip("\n")
    stale = []
    for name, text in texts.items():
        path, text = REPOSITORY / name, text + "\n"
        if not path.is_file() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    print(f"{'stale' if check else 'written'}: {', '.join(stale)}" if stale else "up to date")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
