"""Documents packed into one block and kept apart: the loss is that of the same documents one by one."""

import copy
import json
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from pretraining.data.documents import IGNORED, document_borders
from pretraining.data.packed_dataset import PackedDataset
from pretraining.model import attention
from pretraining.model.abilities import document_by_document
from pretraining.model.build import build_model
from pretraining.model.loss import next_token_loss
from pretraining.recipe import load_recipe
from pretraining.recipe.fixed_keys import changed_parts
from pretraining.training.trainer import collate_blocks
from tests.data.test_shards import random_documents, write_split
from tests.gear.runs import FAMILIES, LLAMA, TOKENIZER, completed, execute, made_once
from tests.training.test_batch_ramp import RAMPED
from tests.training.test_curve import assert_one_curve

LENGTH = 64


@pytest.fixture
def split(tmp_path):
    """Documents of 1 to 39 tokens in several shards; ids that the small models have."""
    documents = [document % 512 for document in random_documents(60)]
    return write_split(tmp_path / "split", documents, 300)


def test_positions_begin_anew_and_no_target_crosses_a_border(split):
    """Every block, by a loop over its tokens; what is left out is one target a document."""
    ends = set(split.document_ends(0, split.num_tokens).tolist())
    masked, plain = (PackedDataset(split, LENGTH, masks_documents=masks) for masks in (True, False))
    for block in range(len(masked)):
        ours, theirs, start = masked[block], plain[block], block * LENGTH
        position, positions, labels = -1, [], []
        for place in range(LENGTH):
            position = 0 if place == 0 or start + place in ends else position + 1
            positions.append(position)
            crosses = start + place + 1 in ends
            labels.append(IGNORED if crosses else int(theirs["labels"][place]))
        assert ours["position_ids"].tolist() == positions and ours["labels"].tolist() == labels
        assert (ours["input_ids"] == theirs["input_ids"]).all()
        assert {array.dtype for array in ours.values()} == {np.dtype(np.int64)}


def test_borders_are_those_of_the_batch_as_one_row():
    """Each row begins a document; the bound on lengths does not vary."""
    borders = document_borders(np.array([[0, 1, 0, 1], [0, 0, 1, 2]]))
    assert borders["cu_seq_lens_q"].tolist() == borders["cu_seq_lens_k"].tolist() == [0, 2, 4, 5, 8]
    assert borders["cu_seq_lens_q"].dtype == np.int32 and borders["max_length_q"] == 4


def one_by_one(model, batch) -> torch.Tensor:
    """Mean loss over the documents of a batch, each a forward pass of its own."""
    borders, labels = batch["cu_seq_lens_q"].tolist(), batch["labels"].flatten()
    counted, losses = (labels != IGNORED).sum(), []
    for first, stop in pairwise(borders):
        outputs = model(input_ids=batch["input_ids"].flatten()[None, first:stop])
        losses.append(next_token_loss(outputs, labels[None, first:stop], counted))
    return sum(losses)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_packed_loss_is_that_of_the_documents_one_by_one(split, arguments, name):
    """fp64, loss and every gradient, by the whole path: block, batch, mask. Without masking it is another loss."""
    eager = {"experts_implementation": "eager"} if "experts" in str(FAMILIES[name]) else {}
    section = {**FAMILIES[name], **eager}
    model = build_model(section, TOKENIZER, arguments, masks_documents=True).double()
    alone = copy.deepcopy(model)
    dataset = PackedDataset(split, LENGTH, masks_documents=True)
    batch = collate_blocks(dataset.__getitems__([0, 5, 9]))
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    packed, separate = next_token_loss(model(**inputs), batch["labels"]), one_by_one(alone, batch)
    packed.backward()
    separate.backward()
    torch.testing.assert_close(packed, separate, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    unmasked = next_token_loss(model(input_ids=batch["input_ids"]), batch["labels"])
    assert abs(unmasked - packed) > 1e-4


def by_documents(*given, window_size, **settings):
    assert window_size == (-1, 0)
    return document_by_document(*given, window_size=window_size, **settings)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_torch_s_kernel_is_handed_the_documents(split, arguments, name, monkeypatch):
    """Shapes, borders, grouped heads: the kernel itself, which needs a GPU, is stood in for by its definition."""
    monkeypatch.setattr(attention.varlen, "varlen_attn", by_documents)
    by_mask = build_model(FAMILIES[name], TOKENIZER, arguments, masks_documents=True).double().eval()
    section = {**FAMILIES[name], "attn_implementation": attention.TORCH_VARLEN}
    by_kernel = build_model(section, TOKENIZER, arguments, masks_documents=True).double().eval()
    batch = collate_blocks(PackedDataset(split, LENGTH, masks_documents=True).__getitems__([0, 5]))
    batch.pop("labels")
    torch.testing.assert_close(by_kernel(**batch).logits, by_mask(**batch).logits)


@pytest.mark.gpu
def test_torch_s_kernel_equals_the_mask_on_a_gpu(split, tmp_path):
    """bf16: logits of both within its rounding."""
    arguments, logits = TrainingArguments(output_dir=str(tmp_path), bf16=True, seed=7), []
    batch = collate_blocks(PackedDataset(split, LENGTH, masks_documents=True).__getitems__([0, 5]))
    batch.pop("labels")
    batch = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
    for kernel in (attention.TORCH_VARLEN, "sdpa"):
        section = {**LLAMA, "attn_implementation": kernel}
        model = build_model(section, TOKENIZER, arguments, masks_documents=True).cuda().bfloat16()
        logits.append(model(**batch).logits)
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.02)


def test_runs_from_before_there_was_a_choice_go_on():
    """A recipe without the key is one that does not mask; one that masks has another curve."""
    now = load_recipe("features/gpt2").to_dict()
    before = {**now, "data": {key: value for key, value in now["data"].items() if key != "document_masking"}}
    assert not changed_parts(now, before)
    masked = load_recipe("features/gpt2", ["data.document_masking=true"]).to_dict()
    assert [each.key for each in changed_parts(masked, before)] == ["data.document_masking"]


@pytest.fixture(scope="module")
def lines(workshop) -> tuple[str, ...]:
    """Settings that train on documents of a line each, of which a block holds several, in a ramp."""
    texts = [path.read_text() for path in sorted((workshop.folder / "corpus").glob("*.txt"))]
    rows = [line for text in texts for line in text.splitlines() if len(line) > 20][:1200]
    file = workshop.folder / "lines" / "lines.jsonl"
    settings = ("data.name=lines", f'data.sources=[{{"path": "{file}"}}]')
    words = [word for setting in settings for word in ("--set", setting)]

    def prepare() -> int:
        file.parent.mkdir()
        file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        return execute([sys.executable, "data_prep.py", *workshop.options(*words)]).code

    assert made_once(workshop.folder / "lines.prepared", prepare) == 0
    return (*settings, "data.document_masking=true", "data.packing=best_fit", *RAMPED)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_the_stage_does_not_change_the_curve_of_packed_and_masked_documents_in_steps_that_grow(
    workshop, lines, stage
):
    """Ranks hold different numbers of targets, also where gradients are summed in partitions: still the losses, norms
    and validation of one plain process."""
    alone, together = workshop.plain(lines), workshop.run(stage, settings=lines)
    assert "attention: sdpa (documents apart)" in together.finished.stdout
    [start] = [event for event in together.events if event["event"] == "start"]
    assert start["cuts"]["best_fit"]["cropped"] < start["cuts"]["in_sequence"]["cropped"] / 4
    assert f"cut {start['cuts']['best_fit']['cut']:.2%} of the documents" in together.finished.stdout
    assert_one_curve(together, alone, 1e-6, rel=1e-5)


def test_the_evaluation_command_keeps_documents_apart_too(workshop, lines):
    """The loss that the run's own last validation found, of its export."""
    run = workshop.run("zero3", settings=lines)
    command = ["forked", "0", "-m", "pretraining.evaluation", run.folder, "--data_dir", workshop.data]
    finished = completed([*command, "--json", "--no-sample"])
    found, row = json.loads(finished.stdout), run.validation_rows[-1]
    for name in ("loss", "bits_per_byte", "perplexity"):
        assert found[name] == pytest.approx(row[f"eval/{name}"], abs=1e-5, rel=1e-5)
