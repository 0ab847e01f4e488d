"""A rule of the user's own: a Python function."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from pretraining.data.quality.parameters import Rule, parameter
from pretraining.data.quality.verdict import Changed, Rejection
from pretraining.data.quality.view import TextView
from pretraining.errors import UserError, nearest


@dataclass(frozen=True)
class Custom(Rule):
    """A function of yours: `def keep(text: str) -> bool | str | None`.

    True keeps the text; a text takes its place; False, None or an empty text rejects it. Called once for each
    text that the rules before it kept, in any process and order: it must be a function of the text alone. An
    exception in it ends the preparation and names the document.
    """

    name: ClassVar[str] = "callable"
    import_: str = parameter(..., "package.module:function, or path/to/file.py:function.")
    arguments: dict = parameter({}, "Keyword arguments passed to it after the text.")

    def __post_init__(self):
        if not callable(self._function):
            raise UserError(f"import: {self.import_} cannot be called; name a function")

    @cached_property
    def _function(self) -> Callable:
        module_name, colon, name = self.import_.rpartition(":")
        if not colon:
            raise UserError(f"import: {self.import_!r} has no colon; write package.module:function")
        module = _load(module_name)
        if not hasattr(module, name):
            near = nearest(name, vars(module))
            raise UserError(f"import: {module_name} has no {name!r}{near}")
        return getattr(module, name)

    def judge(self, view: TextView) -> Rejection | Changed | None:
        """What the function says; UserError where it says anything but a bool, a text or None."""
        try:
            answer = self._function(view.text, **self.arguments)
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"{self.import_} failed ({what}); mend the function or the document") from error
        if isinstance(answer, str) and answer:
            return None if answer == view.text else Changed(answer, {"texts": 1})
        if answer is not None and answer != "" and type(answer).__name__ not in ("bool", "bool_"):
            kind = type(answer).__name__
            raise UserError(f"{self.import_} returned {kind}; it must return True, False, None or a text")
        return None if answer else Rejection(self.import_.rpartition(":")[2], repr(answer), "True or a text")

    def identity(self) -> dict:
        """With the checksum of the file that defines the function."""
        module = sys.modules[self._function.__module__] if hasattr(self._function, "__module__") else None
        file = getattr(module, "__file__", None)
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
        return {**super().identity(), "source": digest}


def _load(module_name: str):
    """Import by dotted name, or from a file that ends in .py."""
    try:
        if module_name.endswith(".py"):
            return _load_file(Path(module_name))
        return importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        hint = "put its folder on PYTHONPATH, or write path/to/file.py:function"
        raise UserError(f"import: cannot import {module_name} ({what}); {hint}") from error


def _load_file(path: Path):
    if not path.is_file():
        raise UserError(f"import: {path}: no such file")
    name = f"filters_of_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
