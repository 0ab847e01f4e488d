"""Model types beyond those that planning counts by formula: the causal language models of transformers that train here.

pretraining/model_types.json keeps what `load_recipe` checks them by: keys with types and defaults, and which key stands
for which property of the shape. benchmarks/model_types.py tries each of them; what failed there is named below.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import cache

from schema_generator.from_types import described, type_schema

from pretraining.recipe.model import OLD_ROPE, with_rope_parameters

SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
"""What a recipe has to state, under these names or those that the class's `attribute_map` gives them."""
OPTIONAL = {
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "num_key_value_heads": ("num_kv_heads",),
    "head_dim": (),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "moe_k"),
    "moe_intermediate_size": (),
}
MOST_LAYERS, MOST_OTHERS = 2000, 10**9
POSITIVE_COUNT = {"minimum": 1, "maximum": MOST_OTHERS}
BOUNDS = {
    r".*(dropout|pdrop|layerdrop|dropout_prob|_drop)$": {"minimum": 0, "exclusiveMaximum": 1},
    r".*(eps|epsilon)$": {"exclusiveMinimum": 0},
    r".*(initializer_range|init_std)$": {"exclusiveMinimum": 0, "maximum": 1},
    r".*_token_id$": {"minimum": 0, "maximum": MOST_OTHERS},
    r"(rope_theta|logits_scaling)$": {"exclusiveMinimum": 0},
    r".*(aux_loss_coef|jitter_noise|z_loss_coefficient)$": {"minimum": 0},
    r"n_inner|head_dim|num_key_value_heads|sliding_window|decoder_sparse_step|intermediate_size": POSITIVE_COUNT,
    r".*_head_dim|num_kv_heads|moe_intermediate_size|ffn_dim|ffn_hidden_size|rotary_dim": POSITIVE_COUNT,
    r"(num|n)_(local_|routed_)?experts(_per_tok)?|n_group|topk_group": {"minimum": 0, "maximum": MOST_OTHERS},
}
"""Of keys whose names say what they are: values outside make no model, or one that learns nothing."""
ROPE_BOUNDS = {
    "rope_theta": {"exclusiveMinimum": 0},
    "partial_rotary_factor": {"exclusiveMinimum": 0, "maximum": 1},
    "factor": {"minimum": 1},
    "original_max_position_embeddings": POSITIVE_COUNT,
    "attention_factor": {"exclusiveMinimum": 0},
    "beta_fast": {"exclusiveMinimum": 0},
    "beta_slow": {"exclusiveMinimum": 0},
    "low_freq_factor": {"exclusiveMinimum": 0},
    "high_freq_factor": {"exclusiveMinimum": 0},
}
# Parts that a causal language model does not have, and what was for other programs.
UNUSED = re.compile(r"summary_.*|add_cross_attention|pretraining_tp|is_encoder_decoder|transformers_version")
FOUND = {
    "its logits depend on later tokens": (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod"
    ),
    "some of its parameters get no gradient from text alone": (
        "afmoe axk2 deepseek_v32 deepseek_v4 ernie4_5_moe git glm_moe_dsa hrm_text hy_v4 inkling2_loop_text laguna "
        "phi4_multimodal qwen4_exp_text trocr"
    ),
    "no module of transformers draws its initial weights": "openai-gpt",
    "a small one could not be built and tried": (
        "cohere_compass_text dbrx dots1 dots3_note_text gemma3n_text gemma4_text gemma4_unified_text lfm2_moe "
        "zamba zamba2"
    ),
}
"""Why some types do not train here, as benchmarks/model_types.py found with transformers 5.24."""
REFUSED = {model_type: reason for reason, names in FOUND.items() for model_type in names.split()}


def other_model_types(exact: list[str]) -> dict:
    """{"types": {model type: {"names", "required", "properties"}}, "refused": {model type: reason}, ...}."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types, refused = {}, {}
    for model_type in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(exact)):
        entry = _entry(model_type)
        reason = REFUSED.get(model_type) or (entry if isinstance(entry, str) else None)
        if reason:
            refused[model_type] = reason
        else:
            types[model_type] = entry
    known = [*exact, *types]
    old = {name: True for name in known if _takes_old_rope(name)}
    return {"types": types, "refused": refused, "left_out": left_out(known), "old_rope": old}


def _takes_old_rope(model_type: str) -> bool:
    """Whether the type reads older keys of rotary positions as `with_rope_parameters` does."""
    from transformers import AutoConfig

    for old in ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}):
        try:
            theirs = AutoConfig.for_model(model_type, **deepcopy(old)).rope_parameters
            new = with_rope_parameters(deepcopy(old), OLD_ROPE)
            ours = AutoConfig.for_model(model_type, **new).rope_parameters
        except Exception:  # each class has its own for what it cannot take
            return False
        if not theirs or {key: theirs[key] for key in theirs if key != "type"} != ours:
            return False
    return True


def left_out(model_types: list[str]) -> dict:
    """Keys of a published config.json that a recipe does without -> the value that says nothing; null: any does.

    What every configuration has, what it takes for text generation alone, and what `UNUSED` names.
    """
    from transformers import GenerationConfig
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    classes = [PreTrainedConfig, *(CONFIG_MAPPING[name] for name in model_types)]
    fields = [field for each in classes for field in dataclasses.fields(each)]
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    nothing = [each for each in fields if each.name in inherited or UNUSED.fullmatch(each.name)]
    # `PreTrainedConfig.__post_init__` takes these out of what it is given
    dropped = ["torch_dtype", "name_or_path", "num_labels"]
    dropped += GenerationConfig._get_default_generation_params()
    return dict(sorted({**dict.fromkeys(dropped), **{each.name: each.default for each in nothing}}.items()))


def bounded(key: str, schema: dict) -> dict:
    """`schema` of a configuration class's key, with the limits and choices that the name of the key implies."""
    limits = next((limits for pattern, limits in BOUNDS.items() if re.fullmatch(pattern, key)), {})
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if "integer" in types or "number" in types:
        schema = {**schema, **limits}
    if schema.get("items", {}).get("type") == "integer":
        schema = {**schema, "items": {**schema["items"], **limits}}
    if schema.get("default") in _activations():
        return {**schema, "enum": _activations() + [None] * ("null" in types)}
    if key == "rope_parameters" and "properties" in schema:
        inside = {name: {**each, **ROPE_BOUNDS.get(name, {})} for name, each in schema["properties"].items()}
        schema = {**schema, "properties": inside}
    return schema


@cache
def _activations() -> list[str]:
    """Names of the functions that transformers knows; those with weights of their own are left out."""
    from transformers.activations import ACT2FN

    return sorted(set(ACT2FN) - {"prelu", "xielu"})


def _entry(model_type: str) -> dict | str:
    """Keys and names of a type, or why it cannot be stated as a recipe states models."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    fields = {field.name: field for field in _shaping_fields(model_type)}
    # common name -> the class's own key, where it has one
    names = {}
    for name, others in {**dict.fromkeys(SHAPE, ()), **OPTIONAL}.items():
        candidates = (name, config_class.attribute_map.get(name), *others)
        if key := next((each for each in candidates if each in fields), None):
            names[name] = key
    missing = [name for name in SHAPE if name not in names]
    if "text_config" in fields and missing:
        return "it is made of several models; its language model alone may have a type of its own, as gemma3_text"
    if getattr(config_class, "is_encoder_decoder", False):
        return "it is the decoder of an encoder-decoder model"
    if missing or names["vocab_size"] != "vocab_size":
        return f"its configuration has no {' and no '.join(missing or ['vocab_size'])} of its own"
    required = [names[name] for name in SHAPE]
    properties = properties_of_type(model_type, required)
    properties["attn_implementation"] = {"type": ["string", "null"], "default": None}
    other_names = {name: key for name, key in names.items() if name != key}
    return {"names": other_names, "required": required, "properties": properties}


def properties_of_type(model_type: str, required: Iterable[str], texts: Mapping[str, str] = {}) -> dict:
    """The schema of every keyword of a type's class that shapes its models; texts: descriptions of some."""
    properties = {"model_type": {"const": model_type}}
    for field in _shaping_fields(model_type):
        schema = type_schema(field.type)
        if field.type is float:
            schema["format"] = "float"  # @strict config classes refuse an int there
        schema = described(schema, texts.get(field.name), field.default)
        properties[field.name] = bounded(field.name, schema)
    for name in required:
        # beyond any model: what a slip of the keyboard writes, and no plan can be made of
        properties[name] |= {"minimum": 1, "maximum": MOST_LAYERS if "layer" in name else MOST_OTHERS}
    return properties


def _shaping_fields(model_type: str) -> list[dataclasses.Field]:
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    fields = dataclasses.fields(CONFIG_MAPPING[model_type])
    return [each for each in fields if each.name not in inherited and not UNUSED.fullmatch(each.name)]
