"""Hints for batch size and learning rate by size, tokens and loss, each with its source."""

import math
from dataclasses import dataclass

from pretraining.planning.constants import table


@dataclass(frozen=True)
class Hint:
    """What one source would choose; None where it says nothing."""

    learning_rate: float | None
    batch_tokens: float | None
    source: str


def critical_batch_tokens(loss: float) -> float:
    """Critical batch size in tokens at a training loss: B* / L^(1 / alpha_B), Kaplan et al. 2020, equation 1.4.

    McCandlish et al. 2018 define it, Kaplan et al. fit it on WebText2; `loss` is in nats per token.
    """
    law = table("scaling_laws")["kaplan"]["critical_batch"]
    return law["scale_tokens"] / loss ** (1 / law["exponent"])


def critical_batch_growth(tokens_factor: float) -> float:
    """Growth of the critical batch with `tokens_factor` times the tokens (Zhang et al. 2024), at any size."""
    return tokens_factor ** table("scaling_laws")["zhang"]["exponent"]


def extra_tokens(batch_tokens: float, critical: float) -> float:
    """Tokens needed over those of a tiny batch, 1 + B / B_crit (McCandlish et al. 2018, equation 2.11)."""
    return 1 + batch_tokens / critical


def extra_steps(batch_tokens: float, critical: float) -> float:
    """Steps needed over those of a huge batch, 1 + B_crit / B (McCandlish et al. 2018, equation 2.11)."""
    return 1 + critical / batch_tokens


def step_law(parameters: float, tokens: float) -> Hint:
    """Li et al. 2025 (Step Law), for AdamW; `parameters` without the vocabulary."""
    law = table("scaling_laws")["step_law"]
    rate, batch = law["learning_rate"], law["batch_tokens"]
    return Hint(
        rate["scale"] * parameters ** rate["parameters"] * tokens ** rate["tokens"],
        batch["scale"] * tokens ** batch["tokens"],
        law["source"],
    )


def deepseek(flops: float) -> Hint:
    """DeepSeek LLM (2024), section 3.1, by training FLOPs."""
    law = table("scaling_laws")["deepseek"]
    rate, batch = law["learning_rate"], law["batch_tokens"]
    return Hint(
        rate["scale"] * flops ** rate["exponent"], batch["scale"] * flops ** batch["exponent"], law["source"]
    )


def gpt3(parameters: float) -> Hint:
    """The row of GPT-3's table 2.1 whose size is nearest."""
    law = table("scaling_laws")["gpt3"]
    row = min(law["rows"], key=lambda row: abs(math.log(row["parameters"] / parameters)))
    source = f"{law['source']}, the row of {row['parameters']:.3g} parameters"
    return Hint(row["learning_rate"], row["batch_tokens"], source)


def hints(parameters: float, tokens: float, flops: float) -> dict[str, Hint]:
    """All of them, by name."""
    return {
        "GPT-3's nearest size": gpt3(parameters),
        "Step Law": step_law(parameters, tokens),
        "DeepSeek": deepseek(flops),
    }
