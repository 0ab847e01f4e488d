"""Import packages that only some users need: a missing one gives one sentence, never a traceback."""

import importlib
from types import ModuleType

from pretraining.errors import UserError


def require(package: str, purpose: str) -> ModuleType:
    """Import `package`; if it is missing, a UserError says which purpose needs it and how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        # The package may be there, and one that it imports missing.
        missing = error.name or package
        raise UserError(
            f"{purpose} needs the package {missing!r}, which is not installed: pip install {missing}"
        ) from error
