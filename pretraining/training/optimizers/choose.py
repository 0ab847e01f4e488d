"""The recipe's optimizer as the Trainer takes it, and which ones a ZeRO stage allows."""

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel

from pretraining.ds_config import optimizer_device, zero_stage
from pretraining.mup import Scales, scales_by_name
from pretraining.recipe import model_with_defaults
from pretraining.schedules import CONSTANT, SCHEDULE_FREE
from pretraining.schema import display_path, problem
from pretraining.training.optimizers.groups import by_scales, split_parameters
from pretraining.training.optimizers.matrices import hidden_matrices
from pretraining.training.optimizers.muon import Muon

ADAMW = ("adamw_torch", "adamw_torch_fused")
ELEMENTWISE = (*ADAMW, *SCHEDULE_FREE, "sgd", "adagrad", "rmsprop", "lion_32bit", "adamw_bnb_32bit")
"""Names of `training.optim` whose update of a weight looks at no other weight: ZeRO may cut their state anywhere."""
DEFAULT = "adamw_torch_fused"
UNRESUMABLE = {
    "adamw_torch_8bit": "keeps its states as tensors that checkpoints cannot hold (adamw_bnb_8bit keeps plain ones)",
    "adamw_torch_4bit": "keeps its states as tensors that checkpoints cannot hold",
    "galore": "keeps projections that checkpoints cannot hold",
    "apollo": "keeps projections that checkpoints cannot hold",
    "lomo": "steps inside the backward pass, before gradients are whole",
    "adalomo": "steps inside the backward pass, before gradients are whole",
}
"""Beginnings of names of `training.optim`, and why none of them holds the promises at any stage."""


def choose_optimizer(recipe, ds_config: dict | None) -> tuple[Callable, dict] | None:
    """The Trainer's `optimizer_cls_and_kwargs`; None where `training.optim` alone says which.

    Raises:
        UserError: an optimizer that this ds_config's sharding would change or replace, by name.
    """
    settings, where = recipe.optimizer, display_path(recipe.path)
    has_base = recipe.mup["base_width"] is not None
    own_rates = [key for key in settings if key.startswith(("matrix_", "embedding_"))]
    rates_given = [f"optimizer.{key}" for key in own_rates if settings[key] is not None]
    own_groups = has_base or settings["name"] == "muon" or bool(rates_given)
    _refuse_other_rule(recipe, ds_config, where)
    if not own_groups:
        return None
    _refuse_own_groups(recipe, ds_config, where, rates_given)
    training = recipe.training
    keywords = {
        "settings": settings,
        "learning_rate": training["learning_rate"],
        "weight_decay": training.get("weight_decay", 0.0),
        "betas": (training.get("adam_beta1", 0.9), training.get("adam_beta2", 0.999)),
        "eps": training.get("adam_epsilon", 1e-8),
        "scales_of": partial(scales_by_name, model=model_with_defaults(recipe.model), mup=recipe.mup),
    }
    return (lambda: build_optimizer), keywords


def build_optimizer(
    model: PreTrainedModel,
    settings: dict,
    learning_rate: float,
    weight_decay: float,
    betas: tuple,
    eps: float,
    scales_of: Callable[..., dict[str, Scales]] = lambda names, **_: {},
) -> Muon:
    """Embeddings, head and routers; norms and biases, which are not decayed; hidden matrices.

    One group of each, or one for each of the factors that `scales_of` finds for their names.
    """
    matrices, tables, vectors = split_parameters(model)

    def chosen(key: str, otherwise: float) -> float:
        return otherwise if settings[key] is None else settings[key]

    adamw = {"algorithm": "adamw", "betas": betas, "eps": eps}
    is_muon = settings["name"] == "muon"
    keys = ("momentum", "nesterov", "newton_schulz_steps", "scale")
    matrix_rule = {"algorithm": "muon", **{key: settings[key] for key in keys}} if is_muon else adamw
    rule = settings["scale"] if is_muon else "adamw"
    scales = scales_of([*tables, *vectors, *matrices], rule=rule)
    groups = [
        {
            "name": "embeddings and head",
            "params": tables,
            "lr": chosen("embedding_learning_rate", learning_rate),
            "weight_decay": chosen("embedding_weight_decay", weight_decay),
            **adamw,
        },
        {
            "name": "norms and biases",
            "params": vectors,
            "lr": learning_rate,
            "weight_decay": 0.0,
            **adamw,
        },
        {
            "name": "hidden matrices",
            "params": matrices,
            "lr": chosen("matrix_learning_rate", learning_rate),
            "weight_decay": chosen("matrix_weight_decay", weight_decay),
            **matrix_rule,
        },
    ]
    layouts = hidden_matrices(model)
    scaled = [each for group in groups for each in by_scales(group, scales)]
    return Muon(scaled, {parameter: layouts[name] for name, parameter in matrices.items()})


def _refuse_other_rule(recipe, ds_config: dict | None, where: str) -> None:
    training, stage = recipe.training, zero_stage(ds_config)
    optim = training.get("optim", DEFAULT)
    for beginning, why in UNRESUMABLE.items():
        if optim.startswith(beginning):
            raise problem(where, "training.optim", f"is {optim}, which {why}; use {DEFAULT}")
    if optim in SCHEDULE_FREE:
        _check_schedule_free(optim, training, where)
    if optim not in ADAMW and optimizer_device(ds_config) != "gpu":
        what = f"is {optim}, but offloading the optimizer replaces it by DeepSpeed's CPU Adam"
        raise problem(
            where, "training.optim", f"{what}; use {DEFAULT}, or a ds_config without offload_optimizer"
        )
    if stage and optim not in ELEMENTWISE:
        what = f"is {optim}, whose update looks at whole parameters, and ZeRO-{stage} gives it slices"
        raise problem(
            where, "training.optim", f"{what}; use --deepspeed null or zero0, or one of {', '.join(ADAMW)}"
        )


def _check_schedule_free(optim: str, training: dict, where: str) -> None:
    if (schedule := training.get("lr_scheduler_type")) not in CONSTANT:
        what = f"is {schedule or 'linear'}, but {optim} does without a decay; write {' or '.join(CONSTANT)}"
        raise problem(where, "training.lr_scheduler_type", what)
    if not training.get("adam_beta1", 0.9):
        what = f"is 0: {optim} would train weights that do not tell their average; write 0.9"
        raise problem(where, "training.adam_beta1", what)


def _refuse_own_groups(recipe, ds_config: dict | None, where: str, rates_given: list[str]) -> None:
    """rates_given: the keys of rates and decays by kind of parameter that the recipe sets."""
    training, key, name = recipe.training, "optimizer.name", recipe.optimizer["name"]
    if recipe.mup["base_width"] is not None:
        key, name = "mup.base_width", "muP"
    elif name != "muon":
        key = rates_given[0]
    if training.get("optim", DEFAULT) not in ADAMW:
        what = f"groups of their own exclude training.optim {training['optim']}; leave that out"
        raise problem(where, key, what)
    if optimizer_device(ds_config) != "gpu":
        what = "runs where its weights are; offload_optimizer would replace it by DeepSpeed's CPU Adam"
        raise problem(where, key, f"{name} {what}; use zero1, zero2 or zero3")
    if training.get("fp16") and ds_config and not zero_stage(ds_config):
        what = "does not run in fp16 at stage 0, where DeepSpeed keeps copies of its own"
        raise problem(where, key, f"{name} {what}; use training.bf16, or zero1")
