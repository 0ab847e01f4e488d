"""Answers before you pay: sizes, FLOPs, the best allocation, hours, dollars, layouts, GPUs."""

import sys
from types import ModuleType

from pretraining import command_line as commands
from pretraining.errors import one_line_errors
from pretraining.planning import verbs

EPILOG = """examples:
  python -m pretraining.planning flops --recipe 30b
  python -m pretraining.planning chinchilla --flops 1e23
  python -m pretraining.planning cost --recipe 7b --world_size 64 --gpu H100
  python -m pretraining.planning parallelism --recipe 65b --world_size 512 --gpu H100
  python -m pretraining.planning gpus

Every verb has --help, and --json for scripts. Constants and their sources: pretraining/planning/tables/."""


def verb_modules() -> dict[str, ModuleType]:
    """Every module of the folder verbs/, by name."""
    return commands.verb_modules(verbs)


def main(arguments: list[str] | None = None) -> None:
    """Answer one question on stdout."""
    commands.answer_one("python -m pretraining.planning", verb_modules(), __doc__, EPILOG, arguments)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
