"""Compare every byte of committed checkpoints with their markers; exit code 2 where one is damaged.

Reads several files at once; nothing is loaded.
"""

import argparse
import sys
import time
from pathlib import Path

from tqdm import tqdm

from pretraining.checkpoints.marker import MARKER
from pretraining.checkpoints.selection import add_run, add_step, chosen_checkpoints
from pretraining.checkpoints.verification import file_verdicts, quick_damage
from pretraining.planning.quantities import num_bytes

EXAMPLES = """  python -m pretraining.checkpoints verify runs/tiny
  python -m pretraining.checkpoints verify runs/tiny --step 750
  python -m pretraining.checkpoints verify /mnt/copies/checkpoint-750 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run or checkpoint, and the step."""
    add_run(parser, or_checkpoint=True)
    add_step(parser, "default: every committed one")


def answer(options: argparse.Namespace) -> dict:
    """{"checkpoints": [{"checkpoint", "whole", "bytes", "seconds", "files": {name: what is wrong or null}}]}."""
    chosen = chosen_checkpoints(options.run, options.step)
    return {"checkpoints": [_verified(folder, of_run=folder != options.run) for folder in chosen]}


def _verified(folder: Path, of_run: bool) -> dict:
    reason, files = quick_damage(folder, of_run)
    began = time.perf_counter()
    total = sum(entry["bytes"] for entry in files.values())
    with _bar(folder.name, total) as bar:
        verdicts = {} if reason and not files else file_verdicts(folder, files, bar.update)
    if reason and not any(verdicts.values()):
        verdicts[MARKER] = reason
    return {
        "checkpoint": str(folder),
        "whole": not any(verdicts.values()),
        "bytes": total,
        "seconds": round(time.perf_counter() - began, 3),
        "files": verdicts,
    }


def _bar(name: str, total: int) -> tqdm:
    shown = sys.stderr.isatty()
    return tqdm(
        desc=name, total=total, unit="B", unit_scale=True, file=sys.stderr, disable=not shown, leave=False
    )


def as_text(answer: dict) -> str:
    """Each file with its verdict, and a line for each checkpoint."""
    return "\n".join(line for each in answer["checkpoints"] for line in _lines(each))


def _lines(found: dict) -> list[str]:
    lines = [f"  {reason or name + ': ok'}" for name, reason in found["files"].items()]
    speed = f"{num_bytes(found['bytes'] / max(found['seconds'], 1e-3))}/s"
    verdict = "whole" if found["whole"] else "DAMAGED"
    return [
        f"{found['checkpoint']}: {verdict}, {len(lines)} files, {num_bytes(found['bytes'])} at {speed}",
        *lines,
    ]


def refusal(answer: dict) -> str | None:
    """The line for damaged checkpoints."""
    damaged = [each for each in answer["checkpoints"] if not each["whole"]]
    if not damaged:
        return None
    reason = next(reason for reason in damaged[0]["files"].values() if reason)
    return (
        f"{len(damaged)} of {len(answer['checkpoints'])} checkpoints damaged: {damaged[0]['checkpoint']}: {reason}; "
        "--resume auto passes over it, prune removes it"
    )
