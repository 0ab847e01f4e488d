"""You know before you pay: what a layout holds, sends and costs, and which one to take."""

import json
import math
from itertools import combinations

import pytest

from pretraining.ds_config import load_ds_config
from pretraining.errors import UserError
from pretraining.planning.__main__ import main
from pretraining.planning.fit import fitting
from pretraining.planning.gate import check_plan
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.activations import activations
from pretraining.planning.memory.need import memory_need
from pretraining.planning.memory.states import state_of
from pretraining.planning.messages import EXPERT, SEQUENCE, TENSOR, spans_nodes, step_messages
from pretraining.planning.run_plan import Machine
from pretraining.planning.screen import as_text, fewest_ranks, full_plan
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import ranks_met
from pretraining.planning.step_time import ceiling, step_time
from pretraining.recipe import RECIPES, load_recipe
from tests.gear.tracked_memory import setup_of, trace
from tests.planning.test_planning import setup

H100 = find_gpu("H100")
LONG = str(RECIPES / "stages" / "7b-131k.json")


def planned(way: str, ranks: int, name: str = "7b", *changes: str) -> Setup:
    return Setup(load_recipe(name, changes, way), load_ds_config(way), ranks)


def sent(way: str, ranks: int, name: str = "7b", *changes: str) -> dict:
    """The messages of a step on H100s, by name."""
    return {message.name: message for message in step_messages(planned(way, ranks, name, *changes), H100)}


def test_a_rank_holds_a_part_of_each_matrix_and_all_norms():
    """All ranks of a group together: each matrix once, embedding and head too, and norms once each.

    ZeRO-1 then shards masters and moments over the groups; weights and sums stay as a rank holds them.
    """
    case = planned("zero1:tensor=4", 8)
    [family] = case.families
    state, norms = state_of(case), case.size.parts["norms"]
    assert family.ranks == 2
    assert family.numel == (case.size.total - norms) // 4 + norms
    assert state.parameters == 2 * family.numel and state.gradient_accumulation == 4 * family.numel
    assert state.master_and_moments == pytest.approx(12 * family.numel / 2, rel=1e-6)
    # three ranks have 10,667 rows of 32,000, or one less: the plan is that of the fullest
    held = planned("zero1:tensor=3", 3).held
    [embedding] = [tensor for tensor in held if tensor.kind == "embedding"]
    assert embedding.numel == 10_667 * case.recipe.model["hidden_size"]


def test_parts_are_sharded_over_the_ranks_that_hold_them():
    """Stage 3 shards what is whole over tensor ranks too, so that no element is on two ranks.

    Every expert is once in a group, and ZeRO shards it over as many ranks as there are groups.
    """
    case = planned("zero3:tensor=4", 8)
    whole, parts = case.families
    assert (whole.ranks, parts.ranks) == (8, 2)
    assert whole.numel / 8 + parts.numel / 2 == case.size.total / 8
    case = planned("zero2:expert=2", 8, "moe-1.5b")
    dense, experts = case.families
    of_experts = case.size.parts["experts"]
    assert (dense.ranks, experts.ranks) == (8, 4)
    assert experts.numel == of_experts // 2 and dense.numel == case.size.total - of_experts


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2", "zero3"])
def test_states_of_split_sequences_are_those_of_as_many_data_ranks(stage):
    """To ZeRO all ranks are data-parallel: 18 bytes a parameter at stage 3, over all of them."""
    assert state_of(planned(f"{stage}:sequence=4", 8)) == state_of(planned(stage, 8))


WIDE = {"model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 1024}
WIDE |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
WIDE |= {"max_position_embeddings": 512, "attn_implementation": "sdpa"}


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_activations_of_split_layers_are_those_of_a_narrower_model(degree):
    """Against torch's tracker: a rank computes as a model with a part of the heads and of the inner width."""
    part = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    narrow = {**WIDE, **{key: WIDE[key] // degree for key in part}}
    held = activations(setup_of(WIDE, 2, 512, split=f"tensor={degree}"), None)
    traced = trace(narrow, 2, 512, "bf16", 0)
    assert held.kept + held.logits / 3 == pytest.approx(traced["kept"], rel=0.02)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("every_n_layers", [0, 1])
def test_activations_of_split_sequences_are_those_that_a_rank_keeps(degree, every_n_layers):
    """Against torch's tracker over the attention that exchanges."""
    held = activations(setup_of(WIDE, 2, 512, "bf16", every_n_layers, split=f"sequence={degree}"), None)
    traced = trace(WIDE, 2, 512, "bf16", every_n_layers, sequence=degree)
    assert held.kept + held.logits / 3 == pytest.approx(traced["kept"], rel=0.02)


@pytest.mark.parametrize("degree", [2, 4])
def test_activations_of_split_sequences(degree):
    """A part of every sequence, and the result of attention once more, as tokens of all heads."""
    model = load_recipe("7b").model
    whole, part = (
        activations(setup_of(model, 1, length, split=split), None)
        for length, split in ((4096 // degree, ""), (4096, f"sequence={degree}"))
    )
    exchanged = 2 * 4096 * 4096 // degree * model["num_hidden_layers"]
    assert part.layers == whole.layers + exchanged
    # eight key-value heads are copied for sixteen ranks
    copied = activations(setup_of(model, 1, 4096, split="sequence=16"), None)
    assert copied.per_layer > activations(setup_of(model, 1, 256), None).per_layer


def test_the_peak_of_recomputed_layers_is_at_the_last_one():
    """Against torch's tracker, with a loss that is small: all inputs, and one layer's activations."""
    model = {"model_type": "llama", "vocab_size": 128, "hidden_size": 256, "intermediate_size": 704}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}
    model |= {"max_position_embeddings": 1024, "attn_implementation": "sdpa"}
    traced, held = trace(model, 4, 1024, "bf16", 1), activations(setup_of(model, 4, 1024, "bf16", 1), None)
    assert held.recomputes_last
    assert held.at_last_layer == pytest.approx(traced["peak"], rel=0.06)


def test_the_stage_of_long_sequences_fits_eight_gpus_of_80_gb():
    """7b at 131,072 tokens; whole sequences on each rank do not fit."""
    case, there = setup(LONG, 8), H100.memory_bytes
    need = memory_need(case, there)
    assert case.recipe.sequence_length == 131_072 and need.total < 0.6 * there
    assert need.peak_phase == "last layer"
    assert memory_need(setup(LONG, 8, way="zero3"), there).total > there


def test_messages_of_a_layer_stay_in_the_node_or_are_said_to_leave_it():
    """Tensor groups are neighbours, sequence groups as many apart as a tensor group has."""
    inside = sent("zero1:tensor=2,sequence=4", 64)
    assert inside[TENSOR].across_bytes == inside[SEQUENCE].across_bytes == 0
    outside = sent("zero1:tensor=4,sequence=4", 64)
    # of four ranks, two are in a node: one part of four goes to the neighbour, two to the other node
    assert outside[SEQUENCE].across_bytes == 2 * outside[SEQUENCE].inside_bytes > 0
    assert outside[TENSOR].across_bytes == 0
    assert spans_nodes(8, 2, 8) and spans_nodes(3, 1, 8) and not spans_nodes(2, 4, 8)


def test_bytes_of_messages_are_those_of_their_formulas():
    """Seven all-reduces of the residual stream a layer, and two outside; queries, keys, values and results of attention
    both ways."""
    recipe = load_recipe("7b")
    width, layers, tokens = 4096, 32, recipe.tokens_per_step / 4
    # and to the other rank two fp32 numbers of each token for the loss
    assert sent("zero1:tensor=2", 8)[TENSOR].total == (2 * width * (7 * layers + 2) + 8) * tokens
    exchanged = 2 * tokens / 4 * layers * (2 * 4096 + 2 * 1024) * 2
    assert sent("zero1:sequence=4", 16)[SEQUENCE].total == pytest.approx(exchanged * 3 / 4)
    moe = load_recipe("moe-1.5b")
    # 2 of 6 experts are on 1.6 of 2 ranks: tokens and sums in 16 bit, numbers and weights in fp32, and their gradients
    rows = 1.6 * moe.tokens_per_step / 4 * 24
    routed = rows * (4 * 2 * 1024 + 2 * 4 * 4)
    assert sent("zero2:expert=2", 4, "moe-1.5b")[EXPERT].total == pytest.approx(routed / 2)
    # computed again: without the sums
    routed += rows * (2 * 1024 + 4 * 4)
    again = "training.activation_checkpointing=true"
    assert sent("zero2:expert=2", 4, "moe-1.5b", again)[EXPERT].total == pytest.approx(routed / 2)
    # gradients of experts go round among fewer ranks, each of which holds half of them
    of_gradients = [sent(way, 8, "moe-1.5b")["gradients"].total for way in ("zero1:expert=2", "zero1")]
    assert of_gradients[0] < of_gradients[1]


def test_a_token_meets_as_many_ranks_as_its_choices_are_on():
    """The mean over all choices of three of eight experts, on four ranks."""
    met = [len({expert // 2 for expert in chosen}) for chosen in combinations(range(8), 3)]
    assert ranks_met(8, 3, 4) == pytest.approx(sum(met) / len(met))
    assert ranks_met(8, 1, 4) == 1 and ranks_met(8, 8, 4) == 4


def test_what_layers_wait_for_is_part_of_the_ceiling():
    """Without the messages, two ranks with half of each layer are as fast as two ranks with half of the samples."""
    split, whole = (ceiling(planned(way, 8), H100, "bf16") for way in ("zero1:tensor=2", "zero1"))
    assert split.seconds[TENSOR] > 0 and TENSOR not in whole.seconds
    assert split.mfu < whole.mfu
    step = step_time(planned("zero1:tensor=2", 8), H100)
    assert 0 < step.waiting_seconds < step.compute_seconds
    assert split.seconds["attention"] == pytest.approx(whole.seconds["attention"] / 2)


def judged(way: str, ranks: int, **machine):
    return check_plan(planned(way, ranks), Machine(H100.memory_bytes, H100, True, **machine)).warnings


def test_groups_that_leave_their_node_are_warned_of_with_the_cost():
    [warning] = [each for each in judged("zero2:tensor=8", 64, ranks_per_host=4) if "nodes" in each.what]
    assert "do not fit nodes of 4 GPUs" in warning.what and "of a step" in warning.what
    assert "product divides 4" in warning.remedy
    assert not [each for each in judged("zero2:tensor=8", 64) if "nodes" in each.what]


def test_the_plan_writes_the_layout_and_its_messages():
    answer = full_plan(planned("zero3:sequence=4", 16), H100)
    text = " ".join(as_text(answer).split())
    assert "4 groups of 4 GPUs x 1 sequence" in text
    assert "layout each sequence over 4 ranks" in text
    assert "sequence all-to-alls of 4 ranks" in text and "between nodes" in text
    names = [message["name"] for message in answer["forecast"]["step"]["messages"]]
    assert names == ["gradients", "weights", SEQUENCE] and math.isfinite(answer["forecast"]["mfu"])
    assert "layout" not in as_text(full_plan(planned("zero3", 16), H100)).split()


def test_a_plan_without_a_number_of_gpus_takes_the_fewest():
    assert [fewest_ranks(load_ds_config(way)) for way in ("zero1", "zero1:tensor=2,sequence=4")] == [1, 8]
    assert fewest_ranks(load_ds_config("zero2:expert=4")) == 4


def test_the_search_proposes_split_sequences_where_whole_ones_do_not_fit():
    ways = fitting(setup(LONG, 8), H100)
    assert "sequence=" in ways[0].deepspeed
    # a short sequence is not worth splitting
    tiny = fitting(setup("features/gpt2", 2), H100)
    assert not [way for way in tiny if "sequence" in str(way.deepspeed)]


def test_rows_that_can_be_trained_here_and_rows_for_megatron(capsys):
    """A row with pipeline stages cannot; its arguments hold the recipe's values."""
    question = ["parallelism", "--recipe", "7b", "--world_size", "64", "--gpu", "H100"]
    main([*question, "--top", "20", "--json", "--megatron", "1"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["layouts"][0]["pipeline"] > 1
    assert not [row for row in answer["layouts"] if row["pipeline"] > 1 and row["here"]]
    words = " ".join(answer["megatron"])
    recipe = load_recipe("7b")
    for argument in (
        f"--pipeline-model-parallel-size {answer['layouts'][0]['pipeline']}",
        "--num-query-groups 8",
        f"--global-batch-size {recipe.samples_per_step}",
        f"--train-samples {recipe.num_samples}",
        "--lr 0.0003",
        "--min-lr 3e-05",
        "--lr-decay-style cosine",
        f"--lr-warmup-samples {2000 * recipe.samples_per_step}",
        "--seed 42",
        "DATA/train",
    ):
        assert argument in words
    with pytest.raises(UserError, match="there are"):
        main([*question, "--megatron", "9999"])
    said = r"--megatron: speed.fp8 tensorwise, .*: Megatron-LM has no arguments"
    with pytest.raises(UserError, match=said):
        main([*question, "--megatron", "1", "--set", "speed.fp8=tensorwise"])
    with pytest.raises(UserError, match="muon"):
        main(["parallelism", "--recipe", "qk-norm", "--world_size", "8", "--gpu", "H100", "--megatron", "1"])
