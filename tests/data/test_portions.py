"""Caps and budgets of the sources: what is prepared, what a run sees, and going on with more."""

import json
import re
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from pretraining.command_line import number_of_tokens
from pretraining.data.portions import Portion, portions_of
from pretraining.data.preparation.execution import Execution, run_slurm_job
from pretraining.data.preparation.prepare import prepare_data
from pretraining.data.preparation.stage import run_task
from pretraining.data.prepared import PreparedData, open_prepared
from pretraining.data.streaming.cache import ShardCache
from pretraining.planning.run_plan import build_run_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import RECIPES, accumulation_steps, load_recipe
from pretraining.recipe.fixed_keys import curve_parts
from tests.gear.finished_data import make_texts, recipe_for, refusal, write_jsonl
from tests.gear.runs import bytes_of

pytestmark = pytest.mark.usefixtures("small_tasks")
CLEANED = {"filters": [{"rule": "length", "min_words": 53}, {"rule": "pii"}]}


@pytest.fixture
def sources(tmp_path) -> list[Path]:
    texts = [make_texts(120, seed) for seed in range(2)]
    for own in texts:
        own[8::9] = [""] * len(own[8::9])  # which are counted
    return [write_jsonl(tmp_path / f"{name}.jsonl", own) for name, own in zip("ab", texts, strict=True)]


def prepare(root: Path, recipe: SimpleNamespace) -> dict:
    """Prepare, and return the bytes of every file."""
    return bytes_of(prepare_data(recipe, root, False, Execution("inline")).folder)


def capped(sources: list[Path], *tokens: int | None, **data) -> SimpleNamespace:
    caps = [{"max_tokens": cap} if cap else {} for cap in tokens]
    specs = [{"path": str(path), **cap} for path, cap in zip(sources, caps, strict=False)]
    return recipe_for(*specs, **data)


def seen(data: PreparedData) -> dict[str, list]:
    """All that a run reads: the tokens of each split, and the ends of its documents."""
    assert data.manifest["fingerprint"]
    read = {}
    for name, split in (("train", data.train), ("validation", data.validation)):
        whole = (0, split.num_tokens)
        read[name] = [split.read(*whole).tolist(), split.document_ends(*whole).tolist()]
    return read


def manifest_of(root: Path) -> dict:
    return json.loads((root / "corpus" / "manifest.json").read_text())


CLEANINGS = {"raw": {}, "filtered": CLEANED, "compared": {"dedup": {"exact": True}}}


@pytest.mark.parametrize("cleaning", CLEANINGS.values(), ids=CLEANINGS)
def test_extended_is_as_made_at_once(sources, tmp_path, cleaning):
    """A capped preparation that goes on with a larger cap has the bytes of one made at once, the manifest's too."""
    small, large = capped(sources, 3000, 5000, **cleaning), capped(sources, 7000, 5000, **cleaning)
    first = prepare(tmp_path / "extended", small)
    at_once = prepare(tmp_path / "at_once", large)
    assert len(set(first) & set(at_once)) > 5 and first != at_once
    assert prepare(tmp_path / "extended", large) == at_once
    # And on to the end.
    whole = capped(sources, None, None, **cleaning)
    assert prepare(tmp_path / "extended", whole) == prepare(tmp_path / "whole", whole)
    # Nothing is left beside it: no earlier version, no work.
    assert [path.name for path in (tmp_path / "extended").iterdir()] == ["corpus"]


CAPPED = ([7000, 5000], {})
WHOLE = ([None, None], {})
CHANGES = {"a cap is added": (WHOLE, CAPPED), "it is taken away": (CAPPED, WHOLE)}
CHANGES["an order is asked for"] = (WHOLE, ([None, None], {"shuffle_blocks": 8}))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_decides_no_token_may_change_before_all_is_prepared(sources, tmp_path, monkeypatch, change):
    """Killed, and gone on with other keys, the data set and what it reports are as made at once."""
    first, then = (capped(sources, *caps, **CLEANED, **data) for caps, data in change)
    left = iter(range(4))

    def killed(stage, number, progress):
        if stage.name == "tokenize" and next(left, None) is None:
            raise KeyboardInterrupt
        run_task(stage, number, progress)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("pretraining.data.preparation.execution.run_task", killed)
        prepare(tmp_path / "killed", first)
    assert prepare(tmp_path / "killed", then) == prepare(tmp_path / "at_once", then)


@pytest.mark.parametrize("share", [0, 0.2])
def test_validation_of_ones_own_is_whole_in_every_portion(sources, tmp_path, share):
    """Extended as made at once; and a run of the smaller part validates on all of it."""
    letters = write_jsonl(tmp_path / "letters.jsonl", make_texts(30, 7))
    own = {"validation": {"sources": [{"path": str(letters), "name": "letters"}]}, "validation_share": share}
    small, large = capped(sources, 3000, 5000, **own), capped(sources, 7000, 5000, **own)
    prepare(tmp_path / "extended", small)
    before = seen(open_prepared(small, tmp_path / "extended"))
    assert prepare(tmp_path / "extended", large) == prepare(tmp_path / "at_once", large)
    assert manifest_of(tmp_path / "extended")["validation_sources"][0]["documents"] == 30
    assert seen(open_prepared(small, tmp_path / "extended")) == before


def test_run_sees_its_own_part_of_what_others_had_prepared(sources, tmp_path):
    """Promise 1: a run of capped data is the same beside a data set that holds more, and while that is prepared."""
    small, large, data = capped(sources, 3000, 5000), capped(sources, 9000, None), tmp_path / "data"
    prepare(data, small)
    own = open_prepared(small, data)
    before = seen(own)
    assert 8000 <= own.train.num_tokens < 8600 and own.validation.num_documents > 4
    reading = open_prepared(small, data)  # maps no shard yet
    # One line: what is there, what the run reads, and the command.
    said = r"first 3,\d+ training tokens of 'a.jsonl', and this run reads 9,000.*data_prep.py --recipe small"
    assert re.search(said, refusal(open_prepared, large, data))
    assert "reads all of it" in refusal(open_prepared, capped(sources, None, 5000), data)
    prepare(data, large)
    shared = open_prepared(small, data)
    assert seen(reading) == seen(shared) == before and shared.fingerprint == own.fingerprint
    assert shared.fingerprint != open_prepared(large, data).fingerprint
    # Nothing is prepared anew for it, and nothing is lost.
    held = bytes_of(data)
    prepare(data, small)
    assert bytes_of(data) == held


@pytest.mark.parametrize("is_there", [True, False])
def test_what_says_which_of_validation_a_part_has_is_checked(sources, tmp_path, is_there):
    """A copy that lacks the file, or has another: whoever needs it says so in a line; a run of all data goes on."""
    whole, small = capped(sources, 9000, 5000), capped(sources, 3000, 5000)
    prepare(tmp_path / "data", whole)
    path = tmp_path / "data" / "corpus" / "validation_positions.npy"
    path.unlink()
    if is_there:
        np.save(path, np.zeros(48, np.int64))
    said = "validation_positions.npy: (missing or damaged: checksum|not there).* copy "
    for root in (tmp_path / "data", (tmp_path / "data").as_uri()):
        assert re.search(said, refusal(open_prepared, small, root, ShardCache(tmp_path / "cache", 10**9)))
    assert re.search(said, refusal(prepare, tmp_path / "data", small))
    assert re.search(said, refusal(prepare, tmp_path / "data", capped(sources, None, None)))
    assert open_prepared(whole, tmp_path / "data").train.num_tokens > 14000
    prepare(tmp_path / "data", whole)


def test_a_part_without_validation_is_one_line(sources, tmp_path):
    """Bad input: the data holds enough, and what this run reads of it nothing to validate on; both commands say so."""
    share = {"validation_share": 0.05}
    large, small = capped(sources, None, None, **share), capped(sources, 50, 50, **share)
    prepare(tmp_path / "data", large)
    said = r"validation has 0 of the \d+ tokens that this run reads, .*; set data.validation_share above 0.05"
    assert re.search(said, refusal(open_prepared, small, tmp_path / "data"))
    assert re.search(said, refusal(prepare, tmp_path / "data", small))
    prepare(tmp_path / "data", large)


def test_only_what_is_wanted_is_read(sources, tmp_path):
    """What is behind the cap is never read: a filter that would fail there is not asked, nor is a broken line."""
    lines = sources[0].read_text().splitlines()[:60]
    sources[0].write_text("\n".join([*lines, "this is no JSON", *lines]) + "\n")
    # A tokenizer that is there already: one that is trained here reads more.
    prepare(tmp_path / "other", recipe_for(sources[1]))
    tokenizer = str(tmp_path / "other" / "corpus" / "tokenizer")
    capped_source = {"path": str(sources[0]), "max_documents": 20}
    prepare(tmp_path / "data", recipe_for(capped_source, tokenizer=tokenizer, **CLEANED))
    assert manifest_of(tmp_path / "data")["splits"]["train"]["documents"] == 20


def test_processes_of_this_machine_make_the_same_bytes(sources, tmp_path):
    """Two workers, whichever is first: caps end where one process ends them; so do those that go on with more."""
    small, large = capped(sources, 3000, 5000, **CLEANED), capped(sources, 7000, 5000, **CLEANED)
    alone = [prepare(tmp_path / "alone", recipe) for recipe in (small, large)]
    for recipe, expected in zip((small, large), alone, strict=True):
        execution = Execution("local", workers=2)
        assert bytes_of(prepare_data(recipe, tmp_path / "both", False, execution).folder) == expected


def test_jobs_of_a_cluster_make_the_same_bytes(sources, tmp_path, monkeypatch):
    """The jobs that sbatch is given, run here one after the other; the last finds how many tasks a cap takes."""
    recipe, scripts = capped(sources, 3000, 5000, **CLEANED), []

    def submit(words: list[str], text: bool) -> str:
        scripts.append(Path(words[-1]).read_text())
        return f"Submitted batch job {len(scripts)}\n"

    monkeypatch.setattr("pretraining.data.preparation.execution.subprocess.check_output", submit)
    execution = Execution("slurm", slurm={"partition": "cpu", "tasks_per_job": 3})
    assert prepare_data(recipe, tmp_path / "jobs", False, execution).jobs
    for script in scripts:
        work, name, first = script.split("pretraining.data.preparation.execution ")[1].split()[:3]
        last = int(re.search(r"--array=0-(\d+)", script)[1])
        for number in range(last + 1):
            monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(number))
            run_slurm_job(Path(work), name, int(first))
    assert bytes_of(tmp_path / "jobs" / "corpus") == prepare(tmp_path / "alone", recipe)


def test_a_bucket_gives_a_run_the_same_part(sources, tmp_path):
    """A data set of more than the run asks for, read from an address: the tokens that the folder gives."""
    large, small = capped(sources, 7000, 5000), capped(sources, 3000, 5000)
    prepare(tmp_path / "data", large)
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "data"), "/portions", recursive=True)
    try:
        cache = ShardCache(tmp_path / "cache", 10**9)
        remote = open_prepared(small, "memory://portions", cache)
        local = open_prepared(small, tmp_path / "data")
        assert seen(remote) == seen(local) != seen(open_prepared(large, tmp_path / "data"))
        more = capped(sources, 9000, 5000)
        assert "reads" in refusal(open_prepared, more, "memory://portions", cache)
    finally:
        store.rm("/portions", recursive=True)


def test_budget_takes_each_source_by_its_share(sources, tmp_path):
    """`prepare: budget`: as many blocks of each source as the run draws, and the target of the last input."""
    specs = [{"path": str(path), "weight": weight} for path, weight in zip(sources, (3, 1), strict=True)]
    recipe = recipe_for(*specs, prepare="budget")
    recipe.num_samples, recipe.where = 200, "recipe.json"
    prepare(tmp_path / "data", recipe)
    tokens = [source["cut"]["tokens"] for source in manifest_of(tmp_path / "data")["sources"]]
    # 150 and 50 blocks of 32 tokens; the last document may be longer.
    assert 150 * 32 < tokens[0] < 150 * 32 + 300 and 50 * 32 < tokens[1] < 50 * 32 + 300
    assert open_prepared(recipe, tmp_path / "data").for_run(recipe).mixture.num_blocks[1] >= 50


LIMITED = [path.stem for path in sorted(RECIPES.glob("*.json")) if path.name != "schema.json"]


@pytest.mark.parametrize("name", LIMITED)
def test_every_recipe_can_be_tried_on_few_tokens(name):
    """--limit_tokens: names of its own, enough steps to see validations and saves, the same curve on any ranks."""
    limit = 500_000
    whole, small = load_recipe(name), load_recipe(name, limit_tokens=limit)
    assert small.name == f"{name}-limit-{limit}" and small.data.name == f"{whole.data.name}-limit-{limit}"
    assert small.num_tokens <= limit and small.samples_per_step * small.num_steps == small.num_samples
    assert small.num_steps >= min(100, limit // (8 * small.sequence_length))
    assert whole.samples_per_step % small.samples_per_step == 0
    training = small.training
    assert training.eval_steps <= small.num_steps // 4 + 1 and training.save_steps <= small.num_steps // 4 + 1
    assert training.warmup_steps < small.num_steps / 4
    ranks = small.samples_per_step
    fitted = load_recipe(name, limit_tokens=limit, world_size=ranks)
    assert accumulation_steps(fitted, ranks) >= 1
    ours, theirs = curve_parts(fitted.to_dict()), curve_parts(small.to_dict())
    # so many ranks have a smaller micro-batch, within which experts are balanced
    for parts in (ours, theirs):
        parts.pop("training.per_device_train_batch_size", None)
    assert ours == theirs
    # The rest of it is the recipe's; a limit above the budget changes nothing.
    assert (small.model, small.optimizer, small.loss) == (whole.model, whole.optimizer, whole.loss)
    assert load_recipe(name, limit_tokens=10**15) == whole
    assert load_recipe(name, small.overrides, limit_tokens=small.limit_tokens) == small


def test_limit_is_what_the_page_says_of_it():
    """The figures of docs/data.md: sequences of a step, and documents of validation."""
    small = load_recipe("features/gpt2", limit_tokens=20_000)
    assert (small.sequence_length, small.samples_per_step, small.num_steps) == (128, 8, 19)
    shares = {2_500_000: 0.02, 1_000_000: 0.05, 250_000: 0.2, 20_000: 0.2}
    found = {limit: load_recipe("124m", limit_tokens=limit) for limit in [*shares, 900 * 1024]}
    assert {limit: found[limit].data.validation_share for limit in shares} == shares
    assert found[900 * 1024].num_steps >= 100
    # Shares that are written are kept; those by size are not known here.
    two = ["data.sources.1.path=more.jsonl"]
    weights = [f"data.sources.{number}.weight={weight}" for number, weight in enumerate((0.9, 0.1))]
    portions = [
        portions_of(load_recipe("features/gpt2", [*two, *more], limit_tokens=20_000))
        for more in ([], weights)
    ]
    assert portions[0] == [Portion(20_000), Portion(20_000)]
    assert portions[1][0].tokens == pytest.approx(9 * portions[1][1].tokens, rel=0.1)


def test_command_line_keeps_what_it_sets_of_a_limited_recipe():
    """A value of --set is not scaled; one step must fit; numbers may be written 5e6."""
    step = load_recipe("124m").tokens_per_step
    recipe = load_recipe("124m", [f"budget.tokens_per_step={step}"], limit_tokens=5_000_000)
    assert (recipe.tokens_per_step, recipe.num_steps) == (step, 9)
    said = "--limit_tokens 1000: is less than one step of 1,024 tokens"
    assert said in refusal(load_recipe, "124m", limit_tokens=1000)
    assert number_of_tokens("5e6") == 5_000_000
    with pytest.raises(ArgumentTypeError, match=r"'5\.5' is not a whole number"):
        number_of_tokens("5.5")


def test_budget_needs_written_shares():
    """Sources read by size: their shares are known once all is prepared, so that a budget cannot say how much."""
    settings = ["data.prepare=budget", f"data.sources={json.dumps([{'path': name} for name in 'ab'])}"]
    said = "data.prepare: is budget, but the 2 sources are read by size"
    assert said in refusal(load_recipe, "features/gpt2", settings)


def test_plan_counts_only_what_is_prepared():
    """Disk and epochs of a source whose cap is below the budget."""
    recipe = load_recipe("124m", ["data.sources.0.max_tokens=1000000000"])
    plan = build_run_plan(Setup(recipe, None))
    assert plan.unique_tokens == 10**9 and plan.disk["token shards"] == 2 * 10**9
    assert plan.setup.tokens == recipe.num_tokens
