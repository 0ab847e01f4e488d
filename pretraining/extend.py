"""Extensions: callbacks, metrics, losses, schedules, filters and models in modules of your own.

    from pretraining import extend

    @extend.metric
    def accuracy(logits, labels):
        return (logits.argmax(-1) == labels).float()

A recipe names the modules in `extensions`. Their source is read with the recipe, and not run: what they define is
found by its decorators (and a model by the `model_type` of its configuration class), so that plans and errors come at
once. `load` runs a module. It is the recipe's too: `digest` is part of what a resumed run may not change, and
`copy_extensions` puts the source into the run folder.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pretraining.errors import USER_CODE, UserError, fault_in_user_code, nearest, require
from pretraining.outside.schema import Wrong, display_path, problem, read_json
from pretraining.runtime.durable_files import replacing_folder
from pretraining.runtime.installation import REPOSITORY

Thing = TypeVar("Thing", bound=Callable)

DECORATED = ("callback", "metric", "loss", "schedule", "filter")
MODEL = "model"
PACKAGE = "pretraining_extensions"
"""What files of extensions are modules of; the last part of a module's name is the file's."""
FOLDER = "extensions"
"""Their folder in a run folder."""
MODEL_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
MODEL_KEYS += ("max_position_embeddings",)
"""What a recipe says of a model of one's own, by these names, so that it can be planned."""

_decorated: dict[tuple[str, str, str], Any] = {}
"""{(kind, module, name): what was decorated}, of all modules that have run in this process."""


def callback(thing: Thing) -> Thing:
    """Watch training: a class of transformers' `TrainerCallback`, built without arguments."""
    return _noted("callback", thing)


def metric(thing: Thing) -> Thing:
    """Measure each validation: (logits [tokens, vocabulary] in fp32, labels [tokens]) -> a number for each token.

    `eval/<name>` is the mean over all tokens of the validation.
    """
    return _noted("metric", thing)


def loss(thing: Thing) -> Thing:
    """Take the place of the training loss: (logits [tokens, vocabulary] in fp32, labels [tokens]) -> [tokens].

    `loss.function` of the recipe names it, `loss.arguments` are its keyword arguments.
    """
    return _noted("loss", thing)


def schedule(thing: Thing) -> Thing:
    """Set the learning rate: (step, num_steps, warmup_steps) -> share of the peak in the step after `step`.

    `training.lr_scheduler_type` names it, `training.lr_scheduler_kwargs` are its keyword arguments.
    """
    return _noted("schedule", thing)


def filter(thing: Thing) -> Thing:
    """Judge a text before it is encoded: (text) -> True to keep it, False to reject it, a text in its place.

    The rule `callable` of `data.filters` names it in `import`, and its keyword arguments in `arguments`.
    """
    return _noted("filter", thing)


def _noted(kind: str, thing: Thing) -> Thing:
    _decorated[kind, thing.__module__, thing.__name__] = thing
    return thing


@dataclass(frozen=True)
class Extension:
    """One module that a recipe names, read and not run."""

    module: str
    """A path as it is, or a dotted name."""
    path: Path
    """The file, or the folder of a package."""
    digest: str
    """`sha256:<hex>` of its source."""
    defines: Mapping[str, tuple[str, ...]]

    @property
    def is_file(self) -> bool:
        return is_path(self.module)

    @property
    def import_name(self) -> str:
        return f"{PACKAGE}.{self.path.stem}" if self.is_file else self.module

    def to_dict(self) -> dict:
        """Return what recipe.json holds of it: its place in the run folder, and its digest."""
        place = f"{FOLDER}/{self.path.name}" if self.is_file else self.module
        return {"module": place, "digest": self.digest}


_declared: dict[tuple[str, str], Extension] = {}
"""{(kind, name): the extension of the recipe that was read last and defines it}"""
_run: dict[str, str] = {}
"""{import name: digest of what ran under it}"""


def read_extensions(
    entries: Iterable[str | dict],
    folder: Path,
    where: str,
    refuse: Callable[[Sequence[Extension], str], None] = lambda extensions, where: None,
) -> tuple[Extension, ...]:
    """Read the source of a recipe's `extensions`.

    folder: of the recipe, from which paths count. refuse: is called with the extensions before anything finds them by
    name, and may raise. Raises `UserError` for no such file or module, a syntax error in it, other source than the
    recipe's digest says, or two of one name.
    """
    read: list[Extension] = []
    for number, entry in enumerate(entries):
        wanted = {"module": entry} if isinstance(entry, str) else entry
        key = f"extensions.{number}"
        extension = _read(wanted["module"], folder, where, key)
        if wanted.get("digest", extension.digest) != extension.digest:
            what = "has changed since its digest was written; bring the old one back, or remove the digest"
            raise problem(where, key, f"{display_path(extension.path)} {what}")
        for other in read:
            if other.to_dict()["module"] == extension.to_dict()["module"]:
                what = "another extension has this name, and both are copied into one folder; rename one"
                raise problem(where, key, f"is {extension.path.name}: {what}")
            for kind, names in extension.defines.items():
                if double := set(names) & set(other.defines.get(kind, ())):
                    what = f"defines the {kind} {min(double)!r}, as {other.path.name} does; rename one"
                    raise problem(where, key, what)
        read.append(extension)
    refuse(read, where)
    # what each defines is found by its name in this process
    for extension in read:
        for kind, names in extension.defines.items():
            _declared.update({(kind, name): extension for name in names})
    return tuple(read)


def extensions_of_run(folder: Path) -> tuple[Extension, ...]:
    recipe = folder / "recipe.json"
    entries = read_json(recipe).get("extensions", ()) if recipe.is_file() else ()
    return read_extensions(entries, folder, display_path(recipe))


def is_path(module: str) -> bool:
    return module.endswith(".py") or "/" in module


def _read(module: str, folder: Path, where: str, key: str) -> Extension:
    path = folder / module
    if not is_path(module):  # the source of a module by its dotted name
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            what = "is no module of Python source here; put its folder on PYTHONPATH, or write a path that ends in .py"
            raise problem(where, key, f"{module} {what}")
        path = Path(spec.origin)
        path = path.parent if path.name == "__init__.py" else path
    if path.is_dir() and not (path / "__init__.py").is_file():
        what = "is a folder without __init__.py; name a file that ends in .py"
        raise problem(where, key, f"{display_path(path)} {what}")
    files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    digest, defines = hashlib.sha256(), {}
    for file in files:
        try:
            source = file.read_bytes()
        except OSError as error:
            raise problem(where, key, f"{display_path(file)}: cannot be read: {error.strerror}") from None
        # the names of a package's files are part of what it is
        name = file.relative_to(path).as_posix() if file != path else ""
        digest.update(f"{name}\0{len(source)}\0".encode() + source)
        for kind, names in _defined(source, file).items():
            defines.setdefault(kind, []).extend(names)
    kinds = {kind: tuple(names) for kind, names in defines.items()}
    return Extension(module, path, f"sha256:{digest.hexdigest()}", kinds)


def _defined(source: bytes, file: Path) -> dict[str, list[str]]:
    """Find what a module defines: `@extend.<kind>` at its top level, and `model_type` of configuration classes."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        place = f"{display_path(file)}: line {getattr(error, 'lineno', None) or 1}"
        raise UserError(f"{place}: {getattr(error, 'msg', error)}; mend the extension") from None
    defines: dict[str, list[str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Attribute) and decorator.attr in DECORATED:
                defines.setdefault(decorator.attr, []).append(node.name)
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            # model_type = "..." or model_type: str = "..."
            if isinstance(each, ast.Assign | ast.AnnAssign) and isinstance(each.value, ast.Constant):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                is_type = "model_type" in [getattr(target, "id", "") for target in targets]
                if is_type and isinstance(each.value.value, str):
                    defines.setdefault(MODEL, []).append(each.value.value)
    return defines


def defined(extensions: Iterable[Extension], kind: str) -> list[str]:
    return [name for extension in extensions for name in extension.defines.get(kind, ())]


def check_defined(extensions: Iterable[Extension], kind: str, name: str, key: str) -> Wrong:
    """An extension defines this name."""
    names = defined(extensions, kind)
    if name not in names:
        there = nearest(name, names) or (f"; there are {', '.join(names)}" if names else "")
        what = f"is {name!r}, which no extension defines with @extend.{kind}{there}"
        yield key, what if names else f"{what}; name its module in extensions"


def load_extensions(extensions: Iterable[Extension]) -> None:
    """Run the modules, each once in a process, in the recipe's order. Models are registered with transformers.

    `UserError` has the file and line of an exception in a module.
    """
    for extension in extensions:
        name = extension.import_name
        # a notebook may have changed the file since it ran
        if _run.get(name) == extension.digest:
            continue
        USER_CODE.add(str(extension.path.resolve()))
        try:
            module = _executed(extension) if extension.is_file else importlib.import_module(name)
            _register_models(extension, module)
        except (Exception, SystemExit) as error:
            if fault := fault_in_user_code(error):
                raise fault from error
            what = f"cannot be imported ({type(error).__name__}: {error}); mend the extension"
            raise UserError(f"{display_path(extension.path)}: {what}") from error
        _run[name] = extension.digest


def load_code_of_run(extensions: Iterable[Extension], kinds: Collection[str], trusted: bool) -> None:
    """Run those modules of a run that define one of these kinds, if that is wanted: the run may be a stranger's.

    Raises `UserError` if there is such a file, it has not run in this process, and it is not trusted.
    """
    needed = [extension for extension in extensions if extension.defines.keys() & set(kinds)]
    for extension in needed:
        # a model of the recipes here with this very source is as trusted as the program that asks
        rooms = (REPOSITORY / "recipes" / room / "files" for room in ("modern", "published"))
        ours = [path for room in rooms if (path := room / extension.path.name).is_file()]
        known = (
            trusted
            or _run.get(extension.import_name) == extension.digest
            or any(_read(str(path), path.parent, "", "").digest == extension.digest for path in ours)
        )
        if extension.is_file and not known:
            what = "is Python code of the run, which this would run; if you trust it, add --trust_extensions"
            raise UserError(f"{display_path(extension.path)}: {what}")
    load_extensions(needed)


def load_pretrained(kind: str, place: str | Path, **settings: Any) -> Any:
    """Load with the class of transformers that is called `kind`, and never run Python code that is at the place.

    `UserError` if it can be loaded by such code alone.
    """
    transformers = require("transformers", f"reading {place}")
    try:
        return getattr(transformers, kind).from_pretrained(place, trust_remote_code=False, **settings)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        what = "needs Python code of its own (auto_map), which is not run; name one of a type that transformers has"
        raise UserError(f"{place}: {what}, or make an extension of the code (docs/extending.md)") from None


def all_of(extensions: Iterable[Extension], kind: str) -> dict[str, Any]:
    return {name: _thing(kind, name, each) for each in extensions for name in each.defines.get(kind, ())}


def named(kind: str, name: str) -> Any:
    """Return what an extension of the recipe that was read last calls `name`; `UserError` if there is none."""
    extension = _declared.get((kind, name))
    if extension is None:
        near = nearest(name, [other for of, other in _declared if of == kind])
        what = f"no extension defines a {kind} {name!r}{near}; name its module in the recipe's extensions"
        raise UserError(what)
    return _thing(kind, name, extension)


def model_extension(model_type: str) -> Extension | None:
    """Return the extension that defines the type; None if it is not one of a user's own."""
    return _declared.get((MODEL, model_type))


def _thing(kind: str, name: str, extension: Extension) -> Any:
    load_extensions([extension])
    module = extension.import_name
    for (of, place, called), thing in _decorated.items():
        if (of, called) == (kind, name) and (place == module or place.startswith(f"{module}.")):
            return thing
    what = f"has not defined the {kind} {name!r}: decorate it with @extend.{kind} of `from pretraining import extend`"
    raise UserError(f"{display_path(extension.path)}: {what}")


def _executed(extension: Extension) -> ModuleType:
    """Run a file, or the `__init__.py` of a folder, as a module of `PACKAGE`."""
    folder = extension.path.is_dir()
    file = (extension.path / "__init__.py" if folder else extension.path).resolve()
    places = {"submodule_search_locations": [str(file.parent)] if folder else None}
    spec = importlib.util.spec_from_file_location(extension.import_name, file, **places)
    module = importlib.util.module_from_spec(spec)
    # relative imports look up the package above
    above = sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
    above.__path__ = []
    # of an earlier version: its files must run again
    for name in [name for name in sys.modules if name.startswith(f"{extension.import_name}.")]:
        del sys.modules[name]
    # before it runs: dataclasses look up their module by name
    sys.modules[extension.import_name] = module
    spec.loader.exec_module(module)
    return module


def _register_models(extension: Extension, module: ModuleType) -> None:
    """Make the model types of a module known to transformers' Auto classes, here and in the exports."""
    wanted = extension.defines.get(MODEL, ())
    if not wanted:
        return
    # not imported here: a module that defines a model has done so
    transformers: Any = sys.modules["transformers"]
    found: list[Any] = [each for each in vars(module).values() if inspect.isclass(each)]
    classes = [each for each in found if issubclass(each, transformers.PreTrainedModel)]
    for model_type in wanted:
        # the base classes of transformers have no configuration class of their own
        of_type = [each for each in classes if getattr(each.config_class, "model_type", None) == model_type]
        # a file defines the layers first; they have this configuration too, and no head
        causal: list[Any] = sorted(of_type, key=lambda each: each.__name__.endswith("ForCausalLM"))
        if not causal:
            what = f"defines no model for model_type {model_type!r}: a PreTrainedModel with this config_class"
            raise UserError(f"{display_path(extension.path)}: {what}")
        config = causal[-1].config_class
        transformers.AutoConfig.register(model_type, config, exist_ok=True)
        transformers.AutoModelForCausalLM.register(config, causal[-1], exist_ok=True)
        # their file goes into every export, which other programs then load with trust_remote_code
        config.register_for_auto_class("AutoConfig")
        causal[-1].register_for_auto_class("AutoModelForCausalLM")


def check_model_keys(model: dict, config_class: type) -> None:
    """Raise `UserError` for a key that a configuration class of a user's own does not have: it would take any."""
    try:
        known = {*vars(config_class()), *dir(config_class), *inspect.signature(config_class).parameters}
    except Exception:  # a class without defaults: its own signature is all that is known
        known = {*inspect.signature(config_class).parameters}
    for key in model.keys() - {"model_type", "attn_implementation", "use_cache"}:
        if key not in known:
            what = f"model.{key}: {config_class.__name__} has no such attribute{nearest(key, known)}"
            raise UserError(what)


def copy_extensions(extensions: Iterable[Extension], run_folder: Path) -> None:
    """Put the files into a run folder, where `to_dict` says that they are. Installed modules stay where they are."""
    files = [extension.path for extension in extensions if extension.is_file]
    if not files:
        shutil.rmtree(run_folder / FOLDER, ignore_errors=True)
        return
    # replaced after the copies: a run that is started from its own folder reads them there
    with replacing_folder(run_folder / FOLDER) as partial:
        partial.mkdir(parents=True)
        for path in files:
            if path.is_dir():
                shutil.copytree(path, partial / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(path, partial / path.name)
