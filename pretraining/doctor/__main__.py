"""Examines this machine: what it will do to a run, before it is paid for."""

import argparse
import json
import os
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

from pretraining.command_line import (
    OneLineParser,
    add_data_source,
    add_deepspeed,
    add_resuming_arguments,
    named_path,
    positive_integer,
    started_by_launcher,
)
from pretraining.doctor.findings import Finding, as_lines, summary, summary_line
from pretraining.doctor.gpus import check_gpus, read_gpus, torch_build
from pretraining.doctor.launch import (
    Launch,
    check_earlier_start,
    check_fit,
    check_software,
    plan_launch,
    versions,
)
from pretraining.doctor.machine import check_disks, check_machine
from pretraining.doctor.reach import ask_all, check_names, questions_of
from pretraining.errors import UserError, one_line_errors
from pretraining.planning.gpus import RATES, keep_rates
from pretraining.runtime.exit_codes import FINISHED, USER_ERROR
from pretraining.runtime.imports import prepare_imports

EXAMPLES = """examples:
  python -m pretraining.doctor
  python -m pretraining.doctor --recipe 30b
  python -m pretraining.doctor --recipe 7b --deepspeed zero3_nvme --output_dir /fast/disk/runs/7b
  python -m pretraining.doctor --recipe 65b --world_size 64 --json
  torchrun --nproc_per_node=8 -m pretraining.doctor --recipe 30b
  deepspeed --num_gpus=8 --module pretraining.doctor --recipe 30b

Without a launcher the machine is examined, within seconds; under the launcher of the run, what its ranks do together
as well. Exit code 2 if something will break the run. What is measured is kept for the plans of this machine."""


def main(arguments: list[str] | None = None) -> None:
    """Examine, print, keep what was measured, and exit with 2 if something will break.

    Under a launcher the first rank of each node examines it, then all ranks examine what they do together; rank 0
    reports, and the process ends here.
    """
    options, began = parse_arguments(arguments), time.monotonic()
    launched = started_by_launcher()
    examines, reports = (not launched or os.environ[name] == "0" for name in ("LOCAL_RANK", "RANK"))
    here, launch = examine(options) if examines else ([], None)
    findings = shown = measured = here
    if launched:
        prepare_imports()
        # It imports torch, which prepare_imports makes faster: not before.
        from pretraining.doctor.cluster import end_rank, examine_cluster

        several_nodes = launch is not None and launch.several_machines
        own = [each.on(socket.gethostname()) for each in here] if several_nodes else here
        if reports and not options.json:
            print(as_lines(own), flush=True)  # what follows may end in an abort that this explains
        of_nodes, together = examine_cluster(options, list(here))
        findings = of_nodes + together
        shown = [each for each in of_nodes if each not in here and each not in own] + together
        # Rates are kept for the plans of this machine: another node's count there.
        measured = here + together
    code = FINISHED
    if reports:
        counts = summary(findings, time.monotonic() - began)
        code = USER_ERROR if counts["will_break"] else FINISHED
        kept = keep(measured, launch)
        if options.json:
            answer = {
                "host": socket.gethostname(),
                "world_size": launch.world_size,
                "gpus": [gpu.name for gpu in launch.gpus.found],
                "findings": [asdict(finding) for finding in findings],
                "summary": counts,
                "versions": versions(),
                "kept": str(kept) if kept else None,
            }
            print(json.dumps(answer, indent=2))
        else:
            print(f"{as_lines(shown)}\n\n{summary_line(counts)}", flush=True)
    if launched:
        end_rank(code)  # not in order: a step that hangs leaves a thread behind
    elif code:
        raise SystemExit(code)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of the doctor; those that launchers add (`--local_rank`) are accepted and ignored."""
    shown = {"description": __doc__, "epilog": EXAMPLES}
    parser = OneLineParser("python -m pretraining.doctor", **shown, allow_abbrev=False)
    add = parser.add_argument
    add("--recipe", metavar="NAME|PATH", help="the run that is to start here")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one value of it")
    add_deepspeed(parser)
    number = "number of processes (default: one for each GPU)"
    add("--world_size", type=positive_integer, metavar="N", help=number)
    add("--output_dir", type=named_path, metavar="DIR", help="run folder (default: runs/<recipe>)")
    add_resuming_arguments(parser)
    add_data_source(parser)
    add("--json", action="store_true", help="findings, summary and versions as JSON")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.recipe is None and (options.set or options.deepspeed):
        raise UserError("--set and --deepspeed change a recipe: give --recipe NAME with them")
    if options.deepspeed is None:
        options.deepspeed = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")  # of `accelerate launch`
    return options


def examine(options: argparse.Namespace) -> tuple[list[Finding], Launch]:
    # None of them imports torch: its first import takes longer than all checks.
    gpus, torch = read_gpus(), torch_build()
    launch, refused = plan_launch(options, gpus)
    answers = ask_all(questions_of(launch))  # they come while the machine itself is looked at
    findings = [*check_gpus(gpus, torch), *check_software(launch), *check_machine(launch)]
    findings += [*check_names(launch), *check_disks(launch), *answers(), *refused]
    findings += [*check_earlier_start(launch), *check_fit(launch)]
    return findings, launch


def keep(findings: list[Finding], launch: Launch) -> Path | None:
    """Write the measured rates where plans look for them; return the file, or None."""
    rates = {name: value for finding in findings for name, value in finding.values.items() if name in RATES}
    gpu = launch.gpus.known.name if launch.gpus.known else None
    try:
        return keep_rates(rates, str(launch.run_folder), gpu, launch.world_size) if rates else None
    except OSError:  # a home that cannot be written: plans then use the table's rates
        return None


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
