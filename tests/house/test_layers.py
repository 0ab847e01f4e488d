"""The layer table: which room may import which, read from the imports themselves."""

import ast
import json
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from pretraining.ds_config import load_ds_config
from pretraining.planning.screen import fewest_ranks
from pretraining.recipe import load_recipe, recipe_names
from tests.gear.runs import REPOSITORY, execute

PACKAGE = REPOSITORY / "pretraining"
FOUNDATION = {"command_line", "ds_config", "errors", "extend", "outside", "recipe", "runtime"}
FOUNDATION |= {"supervise"}
NUMBERS_AND_DATA = {"planning", "data"}
UPSTREAM = {"upstream"}
WORK = {"model", "training", "checkpoints", "evaluation", "reporting"}
DRIVERS = {
    "doctor": {"model", "training"},
    "api": set(),
    "train": set(),
    "meeting_point": set(),
    "sweep": {"api", "checkpoints", "reporting"},
    "ladder": {"api", "checkpoints", "reporting", "sweep"},
    "postmortem": {"checkpoints", "reporting"},
    "reporting/__main__": {"checkpoints"},
    "reporting/served": {"checkpoints"},
    "pipeline": {"api", "checkpoints", "doctor", "reporting"},
    "rehearsal": {"model", "training", "checkpoints"},
}
"""Rooms that drive what other rooms of their layer hold, as train.py does."""
HEAVY = {"torch", "transformers", "deepspeed", "accelerate"}

MODULES = sorted(path.relative_to(REPOSITORY) for path in PACKAGE.rglob("*.py"))


def dotted(module: Path) -> str:
    """`pretraining/data/order.py` -> pretraining.data.order, and a package's `__init__.py` -> its folder."""
    return ".".join(module.with_suffix("").parts).removesuffix(".__init__")


def room_of(module: Path) -> str:
    """`pretraining/data/order.py` -> data; `pretraining/errors.py` -> errors."""
    return module.with_suffix("").parts[1]


@cache
def imports(module: Path, only_at_import_time: bool = False) -> frozenset[str]:
    """Dotted names that a module imports: anywhere, or only where importing it runs them."""
    tree = ast.parse((REPOSITORY / module).read_text(encoding="utf-8"))
    nodes = _statements(tree) if only_at_import_time else ast.walk(tree)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def _statements(node: ast.AST):
    """Every node that runs on import: outside the bodies of functions, and of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        for_checkers = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not for_checkers and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _statements(child)


def rooms(names) -> set[str]:
    return {name.split(".")[1] for name in names if name.split(".")[0] == "pretraining"}


def outside(names) -> set[str]:
    """Top-level packages that are neither ours nor Python's."""
    return {name.split(".")[0] for name in names} - {"pretraining"} - sys.stdlib_module_names


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_each_module_imports_only_what_its_layer_may(module):
    """Layer 0: Python and itself. Layer 1: layer 0. Layer 2: layers 0 and 1, no other room of its own layer.
    The door to the libraries (`upstream`) imports no room of ours.

    In layer 0 the groups of ranks ask torch when they are called, and one function begins the libraries' imports.
    """
    room = room_of(module)
    if room == "__init__":
        assert not imports(module)
    elif room in FOUNDATION:
        assert rooms(imports(module)) <= FOUNDATION
        assert not outside(imports(module, only_at_import_time=True))
        libraries = {"process_group": {"torch"}, "imports": {"transformers"}, "store": {"fsspec"}}
        assert outside(imports(module)) <= libraries.get(module.stem, set())
    elif room in NUMBERS_AND_DATA:
        assert rooms(imports(module)) <= FOUNDATION | {room}
    elif room in UPSTREAM:
        assert rooms(imports(module)) <= {"errors", room}
    else:
        assert room in WORK | set(DRIVERS), f"{room}: give the new room a place in the layer table"
        below = FOUNDATION | NUMBERS_AND_DATA | UPSTREAM
        drives = DRIVERS.get(room, set()) | DRIVERS.get("/".join(module.with_suffix("").parts[1:]), set())
        assert rooms(imports(module)) <= below | {room} | drives


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) in NUMBERS_AND_DATA], ids=str)
def test_planning_and_data_import_neither_torch_nor_transformers(module):
    """Not when they are imported, and not inside a function: torch is the business of layer 2."""
    assert not outside(imports(module, only_at_import_time=True)) & HEAVY
    assert not outside(imports(module)) & (HEAVY - {"transformers"})


def test_nothing_imports_the_commands():
    """train.py and data_prep.py are where the rooms meet; nothing depends on them."""
    for module in MODULES:
        assert not {name.split(".")[0] for name in imports(module)} & {"train", "data_prep", "tests"}
        assert not rooms(imports(module)) & {"train"}


def test_no_module_imports_one_that_imports_it():
    """A circle is one module in several files, none of which can be read first.

    Imports count at a module's head, in a function and for types.
    """
    graph = {dotted(module): set() for module in MODULES}
    for module in MODULES:
        # `from pretraining.data import order` means the module, `from pretraining.errors import UserError` its owner
        asked = {name if name in graph else name.rpartition(".")[0] for name in imports(module)}
        graph[dotted(module)] = (asked & graph.keys()) - {dotted(module)}
    # a circle raises CycleError, which names it
    assert sorted(TopologicalSorter(graph).static_order()) == sorted(graph)


def test_few_modules_are_at_the_top():
    """What two rooms share has a room of its own; at the top there is what every command begins with.

    One more starts the command that lies beside the package.
    """
    commands = {"__init__", "train"}
    at_top = [module.stem for module in MODULES if len(module.parts) == 2 and module.stem not in commands]
    assert len(at_top) <= 9, at_top


def test_commands_load_torch_only_once_everything_is_checked():
    """train.py imports the rooms that need torch inside `train`, data_prep.py never does. Reporting needs none."""
    at_once = rooms(imports(Path("train.py"), only_at_import_time=True))
    assert at_once <= FOUNDATION | NUMBERS_AND_DATA | {"reporting"}
    assert rooms(imports(Path("data_prep.py"))) <= FOUNDATION | {"data"}


def modules_after_each(*commands: tuple[str, ...]) -> list[tuple[int, set[str]]]:
    """Exit code and top-level modules that each command of the repository has imported when it ends.

    They run one after the other in one interpreter: each has what those before it imported.
    """
    program = (
        "import json, runpy, sys\n"
        "for command in json.loads(sys.argv.pop()):\n"
        "    sys.argv[:] = command\n"
        "    try:\n"
        "        code = runpy.run_path(command[0], run_name='__main__') and 0\n"
        "    except SystemExit as end:\n"
        "        code = end.code or 0\n"
        "    print('\\nmodules ' + json.dumps([code, [m for m in sys.modules if '.' not in m]]))"
    )
    finished = execute([sys.executable, "-c", program, json.dumps(commands)])
    assert "Traceback" not in finished.stderr and finished.code == 0, finished.output
    lines = [line for line in finished.stdout.splitlines() if line.startswith("modules ")]
    return [(code, set(modules)) for code, modules in (json.loads(line.partition(" ")[2]) for line in lines)]


def test_the_plan_of_every_recipe_needs_no_torch():
    """Promise: you know before you pay, at once."""
    plans = {}
    for name in recipe_names():
        ranks = max(2, fewest_ranks(load_ds_config(load_recipe(name).deepspeed)))
        plans[name] = ("train.py", "--recipe", name, "--plan", "--world_size", str(ranks))
    for name, (code, modules) in zip(plans, modules_after_each(*plans.values()), strict=True):
        assert code == 0 and not modules & HEAVY, name


def test_a_recipe_error_needs_no_torch():
    """A mistake in a recipe is told at once."""
    words = ("--recipe", "features/gpt2", "--set", "training.learnin_rate=1")
    for code, modules in modules_after_each(("train.py", *words), ("data_prep.py", *words)):
        assert code == 2 and not modules & HEAVY
