"""Promise: ranks may split sequences, layers and experts, and curve, checkpoints and exports stay the recipe's."""

import copy
import re
from collections.abc import Callable
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from pretraining.checkpoints.export import reshard
from pretraining.checkpoints.folders import damage
from pretraining.checkpoints.shard_files import CheckpointReader, assemble
from pretraining.data.documents import document_borders, part_of_sequences
from pretraining.ds_config import Degrees, degrees_of, load_ds_config
from pretraining.model.parallel import ExpertDispatch, split_experts
from pretraining.planning.memory.need import BUILT, memory_need
from pretraining.planning.setup import Setup
from pretraining.recipe import load_recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime.process_group import RankGroups
from pretraining.training.experts import PREFIX
from pretraining.upstream.deepspeed import own_rows
from tests.gear.finished_data import refusal
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import EXPERTS, LLAMA, MIXTRAL, QWEN3, committed, section_of
from tests.model.test_compiling import BLOCKS
from tests.training.test_curve import FP32, NO_NOISE_SCALE, SHORT, TWO, assert_one_curve

MASKED, PACKED = "data.document_masking=true", "data.packing=best_fit"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LONG = section_of(LLAMA, num_attention_heads=8, max_position_embeddings=2048, rope_parameters=YARN)
LONG_STEPS = ("budget.tokens=8192", "budget.tokens_per_step=4096", "training.per_device_train_batch_size=1")
# 515 tokens of a vocabulary: no degree divides them
LAYERS = (section_of(QWEN3, vocab_size=515), TWO)
TIED = section_of(LLAMA, tie_word_embeddings=True, vocab_size=513)
BALANCED = ("loss.router_z_loss=0.01", "monitors.expert_load=true", NO_NOISE_SCALE)
MIXTURE = (section_of(EXPERTS, router_aux_loss_coef=0.1), *BALANCED)
WHOLE_SEQUENCES = (section_of(EXPERTS, router_aux_loss_coef=1.0), "loss.router_z_loss=0.01", NO_NOISE_SCALE)
MUON = ("optimizer.name=muon", "optimizer.adaptive_clip=0.01", "monitors.layer_norms_steps=1")
ASKED = {
    "gpt2": ("zero2:sequence=2", 2, (NO_NOISE_SCALE,)),
    "experts, balanced over whole sequences": ("zero1:sequence=2", 2, (*WHOLE_SEQUENCES, MASKED, *SHORT)),
    "2,048 tokens, stretched positions, layers computed again, fewer key-value heads than ranks": (
        *("zero3:sequence=4", 4),
        (LONG, *LONG_STEPS, "training.activation_checkpointing=true", MASKED, PACKED, NO_NOISE_SCALE),
    ),
    "qwen3, whose norms of heads see a part of them": ("zero1_tp2", 2, LAYERS),
    "zero3, two groups of samples": ("zero3:tensor=2", 4, LAYERS),
    "zero2, compiled blocks": ("zero2:tensor=2", 2, (*LAYERS, *BLOCKS)),
    "experts whole, attention split, without ZeRO": (
        *("zero0:tensor=2", 2),
        (section_of(EXPERTS), MASKED, "loss.z_loss=0.001", *SHORT),
    ),
    "layers and sequences": ("zero2:tensor=2,sequence=2", 4, (TIED, TWO, NO_NOISE_SCALE, MASKED, *SHORT)),
    "one weight for embedding and head, chunked loss": (
        "zero3:tensor=2",
        2,
        (TIED, "loss.kind=chunked", *SHORT),
    ),
    "mixtral, documents apart": ("zero2_ep2", 2, (section_of(MIXTRAL), *BALANCED, MASKED)),
    "qwen3_moe, weights sharded too": ("zero3:expert=2", 4, MIXTURE),
    "qwen3_moe, compiled blocks": ("zero1:expert=2", 2, (*MIXTURE, *BLOCKS)),
    "qwen3_moe, Muon, clipping by units": ("zero1:expert=2", 4, (*MIXTURE, *MUON, *SHORT)),
    "without ZeRO, clipping by units": ("zero0:expert=2", 2, (*MIXTURE, *MUON[1:], *SHORT)),
    "experts and sequences, offloaded": ("zero2_offload:expert=2,sequence=2", 4, MIXTURE),
}


@pytest.mark.parametrize("stage, ranks, settings", ASKED.values(), ids=ASKED)
def test_split_work_has_the_curve_of_one_plain_process(workshop, stage, ranks, settings):
    """Losses, norms whole and of layers, noise scale, tokens, loads of experts, validations and samples.

    An export has whole weights under the names of one process, and the bits of the last checkpoint.
    """
    alone = workshop.plain(tuple(each for each in settings if each not in BLOCKS))
    together, degrees = workshop.run(stage, ranks, settings=settings), degrees_of(load_ds_config(stage))
    assert ("monitors.expert_load=true" in settings) <= any(
        PREFIX in name for name in alone.training_rows[-1]
    )
    measured, rel = ("stability/gradient", PREFIX), 1e-3 if degrees.tensor > 1 else 0.02
    assert_one_curve(together, alone, FP32, measured, rel)
    ours, theirs = (load_file(run.dir.export / "model.safetensors") for run in (together, alone))
    assert {n: each.shape for n, each in ours.items()} == {n: each.shape for n, each in theirs.items()}
    if degrees.tensor > 1:
        assert together.samples == alone.samples
        assert all(torch.allclose(each, theirs[name], atol=1e-4) for name, each in ours.items())
    saved = CheckpointReader(together.folder / committed(together.folder)[0])
    loaded = AutoModelForCausalLM.from_pretrained(together.dir.export).state_dict()
    for name in saved.parameters:
        assert torch.equal(loaded[name], assemble(saved, name)), name
    [start] = [event for event in together.events if event["event"] == "start"]
    split = {kind: getattr(degrees, kind) for kind in ("tensor", "sequence", "expert")}
    assert {kind: start[kind] for kind, degree in split.items() if degree > 1}.items() <= split.items()


def test_a_checkpoint_names_each_part_by_what_it_is(workshop, tmp_path):
    """Whole states under the names of one process, each element once; rewritten without parts, the same bits."""
    source = workshop.run("zero1_tp2", settings=LAYERS).folder / "checkpoint-8"
    reshard(source, tmp_path / "three", 3)
    saved, rewritten = CheckpointReader(source), CheckpointReader(tmp_path / "three")
    alone = CheckpointReader(workshop.plain(LAYERS).folder / "checkpoint-8")
    assert damage(source) is None and damage(tmp_path / "three") is None
    assert saved.parameters == rewritten.parameters == alone.parameters
    for name in saved.parameters:
        assert saved.states(name) == alone.states(name)
        for state in saved.states(name):
            assert torch.equal(assemble(rewritten, name, state), assemble(saved, name, state))
            assert torch.allclose(assemble(saved, name, state), assemble(alone, name, state), atol=1e-4)
    # no element is saved twice
    numel = sum(saved.numel(name) * len(saved.states(name)) for name in saved.parameters)
    assert workshop.run("zero1_tp2", settings=LAYERS).saved_state_bytes == 4 * numel


CHOICES = {"all": [0, 1, 2, 3], "those of the first rank": [0, 1], "those of the second": [3, 2], "one": [2]}
IMPLEMENTATIONS = ("eager", "grouped_mm")
TOKENS, CHOSEN = 24, 2


def drawn_experts(implementation: str = "grouped_mm") -> nn.ModuleDict:
    """Whole experts, the same on every rank."""
    config = AutoConfig.for_model(**MIXTRAL)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    whole = nn.ModuleDict({"experts": MixtralExperts(config)})
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.1)
    return whole


def split_copy(whole: nn.ModuleDict) -> nn.ModuleDict:
    """The same experts, of which this rank has its part."""
    split = copy.deepcopy(whole)
    split_experts(split, 2)
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        ours.data.copy_(own_rows(ours, theirs.data))
    return split


def passed(model: nn.ModuleDict, split: nn.ModuleDict, tokens, chosen, scores, wanted) -> list[torch.Tensor]:
    """The output of experts, whole or split, and the gradients of tokens, scores and this rank's weights.

    wanted: the gradient of the output, or what computes it.
    """
    dtype = next(model.parameters()).dtype
    inputs = [each.clone().to(dtype).requires_grad_() for each in (tokens, scores)]
    output = model["experts"](inputs[0], chosen, inputs[1])
    output.backward(wanted(output).to(dtype))
    weights = [parameter.grad.float() for parameter in model.parameters()]
    if model is not split:
        for gradient in weights:
            dist.all_reduce(gradient)
        weights = [own_rows(p, each) for p, each in zip(split.parameters(), weights, strict=True)]
    return [output.detach().float(), *(each.grad.float() for each in inputs), *weights]


def split_and_whole_differ_by(choices: list[int], implementation: str) -> float:
    """Between outputs, and gradients of tokens, weights and scores, of whole and of split experts."""
    whole = drawn_experts(implementation)
    split = split_copy(whole)
    torch.manual_seed(dist.get_rank())
    tokens, scores = torch.randn(TOKENS, LLAMA["hidden_size"]), torch.rand(TOKENS, CHOSEN)
    chosen = torch.tensor(choices)[torch.randint(len(choices), (TOKENS, CHOSEN))]
    given = (tokens, chosen, scores, lambda output: 2 * output.detach())
    found = [passed(model, split, *given) for model in (whole, split)]
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
        for theirs, ours in zip(*found, strict=True)
    )


def largest_differences() -> dict[str, float]:
    """Of this rank, case by case."""
    cases = product(CHOICES.items(), IMPLEMENTATIONS)
    return {f"{name}, {how}": split_and_whole_differ_by(choices, how) for (name, choices), how in cases}


def test_a_rank_to_which_no_token_comes_takes_part(on_two_ranks):
    """Outputs and gradients of split experts, on ranks that are all, some or none of them chosen."""
    for found in on_two_ranks[largest_differences]:
        assert len(found) == 8 and all(difference < 1e-5 for difference in found.values()), found


def errors_in_bf16() -> dict[str, list[float]]:
    """Of the output and of each gradient: how far whole and split experts in bf16 are from whole ones in fp32."""
    exact = drawn_experts()
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    whole = copy.deepcopy(exact).bfloat16()
    split = split_copy(whole)
    torch.manual_seed(dist.get_rank())
    tokens, scores = torch.randn(256, LLAMA["hidden_size"]).bfloat16(), torch.rand(256, CHOSEN).bfloat16()
    chosen = torch.randint(MIXTRAL["num_local_experts"], (256, CHOSEN))
    found = [
        passed(model, split, tokens, chosen, scores, lambda _: tokens) for model in (exact, whole, split)
    ]
    names = ("output", "tokens", "scores", "first weights", "last weights")
    return {
        name: [float((each[index] - found[0][index]).norm() / found[0][index].norm()) for each in found[1:]]
        for index, name in enumerate(names)
    }


def test_split_experts_in_bf16_are_as_near_to_fp32_as_whole_ones(on_two_ranks):
    """They weight a choice and add up in another order, with as much rounding."""
    for found in on_two_ranks[errors_in_bf16]:
        for name, (whole, split) in found.items():
            assert 0 < split < 1.25 * whole < 0.02, name


class CountedOperators(TorchDispatchMode):
    """The names of what is computed while it is entered, in order."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function._overloadpacket.__name__)
        return function(*arguments, **(keywords or {}))


def counted_in_a_recomputed_layer() -> tuple[dict[str, list[int]], float]:
    """Exchanges and grouped products of a layer's forward and backward pass, and how far its gradients are off."""
    experts = split_copy(drawn_experts())["experts"]
    chosen = torch.arange(TOKENS * CHOSEN).view(TOKENS, CHOSEN) % MIXTRAL["num_local_experts"]
    counts: dict[str, list[int]] = {"exchanges": [], "products": []}
    gradients = []
    for recomputes in (True, False):
        tokens = torch.linspace(-1, 1, TOKENS * LLAMA["hidden_size"]).view(TOKENS, -1).requires_grad_()
        scores = torch.full((TOKENS, CHOSEN), 0.5, requires_grad=True)
        with CountedOperators() as forward:
            if recomputes:
                output = checkpoint(experts, tokens, chosen, scores, use_reentrant=False)
            else:
                output = experts(tokens, chosen, scores)
        with CountedOperators() as backward:
            (output**2).sum().backward()
        for each in (forward, backward):
            counts["exchanges"].append(each.names.count("alltoall_base_"))
            counts["products"].append(each.names.count("_grouped_mm"))
        gradients.append([tokens.grad, scores.grad, *(parameter.grad for parameter in experts.parameters())])
        experts.zero_grad()
    ours, theirs = gradients
    return counts, max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_a_recomputed_layer_sends_nothing_back_again_and_spares_its_last_product(on_two_ranks):
    """Forward: sizes, tokens, choices, results. Again: all but the results. Backward: results, tokens, choices."""
    for counts, difference in on_two_ranks[counted_in_a_recomputed_layer]:
        assert difference == 0.0
        assert counts["exchanges"] == [4, 3 + 3, 4, 3]
        assert counts["products"] == [2, 1 + 4, 2, 4]


def rows_of_a_step() -> tuple[list[int], list[int], int]:
    """What two ranks agree on: three tokens of rank 0 and two of rank 1, with experts 0 and 1 on rank 0."""
    experts = split_copy(drawn_experts())["experts"]
    choices = torch.tensor([[[0, 1], [2, 3], [1, 0]], [[0, 2], [3, 0]]][dist.get_rank()])
    agreed, agree = [], ExpertDispatch.agree
    with mock.patch.object(ExpertDispatch, "agree", lambda *given: agreed.append(agree(*given)) or agreed[0]):
        experts(torch.ones(len(choices), LLAMA["hidden_size"]), choices, torch.ones(len(choices), 2))
    return tuple(agreed[0])


def test_a_token_travels_once_to_each_rank(on_two_ranks):
    """However many of its experts are there: rows are counted by rank, choices by expert."""
    assert on_two_ranks[rows_of_a_step] == (([2, 1], [2, 2], 6), ([2, 2], [1, 2], 4))


ON_TWO_RANKS = (largest_differences, errors_in_bf16, counted_in_a_recomputed_layer, rows_of_a_step)


def answers() -> list:
    return [function() for function in ON_TWO_RANKS]


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[Callable, tuple]:
    """{function: what it returns on each of two ranks}, of one launch."""
    return dict(zip(ON_TWO_RANKS, zip(*on_ranks(2, answers), strict=True), strict=True))


def test_ranks_are_numbered_with_tensor_parts_first_and_samples_last():
    groups = [RankGroups(Degrees(tensor=2, sequence=2), rank, 8) for rank in range(8)]
    assert [each.tensor_part for each in groups] == [0, 1] * 4
    assert [each.sequence_part for each in groups] == [0, 0, 1, 1] * 2
    assert [each.data_rank for each in groups] == [0] * 4 + [1] * 4
    assert [each.is_first_of_sample for each in groups] == [True, False, False, False] * 2
    assert groups[0].data_ranks == 2


def test_parts_of_a_batch_are_the_batch():
    """Together inputs, labels and positions; the borders of documents stay those of whole sequences."""
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6]])
    tokens = np.arange(16).reshape(2, 8)
    plain = {"input_ids": tokens, "labels": tokens + 1}
    masked = {**plain, "position_ids": positions, **document_borders(positions), "use_cache": False}
    for batch in (plain, masked):
        parts = [part_of_sequences(batch, part, 4) for part in range(4)]
        for key in ("input_ids", "labels"):
            np.testing.assert_array_equal(np.concatenate([part[key] for part in parts], 1), batch[key])
    np.testing.assert_array_equal(np.concatenate([part["position_ids"] for part in parts], 1), positions)
    assert parts[3]["cu_seq_lens_q"] is masked["cu_seq_lens_q"]
    assert part_of_sequences(plain, 1, 2)["position_ids"].tolist() == [[4, 5, 6, 7]] * 2
    assert part_of_sequences(plain, 0, 1) is plain


def test_building_split_experts_takes_their_part_and_one_layer_whole():
    """In host memory, before the model moves to its GPU; `moe-30b-a3b` holds 16 of 128 experts a rank."""
    recipe, layer = load_recipe("moe-30b-a3b"), 128 * 3 * 768 * 2048
    setups = {way: Setup(recipe, load_ds_config(way), 8) for way in ("zero1", "zero1:expert=8")}
    built = {way: memory_need(setup).host[BUILT] for way, setup in setups.items()}
    assert built["zero1"] == 2 * 30_532_122_624
    assert built["zero1:expert=8"] == built["zero1"] - 2 * 48 * layer * 7 / 8 + 4 * layer


NOISE_SCALE, EAGER = ("monitors.noise_scale_steps=5",), ("model.attn_implementation=eager",)
GRAPHS, ADAFACTOR = ("speed.compile_mode=reduce-overhead",), ("training.optim=adafactor",)
EIGHT = (section_of(LLAMA, num_attention_heads=8, vocab_size=1024),)
OLMO2 = (section_of(LLAMA, model_type="olmo2", vocab_size=1024),)
DEEPCOMPILE = ("speed.compile=deepcompile", "loss.kind=plain")
PRODUCTS = ("training.activation_checkpointing=true", "speed.recompute=operators")
MULTIPLE = "{0} {1}: needs a multiple of {1} ranks, and there are {2}; degrees that divide {2}: 1, {3}"
REFUSED = [
    (
        "zero2:sequence=3",
        (),
        3,
        "zero2:sequence=3: sequence 3: does not divide the 4 attention heads; 2 does",
    ),
    ("zero2:sequence=8", (), 8, "does not divide the 4 attention heads; 4 does"),
    ("zero3:sequence=4", (), 6, MULTIPLE.format("sequence", 4, 6, "2, 3, 6")),
    ("zero3:sequence=two", (), 2, "'two' is no number of ranks; write sequence=2"),
    ("zero3:seqence=2", (), 2, "there is no degree 'seqence'; did you mean 'sequence'?"),
    ("zero1:sequence=2", NOISE_SCALE, 2, "monitors.noise_scale_steps: does not go with"),
    ("zero1:sequence=2", ("training.neftune_noise_alpha=5",), 2, "noise is drawn for a part as if it were"),
    ("zero1:sequence=2", EAGER, 2, "is eager; split sequences go with sdpa"),
    ("zero1:sequence=2", ("budget.tokens_per_step=128",), 4, "2 groups of 2 ranks"),
    ("zero1_tp2", (), 2, "gpt2 keeps queries, keys and values in one convolution"),
    ("zero1:tensor=4", EIGHT, 4, "tensor 4: does not divide the 2 key-value heads; 2 does"),
    ("zero1:tensor=3", EIGHT, 3, "tensor 3: does not divide the 8 attention heads; 2 does"),
    ("zero1_tp2", EIGHT, 3, MULTIPLE.format("tensor", 2, 3, "3")),
    ("zero0:tensor=2", (*EIGHT, *ADAFACTOR), 2, "whose update looks at whole parameters"),
    ("zero1_tp2", (*EIGHT, "optimizer.adaptive_clip=0.1"), 2, "compares norms of whole rows and columns"),
    ("zero1_tp2", (*EIGHT, *DEEPCOMPILE), 2, "deepcompile, which is not tried with split layers"),
    ("zero1_tp2", (*EIGHT, *PRODUCTS), 2, "speed.recompute: is operators, which keeps products"),
    ("zero3_hpz:tensor=2", EIGHT, 8, "hpZ keeps copies of parameters by node"),
    ("zero3_nvme:tensor=2", EIGHT, 2, "is not tried with states on NVMe"),
    (
        "zero1_tp2",
        OLMO2,
        2,
        "tensor 2: does not hold for olmo2 (its self_attn.q_proj is colwise_gather_output)",
    ),
    ("zero2_ep2", (), 2, "expert 2: is for mixtures of experts, not for gpt2"),
    ("zero2:expert=3", (), 3, "zero2:expert=3: expert 3: does not divide the 4 experts; 2 does"),
    ("zero2:expert=8", (), 8, "does not divide the 4 experts; 4 does"),
    ("zero2_ep2", (), 3, MULTIPLE.format("expert", 2, 3, "3")),
    ("zero2_ep2", NOISE_SCALE, 2, "noise_scale_steps: does not go with split experts"),
    ("zero2_ep2", GRAPHS, 2, "is reduce-overhead, which records CUDA graphs, and with expert 2"),
    ("zero0:expert=2", ADAFACTOR, 2, "whose update looks at whole parameters"),
    ("zero3_hpz:expert=2", (), 8, "zero_hpz_partition_size: does not go with split experts"),
]


@pytest.mark.parametrize("deepspeed, settings, ranks, said", REFUSED)
def test_what_cannot_be_split_is_refused_in_one_line(deepspeed, settings, ranks, said):
    """From the plan already, with the nearest degree that divides."""
    splits_experts = (
        re.search("ep2|expert", deepspeed) and "not for gpt2" not in said
    )  # a dense model has none to split
    recipe = "features/mixture-of-experts" if splits_experts else "features/gpt2"
    assert said in refusal(load_recipe_and_ds_config, recipe, settings, deepspeed, ranks)
