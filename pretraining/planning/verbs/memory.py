"""Memory per GPU by part, on the host and on NVMe, of a recipe on so many GPUs."""

import argparse
import textwrap

from pretraining.errors import UserError
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.advice import shrink
from pretraining.planning.memory.host import BUILT, PROCESS, SNAPSHOT
from pretraining.planning.memory.need import PHASES, memory_need
from pretraining.planning.quantities import columns, gpu_count, num_bytes, several
from pretraining.planning.workload import add_workload_arguments, workload_of

EXAMPLES = """  python -m pretraining.planning memory --recipe 30b --world_size 8 --gpu H200
  python -m pretraining.planning memory --recipe 1.5b --world_size 8 --deepspeed zero1 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, the number of GPUs, and which kind."""
    add_workload_arguments(parser)
    parser.add_argument("--world_size", type=gpu_count, required=True, metavar="N", help="number of GPUs")
    parser.add_argument(
        "--gpu", metavar="NAME", help="which kind (see the verb gpus), to say whether it fits"
    )


def answer(options: argparse.Namespace) -> dict:
    """The need at the peak, by part, and the other phases."""
    workload = workload_of(options)
    if workload.recipe is None:
        raise UserError("memory needs the model's shape: give --recipe NAME (and --set to change it)")
    gpu = None if options.gpu is None else find_gpu(options.gpu)
    there = gpu.memory_bytes if gpu else None
    need = memory_need(workload.recipe, workload.ds_config, options.world_size, there)
    return {
        "name": workload.name,
        "deepspeed": workload.recipe.deepspeed,
        "world_size": options.world_size,
        "micro_batch": workload.recipe.micro_batch,
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": there,
        "fits": need.total <= there if gpu else None,
        "shrink": shrink(need, workload.recipe, workload.ds_config),
        **need.to_dict(),
    }


def as_text(answer: dict) -> str:
    """One screen: a column for each phase, the peak's first."""
    phases = sorted(answer["phases"], key=lambda name: name != answer["peak_phase"])
    parts = dict.fromkeys(part for phase in phases for part in answer["phases"][phase])
    parts = [part for part in parts if any(answer["phases"][phase].get(part) for phase in phases)]
    rows = [[part, *(_cell(answer["phases"][phase].get(part)) for phase in phases)] for part in parts]
    rows.append(["allocated", *(num_bytes(sum(answer["phases"][phase].values())) for phase in phases)])
    lines = [_title(answer), "", columns(["", *phases], rows), ""]
    lines += [f"{phase}: {PHASES[phase]}" for phase in phases]
    lines += [f"largest: {answer['largest']}; less of it: {answer['shrink']}"]
    lines += [f"beside it: {num_bytes(answer['reserve'])} for CUDA, NCCL and the allocator (assumed)"]
    host = f"host memory per GPU: {num_bytes(answer['host_bytes'])} ({host_words(answer['host'])})"
    lines += textwrap.wrap(host, 118)
    return "\n".join(lines + ([f"NVMe per GPU: {num_bytes(answer['nvme'])}"] if answer["nvme"] else []))


def _title(answer: dict) -> str:
    ranks, way = answer["world_size"], answer["deepspeed"] or "plain data parallel"
    title = f"{answer['name']} on {several(ranks, 'GPU')}, {way}, micro-batch {answer['micro_batch']}"
    need = f"{num_bytes(answer['total'])} on each"
    if answer["gpu"]:
        verdict = "fits" if answer["fits"] else "does not fit"
        need += f", {verdict} {answer['gpu']} ({num_bytes(answer['gpu_memory_bytes'])})"
    return f"{title}: {need}"


def _cell(number: float | None) -> str:
    return num_bytes(number) if number else "-"


def host_words(parts: dict) -> str:
    """What host memory is for; of a process by itself nothing is counted."""
    names = {name: name for name in parts} | {PROCESS: "assumed for the process"}
    words = {name: f"{num_bytes(size)} {names[name]}" for name, size in parts.items()}
    if BUILT in parts and SNAPSHOT in parts:
        words[SNAPSHOT] = f"later {words[SNAPSHOT]}"
    return ", ".join(words.values())
