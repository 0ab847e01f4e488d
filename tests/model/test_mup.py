"""muP: the paper's model with its multipliers takes the same steps; what changes does not grow with the width."""

import math
from dataclasses import replace

import pytest
import torch

from pretraining.model.build import build_model
from pretraining.recipe import load_recipe, model_with_defaults
from pretraining.recipe.optimizer import Mup, Optimizer, scales_by_name
from pretraining.recipe.training import Training
from pretraining.training.optimizers import choose_optimizer, describe_groups
from tests.gear.runs import MODELS, TOKENIZER

MUP = ("mup.base_width=16", "mup.base_layers=1")
BASE = Mup(base_width=16, base_layers=1)
IDS = torch.randint(512, (2, 16), generator=torch.Generator().manual_seed(0))
RATE, DECAY, EPSILON = 0.01, 0.1, 1e-3


def our_optimizer(model, section: dict, mup: Mup, rate: float = RATE, **settings) -> torch.optim.Optimizer:
    """As a recipe of this model and base has it."""
    from pretraining.training.optimizers import build_optimizer

    def scales_of(names, rule):
        return scales_by_name(names, model_with_defaults(section), mup, rule)

    training = Training(learning_rate=rate, weight_decay=DECAY, adam_beta2=0.95, adam_epsilon=EPSILON)
    return build_optimizer(model, Optimizer(**settings), training, scales_of)


def train(model, optimizer, steps: int) -> list[torch.Tensor]:
    """The logits before each step, and after the last."""
    found = []
    for _ in range(steps + 1):
        logits = model(input_ids=IDS).logits
        found.append(logits.detach())
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
        optimizer.step()
    return found


def model_of_the_paper(section: dict, arguments, m_n: float, m_l: float, base_head: float | None):
    """Dey et al. 2025, table 1, alpha 1: a standard model, its multipliers as hooks, initial values by the table."""
    model = build_model(section, TOKENIZER, arguments).double()
    is_gpt2 = section["model_type"] == "gpt2"
    for name, module in model.named_modules():
        if name.endswith((".c_proj", ".o_proj", ".down_proj")):  # X + m_L^-1 F(X)
            module.register_forward_hook(lambda _, __, out: out / m_l)
        if name == "lm_head":  # X W^T m_N^-1
            module.register_forward_hook(lambda _, __, out: out / m_n)
        if base_head and name.endswith("self_attn"):  # q k / d, equal to q k / sqrt(d) at the base
            module.scaling = math.sqrt(base_head) / module.head_dim
    with torch.no_grad():
        for name, parameter in in_blocks(model):
            if parameter.ndim == 2:
                parameter.div_(math.sqrt(m_n))
                if is_gpt2 and "c_proj" in name:  # a base of L / m_L layers draws with 1 / sqrt(2 L / m_L)
                    parameter.mul_(math.sqrt(m_l))
    return model


def in_blocks(model) -> list[tuple[str, torch.nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if ".h." in n or ".layers." in n]


def adamw_of_the_paper(model, m_n: float, m_l: float) -> torch.optim.AdamW:
    """The table's rates, decays and epsilons; norms and biases are not decayed."""
    hidden = [p for _, p in in_blocks(model) if p.ndim == 2]
    vectors = [p for _, p in in_blocks(model) if p.ndim < 2]
    known = {id(p) for p in hidden + vectors}
    outside = [p for p in model.parameters() if id(p) not in known]
    tables = [p for p in outside if p.ndim == 2]
    norms = [p for p in outside if p.ndim < 2]
    block = EPSILON / m_n / m_l
    groups = [
        {"params": hidden, "lr": RATE / m_n, "weight_decay": DECAY * m_n, "eps": block},
        {"params": vectors, "lr": RATE, "weight_decay": 0.0, "eps": block},
        {"params": tables, "lr": RATE, "weight_decay": DECAY, "eps": EPSILON / m_n},
        {"params": norms, "lr": RATE, "weight_decay": 0.0, "eps": EPSILON / m_n},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


@pytest.mark.parametrize(
    "name, base_head, tied",
    [("gpt2", None, True), ("gpt2", None, False), ("llama", None, True), ("llama", 4, False)],
)
def test_every_step_is_the_paper_s(name, base_head, tied, arguments):
    """fp64, four times as wide as the base and twice as deep: the paper's multipliers, folded into weights, rates,
    decays and epsilons, give its logits at every step."""
    section = {**MODELS[name], "tie_word_embeddings": tied}
    base = replace(BASE, base_head_size=base_head)
    ours = build_model(section, TOKENIZER, arguments, mup=base).double()  # drawn in fp32, as theirs
    theirs = model_of_the_paper(section, arguments, 4.0, 2.0, base_head)
    expected = train(theirs, adamw_of_the_paper(theirs, 4.0, 2.0), 3)
    found = train(ours, our_optimizer(ours, section, base), 3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert (expected[-1] - expected[0]).abs().max() > 0.01


def change_of_logits(arguments, width: int, base: Mup | None, **settings) -> float:
    """Root mean square of what five steps at one rate change of the logits."""
    torch.manual_seed(0)
    section = {**MODELS["gpt2"], "n_embd": width, "n_head": width // 16}
    mup = base or Mup()
    model = build_model(section, TOKENIZER, arguments, mup=mup)
    logits = train(model, our_optimizer(model, section, mup, rate=0.002, **settings), 5)
    return (logits[-1] - logits[0]).square().mean().sqrt().item()


RULES = {"adamw": {}, "muon": {"name": "muon"}, "muon, spectral": {"name": "muon", "scale": "spectral"}}


@pytest.mark.parametrize("rule", RULES)
def test_what_a_step_changes_does_not_grow_with_the_width(rule, arguments):
    """The coordinate check: four times the width, the same rate. Without muP the change grows."""
    base = Mup(base_width=32)
    narrow = change_of_logits(arguments, 32, base, **RULES[rule])
    wide = change_of_logits(arguments, 128, base, **RULES[rule])
    standard = change_of_logits(arguments, 128, None, **RULES[rule])
    assert 0.5 < wide / narrow < 1.5
    assert standard / narrow > 1.7


def test_groups_are_told_with_their_rates(arguments):
    """At the rate that a place asks for."""
    factory, keywords = choose_optimizer(load_recipe("features/gpt2", ["mup.base_width=32"]))
    model = build_model(load_recipe("features/gpt2").model, TOKENIZER, arguments)
    lines = describe_groups(factory()(model, **keywords))
    assert lines[-1].startswith("hidden matrices: adamw, ") and "rate 0.00125, weight decay 0.4" in lines[-1]
    assert any(line.startswith("norms and biases") and "rate 0.00125" in line for line in lines), "final norm"


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_head_is_no_tied_one(frozen, arguments):
    """The head holds the multiplier of the logits, trained or not; of a tied one the norm before it holds it."""
    section = {**MODELS["llama"], "tie_word_embeddings": False}
    model = build_model(section, TOKENIZER, arguments, mup=BASE)
    model.lm_head.weight.requires_grad_(not frozen)
    for group in our_optimizer(model, section, BASE).param_groups:
        if any(each is model.model.norm.weight for each in group["params"]):
            assert group["lr"] == RATE
