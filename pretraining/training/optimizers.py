"""Build the recipe's optimizer for the Trainer: its groups of parameters, and what it keeps beside them."""

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from pretraining.errors import nearest
from pretraining.outside.schema import display_path, problem
from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.optimizer import (
    AVERAGE,
    EMBEDDING,
    HEAD,
    HIDDEN,
    ROUTER,
    VECTOR,
    Optimizer,
    Scales,
    scales_by_name,
)
from pretraining.recipe.piecewise import value_at
from pretraining.recipe.training import AVERAGING, Training, Z
from pretraining.training.muon import Muon
from pretraining.upstream.deepspeed import partitions, whole_numel, whole_shape
from pretraining.upstream.matrices import hidden_matrices


def choose_optimizer(recipe: Recipe) -> tuple[Callable, dict] | None:
    """Return the Trainer's `optimizer_cls_and_kwargs`; None if `training.optim` alone names the optimizer."""
    if not recipe.own_groups:
        return None
    scales_of = partial(scales_by_name, model=model_with_defaults(recipe.model), mup=recipe.mup)
    keywords = {"settings": recipe.optimizer, "training": recipe.training, "scales_of": scales_of}
    # the Trainer calls the first to get the builder, and the builder with the model
    return (lambda: build_optimizer), keywords


ADAM_KEYS = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
OWN_KEYS = {**ADAM_KEYS, "betas": "adam_beta1", "lr": "learning_rate", "weight_decay": "weight_decay"}
"""{name in training.optim_args: the key of `training` that has such a value}"""


def check_optimizer(recipe: Recipe, arguments: TrainingArguments) -> str:
    """Return a note on Adam's keys in the recipe that nothing reads with `training.optim`; "" if there are none.

    `UserError` for what nothing reads or takes in `training.optim_args`. Raises what transformers raises for
    `training.optim` itself.
    """
    optim, where, key = recipe.training.optim, recipe.where, "training.optim_args"
    text = (arguments.optim_args or "").replace(" ", "")
    given = dict(pair.split("=") for pair in text.split(",")) if text else {}

    def chosen(**changes: Any) -> tuple[Any, dict]:
        changed = copy(arguments)
        vars(changed).update({"optim_args": None, **changes})
        return Trainer.get_optimizer_cls_and_kwargs(changed)

    plain = chosen()

    def reads(**changes: Any) -> bool:
        """Return whether transformers chooses otherwise, or not at all, with such changes."""
        try:
            return chosen(**changes) != plain
        except (AttributeError, ValueError):
            return True

    unread = [name for name in ADAM_KEYS.values() if not reads(**{name: getattr(arguments, name) + 1})]
    own = {name: other for name, other in OWN_KEYS.items() if other not in unread}
    for name in given:
        # groups of parameters have a decay of their own, from training.weight_decay
        if name != "weight_decay" and reads(optim_args=f"{name}=?"):
            continue
        known = [each for each in inspect.signature(plain[0]).parameters if reads(optim_args=f"{each}=?")]
        remedy = f"; write training.{own[name]}" if name in own else nearest(name, known) or "; leave it out"
        raise problem(where, key, f"has {name}, which nothing reads with training.optim={optim}{remedy}")
    if given:
        try:
            optimizer_class, keywords = chosen(optim_args=text)
            if as_text := [name for name in given if isinstance(keywords.get(name), str)]:
                raise TypeError(f"transformers hands {as_text[0]} on as text")
            optimizer_class([torch.zeros(1, requires_grad=True)], **keywords)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            what = f"is {json.dumps(text)}, which {optim} does not take ({error}); change it, or leave it out"
            raise problem(where, key, what) from error
    ignored = ", ".join(f"training.{name}" for name in unread if name in recipe.training)
    return f"{display_path(recipe.path)}: {ignored}: not read by training.optim={optim}" if ignored else ""


TABLES, VECTORS, MATRICES = "embeddings and head", "norms and biases", "hidden matrices"
HOMES = {EMBEDDING: TABLES, HEAD: TABLES, ROUTER: TABLES, VECTOR: VECTORS, HIDDEN: MATRICES}
"""{kind of parameter: what its group is called, unless a row of `optimizer.groups` names it}; groups in this order."""
MUON_KEYS = ("momentum", "nesterov", "polynomial", "newton_schulz_steps", "neuron_beta2", "scale")


def build_optimizer(
    model: PreTrainedModel,
    settings: Optimizer,
    training: Training,
    scales_of: Callable[..., dict[str, Scales]] = lambda names, **_: {},
) -> Muon:
    """Build an optimizer with a group for each set of values that parameters of one kind have.

    They are those of `training`, then those of the rows of `optimizer.groups` that match, times the factors that
    `scales_of` finds for a name (muP). Vectors are not decayed unless a row says so.
    """
    kinds, layouts = kinds_of(model), hidden_matrices(model, settings.per_head)
    parameters_of = dict(model.named_parameters())
    is_muon = settings.name == "muon"
    # of all names: a head that is frozen is no tied one
    scales = scales_of(list(parameters_of), rule=settings.scale if is_muon else "adamw")
    places, alike = list(dict.fromkeys(HOMES.values())), {}
    # sorting is stable: a group's parameters stay in the model's order
    for name, kind in sorted(kinds.items(), key=lambda each: places.index(HOMES[each[1]])):
        values = {
            "algorithm": "adamw",
            "learning_rate": training.learning_rate,
            "weight_decay": 0.0 if kind == VECTOR else training.weight_decay,
            "decay_times": "rate",
            "cautious_decay": False,
            "momentum": training.adam_beta1,
            "beta2": training.adam_beta2,
            "epsilon": training.adam_epsilon,
        }
        if is_muon and kind == HIDDEN:
            values |= {"algorithm": "muon", **{key: getattr(settings, key) for key in MUON_KEYS}}
        for row in settings.rows:
            if row.matches(name, kind):
                values |= row.values
        named = [row for row in settings.groups if row.matches(name, kind)]
        label = named[-1].names or kind if named else HOMES[kind]
        each = scales.get(name, Scales())
        key = json.dumps([HOMES[kind], label, values, each.rate, each.decay, each.epsilon])
        alike.setdefault(key, (label, values, each, []))[-1].append(parameters_of[name])
    groups, counts = [], Counter()
    for label, values, scale, parameters in alike.values():
        counts[label] += 1
        # without the rate's factor, which scale.decay evens out, a decay alone has none
        decay = scale.decay * (1.0 if values["decay_times"] == "rate" else scale.rate)
        courses = {"weight_decay": (values["weight_decay"], decay), "momentum": (values["momentum"], 1.0)}
        group = {
            **values,
            **{key: value_at(course, 0, 1) * factor for key, (course, factor) in courses.items()},
            "params": parameters,
            "label": f"{label} {counts[label]}" if counts[label] > 1 else label,
            "lr": values["learning_rate"] * scale.rate,
            "peak": values["learning_rate"] * scale.rate,
            "eps": values["epsilon"] * scale.epsilon,
            "courses": courses,
        }
        groups.append(group)
    # Muon also without a group of "muon": it is then AdamW
    optimizer = Muon(groups, model, {name: layouts[name] for name, kind in kinds.items() if kind == HIDDEN})
    # transformers' polynomial schedule looks for the peak here
    optimizer.defaults["lr"] = training.learning_rate
    return optimizer


def kinds_of(model: PreTrainedModel) -> dict[str, str]:
    """Return {name: kind} of every trained parameter. A table that is neither the head nor looked up is a router's."""
    hidden, head = hidden_matrices(model), model.get_output_embeddings()
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kinds = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in hidden:
            kinds[name] = HIDDEN
        elif len(whole_shape(parameter)) < 2 or name.endswith("bias"):
            kinds[name] = VECTOR
        elif id(parameter) in looked_up:
            kinds[name] = EMBEDDING
        else:
            kinds[name] = HEAD if head is not None and parameter is head.weight else ROUTER
    return kinds


def describe_groups(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> list[str]:
    """Describe each parameter group in a line, and what is frozen in another, before DeepSpeed flattens them."""
    frozen = [] if model is None else [each for each in model.parameters() if not each.requires_grad]
    lines = [f"frozen: {len(frozen)} tensors, {sum(map(whole_numel, frozen)):,} parameters"] if frozen else []
    types = {group["params"][0].dtype for group in optimizer.param_groups}
    for group in optimizer.param_groups:
        parameters = group["params"]
        numel = sum(map(whole_numel, parameters))
        # weights of two types are in groups of their own (`model.keep_in_fp32`)
        precision = f" in {str(parameters[0].dtype).removeprefix('torch.')}" if len(types) > 1 else ""
        label = group.get("label") or ("decayed" if group["weight_decay"] else "not decayed")
        algorithm = group.get("algorithm", type(optimizer).__name__.lower())
        told, alone = "", {"weight_decay": (group["weight_decay"], 1)}
        for key, (course, factor) in group.get("courses", alone).items():
            ends = (course[0][1], course[-1][1]) if isinstance(course, list) else (course,)
            told += f", {key.replace('_', ' ')} {' to '.join(f'{factor * end:g}' for end in ends)}"
        lines.append(
            f"{label}: {algorithm}, {len(parameters)} tensors, {numel:,} parameters{precision}, "
            f"learning rate {group['lr']:g}{told}"
        )
    return lines


class GroupValues(TrainerCallback):
    """Give every group the momentum and decay of the step, which are functions of it, and log them with its rate."""

    def __init__(self, optimizer: Muon, count: Callable[[int], float]) -> None:
        """count: maps finished steps to those that the schedule counts."""
        self.optimizer, self.count = optimizer, count
        self.values: dict[str, float] = {}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        # DeepSpeed has cut the parameters up by now
        self.optimizer.bind(partitions(getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])))

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        place, end = self.count(state.global_step), self.count(state.max_steps)
        for group in self.optimizer.param_groups:
            for key, (course, factor) in group["courses"].items():
                group[key] = factor * value_at(course, place, end)
            label = re.sub(r"\W+", "_", group["label"]).strip("_")
            for name, key in (("learning_rate", "lr"), ("weight_decay",) * 2, ("momentum",) * 2):
                self.values[f"optimizer/{label}/{name}"] = group[key]

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" in logs:
            logs.update(self.values)


class Bf16InDecay(TrainerCallback):
    """Have layers in fp8 multiply in bf16 from the step on at which the rate begins to fall (`speed.bf16_decay`)."""

    def __init__(self, recipe: Recipe, count: Callable[[int], float]) -> None:
        """count: maps finished steps to those that the schedule counts."""
        self.recipe, self.count = recipe, count
        self.decays: bool | None = None

    def on_step_begin(self, args, state, control, model, **kwargs) -> None:
        decays = self.count(state.global_step) >= self.recipe.decay_start(self.count(state.max_steps))
        if decays == self.decays:
            return
        self.decays = decays
        for layer in model.modules():
            if hasattr(layer, "in_fp8"):
                layer.in_fp8 = not decays


COUNTS = ("k", "lr_max", "weight_sum")
"""What the package keeps in a parameter group: steps, the highest rate, the sum of the average's weights."""


class _CountsByTensor(torch.optim.Optimizer):
    """Count the steps of tensors instead of those of groups.

    The weights in place are always those that are trained. A validation computes the average by `AVERAGING`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # the package refuses to step otherwise
        self.train()

    def step(self, closure=None):
        """Update every tensor with a gradient. The tensors of a group with gradients must have equal step counts."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = self.param_groups
        try:
            # ZeRO-3 steps the sub-groups of one group one after another: counts of the group would rise at each of them
            for group in groups:
                stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
                if not stepped:
                    continue
                counted = self.state[stepped[0]]
                momentum = group["momentum"] if "momentum" in group else group["betas"][0]
                averaging = 1 - 1 / momentum
                if (earlier := counted.get(AVERAGING, averaging)) != averaging:
                    # weights of another momentum: to the average, then to this momentum's
                    with torch.no_grad():
                        for tensor in stepped:
                            z = self.state[tensor][Z]
                            tensor.lerp_(z, earlier).lerp_(z, 1 - momentum)
                group.update({key: counted.get(key, self.defaults[key]) for key in COUNTS})
                # the package steps all of `param_groups`
                self.param_groups = [group]
                super().step()
                counts = {key: group[key] for key in COUNTS} | {AVERAGING: averaging}
                for parameter in stepped:
                    self.state[parameter].update(counts)
        finally:
            self.param_groups = groups
        return loss


@cache
def counting_by_tensor(optimizer_class: type) -> type:
    """Return the package's class with counts by tensor; any other class unchanged."""
    if optimizer_class.__module__.partition(".")[0] != "schedulefree":
        return optimizer_class
    # the same name: it is written and shown as the package's class
    return type(optimizer_class.__name__, (_CountsByTensor, optimizer_class), {})


def keep_average(optimizer: torch.optim.Optimizer, settings: Optimizer, finished: Callable[[], int]) -> None:
    """Let an optimizer keep an exponential average of what it steps, as one more state of each tensor.

    The average begins as the weights after the first step. At each step whose number `average_steps` divides, it is
    moved to the weights by 1 - `average_decay` ** `average_steps`. ZeRO cuts it as it cuts the weights.

    finished: returns the steps of the run before this one.
    """
    every = settings.average_steps
    move_all = get_ema_multi_avg_fn(settings.average_decay**every)

    def move(stepping: torch.optim.Optimizer, *_: Any) -> None:
        weights = [weight for group in stepping.param_groups for weight in group["params"]]
        # the step was refused (training/stability.py)
        if all(weight.grad is None for weight in weights):
            return
        averages, moved = [], []
        for weight in weights:
            state = stepping.state[weight] if weight.grad is not None else stepping.state.get(weight, {})
            if AVERAGE in state:
                averages.append(state[AVERAGE])
                moved.append(weight.detach())
            elif state or weight.grad is not None:
                state[AVERAGE] = weight.detach().clone()
        if averages and (finished() + 1) % every == 0:
            move_all(averages, moved, None)

    optimizer.register_step_post_hook(move)
