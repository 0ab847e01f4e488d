"""Promise: ranks may split each sequence, and the curve stays the recipe's."""

import json

import numpy as np
import pytest
import torch

from pretraining.data.documents import document_borders, part_of_sequences
from pretraining.ds_config import Degrees, load_ds_config
from pretraining.evaluation.validation import _batch
from pretraining.model.parallel import document_mask
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime.process_group import RankGroups
from tests.checkpoints.test_reshard import unfinished
from tests.gear.finished_data import refusal
from tests.gear.runs import EXPERTS, LLAMA, Run, execute
from tests.training.test_curve import FP32, column, largest_difference

MASKED = ("data.document_masking=true", "data.packing=best_fit")
LONG = {
    **LLAMA,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}
NO_NOISE_SCALE = "monitors.noise_scale_steps=null"
"""It is refused: no rank has the gradient of whole sequences."""
SHORT = ("budget.tokens=2560", "training.per_device_train_batch_size=4")
"""Five steps of two micro-batches: four ranks at stage 3 on two cores wait for each other at every layer."""
ASKED = {
    "gpt2": ("zero2:sequence=2", 2, ()),
    "llama, fewer key-value heads than ranks, documents apart": (
        "zero3:sequence=4",
        4,
        (f"model={json.dumps({**LLAMA, 'num_attention_heads': 8})}", *SHORT, *MASKED),
    ),
    "experts, balanced over whole sequences": (
        "zero1:sequence=2",
        2,
        (
            f"model={json.dumps({**EXPERTS, 'router_aux_loss_coef': 1.0})}",
            "loss.router_z_loss=0.01",
            MASKED[0],
        ),
    ),
    "2,048 tokens, stretched positions, layers computed again": (
        "zero3:sequence=4",
        4,
        (
            f"model={json.dumps(LONG)}",
            "budget.tokens=8192",
            "budget.tokens_per_step=4096",
            "training.per_device_train_batch_size=1",
            "training.activation_checkpointing=true",
            *MASKED,
        ),
    ),
}


@pytest.mark.parametrize("stage, ranks, settings", ASKED.values(), ids=ASKED)
def test_split_sequences_have_the_curve_of_one_plain_process(workshop, stage, ranks, settings):
    """Losses, gradient norms, tokens and validations."""
    settings = (NO_NOISE_SCALE, *settings)
    alone, together = workshop.plain(settings), workshop.run(stage, ranks, settings=settings)
    for name, most in (("train/loss", FP32), ("train/grad_norm", 1e-3), ("train/tokens", 0)):
        assert largest_difference(column(together, name), column(alone, name)) <= most
    for ours, theirs in zip(together.validation_rows, alone.validation_rows, strict=True):
        assert ours["eval/loss"] == pytest.approx(theirs["eval/loss"], abs=FP32)
    [start] = [event for event in together.events if event["event"] == "start"]
    assert start["sequence"] == load_ds_config(stage)["sequence_parallel_size"]


@pytest.mark.parametrize(
    "saved_by, resumed_by", [(("zero2:sequence=2", 2), ("zero1", 1)), (("null", 1), ("zero3:sequence=2", 4))]
)
def test_a_run_goes_on_with_sequences_split_or_whole(workshop, tmp_path, saved_by, resumed_by):
    """Every later loss is that of the unbroken run."""
    settings = (NO_NOISE_SCALE,)
    whole = workshop.run(*saved_by, settings=settings) if saved_by[0] != "null" else workshop.plain(settings)
    folder = unfinished(whole, tmp_path / "run")
    finished = execute(workshop.command(folder, *resumed_by, settings=settings))
    assert finished.code == 0, finished.output
    assert Run(folder).losses == pytest.approx(whole.losses, abs=1e-5)


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


def test_a_validation_reads_a_part_of_each_sequence():
    """Each rank of a group its own, and attention exchanges them."""
    blocks = [{"input_ids": np.arange(8), "labels": np.arange(1, 9)}] * 2
    parts = [_batch(blocks, RankGroups(Degrees(sequence=2), rank, 4), torch.device("cpu")) for rank in (2, 3)]
    assert all(part["splits_sequences"] and part["input_ids"].shape == (2, 4) for part in parts)
    assert torch.cat([part["labels"] for part in parts], 1).tolist() == [list(range(1, 9))] * 2
    assert "splits_sequences" not in _batch(blocks, RankGroups(), torch.device("cpu"))


def test_the_mask_of_documents_is_the_one_of_their_borders():
    # two rows of three tokens; documents of 3, 1 and 2
    borders = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    mask = document_mask(borders, 2, 3)
    assert mask.shape == (2, 1, 3, 3)
    assert mask[0, 0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert mask[1, 0].tolist() == [[True, False, False], [False, True, False], [False, True, True]]


NOISE_SCALE, EAGER = "monitors.noise_scale_steps=5", "model.attn_implementation=eager"


@pytest.mark.parametrize(
    "deepspeed, settings, ranks, said",
    [
        (
            "zero2:sequence=3",
            (),
            3,
            "zero2:sequence=3: sequence 3: does not divide the 4 attention heads; 2 does",
        ),
        ("zero2:sequence=8", (), 8, "does not divide the 4 attention heads; 4 does"),
        (
            "zero3:sequence=4",
            (),
            6,
            "needs a multiple of 4 ranks, and there are 6; degrees that divide 6: 1, 2, 3, 6",
        ),
        ("zero3:sequence=two", (), 2, "'two' is no number of ranks; write sequence=2"),
        ("zero3:seqence=2", (), 2, "there is no degree 'seqence'; did you mean 'sequence'?"),
        ("zero1:sequence=2", (NOISE_SCALE,), 2, "monitors.noise_scale_steps: does not go with"),
        ("zero1:sequence=2", (EAGER,), 2, "is eager; split sequences go with sdpa"),
        ("zero1:sequence=2", ("budget.tokens_per_step=128",), 4, "2 groups of 2 ranks"),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_line(deepspeed, settings, ranks, said):
    """From the plan already, with the nearest degree that divides."""
    assert said in refusal(load_recipe_and_ds_config, "tiny", settings, deepspeed, ranks)
