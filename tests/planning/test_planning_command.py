"""`python -m pretraining.planning`: its own examples work, mistakes cost one line, nothing heavy is loaded."""

import argparse
import contextlib
import copy
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pretraining.command_line import parse_train_arguments
from pretraining.ds_config import load_ds_config
from pretraining.errors import UserError
from pretraining.planning import constants
from pretraining.planning.__main__ import EPILOG, VERBS, main
from pretraining.planning.gpus import all_gpus
from pretraining.planning.quantities import amount
from pretraining.planning.screen import print_plan
from pretraining.recipe import load_recipe
from tests.gear.finished_data import refusal
from tests.gear.runs import REPOSITORY

PREFIX = "python -m pretraining.planning "
TRILLION = ["model.n_embd=25600", "model.n_layer=128", "model.n_head=160", "budget.tokens_per_step=8388608"]
TRILLION += ["budget.tokens=1006632960000", "training.per_device_train_batch_size=1"]


def examples() -> list[str]:
    """Every command line that --help shows and that needs no run."""
    shown = [EPILOG, *(verb.EXAMPLES for verb in VERBS.values())]
    lines = [line.strip() for text in shown for line in text.splitlines()]
    ours = {line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)}
    return sorted(line for line in ours if "runs/" not in line)


def printed(capsys, words: list[str]) -> str:
    main(words)
    return capsys.readouterr().out


def asked_json(capsys, *words: str) -> dict:
    return json.loads(printed(capsys, [*words, "--json"]))


@pytest.mark.parametrize("line", examples())
def test_the_examples_of_help_work(line, capsys):
    """As text on one screen of 120 columns, and as JSON."""
    words = [word for word in shlex.split(line) if word != "--json"]
    text = printed(capsys, words)
    assert 3 < len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 120
    assert asked_json(capsys, *words)


def test_numbers_may_be_written_as_people_do(capsys):
    """7b, 7e9 and 7_000_000_000 are one number."""
    asked = (("flops", "--parameters", text, "--tokens", "0.14T") for text in ("7b", "7e9", "7_000_000_000"))
    first, second, third = (asked_json(capsys, *words)["flops"] for words in asked)
    assert first == second == third and first["six_n_total"] == pytest.approx(6 * 7e9 * 140e9)


def test_cost_adds_up(capsys):
    """GPU-hours are GPUs times hours, dollars GPU-hours times the price."""
    line = "cost --recipe 7b --world_size 64 --gpu H100 --mfu 0.4 --price 2"
    answer = asked_json(capsys, *line.split())
    assert answer["cost"]["gpu_hours"] == pytest.approx(64 * answer["seconds"] / 3600)
    assert answer["cost"]["prices"][0]["dollars"] == pytest.approx(2 * answer["cost"]["gpu_hours"])
    assert answer["flops"] / answer["seconds"] == pytest.approx(64 * 0.4 * 989.5e12)


@pytest.mark.parametrize(
    "words",
    [
        "30b --world_size 8 --gpu H200",
        "7b --world_size 64 --gpu A10G --deepspeed zero0",
        "moe-1.5b --world_size 16 --gpu H100",
        "tiny --world_size 2 --gpu v100 --set training.save_strategy=no --set optimizer.name=muon",
        'tiny --world_size 1 --gpu H100 --set budget.ramp={"from_tokens_per_step":1024,"over_tokens":204800}',
    ],
)
def test_all_verbs_say_the_same(words, capsys):
    """Time, tokens, FLOPs, disk, memory and step of one recipe: all verbs agree, in JSON that is JSON."""

    def said(verb: str) -> dict:
        text = printed(capsys, [verb, "--recipe", *words.split(), "--json"])
        return json.loads(text, parse_constant=pytest.fail)

    options = parse_train_arguments(["--recipe", *words.split(), "--plan"])
    recipe = load_recipe(options.recipe, options.set, options.deepspeed)
    refused = None
    try:
        print_plan(recipe, load_ds_config(recipe.deepspeed), options.world_size, options.gpu, True)
    except SystemExit as left:  # a script sees by the exit code that train.py would refuse it
        refused = left.code
    plan = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert refused == (2 if plan["refusals"] else None)
    cost, memory = said("cost"), said("memory")
    assert cost["seconds"] == plan["forecast"]["seconds"] and cost["tokens"] == plan["tokens"]
    settings = [word for setting in options.set for word in ("--set", setting)]
    flops = asked_json(capsys, "flops", "--recipe", options.recipe, *settings)
    assert plan["training_flops"] == cost["flops"] == flops["flops"]["training"]
    assert cost["step"]["disk"] == plan["disk"]
    assert memory["total"] == plan["memory"]["total"]
    assert plan["predicted"]["checkpoint_bytes"] == plan["checkpoint_bytes"]
    state = plan["model_state"]
    assert memory["phases"]["loss"].get("fp32 masters", 0) == state["masters"]
    assert memory["phases"]["loss"]["weights"] == state["parameters"]
    fits = plan["memory"]["total"] <= plan["gpu_memory_bytes"]
    if options.deepspeed and not fits:  # none of its micro-batches does
        with pytest.raises(UserError, match=f"does not fit.*with {options.deepspeed}: "):
            said("fit")
        return
    fit = said("fit")
    if fits:  # else it is no way at all, and may be faster
        assert fit["ways"][0]["step_seconds"] <= 1.02 * plan["forecast"]["step"]["seconds"]
    for way in fit["ways"]:
        is_chosen = (way["deepspeed"], way["micro_batch"]) == (recipe.deepspeed, recipe.micro_batch)
        if is_chosen and not (way["every_n_layers"] or recipe.training.activation_checkpointing):
            assert way["step_seconds"] == pytest.approx(plan["forecast"]["step"]["seconds"])


def test_tokens_take_the_place_of_the_recipe_s(capsys):
    """`--tokens` beside a recipe: checkpoints and token shards follow, in whole steps."""
    line = "cost --recipe 7b --tokens 5b --world_size 8 --gpu H100"
    answer = asked_json(capsys, *line.split())
    steps = 5_000_000_000 // 4194304
    assert answer["tokens"] == steps * 4194304
    assert answer["step"]["checkpoints"]["written"] == -(-steps // load_recipe("7b").training.save_steps)
    assert answer["step"]["disk"]["token shards"] == 2 * answer["tokens"]


def test_step_law_counts_without_the_vocabulary(capsys):
    """Li et al. 2025 leave the vocabulary out of N: a recipe knows it, a bare size does not."""
    answer = asked_json(capsys, "chinchilla", "--recipe", "7b")
    layers = answer["given"]["without_vocabulary"]
    assert layers == answer["given"]["parameters"] - 2 * 32000 * 4096
    expected = 1.79 * layers**-0.713 * answer["given"]["tokens"] ** 0.307
    assert answer["hints"]["Step Law"]["learning_rate"] == pytest.approx(expected)


def test_slow_links_lengthen_an_assumed_run_and_not_a_given_one(capsys):
    """An assumed utilization yields to the messages of the step; the user's own does not."""
    settings = [word for setting in TRILLION for word in ("--set", setting)]
    line = ["cost", "--recipe", "65b", *settings, "--world_size", "4096", "--gpu", "H100"]
    assumed = asked_json(capsys, *line)
    given = asked_json(capsys, *line, "--mfu", str(assumed["utilization"]["mfu"]))
    assert assumed["parameters"] > 1e12
    assert assumed["step"]["time"]["bound_by"] == "links"
    time = assumed["step"]["time"]
    links = time["communication_seconds"] + time["offload_seconds"]
    assert assumed["step"]["seconds"] == pytest.approx(links)
    assert given["step"]["seconds"] == pytest.approx(given["step"]["time"]["compute_seconds"])
    assert given["step"]["seconds"] < assumed["step"]["seconds"]


MISTAKES = {
    "": "VERB",
    "frops": "choose from",
    "gpus --gpu H1000": "the nearest are",
    "cost --recipe 7b --world_size 8 --gpu H1000": "the nearest are",
    "cost --recipe 7b --world_size 8": "--gpu",
    "parameters": "give one of --recipe NAME and --model NAME",
    "cost --parameters 7b --tokens=-5 --world_size 8 --gpu H100": "must be a positive number",
    "cost --parameters nan --tokens 5b --world_size 8 --gpu H100": "must be a positive number",
    "cost --parameters 1e40 --tokens 5b --world_size 8 --gpu H100": "below 1e+33",
    "cost --parameters 7bb --tokens 5b --world_size 8 --gpu H100": "not a number",
    "cost --parameters 7b --tokens 5b --world_size 2.5 --gpu H100": "whole number",
    "cost --parameters 7b --tokens 5b --world_size 1e9 --gpu H100": "whole number",
    "cost --parameters 7b --tokens 5b --world_size 8 --gpu H100 --mfu 40": "write 0.4",
    "cost --parameters 7b --world_size 8 --gpu H100": "--tokens D is missing",
    "cost --recipe 7b --tokens 1 --world_size 8 --gpu H100": "takes from 4,194,304, its first step",
    "flops --parameters 0.5": "must be at least 1",
    "gpus --gpu=": "no such GPU",
    "cost --parameters 7b --recipe 7b --world_size 8 --gpu H100": "give one of --recipe NAME, --model NAME",
    "cost --parameters 7b --set a.b=1 --tokens 5b --world_size 8 --gpu H100": "change a recipe",
    "cost --recipe 7b --world_size 8 --gpu T4": "has no bf16 peak",
    "cost --recipe 7b --world_size 7 --gpu H100": "not a multiple",
    "flops --recipe sevenb": "no such recipe",
    "flops --recipe 7b --set model.hidden_sise=3": "did you mean 'model.hidden_size'",
    "chinchilla": "give one of",
    "memory --recipe 7b --world_size 8 --gpu=": "no such GPU",
    "chinchilla --flops 1e23 --tokens 5b": "stands alone",
    "chinchilla --flops 1e23 --set model.n_embd=8": "stands alone",
    "parallelism --recipe 65b --world_size 7 --gpu H100": "no layout divides 7 GPUs",
    "parallelism --recipe 65b --world_size 8 --gpu T4": "GB on each T4 of 16 GB; take about",
    "parallelism --parameters 7b --world_size 8 --gpu T4": "need the model's shape",
    "memory --parameters 7b --world_size 8": "needs the model's shape",
    "memory --recipe 7b --world_size 8 --gpu H1000": "the nearest are",
    "memory --recipe 7b --world_size 7": "not a multiple",
    "fit --parameters 7b --world_size 8 --gpu H100": "needs the model's shape",
    "fit --recipe 7b --world_size 7 --gpu H100": "not a multiple",
    "fit --recipe 65b --world_size 1 --gpu A100-40GB --memory 1e9": "does not fit",
    "compare nowhere": "nowhere: no such folder",
    "compare tests pyproject.toml": "tests: no plan.json there",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence(line):
    assert MISTAKES[line] in refusal(main, line.split())


OF_TRAINING = {
    **dict.fromkeys(
        ("--plan --world_size -3", "--plan --world_size nan", "--plan --worldsize 8", "--plan --gpu"),
        "train.py",
    ),
    "--plan --gpu=": "no such GPU",
    # no run starts that nobody asked for
    **dict.fromkeys(("--gpu H100", "--world_size 8", "--json"), "goes with --plan"),
}


@pytest.mark.parametrize("words", OF_TRAINING)
def test_a_mistake_in_the_command_of_training_is_one_line_too(words):
    """No usage of a dozen lines above it."""
    with pytest.raises(UserError, match=OF_TRAINING[words]) as caught:
        options = parse_train_arguments(["--recipe", "30b", *words.split()])
        print_plan(load_recipe("30b"), None, 8, options.gpu, False)
    assert "\n" not in str(caught.value)


def test_the_search_gives_back_a_command_that_is_a_plan(capsys):
    """What was set stands in it, tokens too, so that pasted it means the run that was searched for."""
    line = "fit --recipe 7b --set training.learning_rate=1e-4 --deepspeed zero1 --tokens 5b --world_size 8"
    words = shlex.split(asked_json(capsys, *line.split(), "--gpu", "H200")["command"])
    assert words[:3] == ["deepspeed", "--num_gpus=8", "train.py"]
    assert words[3:7] == ["--recipe", "7b", "--set", "training.learning_rate=1e-4"]
    options = parse_train_arguments([*words[3:], "--plan"])
    recipe = load_recipe(options.recipe, options.set, options.deepspeed)
    assert recipe.training.learning_rate == 1e-4 and recipe.deepspeed.startswith("zero")
    assert recipe.budget.tokens == 5 * 10**9 // recipe.tokens_per_step * recipe.tokens_per_step


def test_the_search_keeps_to_the_ds_config_that_is_given(capsys):
    """`--deepspeed` chooses, as it does everywhere; else it says how to see every way that fits."""
    line = ["fit", "--recipe", "7b", "--world_size", "8", "--gpu", "A100"]
    asked = (("--deepspeed", "zero3"), (), ("--all",))
    own, answer, every = (asked_json(capsys, *line, *more) for more in asked)
    assert {way["deepspeed"] for way in own["ways"]} == {"zero3"} and own["fitting"] < answer["fitting"]
    shown, fitting = len(answer["ways"]), answer["fitting"]
    text = printed(capsys, line)
    assert shown < fitting and f"{fitting} ways fit, {shown} worth a choice are shown; --all shows" in text
    assert len(every["ways"]) == fitting and every["command"] == answer["command"]
    assert f"{fitting} ways fit\n" in printed(capsys, [*line, "--all"])
    line[2] = "124m"
    plain = asked_json(capsys, *line, "--deepspeed", "null")
    assert {way["deepspeed"] for way in plain["ways"]} == {None}
    assert plain["command"].endswith("--deepspeed null") or "--deepspeed null " in plain["command"]


@pytest.mark.parametrize("gpus, nodes, each", [(1, 0, 1), (8, 0, 8), (64, 8, 8), (12, 2, 6)])
def test_the_command_of_the_search_can_be_pasted(capsys, gpus, nodes, each):
    """A launcher that starts the ranks it was asked of, and as text the same words as in JSON."""
    settings = ["--set", "description=one -- two", "--set", f"budget.tokens_per_step={gpus * 2**18}"]
    settings += ["--set", f"budget.tokens={gpus * 2**24}", "--set", "name=own"]
    line = ["fit", "--recipe", "124m", *settings, "--world_size", str(gpus), "--gpu", "H100"]
    words = shlex.split(asked_json(capsys, *line)["command"])
    started = {"torchrun", f"--nnodes={nodes}", f"--nproc_per_node={each}"}
    started = started if nodes else {"deepspeed", f"--num_gpus={each}"}
    assert started <= set(words[: words.index("train.py")])
    assert [words[place + 1] for place, word in enumerate(words) if word == "--set"][:4] == settings[1::2]
    text = printed(capsys, line)
    assert shlex.split(text[text.index(words[0] + " --") :].replace("\\\n", "")) == words


def test_laws_say_where_they_are_far_from_what_was_fitted(capsys):
    """A learning rate for a model of one parameter is told for what it is."""
    assert "beware" in printed(capsys, ["chinchilla", "--flops", "1"])
    assert "beware" not in printed(capsys, ["chinchilla", "--parameters", "7b"])


def forget() -> None:
    """Have the tables read anew."""
    constants.table.cache_clear()
    all_gpus.cache_clear()


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A copy of the tables to break; what was read of the real ones is read anew before and after."""
    shutil.copytree(constants.TABLES, tmp_path / "tables")
    monkeypatch.setattr(constants, "TABLES", tmp_path / "tables")
    forget()
    yield tmp_path / "tables"
    forget()


def keys_of(value, above: tuple = ()) -> Iterator[tuple]:
    """Every key of a table, those of the objects inside it too; of a list of objects its first entry alone."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for name, inner in inside:
        if name not in ("about", "looked_up", "note"):
            yield (*above, name)
            if isinstance(inner, dict) or (isinstance(inner, list) and inner and isinstance(inner[0], dict)):
                yield from keys_of(inner, (*above, name))


ASKED = (
    "memory --recipe tiny --world_size 2",
    "cost --recipe 7b --world_size 8 --gpu H100",
    "cost --recipe moe-1.5b --world_size 16 --gpu A100",
    "cost --recipe features/gpt2 --world_size 1 --gpu H200 --deepspeed zero3_nvme",
    "chinchilla --recipe 124m",
    "gpus",
)


def reads(line: str, name: str) -> bool:
    """Whether a command looks into a table."""
    forget()
    main(line.split())
    hits = constants.table.cache_info().hits
    constants.table(name)
    return constants.table.cache_info().hits > hits


@pytest.mark.parametrize("name", sorted(path.stem for path in constants.TABLES.glob("*.json")))
def test_a_broken_table_is_named_by_file_and_key(name, tables, capsys):
    """Users edit the tables: whatever they take out, or write wrongly, costs one line, or nothing that is asked for."""
    whole = json.loads((tables / f"{name}.json").read_text())
    places = list(keys_of(whole))
    alike: dict[tuple, tuple] = {}
    for place in places:  # of GPUs, prices and fits that have the same keys one stands for all
        alike.setdefault((len(place), place[0], *place[-1:]) if len(place) > 2 else place, place)
    asked, named = [line for line in ASKED if reads(line, name)], 0
    for place in alike.values():
        for value in ("missing", "a text", -1, {}, [], None):
            broken = copy.deepcopy(whole)
            inner = broken
            for key in place[:-1]:
                inner = inner[key]
            if value == "missing":
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            (tables / f"{name}.json").write_text(json.dumps(broken))
            forget()
            try:
                constants.table(name)
            except UserError as error:
                named += 1
                assert f"tables/{name}.json: {'.'.join(map(str, place))}" in str(error)
            else:
                for line in asked:
                    with contextlib.suppress(UserError):  # a GPU that was taken out
                        main(line.split())
    assert named > len(alike)


def test_a_key_of_no_table_is_named_with_the_nearest(tables):
    """A misspelt key would be read by nobody."""
    text = (tables / "kernels.json").read_text()
    (tables / "kernels.json").write_text(text.replace('"queries"', '"querys"', 1))
    words = ["cost", "--world_size", "8", "--gpu", "H100"]
    said = refusal(main, [*words, "--recipe", "7b"])
    assert re.search(r"forward.querys: unknown key; did you mean .*forward.queries'\?; mend it", said)
    (tables / "kernels.json").write_text(text.replace('"outside"', '"keyz": 1, "outside"', 1))
    forget()
    said = "kernels.json: layers.gpt2.eager.keyz: unknown key"
    assert said in refusal(main, [*words, "--recipe", "124m"])
    (tables / "rates.json").unlink()
    forget()
    sizes = ["--parameters", "7b", "--tokens", "1b"]
    assert "rates.json: cannot be read" in refusal(main, [*words, *sizes])


def test_the_command_exits_with_2_and_loads_nothing_heavy():
    """The real process: one line on stderr, exit code 2; neither an answer nor a plan needs torch or numpy."""
    command = [sys.executable, "-m", "pretraining.planning", "gpus", "--gpu", "H1000"]
    failed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert failed.returncode == 2 and not failed.stdout
    assert failed.stderr.startswith("error: --gpu H1000") and failed.stderr.count("\n") == 1


def test_a_comma_groups_thousands_or_is_refused():
    """A decimal one would be ten times the price."""
    assert [amount(text) for text in ("1,000", "1_000", "1,234,567.5", "2.5", "1,400b")] == [
        *(1000, 1000, 1234567.5, 2.5, 1.4e12)
    ]
    for text in ("2,5", "1,4t", "10,00", ",5"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a number"):
            amount(text)
    code = (
        "import sys\nfrom pretraining.ds_config import load_ds_config\nfrom pretraining.planning.__main__ import main\n"
        "from pretraining.planning.screen import print_plan\nfrom pretraining.recipe import load_recipe\n"
        "main('cost --recipe 30b --world_size 8 --gpu H200'.split())\n"
        "print_plan(load_recipe('30b'), load_ds_config('zero3'), None, 'H200', False)\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'numpy', 'datasets', 'pyarrow'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    answered = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert answered.returncode == 0, answered.stderr
    assert "GPU-hours" in answered.stdout and "plan of 30b" in answered.stdout
