"""Report on finished or running runs.

examples:
  python -m pretraining.reporting runs/tiny                                     writes runs/tiny/report.html
  python -m pretraining.reporting runs/tiny runs/tiny-zero3 --output both.html  overlays them in one page
  python -m pretraining.reporting analyze runs/tiny                             says in words what the curve shows
  python -m pretraining.reporting analyze s3://bucket/runs/30b                  the same, from its store
  python -m pretraining.reporting csv runs/tiny                                 writes every row, to metrics.csv there
  python -m pretraining.reporting --serve runs                                  shows all runs, live, in a browser
  python -m pretraining.reporting --serve s3://bucket/runs --port 8000          the same, from their store
"""

import argparse
import csv
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from pretraining.checkpoints.live_files import records_of
from pretraining.command_line import OneLineParser, named_path, not_negative_integer, positive_number
from pretraining.errors import UserError, one_line_errors, require
from pretraining.outside.masking import as_json
from pretraining.reporting.analysis import analyze, sentences, standing_text, track_record_beside
from pretraining.reporting.live import watch
from pretraining.reporting.page import names_of, page_payload, page_text, run_payload, write_page
from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.durable_files import replacing


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["analyze"]:
        return _analyze(arguments[1:])
    if arguments[:1] == ["csv"]:
        return _write_rows(arguments[1:])
    if any(word.partition("=")[0] == "--serve" for word in arguments):
        return _serve(arguments)
    parser = _parser("", "default: report.html in the run folder")
    # `live_report` starts this command with the two hidden options.
    parser.add_argument("--watch", type=positive_number, metavar="SECONDS", help=argparse.SUPPRESS)
    parser.add_argument("--since", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    output = _output(options, "report.html")
    if options.watch:
        return watch(options.runs[0], output, options.watch, options.since)
    print(write_report(options.runs, output))


def write_report(folders: list[Path], output: Path) -> Path:
    records = [RunRecord(folder) for folder in folders]
    names, payloads = names_of(records), []
    for record, name in zip(records, names, strict=True):
        payloads.append(run_payload(record, track_record=track_record_beside(record.run.path), name=name))
    write_page(output, page_text(page_payload(payloads, None), " · ".join(names)))
    return output


def _write_rows(arguments: list[str]) -> None:
    """Write every row of these runs as CSV: run, step, tokens, hours, then one column a metric.

    A value that a row does not have is empty; one that is not a number is NaN.
    """
    options = _parser(" csv", "default: metrics.csv in the run folder").parse_args(arguments)
    output = _output(options, "metrics.csv")
    records = [RunRecord(folder) for folder in options.runs]
    metrics = sorted({metric for record in records for metric in record.metrics.names()})
    with replacing(output) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "step", "tokens", "hours", *metrics])
        for record, name in zip(records, names_of(records), strict=True):
            steps, tokens = (values.astype(np.int64).tolist() for values in (record.steps, record.tokens))
            hours = record.hours.round(6).tolist()
            columns = []
            for metric in metrics:
                cells: list = [""] * len(steps)
                for row, value in zip(*map(np.ndarray.tolist, record.metrics.column(metric)), strict=True):
                    cells[row] = "NaN" if math.isnan(value) else value
                columns.append(cells)
            writer.writerows(zip([name] * len(steps), steps, tokens, hours, *columns, strict=True))
    print(output)


def _analyze(arguments: list[str]) -> None:
    parser = _parser(" analyze")
    what = "a run folder, or its address in the store of its checkpoints"
    parser.add_argument("run", metavar="RUN", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with records_of(options.run) as (folder, shown):
        record = RunRecord(folder)
        if not len(record.metrics):
            what = f"{shown}/{record.run.metrics.name}: no logged step yet; there is nothing to analyze"
            raise UserError(what)
        found = analyze(record, track_record_beside(folder) if Path(shown) == folder else [])
    text = [standing_text(found.standing, time.time()), *sentences(found)]
    print(as_json(asdict(found), indent=2) if options.json else "\n".join(filter(None, text)))


def _serve(arguments: list[str]) -> None:
    parser = _parser("")
    add = parser.add_argument
    add("--serve", metavar="FOLDER|URL", help="show all runs of a folder, or of a store, live in a browser")
    what = "the address that answers (default: 127.0.0.1, this machine alone); any other asks for a token, which is "
    what += "part of the link that is printed"
    add("--host", default="127.0.0.1", help=what)
    what = "default: 6006; 0: any that is free"
    add("--port", type=not_negative_integer, default=6006, metavar="N", help=what)
    options = parser.parse_args(arguments)
    for package in ("starlette", "uvicorn"):
        require(package, "--serve")
    # here: nothing else of this command needs a server
    from pretraining.reporting.served import serve

    serve(options.serve, options.host, options.port)


def _parser(word: str, output: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of a word after the module's name. output: the help of --output, if it takes several runs."""
    parser = OneLineParser(f"python -m pretraining.reporting{word}", description=__doc__)
    if output is not None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
        parser.add_argument("--output", type=named_path, metavar="FILE", help=output)
    return parser


def _output(options: argparse.Namespace, name: str) -> Path:
    """Return --output, else the file of this name in the folder of the only run."""
    if missing := [run for run in options.runs if not run.exists()]:
        raise UserError(f"{missing[0]}: no such folder, and no command; --help lists both")
    if options.output is None and len(options.runs) > 1:
        raise UserError("several runs in one file: say where it goes with --output FILE")
    output = options.output or options.runs[0] / name
    if output.is_dir() or (output.exists() and output.suffix != Path(name).suffix):
        raise UserError(f"--output {output}: is there, and no {Path(name).suffix} file; choose another name")
    return output


if __name__ == "__main__":
    with one_line_errors():
        main()
