"""Promise: nothing committed is lost. Marker, verification, retention and the changes a run accepts, on small files."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pretraining.checkpoints.choosing import choose_checkpoint
from pretraining.checkpoints.folders import damage, rank_files, remove_uncommitted, set_aside_after
from pretraining.checkpoints.format import FORMAT, MARKER, Start, read_marker, receipt_name, write_marker
from pretraining.checkpoints.resume import changes_since, record_changes, recorded_changes
from pretraining.checkpoints.retention import Retention
from pretraining.errors import UserError
from pretraining.recipe import load_recipe, recipe_schema
from pretraining.recipe.fixed_keys import (
    BEFORE_THE_KEY,
    OURS,
    SOMETIMES,
    SPIKES,
    Change,
    changed_parts,
    check_allowed,
    refuse_changes,
)
from pretraining.recipe.sections import Checkpoints
from pretraining.runtime.durable_files import read_rows, write_json
from pretraining.runtime.run_folder import RunFolder
from tests.gear.checkpoint_damage import damaged, judged_rightly
from tests.gear.finished_data import refusal
from tests.gear.runs import committed
from tests.gear.small_checkpoints import MANIFEST, identity_of, save


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """Checkpoints after 4, 8 and 12 steps, everything kept."""
    run = RunFolder(tmp_path / "run")
    for step, loss in ((4, 3.0), (8, 1.0), (12, 2.0)):
        save(run, step, eval_loss=loss, loss=loss)
    return run


def test_the_marker_says_what_the_checkpoint_is(run):
    """Step, tokens, samples, ranks, stage, recipe, data, losses, and each file, the receipts among them."""
    marker = read_marker(run.checkpoint(8))
    assert (marker["step"], marker["tokens"], marker["samples"]) == (8, 8 * 2048, 8 * 2048 // 128)
    assert (marker["ranks"], marker["zero_stage"]) == (1, None)
    assert marker["recipe"]["name"] == "gpt2" and marker["data"]["fingerprint"] == MANIFEST["fingerprint"]
    assert marker["metrics"] == {"loss": 1.0, "eval_loss": 1.0}
    names = {"trainer_state.json", "state_0.bin", "state_1.bin", receipt_name(0, 1)}
    assert set(marker["files"]) == names
    assert all(entry["checksum"].startswith("xxh128:") for entry in marker["files"].values())


def test_an_edited_marker_is_refused(run):
    """A hand that changes one number, even to one that other programs would read as the same."""
    path = run.checkpoint(12) / MARKER
    for old, new in ((b'"step": 12', b'"step": 13'), (b'"loss": 2.0', b'"loss": 2.00')):
        content = path.read_bytes()
        path.write_bytes(content.replace(old, new, 1))
        assert path.read_bytes() != content
        assert "edited or damaged" in refusal(choose_checkpoint, run, str(path.parent))
        assert choose_checkpoint(run, "auto").folder == run.checkpoint(8)
        path.write_bytes(content)
    assert choose_checkpoint(run, "auto").folder == run.checkpoint(12)


def test_other_versions_are_refused_by_name(run):
    """A newer checkpoint is no damaged one: going back behind it would lose it. Nor is one from before."""
    folder = run.checkpoint(12)
    content = {key: value for key, value in read_marker(folder).items() if key not in ("format", "checksum")}
    write_marker(folder, {**content, "format": FORMAT + 1})
    with pytest.raises(UserError, match=rf"newer version \(format {FORMAT + 1}"):
        choose_checkpoint(run, "auto")
    (folder / MARKER).write_text(json.dumps({"step": 12, "files": {}, "checksums": {}}))
    assert "earlier version" in refusal(choose_checkpoint, run, "auto")


def test_random_damage_is_found_and_never_chosen(run):
    """Bit flips, truncations, deletions and swaps in any file of any checkpoint, markers and receipts included."""
    folders, chance = run.committed(), random.Random(4)
    for number in range(120):
        with damaged(run, chance) as (kind, harmed):
            assert harmed and judged_rightly(run, harmed, folders), (number, kind, harmed)
            for folder in harmed:
                assert f"--resume {folder}" in refusal(choose_checkpoint, run, str(folder))
    assert choose_checkpoint(run, "auto").folder == folders[0]


def test_swapped_folders_are_not_taken_for_each_other(run):
    """Whole folders under each other's names: neither is what its name says."""
    run.checkpoint(12).rename(run.path / "hold")
    run.checkpoint(8).rename(run.checkpoint(12))
    (run.path / "hold").rename(run.checkpoint(8))
    assert choose_checkpoint(run, "auto").folder == run.checkpoint(4)
    (run.checkpoint(4) / MARKER).write_text('{"files": {')
    # it does not begin anew by itself
    with pytest.raises(
        UserError, match=r"no checkpoint is whole, of step 12, 8, 4; .*--resume never keeps this run"
    ):
        choose_checkpoint(run, "auto")


def test_ranks_share_the_reading():
    """Each file is compared by one rank; the largest ones lie on different ranks."""
    files = {f"file-{number}": {"bytes": number * 100} for number in range(1, 8)}
    shares = [rank_files(files, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(entry["bytes"] for entry in share.values()) for share in shares]
    assert max(loads) - min(loads) <= 200


SCORES = {2: 5.0, 4: 1.0, 6: None, 8: float("nan"), 10: 3.0}
METRICS = ("eval_loss", "eval_hellaswag/acc_norm")
KEPT = [(step, {"metrics": dict.fromkeys(METRICS, score)}) for step, score in SCORES.items()]
BY_SCORE = Retention(Checkpoints(keep_last=1, keep_best=1), metric="hellaswag/acc_norm")
RULES = {
    "the last": (Retention(Checkpoints(keep_last=2)), {8, 10}),
    "all": (Retention(Checkpoints(keep_last=None)), {2, 4, 6, 8, 10}),
    "the best by validation loss": (Retention(Checkpoints(keep_last=1, keep_best=2)), {4, 10}),
    "the best are more": (Retention(Checkpoints(keep_last=1, keep_best=3)), {2, 4, 10}),
    "the best by a score": (BY_SCORE, {2, 10}),
    "every fourth step": (Retention(Checkpoints(keep_last=1, keep_every=4)), {4, 8, 10}),
}


@pytest.mark.parametrize("rule, steps", RULES.values(), ids=RULES)
def test_what_retention_keeps(rule, steps):
    """A checkpoint that was not validated, or with a NaN, is none of the best."""
    assert rule.kept_steps(KEPT) == steps


@pytest.mark.parametrize("decays, steps", {0: {8}, 2: {4, 8}, 4: {8}}.items())
def test_the_last_checkpoint_before_a_decay_stays(decays, steps):
    """From it a longer run or another decay begins. decays: how many of the four came after the rate began to fall."""
    markers = [(step, {"before_decay": True} if step <= 8 - 2 * decays else {}) for step in (2, 4, 6, 8)]
    assert Retention(Checkpoints(keep_last=1)).kept_steps(markers) == steps


def killed_at(call: int, work) -> bool:
    """Run `work` in a process that ends before its `call`-th change of a folder; whether it got to its end."""
    process = os.fork()
    if process == 0:
        count = iter(range(call))

        def counted(change):
            def counting(*args, **kwargs):
                if next(count, None) is None:
                    os._exit(9)
                return change(*args, **kwargs)

            return counting

        for name in ("unlink", "rmdir", "rename", "replace", "mkdir"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def demote_by_copy(run: RunFolder, checkpoint: Path, folder: Path) -> bool:
    """As a demotion does: whole under its name, or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(checkpoint, partial)
    partial.rename(folder)
    return True


def test_retention_may_be_killed_anywhere(run, tmp_path):
    """Before each change that it makes: what is committed is whole, and the next call finishes the work."""
    rule = Retention(Checkpoints(keep_last=1), demote=demote_by_copy)
    for call in range(1000):
        copy = RunFolder(shutil.copytree(run.path, tmp_path / f"copy-{call}"))
        done = killed_at(call, lambda copy=copy: rule.apply(copy))
        left = copy.committed()
        assert left[0] == copy.checkpoint(12) and all(damage(folder) is None for folder in left)
        for step in (4, 8):
            assert copy.checkpoint(step) in left or copy.weights(step).exists()
        remove_uncommitted(copy)
        rule.apply(copy)
        assert committed(copy.path) == ["checkpoint-12"]
        assert sorted(path.name for path in copy.path.glob("weights-*")) == ["weights-4", "weights-8"]
        if done:
            break
    assert call > 10


def test_what_is_given_up_is_set_aside(run):
    """Going on from step 4: what came later is neither in the way nor lost."""
    moved = set_aside_after(run, 4)
    assert committed(run.path) == ["checkpoint-4"]
    assert sorted(path.name.partition(".")[0] for path in moved) == ["checkpoint-12", "checkpoint-8"]
    assert all(damage(path) is None for path in moved)
    assert [row["event"] for row in read_rows(run.events)] == ["checkpoint_set_aside"] * 2


def accepted(run: RunFolder, *settings: str, allowed=(), manifest: dict = MANIFEST) -> list[str]:
    """The keys that differ from the checkpoint after 12 steps, where the start is not refused."""
    recipe, folder = identity_of(*settings).recipe, run.checkpoint(12)
    found = changes_since(folder, read_marker(folder), recipe, manifest, allowed, recorded_changes(run))
    return [change.key for change in found]


CHANGES = {
    "seed": ("training.seed=8", "training.seed"),
    "tokens per step": ("budget.tokens_per_step=4096", "budget.tokens_per_step"),
    "the model's dropout": ("model.resid_pdrop=0.1", "model.resid_pdrop"),
    "data": ("data.validation_share=0.05", "data.validation_share"),
}


@pytest.mark.parametrize("setting, key", CHANGES.values(), ids=CHANGES)
def test_a_changed_recipe_is_refused_by_name_or_accepted(run, setting, key):
    """--allow_change takes the key or its section, and no other."""
    said = rf"another recipe: {key}.*: .* there, .* here.* --allow_change {key}"
    with pytest.raises(UserError, match=said):
        accepted(run, setting)
    with pytest.raises(UserError, match=key):
        accepted(run, setting, allowed=["training.learning_rate"])
    for allowed in (key, key.split(".")[0]):
        assert accepted(run, setting, allowed=[allowed]) == [key]
    write_json(run.changes, [{"step": 12, "key": key, "from": None, "to": json.loads(setting.split("=")[1])}])
    assert accepted(run, setting) == [key], "what an earlier start accepted is asked for once"


def test_many_changes_are_accepted_by_section_and_another_model_is_not_offered():
    """Typing what a line proposes must lead on."""
    many = [Change(f"optimizer.{name}", 1, 2) for name in "abcde"]
    with pytest.raises(
        UserError, match=r"and 4 more; .*, or accept what changes with --allow_change optimizer$"
    ):
        refuse_changes(many, (), "runs/a", "run")
    with pytest.raises(UserError, match=r"or start over with --resume never$"):
        refuse_changes([*many, Change("model.model_type", "gpt2", "llama")], (), "runs/a", "run")


def test_what_no_key_names_is_compared_too(run):
    """Weights of sources down to the number, other tokens, other shapes; another name of the same tokens is none."""
    said = r"data\.sources\.0\.weight: null there, 0\.7 here.*--allow_change data\.sources"
    with pytest.raises(UserError, match=said):
        accepted(run, "data.sources.0.weight=0.7")
    assert accepted(run, "data.sources.0.weight=0.7", allowed=["data.sources"]) == ["data.sources"]
    assert accepted(run, "data.name=python-stdlib.replaced-1", "data.encoder=tokenizers") == []
    other = {**MANIFEST, "fingerprint": "xxh128:1"}
    assert "data.fingerprint" in refusal(accepted, run, manifest=other)
    assert accepted(run, manifest=other, allowed=["data"]) == ["data.fingerprint"]
    with pytest.raises(UserError, match=r"other shapes: model\.n_layer: 4 there, 5 here"):
        accepted(run, "model.n_layer=5", allowed=["model"])


def test_other_data_with_another_vocabulary_needs_a_word_of_its_own(tmp_path):
    """Two sources that each train a tokenizer of one size: the ids of one are nothing to the weights of the other."""
    ours, theirs = ({**MANIFEST, "tokenizer": {"fingerprint": name}} for name in ("ours", "theirs"))
    run, other = RunFolder(tmp_path / "run"), "data.sources.0.weight=0.7"
    save(run, 12, identity=replace(identity_of(), manifest=ours))
    assert accepted(run, other, allowed=["data.sources"], manifest=ours) == ["data.sources"]
    said = r"trained with another tokenizer \(ours, and .* has theirs\); .*--allow_change data\.tokenizer"
    with pytest.raises(UserError, match=said):
        accepted(run, other, allowed=["data.sources"], manifest=theirs)
    allowed = ["data.sources", "data.tokenizer"]
    assert accepted(run, other, allowed=allowed, manifest=theirs) == allowed
    write_json(run.changes, [{"step": 12, "key": "data.tokenizer", "from": "ours", "to": "theirs"}])
    found = accepted(run, other, allowed=["data.sources"], manifest=theirs)
    assert found == allowed, "it is written down again, for a start that is killed too"


LARGER, BY_TOKENS = "budget.tokens_per_step=4096", ("budget.warmup_tokens=102400", "training.warmup_steps=0")
FLAT = ("training.lr_scheduler_type=constant", "training.lr_scheduler_kwargs={}", "training.warmup_steps=0")
DECAYING = (
    "training.lr_scheduler_type=warmup_stable_decay",
    'training.lr_scheduler_kwargs={"num_decay_steps": 100}',
)
PLATEAU = ("training.lr_scheduler_type=reduce_lr_on_plateau", *FLAT[1:])
ACCEPTED = {
    "steps counted": (
        (LARGER,),
        "the learning rate stays where it was: the schedule cosine_with_min_lr goes on in steps of 2,048 tokens",
    ),
    "a ramp": (
        ('budget.ramp={"from_tokens_per_step": 512, "over_tokens": 20480}',),
        "the learning rate moves by it: the schedule cosine_with_min_lr counts steps",
    ),
    "a decay counted in steps": (
        (LARGER, *DECAYING),
        "budget.warmup_tokens (in place of training.warmup_steps) or budget.decay_tokens says the same",
    ),
    "tokens counted": ((LARGER, *BY_TOKENS), ""),
    "a flat rate": ((LARGER, *FLAT), ""),
    "another key": (("training.seed=8",), ""),
    "a peak": (
        ("training.learning_rate=0.1", *PLATEAU),
        "the learning rate stays where it is: reduce_lr_on_plateau",
    ),
    "a peak of a schedule by steps": (("training.learning_rate=0.1",), ""),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_change_says_what_becomes_of_the_rate(run, name, capsys):
    """In the line printed and in the event: of steps that are counted, with the keys that count tokens; of a peak."""
    settings, words = ACCEPTED[name]
    recipe, (key, _, value) = load_recipe("features/gpt2", settings), settings[0].partition("=")
    earlier = None if key == "budget.ramp" else 2048
    change = {"step": 12, "key": key, "from": earlier, "to": json.loads(value)}
    start = Start(run.checkpoint(12), 12, 12 * 2048, (change,))
    for _ in range(2):  # what an earlier start accepted is not said again
        record_changes(run, start, recipe)
    (line,) = capsys.readouterr().out.splitlines()
    now = json.dumps(json.loads(value))
    assert line.startswith(f"accepted: {key} is {now} from step 12 on, and was {json.dumps(earlier)}")
    (event,) = [row for row in read_rows(run.events) if row["event"] == "change_accepted"]
    assert ("learning rate" in line) == bool(words) == ("effect" in event)
    assert words in line and event.get("effect", "") in line
    assert json.loads(run.changes.read_text()) == [change]


def test_a_schedule_of_steps_goes_on_where_it_was_when_their_size_changes():
    """Twice, and in both directions: at the tokens of an unchanged run it is where that run is, at the end too."""
    whole = load_recipe("features/gpt2").progress()
    recipe = load_recipe("features/gpt2", ["budget.tokens_per_step=1024"])
    key, steps = "budget.tokens_per_step", ((400, 2048, 4096), (500, 4096, 1024))
    changes = [{"step": step, "key": key, "from": earlier, "to": now} for step, earlier, now in steps]
    progress = Start(None, 500, 400 * 2048 + 100 * 4096, tuple(changes)).progress(recipe)
    places = {399: 399, 400: 400, 401: 402, 500: 600, 501: 600.5, progress.last_step: whole.last_step}
    assert {step: progress.schedule_place(step) for step in places} == places
    # a schedule that was set anew at the same step counts the new steps
    renewed = (*changes, {"step": 500, "key": "training.warmup_steps", "from": 100, "to": 50})
    assert Start(None, 500, 0, renewed).progress(recipe).schedule_place(700) == 700


def test_with_tokens_counted_the_rate_stays_where_it_was():
    """As large a share of the schedule is done as before the steps grew."""
    before, now = load_recipe("features/gpt2"), load_recipe("features/gpt2", [LARGER, *BY_TOKENS])
    progress = Start(None, 400, 400 * 2048).progress(now)
    clock, last = progress.schedule_place, progress.last_step
    assert clock(400) / clock(last) == 400 / before.num_steps
    assert now.warmup_steps(last) / clock(last) == before.warmup_steps(before.num_steps) / before.num_steps


def test_changed_tokens_per_step_keep_the_budget_and_the_position(run):
    """12 steps of 2,048 tokens, then steps of 4,096: no sample twice, and the run ends with its budget."""
    recipe = identity_of(LARGER).recipe
    start = Start.at(run.checkpoint(12))
    assert start.tokens == 12 * 2048 and start.progress(recipe).first_sample * 128 == start.tokens
    last = start.progress(recipe).last_step
    assert start.progress(recipe).tokens_at(last) == recipe.budget.tokens and last == 12 + (1000 - 12) // 2
    again = save(run, 20, identity=replace(identity_of(LARGER), start=start))
    assert Start.at(again).progress(recipe).last_step == last
    assert read_marker(again)["tokens"] == 12 * 2048 + 8 * 4096


def test_a_recipe_from_before_a_key_is_the_same_recipe():
    """Every key of ours that has a default may come after a run: taken out of its recipe, nothing has changed."""
    now, properties = load_recipe("features/gpt2").to_dict(), recipe_schema()["properties"]
    for section in OURS:
        for key in now.get(section, {}):
            if "default" not in properties[section]["properties"][key]:
                continue
            earlier = {**now, section: {name: value for name, value in now[section].items() if name != key}}
            differs = BEFORE_THE_KEY.get(f"{section}.{key}", now[section][key]) != now[section][key]
            is_default = now[section][key] == properties[section]["properties"][key]["default"]
            assert bool(changed_parts(now, earlier)) == (differs or not is_default), f"{section}.{key}"


PLATEAU_STEPS, MICRO = (*PLATEAU, "training.eval_steps=null"), "training.per_device_train_batch_size"
SKIPS = ("monitors.spikes.policy=skip",)
OF_SOME = [
    # recipe, settings of both starts, those of the second, the key that must be allowed
    ("features/gpt2", PLATEAU, "training.eval_steps=7", "training.eval_steps"),
    ("features/gpt2", PLATEAU_STEPS, "training.logging_steps=7", "training.eval_steps"),
    ("features/gpt2", PLATEAU, "training.eval_delay=7", "training.eval_delay"),
    ("features/gpt2", PLATEAU, "evaluation.max_validation_tokens=64", "evaluation.max_validation_tokens"),
    ("features/gpt2", PLATEAU, "training.eval_on_start=true", None),  # steps no schedule
    ("features/gpt2", PLATEAU, "training.logging_steps=7", None),
    ("features/gpt2", (), "training.eval_steps=7", None),
    ("features/gpt2", (), "evaluation.max_validation_tokens=64", None),
    ("features/gpt2", (), f"{MICRO}=1", None),
    ("moe-1.5b", (), f"{MICRO}=1", MICRO),
    ("moe-1.5b", ("loss.balance=none",), f"{MICRO}=1", None),
    ("features/balanced-experts", (), f"{MICRO}=1", None),  # correction biases: a loss over each sequence
    ("features/gpt2", (), *SKIPS, SPIKES),
    ("features/gpt2", SKIPS, "monitors.spikes.policy=log", SPIKES),
    ("features/gpt2", SKIPS, "monitors.spikes.rule=deviations", SPIKES),
    ("features/gpt2", SKIPS, "monitors.spikes.score=7", SPIKES),
    ("features/gpt2", SKIPS, "monitors.spikes.non_finite_streak=7", None),
    ("features/gpt2", (), "monitors.spikes.score=7", None),
]


@pytest.mark.parametrize(("name", "settings", "other", "key"), OF_SOME)
def test_a_key_is_part_of_the_curve_of_the_runs_that_depend_on_it(name, settings, other, key):
    """Promise: the curve belongs to the recipe. In a run that does not depend on it, the key is free to change."""
    earlier, now = (load_recipe(name, each).to_dict() for each in (settings, [*settings, other]))
    changes = changed_parts(now, earlier)
    assert [change.key for change in changes] == ([] if key is None else [check_allowed(key)])


def test_what_makes_a_curve_depend_on_a_key_is_the_change():
    """Not the key too, which one of the two recipes does not depend on."""
    earlier, now = (load_recipe("features/gpt2", each).to_dict() for each in ((), PLATEAU))
    assert not {change.key for change in changed_parts(now, earlier)} & SOMETIMES.keys()


def test_a_part_that_is_none_is_refused():
    """Misspelt, or free to change anyway."""
    taken = "training.seed optimizer.momentum loss speed.fp8 speed monitors data.fingerprint model.n_layer"
    for key in taken.split():
        assert check_allowed(key) == key, "what a refusal of the start names must be taken"
    unknown = ("seed", "training.lr", "data.sources.0.weight", "muon.momentum")
    refused = dict.fromkeys(unknown, "did you mean|is part of|unknown key")
    refused["training.sed"] = r"did you mean 'training\.seed'"
    refused |= dict.fromkeys(("training.logging_steps", "monitors.hang_minutes"), "may change without it")
    for wrong, why in refused.items():
        with pytest.raises(UserError, match=why):
            check_allowed(wrong)
