"""The widths of a model; of a type that no formula describes, with what was counted by building the model.

Such a model is built on the meta device, in a process of its own. The process takes the seconds
that torch and transformers need to load. The result is kept (runtime/answers.py). It depends on the model section, the
source files that count, and the version of transformers.
"""

import contextlib
import fcntl
import json
import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pretraining.errors import UserError
from pretraining.extend import Extension, model_extension
from pretraining.recipe import model_with_defaults
from pretraining.recipe.model import is_exact, value_of
from pretraining.runtime.answers import answer_file, ask, keep_answer, kept_answer
from pretraining.schema import REPOSITORY, display_path

MODULE = "pretraining.model.counting"
SOURCES = [
    REPOSITORY / "pretraining" / name
    for name in (
        "model/counting.py",
        "model/drawing_rules.py",
        "recipe/model.py",
        "upstream/saved_tensors.py",
        "upstream/transformers.py",
    )
]
HOW = "counted by building on the meta device"
GATED = 2.5
"""Matrices of width x inner above which a feed-forward layer counts as gated: a gated one has three, others two."""


@dataclass(frozen=True)
class CountedModel:
    """Facts about a model that was built on the meta device."""

    tensors: tuple[tuple[str, int, int | None, int | None, str], ...]
    """For each parameter: its part (of `sizes.PartSizes`, or `attention bias`, `mlp bias`), its elements, its layer,
    the rows and columns together if it is a matrix, and its name."""
    layers: int
    attention_width: int
    tied: bool
    head: int
    """Entries of the output projection, tied or not."""
    normed_heads: bool
    """Whether queries and keys have norms of their own."""
    experts: int
    """Experts of one mixture layer; 0 in a dense model."""
    chosen_experts: int
    faults: tuple[str, ...]
    """Why its initial weights would not be the same at every stage."""
    kept: dict
    """What a forward pass keeps for the backward pass (model/counting.py, `kept_or_why_not`)."""

    @property
    def estimated(self) -> str | None:
        """Why what a forward pass keeps is an estimate, if it is one."""
        return self.kept["estimated"]

    def of_part(self, *parts: str) -> int:
        return sum(numel for part, numel, *_ in self.tensors if part in parts)


@dataclass(frozen=True)
class Widths:
    """Widths and counts that make up a layer."""

    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    inner: int
    """Inner width of a dense feed-forward layer."""
    layers: int
    experts: int = 0
    """Experts of one mixture layer; 0 in a dense model."""
    chosen_experts: int = 1
    """Experts that a token is given to; 1 in a dense model."""
    expert_inner: int = 0
    """Inner width of one expert; in a dense model, that of the dense layer."""
    gated: bool = True
    """Whether a feed-forward layer has three matrices, and not two."""

    @property
    def queries(self) -> int:
        """Width of all queries; with grouped-query attention the keys are fewer."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.key_value_heads * self.head_size


def widths_of(model: dict) -> Widths:
    """Return the widths in a model section; of a type without a formula, with the help of the built model."""
    # a dict cannot be a key of the cache
    return _widths(json.dumps(model, sort_keys=True), is_exact(model))


# a search asks for the same widths thousands of times
@cache
def _widths(section: str, exact: bool) -> Widths:
    full = model_with_defaults(json.loads(section))
    hidden, heads = value_of(full, "hidden_size"), value_of(full, "num_attention_heads")
    inner = value_of(full, "intermediate_size")
    if full["model_type"] == "gpt2":
        inner = inner or 4 * hidden
        layers = full["n_layer"]
        return Widths(hidden, heads, heads, hidden // heads, inner, layers, expert_inner=inner, gated=False)
    grouped = {
        "hidden": hidden,
        "heads": heads,
        "key_value_heads": _whole(value_of(full, "num_key_value_heads")) or heads,
        "head_size": _whole(value_of(full, "head_dim")) or hidden // heads,
    }
    if not exact:
        return Widths(**grouped, **_counted_widths(count_model(json.loads(section)), hidden, inner))
    # Mixtral's key, else Qwen3-MoE's
    experts = full.get("num_local_experts") or full.get("num_experts") or 0
    return Widths(
        **grouped,
        inner=inner,
        layers=full["num_hidden_layers"],
        experts=experts,
        chosen_experts=full["num_experts_per_tok"] if experts else 1,
        # only qwen3_moe has dense layers of another width beside its experts
        expert_inner=full.get("moe_intermediate_size") or inner,
    )


def _counted_widths(facts: CountedModel, hidden: int, inner: Any) -> dict:
    """Return inner widths, layers and experts. inner: the model section's own; not all types have one."""
    if facts.experts and facts.chosen_experts:
        sparse = {layer for part, _, layer, *_ in facts.tensors if part == "experts"}
        # a gated expert has three matrices
        expert = facts.of_part("experts") // (3 * hidden * facts.experts * (len(sparse) or 1))
        mixture = {"experts": facts.experts, "chosen_experts": facts.chosen_experts}
        return {"inner": max(1, expert), "expert_inner": max(1, expert), "layers": facts.layers, **mixture}
    # gated feed-forward layers have three matrices, others two; no model section says which
    # in units of the hidden width: a layer's number of matrices times its inner width
    matrices = facts.of_part("mlp", "experts") / facts.layers / hidden
    inner = _whole(inner) or max(1, round(matrices / 2))
    gated = matrices / inner > GATED
    return {"inner": inner, "expert_inner": inner, "layers": facts.layers, "gated": gated}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def is_mixture(shape: dict, layer: int) -> bool:
    """Return whether this layer of a type with a formula is a mixture of experts (as transformers 5.23 chooses)."""
    if shape["model_type"] == "mixtral":
        return True
    if shape["model_type"] != "qwen3_moe" or not shape["num_experts"]:
        return False
    return layer not in (shape["mlp_only_layers"] or []) and (layer + 1) % shape["decoder_sparse_step"] == 0


def family_of(model: dict) -> str:
    """Return the type whose kernels have been counted (tables/kernels.json) that has such layers."""
    if is_exact(model):
        return model["model_type"]
    widths = widths_of(model)
    if widths.experts:
        return "mixtral"
    if not widths.gated:
        return "gpt2"
    return "qwen3" if count_model(model).normed_heads else "llama"


def count_model(model: dict) -> CountedModel:
    """Count a model section of any type.

    Raises:
        UserError: transformers cannot build it, or its weights cannot be drawn alike at every ZeRO stage.
    """
    # a dict cannot be a key of the cache; sorted, equal sections are equal texts
    return _counted(json.dumps(model, sort_keys=True))


@cache
def _counted(section: str) -> CountedModel:
    model_type = json.loads(section)["model_type"]
    extension = model_extension(model_type)
    file = _answer_file(section, extension.digest if extension else "")
    count = _read_counted(file)
    if count is None:
        with contextlib.ExitStack() as held:
            # ranks start together, and one counts for all of a machine; without a folder, or on a disk without locks,
            # each counts for itself
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                fcntl.flock(held.enter_context(file.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
            # another rank of this machine may have counted meanwhile
            count = _read_counted(file) or _built(section, extension)
            if "error" not in count:
                keep_answer(file, count)
    if "error" in count:
        if extension:
            raise UserError(f"model: {display_path(extension.path)}: {count['error']}")
        raise UserError(f"model: transformers cannot build this {model_type}: {count['error']}")
    # kept too, so that the next start refuses at once
    if count["faults"]:
        what = "weights would not be the same at every ZeRO stage"
        raise UserError(
            f"model.model_type: {model_type} does not train here, its initial {what}: {count['faults'][0]}"
        )
    count["tensors"] = tuple(tuple(tensor) for tensor in count["tensors"])
    return CountedModel(**{**count, "faults": tuple(count["faults"])})


def _answer_file(section: str, own: str) -> Path:
    """own: digest of the user's file that builds the model, if there is one."""
    try:
        library = version("transformers")
    except PackageNotFoundError:
        raise UserError(
            "model: counting this type needs transformers; pip install -r requirements.txt"
        ) from None
    # another version of the library, or of the code that counts, must count again
    sources = (source.read_text(encoding="utf-8") for source in SOURCES)
    return answer_file("", library, own, *sources, section)


def _read_counted(path: Path) -> dict | None:
    return kept_answer(path, "tensors")


def _built(section: str, extension: Extension | None) -> dict:
    # a small model needs no threads
    program, variables = ["-m", MODULE], {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    if extension:
        program += [extension.module if not extension.is_file else str(extension.path.absolute())]
        variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
    return ask(program, section, **variables)
