"""Time and peak memory of the loss: plain, chunked and fused (each compiled and not), by other libraries; paired.

    python benchmarks/loss.py --keep
    python benchmarks/loss.py --dtype bf16 --ways plain fused fused-compiled
    python benchmarks/loss.py --tokens 16384 --width 2048 --dtype bf16        (needs a GPU)

The head's product is part of it: from hidden states [tokens, width] and a head [vocabulary, width] to the loss and the
gradients of both. The ways take turns in every round. Time is the median; `peak_bytes` is the most that lay there above
what did before, on a CPU by torch's own count of allocations; `first_seconds` the first call's, with what it compiles.
`time_ratio` (from neighbouring runs) and `memory_ratio` are against the first way. One JSON line a way.

`torch` is torch's linear_cross_entropy by its own choice of chunks; `liger`, with its sum in fp32, needs a GPU and
`pip install liger-kernel`.
"""

from gear import chosen, middle, parser_of, record, seconds_in_turns, timed

OURS = {
    "plain": None,
    "chunked": False,
    "chunked-compiled": True,
    "fused": False,
    "fused-compiled": True,
}
"""Way -> `loss.compile`."""
OTHERS = ("torch", "liger")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab_size", type=int, default=50304)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--chunk_tokens", type=int, help="default: the recipe's")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=(*OURS, *OTHERS), default=list(OURS))
    options = parser.parse_args()
    from tests.gear.tracked_memory import peak_bytes

    steps = {way: prepared(way, options) for way in options.ways}
    first = {way: timed(step) for way, step in steps.items()}
    peaks = {way: peak_bytes(step) for way, step in steps.items()}
    seconds, base = seconds_in_turns(steps, options.rounds), options.ways[0]
    for way in steps:
        row = {
            "way": way,
            "seconds": middle(seconds[way], 5),
            "first_seconds": round(first[way], 3),
            "peak_bytes": peaks[way],
            "time_ratio": middle(a / b for a, b in zip(seconds[way], seconds[base], strict=True)),
            "memory_ratio": round(peaks[base] / peaks[way], 2),
        }
        record("loss", {**chosen(options, "ways"), **row}, options.keep)


def prepared(way: str, options):
    """A function that computes the loss and both gradients once, as a training step does."""
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    torch.manual_seed(0)
    head = nn.Linear(options.width, options.vocab_size, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(1, options.tokens, options.width, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(options.vocab_size, (1, options.tokens), device=device)
    summed_nats = summed_by(way, head, options.chunk_tokens)

    def step() -> None:
        (summed_nats(head, hidden, labels) / options.tokens).backward()
        head.weight.grad = hidden.grad = None

    return step


def summed_by(way: str, head, chunk_tokens: int | None):
    """Return (head, hidden, labels) -> summed nats, as `loss.kind` and `loss.compile` say, or by torch or Liger."""
    import torch

    from pretraining.model.cross_entropy import LossHead, LossSettings, chunked_nats, token_nats

    compile = OURS.get(way)
    if way == "plain":
        return lambda head, hidden, labels: token_nats(head(hidden), labels)
    if way.startswith("chunked"):
        return lambda head, hidden, labels: chunked_nats(
            head(hidden).flatten(0, 1), labels.flatten(), LossSettings(0.0, chunk_tokens, compile)
        )
    if way in OURS:
        head.__class__ = LossHead
        return lambda head, hidden, labels: head(
            head(hidden), labels, LossSettings(0.0, chunk_tokens, compile)
        )
    if way == "torch":
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda head, hidden, labels: torch.nn.functional.linear_cross_entropy(
            hidden.flatten(0, 1), head.weight, labels.flatten(), reduction="sum", options=options
        )
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    liger = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
    return lambda head, hidden, labels: liger(head.weight, hidden.flatten(0, 1), labels.flatten())


if __name__ == "__main__":
    main()
