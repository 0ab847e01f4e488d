"""Describe a run for the markers of its checkpoints: what it is (`Identity`) and from where it continued (`Start`)."""

import json
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from pretraining.checkpoints.format import MARKER, read_marker
from pretraining.checkpoints.remote import RemoteRun
from pretraining.errors import UserError
from pretraining.planning.run_plan import RunPlan
from pretraining.recipe import Recipe
from pretraining.recipe.curve import curve_parts
from pretraining.recipe.progress import Progress
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.runtime.process_group import from_rank_0
from pretraining.runtime.run_folder import RunFolder, utc_now
from pretraining.schema import check

GIVEN = "initial_weights"
"""The event of a run that begins from weights that exist."""


@dataclass(frozen=True)
class Start:
    """The point from which a run begins or goes on."""

    checkpoint: Path | None = None
    """None begins the run."""
    step: int = 0
    tokens: int = 0
    """Training tokens consumed until then."""
    changes: tuple[dict, ...] = ()
    """What was changed on request since the beginning: {"step", "key", "from", "to"} each."""
    journal: Journal = NOTHING_HEALED
    """The rollbacks in force."""
    starts_over: bool = False
    """`--resume never`: what an earlier run left in the folder is set aside."""
    source: RemoteRun | None = None
    """The store that holds the files of the checkpoint which this node lacks; None: it needs none of it."""
    initial_weights: dict | None = None
    """Source and digest of the weights that the run began with; None: it drew them."""

    @classmethod
    def at(cls, checkpoint: Path) -> "Start":
        """Return the start from a checkpoint by its marker, whatever its folder is called."""
        needed = {"type": "object", "required": ["step", "tokens", "changes"]}
        marker = check(read_marker(checkpoint), needed, str(checkpoint / MARKER))
        changes = tuple(marker["changes"])
        given = marker.get("initial_weights")
        return cls(checkpoint, marker["step"], marker["tokens"], changes, initial_weights=given)

    def with_given(self, run: RunFolder, facts: dict | None) -> "Start":
        """Return this start with the weights that it begins with.

        Raises:
            UserError: the steps that this run has logged began with other weights.
        """
        if facts is None:
            return self
        earlier = None if self.starts_over else from_rank_0(lambda: run.last_event(GIVEN))
        if earlier is not None and earlier["digest"] != facts["digest"]:
            raise UserError(
                f"{run.path}: the run began with other weights of {earlier['source']} ({earlier['digest']}) than are "
                f"there now ({facts['digest']}); bring them back, or start over with --resume never"
            )
        return replace(self, initial_weights=facts)

    def progress(self, recipe: Recipe) -> Progress:
        """Return how far the run is in this recipe's budget."""
        return Progress.of(recipe, self.step, self.tokens, self.changes)


@dataclass(frozen=True)
class Identity:
    """What every marker of one start says, at any step."""

    recipe: Recipe
    """The resolved `Recipe`."""
    data: dict
    """Name and fingerprint of the tokens, and what the model card says about them."""
    layout: dict
    """Ranks and ZeRO stage."""
    environment: dict
    start: Start

    @classmethod
    def of(cls, recipe: Recipe, plan: RunPlan, manifest: dict, environment: dict, start: Start) -> "Identity":
        """Gather what the markers say from recipe, plan and the manifest of the prepared data."""
        return cls(recipe, described_data(recipe, manifest), plan.layout, environment, start)

    def marker_at(self, step: int, metrics: dict) -> dict:
        """Return the marker of a checkpoint after `step`, without its files."""
        recipe, progress = self.recipe.to_dict(), self.start.progress(self.recipe)
        # The next start continues by tokens: the numbers of samples and steps change if their sizes change.
        return {
            "step": step,
            "tokens": progress.tokens_at(step),
            "samples": progress.samples_at(step),
            "ranks": self.layout["world_size"],
            "zero_stage": self.layout["zero_stage"],
            "host": socket.gethostname(),  # of rank 0
            "saved": utc_now(),
            "metrics": metrics,
            "recipe_fingerprint": fingerprint_of(curve_parts(recipe)),
            "data": self.data,
            "changes": list(self.start.changes),
            "rollbacks": len(self.start.journal.rollbacks),  # a later rollback leaves this checkpoint behind
            "environment": self.environment,
            **({"initial_weights": given} if (given := self.start.initial_weights) else {}),
            "recipe": recipe,
        }


def described_data(recipe: Recipe, manifest: dict) -> dict:
    """Return what a marker keeps of the manifest of prepared data."""
    # Not every split has all of these keys.
    splits = {
        name: {key: split[key] for key in ("documents", "tokens", "unigram_bits_per_byte") if key in split}
        for name, split in manifest["splits"].items()
    }
    named = {key: manifest[key] for key in ("fingerprint", "origin") if key in manifest}
    return {"name": recipe.data.name, **named, "splits": splits}


def fingerprint_of(values: dict) -> str:
    """Return `xxh128:<hex>` of plain JSON values."""
    # Sorted keys, so that a recipe written in another order has the same fingerprint.
    text = json.dumps(values, sort_keys=True, ensure_ascii=False).encode()
    return f"xxh128:{xxhash.xxh128(text).hexdigest()}"


def metrics_at(step: int, log_history: list[dict]) -> dict:
    """Return the loss and the validation's metrics (`eval_...`) that the Trainer logged at `step` itself."""
    # The Trainer logs the loss and the validation in rows of their own.
    rows = [row for row in log_history if row.get("step") == step]
    return {key: row[key] for row in rows for key in row if key == "loss" or key.startswith("eval_")}
