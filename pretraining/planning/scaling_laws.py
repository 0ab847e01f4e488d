"""Apply scaling laws: the best size and tokens for a budget, the cost of over-training, batch size, learning rate."""

import argparse
import math
from dataclasses import dataclass, fields
from statistics import linear_regression

from pretraining.errors import UserError
from pretraining.planning.constants import table
from pretraining.planning.quantities import count, short, three_digits
from pretraining.planning.setup import Setup, add_setup_arguments, setup_of
from pretraining.runtime.table import Column, facts, write_table

PF_DAY = 8.64e19
"""FLOPs of one petaFLOP/s for a day."""
CORRECTED, KAPLAN = "approach 3 (corrected)", "Kaplan et al. 2020 (superseded)"
FAR = 100
"""Factor beyond the fitted runs from which on a law says little."""

COLUMNS = (
    Column("compute-optimal by", "name"),
    Column("parameters", "parameters", short),
    Column("tokens", "tokens", short),
    Column("FLOPs", "flops", ".2e"),
    Column("tokens/parameter", "tokens_per_parameter", three_digits),
)


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
        return self.tokens / self.parameters

    def to_dict(self, source: str) -> dict:
        numbers = {name: getattr(self, name) for name in ("parameters", "tokens", "flops")}
        return {**numbers, "tokens_per_parameter": self.tokens_per_parameter, "source": source}


@dataclass(frozen=True)
class Frontier:
    """The compute-optimal sizes, N = scale x C^exponent, with D = C / 6N."""

    scale: float
    exponent: float
    source: str

    def at_flops(self, flops: float) -> Allocation:
        parameters = self.scale * flops**self.exponent
        return Allocation(parameters, flops / (6 * parameters))

    def at_parameters(self, parameters: float) -> Allocation:
        # N = scale x C^exponent, solved for C
        flops = (parameters / self.scale) ** (1 / self.exponent)
        return Allocation(parameters, flops / (6 * parameters))

    def at_tokens(self, tokens: float) -> Allocation:
        # D = C / 6N with N = scale x C^exponent, solved for C
        flops = (6 * self.scale * tokens) ** (1 / (1 - self.exponent))
        return Allocation(flops / (6 * tokens), tokens)

    def at(self, given: dict) -> Allocation:
        """Return the optimum for what is given; for a size and tokens, that of the same compute."""
        flops, parameters, tokens = given["flops"], given["parameters"], given["tokens"]
        if flops or (parameters and tokens):
            return self.at_flops(flops or 6 * parameters * tokens)
        return self.at_parameters(parameters) if parameters else self.at_tokens(tokens)


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
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def tokens_for(self, loss: float, parameters: float) -> float:
        """Return the tokens that bring a model of this size to `loss`; infinite if the model is too small for it."""
        # the part of the loss that is left for the tokens to explain
        left = loss - self.E - self.A * parameters**-self.alpha
        return (self.B / left) ** (1 / self.beta) if left > 0 else math.inf

    def frontier(self) -> Frontier:
        """Return the minimum of L at fixed 6 N D (Hoffmann et al. 2022, equation 4)."""
        exponent = self.beta / (self.alpha + self.beta)
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return Frontier(ratio * 6**-exponent, exponent, self.source)


def parametric_loss(name: str = "besiroglu") -> ParametricLoss:
    """Return a fit of tables/scaling_laws.json by its name; besiroglu is the corrected one."""
    law = table("scaling_laws")["parametric"][name]
    return ParametricLoss(**{field.name: law[field.name] for field in fields(ParametricLoss)})


def frontier(approach: str = CORRECTED) -> Frontier:
    """Return the frontier of an approach of Hoffmann et al. 2022, of the correction of their third, or of Kaplan et al.

    It is the power law y = scale x^exponent through the approach's table of sizes, by least squares in logarithms.
    Kaplan et al. 2020, table 6, count non-embedding parameters; Hoffmann et al. supersede them.
    """
    if approach == CORRECTED:
        return parametric_loss("besiroglu").frontier()
    if approach == KAPLAN:
        law = table("scaling_laws")["kaplan"]
        scale, exponent = law["parameters"]["scale"], law["parameters"]["exponent"]
        # the paper counts compute in petaFLOP/s-days
        return Frontier(scale * PF_DAY**-exponent, exponent, law["source"])
    # the others are fitted here: the paper prints their exponents to two digits and no coefficients
    rows = table("scaling_laws")["frontiers"][approach]
    line = linear_regression(*([math.log(value) for value in rows[name]] for name in ("flops", "parameters")))
    return Frontier(math.exp(line.intercept), line.slope, rows["source"])


def compute_overhead(law: ParametricLoss, given: Allocation) -> float:
    """Return training FLOPs, divided by those of the optimal model with the same predicted loss; 1 is optimal."""
    # along the frontier N and D are powers of C, and with them the loss above E: C^-(alpha beta / (alpha + beta))
    one = law.frontier().at_flops(1.0)
    above = law.loss(one.parameters, one.tokens) - law.E, law.loss(given.parameters, given.tokens) - law.E
    return given.flops / (above[0] / above[1]) ** (1 / law.alpha + 1 / law.beta)


def with_inference(law: ParametricLoss, loss: float, inference_tokens: float) -> Allocation:
    """Return the allocation that reaches `loss` with the fewest FLOPs over training and inference together.

    Sardana et al. 2024, equation 3: minimise 6 N D + 2 N D_inf subject to L(N, D) = loss.
    """

    def lifetime(log_parameters: float) -> float:
        parameters = math.exp(log_parameters)
        return 6 * parameters * law.tokens_for(loss, parameters) + 2 * parameters * inference_tokens

    # below this size no number of tokens reaches the loss
    smallest = ((loss - law.E) / law.A) ** (-1 / law.alpha)
    # at the smallest size itself the tokens are infinite
    low, high = math.log(smallest) + 1e-9, math.log(smallest) + math.log(1e6)
    # the curve over log N has one minimum: golden-section search
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if lifetime(left) < lifetime(right) else (left, high)
    parameters = math.exp((low + high) / 2)
    return Allocation(parameters, law.tokens_for(loss, parameters))


def critical_batch_tokens(loss: float) -> float:
    """Return the critical batch size in tokens at a loss: B* / L^(1 / alpha_B), Kaplan et al. 2020, equation 1.4.

    McCandlish et al. 2018 define it, and Kaplan et al. fit it on WebText2. `loss` is in nats per token.
    """
    law = table("scaling_laws")["kaplan"]["critical_batch"]
    return law["scale_tokens"] / loss ** (1 / law["exponent"])


def hints(parameters: float, tokens: float, flops: float) -> dict[str, dict]:
    """Return {"learning_rate", "batch_tokens", "source"} by each source. parameters: without the vocabulary."""
    gpt3, step, deepseek = (table("scaling_laws")[name] for name in ("gpt3", "step_law", "deepseek"))
    # nearest in ratio, not in difference
    row = min(gpt3["rows"], key=lambda row: abs(math.log(row["parameters"] / parameters)))
    nearest = f"{gpt3['source']}, the row of {row['parameters']:.3g} parameters"
    # Li et al. 2025, for AdamW
    rate, batch = step["learning_rate"], step["batch_tokens"]
    step_rate = rate["scale"] * parameters ** rate["parameters"] * tokens ** rate["tokens"]
    names = ("learning_rate", "batch_tokens", "source")
    # DeepSeek LLM (2024), section 3.1, from training FLOPs
    by_flops = [deepseek[name]["scale"] * flops ** deepseek[name]["exponent"] for name in names[:2]]
    given = {
        "GPT-3's nearest size": (row["learning_rate"], row["batch_tokens"], nearest),
        "Step Law": (step_rate, batch["scale"] * tokens ** batch["tokens"], step["source"]),
        "DeepSeek": (*by_flops, deepseek["source"]),
    }
    return {name: dict(zip(names, values, strict=True)) for name, values in given.items()}


class ChinchillaVerb:
    """Compute-optimal size and tokens, over-training, batch and learning rate.

    Give a budget of FLOPs, a size, a number of tokens, or a size and tokens to compare with the optimum.
    The default is the corrected third approach (Besiroglu et al. 2024); all others stand beside it.
    """

    EXAMPLES = """  python -m pretraining.planning chinchilla --flops 5.76e23
  python -m pretraining.planning chinchilla --parameters 7b
  python -m pretraining.planning chinchilla --parameters 8b --tokens 15t
  python -m pretraining.planning chinchilla --parameters 13b --inference_tokens 2t
  python -m pretraining.planning chinchilla --recipe 30b --json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_setup_arguments(parser)
        parser.add_argument("--flops", type=count, metavar="C", help="training budget in FLOPs: 1e23")
        parser.add_argument("--inference_tokens", type=count, metavar="D", help="tokens the model will serve")

    def answer(self, options: argparse.Namespace) -> dict:
        """Return every approach's optimum for what is given, and what follows for the chosen allocation."""
        given, name = _given(options)
        approaches = [*table("scaling_laws")["frontiers"], CORRECTED]
        optima = {approach: frontier(approach).at(given) for approach in approaches}
        best, kaplan = optima[CORRECTED], frontier(KAPLAN)
        has_both = given["parameters"] and given["tokens"]
        chosen = Allocation(given["parameters"], given["tokens"]) if has_both else best
        law, fitted = parametric_loss(), table("scaling_laws")["fitted_on"]
        pairs = ((chosen.parameters, fitted["parameters"]), (chosen.tokens, fitted["tokens"]))
        near = all(low / FAR <= value <= high * FAR for value, (low, high) in pairs)
        loss = law.loss(chosen.parameters, chosen.tokens)
        # a size given by --parameters has no known vocabulary
        size = given["without_vocabulary"] or chosen.parameters
        inference = None
        if served := options.inference_tokens:
            # the same loss, cheapest over training and use; serving a token is a forward pass: 2 N FLOPs
            cheapest = with_inference(law, loss, served)
            before, after = (each.flops + 2 * each.parameters * served for each in (chosen, cheapest))
            inference = cheapest.to_dict("Sardana et al. 2024, equation 3")
            inference |= {"inference_tokens": served, "saved": 1 - after / before}
        return {
            "given": {**given, "name": name},
            "optima": {way: each.to_dict(frontier(way).source) for way, each in optima.items()},
            "kaplan": kaplan.at_flops(best.flops).to_dict(kaplan.source),
            "extrapolates": None if near else fitted["source"],
            "chosen": chosen.to_dict("given" if has_both else CORRECTED),
            "tokens_over_optimum": chosen.tokens / frontier().at_parameters(chosen.parameters).tokens,
            "loss": loss,
            "compute_over_optimum": compute_overhead(law, chosen),
            "with_inference": inference,
            "critical_batch_tokens": critical_batch_tokens(loss),
            "hints": hints(size, chosen.tokens, chosen.flops),
        }

    def as_text(self, answer: dict) -> str:
        optima = {**answer["optima"], KAPLAN: answer["kaplan"]}
        rows = [{"name": name, **each} for name, each in optima.items()]
        chosen, critical = answer["chosen"], answer["critical_batch_tokens"]
        what = f"{short(chosen['parameters'])} parameters on {short(chosen['tokens'])} tokens"
        lines = [
            ("given", answer["given"]["name"]),
            ("looked at", f"{what}, {three_digits(chosen['tokens_per_parameter'])} per parameter"),
            ("tokens", f"{answer['tokens_over_optimum']:.2f} times those for which that size is optimal"),
            ("predicted loss", f"{answer['loss']:.3f} nats a token (on Chinchilla's data and tokenizer)"),
            ("training compute", f"{answer['compute_over_optimum']:.2f} times the optimum for that loss"),
        ]
        if answer["extrapolates"]:
            lines.insert(1, ("beware", f"far from what was fitted: {answer['extrapolates']}"))
        if inference := answer["with_inference"]:
            words = f"{short(inference['parameters'])} parameters on {short(inference['tokens'])} tokens"
            served = f"with {short(inference['inference_tokens'])} tokens served"
            lines.append((served, f"{words} reach it for {inference['saved']:.0%} less in all"))
        # at any size: the model's is no part of the law
        growth = 2 ** table("scaling_laws")["zhang"]["exponent"]
        growth = f"twice the tokens raise it {growth:.2f} times (Zhang et al. 2024)"
        at_loss = f"{short(critical)} tokens at that loss (Kaplan et al. 2020, equation 1.4)"
        lines.append(("critical batch", f"{at_loss}; {growth}"))
        for name, hint in answer["hints"].items():
            batch = hint["batch_tokens"]
            # over those at a tiny, and at a huge batch (McCandlish et al. 2018, equation 2.11)
            tokens, steps = 1 + batch / critical, 1 + critical / batch
            effect = f"{three_digits(tokens)} x tokens and {three_digits(steps)} x steps"
            rate = f"learning rate {hint['learning_rate']:.2g}"
            lines.append((name, f"{rate}, batch {short(batch)} tokens ({effect})"))
        return f"{write_table(COLUMNS, rows)}\n\n{facts(lines)}"


def _given(options: argparse.Namespace) -> tuple[dict, str]:
    nothing = dict.fromkeys(("flops", "parameters", "without_vocabulary", "tokens"))
    if options.flops:
        # a budget with a size would leave nothing to optimise
        others = ("recipe", "model", "parameters", "tokens", "set", "deepspeed")
        if any(getattr(options, name) for name in others):
            raise UserError("--flops stands alone: the size and the tokens follow from it")
        return {**nothing, "flops": options.flops}, f"{options.flops:.3g} FLOPs"
    subject = options.recipe or options.model or options.parameters
    if options.tokens and not subject:
        return {**nothing, "tokens": options.tokens}, f"{short(options.tokens)} tokens"
    if not subject:
        raise UserError("give one of --flops C, --parameters N, --tokens D, --recipe NAME or --model NAME")
    setup = setup_of(options)
    size = setup.size if isinstance(setup, Setup) else None
    given = {
        **nothing,
        # of a mixture, only the parameters that a token passes through
        "parameters": setup.active,
        # Step Law counts without the embedding and the head
        "without_vocabulary": size.active - size.embedding - size.parts["head"] if size else None,
        # nobody has chosen those that --model assumes
        "tokens": options.tokens if options.model else setup.tokens,
    }
    return given, setup.name
