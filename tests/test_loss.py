"""The ways to compute the loss are one loss: same values, same gradients, same curve at every stage."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pretraining.data.document_masking import IGNORED
from pretraining.errors import UserError
from pretraining.model.cross_entropy import chunked_nats, fused_nats
from pretraining.model.loss import build_loss, next_token_loss, token_nats
from pretraining.model.loss_head import LossHead
from pretraining.model.router_losses import layers_balance
from pretraining.planning.memory.loss import default_chunk
from tests.runs import EXPERTS, LLAMA, MODELS

MIXTRAL = {key: value for key, value in LLAMA.items() if key != "mlp_bias"}
MIXTRAL |= {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    **MODELS,
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    "mixtral": MIXTRAL,
}
WAYS = ("plain", "chunked", "fused")


def settings(kind: str, chunk_tokens: int | None = 50, z_loss: float = 0.0) -> dict:
    return {"kind": kind, "chunk_tokens": chunk_tokens, "z_loss": z_loss, "router_z_loss": 0.0}


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
    for way in ("chunked", "fused"):
        ours, found = loss_and_gradients(model, tokens, settings(way, z_loss=z_loss))
        assert ours == pytest.approx(loss, rel=1e-12)
        assert found.keys() == gradients.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-9, atol=1e-12, msg=key)


def test_gradients_are_those_of_finite_differences():
    """The fused product along a random direction, z-loss and an ignored label included."""
    torch.manual_seed(0)
    labels = torch.tensor([0, 10, 3, IGNORED, 5, 5, 1])
    pair = [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (7, 11)]
    steps = [1e-5 * torch.randn_like(tensor) for tensor in pair]
    fused_nats(*pair, labels, 0.1, 3).backward()
    with torch.no_grad():
        ahead, behind = (
            fused_nats(
                *(tensor + sign * step for tensor, step in zip(pair, steps, strict=True)), labels, 0.1, 3
            )
            for sign in (1, -1)
        )
        slope = sum((tensor.grad * step).sum() for tensor, step in zip(pair, steps, strict=True))
    assert ((ahead - behind) / 2).item() == pytest.approx(slope.item(), rel=1e-8)


def test_z_loss_is_the_squared_log_of_the_normaliser():
    """PaLM's auxiliary loss, summed over the targets alone."""
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(5, 9, dtype=torch.float64), torch.tensor([1, 2, IGNORED, 4, 8])
    expected = sum(torch.logsumexp(logits[i], 0) ** 2 for i in (0, 1, 3, 4))
    for found in (
        token_nats(logits[None], labels[None], 0.1) - token_nats(logits[None], labels[None]),
        chunked_nats(logits, labels, 0.1, 2) - chunked_nats(logits, labels, 0.0, 2),
    ):
        assert found.item() == pytest.approx(0.1 * expected.item(), rel=1e-9)


def test_nothing_is_written_over_logits_that_need_no_gradient():
    """Only a training step may consume its logits."""
    logits = torch.randn(6, 9)
    before = logits.clone()
    chunked_nats(logits, torch.arange(6), chunk_tokens=4)
    assert torch.equal(logits, before)


def test_bf16_logits_are_summed_in_fp32():
    """The chunked loss of bf16 logits is the plain loss of the same logits; its gradient has their dtype."""
    torch.manual_seed(0)
    logits, labels = torch.randn(300, 1000).bfloat16(), torch.randint(1000, (300,))
    plain = logits.clone().requires_grad_()
    expected = token_nats(plain[None], labels[None])
    expected.backward()
    ours = logits.clone().requires_grad_()
    found = chunked_nats(ours * 1, labels, chunk_tokens=128)
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
        way = {**settings("plain"), "router_z_loss": coefficient}
        values[coefficient] = build_loss(model, way)(model(input_ids=ids), labels, torch.tensor(400)).item()
    squares = [torch.log(torch.exp(row).sum()) ** 2 for layer in expected[:2] for row in layer]
    share = (labels != IGNORED).sum().item() / 400
    assert values[0.5] - values[0.0] == pytest.approx(
        0.5 * share * sum(squares).item() / len(squares), rel=1e-5
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_balancing_loss_is_the_paper_s(name, tokens):
    """Fedus et al. 2021, equations 4 to 6, in fp64: N sum f P of each layer by itself, weighted."""
    routed = {**FAMILIES[name], "output_router_logits": True, "router_aux_loss_coef": 0.5}
    model, (ids, labels) = built(routed, False), tokens
    outputs = model(input_ids=ids)
    by_layer = []
    for logits in outputs.router_logits:
        experts = logits.shape[1]
        chances = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
        sent = [
            sum(expert in row.argsort()[-2:] for row in chances) / len(chances) for expert in range(experts)
        ]
        by_layer.append(experts * sum(f * p for f, p in zip(sent, chances.mean(0), strict=True)))
    share = (labels != IGNORED).sum().item() / 400
    found = build_loss(model, settings("plain"))(outputs, labels, torch.tensor(400))
    without = token_nats(outputs.logits, labels) / 400
    assert (found - without).item() == pytest.approx(
        0.5 * share * sum(by_layer).item() / len(by_layer), rel=1e-6
    )


def test_layers_that_each_overload_another_expert_are_not_balanced():
    """Each of four layers sends all its tokens to one expert, another one each: the worst there is, not the best."""
    layers = tuple(torch.eye(4)[[layer] * 50] * 40 for layer in range(4))
    assert layers_balance(SimpleNamespace(router_logits=layers), chosen=1).item() == pytest.approx(
        4, rel=1e-6
    )
    even = (torch.eye(4).repeat(25, 1) * 40,)
    assert layers_balance(SimpleNamespace(router_logits=even), chosen=1).item() == pytest.approx(1, rel=1e-6)
    of_transformers = load_balancing_loss_func(layers, num_experts=4, top_k=1).item()
    assert of_transformers == pytest.approx(1, rel=1e-6), "what transformers' own would say"


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_every_way_tells_each_token_s_nats(tokens, z_loss):
    """By hand from the model's own logits; they sum to the loss, and asking for them leaves the gradients alone."""
    model, (ids, labels) = built(MODELS["llama"], False), tokens
    logits = model(input_ids=ids).logits.detach()
    expected = -logits.log_softmax(-1).gather(2, labels.clamp_min(0)[..., None]).squeeze(2)
    expected = (expected + z_loss * logits.logsumexp(-1).square()) * (labels != IGNORED)
    for way in WAYS:
        asked, each = copy.deepcopy(model), torch.zeros(labels.numel())
        loss = build_loss(asked, settings(way, z_loss=z_loss))
        value = loss(asked(input_ids=ids), labels, torch.tensor(400), each=each)
        value.backward()
        torch.testing.assert_close(each.view_as(labels), expected.float(), rtol=1e-5, atol=1e-5)
        assert each.sum().item() / 400 == pytest.approx(value.item(), rel=1e-5)
        unasked = loss_and_gradients(model, tokens, settings(way, z_loss=z_loss))[1]
        assert all(torch.equal(p.grad, unasked[name]) for name, p in asked.named_parameters())


def test_a_router_z_loss_without_a_router_is_refused():
    with pytest.raises(UserError, match="output_router_logits"):
        build_loss(built(MODELS["llama"], False), {**settings("plain"), "router_z_loss": 0.1})


def test_auto_fuses_what_can_be_fused():
    """A head with a bias keeps its logits; asked to fuse it, we say what to write instead."""
    model = built(MODELS["llama"], False)
    biased = copy.deepcopy(model)
    biased.lm_head = nn.Linear(64, 512, bias=True, dtype=torch.float64)
    build_loss(biased, settings("auto"))
    assert type(biased.lm_head) is nn.Linear
    with pytest.raises(UserError, match="use chunked"):
        build_loss(biased, settings("fused"))
    build_loss(model, settings("auto"))
    assert type(model.lm_head) is LossHead


def test_a_chunk_has_a_fixed_number_of_bytes():
    assert default_chunk(50304) == 640 and default_chunk(512) == 65536 and default_chunk(10**9) == 128


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_the_stages_fuse_to_the_plain_curve(workshop, stage):
    """Two ranks, chunks that do not divide the micro-batch, the head gathered where it is sharded: the curve of the
    plain loss in one process, within 1e-4."""
    plain = workshop.plain(("loss.kind=plain",)).losses
    fused = workshop.run(stage, settings=("loss.kind=fused", "loss.chunk_tokens=37")).losses
    assert max(abs(a - b) for a, b in zip(fused, plain, strict=True)) <= 1e-4


def test_a_mixture_of_experts_fuses_at_stage_3(workshop):
    """Sharded experts, an untied head and the balancing loss, against a plain process and its plain loss."""
    experts = f"model={json.dumps({**EXPERTS, 'tie_word_embeddings': False})}"
    plain = workshop.plain((experts, "loss.kind=plain")).losses
    fused = workshop.run("zero3", settings=(experts,)).losses
    assert max(abs(a - b) for a, b in zip(fused, plain, strict=True)) <= 1e-4


def test_micro_batches_of_a_fused_loss_add_up(tokens):
    """Gradient accumulation: parts divided by the step's targets sum to the mean over the step."""
    model, (ids, labels) = built(MODELS["gpt2"], True), tokens
    loss = build_loss(model, settings("fused"))
    whole = next_token_loss(SimpleNamespace(logits=model.eval()(input_ids=ids).logits), labels)
    model.train()
    counted = (labels != IGNORED).sum()
    parts = [loss(model(input_ids=ids[i : i + 1]), labels[i : i + 1], counted).item() for i in range(3)]
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-9)
