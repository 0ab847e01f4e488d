"""Promise: honest numbers. Validation by source: exact, the same at any number of ranks, and they add up."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pretraining.data.mixture import open_by_source
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.shards import TokenSplit
from pretraining.evaluation.validation import Validation, ValidationSet
from pretraining.recipe.data import Data
from pretraining.recipe.sections import Evaluation
from pretraining.recipe.training import Training
from tests.gear.finished_data import entry_of_sources

LENGTH = 8
VOCAB_SIZE = 64


class Bigrams(torch.nn.Module):
    """A model of the next token given this one: small, real, and different on every source."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.table = torch.nn.Parameter(torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator))

    def forward(self, input_ids: torch.Tensor, **borders) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.fixture(scope="module")
def entry(tmp_path_factory) -> dict:
    return three_sources(tmp_path_factory.mktemp("data") / "validation")


def three_sources(folder: Path) -> dict:
    """Write a validation split of three sources of 300, 90 and 40 tokens; name its folder too."""
    random = np.random.default_rng(1)
    sizes = enumerate((300, 90, 40))
    sources = [list(random.integers(source * 16, VOCAB_SIZE, (size // 10, 10))) for source, size in sizes]
    return {**entry_of_sources(folder, sources, 100), "folder": str(folder)}


def by_source(entry: dict) -> dict[str, TokenSplit]:
    parts = open_by_source(TokenSplit(entry["folder"], entry))
    return {name: parts[number] for number, name in enumerate(("web", "code", "books"))}


def sets_of(splits: dict[str, TokenSplit], shares: Sequence[str] = ()) -> list[ValidationSet]:
    """Each of them as a set, with its share of a mixture."""
    wished = zip_longest(splits.items(), map(Fraction, shares), fillvalue=Fraction(0))
    return [ValidationSet(name, split, False, share) for (name, split), share in wished]


def recipe_of(max_tokens: int | None = None, batch_size: int = 4, masks: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        sequence_length=LENGTH,
        data=Data(name="d", sources=[], tokenizer="gpt2", document_masking=masks),
        evaluation=Evaluation(max_validation_tokens=max_tokens),
        training=Training(per_device_eval_batch_size=batch_size),
        extensions=(),
    )


def independent_nats(model: Bigrams, split: TokenSplit, num_blocks: int) -> float:
    """Nats of the first blocks' targets, from the stream itself."""
    stream = torch.tensor(split.read(0, num_blocks * LENGTH + 1).astype(np.int64))
    return -torch.log_softmax(model.table.double(), -1)[stream[:-1], stream[1:]].sum().item()


def test_every_source_is_measured_and_they_add_up(entry):
    """Each source against an independent computation; the total is that of all blocks together."""
    model, splits = Bigrams(), by_source(entry)
    measured = Validation(sets_of(splits), recipe_of()).measure(model)
    nats, tokens = 0.0, 0
    for name, split in splits.items():
        num_blocks = split.num_blocks(LENGTH)
        found = independent_nats(model, split, num_blocks)
        assert measured[f"{name}_loss"] == pytest.approx(found / num_blocks / LENGTH, abs=1e-5)
        bits = found / math.log(2) / split.bytes_before(num_blocks * LENGTH + 1)
        assert measured[f"{name}_bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        perplexity = math.exp(found / num_blocks / LENGTH)
        assert measured[f"{name}_perplexity"] == pytest.approx(perplexity, rel=1e-5)
        nats, tokens = nats + found, tokens + num_blocks * LENGTH
    assert measured["loss"] == pytest.approx(nats / tokens, abs=1e-5)
    assert len({round(measured[f"{name}_loss"], 3) for name in splits}) == 3


def test_one_set_is_measured_as_one_split_and_by_its_name_if_it_has_one(entry):
    """The three of the whole split, whatever its form; a source of data.validation has them by its name too."""
    split = by_source(entry)["web"]
    forms = split, sets_of({"web": split})
    one, named = (Validation(given, recipe_of()).measure(Bigrams()) for given in forms)
    assert set(one) == {"loss", "perplexity", "bits_per_byte"}
    assert named == one | {f"web_{name}": value for name, value in one.items()}
    assert isinstance(Validation(split, recipe_of()).dataset, PackedDataset)


def test_masked_documents_count_without_their_first_tokens(entry):
    """Documents of ten tokens and thirty bytes: nine targets each, and the text of those."""
    split, model = by_source(entry)["web"], Bigrams()
    measured = Validation(split, recipe_of(masks=True)).measure(model)
    stream = torch.tensor(split.read(0, 300).astype(np.int64))[: split.num_blocks(LENGTH) * LENGTH + 1]
    nats = -torch.log_softmax(model.table.double(), -1)[stream[:-1], stream[1:]]
    targets = nats[[(place + 1) % 10 > 0 for place in range(len(nats))]]
    assert measured["loss"] == pytest.approx(targets.mean().item(), abs=1e-5)
    bits = targets.sum().item() / math.log(2)
    assert measured["bits_per_byte"] == pytest.approx(bits / (3 * len(targets)), rel=0.01)


def test_a_limit_is_shared_out_by_size(entry):
    """240 of 424 tokens: in proportion, whole blocks, no source left out."""
    validation = Validation(sets_of(by_source(entry)), recipe_of(max_tokens=240))
    assert [len(part.dataset) for part in validation.parts] == [21, 6, 2]
    smallest = Validation(sets_of(by_source(entry)), recipe_of(8))
    assert [len(part.dataset) for part in smallest.parts] == [1, 1, 1]
    assert len(validation.dataset) == 29


def test_a_source_without_a_block_is_left_out(entry):
    """A source whose validation text is shorter than one block cannot be measured; the others are."""
    entry = {**entry, "shards": [s for s in entry["shards"] if s["source"] != 2]}
    tiny = {**entry["shards"][0], "tokens": LENGTH - 1}
    parts = open_by_source(TokenSplit(entry["folder"], entry)).values()
    splits = dict(zip(("web", "code"), parts, strict=True))
    splits["tiny"] = TokenSplit(entry["folder"], {**entry, "tokens": LENGTH - 1, "shards": [tiny]})
    measured = Validation(sets_of(splits), recipe_of()).measure(Bigrams())
    assert "tiny_loss" not in measured and "code_loss" in measured


def test_the_mixture_is_measured_in_its_own_proportions(entry):
    """Each source's loss by the share that training gives it; a source that is missing leaves no such number."""
    splits, model = by_source(entry), Bigrams()
    validation = Validation(sets_of(splits, ("1/2", "3/10", "1/5")), recipe_of())
    measured = validation.measure(model)
    assert list(measured) == validation.names
    shares = zip(splits, (0.5, 0.3, 0.2), strict=True)
    expected = sum(share * measured[f"{name}_loss"] for name, share in shares)
    assert measured["mixture_loss"] == pytest.approx(expected) != measured["loss"]
    # every token of these documents stands for three bytes
    assert measured["mixture_bits_per_byte"] == pytest.approx(expected / math.log(2) / 3, rel=0.02)
    del splits["books"]
    assert "mixture_loss" not in Validation(sets_of(splits, ("1/2", "3/10")), recipe_of()).names


def test_a_set_beside_the_others_is_no_part_of_the_loss(entry):
    """It is measured by its name; loss, text and limit of the others stay as they are without it."""
    splits, model = by_source(entry), Bigrams()
    beside = ValidationSet("books", splits.pop("books"), beside=True)
    for limit in (None, 160):
        alone = Validation(sets_of(splits), recipe_of(limit))
        both = Validation([*sets_of(splits), beside], recipe_of(limit))
        measured = both.measure(model)
        assert {name: measured[name] for name in alone.names} == alone.measure(model)
        assert measured.keys() - set(alone.names) == {"books_loss", "books_perplexity", "books_bits_per_byte"}
        assert both.unigram_bits_per_byte() == alone.unigram_bits_per_byte()
