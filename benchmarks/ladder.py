"""Whether a ladder of small runs foresees large ones: their loss, the best rate and batch, the better of two recipes.

    python benchmarks/ladder.py forecast --keep
    python benchmarks/ladder.py rates --keep
    python benchmarks/ladder.py pairs --keep
    python benchmarks/ladder.py forecast --small

Each trains ladders of --recipe and then the runs that they foresee, in --folder. What has finished is not trained
again: after a stop the same command goes on, run by run.

forecast: members of the family of four and more than eight times the compute of the largest run, with every seed:
`error` of the foreseen loss, and whether the interval holds the measured one (`inside`). The family is SHAPE, whose
widths have whole layers and heads: of the demo's four layers no ladder of this size keeps the shape.

rates: a ladder with a grid of rates and batches; then at eight times its compute a cross around the best rate and batch
that it foresees. `regret` is the loss there over the lowest of the cross.

pairs: two mixtures of data, two shapes, two optimizers, each recipe with a ladder, at equal compute; which of the two
wins at eight times the largest run's, foreseen and measured. `right` is also true if the tool says that it does not
know.

--small: a model of hundreds of thousands of parameters fewer, for a few steps: it tries the script in minutes.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path

from gear import REPOSITORY, TEXT_FOLDERS, chosen, machine_texts, parser_of, record, write_corpus

SHAPE = {
    "model.hidden_size": 112,
    "model.intermediate_size": 448,
    "model.num_hidden_layers": 7,
    "model.num_attention_heads": 7,
    "model.longest_ngram": 1,
    "optimizer.groups": [{"kind": "embedding", "learning_rate": 0.1}],
}
WIDTHS, TARGETS, FORECAST_TOKENS = "32,48,64", (96, 112), 9_300_000
"""Of the ladder; of what it foresees. The tokens, of the widest, are read at most twice and a third."""
AROUND = (0.5, 1.0, 2.0)
"""Factors around the best rate and batch that are foreseen."""
SMALL = {"budget.tokens": 24_576, "evaluation.max_validation_tokens": 2_000}
UP_TO = 1 / 8
"""Of the compute of what is foreseen: the largest run."""
PROSE_BYTES = 8 << 20
"""Of the second source of a mixture: documentation of this machine."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["forecast", "rates", "pairs"])
    parser.add_argument("--recipe", default="features/gpt2", help="of rates and pairs")
    parser.add_argument("--tokens", type=int, default=2_457_600, help="of that recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "ladder-benchmark")
    parser.add_argument("--data_dir", type=Path, default=REPOSITORY / "data")
    parser.add_argument("--small", action="store_true", help="try it in minutes")
    options = parser.parse_args()
    if options.small:
        options.seeds, options.folder = options.seeds[:1], options.folder.with_name("ladder-benchmark-small")
    {"forecast": forecast, "rates": rates, "pairs": pairs}[options.what](options)


def ladder_of(options: argparse.Namespace, name: str, settings: dict, **more):
    """Return the ladder of the recipe with these settings, up to an eighth of its compute; and the recipe."""
    from pretraining.api import prepare, settings_of
    from pretraining.ladder import climb
    from pretraining.recipe import load_recipe

    # all of the validation text: its first tokens are harder than the rest, and follow another law
    settings = {**(SMALL if options.small else {"budget.tokens": options.tokens}), **settings}
    prepare(options.recipe, set=settings, data_dir=options.data_dir, show=False)
    small = {"widths": "24,32,40"} if options.small else {"up_to": UP_TO}
    places = {"data_dir": options.data_dir, "output_dir": options.folder / name}
    ladder = climb(options.recipe, set=settings, deepspeed="null", **places, **{**small, **more})
    return ladder, load_recipe(options.recipe, settings_of(settings), "null")


def members_of(recipe, width: int, folder: Path, **factors) -> list:
    """Return the members of the recipe's family at a width and its tokens per parameter."""
    from pretraining.ladder.family import Choices, family_of

    chosen = Choices(widths=(width,), points=1, longest=1.0, **factors)
    members = family_of(recipe, chosen, folder / "recipes")
    for member in members:
        member.write()
    return members


def measured(options: argparse.Namespace, ladder, member, folder: Path, seeds: list[int]) -> dict:
    """Train a member with each seed, unless that is done; return its losses beside what its ladder foresees."""
    from pretraining.api import run
    from pretraining.planning.ladder import DECAYED

    foreseen = ladder.fits[DECAYED].at(member.parameters, member.recipe.num_tokens)
    places = [folder / f"{member.name}-seed{seed}" for seed in seeds]
    losses = []
    for place, seed in zip(places, seeds, strict=True):
        settings = {"training.seed": seed}
        end = run(member.recipe.path, set=settings, data_dir=options.data_dir, output_dir=place)
        if end.exit_reason != "finished":
            sys.exit(f"{place}: {end.exit_reason}; the same command goes on")
        losses.append(end.metrics["eval/loss"])
    return {
        "foreseen": [round(value, 5) for value in foreseen],
        "losses": [round(loss, 5) for loss in losses],
        "error": round(foreseen.loss / statistics.mean(losses) - 1, 5),
        "inside": sum(foreseen.low <= loss <= foreseen.high for loss in losses),
        "seconds": seconds_of(places),
    }


def seconds_of(folders: list[Path]) -> int:
    """Return the wall time of these runs, whenever they ran."""
    from pretraining.reporting.run_record import RunRecord

    return round(sum(RunRecord(folder).wall_time().seconds for folder in folders))


def described(ladder) -> dict:
    folders = [ladder.file.parent / point["run"] for point in ladder.values["points"]]
    return {"ladder_runs": len(folders), "ladder_seconds": seconds_of(folders)}


def forecast(options: argparse.Namespace) -> None:
    from pretraining.planning.ladder import DECAYED
    from pretraining.planning.setup import Setup

    options.recipe, options.tokens = "tiny", FORECAST_TOKENS
    ladder, recipe = ladder_of(options, "forecast", SHAPE, **({} if options.small else {"widths": WIDTHS}))
    for width in TARGETS[:1] if options.small else TARGETS:
        (member,) = members_of(recipe, width, options.folder)
        flops = Setup(member.recipe, None).flops.training * member.recipe.num_tokens
        values = {
            **chosen(options, "folder", "data_dir"),
            "shape": SHAPE,
            "times": round(flops / ladder.most_flops, 2),
            "width": width,
            **described(ladder),
            **measured(options, ladder, member, options.folder, options.seeds),
            "notes": ladder.fits[DECAYED].notes,
        }
        record("ladder_forecast", values, options.keep)


def rates(options: argparse.Namespace) -> None:
    from pretraining.ladder.fit import best_at
    from pretraining.planning.ladder import matmul_parameters
    from pretraining.recipe.model import value_of

    tried = {"rates": "0.5,2"} if options.small else {"rates": "0.5,2", "batches": "0.5,2"}
    ladder, recipe = ladder_of(options, "rates", {}, sizes=3, points=2, **tried)
    place, width = (matmul_parameters(recipe), recipe.num_tokens), value_of(recipe.model, "hidden_size")
    (own,) = members_of(recipe, width, options.folder)
    best = {name: best_at(law, *place) for name, law in ladder.values["best"].items()}
    own_values = {"rate": own.recipe.training.learning_rate, "batch": own.recipe.tokens_per_step}
    # what the grid of the ladder does not show stays the size's own
    factors = {name: best[name][0] / value if name in best else 1.0 for name, value in own_values.items()}
    around = AROUND[:2] if options.small else AROUND
    grid = {name: tuple(factors[name] * each for each in around) for name in factors}
    found = []
    for member in members_of(recipe, width, options.folder, rates=grid["rate"], batches=grid["batch"]):
        rate, batch = member.recipe.training.learning_rate, member.recipe.tokens_per_step
        off = abs(math.log(rate / own_values["rate"] / factors["rate"]))
        off += abs(math.log(batch / own_values["batch"] / factors["batch"]))
        # a cross: one of them is as foreseen
        if off > 1.0:
            continue
        result = measured(options, ladder, member, options.folder, options.seeds[:1])
        found.append((off, {"rate": rate, "batch": batch, **result}))
    _, nearest = min(found, key=lambda each: each[0])
    values = {
        **chosen(options, "folder", "data_dir"),
        **described(ladder),
        "best": {name: [float(f"{value:.4g}") for value in each] for name, each in best.items()},
        "cross": {f"{each['rate']:.4g} {each['batch']}": each["losses"][0] for _, each in found},
        **nearest,
        "seconds": sum(each["seconds"] for _, each in found),
        "regret": round(nearest["losses"][0] / min(each["losses"][0] for _, each in found) - 1, 5),
    }
    record("ladder_rates", values, options.keep)


def pairs(options: argparse.Namespace) -> None:
    from pretraining.api import settings_of
    from pretraining.ladder.answers import compare
    from pretraining.planning.setup import Setup
    from pretraining.recipe import load_recipe
    from pretraining.recipe.model import own_key, value_of

    model = load_recipe(options.recipe).model
    layers, width = value_of(model, "num_hidden_layers"), value_of(model, "hidden_size")
    shape = {"num_hidden_layers": max(1, layers // 2), "hidden_size": round(width * 1.375 / 8) * 8}
    shape = {f"model.{own_key(model, name)}": value for name, value in shape.items()}
    prose = options.folder / "prose"
    if not prose.is_dir():
        texts = [*machine_texts((".md", ".rst", ".txt"), TEXT_FOLDERS[1:])]
        write_corpus(prose, PROSE_BYTES // 8 if options.small else PROSE_BYTES, 1, texts)
    sources = [{"builtin": "python_stdlib", "name": "stdlib"}, {"path": str(prose), "name": "prose"}]

    def mixture(*weights: float) -> dict:
        weighted = [{**source, "weight": weight} for source, weight in zip(sources, weights, strict=True)]
        return {"data.name": f"ladder-{weights[0]:g}", "data.sources": weighted}

    compared = {
        "shapes": ({}, shape),
        "optimizers": ({"optimizer.name": "adamw"}, {"optimizer.name": "muon"}),
        "mixtures": (mixture(0.5, 0.5), mixture(0.95, 0.05)),
    }
    for name, (first, second) in compared.items():
        found = []
        for number, settings in enumerate((first, second)):
            if found:
                # as much compute as the first has
                other = load_recipe(options.recipe, settings_of(settings), "null")
                flops = found[0][0].values["target"]["flops"] / Setup(other, None).flops.training
                settings = {**settings, "budget.tokens": round(flops)}
            named = {**settings, "name": f"{name}-{'ab'[number]}"}
            found.append(ladder_of(options, f"{name}-{'ab'[number]}", named))
        answer = compare(found[0][0], found[1][0])
        results = []
        for number, (ladder, recipe) in enumerate(found):
            folder = options.folder / f"{name}-{'ab'[number]}-target"
            (member,) = members_of(recipe, value_of(recipe.model, "hidden_size"), folder)
            result = measured(options, ladder, member, folder, options.seeds[:2])
            results.append({**described(ladder), **result})
        means = [statistics.mean(result["losses"]) for result in results]
        better = answer["names"][means[0] > means[1]]
        values = {"pair": name, **answer, "measured": results, "better": better}
        values["right"] = answer["winner"] in (None, better)
        record("ladder_pairs", {**chosen(options, "folder", "data_dir"), **values}, options.keep)


if __name__ == "__main__":
    main()
