"""Read a recipe: its file, `--set section.key=value` over it, every key checked, what is left out filled in.

`--limit_tokens` shrinks it, to try all of a run in minutes: see `_limited`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pretraining.ds_config import short_name
from pretraining.errors import UserError, nearest, place_keys
from pretraining.extend import MODEL, Extension, is_path, read_extensions
from pretraining.outside.addresses import refuse_credentials
from pretraining.outside.schema import check, display_path, load_json, problem, read_json, refuse_first
from pretraining.recipe.budget import check_multiple
from pretraining.recipe.data import shares_are_written
from pretraining.recipe.model import checked_model, known_types, read_config, refuse_names_of_others
from pretraining.recipe.piecewise import shrink_points
from pretraining.recipe.published import read_published, with_origin
from pretraining.recipe.recipe import KEYWORDS, RECIPES, SECTIONS, Recipe, where_of
from pretraining.recipe.section import schema_file
from pretraining.recipe.sections import Weights
from pretraining.recipe.training import TRAINING_KEYS
from pretraining.runtime.installation import as_typed

OTHER_NAMES = {
    "name": "experiment_name exp_name wandb_name wandb_run_name",
    "deepspeed": "zero zero_stage zero_optimization",
    "model.hidden_size": "d_model dim hidden_dim",
    "model.n_embd": "d_model dim hidden_dim",
    "model.num_hidden_layers": "depth n_layers num_layers",
    "model.n_layer": "depth n_layers num_layers",
    "model.num_attention_heads": "n_heads num_heads",
    "model.n_head": "n_heads num_heads",
    "model.initial_weights": "base_model from_pretrained init_from model_name_or_path pretrained_model_name_or_path",
    "data.sources.0.dataset": "dataset_name dataset_path train_data_path",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "data.sequence_length": "block_size context_length context_size max_length max_seq_len max_seq_length n_ctx "
    "seq_len seqlen",
    "data.validation_share": "val_fraction val_size val_split validation_split",
    "budget.tokens": "epochs max_iters max_tokens num_epochs num_iterations num_steps num_tokens total_steps "
    "total_tokens train_iters train_tokens",
    "budget.tokens_per_step": "accumulate_grad_batches global_batch_size grad_accum gradient_accumulation "
    "total_batch_size train_batch_size",
    "budget.ramp": "batch_size_rampup batch_size_warmup rampup_batch_size",
    "training.per_device_train_batch_size": "batch_size device_batch_size local_batch_size mbs micro_batch "
    "micro_batch_size train_micro_batch_size_per_gpu",
    "training.learning_rate": "base_lr lr max_lr peak_lr",
    "training.lr_scheduler_type": "learning_rate_schedule lr_decay_style lr_schedule lr_scheduler schedule scheduler",
    "training.lr_scheduler_kwargs": "lr_min min_lr min_lr_ratio",
    "training.warmup_steps": "lr_warmup_iters num_warmup_steps warmup warmup_iters",
    "training.weight_decay": "wd",
    "training.max_grad_norm": "clip_grad clip_grad_norm grad_clip gradient_clip_val gradient_clipping max_norm",
    "training.adam_beta1": "beta1 betas",
    "training.adam_beta2": "beta2 betas",
    "training.adam_epsilon": "adam_eps eps",
    "training.bf16": "dtype mixed_precision precision torch_dtype",
    "training.save_steps": "checkpoint_every checkpoint_interval save_every save_interval",
    "training.eval_steps": "eval_every eval_interval val_check_interval val_every",
    "training.logging_steps": "log_every log_every_n_steps log_freq log_interval",
    "training.report_to": "logger tensorboard tracker wandb",
    "training.project": "project_name wandb_project",
    "optimizer.average_decay": "ema ema_decay",
    "checkpoints.keep_last": "keep_last_n max_checkpoints save_top_k",
    "evaluation.max_validation_tokens": "eval_iters limit_val_batches max_eval_steps val_steps",
}
"""{dotted key: what other frameworks call it}"""

LIMITED_STEPS = 100
"""A limited run has at least so many steps, as long as a step still has `STEP_SEQUENCES`."""
STEP_SEQUENCES = 8
"""A step keeps about so many sequences, so that the ranks of one machine can share it."""
VALIDATIONS = 4
"""Validations and checkpoints of a limited run, at least."""
LOGS = 20

VALIDATION_DOCUMENTS, LONG_DOCUMENT = 5, 10_000
"""Validation gets about so many documents, at least, if they have so many tokens: the share of a long run may have
none of few documents."""
LEAST_VALIDATION, MOST_VALIDATION = 0.02, 0.2
"""Share of the documents that validation gets, unless the recipe gives it more."""


def load_recipe(
    name_or_path: str,
    overrides: Iterable[str] = (),
    deepspeed: str | None = None,
    limit_tokens: int | None = None,
    world_size: int | None = None,
) -> Recipe:
    """Read a recipe by its name in recipes/ or by its path, apply `--set` overrides, and check all of it.

    `UserError` names in one line the file (or option), the dotted key, what is wrong, and the nearest valid key or
    value.

    Args:
        name_or_path: `tiny`, `features/muon`, `gpt2-124m-llmc` of published/, or a path that ends in .json.
        overrides: `section.key=value` texts, applied in order.
        deepspeed: takes the place of the recipe's `deepspeed`; "null" means none.
        limit_tokens: the most that the run may train on.
        world_size: number of ranks, to which a limited recipe's micro-batch is fitted; None if it is not known.
    """
    path = _find(str(name_or_path))
    return recipe_of(_read(path), path, overrides, deepspeed, limit_tokens, world_size)


def recipe_of(
    values: dict,
    path: Path,
    overrides: Iterable[str] = (),
    deepspeed: str | None = None,
    limit_tokens: int | None = None,
    world_size: int | None = None,
) -> Recipe:
    """Make a recipe of the sections of a file as `load_recipe` does. path: what messages name."""
    where, notes, overrides = display_path(path), [], list(overrides)
    # where the shape is comes first: the other overrides change what is read there
    of_shape = [each for each in overrides if each.partition("=")[0] in ("model.from", "model.revision")]
    for override in of_shape:
        key, _, text = override.partition("=")
        values["model"] = with_origin(values.get("model"), key.removeprefix("model."), text.strip('"'))
    _read_model(values, where_of(path, of_shape), notes)
    refuse_names_of_others(values.get("model"), where)
    for override in overrides:
        nested = _as_nested(override)
        _check_owners(nested, f"--set {override}")
        if "base" in nested:
            what = "is named in a recipe's file alone; --recipe takes another"
            raise problem(f"--set {override}", "base", what)
    # the file first: its errors must not name an override
    others = [each for each in overrides if each not in of_shape]
    values = _apply_overrides(check(values, recipe_schema(), where), others, notes)
    if deepspeed is not None:
        values["deepspeed"] = None if deepspeed in ("null", "none") else deepspeed
    recipe = _built(values, path, tuple(overrides))
    if limit_tokens is not None:
        length = recipe.sequence_length
        if recipe.tokens_per_step < length:  # a step of less than a sequence cannot be made smaller
            words = f"the sequence length {length}"
            wrong = check_multiple(recipe.tokens_per_step, "budget.tokens_per_step", length, words)
            refuse_first(wrong, recipe.where)
        written = {override.partition("=")[0] for override in overrides}
        values = _limited(values, recipe, limit_tokens, written, world_size or 1)
        recipe = _built(values, path, tuple(overrides), limit_tokens)
    recipe.check()
    refuse_credentials(values, recipe.where)
    place_keys((*SECTIONS, *KEYWORDS), recipe.where)
    notes += [*recipe.budget.rounded(values["budget"]), *recipe.unread()]
    return replace(recipe, notes=tuple(f"{display_path(path)}: {note}" for note in notes))


def _read_model(values: dict, where: str, notes: list[str]) -> None:
    """Take a published config.json as model section, or the one that it names; what that says is added to `notes`."""
    model = values.get("model")
    if isinstance(model, dict) and "revision" in model and "from" not in model:
        raise problem(where, "model.revision", "is set without from, which names the repository")
    # with a digest it is a run's own recipe.json, which holds what was read
    if isinstance(model, dict) and "from" in model and "digest" not in model:
        values["model"], changes = read_published(model, where)
    elif model is not None:
        values["model"], changes = read_config(model)
    else:
        return
    notes += [f"model: {changes}"] if changes else []


def _built(values: dict, path: Path, overrides: tuple[str, ...], limit_tokens: int | None = None) -> Recipe:
    sharding, where = values.get("deepspeed"), where_of(path, overrides, limit_tokens)
    model, weights, origin = Weights.split(values["model"])
    # before the model, whose type they may define
    extensions = read_extensions(values.get("extensions", ()), path.parent, where, _refuse_known_types)
    return Recipe(
        name=values.get("name", path.stem),
        path=path,
        description=values["description"],
        deepspeed=None if sharding is None else short_name(sharding),
        overrides=overrides,
        limit_tokens=limit_tokens,
        model=checked_model(model, where),
        weights=Weights.of(weights),
        origin=origin,
        extensions=extensions,
        training=values["training"],
        **{name: section.of(values.get(name, {})) for name, section in SECTIONS.items()},
    )


def _refuse_known_types(extensions: Sequence[Extension], where: str) -> None:
    """A model of the user's own has a type of its own: what is known of the other one would not hold."""
    for number, extension in enumerate(extensions):
        for name in extension.defines.get(MODEL, ()):
            if name in known_types():
                what = f"{extension.path.name} defines the model_type {name!r}, which transformers has; rename it"
                raise problem(where, f"extensions.{number}", what)


@cache
def recipe_schema() -> dict:
    """JSON Schema of a recipe: our sections from their classes, model and training from recipes/schema.json."""
    written = schema_file()
    properties = {**written["properties"], **sections_schema()}
    # Its rules have schemas of their own, which the file holds.
    properties["data"]["properties"]["filters"] = written["properties"]["data"]["properties"]["filters"]
    other_names: dict[str, list[str]] = {}
    for key, names in OTHER_NAMES.items():
        for name in names.split():
            other_names.setdefault(name, []).append(key)
    return {**written, "properties": properties, "other_names": other_names}


def sections_schema(described: bool = False) -> dict[str, dict]:
    return {name: section.schema(described) for name, section in SECTIONS.items()}


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.json") if path.name != "schema.json")


def _read(path: Path) -> dict:
    """The sections of a recipe's file, over those of the one base it may name, key by key in each section.

    Lists and objects in a section replace the base's whole, and so does `published`. A model that names its type, or
    where it is, is another model and inherits nothing. The base's name and description stay its own.
    """
    where, own = display_path(path), _with_files(path)
    _check_owners(own, where)
    if "base" not in own:
        return own
    name = check(own.pop("base"), recipe_schema()["properties"]["base"], where, "base")
    try:
        base_path = path.parent / name if name.endswith(".json") else _find(name)
        base = _with_files(base_path)
    except UserError as error:
        raise problem(where, "base", str(error).removeprefix("--recipe ")) from None
    if "base" in base:
        what = f"{display_path(base_path)} has a base itself; name that one, or a recipe without"
        raise problem(where, "base", what)
    if "extensions" in base:
        base["extensions"] = [_beside(base_path, each) for each in base["extensions"]]
    load_recipe(str(base_path))  # so that a mistake in the base is reported with the base's name
    merged = {key: value for key, value in base.items() if key not in ("name", "description")}
    for key, value in own.items():
        inherited = merged.get(key)
        extends = isinstance(value, dict) and isinstance(inherited, dict)
        extends = extends and not (key == "model" and value.keys() & {"model_type", "from"})
        # another run: what the base's reached is not its result
        extends = extends and key != "published"
        if key == "model" and extends and "initial_weights" in value:
            # none of them is left to draw
            inherited = {name: inherited[name] for name in inherited if name != "draw"}
        merged[key] = {**inherited, **value} if extends else value
    return merged


def _with_files(path: Path) -> dict:
    """Read a recipe; one of ours names its files from the repository, which a wheel has elsewhere."""
    values = read_json(path)
    return json.loads(as_typed(json.dumps(values))) if path.is_relative_to(RECIPES) else values


def _beside(recipe_path: Path, extension: str | dict) -> str | dict:
    """An entry of a base's extensions as another file may write it: its path counts from the base."""
    if isinstance(extension, dict):
        return {**extension, "module": _beside(recipe_path, extension["module"])}
    return str(recipe_path.parent.absolute() / extension) if is_path(extension) else extension


def _find(name_or_path: str) -> Path:
    if name_or_path.endswith(".json"):
        return Path(name_or_path)
    # a name in a folder of recipes/, as features/muon; of a published run the folder may be left out
    for path in (RECIPES / f"{name_or_path}.json", RECIPES / "published" / f"{name_or_path}.json"):
        if path.is_file() and path.stem != "schema":
            return path
    if "/" in name_or_path and Path(name_or_path).exists():
        return Path(name_or_path)
    paths = [each for each in RECIPES.glob("*/*.json") if each.stem != "schema"]
    inside = sorted(f"{each.parent.name}/{each.stem}" for each in paths)
    published = [each.removeprefix("published/") for each in inside if each.startswith("published/")]
    names = recipe_names() + [each for each in inside if each.startswith("modern/")]
    near = f"no such recipe{nearest(name_or_path, [*names, *published, *inside])}"
    there = f"there are: {', '.join(names)}; of published runs {', '.join(published)}; a key at a time in features/"
    raise UserError(f"--recipe {name_or_path}: {near}; {there} (or give a path that ends in .json)")


def _check_owners(values: dict, where: str) -> None:
    for key in values:
        if key in TRAINING_KEYS and key not in recipe_schema()["properties"]:
            raise problem(where, key, f"does not belong here: {TRAINING_KEYS[key]}")
    training = values.get("training")
    for key in training if isinstance(training, dict) else ():
        if key in TRAINING_KEYS:
            raise problem(where, f"training.{key}", f"does not belong here: {TRAINING_KEYS[key]}")


def _as_nested(override: str) -> dict:
    """The first two parts of an override's key as a recipe would write them."""
    section, _, rest = override.partition("=")[0].partition(".")
    return {section: {rest.partition(".")[0]: None}}


def _apply_overrides(recipe: dict, overrides: Iterable[str], notes: list[str]) -> dict:
    """A copy of `recipe` with each `section.key=value` set, checked against the schema after each.

    A value is JSON where it parses, else a string; a number in the key indexes a list, and the list's length appends.
    Whole objects can be set: `training.lr_scheduler_kwargs={"min_lr_rate": 0.05}`. `UserError` if there is no `=`, or
    for an unknown key (with the nearest), a wrong type, an index beyond the list.
    """
    # a deep copy, which `_set` may change
    changed = json.loads(json.dumps(recipe))
    for override in overrides:
        key, equals, text = override.partition("=")
        where = f"--set {override}"
        if not equals or not key:
            raise UserError(f"{where}: write --set section.key=value")
        # of the type that it has by now: an earlier text may have set another model
        if key.startswith("model."):
            kind = {"model_type": changed["model"]["model_type"]}
            refuse_names_of_others({**_as_nested(override)["model"], **kind}, where)
        try:
            value = load_json(text, where)
        except json.JSONDecodeError:
            value = text
        _set(changed, key.split("."), value, where)
        if key == "model":
            _read_model(changed, where, notes)
        # after each, so that the error names the text that is wrong
        changed = check(changed, recipe_schema(), where)
    return changed


def _set(value: Any, path: list[str], new: Any, where: str) -> None:
    """Descend to the last part of `path`, making objects where there are none yet, and set it."""
    for depth, name in enumerate(path):
        here, place = ".".join(path[:depth]), name
        if isinstance(value, list):
            if not name.isdecimal() or int(name) > len(value):
                what = f"{here} is a list of {len(value)}: {name!r} is not one of its indices"
                raise UserError(f"{where}: {what}")
            place = int(name)
            if place == len(value):  # one past the end appends
                value.append({})
        elif not isinstance(value, dict):
            raise UserError(f"{where}: {here} is not an object, it has no {name!r}")
        if depth == len(path) - 1:
            value[place] = new
        elif isinstance(value, dict) and value.get(place) is None:
            value[place] = {}
        value = value[place]


def _limited(values: dict, recipe: Recipe, tokens: int, written: set[str], ranks: int = 1) -> dict:
    """Return the values of a recipe for a run of at most `tokens` tokens; the same values if it has no more.

    The model stays what it is. Steps become smaller, so that there are still enough of them for a schedule, validations
    and checkpoints. What is counted in steps or tokens shrinks in proportion. Data and run get names of their own, so
    that neither takes the place of the real ones.

    recipe: built from `values`. written: dotted keys that the command line sets; what it says of the size of a step and
    of cadences stays. `UserError` if such a step has more tokens.
    """
    if tokens >= recipe.budget.tokens:
        return values
    # a step: a divisor of the full one, of which the limit holds `LIMITED_STEPS`
    step = recipe.tokens_per_step
    if "budget.tokens_per_step" not in written:
        samples, sequences = recipe.samples_per_step, tokens // recipe.sequence_length
        # a limit of a few sequences is one step at least
        most = max(sequences // LIMITED_STEPS, min(STEP_SEQUENCES, sequences), 1)
        fitting = next(size for size in range(min(most, samples), 0, -1) if samples % size == 0)
        step = fitting * recipe.sequence_length
    if step > tokens:
        remedy = "raise it, or lower budget.tokens_per_step or the sequence length"
        raise UserError(f"--limit_tokens {tokens}: is less than one step of {step:,} tokens; {remedy}")
    steps = tokens // step
    # A deep copy: lists and objects inside are changed.
    changed = json.loads(json.dumps(values))
    changed["name"] = f"{recipe.name}-limit-{tokens}"
    budget, share = changed["budget"], steps * step / recipe.budget.tokens
    budget.update(tokens=steps * step, tokens_per_step=step)
    # There is no room for it: all steps are as small as its first ones.
    budget.pop("ramp", None)
    for key in ("warmup_tokens", "decay_tokens"):
        if (of_full := getattr(recipe.budget, key)) is not None:
            budget[key] = max(1, int(of_full * share) // step) * step
    _limit_data(changed["data"], recipe, tokens, written)
    training, share = changed["training"], steps / recipe.num_steps
    keywords = training.get("lr_scheduler_kwargs") or {}
    in_steps = [(keywords, "num_decay_steps"), (keywords, "num_stable_steps")]
    in_steps += [(training, "warmup_steps")] if training.get("warmup_steps", 0) >= 1 else []
    for place, key in in_steps:
        if key in place:
            place[key] = max(1, int(place[key] * share))
    shrink_points((keywords, *(changed.get("optimizer") or {}).get("groups", ())), share)
    if "training.per_device_train_batch_size" not in written:
        samples = step // recipe.sequence_length
        # Ranks that do not divide the step are refused later, with what would divide it.
        mine = samples // ranks if samples % ranks == 0 else samples
        micro = next(size for size in range(min(recipe.micro_batch, mine), 0, -1) if mine % size == 0)
        training["per_device_train_batch_size"] = micro
    _limit_cadences(changed, steps)
    return changed


def _limit_data(data: dict, recipe: Recipe, tokens: int, written: set[str]) -> None:
    data["name"] = f"{recipe.data.name}-limit-{tokens}"
    if shares_are_written(recipe.data):
        data["prepare"] = "budget"
    else:
        for source in data["sources"]:
            source["max_tokens"] = min(tokens, source.get("max_tokens") or tokens)
    # 0: data.validation alone, which is read whole.
    if recipe.data.validation_share and "data.validation_share" not in written:
        wanted = VALIDATION_DOCUMENTS * LONG_DOCUMENT / tokens
        wanted = min(MOST_VALIDATION, max(LEAST_VALIDATION, float(f"{wanted:.2g}")))
        data["validation_share"] = max(recipe.data.validation_share, wanted)
    for stage in (data.get("mixture") or {}).get("stages") or []:
        if (stage.get("until") or 0) > 1:
            stage["until"] = stage["until"] / recipe.budget.tokens


def _limit_cadences(values: dict, steps: int) -> None:
    """Validate, save and log often enough to see each of them."""
    training, every = values["training"], max(1, steps // VALIDATIONS)
    for key, most in (("eval_steps", every), ("save_steps", every), ("logging_steps", max(1, steps // LOGS))):
        if (training.get(key) or 0) >= 1:
            training[key] = min(int(training[key]), most)
    evaluate, save = training.get("eval_steps") or 0, training.get("save_steps") or 0
    if evaluate >= 1 and save > evaluate:
        # A save goes with a validation wherever it did before.
        training["save_steps"] = save // evaluate * evaluate
    evaluation, monitors = values.get("evaluation") or {}, values.get("monitors") or {}
    if evaluation.get("sample_steps"):
        evaluation["sample_steps"] = min(evaluation["sample_steps"], every)
    if evaluation.get("task_steps") and evaluate >= 1:
        evaluation["task_steps"] = evaluate
    traced = (monitors.get("profile") or {}).get("steps") or 0
    if (traced[-1] if isinstance(traced, list) else traced) > steps:
        monitors["profile"] = None
