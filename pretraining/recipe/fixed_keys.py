"""What the loss curve belongs to: the parts of a recipe that a run folder may not change between two starts."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.errors import UserError
from pretraining.outside.files import read_json_value
from pretraining.outside.schema import differences, read_json, suggestion
from pretraining.recipe import RECIPES, load_recipe, recipe_schema
from pretraining.recipe.model import BY_MICRO_BATCH, ROUTER_COEFFICIENT, known_types, model_with_defaults
from pretraining.recipe.training import BY_METRIC, Training

_NEUTRAL = {
    # where the shape was read: which one it is, its keys and the digest say
    "model": "from revision",
    # where the work happens, or what is recorded
    "training": """
        activation_checkpointing activation_checkpointing_kwargs dataloader_num_workers dataloader_persistent_workers
        dataloader_pin_memory dataloader_prefetch_factor ddp_bucket_cap_mb eval_delay eval_on_start eval_steps
        eval_strategy log_level log_level_replica logging_first_step logging_steps logging_strategy
        per_device_eval_batch_size per_device_train_batch_size project report_to run_name save_steps save_strategy
        torch_empty_cache_steps""",
    # where the tokens are and how fast they were made: which ones they are, their fingerprint says
    "data": "name encoder prepare",
    # how the same loss is computed
    "loss": "kind chunk_tokens compile",
}
NEUTRAL_KEYS = {f"{section}.{key}" for section, keys in _NEUTRAL.items() for key in keys.split()}
"""Keys that change nothing of the curve, but for those of `SOMETIMES`."""

_FOLLOWED = f"whose `training.lr_scheduler_type` follows validations ({', '.join(BY_METRIC)})"
SOMETIMES = {
    "training.eval_steps": _FOLLOWED,
    "training.eval_delay": _FOLLOWED,
    "evaluation.max_validation_tokens": _FOLLOWED,
    "training.per_device_train_batch_size": "with a loss that balances experts within a micro-batch",
}
"""Keys that the curve of some runs depends on: {key: a run ...}."""

# The sections of ours whose keys the curve depends on. A run from before a key has none: the key's default is taken.
OURS = ("data", "budget", "loss", "optimizer", "mup")
# Keys whose default is not what was done before there were any.
BEFORE_THE_KEY = {"data.document_masking": False, "data.packing": "in_sequence"}

# Keys of other sections that it depends on.
BESIDE = ("speed.fp8", "speed.bf16_blocks", "speed.bf16_layers", "speed.bf16_decay")
BESIDE += ("monitors.flagged_blocks", "monitors.repeated_ngrams")

SPIKES = "monitors.spikes"
"""With the policy skip: which steps are applied. Other policies leave a curve alone, or record what they do to it."""
_OF_SPIKES = ("policy", "rule", "score", "window")

# With other values of these, model, vocabulary and text are the same. --limit_tokens sets the share of the validation.
SAME_TEXT = {"model.attn_implementation", "model.experts_implementation", "model.keep_in_fp32"}
SAME_TEXT |= {"data.validation_share", "data.shuffle_shards", "data.shuffle_blocks", "data.skip_undecodable"}
SAME_TEXT |= {"data.document_masking", "data.packing"}

EXTENSIONS = "extensions"
"""The user's own modules, by name and digest of their source."""
SECTIONS = ("model", "data", "budget", "training")
DATA_FINGERPRINT = "data.fingerprint"
"""Not a key of the recipe: the identity of the prepared tokens, which `--allow_change` may name like one."""


class Change(NamedTuple):
    """One part of the curve that is not what it was."""

    key: str
    earlier: Any
    now: Any

    def is_allowed(self, allowed: Iterable[str]) -> bool:
        return self.key in allowed or self.key.partition(".")[0] in allowed

    def accepted_at(self, step: int) -> dict:
        return {"step": step, "key": self.key, "from": self.earlier, "to": self.now}

    def __str__(self) -> str:
        """The first single value that differs."""
        return str(differences(self.earlier, self.now, self.key)[0])


def curve_parts(recipe: dict) -> dict:
    """Flat {dotted key: value} of everything in a resolved recipe that the loss at step k is a function of."""
    properties = recipe_schema()["properties"]
    parts = {
        f"{section}.{key}": each.get("default")
        for section in OURS
        for key, each in properties[section]["properties"].items()
    }
    parts |= BEFORE_THE_KEY
    written = {section: recipe.get(section, {}) for section in OURS}
    # without one of these it is no recipe of a run: KeyError
    written |= {section: recipe[section] for section in SECTIONS}
    for section, values in written.items():
        parts |= {f"{section}.{key}": value for key, value in values.items()}
    # of these sections nothing else changes what is computed
    for dotted in BESIDE:
        section, _, key = dotted.partition(".")
        parts[dotted] = recipe.get(section, {}).get(key, properties[section]["properties"][key]["default"])
    # by file name: a module that was moved is the same
    parts[EXTENSIONS] = {Path(e["module"]).name: e.get("digest") for e in recipe.get("extensions", ())}
    parts = {key: value for key, value in parts.items() if key not in NEUTRAL_KEYS}
    return parts | _parts_of_some(recipe)


def _parts_of_some(recipe: dict) -> dict:
    """The keys of `SOMETIMES`, and `SPIKES`, of a run whose curve depends on them."""
    training, parts = Training(recipe["training"]), {}
    if training.lr_scheduler_type in BY_METRIC:
        parts["training.eval_steps"] = training.validated_every
        parts["training.eval_delay"] = training.eval_delay
        most = recipe.get("evaluation", {}).get("max_validation_tokens")
        parts["evaluation.max_validation_tokens"] = most
    if _balances_micro_batches(recipe["model"], recipe.get("loss", {})):
        parts["training.per_device_train_batch_size"] = training.per_device_train_batch_size
    spikes = recipe.get("monitors", {}).get("spikes", {})
    if spikes.get("policy") == "skip":
        keys = recipe_schema()["properties"]["monitors"]["properties"]["spikes"]["properties"]
        parts[SPIKES] = {name: spikes.get(name, keys[name]["default"]) for name in _OF_SPIKES}
    return parts


def _balances_micro_batches(model: dict, loss: dict) -> bool:
    """Whether a loss evens out the use of the experts by the tokens of a micro-batch (`balance_of`, model/loss.py)."""
    kind = model.get("model_type")
    if kind not in known_types() or loss.get("balance") == "none":
        return False
    values = model_with_defaults(model)
    default = recipe_schema()["properties"]["loss"]["properties"]["balance_weight"]["default"]
    of_ours = loss.get("balance_weight", default) if kind in BY_MICRO_BATCH else 0
    return bool(values.get("output_router_logits") and values.get(ROUTER_COEFFICIENT, of_ours))


def changed_parts(recipe: dict, earlier: dict) -> list[Change]:
    """What of the curve differs between two resolved recipes, by key."""
    ours, theirs = curve_parts(recipe), curve_parts(earlier)
    # if the curve of one alone depends on such a key, what makes it do so has changed
    keys = (ours.keys() | theirs.keys()) - (SOMETIMES.keys() - (ours.keys() & theirs.keys()))
    changes = [Change(key, theirs.get(key), ours.get(key)) for key in sorted(keys)]
    return [change for change in changes if differences(change.earlier, change.now)]


@cache
def _published_runs() -> dict[str, str]:
    """Return {name of a run, or of its curve: recipe} of recipes/published/."""
    found: dict[str, str] = {}
    for path in sorted((RECIPES / "published").glob("*.json")):
        section = read_json(path)["published"]
        found |= {section[key]: f"published/{path.stem}" for key in ("run", "curve") if key in section}
    return found


def differs_from_published(recipe: dict) -> list[str]:
    """Return in which keys a resolved recipe has another model, vocabulary or text than the published run it names.

    Several keys of the model are `model`. Empty if recipes/published/ has no such run, or `recipe` is not whole.
    """
    section = recipe.get("published")
    names = [section.get(key) for key in ("run", "curve")] if isinstance(section, dict) else []
    known = [_published_runs().get(name) for name in names if isinstance(name, str)]
    if not any(known):
        return []
    try:
        changes = changed_parts(recipe, load_recipe(next(filter(None, known))).to_dict())
    # that of a run folder may be damaged: a report is written all the same
    except (UserError, ValueError, TypeError, AttributeError, KeyError):
        return []
    keys = [change.key for change in changes if change.key not in SAME_TEXT]
    of_model = [key for key in keys if key.startswith("model.")]
    return (["model"] if len(of_model) > 1 else of_model) + [key for key in keys if key.startswith("data.")]


def changes_of_run(folder: Path, recipe: dict, allowed: Iterable[str] = ()) -> list[Change]:
    """How a resolved recipe differs from that of the last start in this run folder.

    `UserError` if it differs where that is not `allowed`, or the file that was kept is no recipe of a run.
    """
    kept = folder / "recipe.json"
    if not kept.exists():
        return []
    try:
        changes = changed_parts(recipe, read_json_value(kept))
    # the file may be damaged, or another JSON file of that name
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        reason = error if isinstance(error, OSError | ValueError) else "it is no recipe of a run"
        what = (
            f"{kept}: cannot be read ({reason}); choose another --output_dir, or bring back that of its run"
        )
        raise UserError(what) from error
    refuse_changes(changes, allowed, folder, "run")
    return changes


def refuse_changes(changes: list[Change], allowed: Iterable[str], place: Path | str, what: str) -> None:
    """Raise `UserError` for the first change that is not `allowed`; `place` holds a `what` of another recipe."""
    refused = [change for change in changes if not change.is_allowed(allowed)]
    if refused:
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        found = f"{place} holds a {what} of another recipe: {refused[0]}{more}"
        remedy = "give this one its own folder with --output_dir, or start over with --resume never"
        keys = [change.key for change in refused]
        # of another model no weights are taken over, whatever is accepted
        if "model.model_type" not in keys:
            accepted = keys if len(keys) <= 4 else {key.partition(".")[0]: None for key in keys}
            remedy += ", or accept what changes with " + " ".join(f"--allow_change {key}" for key in accepted)
        raise UserError(f"{found}; {remedy}")


def check_allowed(key: str) -> str:
    """`key` if `--allow_change` can mean it: a key of the curve, or a section; else `UserError` with the nearest."""
    schema = recipe_schema()
    properties, sections = schema["properties"], {*SECTIONS, *OURS}
    names = {f"{section}.{name}" for section in sections for name in properties[section]["properties"]}
    names |= {f"model.{name}" for model in known_types().values() for name in model["properties"]}
    single = {*BESIDE, *SOMETIMES, SPIKES}
    # a refusal of many keys names their sections
    names |= {*single, *(each.partition(".")[0] for each in single), *sections, DATA_FINGERPRINT, EXTENSIONS}
    whole = ".".join(key.split(".")[:2])
    if whole in NEUTRAL_KEYS - SOMETIMES.keys():
        raise UserError(f"{key}: may change without it")
    if whole not in names:
        near = suggestion(key, schema)
        # None: a valid key of another section
        raise UserError(f"{key}: " + ("may change without it" if near is None else f"unknown key{near}"))
    if whole != key:
        raise UserError(f"{key}: is part of {whole}, which is allowed to change as a whole; name that")
    return key
