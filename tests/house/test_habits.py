"""What a clone promises around the code: licence, versions, dependencies, hooks, types, and which tests see GPUs."""

import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests import conftest
from tests.gear.runs import REPOSITORY, TIMEOUT_SECONDS, execute

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("data", "dev", "eval", "flows", "gpu", "ray", "remote", "trackers")


def _requirements(name: str) -> list[str]:
    """The lines of a requirements file, without comments."""
    lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _as_extra(lines: list[str]) -> list[str]:
    """The same as an extra of pyproject.toml writes it: other files are extras of the project itself."""
    files = [line.split()[1] for line in lines if line.startswith("-r") and line != "-r requirements.txt"]
    names = [file.removeprefix("requirements-").removesuffix(".txt") for file in files]
    whole = [f"{PROJECT['name']}[{','.join(names)}]"] if names else []
    return whole + [line for line in lines if not line.startswith("-r")]


def _normal(requirement: str) -> str:
    """`moto[server]==5.2.5` -> moto==5.2.5: how pip compares names."""
    name, _, version = requirement.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name.partition('[')[0]).lower()}=={version}"


def test_a_command_that_hangs_is_ended_before_its_test(pytestconfig):
    """Each test has a limit, and shows at it what a command had printed; nothing hangs for longer than the last one."""
    limits = [float(pytestconfig.getini(name)) for name in ("timeout", "faulthandler_timeout")]
    assert TIMEOUT_SECONDS < limits[0] < limits[1]


def test_pyproject_has_the_pins_of_the_requirements_files():
    assert PROJECT["dependencies"] == _requirements("requirements.txt")
    assert sorted(PROJECT["optional-dependencies"]) == list(EXTRAS)
    for extra, wanted in PROJECT["optional-dependencies"].items():
        assert wanted == _as_extra(_requirements(f"requirements-{extra}.txt")), extra


def test_the_lock_has_every_pin_of_the_tested_set():
    """And nothing but exact versions, each package once, in the order of their names."""
    lock = _requirements("requirements.lock")
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lock), lock
    names = [line.partition("==")[0].lower() for line in lock]
    assert names == sorted(set(names)) and len(lock) > 100
    locked = {_normal(line) for line in lock}
    for file in ["requirements.txt", *(f"requirements-{extra}.txt" for extra in EXTRAS if extra != "gpu")]:
        pins = {_normal(line) for line in _requirements(file) if not line.startswith("-r")}
        assert pins <= locked, file


def test_one_version_and_one_licence_everywhere():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1]
    assert PROJECT["version"] == citation["version"] == newest
    assert PROJECT["license"] == citation["license"] == "Apache-2.0"
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text and "Copyright 2026 The authors of this repository" in text


def test_continuous_integration_calls_what_this_repository_calls():
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["tests"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    versions = [step["with"]["python-version"] for step in steps if "python-version" in step.get("with", {})]
    assert versions == [PROJECT["requires-python"].removeprefix(">=")]


def test_hooks_run_what_make_lint_runs():
    shown = execute(["make", "--dry-run", "lint"]).stdout.splitlines()
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in hooks["repos"] for hook in repo["hooks"]]
    assert {entry.split()[0] for entry in entries} == {"ruff", "mypy", "python"}
    assert {line.split()[0] for line in shown if line.startswith(("ruff", "mypy"))} == {"ruff", "mypy"}
    scripts = [word for entry in entries for word in entry.split() if word.endswith(".py")]
    assert scripts and all((REPOSITORY / script).is_file() for script in scripts)


def test_a_bug_is_reported_with_what_the_doctor_says():
    path = REPOSITORY / ".github" / "ISSUE_TEMPLATE" / "bug.yml"
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    fields = {field["id"]: field for field in form["body"]}
    asked = "python -m pretraining.doctor --recipe RECIPE --json"
    assert asked in fields["doctor"]["attributes"]["description"]
    assert fields["doctor"]["validations"]["required"]
    helped = execute(["python", "-m", "pretraining.doctor", "--help"])
    assert "--json" in helped.stdout and "--recipe" in helped.stdout


PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("*/README.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_pages_name_files_that_there_are(page):
    """Every path between backquotes and every link leads somewhere, to a heading too; no placeholder is left."""
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    words = [word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()]
    rooms = ("pretraining/", "tests/", "recipes/", "benchmarks/", "ds_configs/", "requirements")
    named = [word for word in words if word.startswith(rooms) and "*" not in word]
    paths = [word.rstrip(",").partition("::")[0] for word in named]
    missing = [path for path in paths if not (REPOSITORY / path).exists()]
    missing += re.findall(r"@[A-Z]+@", text)
    for place, _, heading in links:
        target = page.parent / place if place else page
        if not target.exists() or (heading and heading not in _headings(target)):
            missing.append(f"{place}#{heading}")
    assert not missing


def _headings(page: Path) -> set[str]:
    """How links name the headings of a page: without punctuation, with hyphens for spaces."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def _public_functions(node: ast.AST, inside_class: bool = False) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Functions and methods that other modules may call, `__init__` included; nested ones are no one else's."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _public_functions(child, True)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name == "__init__" or not child.name.startswith("_"):
                yield child, inside_class
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _public_functions(child, inside_class)


def _is_typed(function: ast.FunctionDef, is_method: bool) -> bool:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if is_method and named and named[0].arg in ("self", "cls"):
        named = named[1:]
    every = [*named, *(each for each in (arguments.vararg, arguments.kwarg) if each)]
    has_result = function.returns is not None or function.name == "__init__"
    return has_result and all(each.annotation is not None for each in every)


def test_every_public_function_says_what_it_takes_and_returns():
    """The type checker sees what functions say of themselves."""
    modules = [*(REPOSITORY / "pretraining").rglob("*.py"), *REPOSITORY.glob("*.py")]
    untyped = [
        f"{path.relative_to(REPOSITORY)}:{function.lineno}: {function.name}"
        for path in sorted(modules)
        for function, is_method in _public_functions(ast.parse(path.read_text(encoding="utf-8")))
        # a callback's events have the arguments that transformers documents
        if not _is_typed(function, is_method) and not (is_method and function.name.startswith("on_"))
    ]
    assert not untyped, "\n".join(untyped)


PROGRAM = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"


def test_no_process_of_the_tests_sees_a_gpu():
    """Neither this one nor a rank for which the `deepspeed` launcher has named GPUs."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    rank = execute([sys.executable, "-c", PROGRAM], CUDA_VISIBLE_DEVICES="0,1")
    assert rank.stdout == "''\n", rank.output


@pytest.mark.parametrize("chosen, seen", [("gpu", "0,1"), ("", ""), ("not gpu", "")])
def test_only_the_session_of_gpu_tests_keeps_the_gpus(monkeypatch, chosen, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    conftest.pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr=chosen)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    "outcome, gpus, code", [("skipped", 1, 1), ("skipped", 0, 0), ("passed", 1, 0), ("failed", 1, 0)]
)
def test_a_gpu_that_no_test_could_use_fails_the_session(monkeypatch, outcome, gpus, code):
    """Everything skipped, with a GPU there: not a success. What failed has a code of its own already."""
    monkeypatch.setattr(conftest, "num_gpus", lambda: gpus)
    said = []
    reporter = SimpleNamespace(stats={outcome: ["a report"]}, write_line=lambda line, **_: said.append(line))
    manager = SimpleNamespace(get_plugin=lambda name: reporter)
    config = SimpleNamespace(option=SimpleNamespace(markexpr="gpu"), pluginmanager=manager)
    session = SimpleNamespace(config=config, testscollected=1, exitstatus=0)
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == code and len(said) == code
