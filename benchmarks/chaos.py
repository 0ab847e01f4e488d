"""SIGKILLs at random moments, then left to finish: is anything lost?

    python benchmarks/chaos.py --kills 200 --seed 1 --keep
    python benchmarks/chaos.py --kills 50 --mixed qwen3_moe --keep

A small recipe in fp32, ZeRO-2 on two ranks, saving every second step. Each kill is drawn from the seed: the moment
(resuming, training, saving, committing, pruning, evaluating) and who (one rank, all ranks, the launcher, everything);
a share of the starts goes through the real launchers. The next start is the same command. Stops with an error where a
committed step is lost, a start does not continue from the newest one, or the final weights, losses or validation
differ in a bit from the undisturbed run. Prints one JSON line: how often what was killed.

With `--mixed`, a small model of this type, and layouts drawn from all that the checks accept (stage, offload, tensor,
sequence, expert, hpZ, 1, 2 or 4 ranks): one run of four keeps its layout and ends bit for bit as the undisturbed one;
the others start at another layout after each kill, and end within 1e-4.

    python benchmarks/chaos.py --nodes --kills 50 --keep

Two nodes without a shared disk (networks and mounts of their own; needs root), and an S3 server that fails one request
in ten (`npm install -g s3rver`). Each kill takes a node, whose successor is empty, a rank, a launcher, or the store,
which comes back seconds later. It also stops if the store lost a committed step.
"""

import argparse
import json
import time

from gear import models, parser_of, record, small_runs, trainable

NOT_MEASURED = "monitors.noise_scale_steps=null"
"""Split sequences and experts have none."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stage", default="zero2", help="a file of ds_configs/, or null")
    parser.add_argument(
        "--real_every",
        type=int,
        default=20,
        help="one of so many starts by deepspeed, one by torchrun (0: none)",
    )
    parser.add_argument("--nodes", action="store_true", help="two nodes that share nothing but a store")
    parser.add_argument("--mixed", metavar="MODEL", choices=list(models()), help="layouts of all kinds")
    options = parser.parse_args()
    if options.nodes:
        return without_shared_disk(options)
    from tests.gear.chaos import Chaos

    forked = max(1, options.real_every - 2)
    launchers = ("forked",) * forked + (("deepspeed", "torchrun") if options.real_every else ())
    layouts, settings = [(options.stage, 2)], ()
    began = time.monotonic()
    with small_runs() as workshop:
        if options.mixed:
            settings, launchers = (f"model={json.dumps(models()[options.mixed])}", NOT_MEASURED), ("forked",)
            layouts = trainable(workshop.recipe, settings)
        chaos = Chaos(workshop, options.seed, layouts, launchers, settings)
        counts = chaos.endure(options.kills)
    values = {"seed": options.seed, "counts": counts}
    if options.mixed:
        values |= {"model": options.mixed, "layouts": len(layouts), "moved_runs": chaos.differences}
    else:
        values |= {"stage": options.stage, "ranks": 2}
    values["identical_runs"], values["lost_steps"] = counts["runs"] - counts.get("moved runs", 0), 0
    record("chaos", {**values, "seconds": round(time.monotonic() - began)}, options.keep)


def without_shared_disk(options: argparse.Namespace) -> None:
    from tests.gear.hosts import hosts
    from tests.gear.node_chaos import node_chaos
    from tests.gear.nodes import NAMES

    began = time.monotonic()
    with small_runs() as workshop, hosts(workshop.folder, *NAMES) as made:
        assert made is not None, "may not make networks here: run it as root"
        with node_chaos(workshop, workshop.folder, made, options.seed) as chaos:
            counts = chaos.endure(options.kills)
    values = {"seed": options.seed, "stage": "zero2", "ranks": 2, "nodes": 2, "counts": counts}
    values |= {"identical_runs": counts["runs"], "lost_steps_in_store": 0, "failing_requests": 0.1}
    record("node_chaos", {**values, "seconds": round(time.monotonic() - began)}, options.keep)


if __name__ == "__main__":
    main()
