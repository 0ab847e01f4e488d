"""`python -m pretraining.checkpoints branch`: a decay from a stable checkpoint is a run of its own."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from pretraining.checkpoints.__main__ import main
from pretraining.checkpoints.format import Start, read_marker
from pretraining.ds_config import load_ds_config
from pretraining.planning.run_plan import build_run_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import RECIPES, Recipe, load_recipe, recipe_names
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.schedule import follow_run
from tests.gear.finished_data import refusal
from tests.gear.runs import LLAMA, Run, bytes_of, completed, contents, execute, launcher, on_own_port
from tests.gear.small_checkpoints import identity_of, save
from tests.training.test_batch_ramp import RAMPED
from tests.training.test_curve import column

STABLE = ("training.lr_scheduler_type=constant_with_warmup", "training.lr_scheduler_kwargs={}")
RAMP = 'budget.ramp={"from_tokens_per_step": 1024, "over_tokens": 102400}'
STAGES = sorted((RECIPES / "stages").glob("*.json"))
SHAPES = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - x**0.5,
}


def branched(run: Path, *words, capsys) -> dict:
    """What the command answers."""
    main(["branch", str(run), *map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


def checkpoint_of(
    tmp_path, step: int, *settings: str, base: str = "features/gpt2", start: Start | None = None
) -> Path:
    """A small checkpoint of a recipe after `step` steps; the folder of its run."""
    run, identity = RunFolder(tmp_path / "base"), identity_of(*settings, start=start, base=base)
    run.recipe.parent.mkdir()
    run.recipe.write_text(json.dumps(identity.recipe.to_dict()))
    save(run, step, identity=identity)
    return run.path


def test_the_branch_decays_and_the_run_it_is_from_goes_on(workshop, tmp_path, capsys):
    """Two ranks: the same weights and samples at the branch point, rates by hand, the run before it untouched."""
    base = workshop.run("zero3", settings=RAMPED)
    before, folder = contents(base.folder), tmp_path / "decay"
    words = ("--at", 8, "--decay", "linear", "--steps", 4)
    told = branched(base.folder, *words, "--output", folder, capsys=capsys)
    assert (told["step"], told["last_step"]) == (8, 12)
    assert bytes_of(folder / "checkpoint-8") == bytes_of(base.dir.checkpoint(8))
    recipe = ["--recipe", str(folder / "recipe.json"), "--output_dir", str(folder)]
    words = [*on_own_port(launcher("forked", 2)), "train.py", *recipe, "--deepspeed", "zero3"]
    completed([*words, "--data_dir", str(workshop.data)])
    run = Run(folder)
    assert [row["step"] for row in run.training_rows] == [9, 10, 11, 12]
    assert column(run, "train/learning_rate") == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    # The first rate is still the stable one: two losses are those of the run that went on.
    assert column(run, "train/loss")[:2] == column(base, "train/loss")[8:]
    assert contents(base.folder) == before
    kinds = [event["event"] for event in run.events]
    assert (kinds[0], kinds[-1]) == ("branch", "end")
    assert "resume" in kinds and "change_accepted" not in kinds


def test_a_stage_goes_on_at_a_longer_context(workshop, tmp_path, capsys):
    """Twice the length with RoPE scaled for it, at the stable rate: weights, rate and position go on; so again."""
    short = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    sizes = ("data.sequence_length=32", "budget.tokens=2048")
    base = workshop.plain((f"model={json.dumps(short)}", *sizes, *STABLE))
    folder = tmp_path / "longer"
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    settings = [f"model.rope_parameters={json.dumps(rope)}"]
    settings += ["data.sequence_length=64", "training.save_steps=2"]
    words = [word for setting in settings for word in ("--set", setting)]
    branched(base.folder, "--at", 4, "--steps", 4, "--output", folder, *words, capsys=capsys)
    recipe = ["--recipe", str(folder / "recipe.json"), "--output_dir", str(folder), "--deepspeed", "null"]
    command = [*launcher("plain", 1), "train.py", *recipe, "--data_dir", str(workshop.data)]
    completed(command)
    run = Run(folder)
    assert column(run, "train/learning_rate") == [0.01] * 4
    assert column(run, "train/tokens") == [2048 + 512 * step for step in (1, 2, 3, 4)]
    assert read_marker(run.dir.checkpoint(6))["samples"] == (2048 + 2 * 512) // 64
    config = json.loads((run.dir.export / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 2.0
    first, losses = column(base, "train/loss"), column(run, "train/loss")
    assert losses[0] < first[0] - 0.2, "the weights are those of the checkpoint"
    for name in ("checkpoint-8", "export"):
        shutil.rmtree(folder / name)
    assert execute(command).code == 0
    assert column(run, "train/loss") == losses


def scheduler_of(recipe: Recipe, length: float):
    """What transformers builds of a recipe, for a rate of 1."""
    training = recipe.training_keywords
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    kind, kwargs = training["lr_scheduler_type"], training["lr_scheduler_kwargs"]
    return get_scheduler(kind, optimizer, training["warmup_steps"], length, kwargs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "warmup_stable_decay"])
def test_rates_are_those_of_the_shape(tmp_path, capsys, kind, shape):
    """Of the schedule that transformers builds from the new recipe: stable until the branch, then the shape."""
    kwargs = '{"num_decay_steps": 100}' if kind == "warmup_stable_decay" else "{}"
    settings = (f"training.lr_scheduler_type={kind}", f"training.lr_scheduler_kwargs={kwargs}")
    run = checkpoint_of(tmp_path, 800, *settings, "training.warmup_steps=0.02")
    told = branched(run, "--decay", shape, "--steps", 200, "--min_lr_ratio", "0.1", capsys=capsys)
    assert Path(told["run"]) == tmp_path / f"base-{shape}-800-1000"
    recipe = load_recipe(str(Path(told["run"]) / "recipe.json"))
    assert recipe.num_steps == 1000 and recipe.name == Path(told["run"]).name
    (rate,) = scheduler_of(recipe, recipe.num_steps).lr_lambdas
    assert [rate(step) for step in (100, 799, 800)] == [1.0, 1.0, 1.0]
    for done in (1, 50, 199, 200):
        assert rate(800 + done) == pytest.approx(0.1 + 0.9 * SHAPES[shape](done / 200))


def test_a_branch_of_a_schedule_in_tokens_goes_on_in_tokens(tmp_path, capsys):
    """After a ramp: the decay begins at the tokens consumed there, and ends with the last step."""
    settings = (*STABLE, RAMP, "training.warmup_steps=0", "budget.warmup_tokens=204800")
    run = checkpoint_of(tmp_path, 800, *settings)
    told = branched(run, "--decay", "linear", "--steps", 200, capsys=capsys)
    recipe = load_recipe(str(Path(told["run"]) / "recipe.json"))
    assert recipe.num_steps == 1000 and recipe.budget.decay_tokens == 200 * 2048
    assert "num_decay_steps" not in recipe.training.lr_scheduler_kwargs
    progress = recipe.progress()
    scheduler = scheduler_of(recipe, progress.schedule_place(recipe.num_steps))
    follow_run(scheduler, progress)
    (rate,) = scheduler.lr_lambdas
    assert [rate(step) for step in (50, 150, 800, 900, 1000)] == pytest.approx([0.25, 1, 1, 0.5, 0])


@pytest.mark.parametrize("path", STAGES, ids=[path.stem for path in STAGES])
def test_the_stages_here_continue_their_recipes(tmp_path, capsys, path):
    """`<recipe>-<what>.json`: every key lands in the new recipe, and a run of it has a plan."""
    base = max((name for name in recipe_names() if path.stem.startswith(name)), key=len)
    stable = ("training.lr_scheduler_type=constant", "training.lr_scheduler_kwargs={}")
    run, recipe = checkpoint_of(tmp_path, 800, *stable, base=base), load_recipe(base)
    told = branched(run, "--steps", 100, "--stage", path, "--set", "training.seed=7", capsys=capsys)
    staged = load_recipe(str(Path(told["run"]) / "recipe.json"))
    sections = json.loads(path.read_text())
    assert sections.pop("base", base) == base and "description" in sections
    assert staged.deepspeed == sections.pop("deepspeed", recipe.deepspeed)
    for section, values in sections.items():
        if section != "description":
            assert staged.to_dict()[section].items() >= values.items()
    assert staged.training.seed == 7 and staged.num_steps == 900
    config = load_ds_config(staged.deepspeed)
    assert build_run_plan(Setup(staged, config, 8)).accumulation_steps > 0


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "stage.json"),
        ('{"model": 3}', "model is no section of a recipe"),
        ('{"modle": {}}', "did you mean 'model'"),
        ('{"data": {"pack": 1}}', "did you mean"),
        ('{"training": {"lr_scheduler_kwargs.x": 1}}', "is no key of a recipe"),
        ('{"data": ' + "[" * 100_000, "nested too deeply"),
        ('{"model": {"n_layer": 5}}', "other shapes than the stage's model has (940,800 parameters, "),
        ('{"training": {"optim": "adafactor"}}', "states of another optimizer"),
        ('{"training": {"lr_scheduler_type": "constant"}}', "type: follows from --steps and --decay"),
        ('{"budget": {"tokens": 999424}}', "budget.tokens: follows from --steps"),
    ],
)
def test_a_stage_that_cannot_be_is_one_line(tmp_path, text, words):
    """Nothing is written, and nothing that train.py would refuse."""
    run = checkpoint_of(tmp_path, 800, *STABLE)
    (stage := tmp_path / "stage.json").write_text(text)
    assert words in refusal(main, ["branch", str(run), "--steps", "10", "--stage", str(stage)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "stage.json"]


def test_what_differs_counts_as_accepted(tmp_path, capsys):
    """changes.json names each key; earlier changes stay in it."""
    earlier = {"step": 3, "key": "training.seed", "from": 1, "to": 2}
    run = checkpoint_of(tmp_path, 800, *STABLE, start=Start(changes=(earlier,)))
    told = branched(run, "--at", 800, "--decay", "cosine", "--steps", 10, capsys=capsys)
    changes = json.loads((Path(told["run"]) / "changes.json").read_text())
    assert changes[0] == earlier
    keys = {change["key"] for change in changes[1:]}
    assert keys == {"budget.tokens", "training.lr_scheduler_type", "training.lr_scheduler_kwargs"}


def test_stages_of_a_mixture_stay_where_they_were(tmp_path, capsys):
    """A share of the run is turned into tokens: the run has another length now."""
    sources = '[{"builtin": "python_stdlib", "name": "a"}, {"path": "b.txt", "name": "b"}]'
    first, second = ({"until": 0.25, "weights": {"a": 1}}, {"until": 0.75, "weights": {"b": 1}})
    stages = [first, second, {"weights": {"a": 1}}]
    settings = (f"data.sources={sources}", f"data.mixture={json.dumps({'stages': stages})}")
    run = checkpoint_of(tmp_path, 500, *STABLE, *settings)
    told = branched(run, "--decay", "linear", "--steps", 10, capsys=capsys)
    before, after = (load_recipe(str(Path(folder) / "recipe.json")) for folder in (run, told["run"]))
    quarter = round(before.num_samples / 4) * before.sequence_length
    found = [stage.until for stage in after.data.mixture.stages]
    assert found == [quarter, None] and quarter < after.num_tokens < 3 * quarter


def test_points_of_decay_and_momentum_stay_where_they_were(tmp_path, capsys):
    """A share, or the end, of the earlier run is a step now. Points of the stage's own are those of the new run."""
    decay, momentum = [[0, 0.2], [0.5, 0.1], ["end", 0.0, "cosine"]], [[0, 0.85], [300, 0.95]]
    groups = [{"kind": "hidden", "weight_decay": decay, "momentum": momentum}]
    groups += [{"kind": "embedding", "weight_decay": decay}]
    run = checkpoint_of(tmp_path, 800, *STABLE, f"optimizer.groups={json.dumps(groups)}")
    own = 'optimizer.groups.1.weight_decay=[["end", 0.3]]'
    words = ["branch", str(run), "--decay", "linear", "--steps", "10"]
    said = refusal(main, [*words, "--set", own, "--set", "budget.tokens_per_step=4096"])
    assert said.startswith("optimizer.groups.0.weight_decay: its points count steps of the earlier size")
    told = branched(run, *words[2:], "--set", own, capsys=capsys)
    first, second = load_recipe(str(Path(told["run"]) / "recipe.json")).optimizer.groups
    assert first.weight_decay == [[0, 0.2], [500, 0.1], [1000, 0.0, "cosine"]]
    assert first.momentum == momentum and second.weight_decay == [["end", 0.3]]


DECAYS = (
    "training.lr_scheduler_type=warmup_stable_decay",
    'training.lr_scheduler_kwargs={"num_decay_steps": 500}',
)
SCHEDULE_FREE = (*STABLE, "training.optim=schedule_free_adamw")
REFUSED = {
    "cosine": (800, (), "its rate is never stable"),
    "in the warm-up": (5, (*STABLE, "training.warmup_steps=10"), "stable from step 10 to 1,000"),
    "decaying already": (800, DECAYS, "to 500: no checkpoint of it is there"),
    "schedule-free": (800, SCHEDULE_FREE, "a schedule-free run needs none: every checkpoint"),
    "in a warm-up by tokens": (
        5,
        (*STABLE, "training.warmup_steps=0", "budget.warmup_tokens=20480"),
        "stable from 20,480 to 2,048,000 tokens, and this is at 10,240: no checkpoint of it is there",
    ),
    "in the ramp": (8, (*STABLE, RAMP), "the size of a step still rises, for 100 steps"),
}


@pytest.mark.parametrize("step, settings, message", REFUSED.values(), ids=REFUSED)
def test_where_no_decay_can_begin(tmp_path, step, settings, message):
    """One line; nothing is left behind."""
    run = checkpoint_of(tmp_path, step, *settings)
    said = refusal(main, ["branch", str(run), "--decay", "linear", "--steps", "10"])
    assert message in said and "checkpoint" in said
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_step_without_a_checkpoint_and_a_folder_that_is_there(tmp_path):
    run = checkpoint_of(tmp_path, 800, *STABLE)
    words = ["branch", str(run), "--decay", "linear", "--steps", "10"]
    said = "no committed checkpoint of step 700; there are those of 800"
    assert said in refusal(main, [*words, "--at", "700"])
    assert "is there already" in refusal(main, [*words, "--output", str(run)])
    stays = ["branch", str(run), "--steps", "10", "--min_lr_ratio", "0.1"]
    assert "without --decay the rate stays" in refusal(main, stays)


def test_a_killed_branch_leaves_nothing_that_the_next_one_keeps(tmp_path, capsys):
    """What it had linked would hold the disk after its checkpoint is gone."""
    run = checkpoint_of(tmp_path, 800, *STABLE)
    (tmp_path / "next.partial" / "checkpoint-800").mkdir(parents=True)
    words = ("--decay", "linear", "--steps", 10, "--output", tmp_path / "next")
    branched(run, *words, capsys=capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "next"]
