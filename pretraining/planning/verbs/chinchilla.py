"""Compute-optimal size and tokens, over-training, batch and learning rate.

Give a budget of FLOPs, a size, a number of tokens, or a size and tokens to compare with the optimum.
The default is the corrected third approach (Besiroglu et al. 2024); all others stand beside it.
"""

import argparse
from dataclasses import asdict

from pretraining.errors import UserError
from pretraining.planning import scaling_laws as laws
from pretraining.planning.hyperparameters import (
    critical_batch_growth,
    critical_batch_tokens,
    extra_steps,
    extra_tokens,
    hints,
)
from pretraining.planning.quantities import columns, count, facts, short, three_digits
from pretraining.planning.workload import add_workload_arguments, workload_of

EXAMPLES = """  python -m pretraining.planning chinchilla --flops 5.76e23
  python -m pretraining.planning chinchilla --parameters 7b
  python -m pretraining.planning chinchilla --parameters 8b --tokens 15t
  python -m pretraining.planning chinchilla --parameters 13b --inference_tokens 2t
  python -m pretraining.planning chinchilla --recipe 30b --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is given, and how much the model will be used."""
    add_workload_arguments(parser)
    parser.add_argument("--flops", type=count, metavar="C", help="training budget in FLOPs: 1e23")
    parser.add_argument("--inference_tokens", type=count, metavar="D", help="tokens the model will serve")


def answer(options: argparse.Namespace) -> dict:
    """Every approach's optimum for what is given, and what follows for the chosen allocation."""
    given, name = _given(options)
    optima = {approach: _optimum(laws.frontier(approach), given) for approach in laws.approaches()}
    best = optima[laws.DEFAULT]
    has_both = given["parameters"] and given["tokens"]
    chosen = laws.Allocation(given["parameters"], given["tokens"]) if has_both else best
    law = laws.parametric_loss()
    loss = law.loss(chosen.parameters, chosen.tokens)
    return {
        "given": {**given, "name": name},
        "optima": {
            approach: _numbers(each, laws.frontier(approach).source) for approach, each in optima.items()
        },
        "kaplan": _numbers(laws.kaplan_frontier().at_flops(best.flops), laws.kaplan_frontier().source),
        "extrapolates": laws.extrapolates(chosen),
        "chosen": _numbers(chosen, "given" if has_both else laws.DEFAULT),
        "tokens_over_optimum": chosen.tokens / laws.frontier().at_parameters(chosen.parameters).tokens,
        "loss": loss,
        "compute_over_optimum": laws.compute_overhead(law, chosen),
        "with_inference": _inference(law, chosen, loss, options.inference_tokens),
        "critical_batch_tokens": critical_batch_tokens(loss),
        "hints": {source: asdict(hint) for source, hint in _hints(chosen, given).items()},
    }


def _given(options: argparse.Namespace) -> tuple[dict, str]:
    nothing = dict.fromkeys(("flops", "parameters", "without_vocabulary", "tokens"))
    if options.flops:
        if options.recipe or options.parameters or options.tokens or options.set or options.deepspeed:
            raise UserError("--flops stands alone: the size and the tokens follow from it")
        return {**nothing, "flops": options.flops}, f"{options.flops:.3g} FLOPs"
    if options.tokens and not (options.recipe or options.parameters):
        return {**nothing, "tokens": options.tokens}, f"{short(options.tokens)} tokens"
    if not (options.recipe or options.parameters):
        raise UserError("give one of --flops C, --parameters N, --tokens D or --recipe NAME")
    workload = workload_of(options)
    size = workload.size
    given = {
        **nothing,
        "parameters": workload.active,
        "without_vocabulary": size.active - size.embedding - size.parts.head if size else None,
        "tokens": workload.tokens,
    }
    return given, workload.name


def _optimum(frontier: laws.Frontier, given: dict) -> laws.Allocation:
    if given["flops"]:
        return frontier.at_flops(given["flops"])
    if given["parameters"] and given["tokens"]:
        return frontier.at_flops(6 * given["parameters"] * given["tokens"])
    if given["parameters"]:
        return frontier.at_parameters(given["parameters"])
    return frontier.at_tokens(given["tokens"])


def _numbers(allocation: laws.Allocation, source: str) -> dict:
    return {
        "parameters": allocation.parameters,
        "tokens": allocation.tokens,
        "flops": allocation.flops,
        "tokens_per_parameter": allocation.tokens_per_parameter,
        "source": source,
    }


def _inference(
    law: laws.ParametricLoss, chosen: laws.Allocation, loss: float, served: float | None
) -> dict | None:
    """The allocation of the same loss that is cheapest over its life, and what it saves."""
    if not served:
        return None
    best = laws.with_inference(law, loss, served)
    before, after = (each.flops + 2 * each.parameters * served for each in (chosen, best))
    return {
        **_numbers(best, "Sardana et al. 2024, equation 3"),
        "inference_tokens": served,
        "saved": 1 - after / before,
    }


def _hints(chosen: laws.Allocation, given: dict) -> dict:
    return hints(given["without_vocabulary"] or chosen.parameters, chosen.tokens, chosen.flops)


def as_text(answer: dict) -> str:
    """The optima as a table, then what they mean for the allocation."""
    rows = [[name, *_cells(each)] for name, each in answer["optima"].items()]
    rows.append(["Kaplan et al. 2020 (superseded)", *_cells(answer["kaplan"])])
    table = columns(["compute-optimal by", "parameters", "tokens", "FLOPs", "tokens/parameter"], rows)
    chosen, critical = answer["chosen"], answer["critical_batch_tokens"]
    what = f"{short(chosen['parameters'])} parameters on {short(chosen['tokens'])} tokens"
    lines = [
        ("given", answer["given"]["name"]),
        *(
            [("beware", f"far from what was fitted: {answer['extrapolates']}")]
            if answer["extrapolates"]
            else []
        ),
        ("looked at", f"{what}, {three_digits(chosen['tokens_per_parameter'])} per parameter"),
        ("tokens", f"{answer['tokens_over_optimum']:.2f} times those for which that size is optimal"),
        ("predicted loss", f"{answer['loss']:.3f} nats a token (on Chinchilla's data and tokenizer)"),
        ("training compute", f"{answer['compute_over_optimum']:.2f} times the optimum for that loss"),
    ]
    if inference := answer["with_inference"]:
        words = f"{short(inference['parameters'])} parameters on {short(inference['tokens'])} tokens"
        served = short(inference["inference_tokens"])
        lines.append(
            (f"with {served} tokens served", f"{words} reach it for {inference['saved']:.0%} less in all")
        )
    growth = f"twice the tokens raise it {critical_batch_growth(2):.2f} times (Zhang et al. 2024)"
    at_loss = f"{short(critical)} tokens at that loss (Kaplan et al. 2020, equation 1.4)"
    lines.append(("critical batch", f"{at_loss}; {growth}"))
    for name, hint in answer["hints"].items():
        batch = hint["batch_tokens"]
        effect = " and ".join(
            f"{three_digits(times)} x {what}"
            for what, times in (
                ("tokens", extra_tokens(batch, critical)),
                ("steps", extra_steps(batch, critical)),
            )
        )
        lines.append(
            (name, f"learning rate {hint['learning_rate']:.2g}, batch {short(batch)} tokens ({effect})")
        )
    return f"{table}\n\n{facts(lines)}"


def _cells(each: dict) -> list[str]:
    numbers = [short(each["parameters"]), short(each["tokens"]), f"{each['flops']:.2e}"]
    return [*numbers, three_digits(each["tokens_per_parameter"])]
