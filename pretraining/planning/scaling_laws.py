"""Scaling laws: the best size and tokens for a budget, what over-training costs, what inference changes."""

import math
from dataclasses import dataclass, fields

from pretraining.planning.constants import table

PF_DAY = 8.64e19
"""FLOPs of one petaFLOP/s for a day."""
CORRECTED = "approach 3 (corrected)"
DEFAULT = CORRECTED
FAR = 100
"""Times beyond the fitted runs at which a law says little."""


@dataclass(frozen=True)
class Allocation:
    """A size and the tokens to train it on."""

    parameters: float
    tokens: float

    @property
    def flops(self) -> float:
        """C = 6 N D (Kaplan et al. 2020, section 2.1)."""
        return 6 * self.parameters * self.tokens

    @property
    def tokens_per_parameter(self) -> float:
        """D / N."""
        return self.tokens / self.parameters


@dataclass(frozen=True)
class Frontier:
    """The compute-optimal sizes, N = scale x C^exponent, with D = C / 6N."""

    scale: float
    exponent: float
    source: str

    def at_flops(self, flops: float) -> Allocation:
        """The optimal allocation of a budget of FLOPs."""
        parameters = self.scale * flops**self.exponent
        return Allocation(parameters, flops / (6 * parameters))

    def at_parameters(self, parameters: float) -> Allocation:
        """The allocation for which a model of this size is the optimum."""
        flops = (parameters / self.scale) ** (1 / self.exponent)
        return Allocation(parameters, flops / (6 * parameters))

    def at_tokens(self, tokens: float) -> Allocation:
        """The allocation for which this many tokens are the optimum: C^(1 - exponent) = 6 scale D."""
        flops = (6 * self.scale * tokens) ** (1 / (1 - self.exponent))
        return Allocation(flops / (6 * tokens), tokens)


@dataclass(frozen=True)
class ParametricLoss:
    """L(N, D) = E + A / N^alpha + B / D^beta, nats per token (Hoffmann et al. 2022, equation 2)."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        """Predicted loss of a model of this size after this many tokens, each seen once."""
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def tokens_for(self, loss: float, parameters: float) -> float:
        """Tokens that bring a model of this size to `loss`; infinite where it is too small for it."""
        left = loss - self.E - self.A * parameters**-self.alpha
        return (self.B / left) ** (1 / self.beta) if left > 0 else math.inf

    def frontier(self) -> Frontier:
        """The minimum of L at fixed 6 N D (Hoffmann et al. 2022, equation 4)."""
        exponent = self.beta / (self.alpha + self.beta)
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return Frontier(ratio * 6**-exponent, exponent, self.source)


def parametric_loss(name: str = "besiroglu") -> ParametricLoss:
    """A fit of tables/scaling_laws.json: besiroglu (the correction), hoffmann_printed, _unrounded, _sardana."""
    law = table("scaling_laws")["parametric"][name]
    return ParametricLoss(**{field.name: law[field.name] for field in fields(ParametricLoss)})


def frontier(approach: str = DEFAULT) -> Frontier:
    """The frontier of an approach of Hoffmann et al. 2022, or of the correction of their third.

    The paper prints exponents to two digits and no coefficients, but for each approach a table of sizes:
    the power law through that table (least squares in logarithms) is the approach's frontier.
    """
    if approach == CORRECTED:
        return parametric_loss("besiroglu").frontier()
    rows = table("scaling_laws")["frontiers"][approach]
    scale, exponent = _power_law(rows["flops"], rows["parameters"])
    return Frontier(scale, exponent, rows["source"])


def approaches() -> list[str]:
    """Names that `frontier` takes."""
    return [*table("scaling_laws")["frontiers"], CORRECTED]


def kaplan_frontier() -> Frontier:
    """Kaplan et al. 2020, table 6, in non-embedding parameters; superseded by Hoffmann et al. 2022."""
    law = table("scaling_laws")["kaplan"]
    scale, exponent = law["parameters"]["scale"], law["parameters"]["exponent"]
    return Frontier(scale * PF_DAY**-exponent, exponent, law["source"])


def extrapolates(given: Allocation) -> str | None:
    """What the laws were fitted on, where the allocation is far from it."""
    fitted = table("scaling_laws")["fitted_on"]
    pairs = ((given.parameters, fitted["parameters"]), (given.tokens, fitted["tokens"]))
    near = all(low / FAR <= value <= high * FAR for value, (low, high) in pairs)
    return None if near else fitted["source"]


def compute_overhead(law: ParametricLoss, given: Allocation) -> float:
    """Training FLOPs over those of the compute-optimal model with the same predicted loss; 1 is optimal."""
    target = law.loss(given.parameters, given.tokens)
    best = law.frontier()
    low, high = 1e6, 1e40
    for _ in range(200):
        middle = math.sqrt(low * high)
        allocation = best.at_flops(middle)
        if law.loss(allocation.parameters, allocation.tokens) > target:
            low = middle
        else:
            high = middle
    return given.flops / high


def with_inference(law: ParametricLoss, loss: float, inference_tokens: float) -> Allocation:
    """The allocation that reaches `loss` with the fewest FLOPs over training and inference together.

    Sardana et al. 2024, equation 3: minimise 6 N D + 2 N D_inf subject to L(N, D) = loss. The curve over
    log N has one minimum: golden-section search.
    """

    def lifetime(log_parameters: float) -> float:
        parameters = math.exp(log_parameters)
        return 6 * parameters * law.tokens_for(loss, parameters) + 2 * parameters * inference_tokens

    smallest = ((loss - law.E) / law.A) ** (-1 / law.alpha)
    low, high = math.log(smallest) + 1e-9, math.log(smallest) + math.log(1e6)
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if lifetime(left) < lifetime(right) else (left, high)
    parameters = math.exp((low + high) / 2)
    return Allocation(parameters, law.tokens_for(loss, parameters))


def _power_law(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Scale and exponent of y = scale x^exponent, by least squares in logarithms."""
    log_x, log_y = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_x, mean_y = sum(log_x) / len(xs), sum(log_y) / len(ys)
    products = sum((x - mean_x) * (y - mean_y) for x, y in zip(log_x, log_y, strict=True))
    exponent = products / sum((x - mean_x) ** 2 for x in log_x)
    return math.exp(mean_y - exponent * mean_x), exponent
