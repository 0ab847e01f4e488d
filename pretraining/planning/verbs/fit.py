"""The stage, offload, micro-batch and activation checkpointing that fit, predicted fastest first."""

import argparse
import shlex
import textwrap

from pretraining.errors import UserError
from pretraining.planning.gpus import Gpu, find_gpu
from pretraining.planning.memory.need import ROOMY, TIGHT
from pretraining.planning.quantities import columns, count, duration, gpu_count, num_bytes, several, share
from pretraining.planning.search import SAME, Candidate, fitting, worth_choosing
from pretraining.planning.throughput import scaling_over_nodes
from pretraining.planning.workload import add_workload_arguments, workload_of
from pretraining.recipe import Recipe

EXAMPLES = """  python -m pretraining.planning fit --recipe 7b --world_size 8 --gpu A100
  python -m pretraining.planning fit --recipe 30b --world_size 8 --gpu H200 --top 3 --json"""
MOST = 6
NOTE = """
The fastest first, times within {same:.0%} counted as equal; each further row needs less memory than all above it.
Of ways as fast as each other the first leaves {room:.0%} of the memory free, if one does, then has no offload,
the fewest layers recomputed, the lowest stage and the largest micro-batch. What takes more than {tight:.0%} of the
memory is chosen only if nothing else fits. Time is the longest of products, messages and kernel launches, plus
offload. `ac`: of how many layers one is recomputed (activation checkpointing)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, the GPUs, and which ways to show."""
    add_workload_arguments(parser)
    parser.add_argument("--world_size", type=gpu_count, required=True, metavar="N", help="number of GPUs")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="which kind (see the verb gpus)")
    parser.add_argument(
        "--memory", type=count, metavar="BYTES", help="of one GPU, instead of the table's: 80e9"
    )
    parser.add_argument(
        "--mfu",
        type=share,
        metavar="SHARE",
        help="share of the dense peak where no layer is recomputed",
    )
    parser.add_argument(
        "--top", type=gpu_count, metavar="K", help=f"ways to show (default {MOST}, with --all every one)"
    )
    parser.add_argument(
        "--all", action="store_true", help="show every way that fits, not only those that a choice is between"
    )


def answer(options: argparse.Namespace) -> dict:
    """The fastest way, and those that need less memory; with `--deepspeed` those of that ds_config alone."""
    workload, gpu = workload_of(options), find_gpu(options.gpu)
    if workload.recipe is None:
        raise UserError("the search needs the model's shape: give --recipe NAME (and --set to change it)")
    limit = options.memory or gpu.memory_bytes
    own = options.deepspeed is not None
    found = fitting(workload.recipe, options.world_size, gpu, limit, options.mfu, own)
    chosen = worth_choosing(found)
    shown = found if options.all else chosen
    top = options.top or (len(shown) if options.all else MOST)
    return {
        "name": workload.name,
        "gpu": gpu.name,
        "memory_bytes": limit,
        "world_size": options.world_size,
        "scaling": scaling_over_nodes(gpu, options.world_size),
        "fitting": len(found),
        "ways": [each.to_dict() for each in shown[:top]],
        "command": _command(options, workload.recipe, chosen[0], gpu),
    }


def _command(options: argparse.Namespace, recipe: Recipe, best: Candidate, gpu: Gpu) -> str:
    """What to type for the best way: launcher, what was given, and after it what the search changes."""
    given = [*_launcher(options.world_size, gpu.gpus_per_node, recipe.name), "train.py", *recipe.words]
    if options.deepspeed and recipe.deepspeed == best.deepspeed:
        given += ["--deepspeed", options.deepspeed]
    return " ".join([shlex.join(given), *best.changes])


def _launcher(num_gpus: int, gpus_per_node: int, name: str) -> list[str]:
    """Of one node deepspeed; of several, as equal as they come, torchrun, which is typed on each of them."""
    nodes = next(n for n in range(-(-num_gpus // gpus_per_node), num_gpus + 1) if num_gpus % n == 0)
    if nodes == 1:
        return ["deepspeed", f"--num_gpus={num_gpus}"]
    ranks = [f"--nnodes={nodes}", f"--nproc_per_node={num_gpus // nodes}"]
    return ["torchrun", *ranks, "--rdzv_backend=c10d", "--rdzv_endpoint=node0:29500", f"--rdzv_id={name}"]


def as_text(answer: dict) -> str:
    """A table, the best first, and what to type for it."""
    header = ["ds_config", "micro-batch", "accumulation", "ac", "memory", "step", "why"]
    rows = [_row(way) for way in answer["ways"]]
    title = f"{answer['name']} on {answer['world_size']:,} x {answer['gpu']}: {_how_many(answer)}"
    scaling = answer["scaling"]
    note = NOTE.format(same=SAME - 1, room=1 - ROOMY, tight=TIGHT)
    note += f" {several(scaling['nodes'], 'node')}: {scaling['assumption']}." if scaling else ""
    where = "on each node, with the name of the first in place of node0:\n" if scaling else ""
    return f"{title}\n\n{_table(header, rows)}\n{_filled(note)}\n\n{where}{_wrapped(answer['command'])}"


def _how_many(answer: dict) -> str:
    fitting, shown = answer["fitting"], len(answer["ways"])
    words = f"{several(fitting, 'way')} {'fits' if fitting == 1 else 'fit'}"
    return words if shown == fitting else f"{words}, {shown} worth a choice are shown; --all shows every one"


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 118, initial_indent="\n", break_on_hyphens=False)


def _wrapped(command: str) -> str:
    """As a shell takes it, an option of train.py a line."""
    words = [shlex.quote(word) for word in shlex.split(command)]
    options = words.index("train.py") + 1
    lines = [f" \\\n    {word}" if word.startswith("--") else f" {word}" for word in words[options:]]
    return " ".join(words[:options]) + "".join(lines)


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Numbers to the right, names and reasons to the left."""
    width = max(len(row[-1]) for row in rows)
    return columns(
        [*header[:-1], header[-1].ljust(width)], [[*row[:-1], row[-1].ljust(width)] for row in rows]
    )


def _row(way: dict) -> list[str]:
    return [
        way["deepspeed"] or "none",
        str(way["micro_batch"]),
        str(way["accumulation"]),
        str(way["every_n_layers"] or "no"),
        num_bytes(way["memory"]["total"]),
        duration(way["step_seconds"]),
        way["why"],
    ]
