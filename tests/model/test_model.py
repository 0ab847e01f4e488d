"""The model: initial weights that are the same at every stage, decay on matrices alone, and the loss."""

import hashlib
import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaPreTrainedModel,
    TrainingArguments,
    integrations,
)
from transformers.initialization import no_init_weights

from pretraining.data.documents import IGNORED
from pretraining.ds_config import degrees_of, load_ds_config
from pretraining.errors import UserError
from pretraining.model import initial_weights
from pretraining.model.build import build_config, build_model
from pretraining.model.counting import build_on_meta, children_first
from pretraining.model.cross_entropy import token_nats
from pretraining.model.given_weights import GivenWeights
from pretraining.model.initial_weights import initialise_weights, list_draws, turns
from pretraining.model.loss import build_loss, next_token_loss
from pretraining.model.weight_files import open_weights
from pretraining.planning.sizes import check_rows
from pretraining.recipe import load_recipe, model_with_defaults, recipe_names
from pretraining.recipe.model import Model
from pretraining.recipe.optimizer import Mup, scales_by_name
from pretraining.recipe.sections import Speed, Weights
from pretraining.recipe.training import Training
from pretraining.runtime.process_group import rank_groups
from pretraining.training.arguments import build_arguments
from pretraining.training.trainer import PretrainingTrainer
from pretraining.upstream.deepspeed import share_of
from pretraining.upstream.split_weights import whole_experts
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import EXPERTS, MODELS, OTHER_MODELS, SMALL_RECIPE, TOKENIZER
from tests.gear.small_models import measurable

STAGES = ("null", "zero2", "zero3")
SPLIT = [*product(("zero2:expert=2", "zero3:expert=2"), (False, True))]
"""Of two ranks each has half of the experts."""
ALL_MODELS = MODELS | OTHER_MODELS
MUP = Mup(base_width=32)
DRAW = [
    {"kind": "hidden", "std": 1.0, "over": "spectral"},
    {"kind": "embedding", "std": 0.5, "cut": 2.0},
    {"names": "*.k_proj.weight", "std": 0.6, "over": "inputs"},
    {"names": "*.o_proj.weight", "std": 0.0},
    {"names": "*.down_proj*", "std": 0.02, "over": "layers", "cut": 3.0},
]
CONTINUED = "halved"
"""A Llama whose MLPs halve what their down projections have drawn."""


def built_weights(
    model: dict, stage: str, bf16: bool, given: GivenWeights | None = None, **sections: Mup | Weights
) -> dict[str, torch.Tensor]:
    """{parameter name: full tensor} of a freshly built model, whose weights are drawn or given."""
    training = Training({**SMALL_RECIPE["training"], "bf16": bf16})
    recipe = SimpleNamespace(training=training, training_keywords=training, num_steps=10, where="small.json")
    recipe.speed, recipe.extensions = Speed(compile="none"), []
    recipe.model, recipe.weights = Model(model), Weights()
    ds_config = None if stage == "null" else load_ds_config(stage)
    arguments = build_arguments(recipe, ds_config, Path("unused"), 1)
    groups = rank_groups(degrees_of(ds_config))
    built = build_model(model, TOKENIZER, arguments, given=given, groups=groups, **sections)
    is_sharded = Path(stage).name.startswith("zero3")
    assert any(hasattr(p, "ds_id") for p in built.parameters()) == is_sharded
    split = whole_experts(built)
    others = [parameter for parameter in built.parameters() if share_of(parameter) is None]
    with deepspeed.zero.GatheredParameters(others, enabled=is_sharded):
        found = {name: parameter.detach().clone() for name, parameter in built.named_parameters()}
    return found | split


def refuse_to_draw(model) -> None:
    """Transformers' own draw under ZeRO-3 gathers every module once more, for weights that ours replace."""
    raise AssertionError("transformers drew the weights too")


def rule_that_continues(self, module) -> None:
    """Llama's own rule, and one that goes on from what a child's rule has drawn."""
    super(LlamaPreTrainedModel, self)._init_weights(module)
    if type(module).__name__ == "LlamaMLP":
        module.down_proj.weight.mul_(0.5)


def with_copies_on_the_node(folder: Path) -> str:
    """A ds_config of ZeRO-3 in which both ranks keep a second copy (hpZ): then no rank can set its part alone."""
    config = load_ds_config("zero3_hpz")
    config["zero_optimization"]["zero_hpz_partition_size"] = 2
    path = folder / f"zero3-{dist.get_rank()}.json"
    path.write_text(json.dumps(config))
    return str(path)


def given_weights(model: dict, folder: Path) -> GivenWeights:
    """The weights of a folder that rank 0 writes, as transformers saves a model of this section that it has drawn."""
    source, _ = build_on_meta(model)
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(source.config).save_pretrained(folder)
    dist.barrier()
    return GivenWeights(str(folder), open_weights(folder), source)


def weights_of_all(folder: Path) -> dict:
    """{(model, stage, bf16): weights} of every case, and beside it those of given ones, for which there is a folder.

    On rank 0; nothing on the others, which would say the same.
    """
    integrations.deepspeed.initialize_weights_zero3 = refuse_to_draw
    ranks, ways, rows = dist.get_world_size(), [*product(STAGES, (False, True))], Weights.of({"draw": DRAW})
    split = SPLIT if ranks == 2 else []
    found, digests = {}, {}
    for stage, bf16 in ways:
        for name, model in ALL_MODELS.items():
            found[name, stage, bf16] = built_weights(model, stage, bf16)
        found["mup", stage, bf16] = built_weights(MODELS["llama"], stage, bf16, mup=MUP)
        with mock.patch.object(LlamaPreTrainedModel, "_init_weights", rule_that_continues):
            found[CONTINUED, stage, bf16] = built_weights(MODELS["llama"], stage, bf16)
    for stage, bf16 in [*ways, *split]:
        found["drawn", stage, bf16] = built_weights(EXPERTS, stage, bf16, weights=rows)
    for stage, bf16 in split:
        found["qwen3_moe", stage, bf16] = built_weights(EXPERTS, stage, bf16)
    if ranks == 2:
        # DeepSpeed makes the groups of such copies once a process
        found["gpt2", "hpz", False] = built_weights(MODELS["gpt2"], with_copies_on_the_node(folder), False)
    for name, model in ALL_MODELS.items() if ranks < 3 else ():
        given = given_weights(model, folder / str(ranks) / name)
        digests[name] = given.digest()
        for stage, bf16 in [*ways, *(split if name == "qwen3_moe" else ())]:
            found["given", name, stage, bf16] = built_weights(model, stage, bf16, given)
    return found | {"digests": digests} if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[int, dict]:
    """{ranks: {(model, stage, bf16): {name: tensor}}}, each built in a process group of its own."""
    folder = tmp_path_factory.mktemp("weights")
    return {max(1, ranks): on_ranks(ranks, weights_of_all, folder)[0] for ranks in (0, 2, 3)}


def differing(ours: dict, theirs: dict) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("name", [*ALL_MODELS, "mup", "drawn", CONTINUED])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_initial_weights_are_the_same_at_every_stage_and_world_size(weights, name, ranks, stage):
    """Promise: the curve belongs to the recipe. Bit for bit in fp32, against a plain process."""
    assert not differing(weights[ranks][name, stage, False], weights[1][name, "null", False])
    if (name, ranks) == ("gpt2", 2):  # hpZ: a rank's part cannot be set alone there
        assert not differing(weights[2]["gpt2", "hpz", False], weights[1]["gpt2", "null", False])


def not_drawn(config):
    """A model whose weights transformers has not drawn."""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", ALL_MODELS)
def test_initial_weights_are_those_of_each_rule_alone(weights, name):
    """No bit depends on which rank draws, or on what is left out because a later rule draws it again.

    Here every rule is called for its module, children first, with a generator of the module's own.
    """
    model = not_drawn(AutoConfig.for_model(**ALL_MODELS[name]))
    seed = SMALL_RECIPE["training"]["seed"]
    for path, module, owner in children_first(model):
        digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        with torch.no_grad():
            owner._init_weights(module)
    assert not differing(weights[3][name, "zero3", False], dict(model.named_parameters()))


@pytest.mark.parametrize("name", ["mup", CONTINUED])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_multiplied_in_bf16_is_the_same_at_every_stage(weights, name, ranks):
    """The order of rounding and multiplying is that of one process."""
    for stage in ("zero2", "zero3"):
        assert not differing(weights[ranks][name, stage, True], weights[1][name, "zero2", True])


def test_multiplied_weights_are_the_drawn_ones_times_a_factor(weights):
    """muP's factors, and a rule that continues from what its child's rule has drawn."""
    plain = weights[1]["llama", "null", False]
    for key, halved in weights[3][CONTINUED, "zero3", False].items():
        assert torch.equal(halved, plain[key] * (0.5 if "down_proj" in key else 1.0)), key
    factors = scales_by_name(plain, model_with_defaults(MODELS["llama"]), MUP)
    assert {1.0} < {each.initial for each in factors.values()}
    for key, scaled in weights[3]["mup", "zero3", False].items():
        assert torch.equal(scaled, plain[key] * factors[key].initial), key


def test_matrices_begin_as_the_recipe_s_rows_say(weights):
    """model.draw: by kind and by name, the last row that matches; cut, divided, zero; all else as its class does."""
    plain, drawn = (weights[1][name, "null", False] for name in ("qwen3_moe", "drawn"))
    width, layers = EXPERTS["hidden_size"], EXPERTS["num_hidden_layers"]
    for key, tensor in drawn.items():
        outputs, inputs = tensor.shape[-2:] if tensor.ndim > 1 else (1, 1)
        # both halves of gate and up are in one tensor
        outputs = outputs // 2 if "gate_up" in key else outputs
        std, cut = 1 / math.sqrt(inputs * max(1.0, inputs / outputs)), None
        if "norm" in key or ".gate.weight" in key or key == "lm_head.weight":
            assert torch.equal(tensor, plain[key]), key
            continue
        if "embed" in key:
            std, cut = 0.5, 2.0
        elif "k_proj" in key:
            std = 0.6 / math.sqrt(width)
        elif "down_proj" in key:
            std, cut = 0.02 / math.sqrt(2 * layers), 3.0
        elif "o_proj" in key:
            assert not tensor.any(), key
            continue
        # of a normal distribution that is cut at 2 and 3 deviations
        left = {None: 1.0, 2.0: 0.8796, 3.0: 0.9866}[cut] * std
        assert tensor.std().item() == pytest.approx(left, rel=6 / math.sqrt(tensor.numel())), key
        assert cut is None or std * cut * 0.9 < tensor.abs().max() <= std * cut, key


def test_a_pattern_of_initial_values_that_matches_no_matrix_is_one_line():
    """Norms are no matrices; muP scales std itself."""
    row = {"names": "*.ln_1.weight", "std": 1.0}
    with pytest.raises(UserError, match=r"model\.draw\.0\.names.*matches none of the"):
        check_rows(load_recipe("features/gpt2", [f"model.draw={json.dumps([row])}"]))
    over = [f"model.draw={json.dumps([{'kind': 'hidden', 'std': 1.0, 'over': 'inputs'}])}"]
    with pytest.raises(UserError, match=r"model\.draw\.0\.over: is inputs, and mup scales"):
        load_recipe("features/gpt2", [*over, "mup.base_width=32"])


@pytest.mark.parametrize("name", ["30b", "65b", "7b", "llama-70b", "moe-30b-a3b"])
def test_every_weight_of_a_large_recipe_is_drawn_once_and_by_all_ranks(name):
    """Hour 0 of a large run: at most 1.1 times the parameters, and eight ranks at least six times as fast as one.

    The ranks draw a turn at the same time, so that it takes as long as its largest draw.
    """
    recipe = load_recipe(name)
    with torch.device("meta"), torch.no_grad():
        model = not_drawn(build_config(dict(recipe.model), TOKENIZER))
        draws = list_draws(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    lent = sum(parameter.numel() for draw in draws for parameter in draw.lent)
    assert sum(draw.num_kept for draw in draws) == num_parameters <= lent <= 1.1 * num_parameters
    assert sorted(map(id, model.parameters())) == sorted(id(each) for draw in draws for each in draw.kept)
    assert num_parameters / sum(max(draw.num_kept for draw in turn) for turn in turns(draws, 8)) >= 6


@pytest.mark.parametrize("name", MODELS)
def test_no_number_is_drawn_that_is_not_kept(name):
    """GPT-2's rules draw output projections and the tied head twice: only the second time counts."""

    class Counted(TorchDispatchMode):
        drawn = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.normal_.default and args[0].device.type == "cpu":
                self.drawn += args[0].numel()
            return func(*args, **(kwargs or {}))

    model = not_drawn(AutoConfig.for_model(**MODELS[name]))
    with Counted() as counted:
        initialise_weights(model, 42)
    assert counted.drawn == sum(each.numel() for each in model.parameters() if each.ndim > 1)


def test_a_long_draw_gives_signs_of_life(monkeypatch, capsys):
    """A line at its beginning, lines with what is left, and work that counts for the watch over hangs."""
    monkeypatch.setattr(initial_weights, "MANY", 1)
    monkeypatch.setattr(initial_weights, "NEWS_SECONDS", 0.0)
    done = []
    monkeypatch.setattr(initial_weights, "work_done", done.append)
    model = not_drawn(AutoConfig.for_model(**MODELS["llama"]))
    initialise_weights(model, 42)
    began, *news = capsys.readouterr().out.splitlines()
    assert began == "drawing 0.0 B weights, on 1 rank"
    assert news[-1] == "drew 0.0 of 0.0 B weights, about 0.0 minutes left"
    assert sum(done) == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("name", ALL_MODELS)
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_bf16_starts_from_the_fp32_weights_rounded(weights, name, stage):
    """No other draw: what is rounded is the same fp32 numbers, on one rank and on two."""
    rounded = {key: value.bfloat16() for key, value in weights[1][name, "null", False].items()}
    for ranks in (1, 2):
        assert not differing(weights[ranks][name, stage, True], rounded)


@pytest.mark.parametrize("name", ALL_MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_given_weights_are_the_same_at_every_stage_and_world_size(weights, name, ranks):
    """Bit for bit what transformers saved, experts in its own layout included; in bf16 the same numbers rounded."""
    torch.manual_seed(1)
    model = {"use_cache": False, **ALL_MODELS[name]}
    source = dict(AutoModelForCausalLM.from_config(AutoConfig.for_model(**model)).named_parameters())
    for stage in ("null", "zero2", "zero3"):
        assert not differing(weights[ranks]["given", name, stage, False], source)
    rounded = {key: value.bfloat16() for key, value in source.items()}
    for stage in ("zero2", "zero3"):
        assert not differing(weights[ranks]["given", name, stage, True], rounded)
    assert weights[ranks]["digests"] == weights[1]["digests"]


@pytest.mark.parametrize("stage, bf16", SPLIT)
def test_split_experts_begin_as_whole_ones(weights, stage, bf16):
    """Drawn or given: each rank's experts together are those of a plain process, bit for bit."""
    sharded = stage.partition(":")[0]
    for key in (("qwen3_moe",), ("given", "qwen3_moe"), ("drawn",)):
        assert not differing(weights[2][*key, stage, bf16], weights[1][*key, sharded, bf16])


@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_keeps_its_own_distribution(weights, name):
    """0.02, GPT-2's 0.02/sqrt(2 layers) for what is added to the residual stream, norms 1 and 0, biases 0."""
    residual = 0.02 / math.sqrt(2 * SMALL_RECIPE["model"]["n_layer"])
    for key, tensor in weights[2][name, "zero3", False].items():
        if key.endswith("bias"):
            assert (tensor == 0).all(), key
        elif ".ln_" in key or "norm" in key:
            assert (tensor == 1).all(), key
        else:
            expected = residual if "c_proj" in key else 0.02
            assert tensor.std().item() == pytest.approx(expected, rel=6 / math.sqrt(tensor.numel())), key
            assert abs(tensor.mean().item()) < 6 * expected / math.sqrt(tensor.numel()), key


def built(tmp_path, model: dict, seed: int = 7):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, seed=seed, weight_decay=0.1)
    return build_model(model, TOKENIZER, arguments), arguments


def test_embeddings_are_tied_and_another_seed_is_another_start(tmp_path):
    model, _ = built(tmp_path, SMALL_RECIPE["model"])
    other, _ = built(tmp_path, SMALL_RECIPE["model"], seed=8)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not torch.equal(model.transformer.wte.weight, other.transformer.wte.weight)


@pytest.mark.parametrize("name", MODELS)
def test_weight_decay_reaches_the_matrices_and_nothing_else(tmp_path, name):
    """Norms and biases are not decayed; embeddings and every projection are."""

    model, arguments = built(tmp_path, MODELS[name])
    given = {"loss": build_loss(model), "train_dataset": []}
    optimizer = PretrainingTrainer(load_recipe("features/gpt2"), model, arguments, **given).create_optimizer()
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] == 0.1 for p in g["params"]}
    spared = {id(p) for g in optimizer.param_groups if g["weight_decay"] == 0.0 for p in g["params"]}
    assert decayed == {id(p) for p in model.parameters() if p.ndim >= 2}
    assert spared == {id(p) for p in model.parameters() if p.ndim < 2}


def test_the_recipes_activation_is_gpt2_s_own(tmp_path):
    """The larger recipes of GPT-2's shape write its activation as one kernel: the same losses, and so in an export."""
    shipped = {name: load_recipe(name).model for name in recipe_names()}
    named = {n: m.get("activation_function") for n, m in shipped.items() if m["model_type"] == "gpt2"}
    assert named and set(named.values()) == {"gelu_pytorch_tanh"}
    one_kernel = {**SMALL_RECIPE["model"], "activation_function": "gelu_pytorch_tanh"}
    ids = torch.arange(64)[None]
    models = [built(tmp_path, model)[0].eval() for model in (SMALL_RECIPE["model"], one_kernel)]
    logits = [model(input_ids=ids).logits for model in models]
    torch.testing.assert_close(*logits, atol=1e-6, rtol=1e-5)
    models[1].save_pretrained(tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert exported.config.activation_function == "gelu_pytorch_tanh"
    torch.testing.assert_close(exported(input_ids=ids).logits, logits[1], atol=1e-6, rtol=1e-5)


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [6, 8, 32] and labels [6, 8], a few of them ignored, unevenly over the rows."""
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 8, 32), torch.randint(32, (6, 8))
    labels[0, :5] = labels[4, 2:4] = IGNORED
    return logits, labels


def share(logits, labels, rows, num_items, **more):
    outputs = SimpleNamespace(logits=logits[rows], aux_loss=torch.tensor(2.0))
    return next_token_loss(outputs, labels[rows], num_items, **more)


def test_the_loss_is_the_mean_over_the_targets(batch):
    """Nats per token over what is not ignored, in fp32, labels already shifted."""
    logits, labels = batch
    logs = torch.log_softmax(logits.double(), -1)
    nats = [-logs[i, j, labels[i, j]] for i in range(6) for j in range(8) if labels[i, j] != IGNORED]
    assert len(nats) == 41
    assert share(logits, labels, slice(None), None).item() == pytest.approx(sum(nats).item() / 41, rel=1e-6)
    assert token_nats(logits.bfloat16(), labels).dtype == torch.float32


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6])
def test_micro_batches_add_up_to_the_mean(batch, micro_batch, coefficient):
    """Gradient accumulation: the sum over micro-batches is the mean over the step, ignored labels uneven.

    A mixture's coefficient means the same, however the step is cut.
    """
    logits, labels = batch
    cuts = [slice(first, first + micro_batch) for first in range(0, 6, micro_batch)]
    parts = [share(logits, labels, cut, torch.tensor(41), router_coefficient=coefficient) for cut in cuts]
    whole = share(logits, labels, slice(None), None)
    assert sum(parts).item() == pytest.approx(whole.item() + coefficient * 2.0, rel=1e-6)


def test_the_balancing_loss_is_asked_for_by_the_recipe():
    """`output_router_logits` switches it on, with the config's own coefficient."""
    known = {"model_type": "mixtral", "num_experts_per_tok": 2}
    config = SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.25, **known)

    def coefficient() -> float:
        network = torch.nn.Module()
        network.config = config
        return build_loss(network).keywords["router_coefficient"]

    assert coefficient() == 0.25
    config.output_router_logits = False
    assert coefficient() == 0.0
    config = SimpleNamespace()
    assert coefficient() == 0.0


ROPES = {
    "model.rope_parameters: transformers has no rope_type": {"rope_type": "yarn_2", "factor": 2.0},
    "factor": {"rope_type": "linear"},
}


@pytest.mark.parametrize("message", ROPES)
def test_a_scaling_of_positions_that_is_not_there_is_one_line(tmp_path, message):
    """Bad input: neither an unknown type nor a missing key is a traceback."""
    with pytest.raises(UserError, match=message):
        built(tmp_path, {**MODELS["llama"], "rope_parameters": {**ROPES[message], "rope_theta": 1e4}})


@pytest.mark.parametrize("name", ["codegen", "gptj", "llama"])
def test_a_resumed_run_has_the_positions_of_the_one_before(tmp_path, name):
    """What no checkpoint holds is computed alike, whether the weights are drawn or loaded; in 16 bit it was not."""
    model = MODELS[name] if name in MODELS else measurable(name)
    words = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": True, "deepspeed": load_ds_config("zero1")}
    arguments = TrainingArguments(**words)
    fresh, resumed = (
        dict(build_model(model, TOKENIZER, arguments, draw).named_buffers()) for draw in (True, False)
    )
    assert fresh.keys() == resumed.keys() and len(fresh) > 0
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in fresh.items())
