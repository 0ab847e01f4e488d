"""What plans are made of: a recipe under a ds_config on so many ranks, and the parameters that one rank then holds.

Tensor parallelism cuts the matrices of a layer, embedding and head; norms and routers stay whole on every rank. Expert
parallelism cuts the experts. ZeRO then shards what is left over the ranks that hold the same part. Ranks that have
parts of the same sequences hold the same weights, so that to ZeRO they are data-parallel.
"""

import argparse
import json
import re
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from pretraining.command_line import add_deepspeed
from pretraining.ds_config import Degrees, degrees_of, zero_stage
from pretraining.errors import UserError
from pretraining.outside.schema import refuse_first
from pretraining.planning.quantities import count, gpu_count, short, three_digits
from pretraining.planning.shapes import Tensor, Widths, parameter_tensors, rows_of_rank, widths_of_rank
from pretraining.planning.sizes import (
    FlopsPerToken,
    ModelSize,
    flops_per_token,
    frozen_tensors,
    in_every_layer,
    model_size,
    size_of_recipe,
    wide_tensors,
)
from pretraining.recipe import Recipe, accumulation_steps, load_recipe, recipe_schema
from pretraining.recipe.data import check_mixture
from pretraining.recipe.loading import recipe_of
from pretraining.recipe.model import Model
from pretraining.recipe.published import read_published
from pretraining.recipe.refusals import check_ranks, checked_ds_config, load_recipe_and_ds_config
from pretraining.recipe.sections import Weights
from pretraining.runtime.table import Column, facts, write_table

# bytes an element
SIXTEEN_BIT, FP32 = 2, 4
LONGEST, SAMPLES, TOKENS_PER_PARAMETER = 2048, 256, 20
"""What `--model` assumes: the most tokens of a sequence, the least sequences of a step, and the tokens of a run
(Hoffmann et al. 2022)."""


@dataclass(frozen=True)
class Precision:
    """Bytes of an element, by what it is for."""

    name: str
    """bf16, fp16 or fp32."""
    weights: int
    compute: int
    """Bytes in the products' inputs and results."""
    residual: int
    """Bytes in the inputs of the norms: fp32 under autocast, else as in the products."""

    @property
    def is_autocast(self) -> bool:
        """Whether weights stay fp32 and every product casts its inputs."""
        return self.weights > self.compute


class Family(NamedTuple):
    """Parameters that ZeRO shards over the same ranks, of the size that one rank would hold without ZeRO."""

    trained: tuple[Tensor, ...]
    frozen: tuple[Tensor, ...]
    trained_numel: int
    """Elements of those that are trained."""
    numel: int
    """Elements of all of them."""
    ranks: int
    """Ranks that hold the same part of them."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.trained, *self.frozen)


@dataclass(frozen=True)
class Setup:
    """A recipe under a ds_config on so many ranks."""

    recipe: Recipe
    ds_config: dict | None
    world_size: int = 1

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def tokens(self) -> int:
        return self.recipe.num_tokens

    @property
    def parameters(self) -> int:
        return self.size.total

    @property
    def active(self) -> int:
        """Parameters that one token passes through."""
        return self.size.active

    @cached_property
    def size(self) -> ModelSize:
        return size_of_recipe(self.recipe)

    @cached_property
    def flops(self) -> FlopsPerToken:
        return flops_per_token(self.size, self.recipe.sequence_length)

    @property
    def stage(self) -> int:
        return zero_stage(self.ds_config)

    @cached_property
    def degrees(self) -> Degrees:
        return degrees_of(self.ds_config)

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches of a step; `UserError` if the ranks do not divide it."""
        return accumulation_steps(self.recipe, self.world_size, self.ds_config)

    @cached_property
    def precision(self) -> Precision:
        name = next((name for name in ("bf16", "fp16") if self.recipe.training.get(name)), "fp32")
        compute = FP32 if name == "fp32" else SIXTEEN_BIT
        # 16 bit without DeepSpeed, and bf16 at stage 0, is autocast over fp32 weights (training/arguments.py). From
        # stage 1 on, DeepSpeed holds 16-bit weights and fp32 masters.
        autocast = name != "fp32" and (self.ds_config is None or (name == "bf16" and self.stage == 0))
        weights = FP32 if autocast else compute
        return Precision(name, weights, compute, residual=weights)

    @property
    def tokens_of_pass(self) -> int:
        """Tokens of a micro-batch that one rank reads."""
        # each rank has a part of every sequence; inside attention, all tokens of a part of the heads, which is as much
        return self.recipe.micro_batch * self.recipe.sequence_length // self.degrees.sequence

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient on its way: in the type that holds the weights, or in that which the ds_config names."""
        named = (self.ds_config or {}).get("communication_data_type")
        return {"fp32": FP32, None: self.precision.weights}.get(named, SIXTEEN_BIT)

    @cached_property
    def widths(self) -> Widths:
        """Widths of the products that one rank computes."""
        return widths_of_rank(self.recipe.model, self.degrees)

    @cached_property
    def wide(self) -> tuple[Tensor, ...]:
        """The parameters that `model.keep_in_fp32` keeps in fp32 beside 16-bit ones (upstream/wide_weights.py)."""
        return () if self.precision.weights == FP32 else wide_tensors(self.recipe)

    def wide_of(self, family: Family) -> tuple[Tensor, ...]:
        """Return those of a family, as a rank holds them."""
        names = {tensor.name for tensor in self.wide}
        return tuple(tensor for tensor in family.tensors if tensor.name in names)

    @property
    def head_is_wide(self) -> bool:
        """Whether `model.keep_in_fp32` has the head multiply in fp32."""
        tables = self.recipe.weights.wide_tables
        return "head" in tables or (bool(tables) and self.size.tied)

    @cached_property
    def families(self) -> list[Family]:
        """The parameters of one rank by the ranks that share them: those that are whole at stage 3 come first."""
        degrees, apart, ranks = self.degrees, self.stage == 3, self.world_size
        # stage 3 shards what every rank of a tensor group has over these too (deepspeed 0.19.8)
        cuts = (1 if apart else degrees.tensor, degrees.tensor, degrees.tensor * degrees.expert)
        section = json.dumps(self.recipe.model, sort_keys=True)
        frozen = frozenset(tensor.name for tensor in frozen_tensors(self.recipe))
        parts = _cut(section, frozen, degrees._replace(sequence=1), apart)
        held = [Family(*part, ranks=max(1, ranks // cut)) for part, cut in zip(parts, cuts, strict=True)]
        return [family for family in held if family.tensors]

    @property
    def held(self) -> tuple[Tensor, ...]:
        """All parameters of one rank."""
        return tuple(tensor for family in self.families for tensor in family.tensors)


# AutoTP cuts the outputs of the first line and the inputs of the second; a bias of the second stays whole
_CUT = re.compile(
    r"\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.(weight|bias)$"
    r"|\.(self_attn\.o_proj|mlp\.down_proj)\.weight$"
)
# by tokens of the vocabulary (model/parallel.py); the fullest rank has a row more if the degree does not
# divide them
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


# a search asks hundreds of times for the same few
@cache
def _cut(section: str, frozen: frozenset[str], degrees: Degrees, apart: bool) -> tuple:
    """Return the fields of a `Family`, without its ranks: of dense tensors, parts of split ones, and split experts.

    section: the recipe's model section, written as JSON. apart: whether parts that tensor parallelism leaves to a rank
    are not among the dense ones.
    """
    model = json.loads(section)
    dense, parts, experts = [], [], []
    split = parts if apart else dense
    for tensor in parameter_tensors(model):
        if degrees.expert > 1 and ".experts." in tensor.name:
            experts.append(replace(tensor, numel=tensor.numel // degrees.expert))
        elif degrees.tensor > 1 and _CUT.search(tensor.name):
            split.append(replace(tensor, numel=tensor.numel // degrees.tensor))
        elif degrees.tensor > 1 and tensor.name in _TABLES:
            rows = rows_of_rank(model["vocab_size"], degrees)
            split.append(replace(tensor, numel=tensor.numel // model["vocab_size"] * rows))
        else:
            dense.append(tensor)
    fields = []
    for tensors in (dense, parts, experts):
        trained = tuple(tensor for tensor in tensors if tensor.name not in frozen)
        kept = tuple(tensor for tensor in tensors if tensor.name in frozen)
        numel = [sum(tensor.numel for tensor in each) for each in (trained, tensors)]
        fields.append((trained, kept, *numel))
    return tuple(fields)


@dataclass(frozen=True)
class BareSize:
    """A number of parameters, of which nothing else is known, and the tokens to train it on."""

    parameters: float
    tokens: float | None
    world_size: int

    @property
    def name(self) -> str:
        return f"{short(self.parameters)} parameters"

    @property
    def active(self) -> float:
        return self.parameters


def add_setup_arguments(parser: argparse.ArgumentParser, on_cluster: bool = False) -> None:
    """Add the options of a recipe, a model or a size, and `--tokens`. on_cluster: `--world_size` and `--gpu` too."""
    add_shape_arguments(parser)
    add = parser.add_argument
    add_deepspeed(parser)
    add("--parameters", type=count, metavar="N", help="instead of a recipe: 7b, 6.7e9")
    add("--tokens", type=count, metavar="D", help="training tokens: 140b, 1.4t")
    if on_cluster:
        add("--world_size", type=gpu_count, required=True, metavar="N", help="number of GPUs")
        add("--gpu", required=True, metavar="NAME", help="which kind (see the verb gpus)")


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--recipe", metavar="NAME|PATH", help="a file of recipes/, or a path")
    add("--model", metavar="NAME|PATH", help="instead of a recipe: a model of the hub, or its config.json")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a value")


def setup_of(options: argparse.Namespace) -> Setup | BareSize:
    """Read what the options describe; with `--tokens`, a recipe's budget is as many whole steps as these pay for.

    `UserError` if not one of --recipe, --model and --parameters is given, or what it names is wrong; or if the tokens
    are fewer than one step needs, or more than a recipe may have.
    """
    ranks = getattr(options, "world_size", None) or 1
    if sum(map(bool, (options.recipe, options.model, options.parameters))) != 1:
        raise UserError("give one of --recipe NAME, --model NAME and --parameters N (with --tokens D)")
    if options.parameters:
        if options.set or options.deepspeed:
            what = "--set and --deepspeed change a recipe"
            raise UserError(f"{what}: give --recipe NAME instead of --parameters")
        return BareSize(options.parameters, options.tokens, ranks)
    if options.recipe:
        recipe, ds_config = load_recipe_and_ds_config(options.recipe, options.set, options.deepspeed)
        if getattr(options, "world_size", None):
            check_ranks(recipe.deepspeed, ds_config, ranks)
    else:
        recipe = recipe_of_model(options, ranks)
        ds_config = checked_ds_config(recipe)
    if (tokens := options.tokens) is not None:
        # before anything is derived: the number of steps follows from the budget
        least = recipe.step_sizes.all[0]
        most = recipe_schema()["properties"]["budget"]["properties"]["tokens"]["maximum"]
        if not least <= tokens <= most:
            what = f"{recipe.name} takes from {least:,}, its first step, to {most:g}"
            raise UserError(f"--tokens {tokens:g}: {what}; leave --tokens out for its own budget")
        # whole steps, as when a recipe is read; fewer tokens than a full step still pay for the first step of a ramp
        whole = int(tokens // recipe.tokens_per_step * recipe.tokens_per_step) or int(tokens)
        # a command that is written for this recipe must contain the tokens too
        overrides = (*recipe.overrides, f"budget.tokens={whole}")
        recipe = replace(recipe, budget=replace(recipe.budget, tokens=whole), overrides=overrides)
        # stages may end at a number of tokens
        wrong = check_mixture(recipe.data, recipe.num_samples, recipe.sequence_length)
        refuse_first(wrong, f"--tokens {tokens:g}")
    return Setup(recipe, ds_config, ranks)


def recipe_of_model(options: argparse.Namespace, ranks: int) -> Recipe:
    """Return a recipe for a model that `--model` names, with what nobody has chosen yet; its notes say what that is."""
    where = f"--model {options.model}"
    section, read = read_published({"from": options.model}, where)
    model = Model(Weights.split(section)[0]).with_defaults()
    length = min(model.max_position_embeddings, LONGEST)
    # as many whole samples for each GPU as make about half a million tokens of 2,048
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


COUNTS = {
    "parameters": "6 N, matrices a token meets",
    "six_n_total": "6 N, all active parameters",
    "training_causal": "with attention, causal half",
    "training": "with attention, in full (MFU)",
    "hardware": "with recomputed layers (HFU)",
}


class FlopsVerb:
    """Parameters by part and FLOPs per token, in every convention.

    6 N D, the exact count with attention (causal mask credited or not), and what recomputation adds.
    """

    EXAMPLES = """  python -m pretraining.planning flops --recipe 30b
  python -m pretraining.planning flops --recipe 7b --set model.max_position_embeddings=32768 --json
  python -m pretraining.planning flops --model recipes/features/files/smollm2.json
  python -m pretraining.planning flops --parameters 175b --tokens 300b"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_setup_arguments(parser)

    def answer(self, options: argparse.Namespace) -> dict:
        setup = setup_of(options)
        # a size alone has no attention, so that the other conventions cannot be counted
        per_token: dict = {"six_n_total": 6 * setup.parameters}
        parts, tied, length, tokens = None, None, None, setup.tokens
        if isinstance(setup, Setup):
            per_token = setup.flops.to_dict()
            parts, tied, length = setup.size.parts, setup.size.tied, setup.recipe.sequence_length
        training = per_token.get("training", per_token["six_n_total"])
        return {
            "name": setup.name,
            "parameters": setup.parameters,
            "active_parameters": setup.active,
            "parts": parts,
            "tied": tied,
            "sequence_length": length,
            "tokens": tokens,
            "flops_per_token": per_token,
            "flops": {name: flops * tokens for name, flops in per_token.items()} if tokens else None,
            # 8.64e19 FLOPs: one petaFLOP/s for a day
            "petaflop_days": training * tokens / 8.64e19 if tokens else None,
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


PARAMETERS = (
    Column("name, or pattern of all layers", "name"),
    Column("parameters", "number", ","),
    Column("elements of each", "each"),
    Column("of all", "all", ","),
    Column("frozen", "frozen", ","),
)


class ParametersVerb:
    """Names and sizes of a model's parameters, as `model.frozen` names them."""

    EXAMPLES = """  python -m pretraining.planning parameters --recipe 124m
  python -m pretraining.planning parameters --recipe features/frozen-layers --json
  python -m pretraining.planning parameters --model recipes/features/files/smollm2.json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_shape_arguments(parser)
        parser.set_defaults(deepspeed=None, tokens=None)

    def answer(self, options: argparse.Namespace) -> dict:
        """List every parameter in the order of the modules; a tied one has the name of the embedding."""
        if bool(options.recipe) == bool(options.model):
            raise UserError("give one of --recipe NAME and --model NAME")
        recipe = load_recipe(options.recipe, options.set) if options.recipe else recipe_of_model(options, 1)
        frozen = {tensor.name for tensor in frozen_tensors(recipe)}
        parameters = [
            {"name": each.name, "elements": each.numel, "layer": each.layer, "frozen": each.name in frozen}
            for each in parameter_tensors(recipe.model)
        ]
        return {"name": recipe.name, "parameters": parameters}

    def as_text(self, answer: dict) -> str:
        families: dict[str, list[dict]] = {}
        for each in answer["parameters"]:
            families.setdefault(in_every_layer(each["name"]), []).append(each)
        rows = []
        for pattern, members in families.items():
            sizes, frozen = ([each[key] for each in members] for key in ("elements", "frozen"))
            each = f"{sizes[0]:,}" if len(set(sizes)) == 1 else "differ"
            row = {"name": pattern, "number": len(members), "each": each, "all": sum(sizes)}
            rows.append({**row, "frozen": sum(frozen) or None})
        total = sum(each["elements"] for each in answer["parameters"])
        frozen = sum(each["elements"] for each in answer["parameters"] if each["frozen"])
        words = f"{total:,} elements in {len(answer['parameters']):,} parameters, {frozen:,} frozen"
        return f"{answer['name']}: {words}\n\n{write_table(PARAMETERS, rows)}"
