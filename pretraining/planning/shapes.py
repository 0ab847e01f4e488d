"""The shape of a model: its widths, and each of its parameters; by formula, or as counted by building the model.

A type that no formula describes is built on the meta device, in a process of its own. The process takes the seconds
that torch and transformers need to load. The result is kept (runtime/answers.py). It depends on the model section, the
source files that count, and the version of transformers.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pretraining.ds_config import Degrees
from pretraining.errors import UserError
from pretraining.extend import model_extension
from pretraining.outside.schema import display_path
from pretraining.recipe import model_with_defaults
from pretraining.recipe.model import OnceASection, ask_of_model, is_exact, value_of
from pretraining.recipe.optimizer import EMBEDDING, HEAD, HIDDEN, ROUTER, VECTOR
from pretraining.runtime.answers import answered
from pretraining.runtime.installation import PACKAGE

MODULE = "pretraining.model.counting"
SOURCES = [PACKAGE / "model" / "counting.py", PACKAGE / "recipe" / "model.py"]
SOURCES += [PACKAGE / "upstream" / name for name in ("saved_tensors.py", "transformers.py")]
HOW = "counted by building on the meta device"
GATED = 2.5
"""Matrices of width x inner above which a feed-forward layer counts as gated: a gated one has three, others two."""
PARTS = (EMBEDDING, "attention", "mlp", "experts", ROUTER, "norms", HEAD)


@dataclass(frozen=True)
class Tensor:
    """One parameter."""

    numel: int
    kind: str
    """An embedding (a tied head counts as one), the head, a router, a hidden matrix, or a vector (a norm or a bias)."""
    layer: int | None
    """Its layer; None outside the layers."""
    factors: int
    """Sum of the rows and columns of its matrices; for a vector, its elements."""
    name: str = ""
    """What the model calls it."""
    part: str = ""
    """One of PARTS, which name what it does; `attention bias` or `mlp bias` for the bias of a linear layer."""

    @classmethod
    def of_part(cls, part: str, numel: int, layer: int | None, factors: int | None, name: str) -> "Tensor":
        """Return a parameter as model/counting.py lists it; factors: None for a vector."""
        # the biases of all experts are in one tensor of two dimensions
        if factors is None or name.endswith("bias"):
            return cls(numel, VECTOR, layer, factors or numel, name, part)
        return cls(numel, part if part in (EMBEDDING, HEAD, ROUTER) else HIDDEN, layer, factors, name, part)

    @property
    def decays(self) -> bool:
        return self.kind != VECTOR

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class CountedModel:
    """Facts about a model that was built on the meta device."""

    tensors: tuple[Tensor, ...]
    layers: int
    attention_width: int
    tied: bool
    head: int
    """Entries of the output projection, tied or not."""
    normed_heads: bool
    """Whether queries and keys have norms of their own."""
    experts: int
    """Experts of one mixture layer; 0 in a dense model."""
    chosen_experts: int
    kept: dict
    """What a forward pass keeps for the backward pass (model/counting.py, `kept_or_why_not`)."""

    @property
    def estimated(self) -> str | None:
        """Why what a forward pass keeps is an estimate, if it is one."""
        return self.kept["estimated"]


@dataclass(frozen=True)
class Widths:
    """Widths and counts that make up a layer."""

    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    inner: int
    """Inner width of a dense feed-forward layer."""
    layers: int
    experts: int = 0
    """Experts of one mixture layer; 0 in a dense model."""
    chosen_experts: int = 1
    """Experts that a token is given to; 1 in a dense model."""
    expert_inner: int = 0
    """Inner width of one expert; in a dense model, that of the dense layer."""
    gated: bool = True
    """Whether a feed-forward layer has three matrices, and not two."""

    @property
    def queries(self) -> int:
        """Width of all queries; with grouped-query attention the keys are fewer."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.key_value_heads * self.head_size


def ranks_met(experts: int, chosen: int, degree: int) -> float:
    """Return how many ranks a token meets on average, of `degree` ranks with an equal part of the experts each.

    All choices of as many experts are taken as equally likely. A router that prefers some experts sends to fewer ranks.
    """
    if degree == 1 or not experts:
        return 1.0
    return degree * (1 - math.comb(experts - experts // degree, chosen) / math.comb(experts, chosen))


@OnceASection
def widths_of(model: dict) -> Widths:
    """Return the widths in a model section; of a type without a formula, with the help of the built model."""
    full = model_with_defaults(model)
    hidden, heads = value_of(full, "hidden_size"), value_of(full, "num_attention_heads")
    inner = value_of(full, "intermediate_size")
    if full["model_type"] == "gpt2":
        inner = inner or 4 * hidden
        layers = full["n_layer"]
        return Widths(hidden, heads, heads, hidden // heads, inner, layers, expert_inner=inner, gated=False)
    grouped = {"hidden": hidden, "heads": heads}
    grouped["key_value_heads"] = _whole(value_of(full, "num_key_value_heads")) or heads
    grouped["head_size"] = _whole(value_of(full, "head_dim")) or hidden // heads
    if is_exact(model):
        # Mixtral's key, else Qwen3-MoE's
        experts = full.get("num_local_experts") or full.get("num_experts") or 0
        return Widths(
            **grouped,
            inner=inner,
            layers=full["num_hidden_layers"],
            experts=experts,
            chosen_experts=full["num_experts_per_tok"] if experts else 1,
            # only qwen3_moe has dense layers of another width beside its experts
            expert_inner=full.get("moe_intermediate_size") or inner,
        )
    facts = count_model(model)
    numel = numel_by_part(facts.tensors)
    if facts.experts and facts.chosen_experts:
        sparse = {tensor.layer for tensor in facts.tensors if tensor.part == "experts"}
        # a gated expert has three matrices
        expert = max(1, numel["experts"] // (3 * hidden * facts.experts * (len(sparse) or 1)))
        mixture = {"experts": facts.experts, "chosen_experts": facts.chosen_experts}
        return Widths(**grouped, inner=expert, expert_inner=expert, layers=facts.layers, **mixture)
    # gated feed-forward layers have three matrices, others two; no model section says which
    # in units of the hidden width: a layer's number of matrices times its inner width
    matrices = (numel["mlp"] + numel["experts"]) / facts.layers / hidden
    # not all types have an inner width of their own
    inner = _whole(inner) or max(1, round(matrices / 2))
    gated = matrices / inner > GATED
    return Widths(**grouped, inner=inner, expert_inner=inner, layers=facts.layers, gated=gated)


def widths_of_rank(model: dict, degrees: Degrees) -> Widths:
    """Return the widths of the products that one rank computes. The residual stream is as wide on every rank."""
    widths, split = widths_of(model), degrees.tensor
    heads, of_keys = widths.heads // split, max(1, widths.key_value_heads // split)
    return replace(widths, heads=heads, key_value_heads=of_keys, inner=widths.inner // split)


def key_value_copies(widths: Widths, degrees: Degrees) -> int:
    """Return how often keys and values are copied, so that each rank has a head of them after the exchange.

    widths: those of one rank (`widths_of_rank`).
    """
    return max(1, degrees.sequence // widths.key_value_heads)


def rows_of_rank(vocab_size: int, degrees: Degrees) -> int:
    """Return the rows of embedding and head, thus logits of a token, that the fullest rank has."""
    return -(-vocab_size // degrees.tensor)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def is_mixture(shape: dict, layer: int) -> bool:
    """Return whether this layer of a type with a formula is a mixture of experts (as transformers 5.24 chooses)."""
    if shape["model_type"] == "mixtral":
        return True
    if shape["model_type"] != "qwen3_moe" or not shape["num_experts"]:
        return False
    return layer not in (shape["mlp_only_layers"] or []) and (layer + 1) % shape["decoder_sparse_step"] == 0


def family_of(model: dict) -> str:
    """Return the type whose kernels have been counted (tables/kernels.json) that has such layers."""
    if is_exact(model):
        return model["model_type"]
    widths = widths_of(model)
    if widths.experts:
        return "mixtral"
    if not widths.gated:
        return "gpt2"
    return "qwen3" if count_model(model).normed_heads else "llama"


@OnceASection
def count_model(model: dict) -> CountedModel:
    """Count a model section of any type.

    `UserError` if transformers cannot build it, or its weights cannot be drawn alike at every ZeRO stage.
    """
    model_type, section = model["model_type"], json.dumps(model, sort_keys=True)
    extension = model_extension(model_type)
    try:
        library = version("transformers")
    except PackageNotFoundError:
        what = "counting this type needs transformers; pip install -r requirements.txt"
        raise UserError(f"model: {what}") from None
    # another version of the library, of the code that counts, or of the user's file that builds must count again
    sources = (source.read_text(encoding="utf-8") for source in SOURCES)
    depends_on = (library, extension.digest if extension else "", *sources, section)
    count = answered("", depends_on, "tensors", lambda: ask_of_model(MODULE, section))
    if "error" in count:
        if extension:
            raise UserError(f"model: {display_path(extension.path)}: {count['error']}")
        raise UserError(f"model: transformers cannot build this {model_type}: {count['error']}")
    # kept too, so that the next start refuses at once
    if faults := count.pop("faults"):
        what = "does not train here, its initial weights would not be the same at every ZeRO stage"
        raise UserError(f"model.model_type: {model_type} {what}: {faults[0]}")
    count["tensors"] = tuple(Tensor.of_part(*tensor) for tensor in count["tensors"])
    return CountedModel(**count)


@OnceASection
def parameter_tensors(model: dict) -> tuple[Tensor, ...]:
    """Return every parameter of a recipe's model section, as transformers 5.24 orders them (modeling_<type>.py)."""
    if not is_exact(model):
        return count_model(model).tensors
    shape = model_with_defaults(model)
    widths, is_gpt2 = widths_of(shape), shape["model_type"] == "gpt2"
    table = "transformer.wte" if is_gpt2 else "model.embed_tokens"
    tensors = _matrix(EMBEDDING, table, None, shape["vocab_size"], widths.hidden)
    tensors += _gpt2(shape, widths) if is_gpt2 else _llama_like(shape, widths)
    # a tied head is the embedding
    if not shape["tie_word_embeddings"]:
        tensors += _matrix(HEAD, "lm_head", None, widths.hidden, shape["vocab_size"])
    return tuple(tensors)


def _matrix(
    part: str, name: str, layer: int | None, rows: int, columns: int, bias: bool = False
) -> list[Tensor]:
    weight = Tensor.of_part(part, rows * columns, layer, rows + columns, f"{name}.weight")
    if not bias:
        return [weight]
    return [weight, Tensor.of_part(f"{part} bias", columns, layer, None, f"{name}.bias")]


def _norm(name: str, layer: int | None, width: int, bias: bool = False) -> list[Tensor]:
    # the bias is a vector of its own
    parts = ("weight", "bias") if bias else ("weight",)
    return [Tensor.of_part("norms", width, layer, None, f"{name}.{part}") for part in parts]


def _gpt2(shape: dict, widths: Widths) -> list[Tensor]:
    """List GPT-2's (Radford et al. 2019): learned positions, biases everywhere, LayerNorm with bias."""
    width, inner = widths.hidden, widths.inner
    norm, matrix = partial(_norm, bias=True), partial(_matrix, bias=True)
    tensors = _matrix(EMBEDDING, "transformer.wpe", None, shape["n_positions"], width)
    for layer in range(widths.layers):
        at = f"transformer.h.{layer}"
        tensors += norm(f"{at}.ln_1", layer, width)
        # queries, keys and values are one matrix
        tensors += matrix("attention", f"{at}.attn.c_attn", layer, width, 3 * width)
        tensors += matrix("attention", f"{at}.attn.c_proj", layer, width, width)
        tensors += norm(f"{at}.ln_2", layer, width)
        tensors += matrix("mlp", f"{at}.mlp.c_fc", layer, width, inner)
        tensors += matrix("mlp", f"{at}.mlp.c_proj", layer, inner, width)
    return tensors + norm("transformer.ln_f", None, width)


def _llama_like(shape: dict, widths: Widths) -> list[Tensor]:
    """List those of Llama, Qwen3, Mixtral and Qwen3-MoE: RMSNorm, gated MLPs, grouped-query attention."""
    width, queries, keys, bias = widths.hidden, widths.queries, widths.keys, bool(shape.get("attention_bias"))
    tensors = []
    for layer in range(widths.layers):
        at = f"model.layers.{layer}.self_attn"
        tensors += _matrix("attention", f"{at}.q_proj", layer, width, queries, bias)
        tensors += _matrix("attention", f"{at}.k_proj", layer, width, keys, bias)
        tensors += _matrix("attention", f"{at}.v_proj", layer, width, keys, bias)
        tensors += _matrix("attention", f"{at}.o_proj", layer, queries, width, bias)
        # one norm for all query heads of a layer, and one for all key heads
        if shape["model_type"].startswith("qwen3"):
            tensors += _norm(f"{at}.q_norm", layer, widths.head_size)
            tensors += _norm(f"{at}.k_norm", layer, widths.head_size)
        at = f"model.layers.{layer}.mlp"
        if is_mixture(shape, layer):
            tensors += _matrix(ROUTER, f"{at}.gate", layer, widths.experts, width)
            # transformers 5.24 keeps a layer's experts in two tensors: both halves of the gate, and the way back
            for name, rows in (("gate_up_proj", 2 * widths.expert_inner), ("down_proj", widths.expert_inner)):
                numel, factors = widths.experts * rows * width, widths.experts * (rows + width)
                tensors.append(Tensor.of_part("experts", numel, layer, factors, f"{at}.experts.{name}"))
        else:
            bias_inside = bool(shape.get("mlp_bias"))
            tensors += _matrix("mlp", f"{at}.gate_proj", layer, width, widths.inner, bias_inside)
            tensors += _matrix("mlp", f"{at}.up_proj", layer, width, widths.inner, bias_inside)
            tensors += _matrix("mlp", f"{at}.down_proj", layer, widths.inner, width, bias_inside)
        tensors += _norm(f"model.layers.{layer}.input_layernorm", layer, width)
        tensors += _norm(f"model.layers.{layer}.post_attention_layernorm", layer, width)
    return tensors + _norm("model.norm", None, width)


def numel_by_part(tensors: Sequence[Tensor]) -> Counter[str]:
    """Return {part: elements}, and the biases of linear layers among them under `bias` too."""
    numel: Counter[str] = Counter()
    for tensor in tensors:
        part, _, bias = tensor.part.partition(" ")
        numel[part] += tensor.numel
        numel["bias"] += tensor.numel if bias else 0
    return numel


def layer_numel(tensors: Sequence[Tensor]) -> int:
    """Return the elements of the largest layer."""
    sizes: Counter[int] = Counter()
    for tensor in (each for each in tensors if each.layer is not None):
        sizes[tensor.layer] += tensor.numel
    return max(sizes.values())
