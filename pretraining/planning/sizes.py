"""Parameters, part by part, and FLOPs per token, in every way the field counts them.

Which tensors a type has says memory/tensors.py. A workload is the subject of a planning question: a recipe, or a size
and a number of tokens.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

from pretraining.errors import UserError
from pretraining.planning.memory.tensors import (
    EMBEDDING,
    HEAD,
    HIDDEN,
    ROUTER,
    Tensor,
    parameter_tensors,
    trained_tensors,
)
from pretraining.planning.quantities import count, gpu_count, short, three_digits
from pretraining.planning.shapes import HOW, count_model, widths_of
from pretraining.recipe import Recipe, model_with_defaults, recipe_schema
from pretraining.recipe.loading import recipe_of
from pretraining.recipe.model import ROUTER_COEFFICIENT, Model, is_exact
from pretraining.recipe.published import read_published
from pretraining.recipe.refusals import checked_ds_config, load_recipe_and_ds_config
from pretraining.recipe.sections import Weights
from pretraining.runtime.table import Column, facts, write_table

LONGEST, SAMPLES, TOKENS_PER_PARAMETER = 2048, 256, 20
"""What `--model` assumes: the most tokens of a sequence, the least sequences of a step, and the tokens of a run
(Hoffmann et al. 2022)."""
BACKWARD = 2
"""The backward pass costs twice the forward pass: one product for the inputs' gradients, one for the weights'."""


@dataclass(frozen=True)
class PartSizes:
    """Parameters by what they do; their sum is the whole model."""

    embedding: int
    """Token table, and GPT-2's table of learned positions."""
    attention: int
    """Query, key, value and output projections with their biases; the norms on heads are among `norms`."""
    mlp: int
    """Dense feed-forward layers with their biases."""
    experts: int
    """All experts of all mixture layers."""
    router: int
    """The matrices that choose among the experts."""
    norms: int
    head: int
    """Output projection; 0 if it is tied to the token table."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


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
    parts: PartSizes
    counted: str | None = None
    """The way it was counted; None if by formula."""
    backward: "Backward | None" = None
    """What the backward pass is for, if some parameters are frozen; None: for all of it."""

    @property
    def gradients(self) -> Backward:
        return self.backward or Backward(self.total, self.matmul, self.matmul, 1.0)


def model_size(model: dict) -> ModelSize:
    """Return sizes of a recipe's model section, exactly as the class of the installed transformers builds it."""
    return _added_up(json.dumps(model, sort_keys=True), is_exact(model))


# a search asks for the same sizes hundreds of times
@cache
def _added_up(section: str, exact: bool) -> ModelSize:
    """Add up the tensors by part. section: the model section, written as JSON."""
    model = json.loads(section)
    tensors, numel = parameter_tensors(model), Counter()
    for tensor in tensors:
        # PartSizes holds biases with their layers; only `matmul` leaves them out
        numel[tensor.part.removesuffix(" bias")] += tensor.numel
    biases = sum(tensor.numel for tensor in tensors if tensor.part.endswith(" bias"))
    parts = PartSizes(**{field.name: numel[field.name] for field in fields(PartSizes)})
    if exact:
        widths, how, tied = widths_of(model), None, bool(model_with_defaults(model)["tie_word_embeddings"])
        layers, experts, chosen = widths.layers, widths.experts, widths.chosen_experts
        # the table of the tokens comes first, and is the head too if that is tied
        head, attention_width = parts.head or tensors[0].numel, widths.queries
    else:
        facts, how = count_model(model), HOW
        tied, head, attention_width = facts.tied, facts.head, facts.attention_width
        layers, experts, chosen = facts.layers, facts.experts, facts.chosen_experts
    idle = parts.experts * (experts - chosen) // experts if experts and chosen else 0
    active = parts.total - idle
    # a tied head is no part of its own, yet a token is multiplied with it: it is added in both cases
    in_layers = active - parts.embedding - parts.head - biases - parts.norms
    return ModelSize(
        total=parts.total,
        embedding=parts.embedding,
        active=active,
        matmul=in_layers + head,
        head=head,
        num_layers=layers,
        attention_width=attention_width,
        tied=tied,
        parts=parts,
        counted=how,
    )


def size_of_recipe(recipe: Recipe) -> ModelSize:
    """Return the sizes of the recipe's model, with what is left to the backward pass if parameters are frozen."""
    size, trained = model_size(recipe.model), trained_tensors(recipe)
    if not recipe.weights.frozen:
        return size
    tensors, first = parameter_tensors(recipe.model), trained[0]
    behind = [tensor for tensor in tensors[tensors.index(first) :] if tensor.layer is not None]
    layers = size.num_layers - behind[0].layer if behind else 0
    # Of the experts of a layer a token meets some.
    met = 1 - (size.total - size.active) / size.parts.experts if size.parts.experts else 1.0

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
    if not model_size(recipe.model).parts.experts:
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
    forward = 2 * size.matmul + scores
    backward_products, backward_scores = (
        2 * (behind.weights + behind.inputs),
        BACKWARD * behind.layers * scores,
    )
    training = round(forward + backward_products + backward_scores)
    return FlopsPerToken(
        parameters=6 * size.matmul,
        six_n_total=6 * size.active,
        forward=forward,
        training=training,
        training_causal=round(training - (scores + backward_scores) / 2),
        recomputed=round(behind.layers * (forward - 2 * size.head)),
    )


COUNTS = {
    "parameters": "6 N, matrices a token meets",
    "six_n_total": "6 N, all active parameters",
    "training_causal": "with attention, causal half",
    "training": "with attention, in full (MFU)",
    "hardware": "with recomputed layers (HFU)",
}


@dataclass(frozen=True)
class Workload:
    """A model and its training tokens."""

    name: str
    parameters: float
    active: float
    tokens: float | None
    training_flops_per_token: float
    hardware_flops_per_token: float
    """FLOPs with every layer recomputed."""
    recipe: Recipe | None = None
    ds_config: dict | None = None
    size: ModelSize | None = None
    counted: FlopsPerToken | None = None


def add_workload_arguments(parser: argparse.ArgumentParser, on_cluster: bool = False) -> None:
    """Add `--recipe` or `--model` with `--set` and `--deepspeed`, or `--parameters`, and `--tokens`.

    on_cluster: add `--world_size` and `--gpu` too.
    """
    parser.add_argument("--recipe", metavar="NAME|PATH", help="a file of recipes/, or a path")
    parser.add_argument(
        "--model", metavar="NAME|PATH", help="instead of a recipe: a model of the hub, or its config.json"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a value"
    )
    parser.add_argument("--deepspeed", metavar="NAME|PATH", help="a file of ds_configs/ over the recipe's")
    parser.add_argument("--parameters", type=count, metavar="N", help="instead of a recipe: 7b, 6.7e9")
    parser.add_argument("--tokens", type=count, metavar="D", help="training tokens: 140b, 1.4t")
    if on_cluster:
        parser.add_argument("--world_size", type=gpu_count, required=True, metavar="N", help="number of GPUs")
        parser.add_argument("--gpu", required=True, metavar="NAME", help="which kind (see the verb gpus)")


def workload_of(options: argparse.Namespace) -> Workload:
    """Read the workload that the options describe.

    Raises:
        UserError: not one of --recipe, --model and --parameters is given, or what it names is wrong.
    """
    if sum(map(bool, (options.recipe, options.model, options.parameters))) != 1:
        raise UserError("give one of --recipe NAME, --model NAME and --parameters N (with --tokens D)")
    if options.recipe:
        recipe, ds_config = load_recipe_and_ds_config(options.recipe, options.set, options.deepspeed)
        return workload_of_recipe(recipe, ds_config, options.tokens)
    if options.model:
        recipe = recipe_of_model(options)
        return workload_of_recipe(recipe, checked_ds_config(recipe), options.tokens)
    if options.set or options.deepspeed:
        raise UserError("--set and --deepspeed change a recipe: give --recipe NAME instead of --parameters")
    n = options.parameters
    # 6 N (Kaplan et al. 2020), and 2 N more for another forward pass if the layers are recomputed
    return Workload(f"{short(n)} parameters", n, n, options.tokens, 6 * n, 8 * n)


def recipe_of_model(options: argparse.Namespace) -> Recipe:
    """Return a recipe for a model that `--model` names, with what nobody has chosen yet; its notes say what that is."""
    where = f"--model {options.model}"
    section, read = read_published({"from": options.model}, where)
    model = Model(Weights.split(section)[0]).with_defaults()
    length = min(model.max_position_embeddings, LONGEST)
    # as many whole samples for each GPU as make about half a million tokens of 2,048
    ranks = getattr(options, "world_size", None) or 1
    per_step = -(-SAMPLES // ranks) * ranks * length
    tokens = max(1, round(TOKENS_PER_PARAMETER * model_size(model).total / per_step)) * per_step
    values = {
        "name": Path(section["from"]).name.removesuffix(".json") or "model",
        "description": f"The shape of {options.model}.",
        "model": section,
        "data": {
            "name": "any",
            "sources": [{"builtin": "python_stdlib"}],
            "tokenizer": section["from"],
            "sequence_length": length,
            "document_masking": False,
        },
        "budget": {"tokens": tokens, "tokens_per_step": per_step},
        "training": {"per_device_train_batch_size": 1, "learning_rate": 3e-4, "bf16": True},
        "deepspeed": "zero3",
    }
    recipe = recipe_of(values, Path(where), options.set, options.deepspeed)
    assumed = f"sequences of {recipe.sequence_length:,} tokens, {recipe.tokens_per_step:,} tokens a step, "
    if options.tokens is None and recipe.num_tokens == tokens:
        assumed += f"{TOKENS_PER_PARAMETER} tokens a parameter in all (--tokens), "
    assumed += f"micro-batch {recipe.micro_batch}, bf16, {recipe.deepspeed or 'no DeepSpeed'}"
    assumed += "; --set SECTION.KEY=VALUE and --deepspeed change them"
    return replace(recipe, notes=(*recipe.notes, f"{where}: {read}", f"{where}: assumed are {assumed}"))


def workload_of_recipe(recipe: Recipe, ds_config: dict | None, tokens: float | None = None) -> Workload:
    """Return the workload of a recipe, with its own budget or with as many whole steps as `tokens` pay for.

    Raises:
        UserError: `tokens` are fewer than one step needs, or more than a recipe may have.
    """
    if tokens is not None:
        # before anything is derived: the number of steps follows from the budget
        least = recipe.step_sizes.all[0]
        most = recipe_schema()["properties"]["budget"]["properties"]["tokens"]["maximum"]
        if not least <= tokens <= most:
            raise UserError(
                f"--tokens {tokens:g}: {recipe.name} takes from {least:,}, its first step, to {most:g}; leave --tokens "
                "out for its own budget"
            )
        # whole steps, as when a recipe is read; fewer tokens than a full step still pay for the first step of a ramp
        whole = int(tokens // recipe.tokens_per_step * recipe.tokens_per_step) or int(tokens)
        # a command that is written for this recipe must contain the tokens too
        overrides = (*recipe.overrides, f"budget.tokens={whole}")
        recipe = replace(recipe, budget=replace(recipe.budget, tokens=whole), overrides=overrides)
    size = size_of_recipe(recipe)
    counted = flops_per_token(size, recipe.sequence_length)
    return Workload(
        name=recipe.name,
        parameters=size.total,
        active=size.active,
        tokens=recipe.num_tokens,
        training_flops_per_token=counted.training,
        hardware_flops_per_token=counted.hardware,
        recipe=recipe,
        ds_config=ds_config,
        size=size,
        counted=counted,
    )


class FlopsVerb:
    """Parameters by part and FLOPs per token, in every convention.

    6 N D, the exact count with attention (causal mask credited or not), and what recomputation adds.
    """

    EXAMPLES = """  python -m pretraining.planning flops --recipe 30b
  python -m pretraining.planning flops --recipe 7b --set model.max_position_embeddings=32768 --json
  python -m pretraining.planning flops --model recipes/features/files/smollm2.json
  python -m pretraining.planning flops --parameters 175b --tokens 300b"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_workload_arguments(parser)

    def answer(self, options: argparse.Namespace) -> dict:
        workload = workload_of(options)
        tokens = workload.tokens
        # a size alone has no attention, so that the other conventions cannot be counted
        per_token: dict = {"six_n_total": 6 * workload.parameters}
        if counted := workload.counted:
            per_token = {**asdict(counted), "hardware": counted.hardware}
        return {
            "name": workload.name,
            "parameters": workload.parameters,
            "active_parameters": workload.active,
            "parts": asdict(workload.size.parts) if workload.size else None,
            "tied": workload.size.tied if workload.size else None,
            "sequence_length": workload.recipe.sequence_length if workload.recipe else None,
            "tokens": tokens,
            "flops_per_token": per_token,
            "flops": {name: flops * tokens for name, flops in per_token.items()} if tokens else None,
            # 8.64e19 FLOPs: one petaFLOP/s for a day
            "petaflop_days": workload.training_flops_per_token * tokens / 8.64e19 if tokens else None,
        }

    def as_text(self, answer: dict) -> str:
        rows = [("model", answer["name"]), ("parameters", f"{answer['parameters']:,.0f}")]
        if answer["active_parameters"] != answer["parameters"]:
            rows.append(("active per token", f"{answer['active_parameters']:,.0f}"))
        for part, number in (answer["parts"] or {}).items():
            # a head of 0 is tied, which is worth a line; other empty parts do not exist
            if number or part == "head":
                rows.append((f"  {part}", f"{number:,}" if number else "tied to the embedding"))
        if answer["tokens"]:
            rows.append(("tokens", f"{answer['tokens']:,.0f}"))
            rows.append(("petaFLOP/s-days", three_digits(answer["petaflop_days"])))
        if answer["sequence_length"]:
            rows.append(("sequence length", f"{answer['sequence_length']:,}"))
        per_token, total = answer["flops_per_token"], answer["flops"]
        columns = (
            Column("FLOPs, forward and backward", COUNTS.get),
            Column("per token", per_token.get, short),
            Column("all tokens", lambda name: total and total[name], ".3e"),
        )
        return f"{facts(rows)}\n\n{write_table(columns, [name for name in COUNTS if name in per_token])}"
