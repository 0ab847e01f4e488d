"""Models that no formula describes: counted by building them on the meta device, in a process of its own.

The process takes the seconds that torch and transformers need to load; what it finds is kept in
~/.cache/pretraining/models (or $PRETRAINING_MODEL_CACHE), by the model section, this repository's way to count and the
version of transformers.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pretraining.errors import UserError
from pretraining.schema import REPOSITORY

MODULE = "pretraining.model.counting"
SOURCES = [
    REPOSITORY / "pretraining" / name
    for name in ("model/counting.py", "model/initial_weights.py", "upstream/model_classes.py")
]
HOW = "counted by building on the meta device"


@dataclass(frozen=True)
class CountedModel:
    """What building a model on the meta device tells."""

    tensors: tuple[tuple[str, int, int | None, int | None], ...]
    """Of each parameter: its part (of `sizes.PartSizes`, or `attention bias`, `mlp bias`), elements, its layer, and
    of a matrix its rows and columns."""
    layers: int
    attention_width: int
    tied: bool
    head: int
    """Entries of the output projection, tied or not."""
    normed_heads: bool
    """Whether queries and keys have norms of their own."""
    experts: int
    """Of one mixture layer; 0 in a dense model."""
    chosen_experts: int
    faults: tuple[str, ...]
    """Why its initial weights would not be the same at every stage."""

    def of_part(self, *parts: str) -> int:
        """Parameters of these parts."""
        return sum(numel for part, numel, _, _ in self.tensors if part in parts)


def count_model(model: dict) -> CountedModel:
    """A model section of any type, counted.

    Raises:
        UserError: transformers cannot build it, or its weights cannot be drawn alike at every ZeRO stage.
    """
    return _counted(json.dumps(model, sort_keys=True))


@cache
def _counted(section: str) -> CountedModel:
    kept = _cache_file(section)
    found = _read(kept) or _built(section)
    model_type = json.loads(section)["model_type"]
    if "error" in found:
        raise UserError(f"model: transformers cannot build this {model_type}: {found['error']}")
    _keep(kept, found)
    if found["faults"]:
        what = "weights would not be the same at every ZeRO stage"
        raise UserError(
            f"model.model_type: {model_type} does not train here, its initial {what}: {found['faults'][0]}"
        )
    found["tensors"] = tuple(tuple(tensor) for tensor in found["tensors"])
    return CountedModel(**{**found, "faults": tuple(found["faults"])})


def _built(section: str) -> dict:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-P", "-W", "ignore", "-m", MODULE]
    done = subprocess.run(command, input=section, capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.splitlines() or ["it said nothing"])[-1]
        return {"error": f"{MODULE} ended with code {done.returncode}: {last}"}
    return json.loads(lines[-1])


def _cache_file(section: str) -> Path:
    try:
        library = version("transformers")
    except PackageNotFoundError:
        raise UserError(
            "model: counting this type needs transformers; pip install -r requirements.txt"
        ) from None
    said = "\n".join([library, *(source.read_text(encoding="utf-8") for source in SOURCES), section])
    name = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
    return _cache_folder() / f"{name}.json"


def _cache_folder() -> Path:
    try:
        own = Path.home() / ".cache"
    except RuntimeError:  # a user of a container who has no home
        own = Path(tempfile.gettempdir())
    return Path(os.environ.get("PRETRAINING_MODEL_CACHE") or own / "pretraining" / "models")


def _read(path: Path) -> dict | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "tensors" in found else None


def _keep(path: Path, found: dict) -> None:
    """Written aside, then renamed: ranks that count at once do not read each other's halves. Failing is no harm."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(found), encoding="utf-8")
        aside.replace(path)
