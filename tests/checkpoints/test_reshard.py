"""Promise: a checkpoint of any ZeRO stage on any ranks goes on at any other, with the curve intact."""

import pytest
import torch

from pretraining.checkpoints.export import reshard
from pretraining.checkpoints.folders import damage
from pretraining.checkpoints.shard_files import CheckpointReader, assemble
from tests.gear.runs import Run, completed, execute, refused, way
from tests.model.test_layouts import LAYERS, MIXTURE, NO_NOISE_SCALE
from tests.model.test_mup import MUP
from tests.training.test_averages import SCHEDULE_FREE
from tests.training.test_curve import column
from tests.training.test_muon import EVERY_FLAG

GOES_ON = {
    # shrinking and growing, sharded and not, offloaded and not
    ("zero2", "null"): (),
    ("zero2", "zero2_offload"): (),
    ("zero3", "zero1/4"): (),
    ("zero3", "zero3_offload/1"): (),
    ("zero3_hpz:hpz=2/4", "zero1/1"): (),
    ("zero2", "zero3_hpz:hpz=2/4"): (),
    ("zero2:sequence=2", "zero1/1"): (NO_NOISE_SCALE,),
    ("null", "zero3:sequence=2/4"): (NO_NOISE_SCALE,),
    ("zero1_tp2", "null"): LAYERS,
    ("zero3:tensor=2/4", "zero1_tp2"): LAYERS,
    ("null", "zero3:tensor=2/4"): LAYERS,
    ("zero1_tp2", "zero2:sequence=2"): (*LAYERS, NO_NOISE_SCALE),
    ("zero3:expert=2/4", "null"): MIXTURE,
    ("null", "zero2:expert=4/4"): MIXTURE,
    ("zero3:expert=2/4", "zero1:expert=2"): MIXTURE,
}
"""{(saved at, resumed at): settings}"""
DROPOUT = ("model.resid_pdrop=0.1", "model.embd_pdrop=0.1", "model.attn_pdrop=0.1")
OF_OPTIMIZERS = {"Muon": EVERY_FLAG, "schedule-free": SCHEDULE_FREE, "muP": MUP}
ROWS = {f"{there} to {here}": (there, here, settings) for (there, here), settings in GOES_ON.items()}
ROWS |= {f"{name}, zero3 to null": ("zero3", "null", settings) for name, settings in OF_OPTIMIZERS.items()}
# as many ranks as before: each goes on with the random numbers that it had
ROWS |= {
    "dropout, zero2 to zero3": ("zero2", "zero3", DROPOUT),
    "dropout, one rank": ("null", "null", DROPOUT),
}


@pytest.mark.parametrize("saved_at, resumed_at, settings", ROWS.values(), ids=ROWS)
def test_any_layout_goes_on_at_any_other(workshop, tmp_path, saved_at, resumed_at, settings):
    """The same command with another stage and other ranks: every later loss within 1e-5 of the unbroken run's."""
    whole = workshop.run(*way(saved_at), settings)
    run = workshop.continued(whole, tmp_path / "run", *way(resumed_at), settings)
    resume = next(event for event in run.events if event["event"] == "resume")
    assert (resume["checkpoint"], resume["world_size"]) == ("checkpoint-8", way(resumed_at)[1])
    assert run.losses == pytest.approx(whole.losses, abs=1e-5)
    assert column(run, "train/learning_rate") == column(whole, "train/learning_rate")


def test_the_command_writes_what_a_run_goes_on_from(workshop, tmp_path):
    """`reshard` refuses to overwrite, and its folder is a checkpoint for --resume PATH, also of as many ranks."""
    whole = workshop.run("zero2", 2)
    source, target = whole.folder / "checkpoint-8", tmp_path / "target"
    verb = ["-m", "pretraining.checkpoints", "reshard", source, "--files", "2", "--to", target]
    words = ["forked", "0", *verb]
    # of one that was killed
    (tmp_path / "target.partial").mkdir()
    assert execute(words).code == 0 and damage(target) is None
    assert not (tmp_path / "target.partial").exists()
    refused(execute(words), "is there already")
    # data and schedule go on after step 8 as its marker says, whatever the folder is called
    finished = completed(workshop.command(tmp_path / "run", "zero2", 2, more=("--resume", target)))
    assert "missing keys" not in finished.output
    assert [row["train/loss"] for row in Run(tmp_path / "run").training_rows] == whole.losses[8:]


def test_other_files_hold_the_same_checkpoint(workshop, tmp_path):
    """Rewritten into five files, and those into one: committed, whole, and every state the same bit for bit."""
    source = workshop.run("zero3", 2).folder / "checkpoint-8"
    reshard(source, tmp_path / "five", 5)
    reshard(tmp_path / "five", tmp_path / "one", 1)
    saved = CheckpointReader(source)
    for folder, ranks in ((tmp_path / "five", 5), (tmp_path / "one", 1)):
        assert damage(folder) is None
        rewritten = CheckpointReader(folder)
        assert rewritten.ranks == ranks and rewritten.state == saved.state
        for name in saved.parameters:
            assert rewritten.states(name) == saved.states(name) == ["exp_avg", "exp_avg_sq", "master"]
            for state in saved.states(name):
                assert torch.equal(assemble(rewritten, name, state), assemble(saved, name, state))
