"""Parameters, part by part, and FLOPs per token, in every way the field counts them."""

import fnmatch
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from pretraining.errors import nearest
from pretraining.outside.schema import listed, problem
from pretraining.planning.shapes import (
    EMBEDDING,
    HEAD,
    HIDDEN,
    HOW,
    PARTS,
    ROUTER,
    VECTOR,
    Tensor,
    count_model,
    numel_by_part,
    parameter_tensors,
    widths_of,
)
from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.model import ROUTER_COEFFICIENT, OnceASection, is_exact
from pretraining.recipe.sections import is_in

BACKWARD = 2
"""The backward pass costs twice the forward pass: one product for the inputs' gradients, one for the weights'."""


@dataclass(frozen=True)
class Backward:
    """What the backward pass computes of a model of which some parameters are frozen."""

    trained: int
    """Parameters with gradients."""
    weights: int
    """Entries of `ModelSize.matmul` that get gradients."""
    inputs: int
    """Entries of `ModelSize.matmul` whose inputs get gradients: those behind the first parameter that is trained."""
    layers: float
    """Share of the layers behind the first parameter that is trained."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters, equal to those of the built model."""

    total: int
    """All parameters; a tied head is counted once."""
    embedding: int
    """Token and learned-position tables (a separate head is not among them)."""
    active: int
    """Those that one token passes through; of a layer's experts, only those it is routed to."""
    matmul: int
    """Entries of the matrices that a token is multiplied with: layers and head, without biases and norms."""
    head: int
    """Entries of the output projection in `matmul`, whether it is tied or not."""
    num_layers: int
    attention_width: int
    """Heads x head size, the width of the queries."""
    tied: bool
    """Whether the head is the token table."""
    parts: dict[str, int]
    """All parameters by what they do (`shapes.PARTS`): projections of attention with their biases, while the norms on
    heads are among the norms; the head, 0 if it is tied."""
    counted: str | None = None
    """The way it was counted; None if by formula."""
    backward: Backward | None = None
    """What the backward pass is for, if some parameters are frozen; None: for all of it."""

    @property
    def gradients(self) -> Backward:
        return self.backward or Backward(self.total, self.matmul, self.matmul, 1.0)


@OnceASection
def model_size(model: dict) -> ModelSize:
    """Return sizes of a recipe's model section, exactly as the class of the installed transformers builds it."""
    tensors, widths = parameter_tensors(model), widths_of(model)
    facts = None if is_exact(model) else count_model(model)
    numel = numel_by_part(tensors)
    # the table of the tokens comes first, and is the head too if that is tied
    head = facts.head if facts else numel[HEAD] or tensors[0].numel
    experts, total = widths.experts, sum(numel[part] for part in PARTS)
    active = total - (numel["experts"] * (experts - widths.chosen_experts) // experts if experts else 0)
    # a tied head is no part of its own, yet a token is multiplied with it: it is added in both cases
    in_layers = active - numel[EMBEDDING] - numel[HEAD] - numel["bias"] - numel["norms"]
    return ModelSize(
        total=total,
        embedding=numel[EMBEDDING],
        active=active,
        matmul=in_layers + head,
        head=head,
        num_layers=widths.layers,
        attention_width=facts.attention_width if facts else widths.queries,
        tied=facts.tied if facts else not numel[HEAD],
        parts={part: numel[part] for part in PARTS},
        counted=HOW if facts else None,
    )


def frozen_tensors(recipe: Recipe) -> tuple[Tensor, ...]:
    """Return the parameters that `model.frozen` keeps; `UserError` if a pattern matches none, or all are kept."""
    if not recipe.weights.frozen:
        return ()
    tensors, where = parameter_tensors(recipe.model), recipe.where
    for number, pattern in enumerate(recipe.weights.frozen):
        _check_match(recipe, f"model.frozen.{number}", pattern, [tensor.name for tensor in tensors])
    frozen = tuple(tensor for tensor in tensors if recipe.weights.freezes(tensor.name))
    if len(frozen) == len(tensors):
        raise problem(where, "model.frozen", "matches every parameter: nothing is left to train")
    return frozen


def trained_tensors(recipe: Recipe) -> tuple[Tensor, ...]:
    frozen = {tensor.name for tensor in frozen_tensors(recipe)}
    return tuple(tensor for tensor in parameter_tensors(recipe.model) if tensor.name not in frozen)


def check_rows(recipe: Recipe) -> None:
    """Raise `UserError` for a row of a table, or an entry of a list, whose names match nothing."""
    fp8_tensors(recipe), wide_tensors(recipe)
    groups, draws = recipe.optimizer.groups, recipe.weights.draw or ()
    if not groups and not draws:
        return
    tensors = parameter_tensors(recipe.model)
    matrices = [each for each in tensors if each.kind != VECTOR]
    for table, rows, of in (("optimizer.groups", groups, tensors), ("model.draw", draws, matrices)):
        for number, row in enumerate(rows):
            key = "kind" if row.names is None else "names"
            names = [each.kind if key == "kind" else each.name for each in of]
            _check_match(recipe, f"{table}.{number}.{key}", getattr(row, key), names)


def wide_tensors(recipe: Recipe) -> tuple[Tensor, ...]:
    """Return the parameters that `model.keep_in_fp32` keeps in fp32, as upstream/wide_weights.py does.

    `UserError` if a name matches no module, or one with experts, or nothing is left in bf16.
    """
    weights, key, where = recipe.weights, "model.keep_in_fp32", recipe.where
    if not weights.keep_in_fp32:
        return ()
    # the table of the tokens comes first, and is the head too if that is tied
    tokens, *others = tensors = parameter_tensors(recipe.model)
    tables = weights.wide_tables
    is_wide_table = "embeddings" in tables or (tables and model_size(recipe.model).tied)
    kinds = [{"embeddings": EMBEDDING, "head": HEAD}[table] for table in tables]
    modules = list(dict.fromkeys(each.module for each in others if each.kind not in (EMBEDDING, HEAD)))
    for number, pattern in enumerate(weights.keep_in_fp32):
        if pattern not in weights.TABLES:
            _check_match(recipe, f"{key}.{number}", pattern, modules, is_in)
    wide = [tokens] if is_wide_table else []
    named = {*filter(weights.has_wide, modules)}
    wide += [each for each in others if each.kind in kinds or each.module in named]
    if any(each.part == "experts" for each in wide):
        what = "names experts, which multiply together in bf16 alone; name their router, or other modules"
        raise problem(where, key, what)
    if len(wide) == len(tensors):
        raise problem(where, key, "leaves nothing in bf16; --set training.bf16=false")
    return tuple(wide)


def fp8_tensors(recipe: Recipe) -> tuple[Tensor, ...]:
    """Return the matrices of the blocks that are multiplied in fp8, as `convert_products` chooses their layers.

    `UserError` if a pattern of `speed.bf16_layers` matches none of them, or none is left.
    """
    speed = recipe.speed
    if speed.fp8 == "none":
        return ()
    blocks, tensors = model_size(recipe.model).num_layers, parameter_tensors(recipe.model)
    wide = {*wide_tensors(recipe)}
    hidden = [each for each in tensors if each.kind == HIDDEN and each.layer is not None]
    # both sides are multiples of 16 if and only if their product is one of 256, and their sum one of 16
    fit = [each for each in hidden if each.part != "experts" and not (each.numel % 256 or each.factors % 16)]
    layers = {each.module: each for each in fit if each not in wide}
    for number, pattern in enumerate(speed.bf16_layers):
        _check_match(recipe, f"speed.bf16_layers.{number}", pattern, list(layers), is_in)
    kept = tuple(each for name, each in layers.items() if speed.is_in_fp8(name, each.layer, blocks))
    if not kept:
        what = f"leaves none of the {blocks} blocks in fp8; --set speed.fp8=none, or shorten the lists"
        raise problem(recipe.where, "speed.bf16_blocks", what)
    return kept


def _check_match(
    recipe: Recipe, key: str, pattern: str, names: list[str], matches: Callable = fnmatch.fnmatchcase
) -> None:
    if not any(matches(name, pattern) for name in names):
        of = "modules" if matches is is_in else "parameters"
        what = f"is {json.dumps(pattern)}, which matches none of the {len(names)} {of}"
        there = list(dict.fromkeys(map(in_every_layer, names)))
        near = nearest(pattern, there, 3) or f"; there are {listed(there)}"
        raise problem(recipe.where, key, f"{what}{near}")


def in_every_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def size_of_recipe(recipe: Recipe) -> ModelSize:
    """Return the sizes of the recipe's model, with what is left to the backward pass if parameters are frozen."""
    size = model_size(recipe.model)
    if not recipe.weights.frozen:
        return size
    trained, tensors = trained_tensors(recipe), parameter_tensors(recipe.model)
    first = trained[0]
    behind = [tensor for tensor in tensors[tensors.index(first) :] if tensor.layer is not None]
    layers = size.num_layers - behind[0].layer if behind else 0
    # Of the experts of a layer a token meets some.
    met = 1 - (size.total - size.active) / size.parts["experts"] if size.parts["experts"] else 1.0

    def entries(chosen: Sequence[Tensor]) -> int:
        matrices = [tensor for tensor in chosen if tensor.kind in (HIDDEN, ROUTER)]
        return round(sum(each.numel * (met if ".experts." in each.name else 1) for each in matrices))

    of_head = (HEAD, EMBEDDING) if size.tied else (HEAD,)
    trains_head = any(tensor.kind in of_head and tensor.numel == size.head for tensor in trained)
    backward = Backward(
        trained=sum(tensor.numel for tensor in trained),
        weights=entries(trained) + size.head * trains_head,
        inputs=entries(behind) + size.head * (first.kind != HEAD),
        layers=layers / size.num_layers,
    )
    return replace(size, backward=backward)


def balance_of_experts(recipe: Recipe) -> str | None:
    """Return what evens out the use of a mixture's experts; empty if nothing does, None for a model without experts."""
    if not model_size(recipe.model).parts["experts"]:
        return None
    values, loss = model_with_defaults(recipe.model), recipe.loss
    if loss.balance == "none" or not values.get("output_router_logits"):
        return ""
    if ROUTER_COEFFICIENT in values:
        weight = values[ROUTER_COEFFICIENT]
        return f"a balancing loss, {ROUTER_COEFFICIENT} {weight:g}" if weight else ""
    bias = f"correction biases that follow the load by {loss.bias_rate:g} a step"
    return f"{bias}; if its routers have none, a balancing loss, loss.balance_weight {loss.balance_weight:g}"


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of one token; a multiply-add is two."""

    parameters: int
    """6 N over the entries of the matrices that a token meets, head included, without attention's scores."""
    six_n_total: int
    """6 N over all active parameters, embeddings included: Hoffmann et al. 2022's C = 6 N D."""
    forward: int
    """Forward pass, every product, causal mask not credited."""
    training: int
    """Forward and backward, causal mask not credited: 6 N + 12 L H Q T (PaLM, appendix B)."""
    training_causal: int
    """The same without the masked half of the scores: 6 N + 6 L H Q T."""
    recomputed: int
    """FLOPs that recomputing every layer adds: each layer's forward pass once more, without the head's."""

    @property
    def hardware(self) -> int:
        """Training with every layer recomputed: what hardware FLOPs utilization (HFU) counts."""
        return self.training + self.recomputed

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "hardware": self.hardware}


def flops_per_token(size: ModelSize, sequence_length: int) -> FlopsPerToken:
    """Count the FLOPs of a token in a sequence of `sequence_length` tokens.

    Softmax, norms, biases and activations are not counted, nor is the look-up of the embedding. Frozen matrices have no
    gradients, and in front of the first trained parameter nothing is computed backward. With every
    layer recomputed the sum is equation 3 of Narayanan et al. 2021: 96 l h^2 (1 + s / 6h + V / 16lh) per token
    for GPT.
    """
    # 2 products of 2 FLOPs each, without the mask: PaLM (Chowdhery et al. 2022), appendix B
    scores = 4 * size.num_layers * size.attention_width * sequence_length
    behind = size.gradients
    # a product with a matrix of n entries is 2 n (Kaplan et al. 2020, table 1)
    forward, backward_scores = 2 * size.matmul + scores, BACKWARD * behind.layers * scores
    training = round(forward + 2 * (behind.weights + behind.inputs) + backward_scores)
    return FlopsPerToken(
        parameters=6 * size.matmul,
        six_n_total=6 * size.active,
        forward=forward,
        training=training,
        training_causal=round(training - (scores + backward_scores) / 2),
        recomputed=round(behind.layers * (forward - 2 * size.head)),
    )
