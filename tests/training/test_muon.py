"""Muon: equal to the method as its papers write it, and the same curve wherever ZeRO cuts the matrices."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pretraining.checkpoints.export import reshard
from pretraining.checkpoints.shard_files import CheckpointReader
from pretraining.ds_config import DS_CONFIGS
from pretraining.recipe import load_recipe
from pretraining.recipe.optimizer import EMBEDDING, HEAD, HIDDEN, ROUTER, VECTOR, Optimizer
from pretraining.recipe.training import Training
from pretraining.training import muon
from pretraining.training.muon import (
    POLAR_EXPRESS,
    POLYNOMIALS,
    MatrixFragment,
    orthogonalize,
    plan_rounds,
)
from pretraining.training.optimizers import build_optimizer, choose_optimizer, kinds_of
from tests.gear.runs import GPT_OSS, MODELS, execute
from tests.training.test_curve import FP32, SHORT, assert_one_curve

MUON = ("optimizer.name=muon",)
OF_TYPE = {**MODELS, "gpt_oss": GPT_OSS}
TRAINING = Training(learning_rate=0.01, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95)


TABLE = [
    {"kind": "embedding", "learning_rate": 0.02, "weight_decay": 0.3, "momentum": [[0, 0.7], [5, 0.9]]},
    {"kind": "vector", "weight_decay": 0.2, "decay_times": "share"},
    {"names": "*attn*weight", "learning_rate": 0.004, "beta2": 0.9, "epsilon": 1e-4},
    {"names": "*c_proj*", "weight_decay": [[0, 0.02], ["end", 0, "cosine"]], "decay_times": "one"},
]
CAUTIOUS = {"names": "*", "cautious_decay": True}


def table(rows: list[dict]) -> str:
    return f"optimizer.groups={json.dumps(rows)}"


FLAGS = (
    *MUON,
    "optimizer.polynomial=polar_express",
    "optimizer.neuron_beta2=0.95",
    "optimizer.per_head=true",
)
EVERY_FLAG = (*FLAGS, table([*TABLE, CAUTIOUS]))
"""Every flag at once, over values that groups of parameters have of their own."""


def of_kinds(model, *kinds: str) -> dict[str, torch.nn.Parameter]:
    """{name: parameter} of these kinds."""
    return {name: model.get_parameter(name) for name, kind in kinds_of(model).items() if kind in kinds}


def built(name: str, **more) -> torch.nn.Module:
    special = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**OF_TYPE[name], **special, **more})
    ).double()


def draw_gradients(seed: int, *models: torch.nn.Module) -> None:
    """The same for each."""
    for model in models:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)


STEEP = [(3.4445, -4.7750, 2.0315)] * 5
OWN = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)]


def polynomials_of_the_papers(name: str, steps: int) -> list[tuple[float, float, float]]:
    """Jordan 2024; modded-nanogpt's track 3; Amsel et al. 2025, algorithm 1, whose margin is in all but the last."""
    if name != "polar_express":
        return (STEEP if name == "steep" else [(2.0, -1.5, 0.5)]) * steps
    *many, last = POLAR_EXPRESS
    return ([(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in many] + [last] * steps)[:steps]


def newton_schulz_of_the_paper(gradient: torch.Tensor, triples=STEEP, margin: float = 1.0) -> torch.Tensor:
    """Jordan 2024, the listing, in fp64 and for one matrix; the norm is a little larger in Amsel et al. 2025."""
    x = gradient / (gradient.norm() * margin)
    if len(x) > len(x[0]):
        x = x.T
    for a, b, c in triples:
        power = x @ x.T
        x = a * x + (b * power + c * power @ power) @ x
    return x.T if len(gradient) > len(gradient[0]) else x


@pytest.mark.parametrize(
    "name, steps", [("steep", 5), ("converging", 12), ("polar_express", 5), ("polar_express", 10)]
)
def test_polynomials_are_the_papers(name, steps):
    """Those that converge bring every singular value above a thousandth of the largest to 1; zeros stay finite."""
    torch.manual_seed(0)
    matrix = torch.randn(1, 24, 40, dtype=torch.float64)
    margin = 1.01 if name == "polar_express" else 1.0
    expected = newton_schulz_of_the_paper(matrix[0], polynomials_of_the_papers(name, steps)[:steps], margin)
    of_name = POLYNOMIALS[name]
    found = orthogonalize(matrix, [*of_name, *[of_name[-1]] * steps][:steps])[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    if steps >= 10:
        assert (torch.linalg.svdvals(found) - 1).abs().max() < 1e-4
    assert not torch.isnan(orthogonalize(torch.zeros(1, 4, 4), of_name)).any()


def is_transposed(name: str, parameter: torch.Tensor) -> bool:
    """Whether it is [inputs, outputs], as GPT-2's, and gpt_oss's experts, whose hidden states are 64 wide."""
    hidden = 1 if "gate_up" in name else 2
    return ".h." in name or (parameter.ndim == 3 and parameter.shape[hidden] == 64)


def matrices_of(
    name: str, parameter: torch.Tensor, per_head: bool = False
) -> list[tuple[torch.Tensor, int, int]]:
    """(a view, outputs, inputs) of each matrix that a parameter holds, by its name; the models have heads of 16."""
    if name.endswith("c_attn.weight"):
        return [
            (part, part.shape[1], part.shape[0]) for part in parameter.chunk(12 if per_head else 3, dim=1)
        ]
    if per_head and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return [(head, *head.shape) for head in parameter.split(16)]
    if ".h." in name:
        return [(parameter, parameter.shape[1], parameter.shape[0])]
    if parameter.ndim == 3 and is_transposed(name, parameter):
        turns = 2 if "gate_up" in name else 1
        parts = [expert[:, turn::turns] for expert in parameter for turn in range(turns)]
        return [(part, part.shape[1], part.shape[0]) for part in parts]
    if name.endswith("gate_up_proj"):
        halves = [half for expert in parameter for half in expert.chunk(2, dim=0)]
        return [(half, *half.shape) for half in halves]
    experts = list(parameter) if parameter.ndim == 3 else [parameter]
    return [(expert, *expert.shape) for expert in experts]


@torch.no_grad()
def step_of_the_papers(model, kept: dict, rate: float, decay: float, settings: dict) -> None:
    """Muon of Jordan 2024 with Nesterov momentum, decayed and scaled as in Liu et al. 2025, matrix by matrix; NorMuon
    (Li et al. 2025, algorithm 1) and cautious decay (Chen et al. 2025) if they are asked for."""
    triples = settings.get("polynomial", "steep")
    steps, margin = settings.get("newton_schulz_steps", 5), 1.01 if triples == "polar_express" else 1.0
    triples = polynomials_of_the_papers(triples, steps)[:steps] if isinstance(triples, str) else triples
    beta2, per_head = settings.get("neuron_beta2"), settings.get("per_head", False)
    for name, parameter in of_kinds(model, HIDDEN).items():
        gradient = parameter.grad
        kept[name] = 0.95 * kept.get(name, torch.zeros_like(gradient)) + gradient
        # a copy: the views of it below become the update
        update = (gradient + 0.95 * kept[name]).clone()
        for number, (matrix, outputs, inputs) in enumerate(matrices_of(name, update, per_head)):
            size = 0.2 * math.sqrt(max(outputs, inputs))
            if settings.get("scale") == "spectral":
                size = math.sqrt(max(1, outputs / inputs))
            whole = newton_schulz_of_the_paper(matrix, triples, margin)
            if beta2 is not None:
                neurons = 0 if is_transposed(name, parameter) else 1
                mean = whole.square().mean(neurons, keepdim=True)
                moment = beta2 * kept.get((name, number), 0) + (1 - beta2) * mean
                kept[name, number] = moment
                whole = whole / moment.sqrt()
                # with match_adamw this is 0.2 sqrt(outputs inputs) / |O|
                size *= math.sqrt(min(outputs, inputs)) / whole.norm()
            matrix.copy_(size * whole)
        decayed = update * parameter >= 0 if settings.get("cautious") else 1.0
        parameter.sub_(rate * (update + decay * decayed * parameter))


VARIANTS = {
    "match_adamw": {},
    "spectral": {"scale": "spectral"},
    "polar express": {"polynomial": "polar_express", "newton_schulz_steps": 6},
    "coefficients of one's own": {"polynomial": OWN, "newton_schulz_steps": 3},
    "NorMuon": {"neuron_beta2": 0.95},
    "by head": {"per_head": True, "polynomial": "converging", "newton_schulz_steps": 12, "scale": "spectral"},
    "cautious": {"cautious": True, "neuron_beta2": 0.9, "per_head": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OF_TYPE)
def test_three_steps_are_those_of_the_papers(name, variant):
    """fp64: GPT-2's transposed projections with queries, keys and values apart, every expert's halves apart, those of
    gpt_oss column by column; the rest
    by torch's own AdamW with its own rates."""
    ours, theirs, chosen = built(name), built(name), VARIANTS[variant]
    rates = {"matrix_learning_rate": 0.02, "embedding_learning_rate": 0.005}
    decays = {"matrix_weight_decay": 0.3, "embedding_weight_decay": 0.0}
    keys = {key: value for key, value in chosen.items() if key != "cautious"}
    cautious = [{"names": "*", "cautious_decay": True}] if "cautious" in chosen else []
    settings = Optimizer.of({"name": "muon", **keys, **rates, **decays, "groups": cautious})
    optimizer = build_optimizer(ours, settings, TRAINING)
    tables, vectors = of_kinds(theirs, EMBEDDING, HEAD, ROUTER), of_kinds(theirs, VECTOR)
    groups = [{"params": [*tables.values()], "lr": 0.005}, {"params": [*vectors.values()], "lr": 0.01}]
    adamw, kept = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0), {}
    for step in range(3):
        draw_gradients(step, ours, theirs)
        optimizer.step()
        adamw.step()
        step_of_the_papers(theirs, kept, 0.02, 0.3, chosen)
    # NorMuon's moments are fp32
    rtol, atol = (1e-4, 1e-7) if "neuron_beta2" in chosen else (1e-9, 1e-12)
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=name)


def test_adamw_s_decay_can_be_cautious_too():
    """Chen et al. 2025: x - lr (u + decay [u x >= 0] x), whatever the decay is multiplied with."""
    ours, theirs = built("gpt2"), built("gpt2")
    rows = [{"names": "*", "cautious_decay": True, "weight_decay": 0.3, "decay_times": "one"}]
    optimizer = build_optimizer(ours, Optimizer.of({"groups": rows}), TRAINING)
    adam = torch.optim.Adam(theirs.parameters(), 0.01, (0.9, 0.95), 1e-8)
    for step in range(3):
        draw_gradients(step, ours, theirs)
        before = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
        adam.step()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                old = before[name]
                parameter.sub_(0.3 * old * ((old - parameter) * old >= 0))
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=name)


CUTS = {
    "whole parameters everywhere": lambda rank, numels: [(p, 0, n) for p, n in enumerate(numels)],
    "a slice of each": lambda rank, numels: [
        (p, min(n, rank * -(-n // 3)), max(0, min(-(-n // 3), n - rank * -(-n // 3))))
        for p, n in enumerate(numels)
    ],
    "one slice of all": lambda rank, numels: contiguous(rank, numels),
}


def contiguous(rank: int, numels: list[int]) -> list[tuple[int, int, int]]:
    size, begin, found = -(-sum(numels) // 3), 0, []
    for parameter, numel in enumerate(numels):
        first, last = max(begin, rank * size), min(begin + numel, (rank + 1) * size)
        if first < last:
            found.append((parameter, first - begin, last - first))
        begin += numel
    return found


@pytest.mark.parametrize("cut", CUTS)
def test_every_matrix_comes_together_on_one_rank_and_goes_back(monkeypatch, cut):
    """Three ranks simulated step by step: what is worked on is the whole parameter, once, and each element returns."""

    numels, world_size = [12, 35, 6, 30, 20, 1], 3
    whole = [torch.randn(n, dtype=torch.float64) for n in numels]
    local, tensors = [], []
    for rank in range(world_size):
        fragments, offset = [], 0
        for parameter, start, numel in CUTS[cut](rank, numels):
            fragments.append(MatrixFragment(parameter, start, 0, offset, numel))
            offset += numel
        fragments = [fragment for fragment in fragments if fragment.numel]
        local.append(fragments)
        tensors.append([torch.cat([whole[f.parameter][f.start : f.start + f.numel] for f in fragments])])

    place = SimpleNamespace(rank=0)
    monkeypatch.setattr(muon, "rank_and_world_size", lambda: (place.rank, world_size))
    monkeypatch.setattr(muon, "gather_from_ranks", lambda _: [list(map(tuple, f)) for f in local])
    rounds = []
    for place.rank in range(world_size):
        rounds.append(plan_rounds(local[place.rank], dict(enumerate(numels)), round_numel=40))
    worked_on = [p for each in rounds for one in each for p in one.owned]
    assert sorted(worked_on) == list(range(len(numels)))
    assert len({len(each) for each in rounds}) == 1 and len(rounds[0]) > 1
    for one in zip(*rounds, strict=True):
        for sender in range(world_size):
            for receiver in range(world_size):
                assert one[sender].given[receiver] == one[receiver].taken[sender]
                assert one[sender].handed_back[receiver] == one[receiver].received_back[sender]
        for each in one:
            for parameter, numel in each.owned.items():
                assert numel == numels[parameter]
                got = sorted((f.start, f.numel) for fs in each.taken for f in fs if f.parameter == parameter)
                assert [start for start, _ in got] == [sum(n for _, n in got[:i]) for i in range(len(got))]
                assert sum(n for _, n in got) == numel
    returned = [f for each in rounds for one in each for fs in one.received_back for f in fs]
    assert sorted(returned) == sorted(f for fragments in local for f in fragments)
    if cut != "one slice of all":
        assert all(any(one.owned for one in each) for each in rounds), "the work is shared"


def test_slices_in_another_order_do_not_change_the_curve(workshop):
    """`round_robin_gradients` lays a group's parameters end to end in an order of its own."""
    config = json.loads((DS_CONFIGS / "zero2.json").read_text())
    config["zero_optimization"]["round_robin_gradients"] = True
    (path := workshop.folder / "round_robin.json").write_text(json.dumps(config))
    ours, plain = workshop.run(str(path), settings=(*SHORT, *MUON)), workshop.plain((*SHORT, *MUON))
    assert_one_curve(ours, plain, FP32)


def test_it_goes_on_bit_for_bit_in_its_own_layout_and_refuses_another_table(workshop, tmp_path):
    """Moments of neurons, which every rank keeps, included; `reshard` leaves them as they are. The table of groups is
    the curve's: a changed row is named."""
    whole = workshop.run("zero2", settings=EVERY_FLAG)
    saved = CheckpointReader(whole.folder / "checkpoint-8")
    moments = {
        name: saved.read_whole("neuron_moment", name) for name in saved.parameters if saved.whole_states(name)
    }
    assert len(moments) == 8 and all(bool((each > 0).all()) for each in moments.values())
    reshard(saved.folder, tmp_path / "other", 3)
    again = CheckpointReader(tmp_path / "other")
    assert all(torch.equal(again.read_whole("neuron_moment", name), each) for name, each in moments.items())
    resumed = workshop.continued(whole, tmp_path / "run", "zero2", 2, "forked", EVERY_FLAG)
    assert resumed.losses == whole.losses
    changed = table([{**TABLE[0], "learning_rate": 0.01}, *TABLE[1:], CAUTIOUS])
    refused = execute(workshop.command(tmp_path / "run", settings=(*FLAGS, changed)))
    assert refused.code == 2
    assert "another recipe: optimizer.groups.0.learning_rate: 0.02 there, 0.01 here" in refused.stderr


def test_a_refused_step_changes_nothing():
    """No gradient at all is a step that was taken away (training/stability.py): no momentum and no decay either."""
    model = built("gpt2")
    optimizer = build_optimizer(model, Optimizer(name="muon"), TRAINING)
    draw_gradients(0, model)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_partitions_nobody_told_of_are_not_passed_over():
    """A matrix must never go without its update in silence; a probe of zeros may."""
    model = built("llama")
    optimizer = build_optimizer(model, Optimizer(name="muon"), TRAINING)
    stranger = torch.nn.Parameter(torch.zeros(8))
    optimizer.param_groups[2]["params"] = [stranger]
    stranger.grad = torch.zeros(8)
    optimizer.step()
    assert set(optimizer.state[stranger]) == {"momentum_buffer"}
    stranger.grad = torch.ones(8)
    with pytest.raises(AssertionError, match="not told"):
        optimizer.step()


def test_the_trainer_s_own_optimizer_stays_the_default():
    """AdamW with decayed and undecayed parameters, unless the recipe gives kinds of parameters their own rates."""
    assert choose_optimizer(load_recipe("features/gpt2")) is None
    assert choose_optimizer(load_recipe("features/gpt2", ["training.optim=adafactor"])) is None
    factory, keywords = choose_optimizer(
        load_recipe("features/gpt2", ["optimizer.embedding_learning_rate=0.1"])
    )
    optimizer = factory()(built("llama"), **keywords)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["adamw"] * 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.005, 0.005]
