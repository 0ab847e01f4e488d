"""The gradient noise scale that a run logs, beside the analytic one of a problem where that is known.

    python benchmarks/noise_scale.py --keep

The loss is |w - x|^2 / 2 with x normal around a point at distance 1, so that the noise scale is the trace of x's
covariance; steps of eight micro-batches of four samples. Prints one JSON line: for each true value, in samples, the
measured ones over it, one a seed, and the largest distance from 1 of all.
"""

import math

from gear import parser_of, record


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=float, nargs="+", default=[3, 10, 40, 150], help="true scales")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="that one logged value is the mean of")
    options = parser.parse_args()
    from tests.training.test_gradient_monitors import WIDTH, measured_noise_scale

    ratios = {}
    for samples in options.samples:
        spread = math.sqrt(samples / WIDTH)
        measured = [measured_noise_scale(spread, options.steps, seed) for seed in range(options.seeds)]
        ratios[f"{samples:g}"] = [round(value / samples, 4) for value in measured]
    furthest = max(abs(ratio - 1) for values in ratios.values() for ratio in values)
    record("noise_scale", {"steps": options.steps, "ratios": ratios, "furthest": furthest}, options.keep)


if __name__ == "__main__":
    main()
