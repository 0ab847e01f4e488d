"""Ask a program of this package beside this process, which need not import what it imports, and keep its answers.

Answers are kept in ~/.cache/pretraining/models (or $PRETRAINING_MODEL_CACHE), under a digest of all they depend on.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pretraining.runtime.exit_codes import variables_of_a_helper


def answer_file(kind: str, *depends_on: str) -> Path:
    """Return where the answer is kept that depends on these texts. kind: begins the file's name."""
    try:
        caches = Path.home() / ".cache"
    except RuntimeError:  # a user of a container who has no home
        caches = Path(tempfile.gettempdir())
    folder = os.environ.get("PRETRAINING_MODEL_CACHE") or caches / "pretraining" / "models"
    digest = hashlib.blake2b("\n".join(depends_on).encode(), digest_size=16).hexdigest()
    return Path(folder) / f"{kind}{digest}.json"


def kept_answer(file: Path, key: str) -> dict | None:
    """Return the answer that was kept; None if there is none that has this key."""
    try:
        answer = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and key in answer else None


def keep_answer(file: Path, answer: dict) -> None:
    """Keep an answer, if there is a place for it."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # renamed when complete, so that no rank reads half a file
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(answer), encoding="utf-8")
        aside.replace(file)


def ask(program: Sequence[str], question: str, **variables: str) -> dict:
    """Return the JSON object that a program prints, which reads the question; {"error": one line} if it fails.

    program: the interpreter's arguments. It sees no GPU, and libraries are silent.
    """
    quiet = {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    # -P: no module of the working directory may take the place of a library
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", *program],
        input=question,
        capture_output=True,
        text=True,
        env={**variables_of_a_helper(), **quiet, **variables},
    )
    # libraries may print before it: the answer is the last line
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.splitlines() or ["it said nothing"])[-1]
        return {"error": f"{' '.join(program).removeprefix('-m ')} ended with code {done.returncode}: {last}"}
    return json.loads(lines[-1])
