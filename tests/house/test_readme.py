"""Every command of the README files is run; the heavy ones scaled down by the table below."""

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from pretraining.command_line import parse_train_arguments
from pretraining.recipe import load_recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime.run_folder import RunFolder
from tests.conftest import num_gpus
from tests.gear.ladders import SMALL_SIZES, ladder_command, small_ladder
from tests.gear.runs import REPOSITORY, Finished, Workshop, execute, refused
from tests.gear.scored_tasks import write_items, write_tasks
from tests.reporting.test_served_page import SERVE, Server
from tests.training.test_batch_ramp import RAMPED

NAMES = ("README.md", "recipes/README.md", "ds_configs/README.md", "CONTRIBUTING.md", "AGENTS.md")
PAGES = [*(REPOSITORY / name for name in NAMES), *sorted((REPOSITORY / "docs").glob("*.md"))]
LINT = ["ruff check .", "ruff format --check .", "mypy"]
MAKE_SETUP = re.compile(r"-m pip install|^uv pip install|-m venv|touch |^@|sys\.version_info|^\{|error: ")


def commands_of(page: Path) -> list[str]:
    """The commands in the ```bash blocks of a page, continuation lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


# Those of the first day use each other's results: test_first_day.py runs them in their order.
COMMANDS = [(page, line) for page in PAGES for line in commands_of(page) if page.name != "first_day.md"]


def words_of(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def option(words: list[str], name: str) -> str | None:
    """The value that follows an option."""
    return words[words.index(name) + 1] if name in words else None


def without(words: list[str], *names: str) -> list[str]:
    """The words without these options and their values."""
    kept, skip = [], False
    for word in words:
        if not skip and word not in names:
            kept.append(word)
        skip = word in names and not skip
    return kept


def succeeded(finished: Finished, said: str) -> None:
    assert finished.code == 0, finished.output
    assert said in finished.stdout


def items_of(workshop: Workshop) -> Path:
    return write_items(workshop.folder / "items.jsonl")


# What a command names -> what a test gives it; what is written goes elsewhere.
PLACES: dict[str, Callable[[Workshop], object]] = {
    "runs/tiny": lambda workshop: workshop.run("zero2", by="deepspeed").folder,
    "s3://bucket/runs/30b": lambda workshop: workshop.plain().folder,
    "runs/tiny-zero1": lambda workshop: workshop.plain().folder,
    "runs/qk-norm": lambda workshop: workshop.run("zero3", settings=RAMPED).folder,
    "data/python-stdlib": lambda workshop: workshop.data / "corpus",
    "tiny": lambda workshop: workshop.recipe,
    "Rowan/hellaswag": items_of,
    "arc_easy,piqa": lambda workshop: write_tasks(workshop.folder / "tasks", items_of(workshop)),
    "out/megatron": lambda workshop: workshop.folder / "megatron",
    "both.html": lambda workshop: workshop.folder / "both.html",
    "both.csv": lambda workshop: workshop.folder / "both.csv",
}
FEWER = {"1000": "10", "200": "2", "15000": "8", "2000": "4"}
SAID = {
    r"data ": "document|files|judged right",
    r"checkpoints list": "committed",
    r"checkpoints verify": "whole",
    r"checkpoints prune": "would free",
    r"checkpoints push .*--dry_run": "would publish",
    r"planning ": "",
    r"postmortem ": "finished at step",
    r"reporting analyze": "Training loss",
    r"reporting .*both": r"both\.",
    r"reporting ": r"report\.html",
    r"evaluation .*--tasks": r"hellaswag/acc_norm(.|\n)*read_line/bits_per_byte",
    r"evaluation .*--json": "bits_per_byte",
    r"evaluation ": "bits per byte",
}
"""Verb and options of `python -m pretraining.` -> what is said of the small run or data set."""


def small_of(workshop: Workshop, words: list[str]) -> list[str]:
    """The words, with small things in the places of those that a page names."""
    return [str(PLACES[word](workshop)) if word in PLACES else FEWER.get(word, word) for word in words]


def run_small(workshop: Workshop, words: list[str]) -> None:
    """`python -m pretraining.VERB`: of the small run or data set, which it leaves as it is."""
    verb = " ".join(words)[len("python -m pretraining.") :]
    said = next(said for pattern, said in SAID.items() if re.match(pattern, verb))
    if verb.startswith("evaluation"):
        if "--tasks" in words:
            pytest.importorskip("lm_eval", reason="lm-eval is not installed (requirements-eval.txt)")
        else:
            words = [*words, "--data_dir", str(workshop.data)]
        words = ["forked", "0", *words[1:]]
    finished = execute(small_of(workshop, words))
    assert finished.code == 0 and re.search(said, finished.stdout), finished.output
    assert "both.html" not in words or PLACES["both.html"](workshop).exists()


def run_served(workshop: Workshop, words: list[str]) -> None:
    """`... reporting --serve runs`: on a port that is free, the runs that tests have made, until Ctrl-C."""
    assert words == [*SERVE, "runs"]
    run = workshop.plain().folder
    server = Server(run.parent)
    assert server.listed()[run.name]["state"] == "finished"
    server.started.interrupt()
    assert server.started.finish().code == 130


def run_branch(workshop: Workshop, words: list[str]) -> None:
    """`... branch runs/qk-norm`: of a small run with a stable rate, whose folder nothing is written to."""
    output = workshop.folder / "branch"
    succeeded(execute([*small_of(workshop, words), "--output", output]), "train it")
    assert (output / "checkpoint-8").is_dir()


def run_merge(workshop: Workshop, words: list[str]) -> None:
    """`... merge runs/qk-norm`: of the same small run, into a folder beside it."""
    words = ["forked", "0", *small_of(workshop, without(words[1:], "--to"))]
    succeeded(execute([*words, "--to", workshop.folder / "merged"]), "measure it")
    assert (workshop.folder / "merged" / "model.safetensors").exists()


def run_prepare(workshop: Workshop, words: list[str]) -> None:
    """`data_prep.py`: the built-in text as it stands in a small shape; hub data without a network is one line."""
    recipe = option(words, "--recipe")
    if recipe == "tiny":
        small = workshop.options(*without(words[2:], "--recipe"))
        said = "bytes/token" if "--count" in words else "data corpus is ready in"
        return succeeded(execute(["python", "data_prep.py", *small]), said)
    line = refused(execute([*words, "--data_dir", workshop.folder / "hub"]))
    assert re.match(r"error: (.*)(cannot be re|can be reached)", line), line


def parse_rehearsal(workshop: Workshop, words: list[str]) -> None:
    """`train.py --rehearse`: its options and its recipe; test_rehearsal.py runs it on a small one."""
    options = parse_train_arguments(words[2:])
    recipe, _ = load_recipe_and_ds_config(options.recipe, options.set, options.deepspeed, options.world_size)
    assert options.rehearse and recipe.name == options.recipe


def run_plan(workshop: Workshop, words: list[str]) -> None:
    """`train.py --plan`: as it stands."""
    succeeded(execute(words), f"plan of {load_recipe(option(words, '--recipe')).name}")


def run_train(workshop: Workshop, words: list[str]) -> None:
    """`<launcher> train.py` on `tiny`: the small recipe. On a larger one: its plan for as many ranks.

    With a value changed, `--resume` or a bucket: the plan too; other files of tests run those for real.
    """
    place = words.index("train.py")
    before, options = words[:place], words[place + 1 :]
    planned = any(option(options, name) for name in ("--set", "--resume", "--data_cache_gb"))
    if option(options, "--recipe") != "tiny" or planned:
        found = re.search(r"--(?:num_gpus|nproc_per_node|num_processes)[= ](\d+)", " ".join(before))
        return run_plan(workshop, ["python", *words[place:], "--plan", "--world_size", found[1]])
    run = workshop.run_typed(before, without(options, "--recipe", "--output_dir"))
    assert run.dir.export.exists() and run.events[-1]["event"] == "end"


def run_doctor(workshop: Workshop, words: list[str]) -> None:
    """`python -m pretraining.doctor`: of this machine, as it stands; the text of `tiny` may not be prepared here."""
    finished = execute(words)
    if finished.code == 0:
        return succeeded(finished, "nothing will break")
    said = r"(.|\n)*run: python data_prep\.py(.|\n)*1 will break"
    assert re.match(said, finished.stdout), finished.output


def run_doctor_together(workshop: Workshop, words: list[str]) -> None:
    """`deepspeed --module pretraining.doctor`: of two ranks with the small recipe."""
    assert words[2:4] == ["--module", "pretraining.doctor"]
    assert workshop.examined()["summary"]["will_break"] == 0


def run_make(workshop: Workshop, words: list[str]) -> None:
    """`make TARGET`: what it would do after setting up is run (demo), or is what runs this (test) and other tests."""
    shown = execute(["make", "--dry-run", *words[1:]])
    assert shown.code == 0, shown.output
    recipe = [line for line in shown.stdout.splitlines() if line and not MAKE_SETUP.search(line)]
    if words[1] == "test":
        *quick, types = LINT
        imports = "python -c 'from tests.gear.forked import IMPORTS; exec(IMPORTS)' >/dev/null 2>&1"
        wanted = [*quick, f"{imports} & {types}"]
        wanted += ["python -m pytest -m gpu"] if num_gpus() else []
        wanted += ["python -m pytest -n 3 --dist loadfile --no-loadscope-reorder"]
        assert recipe[-len(wanted) :] == wanted
        return
    if words[1] in ("lint", "schema"):
        known = {"lint": LINT, "schema": ["python recipes/generate_schema.py"]}
        assert recipe[-len(known[words[1]]) :] == known[words[1]]
        return
    assert [line.split()[0] for line in recipe] == ["python", "deepspeed", "python"]
    for line in recipe:
        run_scaled(workshop, line)


def run_supervised(workshop: Workshop, words: list[str]) -> None:
    """`python -m pretraining.supervise -- COMMAND`: what it would start; test_supervise.py runs it for real."""
    run_scaled(workshop, shlex.join(words[words.index("--") + 1 :]))


def run_sweep(workshop: Workshop, words: list[str]) -> None:
    """`python -m pretraining.sweep`: its points are checked, none is started; test_sweep.py trains some."""
    succeeded(execute([*without(words, "--slurm", "--launcher"), "--show"]), "state")


def run_ladder(workshop: Workshop, words: list[str]) -> None:
    """`python -m pretraining.ladder`: a plan as it stands; else of the small ladder, which is made once."""
    if "--plan" in words:
        return succeeded(execute(words), "of the FLOPs of its recipe")
    folder = small_ladder(workshop)
    asked = [str(folder) if word.startswith("runs/") else word for word in words[4:]]
    finished = execute(ladder_command(workshop, folder, *SMALL_SIZES, *without(asked, "--up_to")))
    succeeded(finished, "runs, up to" if "--json" not in words else '"dollars"')


def run_pipeline(workshop: Workshop, words: list[str]) -> None:
    """`python -m pretraining.pipeline`: what it would run; test_pipeline.py runs it for real."""
    folders = ["--output_dir", workshop.folder / "pipeline"]
    finished = execute([*words, *folders, *([] if "--show" in words else ["--show"])])
    assert finished.code == 0 and re.match("plan +would run: ", finished.stdout), finished.output


def run_flow(workshop: Workshop, words: list[str]) -> None:
    """`pyflyte run FILE WORKFLOW`: flytekit reads it and knows every option; test_flows.py runs it for real."""
    pytest.importorskip("flytekit", reason="flytekit is not installed (requirements-flows.txt)")
    place = words.index("flows/pretrain.py")
    shown = help_of_flow(*words[place : place + 2])
    options = {word for word in words[place + 2 :] if word.startswith("--")}
    assert shown.code == 0 and all(option in shown.stdout for option in options), shown.output


@cache
def help_of_flow(file: str, workflow: str) -> Finished:
    """What flytekit says of a workflow: seconds of imports, for several lines of the pages."""
    pyflyte = ["python", "-m", "flytekit.clis.sdk_in_container.pyflyte"]
    return execute([*pyflyte, "run", file, workflow, "--help"])


def run_ray(workshop: Workshop, words: list[str]) -> None:
    """`data_prep.py --executor ray`: the option is there; test_ray.py prepares on a cluster."""
    from data_prep import parse_arguments

    assert parse_arguments(words[2:]).executor == "ray"


def run_install(workshop: Workshop, words: list[str]) -> None:
    """`pip install -r FILE`: the file is there."""
    assert words[:3] == ["pip", "install", "-r"] and (REPOSITORY / words[3]).is_file()


def run_module(workshop: Workshop, words: list[str]) -> None:
    """A command of an installation: as a checkout has it; test_wheel.py runs both in an empty folder."""
    line = shlex.join(words).replace("--module pretraining.train", "train.py")
    run_scaled(workshop, line.replace("pretraining-data-prep", "python data_prep.py"))


def run_pytest(workshop: Workshop, words: list[str]) -> None:
    """`pytest ...`: it finds tests; those that a page chooses run with all others."""
    succeeded(execute(["forked", "0", "-m", *words, "--collect-only"]), "tests")


def run_stop_file(workshop: Workshop, words: list[str]) -> None:
    """`touch runs/tiny/STOP`: the file that runs look for; test_stopping.py stops one by it."""
    path = Path(words[1])
    assert words[0] == "touch" and path == RunFolder(path.parent).stop_file


def run_sbatch(workshop: Workshop, words: list[str]) -> None:
    """`sbatch ... launch/SCRIPT`: a shell can read it."""
    script = next(word for word in words if word.startswith("launch/"))
    assert execute(["bash", "-n", script]).code == 0


SCALED = {
    r"make (demo|test|lint|schema)$": run_make,
    r"pytest ": run_pytest,
    r"pretraining-data-prep ": run_module,
    r"deepspeed .*--module pretraining\.train ": run_module,
    r"python data_prep\.py .*--executor ray": run_ray,
    r"python data_prep\.py ": run_prepare,
    r"python -m pretraining\.pipeline ": run_pipeline,
    r"pyflyte run ": run_flow,
    r"pip install -r requirements-": run_install,
    r"python train\.py .*--plan": run_plan,
    r"python train\.py .*--rehearse": parse_rehearsal,
    r"(deepspeed|torchrun|accelerate launch) .*train\.py ": run_train,
    r"python train\.py ": run_train,
    r"python -m pretraining\.supervise ": run_supervised,
    r"python -m pretraining\.sweep ": run_sweep,
    r"python -m pretraining\.ladder ": run_ladder,
    r"touch runs/": run_stop_file,
    r"RUN=\S+ (PROGRAM=\"[^\"]+\" )?sbatch ": run_sbatch,
    r"python -m pretraining\.checkpoints branch ": run_branch,
    r"python -m pretraining\.checkpoints merge ": run_merge,
    r"python -m pretraining\.reporting --serve ": run_served,
    r"python -m pretraining\.(data|planning|checkpoints|evaluation|reporting|postmortem) ": run_small,
    r"python -m pretraining\.doctor ": run_doctor,
    r"deepspeed .*--module pretraining\.doctor ": run_doctor_together,
}


def run_scaled(workshop: Workshop, line: str) -> None:
    """Run a command by the first pattern of the table that it matches."""
    run = next((run for pattern, run in SCALED.items() if re.match(pattern, line)), None)
    assert run is not None, f"no way to test this command yet: {line}"
    run(workshop, words_of(line))


@pytest.mark.parametrize("page, line", COMMANDS, ids=[line for _, line in COMMANDS])
def test_every_command_works(workshop, page, line):
    """Nothing is shown to a reader that no test has run."""
    run_scaled(workshop, line)


def test_the_front_page_shows_the_commands_that_matter():
    """Guards the parser: a page whose blocks it no longer finds would test nothing."""
    shown = {line for page, line in COMMANDS if page == REPOSITORY / "README.md"}
    assert {"make demo", "make test", "deepspeed --num_gpus=8 train.py --recipe 30b"} <= shown


def test_the_front_page_is_short_and_names_every_stage():
    """A stranger decides on one screen or two."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    stages = {path.stem for path in (REPOSITORY / "ds_configs").glob("*.json")} - {"schema"}
    assert stages == set(re.findall(r"`(zero\w+)`", section_of(text, "Stages")))


def test_the_first_screen_says_for_whom_with_what_and_where_to_begin():
    """A stranger sees if it is for them, in which versions, under which licence, and where the first day is."""
    first = (REPOSITORY / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert len(first.splitlines()) <= 35 and "(docs/first_day.md)" in first and "(docs/report.png)" in first
    assert "| for whom |" in first and "| take something else |" in first
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"[{project['license']}](LICENSE)" in first
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in first
    pins = dict(each.split("==") for each in project["dependencies"])
    assert all(f"{name} {pins[name]}" in first for name in ("torch", "transformers", "deepspeed"))
    num_types = len(json.loads((REPOSITORY / "pretraining/recipe/model_types.json").read_text())["types"])
    assert "[about a hundred other types]" in first and 90 <= num_types < 130


def section_of(text: str, title: str) -> str:
    """A page's section, from its heading to the next."""
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_plan_is_shown_as_it_is_printed():
    """The block below the command of `--plan` is what that command prints, to the last character."""
    command = next(line for page, line in COMMANDS if page.parent == REPOSITORY and "--plan" in line)
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    shown = re.search(re.escape(f"{command}\n```\n\n```\n") + r"(.*?)^```", text, re.M | re.S)
    assert shown and shown[1] == execute(words_of(command)).stdout


def test_every_page_is_linked():
    """A page to which no link of the front page leads, over other pages or not, is found by nobody."""
    reached, next_ones = set(), [REPOSITORY / "README.md"]
    while next_ones:
        page = next_ones.pop()
        if page.suffix == ".md" and page not in reached:
            reached.add(page)
            targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
            next_ones += [(page.parent / target).resolve() for target in targets if "://" not in target]
    pages = {REPOSITORY / name for name in ("SECURITY.md", "benchmarks/README.md")} | set(PAGES)
    assert reached >= pages, sorted(map(str, pages - reached))


def test_the_file_tree_is_that_of_the_repository():
    """Every line of the tree names what exists, and every room and module of the package has a line."""
    text = (REPOSITORY / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    tree = re.search(r"^```\n(train\.py .*?)^```", text, re.M | re.S)[1].splitlines()
    paths, folder = [], ""
    for line in tree:
        name = line.split()[0]
        folder = "" if not line.startswith(" ") else folder
        paths.append(f"{folder}{name}")
        folder = name if name == "pretraining/" else folder
    assert not [path for path in paths if not (REPOSITORY / path).exists()]
    package = REPOSITORY / "pretraining"
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    rooms = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    missing = {f"pretraining/{name}" for name in modules | rooms} - set(paths)
    assert not missing
