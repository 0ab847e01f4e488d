"""Whether a ladder of small runs foresees large ones: their loss, the best rate and batch, the better of two recipes.

    python benchmarks/ladder.py forecast --keep
    python benchmarks/ladder.py rates --keep
    python benchmarks/ladder.py pairs --keep
    python benchmarks/ladder.py forecast --small

Each trains ladders of recipes of SHAPE and then the runs that they foresee, in --folder, one run on each core:
`seconds` are their sum. What has finished is not trained again: after a stop the same command goes on, run by run.

forecast: tokens for four and for eight times the FLOPs of the largest run, with every seed: `error` of the foreseen
loss, and whether the interval holds the measured one (`inside`).

rates: a ladder with a grid of rates and batches; then at eight times its compute a cross around the best rate and batch
that it foresees, each with every seed. `regret` is the mean loss there over the lowest mean of the cross.

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

from gear import (
    REPOSITORY,
    TEXT_FOLDERS,
    choices,
    chosen,
    machine_texts,
    on_each_core,
    parser_of,
    record,
    run_command,
    write_corpus,
)

BYTES = {"data.name": "python-bytes", "data.tokenizer": {"units": "bytes"}, "model.vocab_size": 257}
"""The demo's text, 10.8 million bytes of it: of tokens that are bytes no run of a minute has seen too few."""
SHAPE = {
    "model.hidden_size": 96,
    "model.intermediate_size": 384,
    "model.num_hidden_layers": 6,
    "model.num_attention_heads": 6,
    "model.max_position_embeddings": 64,
    "model.longest_ngram": 1,
    "training.per_device_train_batch_size": 16,
    "optimizer.groups": [{"kind": "embedding", "learning_rate": 0.1}],
}
"""Of what is foreseen. Narrower members have whole layers and heads; of the demo's four layers few would. Sequences are
short: with 256 bytes a seed moves the end by 2 %, as a run learns to copy from far back sooner or later."""
LADDER = {"widths": "32,48,64", "longest": 1.25}
"""Up to an eighth of the FLOPs of the recipe."""
TOKENS = {"forecast": 9_400_000, "rates": 2_400_000, "pairs": 2_400_000}
SHARES = (0.5, 1.0)
"""Of the tokens: what is foreseen."""
DEEP = {
    "model.hidden_size": 72,
    "model.intermediate_size": 288,
    "model.num_hidden_layers": 12,
    "model.num_attention_heads": 6,
}
DEEP_WIDTHS = "24,36,48"
"""The other shape of the pair, and the widths of its ladder: of 4, 6 and 8 layers."""
AROUND = (0.5, 1.0, 2.0)
"""Factors around the best rate and batch that are foreseen."""
SMALL = {"budget.tokens": 24_576, "evaluation.max_validation_tokens": 2_000}
PROSE_BYTES = 8 << 20
"""Of the second source of a mixture: documentation of this machine."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["forecast", "rates", "pairs"])
    parser.add_argument("--recipe", default="tiny", help="in the shape of SHAPE")
    parser.add_argument("--tokens", type=int, help="of the recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "ladder-benchmark")
    parser.add_argument("--data_dir", type=Path, default=REPOSITORY / "data")
    parser.add_argument("--small", action="store_true", help="try it in minutes")
    options = parser.parse_args()
    options.tokens = options.tokens or TOKENS[options.what]
    if options.small:
        options.seeds, options.folder = options.seeds[:1], options.folder.with_name("ladder-benchmark-small")
    {"forecast": forecast, "rates": rates, "pairs": pairs}[options.what](options)


def ladder_of(options: argparse.Namespace, name: str, settings: dict, **asked):
    """Return the ladder of the recipe in SHAPE with these settings; and the recipe.

    Its members are trained first, one on each core: the lines of `--commands`, the largest first.
    """
    from pretraining.api import prepare, settings_of, words_of
    from pretraining.ladder import climb
    from pretraining.recipe import load_recipe

    # all of the validation text: its first tokens are harder than the rest, and follow another law
    length = SMALL if options.small else {"budget.tokens": options.tokens}
    settings = {**length, **BYTES, **SHAPE, **settings}
    prepare(options.recipe, set=settings, data_dir=options.data_dir, show=False)
    asked = {
        **LADDER,
        **asked,
        "deepspeed": "null",
        "data_dir": options.data_dir,
        "output_dir": options.folder / name,
    }
    words = [options.recipe, *words_of({"set": settings, **asked})]
    lines = run_command(sys.executable, "-m", "pretraining.ladder", *words, "--commands").stdout.splitlines()
    on_each_core(lambda line: run_command("bash", "-c", line), reversed(lines))
    ladder = climb(options.recipe, set=settings, **asked)
    return ladder, load_recipe(options.recipe, settings_of(settings), "null")


def members_of(recipe, folder: Path, **asked) -> list:
    """Return the members of the recipe's family at its own width and tokens, unless `asked` says otherwise."""
    from pretraining.ladder.__main__ import parse
    from pretraining.ladder.family import family_of
    from pretraining.recipe.model import value_of

    own = {"widths": (value_of(recipe.model, "hidden_size"),), "points": 1, "longest": 1.0}
    options = parse([str(recipe.path)])
    vars(options).update(own | asked)
    members = family_of(recipe, options, folder / "recipes")
    for member in members:
        member.write()
    return members


def losses_of(options: argparse.Namespace, members: list, folder: Path, seeds: list[int]) -> dict[str, list]:
    """Train each member with each seed, unless that is done, one on each core; return the losses by member."""
    from pretraining.runtime.durable_files import read_rows
    from pretraining.runtime.run_folder import RunFolder

    runs = [(member, seed) for member in members for seed in seeds]

    def loss_of(run: tuple) -> float:
        member, seed = run
        place = run_of(folder, member, seed)
        words = ["--recipe", member.recipe.path, "--data_dir", options.data_dir, "--output_dir", place]
        run_command(sys.executable, "train.py", *words, *choices({"training.seed": seed}))
        rows = [row for row in read_rows(RunFolder(place).metrics) if "eval/loss" in row]
        return round(rows[-1]["eval/loss"], 5)

    losses = on_each_core(loss_of, runs)
    return {
        member.name: [loss for (each, _), loss in zip(runs, losses, strict=True) if each is member]
        for member in members
    }


def run_of(folder: Path, member, seed: int) -> Path:
    return folder / f"{member.name}-seed{seed}"


def compared(ladder, member, folder: Path, seeds: list[int], losses: list[float]) -> dict:
    """Return the losses of a member's runs beside what its ladder foresees."""
    from pretraining.planning.ladder import DECAYED

    foreseen = ladder.fits[DECAYED].at(member.parameters, member.recipe.num_tokens)
    return {
        "foreseen": [round(value, 5) for value in foreseen],
        "losses": losses,
        "error": round(foreseen.loss / statistics.mean(losses) - 1, 5),
        "inside": sum(foreseen.low <= loss <= foreseen.high for loss in losses),
        "seconds": seconds_of([run_of(folder, member, seed) for seed in seeds]),
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

    ladder, recipe = ladder_of(options, "forecast", {})
    for share in SHARES:
        folder = options.folder / f"share{share:g}"
        (member,) = members_of(recipe, folder, longest=share)
        flops = Setup(member.recipe, None).flops.training * member.recipe.num_tokens
        losses = losses_of(options, [member], folder, options.seeds)[member.name]
        values = {
            **chosen(options, "folder", "data_dir"),
            "shape": SHAPE,
            "ladder": LADDER,
            "times": round(flops / ladder.most_flops, 2),
            **described(ladder),
            **compared(ladder, member, folder, options.seeds, losses),
            "notes": ladder.fits[DECAYED].notes,
        }
        record("ladder_forecast", values, options.keep)


def rates(options: argparse.Namespace) -> None:
    from pretraining.ladder.answers import answer_of

    wide = {"rates": "0.5,2"} if options.small else {"rates": "0.5,2", "batches": "0.5,2"}
    ladder, recipe = ladder_of(options, "rates", {}, **wide)
    (own,) = members_of(recipe, options.folder)
    best = answer_of(ladder)["best"]
    own_values = {"rate": own.recipe.training.learning_rate, "batch": own.recipe.tokens_per_step}
    # if the ladder's grid shows no best batch, the size keeps its own, and there is a best rate for that
    foreseen = {"rate": best.get("rate", best.get("rate_at_batch")), "batch": best.get("batch")}
    factors = {
        name: foreseen[name][0] / value if foreseen[name] else 1.0 for name, value in own_values.items()
    }
    around = AROUND[:2] if options.small else AROUND
    grid = {name: tuple(factors[name] * each for each in around) for name in factors}
    cross = []
    for member in members_of(recipe, options.folder, rates=grid["rate"], batches=grid["batch"]):
        rate, batch = member.recipe.training.learning_rate, member.recipe.tokens_per_step
        off = abs(math.log(rate / own_values["rate"] / factors["rate"]))
        off += abs(math.log(batch / own_values["batch"] / factors["batch"]))
        # a cross: one of them is as foreseen
        if off <= 1.0:
            cross.append((off, member, {"rate": rate, "batch": batch}))
    losses = losses_of(options, [member for _, member, _ in cross], options.folder, options.seeds)
    found = [
        (off, {**tried, **compared(ladder, member, options.folder, options.seeds, losses[member.name])})
        for off, member, tried in cross
    ]
    _, nearest = min(found, key=lambda each: each[0])
    means = [statistics.mean(each["losses"]) for _, each in found]
    values = {
        **chosen(options, "folder", "data_dir"),
        **described(ladder),
        "best": best,
        "cross": {f"{each['rate']:.4g} {each['batch']}": each["losses"] for _, each in found},
        **nearest,
        "seconds": sum(each["seconds"] for _, each in found),
        "regret": round(statistics.mean(nearest["losses"]) / min(means) - 1, 5),
    }
    record("ladder_rates", values, options.keep)


def pairs(options: argparse.Namespace) -> None:
    from pretraining.api import settings_of
    from pretraining.ladder.answers import compare
    from pretraining.planning.setup import Setup
    from pretraining.recipe import load_recipe

    prose = options.folder / "prose"
    if not prose.is_dir():
        texts = [*machine_texts((".md", ".rst", ".txt"), TEXT_FOLDERS[1:])]
        write_corpus(prose, PROSE_BYTES // 8 if options.small else PROSE_BYTES, 1, texts)
    sources = [{"builtin": "python_stdlib", "name": "stdlib"}, {"path": str(prose), "name": "prose"}]

    def mixture(*weights: float) -> dict:
        weighted = [{**source, "weight": weight} for source, weight in zip(sources, weights, strict=True)]
        return {"data.name": f"ladder-{weights[0]:g}-bytes", "data.sources": weighted}

    pairs_of = {
        "shapes": ({}, DEEP),
        "optimizers": ({"optimizer.name": "adamw"}, {"optimizer.name": "muon"}),
        "mixtures": (mixture(0.5, 0.5), mixture(0.95, 0.05)),
    }
    for name, (first, second) in pairs_of.items():
        found = []
        for letter, own in zip("ab", (first, second), strict=True):
            settings = {**BYTES, **SHAPE, **own, "name": f"{name}-{letter}"}
            if found:
                # as much compute as the first has
                other = load_recipe(options.recipe, settings_of(settings), "null")
                flops = found[0][0].values["target"]["flops"] / Setup(other, None).flops.training
                settings["budget.tokens"] = round(flops)
            widths = {"widths": DEEP_WIDTHS} if own is DEEP else {}
            found.append(ladder_of(options, settings["name"], settings, **widths))
        answer = compare(found[0][0], found[1][0])
        seeds = options.seeds[:2]

        def result_of(ladder_and_recipe: tuple, seeds: list[int] = seeds) -> dict:
            ladder, recipe = ladder_and_recipe
            folder = options.folder / f"{recipe.name}-target"
            (member,) = members_of(recipe, folder)
            losses = losses_of(options, [member], folder, seeds)[member.name]
            return {**described(ladder), **compared(ladder, member, folder, seeds, losses)}

        results = on_each_core(result_of, found)
        means = [statistics.mean(result["losses"]) for result in results]
        better = answer["names"][means[0] > means[1]]
        values = {"pair": name, **answer, "measured": results, "better": better}
        values["right"] = answer["winner"] in (None, better)
        record("ladder_pairs", {**chosen(options, "folder", "data_dir"), **values}, options.keep)


if __name__ == "__main__":
    main()
