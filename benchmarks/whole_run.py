"""One whole run of train.py with some values of its recipe changed, and the validation loss it ends with."""

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from record import REPOSITORY


def prepare(recipe: str) -> None:
    """The recipe's data; returns at once where it is there."""
    subprocess.run([sys.executable, "data_prep.py", "--recipe", recipe], cwd=REPOSITORY, check=True)


def final_loss(recipe: str, settings: dict, launcher: str | None, deepspeed: str) -> float:
    """Validation loss after the recipe's budget, in nats per token. settings: {dotted key: value}."""
    from pretraining.runtime.run_folder import RunFolder

    settings = {**settings, "training.report_to": "none", "training.save_strategy": "no"}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    with tempfile.TemporaryDirectory(prefix="whole_run_") as folder:
        output = Path(folder) / "run"
        command = [*(shlex.split(launcher) if launcher else [sys.executable]), "train.py", "--recipe", recipe]
        command += ["--deepspeed", deepspeed, "--output_dir", str(output), *words]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=sys.stderr)
        return RunFolder(output).last_event("end")["eval_loss"]
