"""The `optimizer` section, and `mup`: initial values, rates, decay and epsilon follow from a model's width and depth.

CompleteP (Dey et al. 2025, table 1, alpha = 1), which is muP (Yang et al. 2022) in the width and makes depth transfer
too: rates that are best for a narrow and shallow base model are best for this one.

Its multipliers of activations are not here, since an export must be a model of transformers' own. Each of them goes
into the weight behind it, which under Adam is the same method (Yang et al. 2022, lemma J.1): a weight that is c times
as large, with c times the rate, a c-th of the decay and of the epsilon, makes the same steps.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from pretraining.outside.schema import Wrong
from pretraining.recipe.piecewise import check_points, number_or_points
from pretraining.recipe.section import Section, key

FAMILIES = ("gpt2", "llama", "qwen3")
_BLOCK = re.compile(r"\.(h|layers)\.\d+\.")
_LEAVES_A_BRANCH = re.compile(r"\.(c_proj|o_proj|down_proj)\.")
_QUERY = {"llama": re.compile(r"\.q_proj\."), "qwen3": re.compile(r"\.q_norm\.")}
_FINAL_NORM = re.compile(r"(\.ln_f\.|^model\.norm\.)")
HEAD_WEIGHT = "lm_head.weight"
RULES = {"adamw": 1.0, "match_adamw": 0.5, "spectral": 0.0}
"""By which power of the width a hidden matrix' rate falls. Muon's updates have one spectral norm, and that is what
must not grow (Yang et al. 2023): 1 under its scale `spectral`, with the root of the width under `match_adamw`."""


EMBEDDING, HEAD, ROUTER, HIDDEN, VECTOR = "embedding", "head", "router", "hidden", "vector"
"""Kinds of parameters. A tied head is an embedding; hidden matrices map hidden states to hidden states; vectors are
norms and biases."""


AVERAGE = "average"
"""Name of the optimizer's state that is an exponential average of the weights."""

_own = partial(key, default=None, omitted=True)


class SomeParameters(Section):
    """Parameters of a kind, or by their names."""

    keeps_what_is_written = True
    one_of = ("kind", "names")

    kind: Literal["embedding", "head", "router", "hidden", "vector"] | None = _own()
    """hidden: the matrices of the layers; vector: norms and biases; a tied head is an embedding."""
    names: str | None = _own(minLength=1)
    """Parameters by name, * for any characters, as in model.frozen."""

    def matches(self, name: str, kind: str) -> bool:
        return kind == self.kind if self.names is None else fnmatchcase(name, self.names)


class ParameterRow(SomeParameters):
    """What some parameters have of their own, at any stage and degree: of AdamW, or of Muon."""

    learning_rate: float | None = _own(exclusiveMinimum=0)
    """The peak of the schedule."""
    weight_decay: float | list | None = _own(schema=number_or_points(minimum=0))
    """A number, or points (docs/schedules.md). Vectors have 0 unless a row says otherwise."""
    decay_times: Literal["rate", "share", "one"] | None = _own()
    """What a step's decay is multiplied with: rate: the learning rate, as torch does; share: its share of the peak
    (Loshchilov and Hutter 2019); one: nothing."""
    cautious_decay: bool | None = _own()
    """Decay only what the update shrinks too (Chen et al. 2025)."""
    momentum: float | list | None = _own(schema=number_or_points(minimum=0, exclusiveMaximum=1))
    """AdamW's first beta, or Muon's momentum; a number or points."""
    beta2: float | None = _own(minimum=0, exclusiveMaximum=1)
    """AdamW's second beta."""
    epsilon: float | None = _own(exclusiveMinimum=0)
    """AdamW's."""

    @property
    def values(self) -> dict[str, Any]:
        return {name: value for name, value in self.to_dict().items() if name not in self.one_of}


class InitialRow(SomeParameters):
    """How some matrices begin in place of their class's own rule: normal, with mean 0."""

    kind: Literal["embedding", "head", "router", "hidden"] | None = _own()
    """hidden: the matrices of the layers; a tied head is an embedding; norms and biases keep their class's rule."""
    std: float = key(minimum=0)
    """The standard deviation; 0: zeros."""
    over: Literal["layers", "inputs", "spectral"] | None = _own()
    """What std is divided by. layers: sqrt(2 layers), as the outputs of GPT-2's branches; inputs: sqrt(inputs) of the
    matrix; spectral: that, times sqrt(inputs / outputs) if this is above 1 (Yang et al. 2023)."""
    cut: float | None = _own(minimum=0.5)
    """Only values within so many std are drawn."""

    def deviation(self, layers: int, outputs: int, inputs: int) -> float:
        """Return std divided by what `over` names, for a matrix of these sides."""
        spectral = math.sqrt(inputs * max(1.0, inputs / outputs))
        divisors = {"layers": math.sqrt(2 * layers), "inputs": math.sqrt(inputs), "spectral": spectral}
        return self.std / divisors.get(self.over or "", 1.0)


MUON = ("name=muon",)
_TRIPLE = {"type": "array", "minItems": 3, "items": {"type": "number"}}
_TRIPLES = {"type": "array", "items": _TRIPLE, "minItems": 1}
_POLYNOMIALS = {"anyOf": [{"enum": ["steep", "converging", "polar_express"]}, _TRIPLES]}


class Optimizer(Section):
    """Muon, and rates by kind of parameter; training.optim has the other optimizers by name."""

    name: Literal["adamw", "muon"] = key(default="adamw")
    """muon: hidden matrices by Muon, embeddings, head, routers, norms and biases by AdamW; adamw: training.optim."""
    matrix_learning_rate: float | None = key(default=None, exclusiveMinimum=0)
    """Of the hidden matrices; null: training.learning_rate."""
    matrix_weight_decay: float | None = key(default=None, minimum=0)
    """Of the hidden matrices; null: training.weight_decay."""
    embedding_learning_rate: float | None = key(default=None, exclusiveMinimum=0)
    """Of embeddings, head and routers; null: training.learning_rate."""
    embedding_weight_decay: float | None = key(default=None, minimum=0)
    """Of embeddings, head and routers; null: training.weight_decay."""
    groups: list[ParameterRow] = key(default=[])
    """Rates, decay, betas and epsilon of some parameters, in place of those of training. Of several rows that match a
    parameter the last one counts, value by value."""
    momentum: float = key(default=0.95, only_with=MUON, minimum=0, exclusiveMaximum=1)
    """Muon's."""
    nesterov: bool = key(default=True, only_with=MUON)
    """Muon orthogonalises the momentum one step ahead."""
    polynomial: str | list = key(default="steep", only_with=MUON, schema=_POLYNOMIALS)
    """Of the orthogonalisation: steep (Jordan 2024: near 1 in 5 steps), converging (to 1 in 12), polar_express (Amsel
    et al. 2025), or the [[a, b, c], ...] of a x + b x^3 + c x^5, one a step, the last one repeated."""
    neuron_beta2: float | None = key(default=None, only_with=MUON, minimum=0, exclusiveMaximum=1)
    """NorMuon's (Li et al. 2025); null: plain Muon."""
    per_head: bool = key(default=False, only_with=MUON)
    """Queries, keys and values are orthogonalised head by head."""
    newton_schulz_steps: int = key(default=5, only_with=MUON, minimum=1, maximum=20)
    """Iterations of the orthogonalisation."""
    scale: Literal["match_adamw", "spectral"] = key(default="match_adamw", only_with=MUON)
    """Size of Muon's update: match_adamw takes AdamW's learning rates (0.2 sqrt(max(outputs, inputs))), spectral
    Jordan's (sqrt(max(1, outputs / inputs)))."""
    clip_value: float | None = key(default=None, exclusiveMinimum=0)
    """Every gradient between minus and plus this, after training.max_grad_norm."""
    adaptive_clip: float | None = key(default=None, exclusiveMinimum=0)
    """No unit's gradient longer than this times its weights (AGC; 0.01 in its paper)."""
    average_decay: float | None = key(default=None, exclusiveMinimum=0, exclusiveMaximum=1)
    """What a step leaves of an exponential average of the weights, which is kept, saved and validated beside them, as
    eval/average_loss; null: none."""
    average_steps: int = key(default=1, only_with=("average_decay",), minimum=1)
    """The average takes the weights every so many steps, with the decay of all of them."""
    qk_clip: float | None = key(default=None, exclusiveMinimum=0)
    """After each step the queries and keys of a head shrink whose largest logit in it was above this, so that it would
    have been this (MuonClip, Kimi Team 2025; 100 there)."""

    @property
    def rows(self) -> list[ParameterRow]:
        """The table, after what the keys of two kinds say."""
        keys = ("learning_rate", "weight_decay")
        names = {HIDDEN: "matrix", EMBEDDING: "embedding", HEAD: "embedding", ROUTER: "embedding"}
        given = {kind: {key: getattr(self, f"{name}_{key}") for key in keys} for kind, name in names.items()}
        return [*(ParameterRow(kind=kind, **values) for kind, values in given.items()), *self.groups]

    def check_course(self, num_steps: float) -> Wrong:
        """Own coefficients are three a step, and the points of the table fit into a run of `num_steps`."""
        for triple in self.polynomial if isinstance(self.polynomial, list) else ():
            if len(triple) != 3:
                yield "optimizer.polynomial", f"has {triple}; write the three coefficients of x, x^3 and x^5"
        for number, row in enumerate(self.groups):
            for name, below in (("weight_decay", math.inf), ("momentum", 1)):
                at = f"optimizer.groups.{number}.{name}"
                yield from check_points(getattr(row, name), at, num_steps, below)


class Mup(Section):
    """Rates tuned on a smaller model (muP; CompleteP in the depth): initial values, rates, decay and
    epsilon follow from how much larger this one is."""

    base_width: int | None = key(default=None, minimum=1)
    """Width of the model that training.learning_rate was tuned for; null: no muP. All other widths grow in proportion,
    the heads in number."""
    base_layers: int | None = key(default=None, minimum=1)
    """Its layers; null: as many as here."""
    base_head_size: int | None = key(default=None, minimum=1)
    """Size of its heads, for attention that is divided by the size and not its root; null: as here."""

    def check_together(self, at: str) -> Wrong:
        """The rest of a base needs its width."""
        for name in ("base_layers", "base_head_size"):
            if self.base_width is None and getattr(self, name) is not None:
                yield f"{at}.{name}", f"is set without {at}.base_width; set that too, or leave both out"


@dataclass(frozen=True)
class Scales:
    """Factors of one parameter's initial values, learning rate, weight decay and epsilon."""

    initial: float = 1.0
    rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0

    def times(self, c: float) -> "Scales":
        """With a multiplier `c` of the activations moved into the weight."""
        return Scales(self.initial * c, self.rate * c, self.decay / c, self.epsilon / c)


def shape_of(model: dict) -> tuple[int, int, int]:
    """(width, layers, size of a head) of a model section with its class's defaults."""
    if model["model_type"] == "gpt2":
        return model["n_embd"], model["n_layer"], model["n_embd"] // model["n_head"]
    width, heads = model["hidden_size"], model["num_attention_heads"]
    return width, model["num_hidden_layers"], model.get("head_dim") or width // heads


def scales_by_name(names: Iterable[str], model: dict, mup: Mup, rule: str = "adamw") -> dict[str, Scales]:
    """{parameter name: Scales}; empty where the recipe names no base.

    model: the section with its class's defaults. names: of all parameters, the tied head not among them.
    rule: of the hidden matrices, a key of RULES.
    """
    if mup.base_width is None:
        return {}
    names, kind = list(names), model["model_type"]
    is_tied = HEAD_WEIGHT not in names
    own_width, layers, head_size = shape_of(model)
    # how many times as wide and as deep as its base the model is
    width, depth = own_width / mup.base_width, layers / (mup.base_layers or layers)
    # attention divides by the root of a head's size; this brings it to the size itself
    queries = ((mup.base_head_size or head_size) / head_size) ** 0.5

    def scales_of(name: str) -> Scales:
        if not _BLOCK.search(name):
            scales = Scales(epsilon=1 / width)
            # a tied head is the embedding, so the norm before it takes the multiplier
            holds_output_multiplier = _FINAL_NORM.search(name) if is_tied else name == HEAD_WEIGHT
            return scales.times(1 / width) if holds_output_multiplier else scales
        epsilon = 1 / (width * depth)
        scales = Scales(epsilon=epsilon)
        # norms are vectors; biases do not end with .weight
        if name.endswith(".weight") and not re.search(r"(ln_\d|norm)\.weight$", name):
            power = RULES[rule]
            scales = Scales(width**-0.5, width**-power, width**power, epsilon)
        if _LEAVES_A_BRANCH.search(name):
            scales = scales.times(1 / depth)
            # Drawn with 1 / sqrt(2 layers) already, as the base's are.
            if kind == "gpt2":
                scales = Scales(scales.initial * depth**0.5, scales.rate, scales.decay, scales.epsilon)
        if queries != 1 and _QUERY[kind].search(name):
            scales = scales.times(queries)
        return scales

    return {name: scales_of(name) for name in names}


def check_mup(mup: Mup, model: dict, draw: Iterable[InitialRow]) -> Wrong:
    """This model has a rule from the base. model: the section with its class's defaults."""
    kind = model["model_type"]
    if mup.base_width is None:
        return
    for number, row in enumerate(draw):
        if row.over:
            what = f"is {row.over}, and mup scales std from the base's model to this one; write the base's std alone"
            yield f"model.draw.{number}.over", what
        if mup.base_layers is not None:
            what = "scales what the class draws with its layers, and model.draw has values of its own"
            yield "mup.base_layers", f"{what}; leave one of them out"
    if kind not in FAMILIES:
        what = f"is set, but muP has no rule here for the routers and experts of {kind}"
        yield "mup.base_width", f"{what}; leave it out, or choose {', '.join(FAMILIES)}"
    size = shape_of(model)[2]
    if kind == "gpt2" and mup.base_head_size not in (None, size):
        what = f"is {mup.base_head_size}, and heads here have {size}; gpt2 keeps queries, keys and values in one matrix"
        yield "mup.base_head_size", f"{what} of one rate: grow by more heads of the same size"
