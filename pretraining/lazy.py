"""Names of a package that are imported when first used, so that a light question waits for no heavy library."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def imported_at_first_use(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`; home: {name: the module below the package that has it}."""

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return find
