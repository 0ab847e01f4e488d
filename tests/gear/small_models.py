"""A small model section of any type of transformers: two layers of width 32."""

import re

from pretraining.recipe.model import EXPERTS, LOGIT_CAP, known_types

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"max_position_embeddings": 32, "intermediate_size": 48, "num_key_value_heads": 2}
SMALL |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS = {"head_dim": 8, "rotary_dim": 8, "pad_token_id": 0}
LATENT = {
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}
LATENT |= {"num_key_value_heads": 4, "pad_token_id": 0, "n_group": 1, "topk_group": 1}
OWN = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "zaya": {"num_experts_per_tok": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
}
"""Keys that must fit the shape and have no common name."""
MIXTURES = {
    "beam": {"n_group": 1, "topk_group": 1},
}
"""The same, of four layers."""


def measurable(name: str, entry: dict | None = None) -> dict:
    """A small model section in which nothing is random, and windows, caps and scales are felt; logits have no cap."""
    entry = entry or known_types()[name]
    properties = entry["properties"]
    model = small(name, entry, num_hidden_layers=4 if any(key in properties for key in EXPERTS) else 2)
    if "first_k_dense_replace" in properties:
        model["first_k_dense_replace"] = 1  # and experts in the other layers
    model |= MIXTURES.get(name, {})
    for key, schema in properties.items():
        if re.fullmatch(r".*(dropout|pdrop|dropout_prob|_drop|layerdrop)", key):
            model[key] = 0.0
        if "softcap" in key:
            model[key] = 2.0
        is_number = isinstance(schema.get("default"), float)
        if is_number and re.fullmatch(r".*(multiplier|_scaling|logit_scale)", key):
            model[key] = 0.5
    if "null" in properties.get(LOGIT_CAP, {}).get("type", ()):
        model[LOGIT_CAP] = None
    return model | ({"sliding_window": 6} if "sliding_window" in properties else {})


def small(name: str, entry: dict, **sizes: int) -> dict:
    """A model section of this type. entry: its "names" and "properties" (recipe/model_types.json)."""
    wanted = {**SMALL, **sizes}
    keys = {key: entry["names"].get(key, key) for key in wanted}
    shape = {keys[key]: value for key, value in wanted.items() if keys[key] in entry["properties"]}
    fitting = LATENT if "qk_rope_head_dim" in entry["properties"] else OTHERS
    shape |= {key: value for key, value in fitting.items() if key in entry["properties"]}
    if "unpadded_vocab_size" in entry["properties"]:
        shape["unpadded_vocab_size"] = shape["vocab_size"]
    return {"model_type": name, **shape, **OWN.get(name, {})}
