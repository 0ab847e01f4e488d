"""The recipe's optimizer as the Trainer takes it; refusals.py says which ones a ZeRO stage allows."""

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel

from pretraining.recipe import model_with_defaults
from pretraining.recipe.mup import Scales, scales_by_name
from pretraining.refusals import own_groups
from pretraining.training.optimizers.groups import by_scales, split_parameters
from pretraining.training.optimizers.matrices import hidden_matrices
from pretraining.training.optimizers.muon import Muon


def choose_optimizer(recipe) -> tuple[Callable, dict] | None:
    """The Trainer's `optimizer_cls_and_kwargs`; None if `training.optim` alone names the optimizer."""
    if not own_groups(recipe):
        return None
    training = recipe.training
    keywords = {
        "settings": recipe.optimizer,
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
