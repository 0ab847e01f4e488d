"""Validation sources of one's own: prepared with the rest, part of the data's identity, measured by their names."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from pretraining.data.corpus import open_sources
from pretraining.data.finished import open_finished
from pretraining.data.manifest import read_manifest, verify
from pretraining.data.preparation.plan import Preparation
from pretraining.data.preparation.prepare import prepare_data
from pretraining.data.preparation.stage import run_task
from pretraining.data.prepared import open_prepared
from pretraining.data.tools.inspect import measure_data, stats_text
from pretraining.evaluation.validation import Validation, validation_sets
from pretraining.recipe import load_recipe
from tests.gear.finished_data import make_texts, prepare, recipe_for, refusal, write_jsonl
from tests.gear.runs import SMALL_RECIPE


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Texts to train on, and letters and laws to validate on."""
    folder = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate(("web", "code", "letters", "laws")):
        write_jsonl(folder / f"{name}.jsonl", make_texts(40, seed))
    return folder


def own(files: Path, *names: str, **section) -> dict:
    """A section of validation sources; a name may stand behind that of its file and a colon."""
    pairs = [(name.partition(":")[0], name.rpartition(":")[2]) for name in names]
    sources = [{"path": str(files / f"{file}.jsonl"), "name": name} for file, name in pairs]
    return {"sources": sources, **section}


def texts_of(split, decoder) -> list[str]:
    return [decoder.decode(split.document(number).tokens.tolist()) for number in range(split.num_documents)]


def test_their_texts_are_validation_whole_and_in_order(files, tmp_path):
    """Beside a held-out share: shards of their own behind it, whole, with names, counts and checksums."""
    recipe = recipe_for(files / "web.jsonl", validation=own(files, "letters", "laws"))
    folder = prepare(tmp_path, recipe)
    data, manifest = open_finished(folder), read_manifest(folder)
    split = data.split("validation")
    sources = [split.source_of(entry) for entry in split.shard_entries]
    assert sources == ["web.jsonl", "letters", "laws"]
    verify(folder, manifest)
    texts, web = texts_of(split, data.decoder()), texts_in(files / "web.jsonl")
    assert texts[-80:] == texts_in(files / "letters.jsonl") + texts_in(files / "laws.jsonl")
    assert sorted([*texts_of(data.split("train"), data.decoder()), *texts[:-80]]) == sorted(web)
    assert [entry["documents"] for entry in manifest["validation_sources"]] == [40, 40]
    assert manifest["sources"][0]["documents"] == 40
    assert "letters" in stats_text(measure_data(folder, show_progress=False))
    alone = read_manifest(prepare(tmp_path / "alone", recipe_for(files / "web.jsonl")))
    assert manifest["splits"]["train"]["checksum"] == alone["splits"]["train"]["checksum"]


def texts_in(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


IDENTITY = {
    "other sources": (("letters", "laws"), "data.validation.sources.1: null there"),
    "another file": (("laws:letters",), "data.validation.sources.0.path: "),
    "none": ((), "data.validation: {"),
}


@pytest.mark.parametrize("names, said", IDENTITY.values(), ids=IDENTITY)
def test_they_are_part_of_the_identity(files, tmp_path, names, said):
    """Another name needs no new preparation; another text does, and so does a file that changed."""
    letters, root = tmp_path / "letters.jsonl", tmp_path / "data"
    letters.write_bytes((files / "letters.jsonl").read_bytes())

    def recipe(section: dict | None):
        return recipe_for(files / "web.jsonl", validation=section)

    section = {"sources": [{"path": str(letters), "name": "letters"}]}
    prepare(root, recipe(section))
    prepare(root, recipe({"sources": [{"path": str(letters), "name": "mail"}]}))
    for action in (prepare_data, open_prepared):
        refused = refusal(action, recipe(own(files, *names) if names else None), root)
        assert said in refused
    assert "or, if no run made from this data is to go on" in refused
    write_jsonl(letters, make_texts(50, 9))
    assert "data.validation.sources.0: " in (refused := refusal(prepare_data, recipe(section), root))
    assert "bytes in 1 file there" in refused


EVERY_SECOND = {"rule": "blocklist", "words": [str(number) for number in range(0, 40, 2)]}
"""A rule that rejects half of all texts by their number."""


def test_filters_leave_them_alone_unless_asked_for(files, tmp_path):
    for asked, kept in ((False, 40), (True, 20)):
        section = own(files, "letters", filters=asked)
        recipe = recipe_for(files / "web.jsonl", filters=[EVERY_SECOND], validation=section)
        manifest = read_manifest(prepare(tmp_path / str(asked), recipe))
        assert manifest["sources"][0]["documents"] == 20
        assert manifest["validation_sources"][0]["documents"] == kept


@pytest.mark.parametrize("filtered", [False, True])
def test_their_first_documents_are_taken_up_to_a_cap(files, tmp_path, filtered, monkeypatch):
    """Documents, or tokens with the document that reaches them; counted after filters; nothing behind is read."""
    for name in ("PIECE_BYTES", "BATCH_BYTES"):
        monkeypatch.setattr(f"pretraining.data.corpus.{name}", 3000)
    broken = tmp_path / "letters.jsonl"
    broken.write_text((files / "letters.jsonl").read_text() + "this is no JSON\n")
    rules = [EVERY_SECOND] if filtered else []
    section = own(files, "letters", "laws", filters=filtered)
    section["sources"][0] |= {"path": str(broken), "max_documents": 7}
    section["sources"][1] |= {"max_tokens": 1000, "max_documents": 30}
    folder = prepare(tmp_path / "data", recipe_for(files / "web.jsonl", validation=section, filters=rules))
    data, split = open_finished(folder), open_finished(folder).split("validation")
    letters, laws = read_manifest(folder)["validation_sources"]
    assert letters["documents"] == 7 and letters["name"] == "letters"
    texts = texts_of(split, data.decoder())[-letters["documents"] - laws["documents"] :]
    assert texts[:7] == texts_in(files / "letters.jsonl")[filtered :: 1 + filtered][:7]
    last = split.document(split.num_documents - 1)
    assert laws["tokens"] >= 1000 > laws["tokens"] - len(last.tokens)
    # Another cap is another data set.
    section["sources"][0]["max_documents"] = 8
    larger = recipe_for(files / "web.jsonl", validation=section, filters=rules)
    said = "data.validation.sources.0.max_documents: 7 there, 8 here"
    assert said in refusal(prepare, tmp_path / "data", larger)


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
    section = own(files, "letters", filters=True)
    recipe = recipe_for(files / "web.jsonl", validation=section, filters=[{"rule": "pii"}])
    sources = open_sources(recipe.data)
    made = Preparation.of(recipe, sources, tmp_path / "corpus", [each.fingerprint() for each in sources])
    made.work.mkdir(parents=True)
    made.save()
    loaded = Preparation.load(made.work)
    assert [stage.keys for stage in loaded.stages] == [stage.keys for stage in made.stages]
    names = "clean clean-validation tokenizer tokenize tokenize-validation"
    assert " ".join(stage.name for stage in made.stages) == names
    for stage in loaded.stages:
        run_task(stage, 0)
    assert not any(stage.pending() for stage in made.stages)


MIXED = {"mixture": {"temperature": 2}}
MISTAKES = {
    "data.validation_share: is 0, and there is no data.validation": {"validation_share": 0},
    "'letters' like that of validation source 0": {"validation": ("letters", "laws:letters")},
    "'web' like that of a training source": {"validation": ("letters:web",)},
    "'mixture' like that of the run's mixture": {"validation": ("letters:mixture",), **MIXED},
    "data.sources.0.name: is 'mixture', which is what validations call": {"named": "mixture", **MIXED},
    "data.decontaminate.validation: is true, and there is no": {"decontaminate": {"validation": True}},
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_one_line(files, said):
    data = {"validation": (), "named": "web", **MISTAKES[said]}
    named = {data.pop("named"): "web", "code": "code"}
    data["sources"] = [{"path": str(files / f"{file}.jsonl"), "name": name} for name, file in named.items()]
    data["validation"] = own(files, *data["validation"]) if data["validation"] else None
    settings = [f"data.{key}={json.dumps(value)}" for key, value in data.items()]
    assert said in refusal(load_recipe, "features/gpt2", settings)


def test_one_too_short_for_a_block_is_refused(files, tmp_path):
    short = write_jsonl(tmp_path / "short.jsonl", ["a few words"])
    section = {"sources": [{"path": str(short), "name": "notes"}]}
    said = refusal(prepare, tmp_path / "data", recipe_for(files / "web.jsonl", validation=section))
    assert "data.validation.sources.0 (notes) has" in said and "one block of 33" in said


def recipe_of(files: Path, root: Path, weights: tuple, **data):
    """A whole recipe of web and code, small enough for their text, with its data prepared."""
    sources = own(files, "web", "code")["sources"]
    for source, weight in zip(sources, weights, strict=True):
        source |= {"weight": weight, "max_epochs": 99}
    section = {**SMALL_RECIPE["data"], "tokenizer": {"train_vocab_size": 300}, "sources": sources, **data}
    path = root / "recipe.json"
    path.write_text(json.dumps({**SMALL_RECIPE, "data": section}))
    recipe = load_recipe(str(path))
    prepare_data(recipe, root / "data", show_progress=False)
    return recipe, open_prepared(recipe, root / "data").for_run(recipe)


HALVES = [("web", False, Fraction(3, 4)), ("code", False, Fraction(1, 4))]
OF_BOTH = ("letters:web", "laws:code", "laws:more")
SETS = {
    "beside a share": (("letters",), 0.2, [*HALVES, ("letters", True, 0)], {"mixture"}),
    "in its place": (("letters",), 0, [("letters", False, 0)], set()),
    "of a mixture": (OF_BOTH, 0, [*HALVES, ("more", False, 0)], {"mixture"}),
}


@pytest.mark.parametrize("given, share, expected, others", SETS.values(), ids=SETS)
def test_sets_say_what_they_stand_for(files, tmp_path, given, share, expected, others):
    """Beside a share they stand for nothing of the mixture; without one, for the source of their name.

    The recipe knows the names that the run measures, and any of them may judge.
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
