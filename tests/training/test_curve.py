"""Promise: the curve belongs to the recipe, not to the stage, the ranks, the micro-batch or the launcher."""

import json
import math

import pytest

from pretraining.checkpoints.format import read_marker
from pretraining.recipe import load_recipe
from tests.gear.runs import EXPERTS, SMALL_RECIPE, STEPS, Run, completed, section_of
from tests.gear.scored_tasks import write_items, write_tasks

FP32, BF16 = 1e-4, 5e-3
STAGES = ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
# One stage through the launcher that the README shows; forked ranks start faster.
LAUNCHER = {"zero2": "deepspeed"}
# Slow on CPU: the validations of these runs, of which nothing is read, are short.
IN_BF16 = ("training.bf16=true", "training.eval_strategy=no", "evaluation.max_validation_tokens=2048")
SHORT = ("budget.tokens=2560", "evaluation.max_validation_tokens=2048")
"""Five steps, for runs of which nothing else is read."""
TWO = "training.per_device_train_batch_size=4"
"""Two micro-batches a step, where no samples are split."""
NO_NOISE_SCALE = "monitors.noise_scale_steps=null"
"""Asked for with split sequences and experts: no rank has the gradient of whole sequences, or of its samples alone."""
BALANCED = {**EXPERTS, "router_aux_loss_coef": 1.0}
LAYOUTS = {"1 rank x 4 x 2": (1, 4), "2 ranks x 2 x 2": (2, 2), "2 ranks x 4 x 1": (2, 4)}


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Over the steps of two runs."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def column(run: Run, key: str) -> list:
    return [row.get(key) for row in run.training_rows]


def assert_one_curve(ours: Run, alone: Run, within: float, measured: tuple[str, ...] = (), rel=1e-3) -> None:
    """Losses, norms, validations and columns that begin as `measured` are the same; rates and tokens to the digit."""
    for name, most in (("train/loss", within), ("train/grad_norm", 10 * within)):
        assert largest_difference(column(ours, name), column(alone, name)) <= most, name
    for row, expected in zip(ours.rows, alone.rows, strict=True):
        assert beginning(row, EXACT) == beginning(expected, EXACT)
        found, wanted = (beginning(each, ("eval/", *measured)) for each in (row, expected))
        assert found == pytest.approx(wanted, rel=rel)
        if "eval/loss" in wanted:
            assert found["eval/loss"] == pytest.approx(wanted["eval/loss"], abs=within)


EXACT = ("train/tokens", "train/learning_rate", "optimizer/")


def beginning(row: dict, names: tuple[str, ...]) -> dict:
    """The columns whose names begin so."""
    return {name: value for name, value in row.items() if name.startswith(names)}


@pytest.fixture(scope="module")
def plain(workshop):
    """(ranks, micro-batch, accumulation) = (1, 1, 8), without DeepSpeed."""
    return workshop.plain(("training.per_device_train_batch_size=1",))


def stage_run(workshop, stage):
    return workshop.run(stage, by=LAUNCHER.get(stage, "forked"))


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_does_not_change_the_curve(workshop, plain, stage):
    """fp32, two ranks, every stage: the losses of a single plain process within 1e-4, and the texts that it writes.

    So are the norms of gradients, before clipping, told at stage 0 too (deepspeedai/DeepSpeed#7255). Validation is
    exact, though neither batch nor ranks divide its blocks.
    """
    run, batch = stage_run(workshop, stage), load_recipe(workshop.recipe).training.per_device_eval_batch_size
    assert workshop.num_validation_blocks % batch
    assert_one_curve(run, plain, FP32)
    for name in ("eval/loss", "eval/bits_per_byte"):
        ours, theirs = ([row[name] for row in each.validation_rows] for each in (run, plain))
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert [row["step"] for row in run.samples] == [5, 10]
    assert all(row["text"].startswith(row["prompt"]) and row["text"] != row["prompt"] for row in run.samples)
    assert run.samples == plain.samples


def test_what_is_recomputed_does_not_change_the_curve(workshop):
    """Layers that keep their products, of weights that ZeRO-3 gathers: to the last digit."""
    settings = ("training.activation_checkpointing=true", "speed.recompute=operators")
    assert workshop.run("zero3", settings=settings).losses == stage_run(workshop, "zero3").losses


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2", "zero3"])
def test_the_stage_does_not_change_the_curve_in_bf16(workshop, stage):
    """bf16, two ranks, every stage: the losses of a single plain bf16 process within 5e-3."""
    reference = workshop.plain(IN_BF16).losses
    assert largest_difference(workshop.run(stage, settings=IN_BF16).losses, reference) <= BF16


def test_bf16_is_another_precision_and_nearly_the_same_curve(workshop, plain):
    """The bf16 runs are not fp32 runs in disguise."""
    assert 1e-6 < largest_difference(workshop.plain(IN_BF16).losses, plain.losses) < 0.05


@pytest.mark.parametrize("ranks, micro_batch", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_micro_batch_and_accumulation_do_not_change_the_curve(workshop, plain, ranks, micro_batch):
    """fp32: one rank with micro-batches of one, eight times, is the reference."""
    if (ranks, micro_batch) == (2, SMALL_RECIPE["training"]["per_device_train_batch_size"]):
        run = stage_run(workshop, "zero2")
    else:
        run = workshop.run("zero2", ranks, settings=(f"training.per_device_train_batch_size={micro_batch}",))
    assert largest_difference(run.losses, plain.losses) <= FP32


def test_clipping_is_the_recipe_s(workshop, plain):
    """`max_grad_norm` is at work in every run above, so DeepSpeed clips at the recipe's value, not at its own."""
    assert min(column(plain, "train/grad_norm")) > 1.5 * SMALL_RECIPE["training"]["max_grad_norm"]
    assert largest_difference(workshop.plain(("training.max_grad_norm=1.0",)).losses, plain.losses) > 1e-2


@pytest.mark.parametrize("chosen", [BALANCED["num_experts_per_tok"], BALANCED["num_experts"]])
def test_a_mixture_of_experts_has_one_curve_too(workshop, chosen):
    """Its balancing loss (here as large as the cross-entropy) weighs the same on one rank and on two.

    With all experts chosen no rounding can send a token elsewhere; with two of four, ten steps are too few for it.
    """
    settings = (section_of(BALANCED, num_experts_per_tok=chosen),)
    alone, together = workshop.plain(settings), workshop.run("zero2", settings=settings)
    assert_one_curve(together, alone, FP32)
    guessing = math.log(EXPERTS["vocab_size"])
    assert alone.losses[0] > guessing + 0.9
    assert alone.validation_rows[0]["eval/loss"] < guessing


def test_steps_rates_and_the_first_loss_are_those_of_the_recipe(plain):
    """Constant tokens a step; warm-up from zero over two steps, then a cosine towards a tenth; the loss of guessing.

    Every stage above has the plain process's tokens and rates to the digit.
    """
    budget, training = SMALL_RECIPE["budget"], SMALL_RECIPE["training"]
    peak, warmup = training["learning_rate"], training["warmup_steps"]

    def expected(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup)))
        return peak * (0.9 * cosine + 0.1)

    assert column(plain, "train/tokens") == [budget["tokens_per_step"] * step for step in range(1, STEPS + 1)]
    assert plain.validation_rows[-1]["train/tokens"] == budget["tokens"]
    rates = [expected(step) for step in range(STEPS)]
    assert column(plain, "train/learning_rate") == pytest.approx(rates, rel=1e-6)
    assert plain.losses[0] == pytest.approx(math.log(SMALL_RECIPE["model"]["vocab_size"]), abs=0.15)
    assert plain.losses[-1] < plain.losses[0] - 0.3


SCORES = {"hellaswag/acc", "hellaswag/acc_norm", "read_line/bits_per_byte", "continue_line/exact_match"}


@pytest.fixture
def scored(workshop) -> tuple[tuple[str, ...], list]:
    """Settings of a run that is scored while it trains, and the evaluation command's options for the same scores."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (requirements-eval.txt)")
    items = write_items(workshop.folder / "items.jsonl")
    tasks = write_tasks(workshop.folder / "tasks", items)
    settings = (f"evaluation.hellaswag={items}", f'evaluation.tasks=["{tasks}"]', "evaluation.task_limit=7")
    settings += ("evaluation.metric=hellaswag/acc_norm", "checkpoints.keep_best=1", "training.save_steps=5")
    return settings, ["--hellaswag", items, "--tasks", tasks, "--limit", "7"]


def test_scores_in_the_loop_are_the_same_under_zero3(workshop, scored):
    """HellaSwag and tasks of lm-eval, read and continued, shared out over two ranks: those of one plain process.

    The checkpoint that is best by one of them is known by its marker.
    """
    settings, _ = scored
    alone, together = workshop.plain(settings), workshop.run("zero3", settings=settings)
    for ours, theirs in zip(together.validation_rows, alone.validation_rows, strict=True):
        names = {name for name in theirs if name.startswith("eval/")}
        assert {f"eval/{name}" for name in SCORES} < names
        expected = {name: theirs[name] for name in names}
        assert {name: ours[name] for name in names} == pytest.approx(expected, rel=1e-6, abs=1e-5)
        marker = read_marker(together.dir.checkpoint(ours["step"]))
        assert marker["metrics"]["eval_hellaswag/acc_norm"] == ours["eval/hellaswag/acc_norm"]
    assert together.losses == stage_run(workshop, "zero3").losses


def test_the_evaluation_command_finds_the_scores_of_the_loop(workshop, scored):
    """Those that two ranks under ZeRO-3 found after the last step."""
    settings, words = scored
    run = workshop.run("zero3", settings=settings)
    finished = completed(["forked", "0", "-m", "pretraining.evaluation", run.folder, *words, "--json"])
    loop = {name: run.validation_rows[-1][f"eval/{name}"] for name in SCORES}
    assert json.loads(finished.stdout) == pytest.approx(loop, rel=1e-6, abs=1e-5)
