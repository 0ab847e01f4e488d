"""The ways to compute the loss are one loss: same values, same gradients, same curve at every stage."""

import copy
import io
from contextlib import redirect_stderr
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pretraining.data.documents import IGNORED
from pretraining.errors import UserError
from pretraining.model import cross_entropy
from pretraining.model.cross_entropy import LossHead, LossSettings, chunked_nats, fused_nats, token_nats
from pretraining.model.loss import PLAIN, build_loss, layers_balance
from pretraining.planning.memory.activations import chunk_length, loss_bytes
from pretraining.planning.setup import Precision
from pretraining.recipe.sections import Loss
from pretraining.runtime.metric_names import grouped
from pretraining.training.metrics import SourceLoss
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import FAMILIES, MODELS
from tests.gear.tracked_memory import peak_bytes
from tests.gear.watched_gpu import watched_gpu

WAYS = [("plain", None), ("chunked", False), ("chunked", True), ("fused", False), ("fused", True)]
"""(kind, compile)"""
GPUS = {"T4": 15_600_000_000, "A100-40GB": 42_400_000_000, "H100": 85_000_000_000, "B200": 180_000_000_000}
"""Bytes that torch reports."""


def settings(kind: str, chunk_tokens: int | None = 50, z_loss=0.0, compile: bool | None = None) -> Loss:
    return Loss(kind=kind, chunk_tokens=chunk_tokens, z_loss=z_loss, compile=compile)


def built(model: dict, tied: bool) -> nn.Module:
    """A tiny model in fp64 (with eager experts: grouped products know no fp64)."""
    special = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(**{**model, **special})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double().train()


@pytest.fixture(scope="module")
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels [3, 64], a few labels ignored, unevenly over the rows."""
    torch.manual_seed(1)
    ids, labels = torch.randint(512, (3, 64)), torch.randint(512, (3, 64))
    labels[0, :5] = labels[2, 60:] = IGNORED
    return ids, labels


def loss_and_gradients(model: nn.Module, tokens, settings: dict) -> tuple[float, dict[str, torch.Tensor]]:
    model, (ids, labels) = copy.deepcopy(model), tokens
    loss = build_loss(model, settings)(model(input_ids=ids), labels, torch.tensor(400))
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_way_has_the_plain_loss_and_its_gradients(name, tied, z_loss, tokens):
    """In float64, against torch's own cross-entropy: chunks that do not divide the tokens, ignored labels."""
    model = built(FAMILIES[name], tied)
    loss, gradients = loss_and_gradients(model, tokens, settings("plain", z_loss=z_loss))
    for way, compile in WAYS[1:]:
        ours, found = loss_and_gradients(model, tokens, settings(way, z_loss=z_loss, compile=compile))
        assert ours == pytest.approx(loss, rel=1e-12)
        assert found.keys() == gradients.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-9, atol=1e-12, msg=key)


def test_nothing_is_written_over_logits_that_need_no_gradient():
    """Only a training step may consume its logits."""
    logits = torch.randn(6, 9)
    before = logits.clone()
    chunked_nats(logits, torch.arange(6), LossSettings(chunk_tokens=4))
    assert torch.equal(logits, before)


def test_bf16_logits_are_summed_in_fp32():
    """The chunked loss of bf16 logits is the plain loss of the same logits; its gradient has their dtype."""
    torch.manual_seed(0)
    logits, labels = torch.randn(300, 1000).bfloat16(), torch.randint(1000, (300,))
    plain = logits.clone().requires_grad_()
    expected = token_nats(plain[None], labels[None])
    expected.backward()
    ours = logits.clone().requires_grad_()
    found = chunked_nats(ours * 1, labels, LossSettings(chunk_tokens=128))
    found.backward()
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, plain.grad, rtol=2**-8, atol=0)


def test_the_head_gives_logits_but_in_training(tokens):
    """Same parameter, same tie; evaluation and generation see the model unchanged."""
    model, (ids, _) = built(MODELS["gpt2"], True), tokens
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(input_ids=ids).logits
    build_loss(model, settings("fused"))
    assert type(model.lm_head) is LossHead and model.lm_head.weight is model.transformer.wte.weight
    assert model(input_ids=ids).logits.shape == (3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert torch.equal(model.eval()(input_ids=ids).logits, expected)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_in_bf16_only_the_rounding_of_logits_and_gradients_shows(z_loss):
    """Against the same in fp64: compiled no farther from it than not compiled, both within bf16's rounding."""
    torch.manual_seed(0)
    pair, labels = [torch.randn(n, 64).bfloat16() for n in (300, 1003)], torch.randint(1003, (300,))
    labels[::7] = IGNORED
    errors, doubles = {}, [tensor.double() for tensor in pair]
    exact = gradients_of(fused_nats, doubles, labels, LossSettings(z_loss, 70, False))
    for compile in (False, True):
        found = gradients_of(fused_nats, pair, labels, LossSettings(z_loss, 70, compile))
        errors[compile] = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    assert max(errors[False]) < 2**-6
    assert all(a <= 1.02 * b for a, b in zip(errors[True], errors[False], strict=True)), errors


def gradients_of(nats, tensors, *arguments) -> list[torch.Tensor]:
    """(summed nats, gradient of each tensor) in fp64."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    found = nats(*leaves, *arguments)
    (found / 300).backward()
    return [found.detach().double(), *(leaf.grad.double() for leaf in leaves)]


def test_one_graph_a_kernel_serves_chunks_of_any_length(nothing_compiled):
    """Nothing is compiled while training goes on: the last chunk and a shorter micro-batch included."""
    hidden, weight = torch.randn(200, 8, requires_grad=True), torch.randn(96, 8, requires_grad=True)
    for tokens in (200, 130, 67):
        labels = torch.randint(96, (tokens,))
        fused_nats(hidden[:tokens], weight, labels, LossSettings(1e-4, 64, True)).backward()
        chunked_nats((hidden[:tokens] @ weight.T), labels, LossSettings(1e-4, 50, True)).backward()
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_a_loss_that_cannot_be_compiled_says_so_once_and_goes_on(nothing_compiled, monkeypatch, capsys):
    """As without a compiler: the same numbers, one line, no traceback."""

    def without_a_compiler(*_):
        raise RuntimeError("no compiler here\nmore of it")

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, backend=without_a_compiler))
    torch.manual_seed(0)
    pair, labels = [torch.randn(n, 8) for n in (40, 33)], torch.randint(33, (40,))
    expected = gradients_of(fused_nats, pair, labels, LossSettings(0.0, 16, False))
    for _ in range(2):
        found = gradients_of(fused_nats, pair, labels, LossSettings(0.0, 16, True))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    said = capsys.readouterr().err
    assert (
        said.startswith("warning: the loss is not compiled on any rank, as rank 0 ") and said.count("\n") == 1
    )
    assert "(RuntimeError: no compiler here); " in said and "--set loss.compile=false" in said


def nats_where_ranks_lack_a_compiler(lacking: set[int]) -> tuple[float, str]:
    """The loss of this rank, and what it says."""
    said, missing = io.StringIO(), "a C compiler" if dist.get_rank() in lacking else None
    torch.manual_seed(dist.get_rank())
    hidden, weight, labels = torch.randn(40, 8), torch.randn(33, 8), torch.randint(33, (40,))
    missing_here = mock.patch.object(cross_entropy, "missing_compiler", lambda: missing)
    no_graph = mock.patch.object(cross_entropy, "_compiled", lambda function: function)
    with missing_here, no_graph, redirect_stderr(said):
        found = fused_nats(hidden, weight, labels, LossSettings(0.0, 16, True))
    plain = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    return abs(found.item() - plain.item()), said.getvalue()


def test_where_a_rank_cannot_compile_the_loss_no_rank_does():
    """One line, of the first rank that cannot: all ranks take as long as that one."""
    for rank, (difference, said) in enumerate(on_ranks(3, nats_where_ranks_lack_a_compiler, {1, 2})):
        assert difference < 1e-4
        assert (
            said.count("\n") == said.count("as rank 1 cannot compile it (inductor needs a C c") == (rank == 1)
        )


def test_the_loss_never_waits_for_the_device():
    """On a GPU that is none, in bf16: no number is fetched to the host, no tensor of the host is mixed in."""
    with watched_gpu() as gpu:
        like = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
        hidden, weight = (torch.empty(n, 8, **like) for n in (90, 96))
        labels, each = torch.empty(90, dtype=torch.long, device="cuda"), torch.empty(90, device="cuda")
        gpu.synchronisations.clear()
        fused_nats(hidden, weight, labels, LossSettings(1e-4, 64, False), None, each).backward()
        chunked_nats(hidden @ weight.T, labels, LossSettings(1e-4, 64, False), each).backward()
        assert cross_entropy._adds_in_fp32(hidden.device), "else this test would not see that product"
        assert not gpu.synchronisations and weight.grad.dtype == torch.bfloat16


def test_under_autocast_the_product_is_in_bf16(tokens):
    """accelerate hands autocast's hidden states on in fp32; the fused logits must be rounded as the plain ones."""
    model, (ids, labels) = built(MODELS["llama"], False).float(), tokens
    found = {}
    for way in ("plain", "fused"):
        copied = copy.deepcopy(model)
        loss = build_loss(copied, settings(way))
        with torch.autocast("cpu", torch.bfloat16):
            logits = copied(input_ids=ids).logits
        value = loss(SimpleNamespace(logits=logits.float()), labels, torch.tensor(400))
        value.backward()
        found[way] = value.item(), copied.lm_head.weight.grad
    assert found["fused"][0] == pytest.approx(found["plain"][0], rel=1e-6)
    ours, theirs = found["fused"][1], found["plain"][1]
    assert (ours - theirs).norm() < 2**-7 * theirs.norm()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_router_z_loss_is_the_paper_s(name, tokens):
    """Zoph et al. 2022, equation 5, over the routers' raw logits, weighted by the micro-batch's share of the step."""
    model, (ids, labels) = built({**FAMILIES[name], "output_router_logits": True}, False), tokens
    expected, routers = [], [m for m in model.modules() if type(m).__name__.endswith("Router")]
    for router in routers:
        router.register_forward_hook(
            lambda module, inputs, _: expected.append(inputs[0].reshape(-1, 64) @ module.weight.T)
        )
    values = {}
    for coefficient in (0.0, 0.5):
        way = replace(settings("plain"), router_z_loss=coefficient)
        values[coefficient] = build_loss(model, way)(model(input_ids=ids), labels, torch.tensor(400)).item()
    squares = [torch.log(torch.exp(row).sum()) ** 2 for layer in expected[:2] for row in layer]
    share = (labels != IGNORED).sum().item() / 400
    expected = 0.5 * share * sum(squares).item() / len(squares)
    assert values[0.5] - values[0.0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_balancing_loss_is_the_paper_s(name, tokens):
    """Fedus et al. 2021, equations 4 to 6, in fp64: N sum f P of each layer by itself, weighted."""
    routed = {**FAMILIES[name], "output_router_logits": True, "router_aux_loss_coef": 0.5}
    model, (ids, labels) = built(routed, False), tokens
    loss = build_loss(model, settings("plain"))  # watches the routers from here on
    outputs, by_layer = model(input_ids=ids), []
    for logits in outputs.router_logits:
        experts = logits.shape[1]
        chances = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
        chosen = [row.argsort()[-2:] for row in chances]
        sent = [sum(expert in each for each in chosen) / len(chances) for expert in range(experts)]
        by_layer.append(experts * sum(f * p for f, p in zip(sent, chances.mean(0), strict=True)))
    share = (labels != IGNORED).sum().item() / 400
    found = loss(outputs, labels, torch.tensor(400))
    without = token_nats(outputs.logits, labels) / 400
    expected = 0.5 * share * sum(by_layer).item() / len(by_layer)
    assert (found - without).item() == pytest.approx(expected, rel=1e-6)


def test_layers_that_each_overload_another_expert_are_not_balanced():
    """Each of four layers sends all its tokens to one expert, another one each: the worst there is, not the best."""
    layers = tuple(torch.eye(4)[[layer] * 50] * 40 for layer in range(4))
    even = (torch.eye(4).repeat(25, 1) * 40,)
    for logits, expected in ((layers, 4), (even, 1)):
        routing = SimpleNamespace(choices=[each.topk(1).indices for each in logits])
        balance = layers_balance(SimpleNamespace(router_logits=logits), routing)
        assert balance.item() == pytest.approx(expected, rel=1e-6)
    of_transformers = load_balancing_loss_func(layers, num_experts=4, top_k=1).item()
    assert of_transformers == pytest.approx(1, rel=1e-6), "what transformers' own would say"


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_every_way_tells_each_token_s_nats(tokens, z_loss):
    """By hand from the model's own logits; they sum to the loss, and asking for them leaves the gradients alone."""
    model, (ids, labels) = built(MODELS["llama"], False), tokens
    logits = model(input_ids=ids).logits.detach()
    expected = -logits.log_softmax(-1).gather(2, labels.clamp_min(0)[..., None]).squeeze(2)
    expected = (expected + z_loss * logits.logsumexp(-1).square()) * (labels != IGNORED)
    for way, compile in WAYS:
        asked, each = copy.deepcopy(model), torch.zeros(labels.numel())
        loss = build_loss(asked, settings(way, z_loss=z_loss, compile=compile))
        value = loss(asked(input_ids=ids), labels, torch.tensor(400), each=each)
        value.backward()
        torch.testing.assert_close(each.view_as(labels), expected.float(), rtol=1e-5, atol=1e-5)
        assert each.sum().item() / 400 == pytest.approx(value.item(), rel=1e-5)
        unasked = loss_and_gradients(model, tokens, settings(way, z_loss=z_loss, compile=compile))[1]
        assert all(torch.equal(p.grad, unasked[name]) for name, p in asked.named_parameters())


def test_a_router_z_loss_without_a_router_is_refused():
    with pytest.raises(UserError, match="output_router_logits"):
        build_loss(built(MODELS["llama"], False), replace(settings("plain"), router_z_loss=0.1))


def test_auto_fuses_what_can_be_fused():
    """A head with a bias keeps its logits."""
    model = built(MODELS["llama"], False)
    biased = copy.deepcopy(model)
    biased.lm_head = nn.Linear(64, 512, bias=True, dtype=torch.float64)
    build_loss(biased, settings("auto"))
    assert type(biased.lm_head) is nn.Linear
    build_loss(model, settings("auto"))
    assert type(model.lm_head) is LossHead


def test_a_chunk_takes_what_its_device_can_spare():
    """256 MiB of a processor; a 64th of a GPU's memory, at most a GiB; as few chunks of one length as that allows."""

    def of(vocab_size, bytes_a_logit=8, gpu_memory=None):
        return chunk_length(10**6, vocab_size, bytes_a_logit, gpu_memory, None)

    assert (of(50304), of(512), of(10**9)) == (640, 62592, 128)
    took = {name: 2 * 50304 * of(50304, 2, memory) / 2**20 for name, memory in GPUS.items()}
    most = {"T4": 128, "A100-40GB": 512, "H100": 1024, "B200": 1024}
    assert all(0.8 * most[name] < took[name] <= most[name] for name in GPUS), took
    # two of one length, not 10,624 and 5,760
    assert chunk_length(16384, 50304, 2, GPUS["H100"], None) == 8192
    assert chunk_length(16384, 50304, 2, GPUS["H100"], 37) == 37
    assert chunk_length(20, 50304, 2, None, 37) == 20


@pytest.mark.parametrize("kind", ["chunked", "fused"])
@pytest.mark.parametrize("compile", [False, True])
def test_the_plan_counts_the_bytes_that_the_loss_takes(kind, compile):
    """The most that lies there at any moment of both passes, by torch's own count of allocations."""
    tokens, vocab_size, width = 500, 2000, 32
    weight = torch.randn(vocab_size, width, requires_grad=True)
    hidden, labels = torch.randn(tokens, width, requires_grad=True), torch.randint(vocab_size, (tokens,))

    def step() -> None:
        if kind == "fused":
            fused_nats(hidden, weight, labels, LossSettings(0.0, 128, compile)).backward()
        else:
            chunked_nats(hidden @ weight.T, labels, LossSettings(0.0, 128, compile)).backward()
        hidden.grad = weight.grad = None

    section, precision = settings(kind, 128, compile=compile), Precision("fp32", 4, 4, 4)
    expected = loss_bytes(tokens, vocab_size, width, precision, section, None)
    if kind == "chunked":  # the product's gradients
        expected = max(expected, 4 * (tokens * vocab_size + width * (vocab_size + tokens)))
    assert peak_bytes(step) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("kind", ["plain", "chunked", "fused"])
def test_the_loss_of_a_source_is_that_of_its_samples(kind):
    """By hand, sample by sample, over two micro-batches that mix two of three sources; masked targets do not count."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["llama"])).train()
    monitor, batches = SourceLoss(["web", "code", "books"]), []
    for sources in ([0, 1, 0], [1, 1, 0]):
        ids, labels = torch.randint(512, (3, 16)), torch.randint(512, (3, 16))
        labels[1, 3:9] = IGNORED
        batches.append((ids, labels, sources))
    expected = {0: [0.0, 0], 1: [0.0, 0]}
    for ids, labels, sources in batches:
        for row, source in enumerate(sources):
            nats = token_nats(model(input_ids=ids[row : row + 1]).logits, labels[row : row + 1])
            expected[source][0] += nats.item()
            expected[source][1] += (labels[row] != IGNORED).sum().item()
    loss = monitor.around(build_loss(model, replace(PLAIN, kind=kind)))
    for ids, labels, sources in batches:
        monitor.on_sources(torch.tensor(sources))
        loss(model(input_ids=ids), labels).backward()
    logs = {"loss": 0.0}
    monitor.on_log(None, None, None, logs=logs)
    assert logs["train/web_loss"] == pytest.approx(expected[0][0] / expected[0][1], rel=1e-5)
    assert logs["train/code_loss"] == pytest.approx(expected[1][0] / expected[1][1], rel=1e-5)
    assert "train/books_loss" not in logs and grouped("train/web_loss") == "train/web_loss"
    monitor.on_log(None, None, None, logs=(again := {"loss": 0.0}))
    assert again == {"loss": 0.0}
