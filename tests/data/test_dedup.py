"""Deduplication: what is found is right, whatever the number of workers, and nothing is dropped for less.

N-gram hashes stand for the n-grams of the stated normalisation, and for nothing else.
"""

import json
import random
import re
import unicodedata
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from pretraining.data.dedup import duplicates
from pretraining.data.dedup.duplicates import (
    DUPLICATE,
    FIRST_NAME,
    HASHES_NAME,
    NEIGHBOURS,
    PAIR,
    TRAIN,
    TWIN,
    VALIDATION,
    WINDOWS_NAME,
    Clusters,
    SignatureParts,
    assign_fates,
    cluster,
    duplicates_report,
    exact_pairs,
    hash_texts,
    match_slice,
    repeated_windows,
    unique_pairs,
    windows_of,
    without_windows,
)
from pretraining.data.dedup.minhash import MinHashSpec, agreement, bands_and_rows, recall_at, sign_piece
from pretraining.data.dedup.ngrams import BATCH_CHARACTERS, units_of
from pretraining.data.manifest import read_manifest, report_text
from pretraining.data.tools.inspect import Inspection
from pretraining.errors import UserError
from pretraining.recipe import load_recipe
from tests.gear.finished_data import prepare, recipe_for, write_jsonl
from tests.gear.similar_texts import jaccard, ngram_sets, write_signatures

VOCABULARY = [f"w{number}x" for number in range(3000)]
NO_CLUSTERS = Clusters(np.zeros(0, np.int64), np.zeros(0, np.int64))


def prose(chance: random.Random, num_words: int = 200) -> str:
    return " ".join(chance.choices(VOCABULARY, k=num_words))


def edited(text: str, num_edits: int, chance: random.Random) -> str:
    words = text.split()
    for place in chance.sample(range(len(words)), num_edits):
        words[place] = "edited"
    return " ".join(words)


@cache
def planted(num_documents: int = 300) -> tuple[list[str], dict[tuple[int, int], float]]:
    """Texts of which half are copies with 1 to 8 edits, and every pair's exact similarity above 0.5."""
    chance = random.Random(0)
    texts = [prose(chance) for _ in range(num_documents // 2)]
    texts += [edited(text, 1 + number % 8, chance) for number, text in enumerate(texts)]
    chance.shuffle(texts)
    sets = ngram_sets(texts, 5)
    truth = {(a, b): jaccard(sets[a], sets[b]) for b in range(len(sets)) for a in range(b)}
    return texts, {pair: value for pair, value in truth.items() if value > 0.5}


def pieces_of(folder, texts: list[str], num_pieces: int) -> list[tuple[Path, list[str]]]:
    """The texts in pieces, and the folder of each."""
    parts = np.array_split(np.arange(len(texts)), num_pieces)
    return [(folder / str(n), [texts[number] for number in part]) for n, part in enumerate(parts)]


def signed(folder, texts: list[str], spec: MinHashSpec, num_pieces: int) -> SignatureParts:
    pieces = pieces_of(folder, texts, num_pieces)
    return SignatureParts([write_signatures(path, sign_piece(some, spec)) for path, some in pieces])


def hashed(folder, texts: list[str], num_pieces: int) -> list[Path]:
    pieces = pieces_of(folder, texts, num_pieces)
    for path, some in pieces:
        path.mkdir(parents=True, exist_ok=True)
        np.save(path / HASHES_NAME, hash_texts(some))
    return [path for path, _ in pieces]


def as_set(found: np.ndarray, least: float = 0.0) -> set[tuple[int, int]]:
    return set(found[found["similarity"] >= least][["first", "second"]].tolist())


def test_short_documents_are_not_collapsed(tmp_path):
    """Below n words only documents of equal words are duplicates; those without words never are."""
    texts = ["one two", "one two three", "One, two!", "one", "...", "!!!", "", "two one", "three"]
    spec = MinHashSpec()
    found = match_slice(signed(tmp_path, texts, spec, 2), spec)
    assert as_set(found) == {(0, 2)}


def test_the_agreement_of_signatures_estimates_the_jaccard_similarity():
    """Unbiased, with the binomial spread that the accepted estimate is derived from."""
    chance = random.Random(2)
    spec, errors = MinHashSpec(), []
    for _ in range(60):
        text = prose(chance)
        pair = [text, edited(text, chance.randrange(1, 12), chance)]
        sketch = sign_piece(pair, spec).sketch
        errors.append(agreement(sketch[:1], sketch[1:])[0] - jaccard(*ngram_sets(pair, 5)))
    assert abs(np.mean(errors)) < 0.012
    assert np.std(errors) < 1.4 * spec.deviation


def test_recall_and_precision_on_planted_duplicates(tmp_path):
    """Found: all but 2 % of the pairs at 0.8. Accepted: at most 2 % below 0.7."""
    texts, truth = planted()
    spec = MinHashSpec()
    found = as_set(match_slice(signed(tmp_path, texts, spec, 3), spec), spec.accepted)
    alike = {pair for pair, similarity in truth.items() if similarity >= 0.8}
    assert len(alike) > 60
    assert len(alike & found) >= 0.98 * len(alike)
    assert sum(truth.get(pair, 0) >= 0.7 for pair in found) >= 0.98 * len(found)


@pytest.mark.parametrize("range_documents", [duplicates.RANGE_DOCUMENTS, 50])
def test_pairs_and_clusters_do_not_depend_on_pieces_or_slices(tmp_path, monkeypatch, range_documents):
    """One piece in one slice, or seven pieces in five slices and shuffled: the same pairs and clusters."""
    monkeypatch.setattr(duplicates, "RANGE_DOCUMENTS", range_documents)
    texts = [*planted()[0][:200], *planted()[0][:20]]
    spec = MinHashSpec()
    whole = match_slice(signed(tmp_path / "one", texts, spec, 1), spec)
    parts = signed(tmp_path / "seven", texts, spec, 7)
    slices = [match_slice(parts, spec, number, 5) for number in (3, 0, 4, 1, 2)]
    assert unique_pairs(slices).tolist() == whole.tolist()
    for one, other in zip(cluster([whole], 0.7), cluster(slices, 0.7), strict=True):
        assert np.array_equal(one, other)
    exact = [exact_pairs(hashed(tmp_path / str(n), texts, n), k, n) for n in (1, 4) for k in range(n)]
    expected = {(number, 200 + number) for number in range(20)}
    assert as_set(exact[0]) == expected == set().union(*map(as_set, exact[1:]))


def test_exact_duplicates_are_equal_texts_alone(tmp_path):
    """Case, spaces and punctuation make a different text; three copies are one cluster under the first."""
    texts = ["a b", "A b", "a b", "a  b", "a b", "a b."]
    found = exact_pairs(hashed(tmp_path, texts, 2))
    assert as_set(found) == {(0, 2), (0, 4)}


def test_a_bucket_of_many_documents_is_bounded_and_stays_one_cluster(tmp_path):
    """200 equal documents among two other clusters: found whole, with pairs in proportion to documents."""
    chance = random.Random(3)
    crowd, other = prose(chance), prose(chance)
    texts = [crowd, other] * 100 + [prose(chance) for _ in range(20)]
    spec = MinHashSpec()
    found = match_slice(signed(tmp_path, texts, spec, 2), spec)
    assert len(found) <= (NEIGHBOURS + 1) * len(texts)
    clusters = cluster([found], spec.accepted)
    assert clusters.dropped.tolist() == list(range(2, 200))
    assert set(clusters.representatives.tolist()) == {0, 1}


def chain(edges: list[tuple[int, int]], similarity: float = 1.0) -> np.ndarray:
    return np.array([(a, b, similarity) for a, b in edges], PAIR)


def test_clusters_are_the_connected_components():
    """Against a plain search, on random graphs and on a long chain given backwards."""
    chance = random.Random(4)
    for num_edges in (0, 1, 50, 300):
        edges = [tuple(sorted(chance.sample(range(400), 2))) for _ in range(num_edges)]
        label = list(range(400))
        for _ in range(400):
            for a, b in edges:
                label[a] = label[b] = min(label[a], label[b])
        clusters = cluster([chain(edges[::2]), chain(edges[1::2])], 0.5)
        assert clusters.representatives_of(np.arange(400)).tolist() == label
    long = chain([(n, n + 1) for n in range(5000)][::-1])
    assert set(cluster([long], 0.5).representatives.tolist()) == {0}


def test_the_first_source_keeps_its_copy():
    """The keep-rule and its report: dropped within and between sources, with examples."""
    clusters = cluster([chain([(1, 4), (4, 5), (6, 7)])], 0.5)
    fates = assign_fates([np.zeros(count, bool) for count in (3, 3, 2)], clusters)
    report = duplicates_report(clusters, fates, [0, 1, 1], ["web", "books"], "{}:{}".format)
    assert clusters.dropped.tolist() == [4, 5, 7]
    assert report["fates"] == {"train": 5, "validation": 0, "duplicate": 3, "validation_twin": 0}
    assert report["dropped_for_kept_in"] == {"books": {"web": 2, "books": 1}}
    assert (report["clusters"], report["largest_cluster"], report["dropped"]) == (2, 3, 3)
    assert report["examples"][0] == {"dropped": "1:1", "kept": "0:1"}


def test_pairs_below_what_is_accepted_do_not_cluster():
    """A guarded pair keeps both documents."""
    assert not len(cluster([chain([(0, 1)], 0.7)], MinHashSpec().accepted).members)


def test_a_cluster_lies_on_the_side_of_its_first_document():
    """With copies removed or kept, no pair of a cluster is parted into train and validation."""
    clusters = cluster([chain([(0, 2), (1, 3)])], 0.5)
    draws = [np.array([True, False]), np.array([False, True, True])]
    removed = np.concatenate(assign_fates(draws, clusters))
    kept = np.concatenate(assign_fates(draws, clusters, remove=False))
    assert removed.tolist() == [VALIDATION, TRAIN, DUPLICATE, DUPLICATE, VALIDATION]
    assert kept.tolist() == [VALIDATION, TRAIN, VALIDATION, TRAIN, VALIDATION]


@pytest.mark.parametrize("remove", [True, False])
def test_validation_has_no_near_twin_in_train(tmp_path, remove):
    """Planted twins at 0.8 and above: none is parted over many draws; validation loses nothing to the guard."""
    texts, truth = planted()
    spec = MinHashSpec()
    found = match_slice(signed(tmp_path, texts, spec, 3), spec)
    clusters = cluster([found], spec.accepted)
    alike = [pair for pair, similarity in truth.items() if similarity >= 0.8]
    parted = {True: 0, False: 0}
    for seed in range(20):
        draws = np.random.default_rng(seed).random(len(texts)) < 0.1
        random_fates = assign_fates([draws], NO_CLUSTERS)[0]
        fates = assign_fates([draws], clusters, [found], remove)[0]
        unguarded = assign_fates([draws], clusters, [], remove)[0]
        assert np.array_equal(fates == VALIDATION, unguarded == VALIDATION)
        for guarded, sides in ((True, fates[alike]), (False, random_fates[alike])):
            parted[guarded] += sum(sorted(pair) == [TRAIN, VALIDATION] for pair in sides.tolist())
    assert parted[False] > 100 and parted[True] == 0


def test_the_guard_drops_the_document_in_train():
    """Of a parted pair below the threshold, train loses; validation stays what was drawn."""
    related = chain([(0, 1), (1, 2)], 0.7)
    fates = assign_fates([np.array([False, True, False])], NO_CLUSTERS, [related])
    assert fates[0].tolist() == [TWIN, VALIDATION, TWIN]


def test_bands_and_rows_follow_from_the_threshold():
    """Derived or default, the S-curve passes the threshold at 0.99 or higher."""
    assert MinHashSpec.from_recipe({}) == MinHashSpec()
    for threshold in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        bands, rows = bands_and_rows(threshold)
        assert bands * rows <= 256 and recall_at(threshold, bands, rows) >= 0.99
    assert MinHashSpec.from_recipe({"bands": 14, "rows": 8, "unit": None}).num_hashes == 112


UNFIT = {
    "rows": {"bands": 4},
    "9000": {"bands": 1000, "rows": 9},
    "threshold": {"threshold": 1.5},
    "ngram": {"ngram": 0},
}


@pytest.mark.parametrize("named", UNFIT)
def test_settings_that_do_not_fit_are_refused_in_one_line(named):
    """The message names the key."""
    with pytest.raises(UserError, match=f"data.dedup.minhash.*{named}"):
        load_recipe("features/gpt2", [f"data.dedup={json.dumps({'minhash': UNFIT[named]})}"])


# N-grams.


def normalised(text: str) -> str:
    """The stated normalisation, written a second time: character by character."""
    text = unicodedata.normalize("NFKC", text)
    return "".join(c.lower() if unicodedata.category(c)[0] in "LMN" else " " for c in text)


def plain_words(text: str) -> list[str]:
    return re.sub(r"([\u0e00-\u0eff\u3040-\u30ff\u4e00-\u9fff])", r" \1 ", normalised(text)).split()


def plain_characters(text: str) -> str:
    """Words with one space between; letters of a script without spaces stand beside their neighbours."""
    return " ".join(normalised(text).split())


@pytest.mark.parametrize("unit", ["words", "characters"])
@pytest.mark.parametrize("n", [1, 5, 13])
def test_ngrams_are_those_of_the_stated_normalisation(unit, n):
    """Two texts share hashes exactly where they share n-grams, counted by plain Python sets."""
    chance = random.Random(n)
    texts = ["", "a", "!?", "Hello, World! foo_bar 12", "日本語 text です。と", "ﬁne Ünïcode ① x", " a b "]
    texts.append("a b c d e f g")
    texts += ["".join(chance.choices("aB ,.é語3_\n", k=chance.randrange(60))) for _ in range(200)]
    sets, expected = ngram_sets(texts, n, unit), []
    for units in map(plain_words if unit == "words" else plain_characters, texts):
        grams = {tuple(units[i : i + n]) for i in range(max(len(units) - n + 1, 1))}
        expected.append(grams if units else set())
    assert [len(found) for found in sets] == [len(truth) for truth in expected]
    for first, second in product(range(0, len(sets), 3), range(len(sets))):
        shared = len(np.intersect1d(sets[first], sets[second]))
        assert shared == len(expected[first] & expected[second])


@pytest.mark.parametrize("unit", ["words", "characters", "written"])
def test_a_text_hashes_alike_alone_and_among_others(unit):
    """Batches, neighbours and wide characters beside a text, in front or behind, leave its n-grams what they are."""
    chance = random.Random(1)
    long = prose(chance, BATCH_CHARACTERS // 4)
    texts = [prose(chance, 40), "日本", long, "", "two words", "x" * 5000]
    together = ngram_sets(texts, 5, unit)
    for text, found in zip(texts, together, strict=True):
        assert np.array_equal(ngram_sets([text], 5, unit)[0], found)


NUM_WORDS = 8


def draw_passages(seed: int) -> list[str]:
    """Texts of words and separators of all kinds; some hold a passage of another, one repeats itself."""
    draw = random.Random(seed)
    words = [*(f"w{number}" for number in range(3000)), "naïve", "数据", "e\u0301"]

    def text(count: int) -> str:
        return "".join(draw.choice(words) + draw.choice([" ", ", ", "\n", "  "]) for _ in range(count))

    texts, passage = [text(draw.randint(0, 60)) for _ in range(60)], text(20)
    texts[5] += passage + texts[6]
    texts[20] = f"(({text(5)}{passage}{text(4)}"
    texts[41], texts[50] = passage, "line one two " * 40
    return texts


def repeats_straight(texts: list[str], fates: list[int]) -> list[set[int]]:
    """The windows of each text that one before it holds, by a look at every window; texts of validation come first."""
    seen, found = {}, [set() for _ in texts]
    for number in [n for fate in (VALIDATION, TRAIN) for n in range(len(texts)) if fates[n] == fate]:
        text = texts[number]
        starts = [*units_of([text], "written").starts.tolist(), len(text)]
        units = [text[a:b] + "\n" * (b == len(text)) for a, b in pairwise(starts)]
        for place in range(len(units) - NUM_WORDS + 1):
            first = seen.setdefault(tuple(units[place : place + NUM_WORDS]), (number, place))
            if first[0] != number or place - first[1] >= NUM_WORDS:
                found[number].add(place)
    return found


@pytest.mark.parametrize("fates", [{}, {41: VALIDATION, 5: DUPLICATE}])
def test_repeated_passages_are_those_that_a_look_at_every_window_finds(tmp_path, monkeypatch, fates):
    """In any number of slices and ranges; none of a document that is left out, and validation keeps its own."""
    texts = draw_passages(1)
    decided = np.array([fates.get(number, TRAIN) for number in range(len(texts))], np.uint8)
    pieces, folders, bases = [slice(0, 25), slice(25, 30), slice(30, 60)], [], [0]
    for number, piece in enumerate(pieces):
        (folder := tmp_path / str(number)).mkdir()
        hashes, counts = windows_of(texts[piece], NUM_WORDS)
        np.save(folder / WINDOWS_NAME, hashes)
        np.save(folder / FIRST_NAME, np.cumsum([0, *counts]))
        folders.append(folder)
        bases += (bases[-1] + np.cumsum(counts)).tolist()
    expected = repeats_straight(texts, decided.tolist())
    assert sum(map(len, expected)) > 40 and bool(expected[41]) != bool(fates)
    for ranges, num_slices in ((1, 1), (1, 3), (8, 3)):
        monkeypatch.setattr("pretraining.data.dedup.duplicates.num_ranges", lambda _, ranges=ranges: ranges)
        found: list[set[int]] = [set() for _ in texts]
        for part in range(num_slices):
            slice_ = (NUM_WORDS, part, num_slices)
            windows, owners = repeated_windows(folders, [decided[piece] for piece in pieces], *slice_)
            for window, owner in zip(windows.tolist(), owners.tolist(), strict=True):
                found[owner].add(window - bases[owner])
        assert found == expected
    repeated = [np.array([*each], int) for each in expected]
    cut = [without_windows(text, each, NUM_WORDS) for text, each in zip(texts, repeated, strict=True)]
    assert cut[0] == texts[0] and len(cut[50]) < 50
    assert cut[50].startswith("line one two line one two line one two ")
    assert all(set(after.split()) <= set(text.split()) for after, text in zip(cut, texts, strict=True))


@pytest.mark.parametrize("remove", [True, False])
def test_passages_are_cut_out_of_the_prepared_text_or_counted(tmp_path, remove):
    """The first text that holds one keeps it, and its own words stay in every text; a text of nothing else is gone."""
    passage = " ".join(f"p{number}" for number in range(12)) + " "
    texts = [f"{' '.join(f'a{n}x{m}' for m in range(20))} " for n in range(30)]
    texts[3], texts[9] = texts[3] + passage + "end", f"{texts[9]}{passage}end of it"
    texts[20] = texts[21] = passage + "end"
    write_jsonl(tmp_path / "texts.jsonl", texts)
    dedup = {"exact": False, "passages": {"words": NUM_WORDS, "remove": remove}}
    recipe = recipe_for(tmp_path / "texts.jsonl", dedup=dedup, tokenizer={"train_vocab_size": 270})
    folder = prepare(tmp_path / "data", recipe)
    inspection = [Inspection(folder, split) for split in ("train", "validation")]
    found = [each.document(n)["text"] for each in inspection for n in range(each.split.num_documents)]
    report = read_manifest(folder)["passages"]
    assert report["documents"] == 3 and report["repeated"] == 5 + 6 + 6 and report["remove"] is remove
    assert "runs of 8 words occurred before, in 3 documents" in report_text(read_manifest(folder))
    if remove:
        assert sum(passage in text for text in found) == 1 and len(found) == 29
        assert all(any(text.startswith(own[:40]) for text in found) for own in texts[:20])
    else:
        assert sorted(found) == sorted(texts)
