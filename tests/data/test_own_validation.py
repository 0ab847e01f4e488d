"""Validation sources of one's own: prepared with the rest, part of the data's identity, measured by their names."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from pretraining.data.corpus import open_sources
from pretraining.data.manifest import read_manifest, verify
from pretraining.data.preparation.plan import Preparation
from pretraining.data.preparation.prepare import prepare_data
from pretraining.data.preparation.stage import run_task
from pretraining.data.prepared import open_prepared
from pretraining.data.tools.finished import open_finished
from pretraining.data.tools.inspect import measure_data, stats_text
from pretraining.errors import UserError
from pretraining.evaluation.validation import Validation, validation_sets
from pretraining.recipe import load_recipe
from tests.data.test_data_prep import make_texts, prepare, recipe_for, write_jsonl
from tests.gear.finished_data import refusal
from tests.gear.runs import SMALL_RECIPE


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Texts to train on, and letters and laws to validate on."""
    folder = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate(("web", "code", "letters", "laws")):
        write_jsonl(folder / f"{name}.jsonl", make_texts(40, seed))
    return folder


def own(files: Path, *names: str, **section) -> dict:
    return {
        "sources": [{"path": str(files / f"{file}.jsonl"), "name": name} for file, name in map(_pair, names)],
        **section,
    }


def _pair(name: str) -> list[str]:
    return name.split(":") if ":" in name else [name, name]


def texts_of(split, decoder) -> list[str]:
    return [decoder.decode(split.document(number).tokens.tolist()) for number in range(split.num_documents)]


def test_their_texts_are_validation_whole_and_in_order(files, tmp_path):
    """Beside a held-out share: shards of their own behind it, whole, with names, counts and checksums."""
    recipe = recipe_for(files / "web.jsonl", validation=own(files, "letters", "laws"))
    folder = prepare(tmp_path, recipe)
    data, manifest = open_finished(folder), read_manifest(folder)
    split = data.split("validation")
    sources = [split.source_of(entry) for entry in split.shard_entries]
    assert sources == ["web.jsonl", "letters", "laws"] and verify(folder)
    found = {
        name: [json.loads(line)["text"] for line in (files / f"{name}.jsonl").read_text().splitlines()]
        for name in ("web", "letters", "laws")
    }
    texts = texts_of(split, data.decoder())
    assert texts[-80:] == [*found["letters"], *found["laws"]]
    trained = texts_of(data.split("train"), data.decoder())
    assert sorted([*trained, *texts[:-80]]) == sorted(found["web"])
    assert [entry["documents"] for entry in manifest["validation_sources"]] == [40, 40]
    assert manifest["sources"][0]["documents"] == 40
    assert "letters" in stats_text(measure_data(folder, show_progress=False))
    alone = prepare(tmp_path / "alone", recipe_for(files / "web.jsonl"))
    train = [read_manifest(place)["splits"]["train"]["checksum"] for place in (folder, alone)]
    assert train[0] == train[1]


def test_without_a_share_all_text_is_trained_on(files, tmp_path):
    """validation_share 0: the sources of validation are the validation."""
    share = {"validation_share": 0, "validation": own(files, "letters")}
    folder = prepare(tmp_path, recipe_for(files / "web.jsonl", **share))
    splits = read_manifest(folder)["splits"]
    assert splits["train"]["documents"] == splits["validation"]["documents"] == 40


IDENTITY = {
    "other sources": (("letters", "laws"), "data.validation.sources.1: null there"),
    "another file": (("laws:letters",), "data.validation.sources.0.path: "),
    "none": ((), "data.validation: {"),
}


@pytest.mark.parametrize("names, said", IDENTITY.values(), ids=IDENTITY)
def test_they_are_part_of_the_identity(files, tmp_path, names, said):
    """Another name needs no new preparation; another text does, and so does a file that changed."""
    letters = tmp_path / "letters.jsonl"
    letters.write_bytes((files / "letters.jsonl").read_bytes())
    section = {"sources": [{"path": str(letters), "name": "letters"}]}
    prepare(tmp_path / "data", recipe_for(files / "web.jsonl", validation=section))
    renamed = {"sources": [{"path": str(letters), "name": "mail"}]}
    prepare_data(recipe_for(files / "web.jsonl", validation=renamed), tmp_path / "data", show_progress=False)
    other = recipe_for(files / "web.jsonl", validation=own(files, *names) if names else None)
    for action in (prepare_data, open_prepared):
        with pytest.raises(UserError) as refused:
            action(other, tmp_path / "data")
        assert said in str(refused.value)
    assert "or, if no run made from this data is to go on" in str(refused.value)
    write_jsonl(letters, make_texts(50, 9))
    with pytest.raises(UserError, match=r"data\.validation\.sources\.0: .* bytes in 1 file there"):
        prepare_data(recipe_for(files / "web.jsonl", validation=section), tmp_path / "data")


def test_filters_leave_them_alone_unless_asked_for(files, tmp_path):
    """A rule that rejects half of all texts by their number."""
    rule = {"rule": "blocklist", "words": [str(number) for number in range(0, 40, 2)]}
    for asked, kept in ((False, 40), (True, 20)):
        section = own(files, "letters", filters=asked)
        recipe = recipe_for(files / "web.jsonl", filters=[rule], validation=section)
        manifest = read_manifest(prepare(tmp_path / str(asked), recipe))
        assert manifest["sources"][0]["documents"] == 20
        assert manifest["validation_sources"][0]["documents"] == kept


@pytest.mark.parametrize("filtered", [False, True])
def test_their_first_documents_are_taken_up_to_a_cap(files, tmp_path, filtered, monkeypatch):
    """Documents, or tokens with the document that reaches them; counted after filters; nothing behind is read."""
    for name in ("PIECE_BYTES", "BATCH_BYTES"):
        monkeypatch.setattr(f"pretraining.data.corpus.{name}", 3000)
    lines = (files / "letters.jsonl").read_text().splitlines()
    broken = tmp_path / "letters.jsonl"
    broken.write_text("\n".join([*lines, "this is no JSON"]) + "\n")
    rules = (
        {"filters": [{"rule": "blocklist", "words": [str(n) for n in range(0, 40, 2)]}]} if filtered else {}
    )
    section = own(files, "letters", "laws", filters=filtered)
    section["sources"][0] |= {"path": str(broken), "max_documents": 7}
    section["sources"][1] |= {"max_tokens": 1000, "max_documents": 30}
    folder = prepare(tmp_path / "data", recipe_for(files / "web.jsonl", validation=section, **rules))
    manifest, data = read_manifest(folder), open_finished(folder)
    letters, laws = manifest["validation_sources"]
    assert letters["documents"] == 7 and letters["name"] == "letters"
    texts = texts_of(data.split("validation"), data.decoder())[-letters["documents"] - laws["documents"] :]
    kept = [json.loads(line)["text"] for line in lines][filtered :: 1 + filtered]
    assert texts[:7] == kept[:7]
    last = data.split("validation").document(data.split("validation").num_documents - 1)
    assert laws["tokens"] >= 1000 > laws["tokens"] - len(last.tokens)
    # Another cap is another data set.
    section["sources"][0]["max_documents"] = 8
    with pytest.raises(UserError, match=r"data\.validation\.sources\.0\.max_documents: 7 there, 8 here"):
        prepare(tmp_path / "data", recipe_for(files / "web.jsonl", validation=section, **rules))


def test_training_text_that_holds_a_stretch_of_them_is_dropped(files, tmp_path):
    """decontaminate.validation: 13 words of a letter inside a web text; the report names the set.

    Of a capped source, the documents behind the cap may be in training text.
    """
    letters = [text.split() for text in make_texts(40, 2)]
    copies = [" ".join(["so", *letters[number][5:45], "it ends"]) for number in (3, 7)]
    web = write_jsonl(tmp_path / "web.jsonl", [*make_texts(40), *copies])
    for cap, dropped in ((None, 2), (7, 1)):
        section = {"validation": own(files, "letters"), "decontaminate": {"validation": True}}
        section["validation"]["sources"][0]["max_documents"] = cap
        manifest = read_manifest(prepare(tmp_path / str(cap), recipe_for(web, **section)))
        assert manifest["sources"][0]["documents"] == 42 - dropped
        assert manifest["decontamination"]["sets"]["letters"]["dropped"] == dropped


def test_tasks_in_other_processes_prepare_them_too(files, tmp_path):
    """What a node reads from the work folder names the same tasks as the command's own process."""
    recipe = recipe_for(
        files / "web.jsonl", validation=own(files, "letters", filters=True), filters=[{"rule": "pii"}]
    )
    sources = open_sources(recipe.data)
    made = Preparation.of(recipe, sources, tmp_path / "corpus", [each.fingerprint() for each in sources])
    made.work.mkdir(parents=True)
    made.save()
    loaded = Preparation.load(made.work)
    assert [stage.keys for stage in loaded.stages] == [stage.keys for stage in made.stages]
    assert [stage.name for stage in made.stages] == [
        "clean", "clean-validation", "tokenizer", "tokenize", "tokenize-validation"
    ]  # fmt: skip
    for stage in loaded.stages:
        run_task(stage, 0)
    assert not any(stage.pending() for stage in made.stages)


MISTAKES = {
    "nothing to validate on": (
        {"validation_share": 0},
        "data.validation_share: is 0, and there is no data.validation",
    ),
    "a name twice": (
        {"validation": ("letters", "laws:letters")},
        "'letters' like that of validation source 0",
    ),
    "a training source's name": ({"validation": ("letters:web",)}, "'web' like that of a training source"),
    "the mixture's name": (
        {"validation": ("letters:mixture",), "mixture": {"temperature": 2}},
        "'mixture' like that of the run's mixture",
    ),
    "a training source of that name": (
        {"mixture": {"temperature": 2}, "named": "mixture"},
        "data.sources.0.name: is 'mixture', which is what validations call the whole mixture",
    ),
    "decontamination without them": (
        {"decontaminate": {"validation": True}},
        "data.decontaminate.validation: is true, and there is no data.validation",
    ),
}


@pytest.mark.parametrize("data, said", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line(files, tmp_path, data, said):
    names, section = data.get("validation"), {key: value for key, value in data.items() if key != "named"}
    section |= {"validation": own(files, *names)} if names else {}
    called = {"web": data.get("named", "web"), "code": "code"}
    sources = [{"path": str(files / f"{file}.jsonl"), "name": name} for file, name in called.items()]
    values = {**SMALL_RECIPE, "data": {**SMALL_RECIPE["data"], "sources": sources, **section}}
    path = tmp_path / "own.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError) as refused:
        load_recipe(str(path))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_one_too_short_for_a_block_is_refused(files, tmp_path):
    short = write_jsonl(tmp_path / "short.jsonl", ["a few words"])
    section = {"sources": [{"path": str(short), "name": "notes"}]}
    said = refusal(lambda: prepare(tmp_path / "data", recipe_for(files / "web.jsonl", validation=section)))
    assert "data.validation.sources.0 (notes) has" in said and "one block of 33" in said


def recipe_of(files: Path, root: Path, weights: tuple, **data):
    """A whole recipe of web and code, small enough for their text, with its data prepared."""
    sources = [
        {"path": str(files / f"{name}.jsonl"), "name": name, "weight": weight, "max_epochs": 99}
        for name, weight in zip(("web", "code"), weights, strict=True)
    ]
    section = {**SMALL_RECIPE["data"], "tokenizer": {"train_vocab_size": 300}, "sources": sources, **data}
    path = root / "recipe.json"
    path.write_text(json.dumps({**SMALL_RECIPE, "data": section}))
    recipe = load_recipe(str(path))
    prepare_data(recipe, root / "data", show_progress=False)
    return recipe, open_prepared(recipe, root / "data").for_run(recipe)


HALVES = [("web", False, Fraction(3, 4)), ("code", False, Fraction(1, 4))]
SETS = {
    "beside a share": (("letters",), 0.2, [*HALVES, ("letters", True, 0)], {"mixture"}),
    "in its place": (("letters",), 0, [("letters", False, 0)], set()),
    "of a mixture": (
        ("letters:web", "laws:code", "laws:more"),
        0,
        [*HALVES, ("more", False, 0)],
        {"mixture"},
    ),
}


@pytest.mark.parametrize("given, share, expected, others", SETS.values(), ids=SETS)
def test_sets_say_what_they_stand_for_and_any_of_their_names_may_judge(
    files, tmp_path, given, share, expected, others
):
    """Beside a share they stand for nothing of the mixture; without one, for the source of their name.

    The recipe knows the names that the run measures.
    """
    section = {"validation": own(files, *given), "validation_share": share}
    recipe, data = recipe_of(files, tmp_path, (3, 1), **section)
    sets = validation_sets(data, recipe)
    assert [(each.name, each.beside, each.share) for each in sets] == expected
    names = {name for name, _, _ in expected} | others
    logged = Validation(sets, recipe).names
    assert set(recipe.data.validation_names) == names
    assert {name.removesuffix("_loss") for name in logged if name.endswith("_loss")} == names
    for name in logged:
        for written in (name, f"eval/{name}"):
            judged = load_recipe(str(recipe.path), [f"evaluation.metric={written}"])
            assert judged.evaluation.metric == name == judged.to_dict()["evaluation"]["metric"]
    if share:
        note = data.mixture.table(recipe.num_samples)["validation_note"]
        assert "compare the training loss with eval/mixture_loss" in note
