"""Promise: a mixture is exact. Its interleaving, its epochs, the recipe's section, and the dataset of a mixed run."""

import json
import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from pretraining.data.interleaving import MAX_PERIOD, InterleavedStage, Interleaving, counts_per_period
from pretraining.data.mixture import build_mixture, format_table
from pretraining.data.order import GlobalOrder
from pretraining.data.packed_dataset import PackedDataset, build_training_dataset
from pretraining.data.prepared import PreparedData
from pretraining.data.shards import TokenSplit
from pretraining.errors import UserError
from pretraining.outside.schema import refuse_first
from pretraining.recipe.data import Data, check_mixture, exact_shares, shares_of_sizes
from tests.gear.finished_data import entry_of_sources

LENGTH = 8
SIZES = {"web": 6000, "code": 3000, "books": 1000}


def furthest_from_promise(interleaving: Interleaving, num_samples: int) -> Fraction:
    """The largest |drawn - due| of any source after any of the first samples, from the draws themselves."""
    sources, draws = interleaving.draws(np.arange(num_samples))
    drawn = np.zeros(interleaving.num_sources, np.int64)
    worst = Fraction(0)
    for sample, (source, draw) in enumerate(zip(sources.tolist(), draws.tolist(), strict=True)):
        assert draw == drawn[source], "draws of a source leave no gap and repeat nothing"
        drawn[source] += 1
        due = interleaving.promised(sample + 1)
        worst = max(worst, *(abs(int(count) - line) for count, line in zip(drawn, due, strict=True)))
    assert (interleaving.realised(num_samples) == drawn).all()
    return worst


@pytest.mark.parametrize("weights", [[1], [7, 3], [0.7, 0.2, 0.1], [1, 1, 1, 97], [0.123, 0.456, 0.421]])
def test_every_source_stays_within_one_block_of_its_share(weights):
    """At every point of the run, not only at its end; decimal weights are exact."""
    shares = exact_shares(weights)
    interleaving = Interleaving([InterleavedStage.of(0, None, shares)])
    assert interleaving.stages[0].shares == shares
    assert furthest_from_promise(interleaving, 2500) < 1


def test_stages_stay_within_one_block_of_what_all_stages_promise():
    """Random shares, sources that come and go: the promise holds across the borders, and draws run on."""
    draw = random.Random(5)
    for _ in range(40):
        stages, start = [], 0
        num_sources, num_stages = draw.randint(2, 7), draw.randint(2, 4)
        for number in range(num_stages):
            counts = [draw.choice([0, 1, 2, 5, draw.randint(1, 40)]) for _ in range(num_sources)]
            counts[draw.randrange(num_sources)] += 1
            stop = None if number == num_stages - 1 else start + draw.randint(1, 250)
            stages.append(InterleavedStage(start, stop, tuple(counts)))
            start = stop
        assert furthest_from_promise(Interleaving(stages), stages[-1].start + 200) < 1


def test_any_position_is_reached_directly():
    """Position 10^12 is arithmetic: the same as counting there by whole periods."""
    first = InterleavedStage.of(0, 10**9, exact_shares([0.7, 0.3]))
    interleaving = Interleaving([first, InterleavedStage.of(10**9, None, exact_shares([1, 1]))])
    assert interleaving.realised(10**9).tolist() == [700_000_000, 300_000_000]
    sources, draws = interleaving.draws(np.array([10**12, 10**12 + 1]))
    assert sorted(sources.tolist()) == [0, 1]
    half = (10**12 - 10**9) // 2
    assert draws.tolist() == [(700_000_000, 300_000_000)[source] + half for source in sources.tolist()]


def test_the_interleaving_never_changes():
    """Runs are resumed by later versions of this code: this sequence is for ever."""
    interleaving = Interleaving([InterleavedStage.of(0, None, exact_shares([5, 3, 2]))])
    assert interleaving.draws(np.arange(12))[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]


def test_small_sources_never_round_to_nothing():
    """A source of one part in 10^9 still gets a place in the period, and the counts fill it exactly."""
    counts = counts_per_period(shares_of_sizes([10**12, 10**9 + 7, 1001]))
    assert min(counts) == 1 and sum(counts) == MAX_PERIOD
    counts = counts_per_period(shares_of_sizes([10**9 + 7, 10**8 + 3, 10**7 + 19]))
    wished = shares_of_sizes([10**9 + 7, 10**8 + 3, 10**7 + 19])
    for count, share in zip(counts, wished, strict=True):
        assert abs(count / sum(counts) / float(share) - 1) < 0.001


def test_temperature_evens_the_shares_out():
    """p_i ~ n_i ** (1 / T): 1 is by size, 2 takes square roots, a large one makes them equal."""
    assert shares_of_sizes([900, 100], 1) == [Fraction(9, 10), Fraction(1, 10)]
    assert [float(share) for share in shares_of_sizes([900, 100], 2)] == pytest.approx([0.75, 0.25])
    assert [float(share) for share in shares_of_sizes([900, 100], 1e6)] == pytest.approx([0.5, 0.5], rel=1e-4)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> PreparedData:
    """Three sources in shards of their own; a token tells its source (thousands) and its place (the rest)."""
    folder = tmp_path_factory.mktemp("data") / "train"
    sizes = enumerate(SIZES.values())
    sources = [list(np.arange(size).reshape(-1, 50) + 10_000 * number) for number, size in sizes]
    train = TokenSplit(folder, entry_of_sources(folder, sources, 700))
    return PreparedData(folder.parent, {"fingerprint": "tokens"}, train, train)


def recipe_of(weights=None, mixture=None, max_epochs=None, **data) -> SimpleNamespace:
    """A recipe as far as the mixture is concerned; `weights` and `max_epochs` are {source: number}."""
    sources = [{"path": f"{name}.txt", "name": name} for name in SIZES]
    for source in sources:
        source |= {"weight": (weights or {}).get(source["name"])}
        source |= {"max_epochs": (max_epochs or {}).get(source["name"])}
    data = Data.of({"name": "mixed", "sources": sources, "tokenizer": "gpt2", "mixture": mixture, **data})
    step = {"samples_per_step": 8, "tokens_per_step": 8 * LENGTH}
    return SimpleNamespace(data=data, where="mixed.json", sequence_length=LENGTH, data_seed=3, **step)


def mixture_of(prepared, recipe, num_samples=800):
    return build_mixture(prepared.train, prepared.validation, recipe, num_samples)


def open_run(prepared, recipe, num_samples=800, first_sample=0) -> PackedDataset:
    mixed = replace(prepared, mixture=mixture_of(prepared, recipe, num_samples))
    return build_training_dataset(mixed, recipe, first_sample, num_samples)


EVEN = {"web": 0.5, "code": 0.375, "books": 0.125}


@pytest.mark.parametrize("order", [{}, {"shuffle_shards": 2}, {"shuffle_blocks": 50}], ids=str)
def test_a_mixed_run_reads_what_its_table_promises(prepared, order):
    """Tokens tell their source: the samples hold exactly the table's shares, each block at most once an epoch."""
    recipe = recipe_of(EVEN, **order)
    dataset = open_run(prepared, recipe)
    firsts = np.array([sample["input_ids"][0] for sample in dataset.__getitems__(list(range(800)))])
    table = mixture_of(prepared, recipe).table(800)
    assert np.bincount(firsts // 10_000).tolist() == [400, 300, 100]
    assert [row["realised_tokens"] for row in table["run"]["sources"]] == [3200, 2400, 800]
    assert len(set(firsts.tolist())) == 800
    json.dumps(table)
    text = format_table(table).splitlines()
    assert len(text) == 5 and "37.500000%" in text[2] and "2,400" in text[2]


def test_a_mixture_other_than_the_validations_says_so(prepared):
    """Validation keeps the sources' proportions, 60, 30 and 10 %: weights that differ are told, with both shares."""
    table = mixture_of(prepared, recipe_of(EVEN)).table(800)
    assert "(web 50% and 60%, code 38% and 30%, books 12% and 10%)" in table["validation_note"]
    assert format_table(table).endswith(table["validation_note"])
    natural = recipe_of(dict(zip(SIZES, (6, 3, 1), strict=True)))
    assert mixture_of(prepared, natural).table(800)["validation_note"] is None


def test_a_resumed_mixed_run_continues(prepared):
    """Sample i is the same whether the run began there or passed there."""
    stages = {"stages": [{"until": 0.4, "weights": {"web": 3, "code": 1}}, {"weights": EVEN}]}
    whole, resumed = (open_run(prepared, recipe_of(mixture=stages), first_sample=first) for first in (0, 317))
    for index in (0, 1, 100, 482):
        assert (resumed[index]["input_ids"] == whole[317 + index]["input_ids"]).all()


def test_epochs_of_a_source_follow_each_other(prepared):
    """A source read 2.4 times gives each of its blocks two or three times."""
    dataset = open_run(prepared, recipe_of(EVEN | {"books": 2}, max_epochs={"books": 5}))
    blocks = dataset.block_numbers(np.arange(800))
    books = blocks[blocks >= dataset.num_blocks - 124]
    assert set(np.unique(books, return_counts=True)[1]) <= {len(books) // 124, len(books) // 124 + 1}
    assert len(books) > 4 * 124


def test_without_a_mixture_the_order_is_that_of_one_stream(prepared):
    """Runs without weights keep their curve: all text is one stream in one global order."""
    dataset = open_run(prepared, recipe_of())
    order = GlobalOrder(prepared.train.num_blocks(LENGTH), 3, "tokens")
    assert (dataset.block_numbers(np.arange(800)) == order.blocks(np.arange(800))).all()


def test_by_size_reads_every_source_once(prepared):
    """Mixed by size, a budget of the whole corpus is one epoch of each source and is not refused."""
    blocks = sum((size - 1) // LENGTH for size in SIZES.values())
    table = mixture_of(prepared, recipe_of(mixture={"temperature": 1}), blocks).table(blocks)
    assert [row["epochs"] for row in table["run"]["sources"]] == [1, 1, 1]


REFUSED = {
    "zero": (recipe_of(EVEN | {"web": 0}), "data.sources.0.weight: is 0; a weight is a number above zero"),
    "negative": (recipe_of(EVEN | {"code": -1}), "data.sources.1.weight: is -1"),
    "some": (recipe_of({"web": 1}), "data.sources.1.weight: is missing for 'code'"),
    "both": (recipe_of(EVEN, {"temperature": 2}), "not both"),
    "no source": (recipe_of(mixture={"stages": [{"weights": {"wbe": 1}}]}), "did you mean 'web'?"),
    "unread": (recipe_of(mixture={"stages": [{"weights": {"web": 1}}]}), "no stage reads the source 'code'"),
    "epochs": (recipe_of(EVEN | {"books": 0.5}), "--set data.sources.2.max_epochs=2.35"),
    "late": (recipe_of(mixture={"stages": [{"until": 9e9}, {}]}), "must lie between"),
    "open": (recipe_of(mixture={"stages": [{}, {}]}), "stages.0.until: is missing"),
    "cap": (recipe_of(max_epochs={"web": 0.5}), "0.65 times; --set data.sources.0.max_epochs=0.65"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mixture_that_cannot_be_is_one_line(prepared, case):
    """What, where, what to do."""
    recipe, message = REFUSED[case]
    with pytest.raises(UserError) as error:
        refuse_first(check_mixture(recipe.data, 800, LENGTH), "mixed.json")  # when the recipe is read
        open_run(prepared, recipe)
    assert message in str(error.value) and str(error.value).startswith("mixed.json: ")


def test_the_advice_for_a_source_that_is_too_small_works(prepared):
    """Each of the changes that the refusal names is accepted, and a little more is not."""
    small = EVEN | {"books": 0.5}
    with pytest.raises(UserError, match=r"0\.363636 to 0\.155\b.*--set budget\.tokens=2688\b"):
        open_run(prepared, recipe_of(small))
    open_run(prepared, recipe_of(small, max_epochs={"books": 2.35}))
    open_run(prepared, recipe_of({"web": 0.5, "code": 0.345, "books": 0.155}))
    open_run(prepared, recipe_of(small), num_samples=2688 // LENGTH)
    wrong = recipe_of(small, max_epochs={"books": 2.3}), recipe_of({"web": 0.5, "code": 0.34, "books": 0.16})
    for recipe in wrong:
        with pytest.raises(UserError):
            open_run(prepared, recipe)


def test_the_weights_of_a_stage_hold_inside_it(prepared):
    """Until 40 % of the run no books; afterwards the shares that the second stage names."""
    stages = {"stages": [{"until": 0.4, "weights": {"web": 3, "code": 1}}, {"weights": EVEN}]}
    mixture = mixture_of(prepared, recipe_of(mixture=stages))
    table = mixture.table(800)
    counts = [mixture.interleaving.realised(border) for border in (0, 320, 800)]
    inside = [(after - before).tolist() for before, after in pairwise(counts)]
    assert inside == [[240, 80, 0], [240, 180, 60]]
    assert [stage["samples"] for stage in table["stages"]] == [320, 480]
    assert "stage 2: 3,840 tokens" in format_table(table)
