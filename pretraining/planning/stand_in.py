"""The shape that activations and layouts are reckoned with: a model's own, or that of a known family as wide as it."""

from pretraining.planning.counted import count_model
from pretraining.recipe import model_with_defaults
from pretraining.recipe.model import is_exact, value_of

GATED = 2.5
"""Matrices of width x inner in a feed-forward layer above which it is taken for a gated one (three, else two)."""


def shape_of(model: dict) -> dict:
    """The model section with its class's defaults; of a type that no formula describes, that of `stand_in`."""
    return model_with_defaults(model) if is_exact(model) else stand_in(model)


def family_of(model: dict) -> str:
    """The model type whose activations are reckoned with."""
    return model["model_type"] if is_exact(model) else stand_in(model)["model_type"]


def stand_in(model: dict) -> dict:
    """A gpt2, llama, qwen3 or mixtral with the model's width, layers, heads, feed-forward part and vocabulary."""
    full, facts = model_with_defaults(model), count_model(model)
    width, layers = value_of(full, "hidden_size"), facts.layers
    if facts.experts and facts.chosen_experts:
        expert = facts.of_part("experts") // (3 * width * facts.experts * _sparse_layers(facts))
        return {**_grouped(full, width, layers, expert), **_mixture(facts)}
    matrices = facts.of_part("mlp", "experts") / layers / width
    inner = _inner(full, matrices)
    if matrices / inner > GATED:
        return _grouped(full, width, layers, inner, "qwen3" if facts.normed_heads else "llama")
    own = {
        "n_embd": width,
        "n_layer": layers,
        "n_head": value_of(full, "num_attention_heads"),
        "n_inner": inner,
    }
    return model_with_defaults({"model_type": "gpt2", **own, **_outside(full, "n_positions")})


def _inner(full: dict, matrices: float) -> int:
    """Inner width: the section's own, where it says so; else that of two matrices."""
    stated = value_of(full, "intermediate_size")
    return stated if isinstance(stated, int) and stated else max(1, round(matrices / 2))


def _grouped(full: dict, width: int, layers: int, inner: int, family: str = "llama") -> dict:
    heads = value_of(full, "num_attention_heads")
    own = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": max(1, inner)}
    own |= {
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(value_of(full, "num_key_value_heads")) or heads,
    }
    own |= {"head_dim": _whole(value_of(full, "head_dim")) or width // heads}
    own |= _outside(full, "max_position_embeddings")
    return model_with_defaults({"model_type": family, **own})


def _outside(full: dict, positions: str) -> dict:
    kept = {"vocab_size": full["vocab_size"], positions: value_of(full, "max_position_embeddings")}
    named = full.get("attn_implementation")
    return {
        **kept,
        "attn_implementation": named,
        "tie_word_embeddings": bool(full.get("tie_word_embeddings")),
    }


def _mixture(facts) -> dict:
    return {
        "model_type": "mixtral",
        "num_local_experts": facts.experts,
        "num_experts_per_tok": facts.chosen_experts,
    }


def _sparse_layers(facts) -> int:
    return len({layer for part, _, layer, _ in facts.tensors if part == "experts"}) or 1


def _whole(value) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
