"""`python -m pretraining.ladder`: the family, runs and kills, fits with known answers, what plan and report say."""

import json
import random
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from pretraining.ladder import climb
from pretraining.ladder.__main__ import main
from pretraining.ladder.answers import answer_of, as_text, best_size, compare, fitted, ladder_payload
from pretraining.ladder.family import scale_rates, width_for
from pretraining.ladder.fit import best_values, fit_loss, fit_score
from pretraining.planning.__main__ import main as plan_main
from pretraining.planning.ladder import DECAYED, FILE, STABLE, matmul_parameters, read_ladder
from pretraining.planning.scaling_laws import ParametricLoss, parametric_loss
from pretraining.planning.shapes import widths_of
from pretraining.recipe import load_recipe
from pretraining.reporting.analysis import analyze
from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.durable_files import append_row, write_json
from tests.gear.finished_data import refusal
from tests.gear.ladders import LADDER_SETTINGS, SMALL_SIZES, ladder_command, small_ladder
from tests.gear.runs import FAMILIES, OTHER_MODELS, Started, completed, execute, forked_programs, refused

LAW = parametric_loss("besiroglu")
SIZES, RATIOS = (1e7, 2e7, 4e7, 8e7), (10, 20, 40)


def points_of(
    sizes=SIZES, ratios=RATIOS, noise: float = 0.0, law: ParametricLoss = LAW, seed: int = 0
) -> tuple[list, list, list]:
    """Return the points of a ladder with a known law: every size at every number of tokens per parameter."""
    draws = np.random.default_rng(seed)
    places = [(size, ratio * size) for size in sizes for ratio in ratios]
    losses = [law.loss(*place) * float(np.exp(draws.normal(0, noise))) for place in places]
    return [size for size, _ in places], [tokens for _, tokens in places], losses


@pytest.fixture(scope="session")
def ladder(workshop) -> Path:
    """The folder of a whole small ladder of nine runs."""
    return small_ladder(workshop)


@pytest.mark.parametrize("law", [LAW, ParametricLoss(0.7, 30.0, 55.0, 0.45, 0.2, "")])
@pytest.mark.parametrize("scale", [1.0, 0.005])
def test_known_constants_are_recovered(law, scale):
    """Within 2 %, from ladders of large models and of tiny ones; and the loss far beyond them."""
    sizes = [scale * size for size in SIZES]
    found = fit_loss(*points_of(sizes, law=law))
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(found.law, name) == pytest.approx(getattr(law, name), rel=0.02), name
    far = 30 * sizes[-1], 600 * sizes[-1]
    assert found.at(*far).loss == pytest.approx(law.loss(*far), rel=1e-3)
    assert abs(found.left_out) < 1e-3 and found.notes == ()


def test_the_interval_holds_the_loss_of_noisy_ladders():
    """Runs that are 0.3 % off: within 2 % at eight times the compute, and inside the interval for three of four."""
    place = 8e7 * 8**0.5, 20 * 8e7 * 8**0.5
    fits = [fit_loss(*points_of(noise=0.003, seed=seed)) for seed in range(4)]
    inside = [each.low <= LAW.loss(*place) <= each.high for each in (fit.at(*place) for fit in fits)]
    assert sum(inside) >= 3
    assert all(fit.at(*place).loss == pytest.approx(LAW.loss(*place), rel=0.02) for fit in fits)
    assert all(0.001 < fit.noise < 0.01 for fit in fits)
    # the same points, the same answer
    assert fits[0] == fit_loss(*points_of(noise=0.003, seed=0))


def test_points_that_do_not_carry_a_constant_are_told():
    """Sizes so near to each other that their noise is larger than what they gain; to the same digit in any memory."""
    points = points_of((1e7, 1.1e7, 1.2e7), noise=0.01)
    found = fit_loss(*points)
    assert any("the exponent of the size" in note for note in found.notes)
    lengths = random.Random(0)
    for _ in range(3):
        # what is allocated next is at other addresses
        taken = [np.empty(lengths.randrange(1, 200)) for _ in range(lengths.randrange(1, 3000))][::2]
        assert fit_loss(*points) == found and taken


EARLY = {  # runs of GPT-2s of 45 to 198 thousand parameters; at 6 times their compute the law missed by 10 %
    45_056: ((120_576, 5.681), (241_152, 5.3684), (482_304, 5.0666)),
    104_448: ((280_320, 5.4052), (560_640, 4.9931), (1_121_280, 4.5597)),
    132_608: ((355_200, 5.1955), (710_400, 4.8464), (1_420_800, 4.4361)),
    198_144: ((531_328, 5.0591), (1_062_656, 4.6569), (2_125_312, 4.2792)),
}


def test_runs_too_short_for_a_law_are_told():
    """The loss of early training falls faster and faster, which no law of this form does; that of a law does not."""
    said = "the loss falls faster from one token count to the next"
    early = [(size, *place) for size, places in EARLY.items() for place in places]
    assert fit_loss(*zip(*early, strict=True)).notes[0].startswith(said)
    assert not any(said in note for note in fit_loss(*points_of(noise=0.002)).notes)


NONE, SAME = float("nan"), (1e7,) * 4
DEGENERATE = {
    "1 sizes and 3 token counts": points_of((1e7,)),
    "4 sizes and 1 token counts": ([*SIZES], [1e9] * 4, [3.0] * 4),
    "0 runs with a loss": ([*SIZES], [2e8, 3e8, 4e8, 5e8], [NONE] * 4),
    "4 runs with a loss, 1 of them different": (SAME, SAME, [3.0] * 4),
    "3 runs with a loss, 3 of them different": ([1e7, 2e7, 4e7], [1e9, 2e9, 4e9], [3.0, 2.9, 2.8]),
}


@pytest.mark.parametrize("said", DEGENERATE)
def test_a_degenerate_ladder_is_one_line(said):
    """One size, one token count, diverged runs, duplicate points, too few: what is there, and what is missing."""
    line = refusal(fit_loss, *DEGENERATE[said])
    assert "cannot be fitted" in line and "it needs 3 of each and 6 different runs" in line and said in line


def test_the_best_rate_and_batch_follow_from_a_grid():
    """A bowl in both logarithms around known power laws, whose axes are aslant: a larger batch wants a larger rate.

    Token counts differ a little with the batch, as whole steps do. What has no minimum in its grid is not answered.
    """
    cells, values, losses = [], [], []
    for size, tokens, _ in zip(*points_of(), strict=True):
        best = 0.7 * size**-0.3 * tokens**0.1, 3.0 * tokens**0.5
        for rate in (0.4, 1, 2.5):
            for batch in (0.4, 1, 2.5):
                cells.append((size, tokens * (1 + 0.001 * batch)))
                values.append((0.01 * rate, 1e5 * batch))
                off = [np.log(value / at) for value, at in zip(values[-1], best, strict=True)]
                bowl = 0.02 * off[0] ** 2 - 0.02 * off[0] * off[1] + 0.01 * off[1] ** 2
                losses.append(LAW.loss(size, tokens) * np.exp(bowl))
    place, batch = (1e9, 2e10), 1e6
    rate, best_batch = 0.7 * 1e9**-0.3 * 2e10**0.1, 3.0 * 2e10**0.5
    wanted = {"rate": rate, "batch": best_batch, "rate_at_batch": rate * (batch / best_batch) ** 0.5}
    found, notes = best_values(cells, values, losses, place, batch)
    assert found.keys() == wanted.keys() and not notes
    for name, (value, low, high) in found.items():
        assert low <= value <= high and value == pytest.approx(wanted[name], rel=0.01), name
    losses[0] = NONE  # diverged at its rate
    again, _ = best_values(cells, values, losses, place, batch)
    assert all(again[name] == pytest.approx(found[name], rel=0.01) for name in wanted)
    # no minimum in the batch: the rate is the best at the recipe's own
    batches = np.array(values)[:, 1]
    found, notes = best_values(cells, values, losses * np.exp(-0.02 * np.log(batches) ** 2), place, batch)
    assert found.keys() == {"rate_at_batch"} and "the grid shows no best batch: widen --batches" in notes
    # of one batch there is a best rate; two batches show a slope, and no best one
    for batches, missing in (([1e5], []), ([1e5, 2.5e5], ["the grid shows no best batch: widen --batches"])):
        some = [each for each, value in enumerate(values) if value[1] in batches]
        only = [[row[each] for each in some] for row in (cells, values, losses)]
        found, notes = best_values(*only, place, batch)
        assert found.keys() == {"rate"} and notes == missing


def test_a_score_needs_a_signal():
    losses = np.linspace(2.5, 4.5, 9)
    rising = 0.25 + 0.5 / (1 + np.exp(3 * (losses - 3.2)))
    assert fit_score(losses, rising)(3.0) == pytest.approx(0.25 + 0.5 / (1 + np.exp(3 * -0.2)), abs=0.01)
    chance = 0.25 + np.random.default_rng(0).normal(0, 0.02, 9)
    assert fit_score(losses, chance) is None and fit_score(losses, np.full(9, 0.25)) is None


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3_moe", "gpt_neox"])
def test_members_keep_the_ratios_of_the_recipe(workshop, tmp_path, kind, capsys):
    """Half the width has half the heads and layers; all of them are recipes that train by themselves."""
    model = json.dumps({**FAMILIES, **OTHER_MODELS}[kind])
    settings = ["--set", f"model={model}", "--set", "budget.tokens=1024000"]
    words = [str(workshop.recipe), "--deepspeed", "null", *settings, "--widths", "16,32,64"]
    assert main([*words, "--plan", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == ["w16", "w32", "w64"] and [row["runs"] for row in rows] == [3] * 3
    assert [row["flops"] for row in rows] == sorted(row["flops"] for row in rows)
    main([*words, "--commands", "--output_dir", str(tmp_path)])
    assert len(capsys.readouterr().out.splitlines()) == 3
    half, whole = (load_recipe(str(tmp_path / "recipes" / f"w{width}.json")) for width in (32, 64))
    ours, theirs = (widths_of(recipe.model) for recipe in (half, whole))
    assert (ours.hidden, ours.layers, ours.inner) == (32, 1, theirs.inner // 2)
    assert 2 * ours.heads == theirs.heads and theirs == widths_of(json.loads(model))
    assert half.model.vocab_size == whole.model.vocab_size
    # every size reads as many tokens; the rate carries over by muP, or goes up for a smaller model
    assert half.num_tokens == whole.num_tokens and half.tokens_per_step == whole.tokens_per_step
    carries = kind in ("gpt2", "llama", "qwen3")
    assert (half.mup.base_width == 64) == carries
    assert (half.training.learning_rate == whole.training.learning_rate) == carries
    assert half.training.learning_rate >= whole.training.learning_rate
    kwargs = whole.training.lr_scheduler_kwargs
    assert kwargs["decay_type"] == "1-sqrt"
    assert kwargs["num_decay_steps"] == pytest.approx(0.2 * whole.num_steps, rel=0.15)


def test_a_family_that_cannot_keep_its_shape_is_told(tmp_path, capsys):
    """Promise: honest numbers. Sizes with rounded layers lie on no law; those with whole ones do."""
    assert main(["tiny", "--widths", "32,72,96,112", "--plan"]) == 0
    printed = capsys.readouterr().out
    assert "note: layers are rounded (2 for 2.25 in w72, 4 for 3.5 in w112)" in printed
    assert "multiples of 32 keep the shape" in printed
    main(["tiny", "--widths", "32,64,96", "--plan", "--json"])
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_members_find_the_code_of_their_recipe(tmp_path, capsys):
    """A model of one's own, in a file beside the recipe: a member elsewhere is a recipe that loads."""
    main(["tiny", "--widths", "32,64,128", "--commands", "--output_dir", str(tmp_path)])
    member = load_recipe(str(tmp_path / "recipes" / "w64.json"))
    assert [each.path.is_file() for each in member.extensions] == [True]
    # under Muon a rate suits all widths, and goes with the batch: 0.307 / 0.571 is the Step Law's power
    target = load_recipe("tiny")
    ratio = member.optimizer.matrix_learning_rate / target.optimizer.matrix_learning_rate
    assert ratio == pytest.approx((member.tokens_per_step / target.tokens_per_step) ** 0.54, rel=0.05)
    # a batch that suits the shortest of its three runs, in whole sequences
    shortest = member.num_tokens / 4 / target.num_tokens
    wanted = target.samples_per_step * shortest**0.571
    assert member.samples_per_step == max(1, round(wanted))
    assert "w128.json" in capsys.readouterr().out


def test_kills_at_random_moments_end_in_the_same_fit(workshop, ladder, tmp_path):
    """Of a ladder whose largest size is not there yet, killed twice; the same command ends with the same points."""
    folder = tmp_path / "ladder"
    shutil.copytree(ladder, folder, ignore=shutil.ignore_patterns("w32*", FILE, "*.html"))
    command = ladder_command(workshop, folder, *SMALL_SIZES)
    for _ in range(2):
        started = Started(command, **forked_programs())
        pause = random.SystemRandom().uniform(1, 8)
        print(f"killed after {pause:.2f} s")
        until = time.monotonic() + pause
        while time.monotonic() < until and started.process.poll() is None:
            time.sleep(0.01)
        started.kill()
    ended = completed(command, **forked_programs())
    assert "ladder 1/9: w16: finished before" in ended.stdout
    ours, theirs = (json.loads((place / FILE).read_text()) for place in (folder, ladder))
    assert ours["points"] == theirs["points"] and ours["fits"] == theirs["fits"]


def test_the_ladder_answers_plan_and_report(workshop, ladder, tmp_path, capsys):
    """In the plan of its recipe, in --show with budgets, in the sentences of a run and in `planning compare`."""
    values = json.loads((ladder / FILE).read_text())
    assert values["runs"] == len(values["points"]) == 9 and set(values["fits"]) == {DECAYED, STABLE}
    assert {point["size"] for point in values["points"]} == {"w16", "w24", "w32"}
    assert (ladder / "ladder.html").stat().st_size > 50_000
    names = [f"report.ladder={ladder}", *LADDER_SETTINGS]
    recipe = load_recipe(str(workshop.recipe), names, "null")
    kept = read_ladder(str(ladder))
    expected = kept.expected(recipe)
    assert expected.low <= expected.loss <= expected.high and kept.differs(recipe) == []
    options = ["--recipe", str(workshop.recipe), "--deepspeed", "null"]
    options += [word for text in names for word in ("--set", text)]
    planned = completed(["python", "train.py", *options, "--plan"])
    line = next(line for line in planned.stdout.splitlines() if line.startswith("loss "))
    assert f"{expected.words}, ladder of 9 runs up to" in line and "of its compute" in line
    other = completed(["python", "train.py", *options, "--plan", "--set", "data.packing=best_fit"])
    assert "it is of another family: data.packing" in " ".join(other.stdout.split())
    # at the same size and length another rate is no member, and other validation text is another loss
    for text in ("training.learning_rate=0.9", "evaluation.max_validation_tokens=999"):
        changed = load_recipe(str(workshop.recipe), [*names, text], "null")
        assert kept.differs(changed) == [text.partition("=")[0]]
    assert kept.differs(load_recipe(str(workshop.recipe), [*names, "training.seed=7"], "null")) == []
    # a run that is where it should be, and one that has left it
    plan = {"size": {"matmul": matmul_parameters(recipe)}, "predicted": {"validation_loss": expected.loss}}
    for name, factor, said in (("on", 1, "on its way"), ("off", 2, "It has left that")):
        folder, loss, tokens = tmp_path / name, factor * expected.loss, recipe.num_tokens
        write_json(folder / "recipe.json", recipe.to_dict())
        write_json(folder / "plan.json", plan)
        row = {"step": tokens // 512, "train/tokens": tokens, "train/loss": loss}
        for more in ({"train/learning_rate": 0.01}, {"train/learning_rate": 0.0, "eval/loss": loss}):
            append_row(folder / "metrics.jsonl", row | more)
        end = {"time": "2026-01-01T00:00:00Z", "event": "end", "eval_loss": loss}
        append_row(folder / "events.jsonl", end)
        assert said in analyze(RunRecord(folder)).foreseen.words
    plan_main(["compare", str(tmp_path / "on"), str(tmp_path / "off")])
    assert f"validation loss  {expected.loss:>9.4f}" in capsys.readouterr().out


def test_budgets_and_rivals_are_answered_from_what_is_there(workshop, ladder, capsys):
    """Nothing is started: the best size for FLOPs, for dollars and to serve; and which of two recipes wins."""
    words = [str(workshop.recipe), "--deepspeed", "null", "--output_dir", str(ladder), "--show"]
    words += [word for text in LADDER_SETTINGS for word in ("--set", text)]
    main([*words, "--flops", "1e12", "--serve", "1m", "--dollars", "1", "--gpu", "H100", "--json"])
    answer = json.loads(capsys.readouterr().out)
    for best in (answer[name] for name in ("flops", "dollars")):
        assert best["low"] <= best["loss"] <= best["high"] and best["width"] >= 8
    assert answer["serve"]["parameters"] > 0 and len(answer["rows"]) == 9
    assert any("times the tokens of the longest run" in note for note in answer["notes"])
    other = shutil.copytree(ladder, ladder.with_name("copied"))
    main([*words, "--against", str(other)])
    printed = capsys.readouterr().out
    assert "neither is known to win" in printed and f"{ladder.name} is +0.00% off copied" in printed
    kept = read_ladder(str(ladder))
    worse = json.loads((ladder / FILE).read_text())
    fits = worse["fits"][DECAYED]
    for law in (fits["law"], *fits["draws"], *fits["without"]):
        law |= {name: 1.05 * law[name] for name in ("E", "A", "B")}
    worse["name"] = "worse"
    write_json(ladder / "worse" / FILE, worse)
    found = compare(kept, read_ladder(str(ladder / "worse")))
    assert found["winner"] == kept.values["name"] and found["sure"] == 1
    assert found["difference"] == pytest.approx(1 / 1.05 - 1)


def test_a_finished_ladder_is_returned_to_python(workshop, ladder, capsys):
    """Keywords are the command's options; nothing is trained again."""
    given = {"set": list(LADDER_SETTINGS), "deepspeed": "null"}
    places = {"data_dir": workshop.data, "output_dir": ladder}
    kept = climb(workshop.recipe, widths="16,24,32", longest=1, **given, **places)
    assert kept == read_ladder(str(ladder))
    assert capsys.readouterr().out.count("finished before") == 9


WRONG = {
    "--widths 0,8": "'0,8': write numbers above 0",
    "--sizes 4": "leaves room for",
    "--show": "no such ladder; make it with python -m pretraining.ladder",
    "--plan --show": "starts nothing; leave out the other",
    "--widths 20,20.5": "write numbers above 0",
    "--set model.n_embd=x": "model.n_embd",
    "--plan --widths 16,24": "have 2 sizes and",
    "--plan --widths 16,24,32 --gpu X9": "X9",
    "--rates 0.5,nan": "write numbers above 0",
    "--batches inf": "write numbers above 0",
    "--widths 32,64,100000000000": "write numbers above 0, to 100,000",
    "--points 2000": "at most 40 of each",
    "--up_to 2": "a share of the recipe's FLOPs, at most 1",
    "--widths 16,24,32 --sizes 3": "--sizes and --up_to say nothing",
    "--widths 16,24,32 --batches 1.01": "would be w16 again",
    # before hours of training, and not behind them
    "--widths 16,24,32 --dollars 5": "--dollars needs --gpu",
    "--widths 16,24,32 --against nowhere": "no such ladder",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_words_are_one_line_and_write_nothing(workshop, tmp_path, options):
    folder = tmp_path / "ladder"
    said = refusal(main, ladder_command(workshop, folder, *options.split())[3:])
    assert WRONG[options] in said and not folder.exists()


def test_a_damaged_ladder_is_one_line(workshop, tmp_path):
    """In the plan and in its own command; a report is written without it."""
    (tmp_path / FILE).write_text('{"name": 1}')
    options = ["--recipe", str(workshop.recipe), "--deepspeed", "null", "--set", f"report.ladder={tmp_path}"]
    for command in (["python", "train.py", *options, "--plan"], ladder_command(workshop, tmp_path, "--show")):
        refused(execute(command), FILE)


GPT2 = "features/gpt2"


def written_ladder(folder: Path, settings: tuple[str, ...] = ()) -> dict:
    """Write the ladder.json of a recipe whose runs follow LAW, and return what it holds."""
    target, points = load_recipe(GPT2, settings), []
    for size, tokens, loss in zip(*points_of([0.005 * size for size in SIZES]), strict=True):
        point = {"run": f"w{size}-{tokens}", "size": f"w{size}", "parameters": size, "tokens": tokens}
        point |= {"base": True, "flops": 6 * size * tokens, "learning_rate": 0.01, "tokens_per_step": 2048}
        points.append(point | {"metrics": {"loss": loss}})
    values = fitted(target, points, [])
    write_json(folder / FILE, values)
    return values


DAMAGES = {
    "fits.decayed.law.E": None,
    "fits.decayed.law.alpha": float("nan"),
    "fits.stable.draws.0.B": float("inf"),
    "fits.decayed.noise": 1e300,
    "fits.decayed.notes": [None],
    "points.0.metrics": {},
    "points.0.base": "yes",
    "points.0.flops": float("inf"),
    "target.tokens": -1,
    "recipe.model": None,
    "faults": 3,
    "points.0.tokens_per_step": None,
    "recipe.budget.tokens_per_step": -1,
}


def test_wrong_numbers_inside_a_ladder_are_one_line(tmp_path):
    """In the laws and their draws too: each is refused where it is read, and answers nothing."""
    whole = json.dumps(written_ladder(tmp_path / "whole"))
    kept = read_ladder(str(tmp_path / "whole"))
    assert "law" in as_text(answer_of(kept), kept.values) and ladder_payload(kept, answer_of(kept))["rows"]
    for number, (key, value) in enumerate(DAMAGES.items()):
        values = place = json.loads(whole)
        *parts, last = key.split(".")
        for part in parts:
            place = place[int(part) if part.isdigit() else part]
        place[last] = value
        write_json(tmp_path / str(number) / FILE, values)
        assert "ladder.json" in refusal(read_ladder, str(tmp_path / str(number))), key


def test_losses_of_other_texts_are_not_compared(tmp_path):
    """A held-out share is of one's own sources; a weight decides nothing of it."""
    ours, alike, other, shorter = (tmp_path / name for name in ("ours", "alike", "other", "shorter"))
    written_ladder(ours)
    written_ladder(alike, ('data.sources=[{"builtin": "python_stdlib", "weight": 2}]',))
    written_ladder(other, (f'data.sources=[{{"path": "{tmp_path}"}}]',))
    written_ladder(shorter, ("evaluation.max_validation_tokens=1000",))
    kept = {place: read_ladder(str(place)) for place in (ours, alike, other, shorter)}
    assert compare(kept[ours], kept[alike])["winner"] is None
    for place, key in ((other, "data.sources"), (shorter, "evaluation.max_validation_tokens")):
        assert f"losses are of other text ({key})" in refusal(compare, kept[ours], kept[place])


def test_points_that_show_nothing_of_the_size_name_no_size(tmp_path, capsys):
    """A law without a term of the size has its optimum at no parameters."""
    written_ladder(tmp_path)
    values = json.loads((tmp_path / FILE).read_text())
    values["fits"][DECAYED]["law"]["A"] = 1e-9
    write_json(tmp_path / FILE, values)
    command = [GPT2, "--output_dir", str(tmp_path), "--show", "--json"]
    main(command)
    assert json.loads(capsys.readouterr().out)["optimum"] is None
    said = "--serve: the points do not show what size and tokens bring"
    assert said in refusal(main, [*command, "--serve", "1m"])
    for draw in values["fits"][DECAYED]["draws"]:
        draw["A"] = 1e9
    write_json(tmp_path / FILE, values)
    said = "--flops: the points do not show the loss at such a budget"
    assert said in refusal(main, [*command, "--flops", "1e13"])


def test_a_recipe_that_is_not_the_ladders_is_told(tmp_path, capsys):
    written_ladder(tmp_path)
    command = [GPT2, "--output_dir", str(tmp_path), "--show"]
    main(command)
    assert "another recipe" not in capsys.readouterr().out
    main([*command, "--set", "budget.tokens=4096000"])
    assert "the ladder is of another recipe (budget.tokens)" in " ".join(capsys.readouterr().out.split())


def test_runs_of_another_recipe_are_refused_before_a_file_is_written(tmp_path):
    """Also runs that were validated in another way: a branch would keep that, and its whole run would not."""
    words = [GPT2, "--widths", "32,64,128", "--output_dir", str(tmp_path), "--commands"]
    main(words)
    file = tmp_path / "recipes" / "w64.json"
    before = file.read_bytes()
    shutil.copytree(tmp_path / "recipes", tmp_path / "w64")
    (tmp_path / "w64" / "w64.json").rename(tmp_path / "w64" / "recipe.json")
    main(words)
    for key, value in (("evaluation.max_validation_tokens", "1000"), ("training.seed", "7")):
        said = rf"w64: is of another recipe: .*{key}.*; choose another --output_dir"
        assert re.search(said, refusal(main, [*words, "--set", f"{key}={value}"]))
    assert file.read_bytes() == before


def test_a_width_is_found_at_once(tmp_path):
    """Of any size; a budget whose best width is the last that is tried says so."""
    target = load_recipe(GPT2)
    assert width_for(target, matmul_parameters(target)) == 128
    # a cube of the width, but for the head
    assert width_for(target, 1e14) / width_for(target, 1e11) == pytest.approx(10, rel=1e-2)
    assert width_for(target, 1e100) == pytest.approx(100_000, rel=1e-3)
    written_ladder(tmp_path)
    kept = read_ladder(str(tmp_path))
    assert best_size(kept, target, 1e25)["at_the_end"] and not best_size(kept, target, 3e14)["at_the_end"]


def test_decays_that_are_not_multiplied_with_the_rate_go_with_the_steps_alone():
    """Each forgets the same share of the weights in a run; points move with the run, and their values too."""
    group = {"weight_decay": 0.1, "momentum": [[0, 0.85], [300, 0.95]]}
    values = {
        "training": {"weight_decay": 0.1, "learning_rate": 0.01},
        "optimizer": {"groups": [{**group, "decay_times": "one"}, {"weight_decay": [[0, 0.1], ["end", 0]]}]},
    }
    scale_rates(values, 0.5, {"rate": 8.0, "share": 4.0, "one": 4.0})
    assert values["training"] == {"weight_decay": 0.8, "learning_rate": 0.005}
    one, points = values["optimizer"]["groups"]
    assert one["weight_decay"] == 0.4 and points["weight_decay"] == [[0, 0.8], ["end", 0.0]]
