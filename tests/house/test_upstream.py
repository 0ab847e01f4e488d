"""What an upgrade of a library breaks: every private or patched name that upstream/ relies on, one line each.

After an upgrade this test comes first. Each of its lines says which name is gone or has other parameters, what uses it,
and which test shows if it still means the same.
"""

import ast
import importlib
import inspect
import re
import sys
from functools import cache
from pathlib import Path

import cpuinfo
import pytest
import torch
from torch import nn

from pretraining.upstream.lm_eval import no_task_bars
from pretraining.upstream.torch import ask_the_processor_once
from pretraining.upstream.transformers import is_persistent
from tests.gear.reliances import VERSIONS, Reliance, reliances
from tests.gear.runs import REPOSITORY, execute

UPSTREAM = REPOSITORY / "pretraining" / "upstream"
INSIDE = sorted(UPSTREAM.glob("*.py"))
OUTSIDE = sorted({*(REPOSITORY / "pretraining").rglob("*.py"), *REPOSITORY.glob("*.py")} - {*INSIDE})
OF_PYTHON = {"_exit", "_asdict", "_replace", "_fields", "_getframe"}
"""Names that begin with an underscore and are documented."""


def broken() -> list[str]:
    """One line for each reliance that the installed libraries do not meet."""
    return [
        f"{each.package}: {each.name}: {what}; used by upstream/{each.used_by}.py, which says what for; see {each.test}"
        for each in reliances()
        if (what := _difference(each))
    ]


def test_every_name_is_there_with_these_parameters():
    """Holds for the installed libraries, as a fresh process finds them: other tests have them patched already."""
    program = "from tests.house.test_upstream import broken; print('\\n'.join(['found', *broken()]))"
    finished = execute([sys.executable, "-c", program])
    assert finished.code == 0 and "found" in finished.stdout, finished.output
    lines = finished.stdout.partition("found\n")[2].splitlines()
    if lines:
        pytest.fail("\n".join([f"{len(lines)} of upstream's names changed", *lines]), pytrace=False)


def test_a_name_that_is_gone_or_changed_is_found():
    """The check itself: it would be of no use if everything passed."""
    name = "transformers.Trainer._save_checkpoint"
    assert not _difference(_reliance(name, "self, model, trial"))
    assert _difference(_reliance(name, "self, model")) == "its parameters are (self, model, trial)"
    for gone in ("transformers.Trainer._gone", "transformers.gone.f", "torch.ops.aten._gone", "no_library.f"):
        assert _difference(_reliance(gone, None)) == "it is gone"


def _reliance(name: str, parameters: str | None) -> Reliance:
    return Reliance(name, parameters, "", "")


def _difference(reliance: Reliance) -> str | None:
    """Say how the installed library differs from the table; None if it does not."""
    owner, _, last = reliance.name.rpartition(".")
    found = _find(reliance.name)
    if found is _GONE:
        # Instances have it, not their class: then the source of the owner assigns it.
        return None if last in _assigned(_find(owner)) else "it is gone"
    if reliance.parameters is None:
        return None
    parameters = ", ".join(inspect.signature(found).parameters)
    return None if parameters == reliance.parameters else f"its parameters are ({parameters})"


_GONE = object()


@cache
def _find(name: str) -> object:
    """Return what a dotted name stands for, whichever part of it is a module; `_GONE` if nothing."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, _GONE)
        return found
    return _GONE


@cache
def _assigned(owner: object) -> set[str]:
    """Return what the source of a class, a function or a module assigns, its own attributes and those of others."""
    if owner is _GONE or getattr(owner, "__file__", "") == "torch.ops":  # operators have no source
        return set()
    names = set()
    for node in ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner)))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            hidden = node.attr.startswith("__") and inspect.isclass(owner)  # as Python names it
            names.add(f"_{owner.__name__}{node.attr}" if hidden else node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)  # a field of a dataclass
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            names.add(ast.unparse(node.slice).strip("'"))  # globals()["name"]
    return names


def test_versions_are_those_of_the_pins():
    """A table that was checked with another version says nothing."""
    pins = {}
    for file in [*sorted(REPOSITORY.glob("requirements*.txt")), REPOSITORY / "requirements.lock"]:
        for package, version in re.findall(r"^([\w-]+)(?:\[.*\])?==(\S+)", file.read_text(), re.M):
            assert pins.setdefault(package, version) == version
    assert {package: pins.get(package) for package in VERSIONS} == VERSIONS
    assert {each.package for each in reliances()} == set(VERSIONS)


def test_every_entry_is_used_and_tested_where_it_says():
    """No entry outlives what it was for."""
    for each in reliances():
        used, last = (UPSTREAM / f"{each.used_by}.py").read_text(), each.name.rpartition(".")[2]
        assert re.search(rf"\b{last}\b", used), f"{each.name} is not in upstream/{each.used_by}.py"
        assert any((REPOSITORY / "tests").rglob(each.test)), each.name
    names = [(each.name, each.used_by) for each in reliances()]
    assert len(names) == len(set(names))


def test_nothing_outside_upstream_uses_a_private_name():
    """The one door: neither private attributes nor private modules, nor attributes of libraries that are replaced."""
    written = {file: _nodes(file) for file in OUTSIDE}
    own = set().union(*map(_defined, written.values()))
    # Names of DeepSpeed's that have no underscore and are documented nowhere.
    undocumented = {each.name.rpartition(".")[2] for each in reliances() if each.package == "deepspeed"} - own
    found = [
        f"{file.relative_to(REPOSITORY)}:{line}: {name}"
        for file, nodes in written.items()
        for line, name in sorted({*_used(nodes, own, undocumented), *_patched(nodes)})
    ]
    assert not found, "\n".join(["put these into upstream/, and into its table:", *found])


def test_every_private_name_in_upstream_is_in_the_table():
    """Methods that override a private one of a library count as its use."""
    listed = {part for each in reliances() for part in each.name.split(".")}
    found = []
    for file in INSIDE:
        nodes = _nodes(file)
        own = _defined(nodes) - _overriding(file)
        used = {*_used(nodes, own, set()), *_spelt(nodes), *((0, name) for name in _overriding(file))}
        found += [f"{file.name}: {name}" for _, name in sorted(used) if name not in listed]
    assert not found, "\n".join(found)


def test_buffers_of_the_state_are_those_that_torch_saves():
    """A checkpoint without gathering: the same buffers as in the state_dict."""
    model = nn.BatchNorm1d(2)
    model.register_buffer("frequencies", torch.ones(2), persistent=False)
    names = {name for name, _ in model.named_buffers()}
    assert {name for name in names if is_persistent(model, name)} == names & model.state_dict().keys() < names


def test_tasks_are_built_without_bars():
    """lm-eval looks its bar up in the module that builds requests."""
    task = pytest.importorskip("lm_eval.api.task")
    shown = task.tqdm
    with no_task_bars():
        assert task.tqdm([1, 2], disable=False, total=2) == [1, 2]
    assert task.tqdm is shown and "tqdm(" in inspect.getsource(task.Task.build_all_requests)


def test_the_processor_is_asked_once(monkeypatch):
    """py-cpuinfo takes a second, and DeepSpeed asks it for every operator."""
    asked = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: asked.append(1) or {"flags": []})
    for _ in range(2):
        ask_the_processor_once()
        assert cpuinfo.get_cpu_info() == {"flags": []}
    assert len(asked) == 1


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_PYTHON


def _nodes(file: Path) -> list[ast.AST]:
    """Return everything in a module; to walk through it is most of what these tests cost."""
    return [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


def _defined(nodes: list[ast.AST]) -> set[str]:
    """Return the names that a module gives to its own functions, classes, variables and attributes."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if getattr(node.value, "id", "") in ("self", "cls") else set()
    return names


def _used(nodes: list[ast.AST], own: set[str], others: set[str]) -> set[tuple[int, str]]:
    """Return (line, name) of private attributes and modules that are not our own, and of `others`."""
    found = set()
    for node in nodes:
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Import):
            names = [part for each in node.names for part in each.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not node.module.startswith("pretraining"):
            names = [*node.module.split("."), *(each.name for each in node.names)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            names = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
        found |= {(node.lineno, name) for name in names if _is_private(name) and name not in own}
        found |= {(node.lineno, name) for name in names if name in others}
    return found


def _spelt(nodes: list[ast.AST]) -> set[tuple[int, str]]:
    """Return (line, name) of private names in strings, which name what a stand-in replaces."""
    strings = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    words = {(node.lineno, word) for node in strings for word in node.value.split()}
    return {(line, word) for line, word in words if re.fullmatch(r"_[a-zA-Z]\w*", word)}


def _patched(nodes: list[ast.AST]) -> set[tuple[int, str]]:
    """Return (line, name) of attributes of imported libraries that the module sets."""
    libraries = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            roots = {each.asname or each.name.split(".")[0]: each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots = {each.asname or each.name: node.module.split(".")[0] for each in node.names}
        else:
            continue
        ours = {"pretraining", *sys.stdlib_module_names}
        libraries |= {name for name, root in roots.items() if root not in ours}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            base = node
            while isinstance(base, ast.Attribute | ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name) and base.id in libraries:
                found.add((node.lineno, ast.unparse(node)))
    return found


@cache
def _overriding(file: Path) -> frozenset[str]:
    """Return the private names which the classes of a module of upstream/ override in a library's class."""
    module = importlib.import_module(f"pretraining.upstream.{file.stem}".removesuffix(".__init__"))
    names = set()
    for each in vars(module).values():
        if inspect.isclass(each) and each.__module__ == module.__name__:
            bases = [base for base in each.__mro__[1:] if not base.__module__.startswith("pretraining")]
            mine = {name for name in vars(each) if _is_private(name)}
            theirs = set().union(*(vars(base) for base in bases if base is not object))
            names |= mine & theirs
    return frozenset(names)
