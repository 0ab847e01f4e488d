"""GPUs that plans know: dense peaks, memory, links, watts, prices."""

import argparse

from pretraining.planning.gpus import Gpu, all_gpus, find_gpu, prices_of
from pretraining.planning.quantities import columns, dollars, facts, num_bytes, three_digits

EXAMPLES = """  python -m pretraining.planning gpus
  python -m pretraining.planning gpus --gpu "NVIDIA H100 80GB HBM3"
  python -m pretraining.planning gpus --json"""
TABLE_NOTE = """
Peaks are dense TFLOPS; links are per GPU and direction. From pretraining/planning/tables/, which you may edit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--gpu` for one of them in full."""
    parser.add_argument("--gpu", metavar="NAME", help="one GPU in full, by any of its names")


def answer(options: argparse.Namespace) -> dict:
    """Every GPU of the table, or one."""
    chosen = all_gpus().values() if options.gpu is None else [find_gpu(options.gpu)]
    return {"gpus": [_entry(gpu) for gpu in chosen]}


def as_text(answer: dict) -> str:
    """A table, or one GPU line by line."""
    gpus = answer["gpus"]
    if len(gpus) == 1:
        return _in_full(gpus[0])
    header = [
        "GPU",
        "bf16",
        "fp16",
        "fp8",
        "memory",
        "bandwidth/s",
        "link",
        "per s",
        "network/s",
        "W",
        "$/hour",
    ]
    return columns(header, [_row(gpu) for gpu in gpus]) + "\n" + TABLE_NOTE


def _entry(gpu: Gpu) -> dict:
    return {
        **vars(gpu),
        "aliases": list(gpu.aliases),
        "assumed": list(gpu.assumed),
        "prices": prices_of(gpu),
    }


def _row(gpu: dict) -> list[str]:
    peaks = gpu["dense_peak_flops"]
    prices = [entry["dollars_per_gpu_hour"] for entry in gpu["prices"]]
    price = f"{prices[0]:.2f}" if prices else "-"
    return [
        gpu["name"],
        *(three_digits(peaks[key] / 1e12) if key in peaks else "-" for key in ("bf16", "fp16", "fp8")),
        num_bytes(gpu["memory_bytes"]),
        num_bytes(gpu["memory_bandwidth_bytes_per_second"]),
        gpu["link"],
        num_bytes(gpu["link_bytes_per_second"]),
        num_bytes(gpu["network_bits_per_second"] / 8),
        str(gpu["watts"]),
        price,
    ]


def _in_full(gpu: dict) -> str:
    peaks = ", ".join(f"{key} {three_digits(peak / 1e12)}" for key, peak in gpu["dense_peak_flops"].items())
    assumed = ", ".join(gpu["assumed"]) or "nothing"
    rows = [
        ("GPU", f"{gpu['name']} ({gpu['architecture']}); also {', '.join(gpu['aliases'])}"),
        ("dense peak, TFLOPS", peaks),
        (
            "memory",
            f"{num_bytes(gpu['memory_bytes'])} at {num_bytes(gpu['memory_bandwidth_bytes_per_second'])}/s",
        ),
        (
            "in a node",
            f"{gpu['gpus_per_node']} by {gpu['link']}, {num_bytes(gpu['link_bytes_per_second'])}/s",
        ),
        ("to the host", f"{num_bytes(gpu['pcie_bytes_per_second'])}/s"),
        ("between nodes", f"{num_bytes(gpu['network_bits_per_second'] / 8)}/s"),
        ("power", f"{gpu['watts']} W"),
        ("source", gpu["source"]),
        ("assumed of its machine", assumed),
    ]
    rows += [("price", _price_words(entry)) for entry in gpu["prices"]]
    return facts(rows)


def _price_words(entry: dict) -> str:
    where = f"{entry['provider']}, {entry['place']}, {entry['date']}"
    return f"{dollars(entry['dollars_per_gpu_hour'])} an hour: {where} ({entry['source']})"
