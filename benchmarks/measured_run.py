"""What a finished run measured, as a line that later plans of the same GPU and size read instead of an assumption.

    python benchmarks/measured_run.py runs/7b
    python benchmarks/measured_run.py runs/7b --keep

Needs a run on a GPU of pretraining/planning/tables/gpus.json: its MFU is what counts.
"""

import json

from gear import RESULTS, parser_of

QUANTITIES = ("mfu", "tokens_per_second", "step_seconds", "peak_memory_bytes", "checkpoint_bytes")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    options = parser.parse_args()
    from pretraining.errors import one_line_errors
    from pretraining.runtime.durable_files import append_row
    from pretraining.runtime.run_folder import RunFolder

    with one_line_errors():
        row = line_of(RunFolder(options.run))
    print(json.dumps(row), flush=True)
    if options.keep:
        device = row["environment"]["device"].lower().replace(" ", "-")
        append_row(RESULTS / f"{device}.jsonl", row)


def line_of(run) -> dict:
    """The line; `UserError` where the run has not ended, or its MFU is not known."""
    from pretraining.errors import UserError
    from pretraining.recipe import load_recipe

    measured = (run.last_event("end") or {}).get("measured", {})
    if "mfu" not in measured:
        raise UserError(f"{run.path}: no measured MFU: not a finished run on a GPU that the tables know")
    plan, environment = (json.loads(p.read_text()) for p in (run.plan, run.environment))
    return {
        "benchmark": "measured_run",
        **{name: measured.get(name) for name in QUANTITIES},
        "predicted": plan["predicted"],
        "parameters": plan["parameters"],
        "ranks": plan["world_size"],
        "deepspeed": plan["deepspeed"],
        "micro_batch": plan["micro_batch"],
        "recomputes": load_recipe(run.recipe).training.recomputed_share,
        "when": run.last_event("end")["time"].partition("T")[0],
        "environment": environment,
    }


if __name__ == "__main__":
    main()
