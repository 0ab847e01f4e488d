"""What may not differ between the starts of a run: refused by name, or accepted on request and recorded."""

import json
from pathlib import Path

from pretraining.checkpoints.identity import Start, described_data
from pretraining.curve import DATA_FINGERPRINT, Change, changed_parts, refuse_changes
from pretraining.errors import UserError
from pretraining.planning.sizes import model_size
from pretraining.recipe import Recipe
from pretraining.runtime.run_folder import RunFolder
from pretraining.schedules import CONSTANT, DECAYING
from pretraining.schema import differences, listed

STEP_SIZES = ("budget.tokens_per_step", "budget.ramp")
"""Keys that say how many tokens a step has."""


def changes_since(
    checkpoint: Path, marker: dict, recipe, manifest: dict, run: RunFolder, allowed
) -> list[Change]:
    """How recipe and data differ from the checkpoint's.

    What an earlier start in this folder accepted stays accepted. Raises `UserError` for a change that is not
    allowed, and for one that no checkpoint can follow: other shapes of the weights.
    """
    changes = changed_parts(recipe.to_dict(), marker["recipe"])
    if any(change.key.startswith("model.") for change in changes):
        _refuse_other_shape(checkpoint, marker["recipe"]["model"], recipe.model)
    changes += _data_change(marker["data"], described_data(recipe, manifest), changes)
    recorded = [(each["key"], each["to"]) for each in recorded_changes(run)]
    new = [change for change in changes if (change.key, change.now) not in recorded]
    refuse_changes(new, allowed, checkpoint, "checkpoint")
    return changes


def recorded_changes(run: RunFolder) -> list[dict]:
    """What earlier starts in this folder accepted: {"step", "key", "from", "to"} each."""
    return _read_json(run.changes) if run.changes.exists() else []


def effect_on_rate(change: dict, recipe: Recipe, start: Start) -> str:
    """What a recorded change of the steps' sizes does to the learning rate, and the way out; "" where it does nothing.

    A schedule that counts steps goes on at the same step, which is another share of the run than before.
    """
    kind, last = recipe.training.get("lr_scheduler_type", "linear"), start.last_step(recipe)
    is_flat = kind == CONSTANT[0] or (kind in CONSTANT and start.step >= recipe.warmup_steps(last))
    if change["key"] not in STEP_SIZES or recipe.schedule_counts_tokens or is_flat:
        return ""
    keys = "budget.warmup_tokens (in place of training.warmup_steps)"
    keys += " or budget.decay_tokens" if kind == DECAYING else ""
    return (
        f"the learning rate moves by it: the schedule {kind} counts steps, and has {last - start.step:,} left after "
        f"{start.step:,}, whatever their tokens; {keys} lets it count tokens, so that the rate stays where it is"
    )


def _data_change(earlier: dict, now: dict, changes: list[Change]) -> list[Change]:
    """Other tokens under the same recipe; where `data` differs by a key, that key stands for them."""
    if earlier["fingerprint"] == now["fingerprint"] or any(each.key.startswith("data.") for each in changes):
        return []
    return [Change(DATA_FINGERPRINT, earlier["fingerprint"], now["fingerprint"])]


def _refuse_other_shape(checkpoint: Path, earlier: dict, now: dict) -> None:
    if earlier["model_type"] != now["model_type"] or model_size(earlier).parts != model_size(now).parts:
        raise UserError(
            f"{checkpoint} holds weights of other shapes: {listed(differences(earlier, now, 'model'))}; give this "
            "model its own folder with --output_dir, or start over with --resume never"
        )


def _read_json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); remove it or choose another --output_dir"
        ) from error
