"""Promise: ranks may split each layer, and the curve stays the recipe's."""

import json

import pytest
import torch
from safetensors import safe_open

from pretraining.checkpoints.export import reshard
from pretraining.checkpoints.folders import damage
from pretraining.checkpoints.shard_files import CheckpointReader, assemble
from pretraining.ds_config import load_ds_config
from pretraining.recipe.refusals import load_recipe_and_ds_config
from tests.checkpoints.test_reshard import unfinished
from tests.gear.finished_data import refusal
from tests.gear.runs import EXPERTS, LLAMA, Run, execute
from tests.training.test_curve import FP32, column, largest_difference

# two micro-batches a step, where no samples are split; 515 tokens of a vocabulary: no degree divides them
TWO = "training.per_device_train_batch_size=4"
QWEN3 = (f"model={json.dumps({**LLAMA, 'model_type': 'qwen3', 'head_dim': 16, 'vocab_size': 515})}", TWO)
TIED = {**LLAMA, "tie_word_embeddings": True, "vocab_size": 513}
BLOCKS = ("speed.compile=blocks", "speed.compile_backend=aot_eager")
MASKED = ("data.document_masking=true", "loss.z_loss=0.001")
NO_NOISE_SCALE = "monitors.noise_scale_steps=null"
ASKED = {
    "qwen3, whose norms of heads see a part of them": ("zero1_tp2", 2, QWEN3),
    "zero3, two groups of samples": ("zero3:tensor=2", 4, QWEN3),
    "zero2, compiled blocks": ("zero2:tensor=2", 2, (*QWEN3, *BLOCKS)),
    "experts whole, attention split, without ZeRO": (
        "zero0:tensor=2",
        2,
        (f"model={json.dumps(EXPERTS)}", *MASKED),
    ),
    "sequences split too": (
        "zero2:tensor=2,sequence=2",
        4,
        (f"model={json.dumps(TIED)}", TWO, NO_NOISE_SCALE, MASKED[0]),
    ),
    "one weight for embedding and head, chunked loss": (
        "zero3:tensor=2",
        2,
        (f"model={json.dumps(TIED)}", "loss.kind=chunked"),
    ),
}


@pytest.mark.parametrize("stage, ranks, settings", ASKED.values(), ids=ASKED)
def test_split_layers_have_the_curve_of_one_plain_process(workshop, stage, ranks, settings):
    """Losses, gradient norms, norms of layers, noise scale, tokens, validations and samples."""
    alone = workshop.plain(tuple(each for each in settings if each not in BLOCKS))
    together = workshop.run(stage, ranks, settings=settings)
    for name, most in (("train/loss", FP32), ("train/grad_norm", 1e-3), ("train/tokens", 0)):
        assert largest_difference(column(together, name), column(alone, name)) <= most
    for ours, theirs in zip(together.rows, alone.rows, strict=True):
        for key in theirs:
            if key.startswith(("stability/gradient", "eval/")):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3), key
    assert together.samples == alone.samples
    [start] = [event for event in together.events if event["event"] == "start"]
    assert start["tensor"] == load_ds_config(stage)["tensor_parallel"]["autotp_size"]


@pytest.mark.parametrize(
    "saved_by, resumed_by",
    [
        (("zero1_tp2", 2), ("null", 1)),
        (("zero3:tensor=2", 4), ("zero1_tp2", 2)),
        (("null", 1), ("zero3:tensor=2", 4)),
        (("zero1_tp2", 2), ("zero2:sequence=2", 2)),
    ],
)
def test_a_run_goes_on_with_layers_split_or_whole(workshop, tmp_path, saved_by, resumed_by):
    """Every later loss is that of the unbroken run, moments included."""
    settings = QWEN3 if "sequence" not in resumed_by[0] else (*QWEN3, NO_NOISE_SCALE)
    whole = workshop.run(*saved_by, settings=QWEN3) if saved_by[0] != "null" else workshop.plain(QWEN3)
    folder = unfinished(whole, tmp_path / "run")
    by = "plain" if resumed_by[0] == "null" else "forked"
    finished = execute(workshop.command(folder, *resumed_by, by, settings))
    assert finished.code == 0, finished.output
    assert Run(folder).losses == pytest.approx(whole.losses, abs=1e-5)


def test_a_checkpoint_names_each_part_by_what_it_is(workshop, tmp_path):
    """Whole states under the names of one process, each element once; rewritten without parts, the same bits."""
    source = workshop.run("zero1_tp2", settings=QWEN3).folder / "checkpoint-8"
    reshard(source, tmp_path / "three", 3)
    saved, rewritten = CheckpointReader(source), CheckpointReader(tmp_path / "three")
    alone = CheckpointReader(workshop.plain(QWEN3).folder / "checkpoint-8")
    assert damage(source) is None and damage(tmp_path / "three") is None
    assert saved.parameters == rewritten.parameters == alone.parameters
    for name in saved.parameters:
        assert saved.states(name) == alone.states(name)
        for state in saved.states(name):
            assert torch.equal(assemble(rewritten, name, state), assemble(saved, name, state))
            assert torch.allclose(assemble(saved, name, state), assemble(alone, name, state), atol=1e-4)
    # no element is saved twice
    numel = sum(saved.numel(name) * len(saved.states(name)) for name in saved.parameters)
    assert workshop.run("zero1_tp2", settings=QWEN3).saved_state_bytes == 4 * numel


def test_an_export_has_whole_weights_under_the_same_names(workshop):
    """At stages that gather them and stages that do not."""
    files = [
        workshop.plain(QWEN3).folder,
        workshop.run("zero1_tp2", settings=QWEN3).folder,
        workshop.run("zero3:tensor=2", 4, settings=QWEN3).folder,
    ]
    exports = [safe_open(folder / "export" / "model.safetensors", framework="pt") for folder in files]
    names = set(exports[0].keys())
    for export in exports[1:]:
        assert set(export.keys()) == names
        for name in names:
            assert torch.allclose(export.get_tensor(name), exports[0].get_tensor(name), atol=1e-4)


EIGHT_HEADS = f"model={json.dumps({**LLAMA, 'num_attention_heads': 8, 'vocab_size': 1024})}"
MUON, ADAFACTOR, BY_UNITS = "optimizer.name=muon", "training.optim=adafactor", "optimizer.adaptive_clip=0.1"
DEEPCOMPILE = ("speed.compile=deepcompile", "loss.kind=plain")
PRODUCTS = ("training.activation_checkpointing=true", "speed.recompute=operators")
OLMO2 = f"model={json.dumps({**LLAMA, 'model_type': 'olmo2', 'vocab_size': 1024})}"


@pytest.mark.parametrize(
    "deepspeed, settings, ranks, said",
    [
        ("zero1_tp2", (), 2, "gpt2 keeps queries, keys and values in one convolution"),
        ("zero1:tensor=4", (EIGHT_HEADS,), 4, "tensor 4: does not divide the 2 key-value heads; 2 does"),
        ("zero1:tensor=3", (EIGHT_HEADS,), 3, "tensor 3: does not divide the 8 attention heads; 2 does"),
        (
            "zero1_tp2",
            (EIGHT_HEADS,),
            3,
            "tensor 2: needs a multiple of 2 ranks, and there are 3; degrees that",
        ),
        ("zero1_tp2", (EIGHT_HEADS, MUON), 2, "optimizer.name: muon orthogonalises whole matrices"),
        ("zero0:tensor=2", (EIGHT_HEADS, ADAFACTOR), 2, "whose update looks at whole parameters"),
        ("zero1_tp2", (EIGHT_HEADS, BY_UNITS), 2, "compares norms of whole rows and columns"),
        ("zero1_tp2", (EIGHT_HEADS, *DEEPCOMPILE), 2, "deepcompile, which is not tried with split layers"),
        ("zero1_tp2", (EIGHT_HEADS, *PRODUCTS), 2, "speed.recompute: is operators, which keeps products"),
        ("zero3_hpz:tensor=2", (EIGHT_HEADS,), 8, "hpZ keeps copies of parameters by node"),
        ("zero3_nvme:tensor=2", (EIGHT_HEADS,), 2, "is not tried with states on NVMe"),
        (
            "zero1_tp2",
            (OLMO2,),
            2,
            "tensor 2: does not hold for olmo2 (its self_attn.q_proj is colwise_gather_output)",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_line(deepspeed, settings, ranks, said):
    """From the plan already, with the nearest degree that divides."""
    assert said in refusal(load_recipe_and_ds_config, "tiny", settings, deepspeed, ranks)
