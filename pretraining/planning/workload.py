"""The subject of a planning question: a recipe, or a size and a number of tokens."""

import argparse
from dataclasses import asdict, dataclass, replace

from pretraining.errors import UserError
from pretraining.planning.quantities import count, gpu_count, short, three_digits
from pretraining.planning.sizes import FlopsPerToken, ModelSize, flops_per_token, size_of_recipe
from pretraining.recipe import Recipe, recipe_schema
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime.table import Column, facts, write_table

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
    recipe: Recipe | None
    ds_config: dict | None
    size: ModelSize | None
    counted: FlopsPerToken | None
    sequence_length: int | None


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--recipe` with `--set` and `--deepspeed`, or `--parameters` and `--tokens`."""
    parser.add_argument("--recipe", metavar="NAME|PATH", help="a file of recipes/, or a path")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a value"
    )
    parser.add_argument("--deepspeed", metavar="NAME|PATH", help="a file of ds_configs/ over the recipe's")
    parser.add_argument("--parameters", type=count, metavar="N", help="instead of a recipe: 7b, 6.7e9")
    parser.add_argument("--tokens", type=count, metavar="D", help="training tokens: 140b, 1.4t")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--world_size` and `--gpu`."""
    parser.add_argument("--world_size", type=gpu_count, required=True, metavar="N", help="number of GPUs")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="which kind (see the verb gpus)")


def workload_of(options: argparse.Namespace) -> Workload:
    """Read the workload that the options describe.

    Raises:
        UserError: --recipe and --parameters are both given or both missing, or the recipe is wrong.
    """
    if bool(options.recipe) == bool(options.parameters):
        raise UserError("give either --recipe NAME or --parameters N (with --tokens D)")
    if options.recipe:
        recipe, ds_config = load_recipe_and_ds_config(options.recipe, options.set, options.deepspeed)
        return workload_of_recipe(recipe, ds_config, options.tokens)
    if options.set or options.deepspeed:
        raise UserError("--set and --deepspeed change a recipe: give --recipe NAME instead of --parameters")
    n = options.parameters
    # 6 N (Kaplan et al. 2020), and 2 N more for another forward pass if the layers are recomputed
    return Workload(
        f"{short(n)} parameters", n, n, options.tokens, 6 * n, 8 * n, None, None, None, None, None
    )


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
    size, length = size_of_recipe(recipe), recipe.sequence_length
    counted = flops_per_token(size, length)
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
        sequence_length=length,
    )


class FlopsVerb:
    """Parameters by part and FLOPs per token, in every convention.

    6 N D, the exact count with attention (causal mask credited or not), and what recomputation adds.
    """

    EXAMPLES = """  python -m pretraining.planning flops --recipe 30b
  python -m pretraining.planning flops --recipe 7b --set model.max_position_embeddings=32768 --json
  python -m pretraining.planning flops --parameters 175b --tokens 300b"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_workload_arguments(parser)

    def answer(self, options: argparse.Namespace) -> dict:
        """Return counts per token and over all tokens."""
        workload = workload_of(options)
        tokens = workload.tokens
        # a size alone has no attention, so that the other conventions cannot be counted
        per_token = (
            workload.counted.to_dict() if workload.counted else {"six_n_total": 6 * workload.parameters}
        )
        return {
            "name": workload.name,
            "parameters": workload.parameters,
            "active_parameters": workload.active,
            "parts": asdict(workload.size.parts) if workload.size else None,
            "tied": workload.size.tied if workload.size else None,
            "sequence_length": workload.sequence_length,
            "tokens": tokens,
            "flops_per_token": per_token,
            "flops": {name: flops * tokens for name, flops in per_token.items()} if tokens else None,
            # 8.64e19 FLOPs: one petaFLOP/s for a day
            "petaflop_days": workload.training_flops_per_token * tokens / 8.64e19 if tokens else None,
        }

    def as_text(self, answer: dict) -> str:
        """Write the parts, then the counts."""
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
