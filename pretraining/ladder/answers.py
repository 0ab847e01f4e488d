"""What a ladder answers: its fits, the loss of its recipe, what would be better, and which of two recipes wins."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from pretraining.errors import UserError
from pretraining.ladder.family import shaped_recipe, width_for
from pretraining.ladder.fit import best_values, fit_loss, fit_score
from pretraining.planning.costs import forecast, least_dollars
from pretraining.planning.gpus import Gpu
from pretraining.planning.ladder import DECAYED, STABLE, Expected, Ladder, matmul_parameters, share_words
from pretraining.planning.quantities import dollars, several, short, three_digits
from pretraining.planning.scaling_laws import FAR, Allocation, with_inference
from pretraining.planning.setup import Setup
from pretraining.recipe import Recipe
from pretraining.recipe.fixed_keys import curve_parts
from pretraining.recipe.model import value_of
from pretraining.recipe.refusals import checked_ds_config
from pretraining.runtime.metric_names import lower_is_better
from pretraining.runtime.table import Column, facts, write_table

WIDTHS = 2.0 ** np.arange(-4, 2.5, 0.5)
"""Widths that a budget is tried on, over the recipe's."""
POINTS = 40
"""Of a line of the page."""
SHOWN = 1000.0
"""Times of the recipe's size up to which a size is an answer; the law of points that show nothing has others."""
UNKNOWN = 2.0
"""Times of a loss at which its interval ends, from which on it is not known."""
SURE = 0.95
"""Share of the draws that must name the same winner."""
TEXT = ("data.validation", "data.validation_share", "data.sources", "data.filters", "data.dedup")
TEXT += ("data.decontaminate", "data.skip_undecodable")
"""Keys that decide which text a validation reads; without a share the first alone."""
BEST = {"rate": "best rate", "batch": "best batch", "rate_at_batch": "at its batch"}
"""Labels of what a grid answers; the last is the best rate if the recipe keeps its batch."""
ROWS = (
    Column("run", "run"),
    Column("parameters", "parameters", ","),
    Column("tokens", "tokens", ","),
    Column("rate", "learning_rate", ".3g"),
    Column("loss", "loss", ".4f"),
    Column("law", "law", ".4f"),
    Column("off", "off", "+.2%"),
)


def fitted(target: Recipe, points: list[dict], faults: list[str]) -> dict[str, Any]:
    """Return what ladder.json holds of a ladder with these points (`family.measured`).

    Raises:
        UserError: the points cannot be fitted.
    """
    base = [point for point in points if point["base"]]
    sizes, tokens = ([point[name] for point in base] for name in ("parameters", "tokens"))
    try:
        fits = {DECAYED: fit_loss(sizes, tokens, [point["metrics"]["loss"] for point in base])}
    except UserError as error:
        raise UserError("; ".join([str(error), *faults[:3]])) from None
    stable = [(point["parameters"], *pair) for point in base for pair in point.get("stable", ())]
    fits[STABLE] = fit_loss(*zip(*stable, strict=True)) if stable else fits[DECAYED]
    names = [name for name in base[0]["metrics"] if name.endswith("_loss")]
    for name in names if len(names) > 1 else ():  # those of a single source are the whole validation's
        fits[name] = fit_loss(sizes, tokens, [point["metrics"][name] for point in base])
    flops = Setup(target, None).flops.training * target.num_tokens
    whole = {"parameters": matmul_parameters(target), "tokens": target.num_tokens, "flops": flops}
    return {
        "name": target.name,
        "recipe": target.to_dict(),
        "target": whole,
        "runs": len(base),
        "points": points,
        "faults": faults,
        "fits": {name: asdict(fit) for name, fit in fits.items()},
    }


def answer_of(ladder: Ladder) -> dict[str, Any]:
    """Return what the ladder says of its recipe, as plain JSON values."""
    target, values = ladder.values["target"], ladder.values
    place = target["parameters"], target["tokens"]
    fit = ladder.fits[DECAYED]
    expected, law = fit.at(*place), fit.law
    base = sorted((point for point in values["points"] if point["base"]), key=_place)
    rows = [{**point, "loss": point["metrics"]["loss"], "law": fit.at(*_place(point)).loss} for point in base]
    losses, scores = [row["loss"] for row in rows], {}
    # a lower loss is a higher score
    ends = {"score": expected.loss, "low": expected.high, "high": expected.low}
    for name in (name for name in base[0]["metrics"] if not lower_is_better(name)):
        if curve := fit_score(losses, [point["metrics"].get(name, math.nan) for point in base]):
            scores[name] = {end: curve(loss) for end, loss in ends.items()}
    optimum = None
    # a law in which size or tokens explain nothing has no optimum
    with suppress(ZeroDivisionError, OverflowError):
        there = law.frontier().at_flops(Allocation(*place).flops)
        if _is_shown(there, place[0]):
            optimum = {**there.to_dict("the law"), "loss": law.loss(there.parameters, there.tokens)}
    points, best, notes = values["points"], {}, [*fit.notes, *values["faults"]]
    if any(not point["base"] for point in points):
        tried = [(point["learning_rate"], point["tokens_per_step"]) for point in points]
        reached = [point["metrics"]["loss"] for point in points]
        batch = values["recipe"]["budget"]["tokens_per_step"]
        best, missing = best_values([*map(_place, points)], tried, reached, place, batch)
        notes += missing
    if (times := target["flops"] / ladder.most_flops) > FAR:
        what = f"the recipe has {times:,.0f} times the compute of the largest run"
        notes.append(f"{what}: no fit is sure so far away")
    sources = [name for name in ladder.fits if name.endswith("_loss")]
    return {
        "expected": expected._asdict(),
        "share": ladder.most_flops / target["flops"],
        "noise": fit.noise,
        "left_out": fit.left_out,
        "rows": [{**row, "off": row["loss"] / row["law"] - 1} for row in rows],
        "twice_the_tokens": law.loss(place[0], 2 * place[1]) - expected.loss,
        "twice_the_size": law.loss(2 * place[0], place[1]) - expected.loss,
        "optimum": optimum,
        "sources": {name: ladder.fits[name].at(*place)._asdict() for name in sources},
        "scores": scores,
        "best": best,
        "notes": notes,
    }


def _is_shown(found: Allocation, parameters: float) -> bool:
    return 1 / SHOWN < found.parameters / parameters < SHOWN


def _place(point: dict) -> tuple[float, float]:
    return point["parameters"], point["tokens"]


def best_size(
    ladder: Ladder, target: Recipe, budget: float, gpu: Gpu | None = None, world_size: int = 1
) -> dict[str, Any]:
    """Return the size and tokens of the family with the lowest expected loss, for a budget of FLOPs or of dollars.

    gpu: the budget is dollars on so many of them; None: training FLOPs.
    """
    own, rows = value_of(target.model, "hidden_size"), []
    widths = dict.fromkeys(max(8, round(own * share / 8) * 8) for share in WIDTHS)
    for width in widths:
        setup = Setup(recipe := shaped_recipe(target, width), checked_ds_config(recipe), world_size)
        cost = float(setup.flops.training)
        if gpu:
            least = least_dollars(forecast(setup, gpu)["cost"])
            if least is None:
                what = f"no price of {gpu.name} is known; set report.dollars_per_gpu_hour"
                raise UserError(f"--dollars: {what}")
            cost = least / recipe.num_tokens
        parameters, tokens = matmul_parameters(recipe), budget / cost
        expected = ladder.fits[DECAYED].at(parameters, tokens)
        rows.append({"width": width, "parameters": parameters, "tokens": tokens, **expected._asdict()})
    # a law that the points do not carry has intervals without an end
    known = [row for row in rows if row["high"] < UNKNOWN * row["loss"]]
    if not known:
        option = "--dollars" if gpu else "--flops"
        raise UserError(
            f"{option}: the points do not show the loss at such a budget; add --sizes or --points"
        )
    best = min(known, key=lambda row: row["loss"])
    return best | {"at_the_end": best in (rows[0], rows[-1])}


def best_to_serve(ladder: Ladder, target: Recipe, served: float) -> dict[str, Any]:
    """Return the size that reaches the recipe's expected loss with the fewest FLOPs of training and serving.

    Sardana et al. 2024, equation 3.
    """
    place = ladder.values["target"]
    law = ladder.fits[DECAYED].law
    loss = law.loss(place["parameters"], place["tokens"])
    try:
        best = with_inference(law, loss, served)
    except (ZeroDivisionError, OverflowError, ValueError):
        best = None
    if best is None or not _is_shown(best, place["parameters"]):
        raise UserError("--serve: the points do not show what size and tokens bring; add --sizes")
    both = Allocation(place["parameters"], place["tokens"]), best
    before, after = (each.flops + 2 * each.parameters * served for each in both)
    values = {"width": width_for(target, best.parameters), "loss": loss, "saved": 1 - after / before}
    return {**best.to_dict("Sardana et al. 2024, equation 3"), **values}


def compare(ours: Ladder, theirs: Ladder) -> dict[str, Any]:
    """Say which of two recipes wins at the compute of the first, and how sure that is.

    Draws of the two are taken in pairs: what both families have in common, as the order of their data, cancels. The
    difference is below the noise unless SURE of the pairs, and the laws without a part of the ladders, name one winner.

    Raises:
        UserError: their losses count other tokens.
    """
    first, second = ours.values, theirs.values
    if first["recipe"]["data"]["tokenizer"] != second["recipe"]["data"]["tokenizer"]:
        raise UserError(f"--against {theirs.file}: has another tokenizer, whose losses cannot be compared")
    texts = [_validation_text(values["recipe"]) for values in (first, second)]
    if others := [key for key in texts[0] if texts[0][key] != texts[1].get(key)]:
        what = f"its losses are of other text ({', '.join(others)}); give both the same data.validation"
        raise UserError(f"--against {theirs.file}: {what}, validation_share 0 and a known tokenizer")
    place, other = first["target"], second["target"]
    # as many tokens as the same compute pays for
    tokens = place["flops"] / (other["flops"] / other["tokens"])
    places = (place["parameters"], place["tokens"]), (other["parameters"], tokens)
    fits = [ladder.fits[DECAYED] for ladder in (ours, theirs)]

    def gaps(*laws: Sequence[Any]) -> np.ndarray:
        """Return log of ours over theirs, law by law."""
        losses = [[law.loss(*at) for law in each] for at, each in zip(places, laws, strict=True)]
        return np.log([a / b for a, b in zip(*losses, strict=False)])

    middle = float(gaps([fits[0].law], [fits[1].law])[0])
    draws, parts = gaps(*(fit.draws for fit in fits)), gaps(*(fit.without for fit in fits))
    sure = float(np.mean(draws * middle > 0))
    names = [first["name"], second["name"]]
    if names[0] == names[1]:
        names = [ladder.file.parent.name for ladder in (ours, theirs)]
    is_clear = sure >= SURE and bool(np.all(parts * middle > 0))
    low, high = np.expm1(np.quantile(draws, [0.05, 0.95]))
    return {
        "names": names,
        "losses": [fit.law.loss(*at) for fit, at in zip(fits, places, strict=True)],
        "difference": math.expm1(middle),
        "low": float(low),
        "high": float(high),
        "sure": sure,
        "winner": names[middle > 0] if is_clear else None,
    }


def _validation_text(recipe: dict) -> dict[str, Any]:
    """Return what decides the text that a resolved recipe is validated on, and the tokens that are made of it."""
    parts, most = curve_parts(recipe), recipe["evaluation"].get("max_validation_tokens")
    # what is learned from the sources differs with them
    is_own = not parts["data.validation_share"] and "train_vocab_size" not in parts["data.tokenizer"]
    # how often training reads a source decides nothing
    parts["data.sources"] = [{**each, "weight": None, "max_epochs": None} for each in parts["data.sources"]]
    text = {name: parts[name] for name in (TEXT[:1] if is_own else TEXT)}
    return text | {"evaluation.max_validation_tokens": most}


def as_text(answer: dict[str, Any], values: dict[str, Any]) -> str:
    return f"{write_table(ROWS, answer['rows'])}\n\n{facts(fact_rows(answer, values))}"


def fact_rows(answer: dict[str, Any], values: dict[str, Any]) -> list[tuple[str, str]]:
    """Write every answer as a label and a line."""
    expected = Expected(**answer["expected"])
    law = values["fits"][DECAYED]["law"]
    tokens, larger = answer["twice_the_tokens"], answer["twice_the_size"]
    runs = f"{several(values['runs'], 'run')}, up to {share_words(1 / answer['share'])}"
    terms = f"{law['A']:.4g} / N^{law['alpha']:.3g} + {law['B']:.4g} / D^{law['beta']:.3g}"
    noise = f"a run is off the law by {answer['noise']:.2%}"
    if answer["left_out"] is not None:
        noise += f"; without the largest size it is off by {answer['left_out']:+.2%} there"
    rows = [
        ("ladder", f"of {values['name']}: {runs}"),
        ("loss", f"{expected.words} at {_sized(values['target'])}"),
        ("law", f"L = {law['E']:.4g} + {terms}"),
        ("noise", noise),
        ("doubling", f"twice the tokens {tokens:+.3f}, twice the size {larger:+.3f}"),
    ]
    if optimum := answer["optimum"]:
        rows.append(("same FLOPs", f"best at {_sized(optimum)}: {optimum['loss']:.3f}"))
    for name, each in answer["sources"].items():
        rows.append((name.removesuffix("_loss"), f"loss {Expected(**each).words}"))
    for name, each in answer["scores"].items():
        rows.append((name, f"{each['score']:.3f} ({each['low']:.3f} to {each['high']:.3f})"))
    for name, best in answer["best"].items():
        value, low, high = map(short if name == "batch" else three_digits, best)
        rows.append((BEST[name], f"{value} ({low} to {high})"))
    for name, what in (("flops", "FLOPs"), ("dollars", "")):
        if best := answer.get(name):
            budget = f"{best['budget']:.3g} {what}" if what else dollars(best["budget"])
            words = Expected(*(best[key] for key in Expected._fields)).words
            words += "; no width beyond it was tried" if best["at_the_end"] else ""
            rows.append((f"for {budget}", f"width {best['width']}, {_sized(best)}: {words}"))
    if best := answer.get("serve"):
        words = f"width {best['width']}, {_sized(best)}: the same loss for {best['saved']:.0%} less"
        rows.append((f"to serve {short(best['served'])}", words))
    if found := answer.get("against"):
        first, second = found["names"]
        text = f"{found['losses'][0]:.4f} and {found['losses'][1]:.4f} at the same compute; {first} is "
        text += f"{found['difference']:+.2%} off {second} ({found['low']:+.2%} to {found['high']:+.2%}): "
        won = f"{found['winner']} wins, in {found['sure']:.0%} of the draws"
        unknown = "below the noise of the ladders, so neither is known to win"
        rows.append(("against", text + (won if found["winner"] else unknown)))
    return rows + [("note", note) for note in answer["notes"]]


def ladder_payload(ladder: Ladder, answer: dict[str, Any]) -> dict[str, Any]:
    """Return what the ladder's page shows: points and laws by size, the forecast by compute, and the answers."""
    fit, target, sizes = ladder.fits[DECAYED], ladder.values["target"], []
    # rows are in the order of size and tokens
    for name, group in groupby(answer["rows"], key=itemgetter("size")):
        rows = list(group)
        first, last = rows[0], rows[-1]
        tokens = np.geomspace(first["tokens"], last["tokens"], POINTS)
        law = [fit.law.loss(first["parameters"], each) for each in tokens]
        flops = (tokens * first["flops"] / first["tokens"]).tolist()
        size = {key: [row[key] for row in rows] for key in ("flops", "loss", "off")}
        sizes.append({"name": name, **size, "law": {"flops": flops, "value": law}})
    smallest = min(row["parameters"] for row in answer["rows"]) / target["parameters"]
    # along the family: size and tokens grow together, and so compute goes as the square
    shares = np.geomspace(min(smallest, 1.0), 1.0, POINTS)
    flops = (target["flops"] * shares**2).tolist()
    curves = fit.curve(*((target[name] * shares).tolist() for name in ("parameters", "tokens")))
    return {
        "name": ladder.values["name"],
        "sizes": sizes,
        "forecast": {name: {"flops": flops, "value": values} for name, values in curves.items()},
        "answers": fact_rows(answer, ladder.values),
        "columns": [column.title for column in ROWS],
        "rows": [[column.cell(row) for column in ROWS] for row in answer["rows"]],
    }


def _sized(values: dict[str, Any]) -> str:
    return f"{short(values['parameters'])} parameters in matrices on {short(values['tokens'])} tokens"
