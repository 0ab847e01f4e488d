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
from collections.abc import Callable, Sequence
from pathlib import Path

from pretraining.runtime.durable_files import one_at_a_time
from pretraining.runtime.exit_codes import variables_of_a_helper


def answered(kind: str, depends_on: Sequence[str], key: str, ask: Callable[[], dict]) -> dict:
    """Return the answer that was kept under these texts, if it has this key; else ask, and keep what is no error.

    kind: begins the file's name.
    """
    try:
        caches = Path.home() / ".cache"
    except RuntimeError:  # a user of a container who has no home
        caches = Path(tempfile.gettempdir())
    folder = os.environ.get("PRETRAINING_MODEL_CACHE") or caches / "pretraining" / "models"
    digest = hashlib.blake2b("\n".join(depends_on).encode(), digest_size=16).hexdigest()
    file = Path(folder) / f"{kind}{digest}.json"
    if kept := _kept(file, key):
        return kept
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    # ranks start together, and one asks for all of a machine; without a folder, or on a disk without locks, each asks
    # for itself
    with one_at_a_time(file.with_suffix(".lock")):
        answer = _kept(file, key) or ask()  # another rank of this machine may have asked meanwhile
        if "error" not in answer:
            with contextlib.suppress(OSError):
                # renamed when complete, so that no rank reads half a file
                aside = file.with_suffix(f".{os.getpid()}")
                aside.write_text(json.dumps(answer), encoding="utf-8")
                aside.replace(file)
    return answer


def _kept(file: Path, key: str) -> dict | None:
    with contextlib.suppress(OSError, ValueError):
        answer = json.loads(file.read_text(encoding="utf-8"))
        return answer if isinstance(answer, dict) and key in answer else None
    return None


def ask(program: Sequence[str], question: str, **variables: str) -> dict:
    """Return the JSON object that a program prints, which reads the question; {"error": one line} if it fails.

    program: the interpreter's arguments. It sees no GPU, and libraries are silent.
    """
    quiet = {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    # -P: no module of the working directory may take the place of a library
    command, own = [sys.executable, "-P", "-W", "ignore", *program], {**quiet, **variables}
    settings: dict = {"text": True, "env": {**variables_of_a_helper(), **own}}
    done = subprocess.run(command, input=question, capture_output=True, **settings)
    lines = done.stdout.splitlines()  # libraries may print before it: the answer is the last line
    if done.returncode or not lines:
        last = (done.stderr.splitlines() or ["it said nothing"])[-1]
        return {"error": f"{' '.join(program).removeprefix('-m ')} ended with code {done.returncode}: {last}"}
    return json.loads(lines[-1])
