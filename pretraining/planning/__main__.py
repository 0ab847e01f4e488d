"""Answers before you pay: sizes, FLOPs, the best allocation, hours, dollars, layouts, GPUs."""

import sys

from pretraining.command_line import answer_one
from pretraining.errors import one_line_errors
from pretraining.planning.comparison import CompareVerb
from pretraining.planning.costs import CostVerb
from pretraining.planning.fit import FitVerb
from pretraining.planning.gpus import GpusVerb
from pretraining.planning.memory.need import MemoryVerb
from pretraining.planning.parallelism import ParallelismVerb
from pretraining.planning.scaling_laws import ChinchillaVerb
from pretraining.planning.setup import FlopsVerb, ParametersVerb

EPILOG = """examples:
  python -m pretraining.planning flops --recipe 30b
  python -m pretraining.planning memory --model recipes/features/files/smollm2.json --world_size 8 --gpu H100
  python -m pretraining.planning chinchilla --flops 1e23
  python -m pretraining.planning cost --recipe 7b --world_size 64 --gpu H100
  python -m pretraining.planning parallelism --recipe 65b --world_size 512 --gpu H100
  python -m pretraining.planning gpus

Every verb has --help, and --json for scripts. Constants and their sources: pretraining/planning/tables/."""
VERBS = {
    "chinchilla": ChinchillaVerb(),
    "compare": CompareVerb(),
    "cost": CostVerb(),
    "fit": FitVerb(),
    "flops": FlopsVerb(),
    "gpus": GpusVerb(),
    "memory": MemoryVerb(),
    "parallelism": ParallelismVerb(),
    "parameters": ParametersVerb(),
}
"""Each in the module whose question it asks."""


def main(arguments: list[str] | None = None) -> None:
    answer_one("python -m pretraining.planning", VERBS, __doc__, EPILOG, arguments)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
