"""How far the loss moves with what must not move it: stage, precision's sharding, ranks, layout, a kill.

    python benchmarks/curve.py --keep
    python benchmarks/curve.py --steps 300 --keep
    python benchmarks/curve.py --steps 300 --adam_epsilon 1e-8 --keep

Every run is a real launch of train.py on a small corpus that is prepared first. Prints one JSON line: maxima
over ten steps of the absolute difference to one plain process (nats), and of a killed and resumed run to the
uninterrupted one.

With `--steps` the same recipe trains longer, in fp32, plain and at every stage on one rank and on two. The line
has the maxima over the first 10, 100, 300, ... steps and the difference of the closing validation. It has them also for
plain PyTorch with another micro-batch: that changes nothing but the order of fp32 sums. With Adam's usual epsilon,
1e-8, a weight whose gradient is near zero takes a whole step in the direction of its rounding error; the recipe's own
is larger.
"""

import random

from gear import STAGES, largest_difference, parser_of, record, small_runs

BATCHES = ((1, 1), (1, 4), (2, 2), (2, 4))  # (ranks, micro-batch) of eight samples a step


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, metavar="N", help="compare fp32 runs of so many steps alone")
    parser.add_argument("--adam_epsilon", type=float, default=0.001, help="of these runs (default 0.001)")
    options = parser.parse_args()
    with small_runs() as workshop:
        if options.steps:
            values = over_steps(workshop, options.steps, options.adam_epsilon)
            choices = {"steps": options.steps, "adam_epsilon": options.adam_epsilon}
            return record("long_curve", {**choices, "abs_loss_difference": values}, options.keep)
        values = {
            "fp32": by_stage(workshop, ()),
            "bf16": by_stage(workshop, ("training.bf16=true",)),
            "layouts_fp32": by_batches(workshop),
            "killed_and_resumed_fp32": {stage: after_kill(workshop, stage) for stage in ("zero2", "zero3")},
        }
    record("curve", {"steps": 10, "ranks": 2, "max_abs_loss_difference": values}, options.keep)


def by_stage(workshop, settings: tuple[str, ...]) -> dict[str, float]:
    """Each stage on two ranks against one plain process."""
    plain, runs = workshop.plain(settings), {s: workshop.run(s, 2, settings=settings) for s in STAGES}
    return {stage: largest_difference(run.losses, plain.losses) for stage, run in runs.items()}


def by_batches(workshop) -> dict[str, float]:
    """ZeRO-2 with the step's eight samples laid out differently over ranks and micro-batches."""
    found, plain = {}, workshop.plain().losses
    for ranks, size in BATCHES:
        run = workshop.run("zero2", ranks, settings=(f"training.per_device_train_batch_size={size}",))
        found[f"{ranks}x{size}x{8 // ranks // size}"] = largest_difference(run.losses, plain)
    return found


def over_steps(workshop, steps: int, adam_epsilon: float) -> dict[str, dict[str, float]]:
    """{run: {"first N": largest difference of the training loss, "validation": of the closing validation}}."""
    from tests.gear.runs import SMALL_RECIPE

    tokens = steps * SMALL_RECIPE["budget"]["tokens_per_step"]
    settings = (f"budget.tokens={tokens}", f"training.eval_steps={steps}", f"training.save_steps={steps}")
    settings += (f"training.adam_epsilon={adam_epsilon}",)
    settings += ("monitors.noise_scale_steps=null", "monitors.layer_norms_steps=null")
    plain = workshop.plain(settings)
    other = (*settings, "training.per_device_train_batch_size=8")
    runs = {"plain, micro-batch 8 for 2": workshop.plain(other)}
    runs |= {f"{stage} x {n}": workshop.run(stage, n, settings=settings) for stage in STAGES for n in (1, 2)}
    found = {}
    for name, run in runs.items():
        pairs = zip(run.training_rows, plain.training_rows, strict=True)
        each = [abs(row["train/loss"] - theirs["train/loss"]) for row, theirs in pairs]
        lengths = sorted({n for n in (10, 100, 300) if n < steps} | {steps})
        found[name] = {f"first {n}": max(each[:n]) for n in lengths}
        ends = (of.validation_rows[-1]["eval/loss"] for of in (run, plain))
        found[name]["validation"] = abs(next(ends) - next(ends))
    return found


def after_kill(workshop, stage: str) -> float:
    """A run killed by SIGKILL at a random step and started again by the same command; 0 means equal."""
    from tests.gear.runs import Run, execute, start_and_kill

    step, output = random.randrange(2, 9), workshop.folder / f"killed-{stage}"
    command, run = workshop.command(output, stage), Run(output)
    start_and_kill(command, lambda: any(row["step"] >= step for row in run.rows))
    assert execute(command).code == 0
    return largest_difference(run.losses, workshop.run(stage).losses)


if __name__ == "__main__":
    main()
