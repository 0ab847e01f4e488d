"""The examples of every --help name what there is: shipped recipes and files, and folders that those recipes make."""

import re
import shlex
from itertools import pairwise

import pytest

import data_prep
from pretraining import meeting_point, postmortem, sweep
from pretraining.checkpoints import __main__ as checkpoints
from pretraining.command_line import parse_train_arguments
from pretraining.data import __main__ as data
from pretraining.doctor import __main__ as doctor
from pretraining.evaluation import __main__ as evaluation
from pretraining.ladder import __main__ as ladder
from pretraining.pipeline import __main__ as pipeline
from pretraining.planning import __main__ as planning
from pretraining.planning.gpus import find_gpu
from pretraining.recipe import load_recipe, recipe_names
from pretraining.reporting import __main__ as reporting
from pretraining.supervise import supervisor as supervise
from tests.gear.runs import REPOSITORY

COMMANDS = {
    "train.py": (parse_train_arguments, ()),
    "data_prep.py": (data_prep.parse_arguments, ()),
    "data": (data.main, data.EXAMPLES_OF),
    "planning": (planning.main, planning.VERBS),
    "evaluation": (evaluation.main, ()),
    "checkpoints": (checkpoints.main, checkpoints.VERBS),
    "reporting": (reporting.main, ("analyze",)),
    "supervise": (supervise.main, ()),
    "meeting_point": (meeting_point.main, ()),
    "postmortem": (postmortem.main, ()),
    "pipeline": (pipeline.main, ()),
    "doctor": (doctor.main, ()),
    "sweep": (sweep.main, ()),
    "ladder": (ladder.main, ()),
}
HELPS = [(name, verb) for name, (_, verbs) in COMMANDS.items() for verb in ("", *verbs)]
RECIPES = {name: load_recipe(name) for name in [*recipe_names(), "features/frozen-layers"]}
YOURS = {"my_recipe.json"}
"""What a reader brings along."""
MADE = {"--output", "--output_dir", "--to"}
"""Options whose value is a folder or file that the command makes."""
STARTS = r"(?:python|deepspeed|torchrun|accelerate launch) .*"


@pytest.fixture
def help_of(capsys):
    """What `--help` prints for a command and a verb of it."""

    def printed(name: str, verb: str) -> str:
        with pytest.raises(SystemExit) as left:
            COMMANDS[name][0]([*verb.split(), "--help"])
        assert left.value.code == 0
        return capsys.readouterr().out

    return printed


def examples_in(text: str) -> list[list[str]]:
    """The words of every command line after `examples:`; of two columns the first."""
    text = text.partition("examples:")[2].replace("\\\n", " ")  # a line that goes on in the next
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(re.split(r"\s{2,}", line)[0]) for line in lines if re.match(STARTS, line)]


def folders_made(words: list[str]) -> set[str]:
    """What an example writes: the values of `MADE`, and the data set that others' files are converted to."""
    made = {after for word, after in pairwise(words) if word in MADE}
    return made | ({words[4]} if "--from" in words else set())


def recipe_of(words: list[str]):
    """The recipe that an example is about: named, or of the run it names."""
    named = [after for word, after in pairwise(words) if word == "--recipe"]
    named += re.findall(r"runs/([\w.-]+)", " ".join(words))
    return next((RECIPES[name] for name in named if name in RECIPES), None)


def check_word(option: str, value: str, recipe) -> None:
    """Fail for a value that the option cannot have."""
    if option == "--recipe":
        assert value in RECIPES or value in YOURS
    elif option == "--deepspeed":
        assert (REPOSITORY / "ds_configs" / f"{value}.json").is_file()
    elif option == "--gpu":
        assert find_gpu(value)
    elif option == "--set" and recipe is not None:
        assert load_recipe(recipe.name, [value])
    elif option in ("--step", "--at") and recipe is not None:
        saved = recipe.training.save_steps
        assert int(value) % saved == 0 and saved <= int(value) <= recipe.num_steps


@pytest.mark.parametrize("name, verb", HELPS, ids=[" ".join(each).strip() for each in HELPS])
def test_every_help_has_examples_that_name_what_there_is(help_of, name, verb):
    """Recipes, ds_configs, GPUs, settings, checkpoints of the steps at which the recipe saves."""
    examples = examples_in(help_of(name, verb))
    assert examples
    for words in examples:
        recipe = recipe_of(words)
        for option, value in pairwise(words):
            check_word(option, value, recipe)
        for step in re.findall(r"/checkpoint-(\d+)", " ".join(words)):
            check_word("--step", step, recipe)


def test_every_folder_that_a_help_names_is_made_by_a_shipped_recipe(help_of):
    """Or by another example; files of the repository lie where they are said to."""
    texts = [help_of(name, verb) for name, verb in HELPS]
    made = set().union(*(folders_made(words) for text in texts for words in examples_in(text)))
    made |= {f"runs/{name}" for name in RECIPES} | {f"data/{recipe.data.name}" for recipe in RECIPES.values()}
    named = {place for text in texts for place in re.findall(r"(?<![\w/.-])(?:data|runs)/\w[\w.-]*", text)}
    assert {"data/python-stdlib", "runs/tiny"} <= named <= made
    files = r"(?<![\w/.-])(?:recipes|ds_configs|accelerate_configs|launch|benchmarks|pretraining)/[\w./-]*"
    for place in {place for text in texts for place in re.findall(files, text)}:
        assert (REPOSITORY / place.rstrip(".")).exists(), place
