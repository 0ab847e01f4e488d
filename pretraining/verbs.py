"""Commands of several verbs, `python -m pretraining.<room> VERB`: one module a verb in the room's folder verbs/.

A module dropped in there is a verb of its name. It has a docstring whose first line is its help, and

    EXAMPLES                       command lines, shown by --help
    add_arguments(parser)          its options; --json is there already
    answer(options) -> dict        plain JSON values
    as_text(answer) -> str         the same for a person

and raises `UserError` for what a user can mend. Where the answer itself may be a refusal, `refusal(answer)` gives
its line or None: it follows the answer.
"""

import argparse
import json
import pkgutil
from importlib import import_module
from types import ModuleType

from pretraining.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line like all others."""

    def error(self, message: str) -> None:
        """Raise `UserError` with the message and where to read on."""
        raise UserError(f"{message} (see {self.prog} --help)")


def verb_modules(folder: ModuleType) -> dict[str, ModuleType]:
    """Every module of a package verbs/, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    return {name: import_module(f"{folder.__name__}.{name}") for name in names}


def answer_one(
    prog: str, modules: dict[str, ModuleType], description: str, epilog: str, arguments=None
) -> None:
    """Answer one command line on stdout."""
    options = _build_parser(prog, modules, description, epilog).parse_args(arguments)
    verb = modules[options.verb]
    answer = verb.answer(options)
    print(json.dumps(answer, indent=2) if options.json else verb.as_text(answer), flush=True)
    refusal = verb.refusal(answer) if hasattr(verb, "refusal") else None
    if refusal:
        raise UserError(refusal)


def _build_parser(
    prog: str, modules: dict[str, ModuleType], description: str, epilog: str
) -> argparse.ArgumentParser:
    shared = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = OneLineParser(prog, description=description, epilog=epilog, **shared)
    parsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in modules.items():
        first_line = module.__doc__.splitlines()[0]
        examples = f"examples:\n{module.EXAMPLES}"
        verb = parsers.add_parser(
            name, help=first_line, description=module.__doc__, epilog=examples, **shared
        )
        module.add_arguments(verb)
        verb.add_argument("--json", action="store_true", help="the answer as JSON")
    return parser
