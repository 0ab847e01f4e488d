"""Healing: a spike is judged alike on all ranks and at all stages, and what was done about it is repeated exactly."""

import gc
import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest

from pretraining.checkpoints.format import Start
from pretraining.checkpoints.resume import refuse_lost_rollbacks, roll_back
from pretraining.errors import GaveUp, UserError
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.journal import Journal
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.monitors import SettledCollector
from pretraining.training.trainer import PretrainingTrainer
from tests.gear.poisoned import (
    CLEAN_AGAIN,
    FIRST_NOISY,
    SAMPLES_PER_STEP,
    STEPS,
    PoisonedWorkshop,
    events,
    losses,
)
from tests.gear.runs import Run, committed, completed, contents, execute, made_once, start_and_kill
from tests.gear.small_checkpoints import identity_of, save
from tests.training.test_curve import largest_difference

WINDOW = (FIRST_NOISY - 4) * SAMPLES_PER_STEP, (FIRST_NOISY + 2) * SAMPLES_PER_STEP
"""Positions of the steps 50 to 55: three before the first noisy step and three from it on."""


@pytest.fixture(scope="session")
def poisoned(workshop, tmp_path_factory) -> PoisonedWorkshop:
    return PoisonedWorkshop(tmp_path_factory.mktemp("poisoned"), workshop.folder / "corpus")


def test_a_spike_is_rolled_back_and_its_samples_are_left_out(poisoned):
    """Two ranks, ZeRO-2: back to step 40, on without the noise, and the run still makes all of its steps."""
    run = poisoned.run()
    (spike,), (rollback,) = events(run, "spike"), events(run, "rollback")
    assert spike["step"] == FIRST_NOISY and spike["score"] > 6 and spike["causes"] and spike["try"]
    assert {document["source"] for document in spike["documents"]} == {"noise"}
    assert (rollback["step"], rollback["to_step"]) == (FIRST_NOISY, 40)
    assert Journal.read(run.dir.journal).left_out == [WINDOW] == [tuple(rollback["samples"])]
    assert max(losses(run)[40:]) < spike["expected"] * 1.1  # no noise was trained on
    assert run.checkpoints == ["checkpoint-40", "checkpoint-60"]


def test_killed_after_the_rollback_and_resumed_repeats_it_exactly(poisoned):
    """Promise: the journal is part of the run. Every loss equals the undisturbed run's to the last digit."""
    output = poisoned.folder / "killed"
    command = poisoned.command(output)
    after = FIRST_NOISY - 3

    def has_gone_on() -> bool:
        run = Run(output)
        return bool(events(run, "rollback")) and any(row["step"] >= after for row in run.rows[40:])

    start_and_kill(command, has_gone_on)
    assert committed(output)[0] == "checkpoint-40" and not (output / "export").exists()
    run = Run(output, completed(command))
    assert len(events(run, "rollback")) == 1
    assert losses(run) == losses(poisoned.run())


def test_a_spike_is_skipped_alike_without_deepspeed_and_at_stage_3(poisoned):
    """Promise: the curve belongs to the recipe. Skipped steps leave the weights alone; benchmarks/healing.py goes
    through every stage.
    """
    settings = ("monitors.spikes.policy=skip",)
    plain, run = poisoned.run("null", 1, "plain", settings), poisoned.run("zero3", settings=settings)
    assert run.training_rows[-1]["stability/refused_steps"] == CLEAN_AGAIN - FIRST_NOISY
    assert [event["step"] for event in events(run, "spike")] == [FIRST_NOISY]
    assert losses(run) == pytest.approx(losses(plain), abs=1e-5)
    assert losses(run)[FIRST_NOISY - 1] > 1.3 * losses(run)[FIRST_NOISY - 2]
    assert losses(run)[CLEAN_AGAIN - 1] < 1.1 * losses(run)[FIRST_NOISY - 2]
    for row in [*run.training_rows, *plain.training_rows]:  # each step of this mixture reads one source
        read, other = ("noise", "text") if FIRST_NOISY <= row["step"] < CLEAN_AGAIN else ("text", "noise")
        assert row[f"train/{read}_loss"] == pytest.approx(row["train/loss"], abs=1e-5)
        assert f"train/{other}_loss" not in row
    rates = [[row["train/learning_rate"] for row in r.training_rows] for r in (run, plain)]
    assert rates[0] == rates[1] and len(set(rates[0][10:])) == STEPS - 10  # each step has its own rate


def test_steps_beyond_mean_and_deviations_are_left_out_alike_and_again_after_a_resume(poisoned, tmp_path):
    """OLMo 3's rule at stage 3 on two ranks, as without DeepSpeed; the window is part of the checkpoint."""
    rule = ("policy=skip", "rule=deviations", "window=32", "score=5")
    settings = tuple(f"monitors.spikes.{each}" for each in rule)
    plain, run = poisoned.run("null", 1, "plain", settings), poisoned.run("zero3", settings=settings)
    refused = [[row["stability/refused_steps"] for row in each.training_rows] for each in (run, plain)]
    assert refused[0] == refused[1] and not any(refused[0][:16])
    assert refused[0][CLEAN_AGAIN - 2] - refused[0][FIRST_NOISY - 2] == CLEAN_AGAIN - FIRST_NOISY
    spike = next(each for each in events(run, "spike") if each["step"] == FIRST_NOISY)
    assert not spike["applied"] and spike["score"] > 5
    assert losses(run) == pytest.approx(losses(plain), abs=1e-5)
    norms = [[row["train/grad_norm"] for row in each.training_rows] for each in (run, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and all(map(math.isfinite, norms[0]))
    output = tmp_path / "resumed"
    shutil.copytree(run.folder, output)
    for name in ("export", "checkpoint-60"):
        shutil.rmtree(output / name)
    resumed = Run(output, completed(poisoned.command(output, "zero3", settings=settings)))
    assert losses(resumed) == losses(run)


def test_a_rollback_frees_what_training_froze_and_looks_at_nothing_else(monkeypatch):
    """Memory is needed again; to look at all that is imported takes a second, at every stage of the doctor."""
    done = []
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: done.append(name))
    collector = SettledCollector()
    accelerator, handler = SimpleNamespace(free_memory=list), SimpleNamespace(callbacks=[collector])
    trainer = SimpleNamespace(is_deepspeed_enabled=False, accelerator=accelerator, callback_handler=handler)
    PretrainingTrainer.release(trainer)
    assert done == ["collect"]
    collector.on_train_begin(None, None, None)
    PretrainingTrainer.release(trainer)
    assert done == ["collect", "collect", "freeze", "unfreeze", "collect"]


def test_a_checkpoint_whose_rollbacks_are_not_known_is_refused(poisoned, tmp_path):
    """Promise: samples are the recipe's and the journal's. Without its rows the wrong samples would be left out."""
    run = poisoned.run().dir
    refuse_lost_rollbacks(run.checkpoint(60), run, Journal.read(run.journal))
    refuse_lost_rollbacks(run.checkpoint(40), run, Journal())
    with pytest.raises(
        UserError, match="checkpoint-60 was trained after 1 rollbacks and this journal holds 0"
    ):
        refuse_lost_rollbacks(run.checkpoint(60), run, Journal())


def test_no_rollback_left_ends_with_its_own_code_and_one_line(poisoned, tmp_path):
    """Exit code 77, nothing committed is lost, and the event says what to try."""
    output = tmp_path / "run"
    shutil.copytree(poisoned.run().folder, output)
    Journal().write(output / "journal.jsonl")
    for name in ("export", "checkpoint-60"):
        shutil.rmtree(output / name)
    before = contents(output / "checkpoint-40")
    command = poisoned.command(output, settings=("monitors.spikes.max_rollbacks=0",))
    finished = execute(command)
    assert finished.code == 77, finished.output
    assert finished.stderr.splitlines()[-1].startswith("error: ") and "gave up" in finished.stderr
    assert contents(output / "checkpoint-40") == before
    assert events(Run(output), "gave_up")[0]["step"] == FIRST_NOISY


ROLLBACKS = {
    "as old as asked for": ((40, 48, 50), None, 53, 48, 49),
    "nearer, as none is older": ((50, 52), None, 53, 50, 50),
    "nothing was saved yet": ((), None, 6, 0, 2),
    "at the beginning": ((4,), None, 6, 4, 4),
    "to where it began": ((40,), 50, 53, "checkpoint-50", 50),
    "above where it began": ((40, 51), 50, 56, 51, 52),
    "saved at the spike": ((53,), None, 53, None, None),
    "began at the spike": ((40,), 53, 53, None, None),
}
"""Saved steps, where the run began elsewhere, the spike; the step to go back to, and the first one without samples."""


@pytest.mark.parametrize("saved, began, spike, target, first", ROLLBACKS.values(), ids=ROLLBACKS)
def test_no_rollback_goes_below_what_there_is(tmp_path, capsys, saved, began, spike, target, first):
    """Promise: nothing committed is lost. To the beginning only if nothing was saved; samples trained on stay."""
    settings = ("monitors.spikes.policy=rollback", "monitors.spikes.skip_steps=3")
    run, identity = RunFolder(tmp_path / "run"), identity_of(*settings)
    run.path.mkdir()
    for step in saved:
        save(run, step, identity=identity)
    start = Start.at(save(RunFolder(tmp_path / "other"), began, identity=identity)) if began else Start()
    recipe, whole = identity.recipe, contents(run.path)
    if target is None:
        with pytest.raises(GaveUp, match="a spike; no whole checkpoint from before it is left"):
            roll_back(run, start, recipe, spike, "a spike")
        assert not run.journal.exists() and {*contents(run.path)} == {*whole, "events.jsonl"}
        return
    resume = roll_back(run, start, recipe, spike, "a spike")
    is_other = isinstance(target, str)
    assert resume == (str(tmp_path / "other" / target) if is_other else "auto")
    (rollback,) = Journal.read(run.journal).rollbacks
    assert rollback.to_step == (began if is_other else target)
    unit = recipe.tokens_per_step // recipe.sequence_length
    assert rollback.samples == (first * unit, (spike + 2) * unit)
    assert ("nearer than" in capsys.readouterr().out) == (rollback.to_step > spike - 4)


def test_a_run_begun_elsewhere_is_rolled_back_to_there(poisoned, tmp_path):
    """Also if a launcher has started it again: `--resume` as typed, and the checkpoint it began with."""
    begun_at = poisoned.run().dir.checkpoint(40)
    settings = ("monitors.spikes.skip_steps=20", "training.save_steps=60")
    more = ("--resume", begun_at)
    command = poisoned.command(tmp_path / "run", "null", 1, "plain", settings, more)
    launch = {"PRETRAINING_SUPERVISOR": str(tmp_path), "PRETRAINING_RESTART": "1"}
    run = Run(tmp_path / "run", completed(command, **launch))
    (rollback,) = events(run, "rollback")
    assert rollback["to_step"] == 40 and not events(run, "start")
    assert [event["step"] for event in events(run, "resume")] == [40, 40]
    assert [row["step"] for row in run.training_rows] == [*range(41, STEPS + 1)]


@pytest.fixture(scope="session")
def ruled(workshop) -> tuple[str, ...]:
    """Settings for the workshop's text with runs of one character, enough to fill whole steps."""
    path = workshop.folder / "ruled.jsonl"
    sources = [{"path": str(workshop.folder / "corpus")}, {"path": str(path)}]
    text, noise = ({"until": 2048, "weights": {"corpus": 1}}, {"until": 3072, "weights": {"ruled.jsonl": 1}})
    mixture = {"stages": [text, noise, {}]}
    settings = (
        "data.name=ruled",
        f"data.sources={json.dumps(sources)}",
        f"data.mixture={json.dumps(mixture)}",
        "monitors.flagged_blocks=skip",
    )
    words = [word for setting in settings for word in ("--set", setting)]

    def prepare() -> int:
        path.write_text("".join(json.dumps({"text": "=========\n" * 100 + str(n)}) + "\n" for n in range(40)))
        return execute([sys.executable, "data_prep.py", *workshop.options(*words)]).code

    assert made_once(workshop.folder / "ruled.prepared", prepare) == 0
    return settings


def test_ranks_skip_the_same_blocks_and_share_one_curve(workshop, ruled):
    """One plain process and two under ZeRO-2: the same blocks and losses; a step of skipped blocks alone has 0."""
    alone, together = workshop.plain(ruled), workshop.run("zero2", settings=ruled)
    rows = [{row["sample"]: row for row in read_rows(run.dir.flagged_blocks)} for run in (alone, together)]
    # loaders read ahead of the last step, more of them with more ranks
    assert all(row["skipped"] for row in rows[0].values()) and rows[0].keys() & set(range(80))
    assert {k for k in rows[0] if k < 80} == {k for k in rows[1] if k < 80}
    assert largest_difference(alone.losses, together.losses) <= 1e-6
    assert 0.0 in alone.losses and all(math.isfinite(loss) for loss in alone.losses)
