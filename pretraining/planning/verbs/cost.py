"""Hours, dollars, energy, links, data rate and checkpoints of a run."""

import argparse

from pretraining.errors import UserError
from pretraining.planning.forecast import forecast
from pretraining.planning.gpus import find_gpu
from pretraining.planning.quantities import (
    amount,
    dollars,
    duration,
    energy,
    facts,
    gpu_count,
    hours,
    num_bytes,
    several,
    share,
    short,
)
from pretraining.planning.workload import add_workload_arguments, workload_of

EXAMPLES = """  python -m pretraining.planning cost --recipe 7b --world_size 64 --gpu H100
  python -m pretraining.planning cost --recipe 30b --world_size 8 --gpu H200 --mfu 0.35 --price 2.5
  python -m pretraining.planning cost --parameters 65b --tokens 1.4t --world_size 2048 --gpu A100 --json"""
NOT_COUNTED = "without validation, saving and restarts"
PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload, the GPUs, and what takes the place of the tables' values."""
    add_workload_arguments(parser)
    parser.add_argument("--world_size", type=gpu_count, required=True, metavar="N", help="number of GPUs")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="which kind (see the verb gpus)")
    parser.add_argument(
        "--mfu",
        type=share,
        metavar="SHARE",
        help="share of the dense peak that whole steps reach",
    )
    parser.add_argument("--precision", choices=PRECISIONS, help="of the products, instead of the recipe's")
    parser.add_argument(
        "--price", type=amount, metavar="DOLLARS", help="per GPU-hour, instead of the table's"
    )


def answer(options: argparse.Namespace) -> dict:
    """The forecast."""
    workload, gpu = workload_of(options), find_gpu(options.gpu)
    if not workload.tokens:
        raise UserError("--tokens D is missing: how many tokens is it to train on?")
    result = forecast(workload, gpu, options.world_size, options.mfu, options.precision, options.price)
    return result.to_dict()


def as_text(answer: dict) -> str:
    """One screen: the run, its time, its money, and for a recipe its step."""
    cost = answer["cost"]
    rate, each = answer["tokens_per_second"], answer["tokens_per_second_per_gpu"]
    rows = [
        ("run", _run_words(answer)),
        ("training FLOPs", f"{answer['flops']:.3e}"),
        ("GPUs", f"{answer['num_gpus']:,} x {answer['gpu']}, {answer['precision']}"),
        ("MFU", mfu_words(answer)),
        ("throughput", f"{rate:,.0f} tokens/s, {each:,.0f} a GPU"),
        ("time", f"{duration(answer['seconds'])}, {NOT_COUNTED}"),
        *scaling_rows(answer["scaling"]),
        ("GPU-hours", hours(cost["gpu_hours"])),
        ("energy", f"{energy(cost['energy_kwh'])} at rated power"),
    ]
    rows += [(f"at {price['provider']}", _price_words(price)) for price in cost["prices"]]
    if not cost["prices"]:
        rows.append(("dollars", "no price known: give --price, or add one to tables/prices.json"))
    return facts(rows + (_step_rows(answer["step"]) if answer["step"] else []))


def mfu_words(answer: dict) -> str:
    """The MFU of the run, and what it was made of."""
    used = answer["utilization"]
    if f"{used['mfu']:.0%}" == f"{answer['mfu']:.0%}":
        return f"{answer['mfu']:.0%} ({used['source']})"
    less = "less recomputation, messages, offload and launches"
    return f"{answer['mfu']:.0%}: {used['mfu']:.0%} ({used['source']}) {less}"


def scaling_rows(scaling: dict | None) -> list[tuple[str, str]]:
    """What is assumed of more than one node; nothing of one."""
    if scaling is None:
        return []
    return [("scaling", f"{several(scaling['nodes'], 'node')}, {scaling['assumption']}")]


def disk_words(disk: dict[str, int], checkpoints_kept: int) -> str:
    """The bytes of a run's disk: all of them, and what they are for."""
    names = {name: name for name in disk} | {"checkpoints kept": several(checkpoints_kept, "checkpoint")}
    parts = ", ".join(f"{num_bytes(size)} for {names[name]}" for name, size in disk.items())
    return f"{num_bytes(sum(disk.values()))}: {parts}"


def _run_words(answer: dict) -> str:
    size = f"{short(answer['parameters'])} parameters"
    name = answer["name"] if answer["name"] == size else f"{answer['name']}, {size}"
    return f"{name} on {short(answer['tokens'])} tokens"


def _price_words(price: dict) -> str:
    where = ", ".join(part for part in (price["place"], price["date"]) if part)
    return f"{dollars(price['dollars'])} ({dollars(price['dollars_per_gpu_hour'])} a GPU-hour; {where})"


def _step_rows(step: dict) -> list[tuple[str, str]]:
    time, saved = step["time"], step["checkpoints"]
    rows = [
        ("step", f"{duration(step['seconds'])}, bound by {time['bound_by']}"),
        ("sent per GPU and step", f"{num_bytes(step['sent_bytes_per_gpu'])}, {_link_words(time)}"),
        ("data loaders", f"{num_bytes(step['loader_bytes_per_second'])}/s for all ranks"),
    ]
    if saved:
        rows += _checkpoint_rows(saved)
    return [*rows, ("disk", disk_words(step["disk"], saved["kept"] if saved else 0))]


def _checkpoint_rows(saved: dict) -> list[tuple[str, str]]:
    spacing = (
        f"every {duration(saved['every_seconds'])}, best about every {duration(saved['best_every_seconds'])}"
    )
    failure = f"every {duration(saved['failure_seconds'])} of all GPUs; {saved['lost_share']:.1%} done twice"
    written = f"{num_bytes(saved['bytes'])} each, {saved['written']:,} written, {spacing}"
    return [("checkpoints", f"{written}{write_words(saved)}"), ("a failure", failure)]


def write_words(saved: dict) -> str:
    """How long a checkpoint takes to write, if the disk was measured; nothing if its rate is an assumption."""
    disk = saved["disk"]
    if disk is None:
        return ""
    rate = f"{num_bytes(disk['value'])}/s to {disk['where']}, measured here on {disk['date']}"
    return f", {duration(saved['write_seconds'])} to write ({rate})"


def _link_words(time: dict) -> str:
    seconds, products = time["communication_seconds"], time["compute_seconds"]
    if seconds > products:
        ways = "larger micro-batches with less accumulation, hpZ or model parallelism would help"
        return f"{duration(seconds)} at the links' peak, more than the products' {duration(products)}: {ways}"
    return f"{duration(seconds)} at the links' peak, {seconds / products:.0%} of the products' time"
