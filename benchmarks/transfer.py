"""Whether the best learning rate of a narrow model is the best of one four times as wide: with muP, and without.

    python benchmarks/transfer.py --keep
    python benchmarks/transfer.py --tokens 1024000 --rates 0.0025 0.005 0.01 0.02 0.04

Recipe `tiny` (gpt2) at each of the widths, heads of one size, every rate with one seed; the narrowest is the base,
where both ways are the same model. One JSON line a way: the validation loss by width and rate, the best rate of each
width, whether they are the same (`transfers`), and what the narrow model's best rate costs the wide one (`regret`,
nats above the wide one's best). On two CPU cores a run of the whole budget takes one (width 64) to four minutes (256).
"""

from record import parser_of, record
from whole_run import final_loss, prepare

RATES = [0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04]
WAYS = ("mup", "standard")
HEAD_SIZE = 32


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tokens", type=int, help="budget.tokens in place of the recipe's")
    parser.add_argument(
        "--initializer_range",
        type=float,
        default=0.06,
        help="of both; GPT-2's 0.02 is small for a base so narrow",
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--launcher", help="what starts train.py; default: this Python")
    parser.add_argument("--deepspeed", default="null")
    options = parser.parse_args()
    prepare(options.recipe)
    base, *wider = sorted(options.widths)
    found = {("base", base): swept(base, base, options)}
    for way in options.ways:
        for width in wider:
            found[way, width] = swept(width, base if way == "mup" else None, options)
        by_width = {base: found["base", base], **{width: found[way, width] for width in wider}}
        values = {key: value for key, value in vars(options).items() if key not in ("keep", "ways")}
        record("transfer", {**values, "way": way, **judged(by_width)}, options.keep)


def swept(width: int, base_width: int | None, options) -> dict[float, float]:
    """{learning rate: validation loss}."""
    return {rate: loss_at(width, rate, base_width, options) for rate in options.rates}


def loss_at(width: int, rate: float, base_width: int | None, options) -> float:
    settings = {"model.n_embd": width, "model.n_head": width // HEAD_SIZE, "mup.base_width": base_width}
    settings |= {"model.initializer_range": options.initializer_range}
    settings |= {"training.learning_rate": rate, "training.seed": options.seed}
    settings |= {"budget.tokens": options.tokens} if options.tokens else {}
    return final_loss(options.recipe, settings, options.launcher, options.deepspeed)


def judged(by_width: dict[int, dict[float, float]]) -> dict:
    """The best rates, and what follows from them."""
    best = {width: min(losses, key=losses.get) for width, losses in by_width.items()}
    narrow, wide = min(by_width), max(by_width)
    return {
        "by_width": {
            str(width): {str(rate): round(loss, 5) for rate, loss in losses.items()}
            for width, losses in by_width.items()
        },
        "best": {str(width): rate for width, rate in best.items()},
        "transfers": len(set(best.values())) == 1,
        "regret": round(by_width[wide][best[narrow]] - min(by_width[wide].values()), 5),
    }


if __name__ == "__main__":
    main()
