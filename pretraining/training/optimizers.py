"""Build the recipe's optimizer for the Trainer, and compute the learning rate of every step.

    rate of a group = its peak (`training.learning_rate`, or the group's own in `optimizer`)
                    x muP's factor for its parameters               `build_optimizer`, recipe/optimizer.py
                    x the schedule: warm-up, decay                  transformers' `get_scheduler`
                    x what `budget.ramp.lr_scaling` makes of a step's size
                    x what rollbacks lower (`monitors.spikes.lr_factor`)

The last three are `share_of_peak`. How many steps warm up is `Recipe.warmup_steps`. recipe/training.py checks the names
and keywords of schedules. If a schedule follows the validation loss, it refuses the last two.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel

from pretraining.errors import UserError
from pretraining.extend import named
from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.budget import Progress
from pretraining.recipe.optimizer import Optimizer, Scales, scales_by_name
from pretraining.recipe.training import AVERAGING, Z
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.training.muon import Muon, hidden_matrices
from pretraining.upstream.deepspeed import whole_numel, whole_shape


def choose_optimizer(recipe: Recipe) -> tuple[Callable, dict] | None:
    """Return the Trainer's `optimizer_cls_and_kwargs`; None if `training.optim` alone names the optimizer."""
    if not recipe.own_groups:
        return None
    training = recipe.training
    keywords = {
        "settings": recipe.optimizer,
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
        "scales_of": partial(scales_by_name, model=model_with_defaults(recipe.model), mup=recipe.mup),
    }
    # the Trainer calls the first to get the builder, and the builder with the model
    return (lambda: build_optimizer), keywords


def build_optimizer(
    model: PreTrainedModel,
    settings: Optimizer,
    learning_rate: float,
    weight_decay: float,
    betas: tuple,
    eps: float,
    scales_of: Callable[..., dict[str, Scales]] = lambda names, **_: {},
) -> Muon:
    """Build an optimizer with three kinds of groups.

    The kinds are: embeddings, head and routers; norms and biases, without weight decay; hidden matrices. Each kind is
    one group, or one for each set of factors that `scales_of` finds for its names.
    """
    matrices, tables, vectors = split_parameters(model)

    def chosen(key: str, otherwise: float) -> float:
        given = getattr(settings, key)
        # not `or`: 0 is a value
        return otherwise if given is None else given

    adamw = {"algorithm": "adamw", "betas": betas, "eps": eps}
    is_muon = settings.name == "muon"
    keys = ("momentum", "nesterov", "newton_schulz_steps", "scale")
    matrix_rule = {"algorithm": "muon", **{key: getattr(settings, key) for key in keys}} if is_muon else adamw
    rule = settings.scale if is_muon else "adamw"
    scales = scales_of([*tables, *vectors, *matrices], rule=rule)
    groups = [
        {
            "name": "embeddings and head",
            "params": tables,
            "lr": chosen("embedding_learning_rate", learning_rate),
            "weight_decay": chosen("embedding_weight_decay", weight_decay),
            **adamw,
        },
        {"name": "norms and biases", "params": vectors, "lr": learning_rate, "weight_decay": 0.0, **adamw},
        {
            "name": "hidden matrices",
            "params": matrices,
            "lr": chosen("matrix_learning_rate", learning_rate),
            "weight_decay": chosen("matrix_weight_decay", weight_decay),
            **matrix_rule,
        },
    ]
    layouts = hidden_matrices(model)
    scaled = []
    for group in groups:
        # one for each set of factors; a group all of whose parameters are frozen has no entry
        alike: dict[tuple, list] = {}
        for name, parameter in group["params"].items():
            each = scales.get(name, Scales())
            alike.setdefault((each.rate, each.decay, each.epsilon), []).append(parameter)
        for (rate, decay, epsilon), parameters in alike.items():
            factors = {"lr": rate, "weight_decay": decay, "eps": epsilon}
            scaled_values = {key: group[key] * factor for key, factor in factors.items() if key in group}
            scaled.append({**group, "params": parameters, **scaled_values})
    # Muon also without a group of "muon": it is then AdamW
    return Muon(scaled, {parameter: layouts[name] for name, parameter in matrices.items()})


Named = dict[str, nn.Parameter]


def split_parameters(model: PreTrainedModel) -> tuple[Named, Named, Named]:
    """Return {name: trained parameter}: hidden matrices; embeddings, head and routers; norms and biases."""
    matrices, tables, vectors = {}, {}, {}
    hidden = hidden_matrices(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        dimensions = len(whole_shape(parameter))
        home = matrices if name in hidden else tables if dimensions >= 2 else vectors
        home[name] = parameter
    return matrices, tables, vectors


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
        name = group.get("name") or ("decayed" if group["weight_decay"] else "not decayed")
        algorithm = group.get("algorithm", type(optimizer).__name__.lower())
        lines.append(
            f"{name}: {algorithm}, {len(parameters)} tensors, {numel:,} parameters{precision}, "
            f"learning rate {group['lr']:g}, weight decay {group['weight_decay']:g}"
        )
    return lines


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
                if stepped := [p for p in group["params"] if p.grad is not None]:
                    self._step_group(group, stepped)
        finally:
            self.param_groups = groups
        return loss

    def _step_group(self, group: dict, stepped: list[torch.Tensor]) -> None:
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


@cache
def counting_by_tensor(optimizer_class: type) -> type:
    """Return the package's class with counts by tensor; any other class unchanged."""
    if optimizer_class.__module__.partition(".")[0] != "schedulefree":
        return optimizer_class
    # the same name: it is written and shown as the package's class
    return type(optimizer_class.__name__, (_CountsByTensor, optimizer_class), {})


Schedule = Callable[[float], float]
"""Number of finished steps -> share of the peak rate, as `training.lr_scheduler_type` defines it."""


def share_of_peak(
    schedule: Schedule, finished_steps: int, progress: Progress, counts_tokens: bool, journal: Journal
) -> float:
    """Return the rate of the step after `finished_steps`, as a share of its group's peak: the last three factors."""
    # tokens in units of full steps, so that the schedule's own lengths stay steps
    count = progress.full_steps_at if counts_tokens else progress.schedule_steps_at
    share = schedule(count(finished_steps)) * progress.step_sizes.lr_factor(finished_steps)
    lowered = 1.0
    for row in journal.rollbacks:
        # windows of several rollbacks may overlap: each lowers the rate further
        if row.to_step <= finished_steps < row.to_step + row.lr_steps:
            lowered *= row.lr_factor
    return share * lowered


def follow_run(
    scheduler: LRScheduler, progress: Progress, counts_tokens: bool = False, journal: Journal = NOTHING_HEALED
) -> None:
    """Have the scheduler return `share_of_peak` for every group.

    Raises:
        UserError: the schedule is no function of the step (`reduce_lr_on_plateau`), and something has to change it.
    """
    if isinstance(scheduler, LambdaLR):

        def of_run(schedule: Schedule) -> Schedule:
            # A plain function, because torch writes the attributes of any other callable into checkpoints.
            return lambda step: share_of_peak(schedule, step, progress, counts_tokens, journal)

        scheduler.lr_lambdas = [of_run(schedule) for schedule in scheduler.lr_lambdas]
        return
    # such a scheduler keeps rates of its own, which nothing here may multiply
    changed_by = {
        "budget.warmup_tokens and decay_tokens": (counts_tokens, "leave them out"),
        "budget.ramp.lr_scaling": (progress.step_sizes.lr_scaling != "none", "set it to none"),
        "monitors.spikes.lr_factor": (
            any(row.lr_factor != 1 and row.lr_steps for row in journal.rollbacks),
            "set it to 1",
        ),
    }
    for key, (changes, remedy) in changed_by.items():
        if changes:
            raise UserError(
                f"{key}: cannot change the rate of {type(scheduler).__name__}; {remedy}, or choose another "
                "training.lr_scheduler_type"
            )


def own_schedule(recipe: Recipe, num_steps: int) -> Schedule:
    """Return the extension's schedule that the recipe names; `UserError` if its share at step 0 is no number."""
    name, keywords = recipe.training.lr_scheduler_type, recipe.training_keywords.lr_scheduler_kwargs or {}
    lengths = {"num_steps": num_steps, "warmup_steps": recipe.warmup_steps(num_steps)}
    function = named("schedule", name)
    first = function(0, **lengths, **keywords)
    if isinstance(first, bool) or not isinstance(first, int | float):
        what = f"{name} must return a share of the peak, a number, and returned {type(first).__name__}"
        raise UserError(f"training.lr_scheduler_type: {what}")
    return lambda step: function(step, **lengths, **keywords)
