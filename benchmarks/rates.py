"""Rates of this GPU by shape: products by width, attention by head and length, norms, copies, messages between ranks.

    python benchmarks/rates.py --keep
    torchrun --nproc_per_node=8 benchmarks/rates.py --keep           # with messages between GPUs
    python benchmarks/rates.py --small                               # some seconds on a CPU

Prints one JSON line. Once it is kept, plans for this GPU expect these rates (`expected` in a plan). Products are those
of a layer four times as wide inside: forward, backward, and the gradient of a weight, of 16,384 tokens. Attention is
causal, 16,384 tokens, forward and backward together, its FLOPs counted once for what the mask leaves. All in bf16 on a
GPU, in fp32 on a CPU. Each rate is the median of some samples after a load.
"""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gear import is_rank, parser_of, record

from pretraining.doctor.rates import (
    Products,
    bus_bandwidth,
    largest_of_ranks,
    now_of_device,
    round_of_products,
    rounds_within,
)
from pretraining.planning.step_time import ATTENTION_BACKWARD, CAUSAL

WIDTHS, HEADS, LENGTHS = (512, 768, 1024, 2048, 4096, 8192), (64, 128), (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, WIDTH = 16_384, 2048
"""Of attention: as in the published measurements of FlashAttention."""
SMALL = {"widths": (64, 128), "heads": (16, 32), "lengths": (64, 128), "tokens": 256, "width": 64}
ON_GPU = torch.cuda.is_available()
DTYPE, DEVICE = (torch.bfloat16, "cuda") if ON_GPU else (torch.float32, "cpu")
LOAD_SECONDS, SAMPLE_SECONDS, SAMPLES = (3.0, 0.3, 5) if ON_GPU else (0.05, 0.02, 3)
MESSAGE_BYTES = 256 << 20


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true", help="shapes for a CPU")
    options = parser.parse_args()
    full = {"widths": WIDTHS, "heads": HEADS, "lengths": LENGTHS, "tokens": TOKENS, "width": WIDTH}
    shapes = SMALL if options.small else full
    if is_rank():
        dist.init_process_group("nccl" if ON_GPU else "gloo")
        if ON_GPU:
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    values = {
        "small": options.small,
        "products": {
            "widths": shapes["widths"],
            "value": [product_rate(width, shapes) for width in shapes["widths"]],
        },
        "attention": {
            "lengths": shapes["lengths"],
            "value": [
                {
                    "head_size": head,
                    "value": [attention_rate(head, length, shapes) for length in shapes["lengths"]],
                }
                for head in shapes["heads"]
            ],
        },
        "memory": norm_rate(shapes),
        "copies": copy_rates(shapes),
        "messages": message_rate(shapes) if dist.is_initialized() else None,
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        record("rates", values, options.keep)


def rate_of(work: Callable[[], object], amount: float) -> float:
    """Return how much of `amount` a second, three digits, on the slowest rank; `work` is repeated."""
    rounds_within(LOAD_SECONDS, work, ON_GPU)
    found = [rounds_within(SAMPLE_SECONDS, work, ON_GPU) for _ in range(SAMPLES)]
    middle = statistics.median(seconds / done for done, seconds in found)
    if dist.is_initialized():
        [middle] = largest_of_ranks(middle)
    return float(f"{amount / middle:.3g}")


def product_rate(width: int, shapes: dict) -> float:
    """FLOPs a second of the products of a layer."""
    flops, multiply = round_of_products(
        Products(shapes["tokens"], width, 4 * width, "bf16" if ON_GPU else "fp32"), ON_GPU
    )
    return rate_of(multiply, flops)


def attention_rate(head: int, length: int, shapes: dict) -> float:
    """FLOPs a second of causal attention, forward and backward."""
    tokens, width = shapes["tokens"], shapes["width"]
    shape = (tokens // length, width // head, length, head)
    given = [torch.randn(shape, dtype=DTYPE, device=DEVICE, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape, dtype=DTYPE, device=DEVICE)

    def work() -> None:
        mixed = F.scaled_dot_product_attention(*given, is_causal=True)
        torch.autograd.grad(mixed, given, gradient)

    # 2 products of 2 FLOPs each forward
    return rate_of(work, (1 + ATTENTION_BACKWARD) * CAUSAL * 4 * tokens * length * width)


def norm_rate(shapes: dict) -> float:
    """Bytes a second of a norm that reads and writes activations."""
    x = torch.randn(shapes["tokens"], shapes["width"], dtype=DTYPE, device=DEVICE)
    return rate_of(lambda: F.layer_norm(x, x.shape[-1:]), 2 * x.numel() * x.element_size())


def copy_rates(shapes: dict) -> dict[str, float]:
    """Bytes a second to the device, from it, and in host memory."""
    size = shapes["tokens"] * shapes["width"] * (8 if ON_GPU else 1)
    host, other = (torch.empty(size, dtype=torch.uint8, pin_memory=ON_GPU) for _ in range(2))
    there = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    found = {"host": rate_of(lambda: other.copy_(host), size)}
    if ON_GPU:
        found["to_device"] = rate_of(lambda: there.copy_(host, non_blocking=True), size)
        found["from_device"] = rate_of(lambda: host.copy_(there, non_blocking=True), size)
    return found


def message_rate(shapes: dict) -> float:
    """Bytes a second that each rank sends in an all-reduce."""
    size = MESSAGE_BYTES if ON_GPU else 1 << 20
    numbers = torch.zeros(size // 4, device=DEVICE)
    # as long as the slowest rank: all make as many calls
    dist.all_reduce(numbers)
    began = now_of_device()
    for _ in range(SAMPLES):
        dist.all_reduce(numbers)
    [seconds] = largest_of_ranks((now_of_device() - began) / SAMPLES)
    return float(f"{bus_bandwidth('all-reduce', size, seconds, dist.get_world_size()):.3g}")


if __name__ == "__main__":
    main()
