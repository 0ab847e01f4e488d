"""Promise: the curve belongs to the recipe. What a recipe may ask for, on several ranks and in one plain process."""

import json
from dataclasses import dataclass

import pytest

from pretraining.recipe import RECIPES, load_recipe
from tests.gear.runs import EXPERTS, LLAMA, Workshop, section_of, way
from tests.model.test_compiling import BLOCKS
from tests.model.test_mup import MUP
from tests.recipe.test_modern import SMALL
from tests.training.test_activations import CLIPPED as QK_CLIPPED
from tests.training.test_activations import SEEN
from tests.training.test_averages import SCHEDULE_FREE
from tests.training.test_balance import PREFIX as LOAD_OF_EXPERTS
from tests.training.test_clipping import CLIPPED
from tests.training.test_curve import (
    BF16,
    FP32,
    IN_BF16,
    NO_NOISE_SCALE,
    SHORT,
    TWO,
    assert_one_curve,
    beginning,
    column,
    largest_difference,
)
from tests.training.test_gradient_monitors import PREFIX as LAYER_NORMS
from tests.training.test_gradient_monitors import SCALE as NOISE_SCALE
from tests.training.test_groups import OF_GPT2, OF_LLAMA
from tests.training.test_muon import CAUTIOUS, EVERY_FLAG, FLAGS, MUON, table


@dataclass(frozen=True)
class Feature:
    """Settings, and the ds_configs that train them: on two ranks, on four after `/4`."""

    settings: tuple[str, ...]
    layouts: str
    within: float = 1e-5
    moves: float = 1e-2
    """How far its curve is at least from that of the small recipe, as it is at work; 0 where it must not be."""
    own: tuple[str, ...] = ()
    """Settings of the ranks alone."""
    measured: tuple[str, ...] = ()
    """Beginnings of columns that are the same too."""
    package: str = "torch"
    says: str = ""
    """What the log has once."""


def optimizer_of(package: str, optim: str, layouts: str) -> Feature:
    settings = (f"training.optim={optim}", "training.learning_rate=0.001", "training.eval_strategy=no")
    return Feature((*SHORT, *settings), layouts, FP32, package=package)


def modern() -> Feature:
    """Return the demo's architecture and optimizer, cut small."""
    module = str((RECIPES / "modern" / "files" / "modern.py").resolve())
    model = section_of({"model_type": "modern", **SMALL, "vocab_size": 512, "max_position_embeddings": 64})
    optimizer = json.dumps(load_recipe("tiny").optimizer.to_dict())
    settings = (*SHORT, f"extensions={json.dumps([module])}", model, f"optimizer={optimizer}")
    return Feature(settings, "zero3")


SPLIT_HEADS = (*SHORT, section_of(LLAMA), TWO)
FUSED = ("loss.kind=fused", "loss.chunk_tokens=37")
UNTIED = section_of(LLAMA, tie_word_embeddings=False)
# its gradient is found inside the loss, before the backward pass reaches the model's output, at which DeepSpeed 0.19.8
# clears gradients: the head stayed as it was drawn
HEAD_IN_BF16 = (*SHORT, UNTIED, "training.bf16=true", "loss.kind=plain")
LOSS_OF_EXPERTS = (*SHORT, section_of(EXPERTS, tie_word_embeddings=False), "loss.kind=plain")
# without use_reentrant, for which torch has another default than the Trainer
RECOMPUTED = (
    "training.activation_checkpointing=true",
    "training.activation_checkpointing_kwargs.preserve_rng_state=true",
)
WORKERS = ("training.dataloader_num_workers=2", "training.per_device_train_batch_size=1")
FEATURES = {
    "signals of gradients": Feature(
        (), "zero0 zero1 zero2 zero3", FP32, moves=0, measured=(NOISE_SCALE, LAYER_NORMS)
    ),
    "Lion": optimizer_of("bitsandbytes", "lion_32bit", "zero1 zero2 zero3"),
    "8-bit AdamW": optimizer_of("bitsandbytes", "adamw_8bit", "zero0"),
    "Adafactor": optimizer_of("transformers", "adafactor", "zero0"),
    "schedule-free": Feature(SCHEDULE_FREE, "zero0 zero1 zero2 zero3"),
    # at stage 1 in bf16 DeepSpeed has another optimizer of flat partitions
    "schedule-free in bf16": Feature((*SHORT, *SCHEDULE_FREE, *IN_BF16), "zero1", BF16),
    "Muon": Feature((*SHORT, *MUON), "zero1", says="hidden matrices: muon"),
    "Muon in bf16": Feature((*SHORT, *MUON, *IN_BF16), "zero1", BF16),
    "Muon, every flag, groups": Feature(EVERY_FLAG, "zero0 zero2 zero3", says="\n* 4: muon"),
    "Muon, every flag, layers split": Feature(
        (*SPLIT_HEADS, *FLAGS, table([CAUTIOUS])), "zero0:tensor=2 zero1:tensor=2 zero3:tensor=2/4"
    ),
    "muP": Feature(MUP, "zero2 zero3"),
    "clipping by value and by units": Feature((*SHORT, *CLIPPED), "zero1 zero2_offload zero3", moves=1e-3),
    "groups": Feature((*SHORT, OF_GPT2, NO_NOISE_SCALE), "zero2 zero3"),
    "groups under muP": Feature((*SHORT, OF_GPT2, *MUP, NO_NOISE_SCALE), "zero1"),
    "groups, layers split": Feature((*SHORT, OF_LLAMA, section_of(LLAMA), NO_NOISE_SCALE), "zero2:tensor=2"),
    "groups of Muon, experts split": Feature(
        (*SHORT, OF_LLAMA, *MUON, section_of(EXPERTS), NO_NOISE_SCALE),
        "zero1:expert=2",
        FP32,
    ),
    "logits clipped": Feature((*SHORT, *QK_CLIPPED), "zero3", measured=SEEN, moves=0),
    "logits clipped, recomputed": Feature(
        (*SHORT, *QK_CLIPPED),
        "zero2_offload",
        own=("training.activation_checkpointing=true",),
        measured=SEEN,
        moves=0,
    ),
    "logits clipped, layers or sequences split": Feature(
        (*SHORT, *QK_CLIPPED, section_of(LLAMA)), "zero2:tensor=2 zero3:sequence=2", measured=SEEN
    ),
    "fused loss": Feature((*SHORT, "loss.kind=plain"), "zero2", moves=0, own=FUSED),
    "fused loss, compiled": Feature(
        (*SHORT, "loss.kind=plain"), "zero3", moves=0, own=(*FUSED, "loss.compile=true")
    ),
    "fused loss, a head of its own in bf16": Feature(
        HEAD_IN_BF16, "zero1", 2e-3, moves=0, own=("loss.kind=fused",)
    ),
    "fused loss of experts": Feature(
        LOSS_OF_EXPERTS, "zero3", FP32, own=("loss.kind=auto",), measured=(LOAD_OF_EXPERTS,)
    ),
    "compiled blocks": Feature((), "zero2 zero3 zero3_offload", moves=0, own=BLOCKS),
    "compiled model": Feature(SHORT, "null", moves=0, own=("speed.compile=whole", *BLOCKS[1:])),
    "compiled blocks behind a frozen embedding": Feature(
        (*SHORT, section_of(LLAMA), 'model.frozen=["model.embed_tokens.weight"]'), "zero3", own=BLOCKS
    ),
    "experts, recomputed": Feature(
        (*SHORT, section_of(EXPERTS, router_aux_loss_coef=1.0)), "zero3", FP32, own=RECOMPUTED
    ),
    "batches kept ready": Feature(SHORT, "null", 1e-6, moves=0, own=WORKERS),
    "the demo's recipe": modern(),
}
ROWS = [(name, layout) for name, feature in FEATURES.items() for layout in feature.layouts.split()]


@pytest.mark.parametrize("name, layout", ROWS, ids=[f"{name}-{layout}" for name, layout in ROWS])
def test_ranks_have_the_curve_of_one_plain_process(workshop: Workshop, name, layout):
    """A checkpoint has the size that the plan says, and the feature changes the curve."""
    feature = FEATURES[name]
    pytest.importorskip(feature.package)
    alone = workshop.plain(feature.settings)
    ours = workshop.run(*way(layout), (*feature.settings, *feature.own))
    for each in feature.measured:
        assert any(beginning(row, (each,)) for row in alone.training_rows)
    assert "is not compiled on any rank" not in ours.finished.output
    assert ours.finished.stdout.count(feature.says) == 1 or not feature.says
    # NorMuon's moments, a number a neuron, are in no plan
    planned = json.loads(ours.dir.plan.read_text())["checkpoint_bytes"]
    assert ours.saved_state_bytes == planned or set(FLAGS) <= set(feature.settings)
    assert_one_curve(ours, alone, feature.within, feature.measured)
    losses = column(alone, "train/loss")
    assert losses[-1] < losses[0] - 0.02
    usual = workshop.plain(SHORT if set(SHORT) <= set(feature.settings) else ())
    assert largest_difference(losses, column(usual, "train/loss")) >= feature.moves
