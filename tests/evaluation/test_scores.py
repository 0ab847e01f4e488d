"""HellaSwag and the tasks of lm-eval: what lm-eval itself finds, item by item."""

import copy
import json
import math
import sys
from dataclasses import replace

import pytest

from pretraining.data.prepared import open_prepared
from pretraining.data.streaming.cache import ShardCache
from pretraining.errors import UserError
from pretraining.evaluation import validation as evaluators
from pretraining.evaluation.__main__ import main
from pretraining.evaluation.scores import (
    Harness,
    HarnessModel,
    HellaSwag,
    Pair,
    Passes,
    load_tasks,
    read_items,
    read_set,
    score,
    score_name,
    scores_of,
    summary_of,
)
from pretraining.evaluation.validation import Evaluator
from pretraining.recipe import load_recipe
from tests.gear.finished_data import refusal
from tests.gear.runs import REPOSITORY, SMALL_RECIPE
from tests.gear.scored_tasks import hellaswag_items, write_hellaswag_task, write_items, write_tasks

NOT_INSTALLED = "lm-eval is not installed (requirements-eval.txt)"
PASSES = Passes(SMALL_RECIPE["model"]["n_positions"], batch_size=3)


@pytest.fixture(scope="module")
def model(workshop):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(workshop.plain().dir.export)


@pytest.fixture(scope="module")
def tokenizer(workshop):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(workshop.data / "corpus/tokenizer")


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return write_items(tmp_path_factory.mktemp("items") / "hellaswag_val.jsonl")


def found_by_lm_eval(model, tokenizer, folder, samples=False) -> dict:
    """What lm-eval's evaluator and its own model class say of the tasks in a folder."""
    evaluator = pytest.importorskip("lm_eval.evaluator", reason=NOT_INSTALLED)
    from lm_eval.models.huggingface import HFLM

    asked = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=PASSES.max_length)
    return evaluator.evaluate(asked, load_tasks([str(folder)]), bootstrap_iters=0, log_samples=samples)


def test_hellaswag_is_scored_as_lm_eval_does_item_by_item(model, tokenizer, items, tmp_path):
    """The same prompts cut to the same positions: every ending's log-probability, acc and acc_norm of every item."""
    theirs = found_by_lm_eval(model, tokenizer, write_hellaswag_task(tmp_path, items), samples=True)
    samples = sorted(theirs["samples"]["hellaswag"], key=lambda sample: sample["doc_id"])
    ours = HellaSwag(read_items(str(items)), tokenizer, PASSES)
    scores = iter(score(model, ours.pairs, PASSES))
    for item, answer, sample in zip(ours.items, ours.answers(model), samples, strict=True):
        theirs_of = bool(sample["acc"]), bool(sample["acc_norm"])
        assert (answer.plain == item.right, answer.normalised == item.right) == theirs_of
        for response in sample["filtered_resps"]:
            assert next(scores).log_probability == pytest.approx(float(response[0]), abs=1e-4)
    found = ours.measure(model)
    assert found == scores_of({"hellaswag": theirs["results"]["hellaswag"]})
    assert 0 < found["hellaswag/acc"] < 1
    assert any(each.plain != each.normalised for each in ours.answers(model))


def test_tasks_are_scored_as_lm_eval_does(model, tokenizer, items, tmp_path):
    """Texts that are read in windows, and texts that are continued to a stop string."""
    folder = write_tasks(tmp_path, items)
    theirs = scores_of(found_by_lm_eval(model, tokenizer, folder)["results"])
    state = model.config.to_dict()
    ours = Harness([str(folder)], tokenizer, PASSES)
    assert set(theirs) == {"read_line/bits_per_byte", "continue_line/exact_match"}
    assert set(ours.num_items().values()) == {len(items.read_text().splitlines())}
    for _ in range(2):
        assert ours.measure(model) == pytest.approx(theirs, abs=1e-6)
    assert model.config.to_dict() == state


def write_set(path, items, **keys):
    """Two rows of one task with other examples, and a third."""
    folder = write_tasks(path.parent, items)
    write_hellaswag_task(folder, items)
    choice = {"task": str(folder / "local_hellaswag.yaml"), "metric": "acc_norm", "chance": 0.25}
    text = {"task": str(folder / "continue_line.yaml"), "shots": 0, "metric": "exact_match", "chance": 0}
    rows = [{**choice, "shots": 0}, {**choice, "shots": 2}, text]
    path.write_text(json.dumps({"tasks": rows, "metric": "centered", **keys}))
    return path


def test_a_set_of_tasks_has_one_score_above_chance(model, tokenizer, items, tmp_path):
    """Each row with its own examples; the deviation of published runs beside the mean."""
    path = write_set(tmp_path / "mine.json", items, spread={"runs": [0.25, 0.27, 0.26]})
    found = Harness([str(path)], tokenizer, PASSES).measure(model)
    alone = Harness([str(tmp_path / "local_hellaswag.yaml")], tokenizer, PASSES).measure(model)
    rows = [found[f"mine_local_hellaswag_{shots}/acc_norm"] for shots in (0, 2)]
    assert rows[0] == alone["hellaswag/acc_norm"]
    above = [(rows[0] - 0.25) / 0.75, (rows[1] - 0.25) / 0.75, found["mine_continue_line_0/exact_match"]]
    assert found["mine/centered"] == pytest.approx(sum(above) / 3)
    assert found["mine/deviation_of_runs"] == pytest.approx(0.01)


def test_a_model_without_numbers_has_no_score(model, tokenizer, items, tmp_path):
    """The first of endings whose log-probabilities are NaN is no choice: a fourth of them would be right."""
    broken = copy.deepcopy(model)
    for parameter in broken.parameters():
        parameter.data.fill_(math.nan)
    write_hellaswag_task(tmp_path, items)
    scorers = (
        HellaSwag(read_items(str(items)), tokenizer, PASSES),
        Harness([str(tmp_path)], tokenizer, PASSES),
    )
    for scorer in scorers:
        found = scorer.measure(broken)
        assert set(found) == {"hellaswag/acc", "hellaswag/acc_norm"}
        assert all(map(math.isnan, found.values()))


def test_a_wrong_set_is_one_line(tokenizer, items, tmp_path):
    path = write_set(tmp_path / "mine.json", items, metric="median")
    said = refusal(Harness, [str(path)], tokenizer, PASSES)
    assert said.startswith("evaluation.tasks: ") and "mine.json: metric" in said
    assert "none.json" in refusal(Harness, [str(tmp_path / "none.json")], tokenizer, PASSES)


@pytest.mark.parametrize(
    "words",
    ["--limit 5", "--tasks ,", "--no-sample --prompt x", "--hellaswag a --top-k 3", f"--seed {1 << 63}"],
)
def test_an_option_that_would_do_nothing_is_refused(words):
    """Nobody reads a number of another question than the one that was asked."""
    assert refusal(main, ["runs/none", *words.split()]).startswith(f"{words.split()[-2]}: ")


def test_the_sets_that_are_here_are_the_published_ones():
    """CORE's tasks, but for one that lm-eval does not have, by DCLM's file; where they differ they say so."""
    core, olmes = (read_set(name) for name in ("dclm_core", "olmes"))
    assert len(core["tasks"]) == 21 and "Jeopardy" in core["differs"][0]
    chances = {f"{score_name('x', row)}/{row['metric']}": row["chance"] for row in core["tasks"]}
    best = summary_of("x", core, dict.fromkeys(chances, 1.0))
    assert best.pop("x/centered") == pytest.approx(1.0)
    assert best == {"x/deviation_of_runs": pytest.approx(0.0053, abs=1e-4)}
    assert summary_of("x", core, chances)["x/centered"] == 0
    assert len(olmes["tasks"]) == 9 and all(row["shots"] == 5 for row in olmes["tasks"])


def test_continuations_are_those_of_lm_eval(model, tokenizer, items, tmp_path):
    """Text by text, cut at the stop string."""
    pytest.importorskip("lm_eval", reason=NOT_INSTALLED)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    arguments = {"until": ["a", "\n"], "max_gen_toks": 12}
    texts = enumerate(("def run", "def x", "def f(self"))
    asked = [Instance("generate_until", {}, (text, arguments), number) for number, text in texts]
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=PASSES.max_length)
    ours = HarnessModel(model, tokenizer, PASSES)
    texts = ours.generate_until(asked)
    assert texts == theirs.generate_until(asked, disable_tqdm=True) and any(texts)


def test_a_score_does_not_depend_on_the_batch(model):
    """Pairs of all lengths, one of them longer than the model reads, alone and together; nothing costs nothing."""
    pairs = [Pair(list(range(1, n + 2)), list(range(5, 5 + n % 7))) for n in (3, 80, 11, 0, 7, 64)]
    together = score(model, pairs, Passes(64, batch_size=4))
    for pair, found in zip(pairs, together, strict=True):
        alone = score(model, [pair], Passes(64, batch_size=1))[0]
        assert found.log_probability == pytest.approx(alone.log_probability, abs=1e-4)
    assert together[3] == (0.0, True) and model.training is False


def evaluator(workshop, tokenizer, items, **section):
    """Of the small recipe, four items of HellaSwag scored with it."""
    recipe = load_recipe(str(workshop.recipe))
    asked = {"hellaswag": str(items), "task_limit": 4, "max_validation_tokens": 128, **section}
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, **asked))
    data = open_prepared(recipe, workshop.data, ShardCache.of(None, None))
    return Evaluator(recipe, data, tokenizer, last_step=10)


def test_scores_come_with_the_validations_that_the_recipe_says(workshop, model, tokenizer, items):
    """Every task_steps steps, and at the last; the loss at each."""
    ours = evaluator(workshop, tokenizer, items, task_steps=4)
    names = {step: set(ours.measure(model, step, lambda: False)) for step in (2, 4, 10)}
    assert names[2] == {"loss", "perplexity", "bits_per_byte"}
    assert names[4] == names[10] == names[2] | {"hellaswag/acc", "hellaswag/acc_norm"}


def test_a_stop_ends_the_scoring_without_a_result(workshop, model, tokenizer, items):
    """Asked for in any round: of the validation or of the scores."""
    ours, asked = evaluator(workshop, tokenizer, items), []
    assert ours.measure(model, 4, lambda: asked.append(1) or False) and len(asked) >= 2
    for round_number in range(len(asked)):
        answers = iter([*[False] * round_number, True])
        assert ours.measure(model, 4, lambda answers=answers: next(answers)) is None


def test_a_metric_that_no_validation_has_is_told(workshop, model, tokenizer, items):
    assert "has no 'code_loss'" in refusal(evaluator, workshop, tokenizer, items, metric="code_loss")
    ours = evaluator(workshop, tokenizer, items, metric="hellaswag/acc_nrm")
    assert "did you mean 'hellaswag/acc_norm'" in refusal(ours.measure, model, 4, lambda: False)


COUNTED = ["fingerprint of the data", "validation blocks", "evaluation.hellaswag, endings"]


@pytest.mark.parametrize("what", COUNTED)
def test_ranks_that_read_other_items_are_told_at_once(workshop, tokenizer, items, what, monkeypatch):
    """Else some would wait for passes that others do not make, at the first validation."""

    def gathered(mine):
        host, found = mine
        return [mine, (host, found | {what: "another"})]

    monkeypatch.setattr(evaluators, "gather_from_ranks", gathered)
    with pytest.raises(UserError, match=f"^{what}: .+ another on .+; all nodes must read the same files"):
        evaluator(workshop, tokenizer, items)


def test_what_lm_eval_calls_its_scores():
    """A filter of its own stays in the name; errors of estimates and names do not count as scores."""
    gsm8k = {"alias": "gsm8k", "exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": "N/A"}
    results = {"gsm8k": gsm8k, "arc": {"acc,none": 1, "acc_stderr,none": 0.1, "sample_len": 3}}
    assert scores_of(results) == {"gsm8k/exact_match.strict-match": 0.5, "arc/acc": 1.0}


BROKEN = {
    "no JSON": ("{", "line 1|cannot be read"),
    "a field missing": (json.dumps({**hellaswag_items(1)[0], "endings": []}), "line 1: has no endings"),
    "no such label": (json.dumps({**hellaswag_items(1)[0], "label": "4"}), "has the label '4'"),
    "nothing": ("", "holds no items"),
}


@pytest.mark.parametrize("text, said", BROKEN.values(), ids=BROKEN)
def test_items_that_cannot_be_scored_are_told(tmp_path, text, said):
    path = tmp_path / "items.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_items(str(path))
    with pytest.raises(UserError, match=r"nowhere.jsonl: cannot be read .*No such file.*; check the path"):
        read_items(str(tmp_path / "nowhere.jsonl"))


def test_the_page_shows_the_form_of_a_file_of_one_s_own(tmp_path):
    """The line of docs/commands.md is a question as it is, and gives the prompt that the page says."""
    page = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
    (tmp_path / "own.jsonl").write_text(next(line for line in page.splitlines() if "activity_label" in line))
    (item,) = read_items(str(tmp_path / "own.jsonl"))
    assert item.context == "Baking: She puts the cake into the oven. Then she"
    assert len(item.endings) == 4 and item.endings[item.right] == "waits for an hour."


def test_items_of_a_data_set_are_those_of_the_file(tmp_path, items, monkeypatch):
    """What the hub holds: a validation split with the same fields."""
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "validation.jsonl").write_bytes(items.read_bytes())
    assert read_items(str(tmp_path / "set"), 7) == read_items(str(items))[:7]
    assert "no such file, and no dataset" in refusal(read_items, str(tmp_path / "nowhere"))


def test_a_missing_lm_eval_costs_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks", raising=False)
    with pytest.raises(UserError, match=r"evaluation\.tasks .* pip install lm_eval"):
        load_tasks(["arc_easy"])


@pytest.mark.parametrize("text, said", [("task: [", "cannot be loaded"), (None, "knows no task")])
def test_a_task_that_cannot_be_loaded_is_told(tmp_path, text, said):
    pytest.importorskip("lm_eval", reason=NOT_INSTALLED)
    path = tmp_path / "task.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=f"evaluation.tasks: .*{said}"):
        load_tasks([str(path)])
    (tmp_path / "empty").mkdir()
    assert "holds no task" in refusal(load_tasks, [str(tmp_path / "empty")])
