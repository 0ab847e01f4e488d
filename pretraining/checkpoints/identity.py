"""Where a run stands and what it is: what the marker of each of its checkpoints says."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pretraining.checkpoints.marker import read_marker
from pretraining.recipe import Recipe
from pretraining.recipe.curve import curve_parts
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.runtime.run_folder import utc_now


@dataclass(frozen=True)
class Start:
    """Where a run begins or goes on."""

    checkpoint: Path | None = None
    """None: at the beginning."""
    step: int = 0
    tokens: int = 0
    """Consumed."""
    changes: tuple[dict, ...] = ()
    """What was changed on request since the beginning: {"step", "key", "from", "to"} each."""
    journal: Journal = NOTHING_HEALED
    """The rollbacks in force."""

    @classmethod
    def at(cls, checkpoint: Path | None) -> "Start":
        """As the checkpoint's marker says; whatever its folder is called."""
        if checkpoint is None:
            return cls()
        marker = read_marker(checkpoint)
        changes = tuple(marker["changes"])
        return cls(checkpoint, marker["step"], marker["tokens"], changes)

    def first_sample(self, recipe: Recipe) -> int:
        """Position in the global order: so many samples of this recipe's length as the consumed tokens make."""
        return self.tokens // recipe.sequence_length

    def last_step(self, recipe: Recipe) -> int:
        """The optimizer step at which the recipe's tokens are used up: its `num_steps`, unless these changed."""
        within = recipe.budget["tokens"] - self.extra_tokens(recipe)
        return max(self.step, recipe.step_sizes.steps_within(within))

    def extra_tokens(self, recipe: Recipe) -> int:
        """Tokens consumed beyond `step` steps of the recipe: 0 unless their sizes were changed on the way."""
        return self.tokens - recipe.step_sizes.tokens_at(self.step)

    def tokens_at(self, step: int, recipe: Recipe) -> int:
        """Tokens consumed after `step` of the run that goes on from here."""
        return self.extra_tokens(recipe) + recipe.step_sizes.tokens_at(step)

    def schedule_clock(self, recipe: Recipe) -> Callable[[int], float] | None:
        """Steps to the tokens consumed by then, in full steps; None where the learning rate's schedule counts steps."""
        if not recipe.schedule_counts_tokens:
            return None
        return lambda step: self.tokens_at(step, recipe) / recipe.tokens_per_step


@dataclass(frozen=True)
class Identity:
    """What every marker of one start says, whatever its step."""

    recipe: Recipe
    """The resolved `Recipe`."""
    data: dict
    """Name and fingerprint of the tokens, and what the model card tells of them."""
    layout: dict
    """Ranks and ZeRO stage."""
    environment: dict
    start: Start

    @classmethod
    def of(cls, recipe: Recipe, plan, manifest: dict, environment: dict, start: Start) -> "Identity":
        return cls(recipe, described_data(recipe, manifest), plan.layout, environment, start)

    def marker_at(self, step: int, metrics: dict) -> dict:
        """The marker of a checkpoint after `step`, but for its files."""
        recipe = self.recipe.to_dict()
        return {
            "step": step,
            "tokens": self.start.tokens_at(step, self.recipe),
            "samples": self.start.tokens_at(step, self.recipe) // self.recipe.sequence_length,
            "ranks": self.layout["world_size"],
            "zero_stage": self.layout["zero_stage"],
            "saved": utc_now(),
            "metrics": metrics,
            "recipe_fingerprint": fingerprint_of(curve_parts(recipe)),
            "data": self.data,
            "changes": list(self.start.changes),
            "rollbacks": len(self.start.journal.rollbacks),
            "environment": self.environment,
            "recipe": recipe,
        }


def described_data(recipe: Recipe, manifest: dict) -> dict:
    """What a marker keeps of the manifest of prepared data."""
    splits = {
        name: {key: split[key] for key in ("documents", "tokens", "unigram_bits_per_byte") if key in split}
        for name, split in manifest["splits"].items()
    }
    return {"name": recipe.data["name"], "fingerprint": manifest["fingerprint"], "splits": splits}


def fingerprint_of(values: dict) -> str:
    """`xxh128:<hex>` of plain JSON values, whatever the order of their keys."""
    import xxhash

    text = json.dumps(values, sort_keys=True, ensure_ascii=False).encode()
    return f"xxh128:{xxhash.xxh128(text).hexdigest()}"


def metrics_at(step: int, log_history: list[dict]) -> dict:
    """The loss and the validation's metrics (`eval_...`) that were logged at `step` itself, of the Trainer's rows."""
    rows = [row for row in log_history if row.get("step") == step]
    return {key: row[key] for row in rows for key in row if key == "loss" or key.startswith("eval_")}
