"""Muon: equal to the method as its papers write it, and the same curve wherever ZeRO cuts the matrices."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pretraining.ds_config import DS_CONFIGS
from pretraining.recipe import load_recipe
from pretraining.recipe.optimizer import Optimizer
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.training import muon
from pretraining.training.muon import (
    MatrixFragment,
    hidden_matrices,
    orthogonalize,
    orthogonalize_all,
    plan_rounds,
    work_on_whole,
)
from pretraining.training.optimizers import (
    build_optimizer,
    choose_optimizer,
    describe_groups,
    split_parameters,
)
from tests.gear.finished_data import refusal
from tests.gear.runs import MODELS
from tests.training.test_curve import IN_BF16

MUON = ("optimizer.name=muon",)


def built(name: str, **more) -> torch.nn.Module:
    special = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**MODELS[name], **special, **more})
    ).double()


def newton_schulz_of_the_paper(gradient: torch.Tensor) -> torch.Tensor:
    """Jordan 2024, the listing, in fp64 and for one matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient / gradient.norm()
    if len(x) > len(x[0]):
        x = x.T
    for _ in range(5):
        power = x @ x.T
        x = a * x + (b * power + c * power @ power) @ x
    return x.T if len(gradient) > len(gradient[0]) else x


def test_newton_schulz_is_the_paper_s():
    """Wide, tall and square matrices, batched together or not."""
    torch.manual_seed(0)
    shapes = [(3, 8, 5), (1, 5, 8), (2, 6, 6), (1, 8, 5)]
    batches = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for batch, found in zip(batches, orthogonalize_all(batches), strict=True):
        for matrix, result in zip(batch, found, strict=True):
            torch.testing.assert_close(result, newton_schulz_of_the_paper(matrix), rtol=1e-10, atol=1e-12)


def test_singular_values_come_near_one():
    """What the iteration is for: the singular vectors stay, the values lie between 0.6 and 1.3."""
    torch.manual_seed(0)
    matrix = torch.randn(1, 40, 64, dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrix)[0])
    assert values.min() > 0.6 and values.max() < 1.3
    assert not torch.isnan(orthogonalize(torch.zeros(1, 4, 4))).any()


def matrices_of(name: str, parameter: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
    """(a view, outputs, inputs) of each matrix that a parameter holds, by its name."""
    if name.endswith("c_attn.weight"):
        return [(part, part.shape[1], part.shape[0]) for part in parameter.chunk(3, dim=1)]
    if ".h." in name:
        return [(parameter, parameter.shape[1], parameter.shape[0])]
    if name.endswith("gate_up_proj"):
        halves = [half for expert in parameter for half in expert.chunk(2, dim=0)]
        return [(half, *half.shape) for half in halves]
    experts = list(parameter) if parameter.ndim == 3 else [parameter]
    return [(expert, *expert.shape) for expert in experts]


@torch.no_grad()
def step_of_the_papers(model, momenta: dict, rate: float, decay: float, scale: str) -> None:
    """Muon of Jordan 2024 with Nesterov momentum, decayed and scaled as in Liu et al. 2025, matrix by matrix."""
    for name, parameter in split_parameters(model)[0].items():
        gradient = parameter.grad
        momenta[name] = 0.95 * momenta.get(name, torch.zeros_like(gradient)) + gradient
        ahead = gradient + 0.95 * momenta[name]
        parameter.mul_(1 - rate * decay)
        for (matrix, outputs, inputs), (direction, _, _) in zip(
            matrices_of(name, parameter), matrices_of(name, ahead), strict=True
        ):
            size = 0.2 * math.sqrt(max(outputs, inputs)) if scale == "match_adamw" else 1.0
            if scale == "spectral":
                size = math.sqrt(max(1, outputs / inputs))
            matrix.sub_(rate * size * newton_schulz_of_the_paper(direction))


@pytest.mark.parametrize("scale", ["match_adamw", "spectral"])
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_are_those_of_the_papers(name, scale):
    """fp64: GPT-2's transposed projections with queries, keys and values apart, every expert's halves apart; the rest
    by torch's own AdamW with its own rates."""
    ours, theirs = built(name), built(name)
    rates = {"matrix_learning_rate": 0.02, "embedding_learning_rate": 0.005}
    decays = {"matrix_weight_decay": 0.3, "embedding_weight_decay": 0.0}
    settings = Optimizer(name="muon", scale=scale, **rates, **decays)
    optimizer = build_optimizer(ours, settings, 0.01, 0.1, (0.9, 0.95), 1e-8)
    _, tables, vectors = split_parameters(theirs)
    groups = [{"params": [*tables.values()], "lr": 0.005}, {"params": [*vectors.values()], "lr": 0.01}]
    adamw, momenta = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0), {}
    for step in range(3):
        for model in (ours, theirs):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        adamw.step()
        step_of_the_papers(theirs, momenta, 0.02, 0.3, scale)
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_hidden_matrices_are_the_layers_projections(name, tied):
    """Not the token table, GPT-2's positions, the head, a router, a norm or a bias (deepspeed tags wte and wpe)."""
    model = built(name, tie_word_embeddings=tied)
    matrices, tables, vectors = split_parameters(model)
    assert sum(map(len, (matrices, tables, vectors))) == len(list(model.parameters()))
    assert all(".h." in key or ".layers." in key for key in matrices)
    expected = {"gpt2": 2, "llama": 1, "qwen3_moe": 3}[name] + (not tied)
    assert len(tables) == expected, list(tables)
    assert all(parameter.ndim < 2 for parameter in vectors.values())


@pytest.mark.parametrize("name", MODELS)
def test_matrices_go_apart_and_come_back(name):
    for matrices in hidden_matrices(built(name)).values():
        flat = torch.arange(matrices.numel)
        assert torch.equal(matrices.put(matrices.of(flat)), flat)


def test_groups_are_told_with_their_counts():
    """Every parameter is in one group, and the line names its rule, rate and decay."""
    model = built("gpt2")
    optimizer = build_optimizer(model, Optimizer(name="muon"), 0.01, 0.1, (0.9, 0.95), 1e-8)
    lines = describe_groups(optimizer)
    assert lines[2] == (
        "hidden matrices: muon, 8 tensors, 98,304 parameters, learning rate 0.01, weight decay 0.1"
    )
    total = sum(int(line.split("tensors, ")[1].split(" ")[0].replace(",", "")) for line in lines)
    assert total == sum(p.numel() for p in model.parameters())


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
    monkeypatch.setattr(
        muon.dist,
        "all_gather_object",
        lambda out, _: out.__setitem__(slice(None), [list(map(tuple, f)) for f in local]),
    )
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


def test_one_rank_works_in_place():
    """Without other ranks nothing travels; the same function, the same result."""
    tensors = [torch.arange(10.0), torch.arange(4.0)]
    rounds = plan_rounds([MatrixFragment(0, 0, 0, 2, 6), MatrixFragment(1, 0, 1, 0, 4)], {0: 1, 1: 1})
    work_on_whole(
        rounds, tensors, lambda whole: {p: -t for p, t in whole.items()}, torch.float32, torch.device("cpu")
    )
    found = [tensor.tolist() for tensor in tensors]
    assert found == [[0, 1, -2, -3, -4, -5, -6, -7, 8, 9], [0, -1, -2, -3]]


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_the_stage_does_not_change_muon_s_curve(workshop, stage):
    """fp32, two ranks, matrices cut by ZeRO: the losses of a single plain process within 1e-4."""
    run = workshop.run(stage, settings=MUON)
    plain, ours = workshop.plain(MUON).losses, run.losses
    assert run.finished.stdout.count("\nhidden matrices: muon") == 1
    assert "untested optimizer" not in run.finished.stdout
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) <= 1e-4
    assert run.saved_state_bytes == json.loads(run.dir.plan.read_text())["checkpoint_bytes"]
    assert max(abs(a - b) for a, b in zip(plain, workshop.plain().losses, strict=True)) > 1e-2


def test_slices_in_another_order_do_not_either(workshop):
    """`round_robin_gradients` lays a group's parameters end to end in an order of its own."""
    config = json.loads((DS_CONFIGS / "zero2.json").read_text())
    config["zero_optimization"]["round_robin_gradients"] = True
    (path := workshop.folder / "round_robin.json").write_text(json.dumps(config))
    ours = workshop.run(str(path), settings=MUON).losses
    assert ours == pytest.approx(workshop.plain(MUON).losses, abs=1e-4)


def test_stage_1_in_bf16_too(workshop):
    """There DeepSpeed has another optimizer of flat muon; a plain bf16 process within 5e-3."""
    settings = (*MUON, *IN_BF16)
    ours, plain = workshop.run("zero1", settings=settings).losses, workshop.plain(settings).losses
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) <= 5e-3


def test_a_checkpoint_of_muon_goes_on_at_another_stage(workshop, tmp_path):
    """Promise: nothing committed is lost. Momenta saved by two ranks at stage 3 continue in one plain process."""
    whole = workshop.run("zero3", settings=MUON)
    resumed = workshop.continued(whole, tmp_path / "run", settings=MUON)
    assert resumed.losses == pytest.approx(whole.losses, abs=1e-5)


def test_partitions_nobody_told_of_are_not_passed_over():
    """A matrix must never go without its update in silence; a probe of zeros may."""
    model = built("llama")
    optimizer = build_optimizer(model, Optimizer(name="muon"), 0.01, 0.1, (0.9, 0.95), 1e-8)
    stranger = torch.nn.Parameter(torch.zeros(8))
    optimizer.param_groups[2]["params"] = [stranger]
    stranger.grad = torch.zeros(8)
    optimizer.step()
    assert set(optimizer.state[stranger]) == {"momentum_buffer"}
    stranger.grad = torch.ones(8)
    with pytest.raises(AssertionError, match="not told"):
        optimizer.step()


REFUSED = {
    "muon offloaded": (MUON, "zero2_offload", "optimizer.name: muon runs where its weights are"),
    "muon and sgd": ([*MUON, "training.optim=sgd"], "zero2", "exclude training.optim sgd"),
    "adafactor sliced": (["training.optim=adafactor"], "zero2", "use --deepspeed null or zero0"),
    "8-bit sliced": (["training.optim=adamw_8bit"], "zero3", "ZeRO-3 gives it slices"),
    "torchao's 8-bit": (
        ["training.optim=adamw_torch_8bit"],
        "zero0",
        "cannot hold (adamw_bnb_8bit keeps plain ones)",
    ),
    "sgd offloaded": (["training.optim=sgd"], "zero3_offload", "replaces it by DeepSpeed's CPU Adam"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stage_would_change_is_refused_by_name(name):
    """Bad input: one line that names the key, and what to write."""
    settings, stage, words = REFUSED[name]
    said = refusal(load_recipe_and_ds_config, "tiny", settings, stage)
    assert "recipes/tiny.json" in said and words in said


def test_the_trainer_s_own_optimizer_stays_the_default():
    """AdamW with decayed and undecayed parameters, unless the recipe gives kinds of parameters their own rates."""
    assert choose_optimizer(load_recipe("tiny")) is None
    assert choose_optimizer(load_recipe("tiny", ["training.optim=adafactor"])) is None
    factory, keywords = choose_optimizer(load_recipe("tiny", ["optimizer.embedding_learning_rate=0.1"]))
    optimizer = factory()(built("llama"), **keywords)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["adamw"] * 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.005, 0.005]
