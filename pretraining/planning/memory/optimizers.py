"""What an optimizer keeps for the weights that it steps, beside their fp32 masters: known from the recipe alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pretraining.planning.memory.precision import FP32
from pretraining.planning.memory.tensors import EMBEDDING, HIDDEN, Tensor
from pretraining.recipe import Recipe
from pretraining.recipe.training import DEFAULT_OPTIM
from pretraining.refusals import own_groups

BLOCK, SMALLEST_IN_8_BIT = 256, 4096
"""Elements that share a scale, and those from which on a tensor is kept in 8 bit (bitsandbytes 0.50, optimizer.py)."""
FAMILIES = {
    "schedule_free_sgd": ("schedule-free SGD's sequence", 1),
    "schedule_free": ("schedule-free Adam's states", 2),
    "ademamix": ("AdEMAMix's moments", 3),
    "adafactor": ("Adafactor's factors", 0),
    "adam": ("Adam's moments", 2),
    "lion": ("Lion's momentum", 1),
    "rmsprop": ("RMSprop's mean squares", 1),
    "adagrad": ("Adagrad's sums", 1),
    "sgd": ("SGD's momentum", 0),
}
"""Part of a name of `training.optim` -> what its states are called, how many numbers it keeps for a weight."""


@dataclass(frozen=True)
class OptimizerStates:
    """The states of one optimizer."""

    name: str
    """What the plan calls them."""
    bytes_of: Callable[[Tensor], float]
    """Bytes for a whole tensor."""
    groups: tuple[tuple[str, ...], ...] | None = None
    """Kinds of tensors that share a parameter group; None: the Trainer's two, what decays and the rest."""
    copied: str | None = None
    """The kind of tensors of which a step makes another fp32 copy."""

    def in_groups(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors group by group: ZeRO lays each group end to end before it cuts it."""
        if self.groups is None:
            return [[t for t in tensors if t.decays is decays] for decays in (True, False)]
        return [[t for t in tensors if t.kind in kinds] for kinds in self.groups]


def optimizer_states(recipe: Recipe) -> OptimizerStates:
    """The states of the recipe's optimizer; of one that no family names, Adam's, which are seldom less."""
    if recipe.optimizer["name"] == "muon":
        return MUON
    if own_groups(recipe):
        return replace(ADAM, groups=MUON.groups)
    optim = recipe.training.get("optim", DEFAULT_OPTIM)
    family = next((part for part in FAMILIES if part in optim), "adam")
    name, numbers = FAMILIES[family]
    if family == "adafactor":
        return OptimizerStates(name, _factors)
    if family in ("sgd", "rmsprop"):
        numbers += _extra_buffers(recipe.training.get("optim_args") or "")
    if "8bit" in optim and "torch" not in optim:
        return OptimizerStates(f"8-bit {name}", partial(_in_8_bit, numbers=numbers))
    return OptimizerStates(name, partial(_numbers_each, numbers=numbers))


def _numbers_each(tensor: Tensor, numbers: int) -> float:
    return FP32 * numbers * tensor.numel


def _in_8_bit(tensor: Tensor, numbers: int) -> float:
    """Bytes and the scale of each block; small tensors and embeddings (transformers 5.23, trainer.py) in fp32."""
    if tensor.numel < SMALLEST_IN_8_BIT or tensor.kind == EMBEDDING:
        return _numbers_each(tensor, numbers)
    return numbers * (tensor.numel + FP32 * -(-tensor.numel // BLOCK))


def _factors(tensor: Tensor) -> float:
    """A mean of every row and of every column (Shazeer and Stern 2018); no first moment."""
    return FP32 * tensor.factors


def _muon(tensor: Tensor) -> float:
    """The momentum of a hidden matrix; AdamW's two moments of all others."""
    return _numbers_each(tensor, 1 if tensor.kind == HIDDEN else 2)


def _extra_buffers(optim_args: str) -> int:
    """SGD's and RMSprop's: a momentum above 0, and RMSprop's mean of a centered one, as `training.optim_args` says."""
    given = dict(pair.partition("=")[::2] for pair in optim_args.replace(" ", "").lower().split(","))
    return (given.get("momentum", "0").strip("0.") != "") + (given.get("centered") in ("true", "1", "yes"))


ADAM = OptimizerStates(FAMILIES["adam"][0], partial(_numbers_each, numbers=2))
MUON = OptimizerStates(
    "Muon's and Adam's moments",
    _muon,
    groups=(("embedding", "head", "router"), ("vector",), (HIDDEN,)),
    copied=HIDDEN,
)
